"""The kinds of cases: each takes a seed and a folder of whole files, and returns a word for its outcome, or raises.

A :class:`PenstockError` is an answer too: the runner counts it as *refused*. Whatever else is raised is a fault, as is a claim of
convergence that is false.
"""

import contextlib
import io
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import commands
import endurance
import foreign
import mutations
import numpy as np
import prepared_systems
import processes
import scipy.io
import scipy.sparse
import whole_calls
from claims import honest

from penstock import solve
from penstock.experiments import read_experiment
from penstock.experiments.reporting.checkpoint import read_checkpoint
from penstock.experiments.systems.system_files import read_guess, read_right_hand_sides
from penstock.fem import Cantilever
from penstock.files.registry import read_matrix
from penstock.solvers import block_cg, cg
from penstock.solvers.preconditioner_spec import preconditioner_spec
from penstock.spmv import PenstockError, StoreError, format_named
from penstock.streaming import FileStore, HostStore, StreamedMatrix
from penstock.streaming.testing import FaultyStore

BEAM = Cantilever(nodes=(9, 5, 5), dof=3)
FORMATS = ("csr", "bsr", "ell", "sell", "hyb", "sliced_bsr", "sliced_ell", "symmetric_bsr", "coo")
BLOCKED = ("bsr", "sliced_bsr", "symmetric_bsr")
Case = Callable[[int, Path], str]


@dataclass(frozen=True)
class Kind:
    """A kind of cases: in one of how many rounds there is one, and its limits of time and memory."""

    case: Case
    every: int = 1
    seconds: int = 60
    memory_nbytes: int | None = 8 << 30


def prepare(base: Path) -> None:
    """Write the whole files that cases alter; it also compiles the kernels that they use."""
    A = BEAM.matrix("csr").to_csr()
    x = np.random.default_rng(0).standard_normal(A.shape[1])
    np.save(base / "b.npy", x)
    np.save(base / "product.npy", A @ x)
    scipy.io.mmwrite(base / "a.mtx", A[:60, :60], symmetry="symmetric")
    scipy.sparse.save_npz(base / "a.npz", A)
    foreign.write_files(base, A)
    commands.write_folders(base)
    for name in FORMATS:
        options = {"block_size": 3} if name in BLOCKED else {}
        FileStore.create(base / name, [A[:288], A[288:576], A[576:]], format=name, **options).close()
    from penstock.experiments.reporting.checkpoint import Checkpoint, write_checkpoint

    for name, B in (("one", x), ("many", np.stack([x, x[::-1]], axis=1))):
        M = preconditioner_spec("jacobi").build(BEAM.matrix())
        state = (cg if name == "one" else block_cg)(BEAM.matrix(), B, M=M, maxiter=4, rtol=1e-9).state
        write_checkpoint(base / f"{name}.npz", Checkpoint(state, settings={"model": {"nodes": [9, 5, 5]}}))
    for seed in range(40):
        for case in (
            store,
            system,
            whole_calls.nearly_symmetric,
            whole_calls.singular,
            whole_calls.scaled,
            whole_calls.thresholds,
            prepared_systems.prepared,
        ):
            with contextlib.suppress(PenstockError, AssertionError):  # faults are for the campaign itself
                case(seed, base)


def yaml_file(seed: int, base: Path) -> str:
    """Read an altered experiment."""
    rng, path = random.Random(seed), base / f"{seed}.yaml"
    path.write_text(mutations.altered_text((base / "finished.yaml").read_text(), rng), errors="replace")
    read_experiment(path).cantilever()
    return "read"


def matrix_market(seed: int, base: Path) -> str:
    """Read an altered Matrix Market file."""
    rng, path = random.Random(seed), base / f"{seed}.mtx"
    path.write_text(mutations.altered_text((base / "a.mtx").read_text(), rng, most=2), errors="replace")
    matrix = read_matrix(path).matrix
    assert np.isfinite(matrix.data).all()
    assert matrix.indices.size == 0 or 0 <= matrix.indices.min() <= matrix.indices.max() < matrix.shape[1]
    return "read"


def matrix_archive(seed: int, base: Path) -> str:
    """Read an altered ``.npz`` file."""
    rng, path = random.Random(seed), base / f"{seed}.npz"
    content = (base / "a.npz").read_bytes()
    path.write_bytes((mutations.altered_archive if rng.random() < 0.7 else mutations.altered_bytes)(content, rng))
    matrix = read_matrix(path).matrix
    assert matrix.indices.size == 0 or 0 <= matrix.indices.min() <= matrix.indices.max() < matrix.shape[1]
    return "read"


def array(seed: int, base: Path) -> str:
    """Read altered right-hand sides and guesses."""
    rng, path = random.Random(seed), base / f"{seed}.npy"
    if rng.random() < 0.5:
        buffer = io.BytesIO()
        np.save(buffer, mutations.altered_array(np.load(base / "b.npy"), rng))
        path.write_bytes(buffer.getvalue())
    else:
        path.write_bytes(mutations.altered_bytes((base / "b.npy").read_bytes(), rng))
    read = read_guess(path, (675, 1)) if rng.random() < 0.5 else read_right_hand_sides(path)
    assert np.isfinite(read).all()
    return "read"


def checkpoint(seed: int, base: Path) -> str:
    """Resume from an altered checkpoint, with and without a checksum that fits."""
    rng, path = random.Random(seed), base / f"{seed}.npz"
    name = rng.choice(["one", "many"])
    content = (base / f"{name}.npz").read_bytes()
    path.write_bytes((mutations.altered_checkpoint if rng.random() < 0.7 else mutations.altered_archive)(content, rng))
    state = read_checkpoint(path, BEAM.unknowns).state
    x = np.load(base / "b.npy")
    A, B = BEAM.matrix(), x if name == "one" else np.stack([x, x[::-1]], axis=1)
    M = preconditioner_spec("jacobi").build(A)
    result = (cg if name == "one" else block_cg)(A, B, M=M, rtol=1e-9, state=state, maxiter=2000)
    return honest(A.to_csr(), B, result, 1e-9)


def store(seed: int, base: Path) -> str:
    """Multiply with an altered store."""
    rng, path = random.Random(seed), base / f"{seed}-store"
    shutil.copytree(base / rng.choice(FORMATS), path)
    try:
        mutations.alter_store(path, rng)
        with FileStore(path) as opened:
            budget = rng.choice([opened.index.nbytes, 2 * max(opened.index.sizes["whole"])])
            with StreamedMatrix(opened, budget) as streamed:
                y = streamed @ np.load(base / "b.npy")
        return "as before" if np.allclose(y, np.load(base / "product.npy")) else "another matrix"
    finally:
        shutil.rmtree(path)


def fault(seed: int, base: Path) -> str:
    """Solve with a store of which a read fails, and then without: the fault is one error, and leaves nothing behind."""
    rng = random.Random(seed)
    beam, b = Cantilever(nodes=(17, 5, 5), dof=3), Cantilever(nodes=(17, 5, 5), dof=3).load()
    host = HostStore.create(beam.subdivisions(8, rng.choice(["csr", "bsr", "symmetric_bsr"])))
    last = rng.randrange(400)

    def fail(read: int, number: int) -> None:
        if read == last:
            raise rng.choice(
                [StoreError("the disk is gone"), OSError("input/output error"), MemoryError(), KeyboardInterrupt()]
            )

    budget = 2 * max(host.index.sizes["whole"])
    try:
        with StreamedMatrix(FaultyStore(host, fail), budget) as streamed:
            cg(streamed, b, rtol=1e-8)
        outcome = "no fault reached"
    except (StoreError, OSError, MemoryError, KeyboardInterrupt):
        outcome = "one error"
    with StreamedMatrix(host, budget) as streamed:
        honest(beam.matrix("csr").to_csr(), b, cg(streamed, b, rtol=1e-8), 1e-8)
    return outcome


def system(seed: int, base: Path) -> str:
    """Solve a random system with a random solver, preconditioner and format, resident or streamed."""
    rng = random.Random(seed)
    numbers = np.random.default_rng(seed)
    n = 3 * rng.randint(4, 120)
    T = scipy.sparse.random_array((n, n), density=min(1.0, rng.choice([2, 5, 9]) / n), rng=numbers, format="csr")
    scale = scipy.sparse.diags_array(np.exp(rng.choice([0, 1, 3]) * numbers.standard_normal(n)))
    A = scipy.sparse.csr_array(scale @ (T @ T.T + rng.choice([1e-3, 0.1, 1]) * scipy.sparse.eye_array(n)) @ scale)
    A = scipy.sparse.csr_array((A + A.T) / 2)
    A.sort_indices()
    columns = rng.choice([1, 1, 3, 7])
    B = numbers.standard_normal((n, columns))
    B = B[:, 0] if columns == 1 else B
    if columns > 1 and rng.random() < 0.3:
        B[:, 1] = rng.choice([0.0, 1.0]) * B[:, 0]
    rtol, maxiter = rng.choice([1e-4, 1e-8, 1e-12]), rng.choice([5, 3000])
    if rng.random() < 0.2:
        return honest(A, B, solve(A, B, rtol=rtol, maxiter=maxiter), rtol)
    name = rng.choice(FORMATS)
    options = {"block_size": rng.choice([1, 3])} if name in BLOCKED else {}
    kind = rng.choice(["none", "jacobi", "block_jacobi", "chebyshev", "gauss_seidel", "incomplete_cholesky"])
    streamed = rng.random() < 0.5 and kind not in ("gauss_seidel", "incomplete_cholesky")

    def solved(operator: object) -> object:
        M = preconditioner_spec(kind, block_size=options.get("block_size", 1)).build(operator)
        return (cg if columns == 1 else block_cg)(operator, B, M=M, rtol=rtol, maxiter=maxiter)

    if not streamed:
        return honest(A, B, solved(format_named(name).from_csr(A, **options)), rtol)
    host = HostStore.create(A, format=name, **options)
    with StreamedMatrix(host, rng.choice([1, 3]) * max(host.index.sizes["whole"]) * 2) as operator:
        return honest(A, B, solved(operator), rtol)


CASES = {
    "YAML": Kind(yaml_file),
    "Matrix Market": Kind(matrix_market),
    ".npz": Kind(matrix_archive),
    ".npy": Kind(array),
    ".mat": Kind(foreign.mat),
    "HDF5": Kind(foreign.hdf5),
    "CSC and COO": Kind(foreign.indices),
    "budgets of a builder": Kind(foreign.builder, every=5, seconds=240),
    "checkpoint": Kind(checkpoint),
    "store": Kind(store),
    "failing read": Kind(fault),
    "random system": Kind(system),
    "symmetric to rounding": Kind(whole_calls.nearly_symmetric),
    "scaled rows": Kind(whole_calls.scaled),
    "singular": Kind(whole_calls.singular),
    "memory near a threshold": Kind(whole_calls.thresholds),
    "prepared": Kind(prepared_systems.prepared),
    "store altered while open": Kind(processes.altered_while_open),
    "forks": Kind(processes.forks, every=5),
    "threads": Kind(processes.threads, every=5),
    # Commands take as long as hundreds of files.
    "results folder": Kind(commands.altered_folder, every=20, seconds=180, memory_nbytes=None),
    "scarce": Kind(commands.scarce, every=40, seconds=180, memory_nbytes=None),
    "killed and resumed": Kind(commands.killed, every=40, seconds=180, memory_nbytes=None),
    "killed while storing": Kind(commands.killed_while_storing, every=20, seconds=180, memory_nbytes=None),
    "repeated": Kind(endurance.repeated, every=100, seconds=300),
}
__all__ = ["CASES", "Kind", "prepare"]
