"""What ranks check together: ``mpiexec -n 3 python rank_checks.py RESULTS.json [gpu|nccl]``.

Every check returns claims, true or not. Matrices and vectors are on the host, on GPUs with messages through the host, or on GPUs
with messages of NCCL.
"""

import json
import sys
from pathlib import Path

import numpy as np
import scipy.sparse
from level_checks import coarse_levels, different_arguments, elements, images, streamed, strong_couplings, wide_edges
from rank_systems import (
    BEAM,
    LOAD,
    MATRIX,
    NODES,
    WAY,
    all_rows,
    device,
    even,
    get,
    message_of,
    partitions,
    put,
    shared,
)

from penstock.distributed import DistributedMatrix, MpiCommunicator, NcclCommunicator, RowPartition
from penstock.solvers import StopReason, block_cg, block_jacobi, cg, chebyshev, minres


def products(ranks):
    rng = np.random.default_rng(0)
    bound = 20 * np.finfo(float).eps
    for partition in partitions(ranks.size):
        own = partition.of(ranks.rank)
        for parameters in ({}, {"format": "bsr", "block_size": 3}, {"format": "symmetric_bsr", "block_size": 3}):
            A = shared(ranks, partition, **parameters)
            for shape in ((3 * NODES,), (3 * NODES, 3)):
                x, before = rng.normal(size=shape), rng.normal(size=shape)
                out = put(ranks, before[own])
                A.apply(put(ranks, x[own]), out, alpha=-0.5, beta=2.0)
                expected = (-0.5 * (MATRIX @ x) + 2.0 * before)[own]
                scale = (abs(MATRIX) @ abs(x) + 2 * abs(before))[own]
                yield "products", bool((abs(get(out) - expected) <= bound * scale).all())
            x = abs(x[:, 0])
            absolute = get(A.apply_absolute(put(ranks, x[own])))
            yield "absolute products", np.allclose(absolute, (abs(MATRIX) @ x)[own], rtol=1e-13)
            blocks = get(A.diagonal_blocks(3)).reshape(-1, 3, 3)
            yield (
                "diagonal blocks",
                all(
                    np.array_equal(block, MATRIX[row : row + 3, row : row + 3].toarray())
                    for row, block in zip(range(own.start, own.stop, 3), blocks, strict=True)
                ),
            )


def messages(ranks):
    A, own = even(ranks)
    messages, sums = ranks.messages, ranks.reductions
    A.apply(put(ranks, LOAD[own]))
    yield "one message goes to each neighbour", ranks.messages - messages == len(A.couplings)
    sums = ranks.reductions
    result = cg(A, put(ranks, LOAD[own]), M=block_jacobi(A, 3), rtol=1e-30, maxiter=60)
    # Beside two sums an iteration, a look adds up and agrees, and a start and an end take norms.
    yield f"sums: {ranks.reductions - sums}", ranks.reductions - sums <= 4 * result.iterations + 30
    sums, looks = ranks.reductions, 256
    result = cg(A, put(ranks, LOAD[own]), M=block_jacobi(A, 3), rtol=1e-10, check_every=looks, reductions=1)
    found = ranks.reductions - sums  # of as many iterations as are started before the first look
    yield f"one sum an iteration: {found}", result.converged and found <= looks + 30
    true = np.linalg.norm(LOAD - MATRIX @ all_rows(ranks, result.x)) / np.linalg.norm(LOAD)
    yield f"with one sum: {true}", true <= 1.1e-10


def solves(ranks):
    whole = BEAM.matrix()
    for partition in list(partitions(ranks.size))[:3]:
        own = partition.of(ranks.rank)
        A, b = shared(ranks, partition, format="bsr", block_size=3), put(ranks, LOAD[own])
        ways = {
            "plain": lambda A: None,
            "block Jacobi": lambda A: block_jacobi(A, 3),
            "Chebyshev": lambda A: chebyshev(A, 5, block_size=3),
        }
        for name, make in ways.items():
            alone = cg(whole, LOAD, M=make(whole), rtol=1e-10)
            found = cg(A, b, M=make(A), rtol=1e-10)
            x = all_rows(ranks, found.x)
            true = np.linalg.norm(LOAD - MATRIX @ x) / np.linalg.norm(LOAD)
            yield f"{name}: converged", found.converged and true <= 1.1e-10
            yield f"{name}: residual told", np.isclose(true, found.true_residual, rtol=1e-3)
            few = max(1, alone.iterations // 50)
            yield f"{name}: {found.iterations}, {alone.iterations}", abs(found.iterations - alone.iterations) <= few
            yield f"{name}: solution", np.allclose(x, alone.x, rtol=0, atol=1e-7 * abs(alone.x).max())


def many_right_hand_sides(ranks):
    rng = np.random.default_rng(1)
    B = rng.normal(size=(3 * NODES, 4))
    B[:, 2] = 0
    A, own = even(ranks, format="bsr", block_size=3)
    alone = block_cg(BEAM.matrix(), B, M=block_jacobi(BEAM.matrix(), 3), rtol=1e-9)
    found = block_cg(A, put(ranks, B[own]), M=block_jacobi(A, 3), rtol=1e-9)
    true = np.linalg.norm(B - MATRIX @ all_rows(ranks, found.x), axis=0)
    yield "converged", found.converged and bool((true <= 1.1e-9 * np.linalg.norm(B, axis=0)).all())
    yield f"iterations {found.iterations}, {alone.iterations}", abs(found.iterations - alone.iterations) <= 1


def minimum_residuals(ranks):
    B = np.random.default_rng(2).normal(size=(3 * NODES, 2))
    A, own = even(ranks, format="bsr", block_size=3)
    for b in (LOAD, B):
        alone = minres(BEAM.matrix(), b, M="absolute_jacobi", rtol=1e-9)
        found = minres(A, put(ranks, b[own]), M="absolute_jacobi", rtol=1e-9)
        true = np.linalg.norm(b - MATRIX @ all_rows(ranks, found.x), axis=0) / np.linalg.norm(b, axis=0)
        yield f"converged to {true}", found.converged and bool((true <= 1.1e-9).all())
        few = max(2, alone.iterations // 20)
        yield f"iterations {found.iterations}, {alone.iterations}", abs(found.iterations - alone.iterations) <= few


def refusals(ranks):
    """What is wrong on one rank is an error on all, which names the rank."""
    A, own = even(ranks)
    last = ranks.rank == ranks.size - 1

    def refused(call, *words):
        told = message_of(call)
        return bool(told) and (last or all(word in told for word in words))

    b = put(ranks, LOAD[own])
    bad = b.copy()
    bad[0] = np.nan if last else b[0]
    name = f"rank {ranks.size - 1} of {ranks.size}"
    yield "NaN on one rank", refused(lambda: cg(A, bad), name, "nan")
    yield "a short b", refused(lambda: cg(A, b[1:] if last else b), name, "shape")
    yield "another tolerance", refused(lambda: cg(A, b, rtol=1e-3 if last else 1e-4), "rtol")
    yield "another limit", refused(lambda: cg(A, b, maxiter=3 if last else 4), "maxiter")
    wrong = MATRIX[own][:, : -3 if last else None]
    partition = RowPartition.even(3 * NODES, ranks.size, multiple=3)
    yield "wrong rows", refused(lambda: DistributedMatrix.from_rows(wrong, partition, ranks), name, "shape")
    lower = scipy.sparse.csr_array(scipy.sparse.tril(MATRIX))[own]
    yield "half a pattern", refused(lambda: DistributedMatrix.from_rows(lower, partition, ranks), "symmetric")
    cut = RowPartition((0, *[4] * (ranks.size - 1), 3 * NODES))
    rows = MATRIX[cut.of(ranks.rank)]
    yield "cut blocks", refused(lambda: DistributedMatrix.from_rows(rows, cut, ranks, block_size=3), "blocks")
    negative = scipy.sparse.csr_array(
        MATRIX - scipy.sparse.diags(np.where(np.arange(3 * NODES) == 3 * NODES - 3, 1e9, 0))
    )
    indefinite = shared(ranks, partition, negative)
    yield "an indefinite block", refused(lambda: block_jacobi(indefinite, 3), name, "positive definite")
    stopped = cg(A, b, monitor=(lambda record: record.iteration >= 3) if last else None, check_every=1)
    yield "one rank's monitor stops all", (stopped.reason, stopped.iterations) == (StopReason.STOPPED, 3)


def disagreements(ranks):
    """What decides which sums follow must be the same on all ranks."""
    A, own = even(ranks, format="bsr", block_size=3)
    last, b = ranks.rank == ranks.size - 1, put(ranks, LOAD[own])

    yield "x0", "x0" in message_of(lambda: cg(A, b, b if last else None))
    M = block_jacobi(A, 3)
    yield "M", "preconditioner" in message_of(lambda: cg(A, b, M=M if last else None))
    yield "a degree", "degree" in message_of(lambda: chebyshev(A, 5 if last else 7, block_size=3))
    cut = 3 * (NODES // 2 + (1 if last else 0))
    partition = RowPartition((0, *[cut] * (ranks.size - 1), 3 * NODES))
    rows = MATRIX[partition.of(ranks.rank)]
    yield "a partition", "partition" in message_of(lambda: DistributedMatrix.from_rows(rows, partition, ranks))
    narrow = scipy.sparse.csr_array(MATRIX[own].astype(np.float32 if last else np.float64))
    even_rows = RowPartition.even(3 * NODES, ranks.size, multiple=3)
    yield "a type", "dtype" in message_of(lambda: DistributedMatrix.from_rows(narrow, even_rows, ranks))


def stored_in_single_precision(ranks):
    """Values may be stored as float32; vectors stay float64."""
    partition = RowPartition.even(3 * NODES, ranks.size, multiple=3)
    own = partition.of(ranks.rank)
    rows = BEAM.rows(own.start, own.stop, values_dtype=np.float32)
    for parameters in (
        {"format": "csr"},
        {"format": "symmetric_bsr", "block_size": 3},
        {"format": "bsr", "block_size": 3},
    ):
        A = DistributedMatrix.from_rows(rows, partition, ranks, device=device(ranks), **parameters)
        found = all_rows(ranks, A @ put(ranks, LOAD[own]))
        yield f"{parameters}", A.dtype == np.float64 and np.allclose(found, MATRIX @ LOAD, rtol=1e-5, atol=1e-5)


def start_vector(ranks):
    """The bound of the eigenvalues does not depend on the ranks beyond rounding."""
    A, _ = even(ranks, format="bsr", block_size=3)
    alone, found = (chebyshev(matrix, 9, block_size=3).high for matrix in (BEAM.matrix(), A))
    yield f"{found} and {alone}", abs(found - alone) <= 1e-9 * alone


def restarts(ranks):
    """A solve that other ranks began goes on; each rank takes its rows of their state."""
    A, own = even(ranks)
    M, folder = block_jacobi(A, 3), Path(sys.argv[1]).parent
    names = ("rho", "iteration", "matrix_norm", "drift", "first_drift")
    saved = folder / "state.npz"
    if saved.exists():
        whole = np.load(saved)
        begun = cg(A, put(ranks, LOAD[own]), M=M, maxiter=0).state
        for vector in "xrp":
            getattr(begun, vector)[...] = put(ranks, whole[vector][own])
        for name in names:
            setattr(begun, name, type(getattr(begun, name))(whole[name]))
        found = cg(A, put(ranks, LOAD[own]), M=M, rtol=1e-10, state=begun)
        alone = cg(BEAM.matrix(), LOAD, M=block_jacobi(BEAM.matrix(), 3), rtol=1e-10)
        total = found.state.iteration
        yield f"{total}, {alone.iterations}", found.converged and abs(total - alone.iterations) <= 2
    state = cg(A, put(ranks, LOAD[own]), M=M, rtol=1e-10, maxiter=20).state
    vectors = {name: all_rows(ranks, getattr(state, name)) for name in "xrp"}
    ranks.barrier()
    if ranks.rank == 0:
        numbers = {name: getattr(state, name) for name in names}
        np.savez(saved, **vectors, **numbers)
    yield "interrupted", state.iteration == 20


def passed_on(ranks):
    """The first rank sees the rows of all in order, a few at a time; a rank without rows is passed over."""
    whole = np.arange(6.0 * 7).reshape(7 * 3, 2)
    bounds = (0, *[9] * (ranks.size - 1), 21)
    own = RowPartition(bounds).of(ranks.rank)
    parts = list(ranks.passed_to_first(put(ranks, whole[own]), 4))
    yield "others see none", ranks.rank == 0 or not parts
    if ranks.rank == 0:
        yield "in order", np.array_equal(np.concatenate(parts), whole)
        yield "a few at a time", max(map(len, parts)) <= 4


CHECKS = (
    passed_on,
    products,
    messages,
    solves,
    many_right_hand_sides,
    minimum_residuals,
    coarse_levels,
    strong_couplings,
    different_arguments,
    images,
    elements,
    refusals,
    disagreements,
    stored_in_single_precision,
    wide_edges,
    start_vector,
    restarts,
    streamed,
)


def main():
    with (NcclCommunicator if WAY == "nccl" else MpiCommunicator)() as ranks:
        found = {}
        for check in CHECKS:
            claims = [(claim, bool(holds)) for claim, holds in check(ranks)]
            found[check.__name__] = ranks.exchange_objects([claims] * ranks.size)
        if ranks.rank == 0:
            Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
