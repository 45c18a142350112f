"""Gauss-Seidel is the product of its dense factors; colourings are proper; CG takes fewer iterations with it."""

import numpy as np
import pytest
import scipy.sparse
from kernel_targets import TARGETS

from penstock.fem import Cantilever
from penstock.solvers import block_cg, block_jacobi, cg, gauss_seidel, preconditioner_spec
from penstock.solvers.triangular import colours as colouring
from penstock.solvers.triangular.block_entries import block_entries
from penstock.solvers.triangular.colours import colour_rows
from penstock.solvers.triangular.gauss_seidel import _sweep
from penstock.solvers.triangular.ordered_rows import Diagonal
from penstock.spmv import CsrMatrix, InputError


def laplacian(edge, points=7):
    """The 7- or 27-point Laplacian of a cube of nodes."""
    one = scipy.sparse.eye_array(edge)
    beside = scipy.sparse.diags_array([np.ones(edge - 1)] * 2, offsets=[-1, 1])
    if points == 27:
        full = one + beside
        A = 27 * scipy.sparse.eye_array(edge**3) - scipy.sparse.kron(full, scipy.sparse.kron(full, full))
    else:
        terms = [(beside, one, one), (one, beside, one), (one, one, beside)]
        A = 6.1 * scipy.sparse.eye_array(edge**3) - sum(
            scipy.sparse.kron(a, scipy.sparse.kron(b, c)) for a, b, c in terms
        )
    A = A.tocsr()
    A.sort_indices()
    return A


def dense_preconditioner(A, ranks, size, omega):
    """The product of dense inverses."""
    block = np.repeat(ranks, size)
    own = np.arange(len(A)) // size
    same = own[:, None] == own[None, :]
    D = np.where(same, A, 0.0)
    L = np.where(~same & (block[:, None] > block[None, :]), A, 0.0)
    lower, upper = D / omega + L, D / omega + L.T
    return np.linalg.inv(upper) @ ((2 - omega) / omega * D) @ np.linalg.inv(lower)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("columns", [0, 5])
@pytest.mark.parametrize(("order", "dof", "omega"), [("colours", 1, 1.0), ("colours", 3, 1.3), ("levels", 3, 0.8)])
def test_a_sweep_is_the_product_of_its_factors(target, columns, order, dof, omega):
    beam = Cantilever(nodes=(4, 3, 3), dof=dof)
    matrix = beam.matrix("bsr" if dof > 1 else "csr")
    r, before = np.random.default_rng(1).normal(size=(2, matrix.shape[0], columns) if columns else (2, matrix.shape[0]))
    with target.running():
        entries = block_entries(target.put_matrix(matrix))
        sweep, colours = _sweep(entries, order, omega, target.device_kind)
        ranks = target.get(colour_rows(entries, target.device_kind)) if colours else np.arange(len(r) // dof)
        out = target.put(before.copy())
        sweep.apply(target.put(r), out, 0.5, 2.0)
        found = target.get(out)

    expected = 0.5 * dense_preconditioner(matrix.to_csr().toarray(), ranks, dof, omega) @ r + 2.0 * before
    assert np.allclose(found, expected, rtol=0, atol=1e-12 * abs(expected).max())


@pytest.mark.parametrize("sweeps", [1, 3])
def test_the_preconditioner_is_symmetric_and_several_sweeps_are_residual_corrections(sweeps):
    A = laplacian(4)
    M = gauss_seidel(A, sweeps=sweeps, omega=1.2)
    one = dense_preconditioner(A.toarray(), colour_rows(block_entries(A), "cpu"), 1, 1.2)
    expected = np.zeros_like(one)
    for _ in range(sweeps):
        expected = expected + one @ (np.eye(64) - A @ expected)

    found = M @ np.eye(64)

    assert M.colours == 2
    assert np.allclose(found, expected, atol=1e-13)
    assert np.allclose(found, found.T, atol=1e-13)
    out = np.ones(64)
    M.apply(np.arange(64.0), out, alpha=0.5, beta=2.0)
    assert np.allclose(out, 0.5 * expected @ np.arange(64.0) + 2.0)
    assert np.allclose(M.apply(np.arange(64.0), alpha=3.0), 3.0 * expected @ np.arange(64.0))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("points", "count"), [(7, 2), (27, 8)])
def test_greedy_colours_of_stencils(target, points, count):
    A = laplacian(5, points)
    with target.running():
        colours = target.get(colour_rows(block_entries(target.put_matrix(CsrMatrix.from_csr(A))), target.device_kind))

    rows, columns = A.tocoo().coords
    assert not (colours[rows] == colours[columns])[rows != columns].any()
    assert colours.max() + 1 == count
    expected = np.zeros_like(colours)
    colouring._colour(A.indptr.astype(np.int64), A.indices.astype(np.int32), expected)
    assert np.array_equal(colours, expected)


@pytest.mark.parametrize("target", TARGETS)
def test_more_colours_than_a_mask_has_bits(target):
    A = scipy.sparse.csr_array(np.ones((70, 70)))
    with target.running():
        colours = target.get(colour_rows(block_entries(target.put_matrix(CsrMatrix.from_csr(A))), target.device_kind))
    assert np.array_equal(colours, np.arange(70))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("order", ["colours", "natural"])
def test_a_pattern_that_is_not_symmetric_is_refused(target, order):
    """Also where no two rows of a colour need each other."""
    A = CsrMatrix.from_csr(scipy.sparse.csr_array(np.array([[2.0, 0, 0], [1, 4, 0], [0, 3, 5]])))
    with target.running(), pytest.raises(InputError, match="row 1 has an entry without a mirror image"):
        _sweep(block_entries(target.put_matrix(A)), order, 1.0, target.device_kind)


@pytest.mark.parametrize("order", ["colours", "levels", "natural", "auto"])
def test_cg_takes_fewer_iterations(order):
    beam = Cantilever(nodes=(9, 7, 7), dof=3)
    A, b = beam.matrix("bsr"), beam.load()
    plain = cg(A, b, M=block_jacobi(A, 3), rtol=1e-10)

    found = cg(A, b, M=gauss_seidel(A, order), rtol=1e-10)

    assert found.converged
    assert found.iterations < 0.85 * plain.iterations
    assert np.allclose(found.x, plain.x, atol=1e-7 * abs(plain.x).max())


def test_blocks_of_vectors_and_other_formats():
    beam = Cantilever(nodes=(6, 5, 5), dof=3)
    A, B = beam.matrix("bsr"), np.random.default_rng(2).normal(size=(beam.unknowns, 4))
    blocked = gauss_seidel(A)

    assert blocked.colours == 8
    assert gauss_seidel(beam.matrix("symmetric_bsr"), block_size=3).colours == 8
    assert gauss_seidel(beam.matrix("csr")).colours == 24
    assert np.allclose(gauss_seidel(beam.matrix("csr"), block_size=3) @ B, blocked @ B, rtol=1e-12)
    assert np.allclose((blocked @ B)[:, 2], blocked @ B[:, 2].copy(), rtol=1e-12)
    result = block_cg(A, B, M=blocked, rtol=1e-9)
    assert result.converged


def test_the_specification_builds_it():
    beam = Cantilever(nodes=(5, 4, 4), dof=3)
    A = beam.matrix("bsr")
    spec = preconditioner_spec("gauss_seidel", order="natural", omega=1.1).with_block_size(3)

    M = spec.build(A)

    assert M.omega == 1.1
    assert M.colours is None
    assert spec.workspace_nbytes(A.shape[0], 1) > A.nbytes / 4
    r = np.random.default_rng(3).normal(size=A.shape[0])
    assert np.array_equal(M @ r, gauss_seidel(A, "natural", omega=1.1) @ r)


def test_refusals():
    A = laplacian(3)
    with pytest.raises(InputError, match="symmetric preconditioner"):
        gauss_seidel(A, symmetric=False)
    for sweeps in (0, "2", None):
        with pytest.raises(InputError, match="sweeps"):
            gauss_seidel(A, sweeps=sweeps)
    for omega in (0.0, 2.0, -1.0, "x", None):
        with pytest.raises(InputError, match="between 0 and 2"):
            gauss_seidel(A, omega=omega)
    with pytest.raises(InputError, match="one of 1, 2, 3, 6"):
        gauss_seidel(A, block_size=4)
    with pytest.raises(InputError, match="row 4 is not positive definite"):
        gauss_seidel((A - scipy.sparse.diags_array(np.where(np.arange(27) == 4, 10.0, 0.0))).tocsr())
    with pytest.raises(InputError, match="held in memory"):
        gauss_seidel(np.eye(3))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_blocks_of_the_diagonal_are_inverted_and_their_signs_checked(target, size):
    from penstock.solvers.triangular.block_entries import BlockEntries
    from penstock.spmv.compilation.table import find_kernel

    rng = np.random.default_rng(4)
    roots = rng.normal(size=(5, size, size))
    blocks = roots @ roots.transpose(0, 2, 1) + np.eye(size)
    for sign, fine in ((1, True), (-1, False)):
        values = blocks.copy()
        values[3] *= sign
        for positive in (False, True):
            with target.running():
                arrays = (np.arange(6, dtype=np.int64), np.arange(5, dtype=np.int32), values)
                entries = BlockEntries(*(target.put(array) for array in arrays), np.dtype(np.float64))
                inverse = target.put(np.empty_like(values))
                diagonal = Diagonal(target.put(np.arange(5, dtype=np.int64)), 0.5, positive)
                bad = find_kernel("triangle", "inverse", target.device_kind)(entries, diagonal, None, inverse)
            assert bad == (3 if positive and not fine else 5)
            if bad == 5:
                assert np.allclose(target.get(inverse) @ values, 0.5 * np.eye(size), atol=1e-10)
