"""Strong couplings are the same on every device, and keep iterations few where coefficients jump or depend on the direction."""

import numpy as np
import pytest
import scipy.sparse
from awkward_systems import diffusion
from kernel_targets import TARGETS

from penstock.fem import Cantilever
from penstock.solvers import cg, multigrid
from penstock.solvers.amg import strength
from penstock.solvers.amg.strength import strong_graph
from penstock.spmv import BsrMatrix
from penstock.spmv.compilation.table import find_kernel
from penstock.spmv.products.block_rows import BlockRows, rows_of


def blocks_of(size, seed=0):
    """Rows of a symmetric pattern of random blocks of very different sizes."""
    rng = np.random.default_rng(seed)
    pattern = scipy.sparse.random_array((90, 90), density=0.08, rng=rng).tocsr()
    pattern = (pattern + pattern.T + scipy.sparse.eye_array(90)).tocsr()
    pattern.sort_indices()
    blocks = rng.normal(size=(pattern.nnz, size, size)) * 10.0 ** rng.uniform(-4, 0, (pattern.nnz, 1, 1))
    return BlockRows(0, pattern.indptr.astype(np.int64), pattern.indices.astype(np.int32), blocks, 90)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("target", TARGETS)
def test_couplings_are_those_of_the_definition(target, size):
    rows, theta = blocks_of(size), 0.02
    norms = np.linalg.norm(rows.blocks, axis=(1, 2))
    of_row = np.repeat(np.arange(90), np.diff(rows.offsets))
    diagonal = norms[of_row == rows.columns]
    strong = (norms**2 > theta**2 * diagonal[of_row] * diagonal[rows.columns]) & (of_row != rows.columns)

    whole = BlockRows(0, rows.offsets, rows.columns, rows.blocks, 90)
    parts = [whole.part(0, 37), whole.part(37, 90)]
    with target.running():
        there = BlockRows(0, *(target.put(array) for array in (rows.offsets, rows.columns, rows.blocks)), 90)
        found_norms, counts, columns = target.put(np.zeros(90)), [], []
        find_kernel("graph", "measure_diagonal", target.device_kind)(there, found_norms)
        for part in parts:
            arrays = (target.put(array) for array in (part.offsets, part.columns, part.blocks))
            there, count = (
                BlockRows(part.start, *arrays, 90),
                target.put(np.zeros(len(part.offsets) - 1, dtype=np.int64)),
            )
            find_kernel("graph", "count_strong", target.device_kind)(there, theta, found_norms, count)
            counts.append(target.get(count))
            offsets = np.concatenate([[0], np.cumsum(counts[-1])])
            listed = target.put(np.empty(offsets[-1], dtype=np.int32))
            arguments = (there, theta, found_norms, target.put(offsets), listed)
            find_kernel("graph", "list_strong", target.device_kind)(*arguments)
            columns.append(target.get(listed))

    np.testing.assert_allclose(target.get(found_norms), diagonal, rtol=1e-14)
    assert np.array_equal(np.concatenate(counts), np.bincount(of_row[strong], minlength=90))
    assert np.array_equal(np.concatenate(columns), rows.columns[strong])


def test_smooth_elasticity_is_coupled_as_its_pattern_is():
    rows = rows_of(Cantilever(nodes=6, dof=3).matrix("bsr"))
    of_row = np.repeat(np.arange(216), np.diff(rows.offsets))
    coupled = (of_row != rows.columns) & rows.blocks.any(axis=(1, 2))  # entries of clamped nodes are zero

    offsets, columns = strong_graph(rows)

    assert np.array_equal(columns, rows.columns[coupled])
    assert np.array_equal(np.diff(offsets), np.bincount(of_row[coupled], minlength=216))


@pytest.mark.parametrize("kind", ["jumps", "anisotropic", "channels"])
def test_jumps_and_directions_cost_few_iterations(kind, monkeypatch):
    rng, coefficients, stretch = np.random.default_rng(0), np.ones((20, 20, 20)), (1.0, 1.0, 1.0)
    if kind == "jumps":
        coefficients = np.kron(np.where(rng.random((5, 5, 5)) < 0.5, 1.0, 1e4), np.ones((4, 4, 4)))
    elif kind == "anisotropic":
        stretch = (1.0, 1.0, 1e-3)
    else:
        coefficients[:, 5, 5] = coefficients[12, :, 9] = coefficients[3, 14, :] = 1e6
    A, b = diffusion(coefficients, stretch), rng.normal(size=8000)

    strong = cg(A, b, M=multigrid(A), rtol=1e-8)
    monkeypatch.setattr(strength, "STRONG", 0.0)
    all_couplings = cg(A, b, M=multigrid(A), rtol=1e-8)

    assert strong.converged
    assert strong.iterations <= 12
    assert all_couplings.iterations >= 1.5 * strong.iterations


def test_a_node_without_strong_couplings_is_left_to_the_smoother():
    A = Cantilever(nodes=11, dof=3).matrix("bsr").to_csr().tolil()
    held = np.arange(600, 900, 30)
    A[held, held] = 1e12
    A = BsrMatrix.from_csr(A.tocsr(), block_size=3)
    b = np.random.default_rng(1).normal(size=A.shape[0])

    assert cg(A, b, M=multigrid(A), rtol=1e-8).iterations < 40


def test_a_hub_does_not_couple_all_aggregates():
    """Its row of a smoothed prolongator would name every aggregate, and the coarse matrix would be dense."""
    n = 6000
    chain = scipy.sparse.coo_array((np.ones(n - 1), (np.arange(n - 1), np.arange(1, n))), shape=(n, n))
    spokes = scipy.sparse.coo_array((np.full(n - 1, 1e-3), (np.zeros(n - 1, int), np.arange(1, n))), shape=(n, n))
    W = (chain + spokes).tocsr()
    W = W + W.T
    A = (scipy.sparse.diags_array(W.sum(axis=1) + 1e-6) - W).tocsr()
    A.sort_indices()
    b = np.random.default_rng(2).normal(size=n)

    M = multigrid(A)

    assert M.operator_complexity < 2
    assert cg(A, b, M=M, rtol=1e-8).iterations < 40


def test_lines_of_strong_couplings_do_not_fill_in():
    """Weak couplings between lines would couple all aggregates with all others after a few levels."""
    n = 24
    line = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n))
    one = scipy.sparse.eye_array(n)
    A = scipy.sparse.kron(scipy.sparse.kron(line, one), one) + scipy.sparse.kron(scipy.sparse.kron(one, line), one)
    A = (A + 1e6 * scipy.sparse.kron(scipy.sparse.kron(one, one), line)).tocsr()
    A.sort_indices()
    b = np.random.default_rng(4).normal(size=n**3)

    M = multigrid(A)

    assert M.operator_complexity < 2
    result = cg(A, b, M=M, rtol=1e-8)
    assert result.converged
    assert result.iterations < 15
