"""A sparse factorisation as a preconditioner: its order, the count of its entries, its factors, and when it is chosen."""

import itertools
import sys
import types

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg

import penstock
from penstock.driver import placement, predicted, slow_convergence
from penstock.driver.predicted import FactorisationLook, cheap_factorisation
from penstock.solvers import FactorisationSpec, SparseFactors, cg, sparse_cholesky
from penstock.solvers.sparse_cholesky import CholmodAnalysis, FactorSize, SuperLUAnalysis, analysed, factor_size
from penstock.spmv import CPU, BsrMatrix, BudgetError, CsrMatrix, InputError

FIND_CHOLMOD = sparse_cholesky._cholmod  # which conftest.py replaces


@pytest.fixture(params=["CHOLMOD", "SuperLU"], autouse=True)
def library(request, monkeypatch):
    """The library that factorises."""
    if request.param == "CHOLMOD":
        cholmod = pytest.importorskip("sksparse.cholmod")
        monkeypatch.setattr(sparse_cholesky, "_cholmod", lambda: cholmod)
    return request.param


def laplacian(*sides):
    """Of a mesh with as many nodes along each axis, with values given around it."""
    lines = [scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n)) for n in sides]
    total = lines[0]
    for line in lines[1:]:
        total = scipy.sparse.kron(total, scipy.sparse.eye_array(line.shape[0])) + scipy.sparse.kron(
            scipy.sparse.eye_array(total.shape[0]), line
        )
    A = scipy.sparse.csr_array(total)
    A.sort_indices()
    return A


def path_of_stiffness(n, contrast):
    """A chain of springs whose stiffness varies, held at one end: Jacobi needs n iterations."""
    k = contrast ** np.random.default_rng(0).random(n)
    return scipy.sparse.csr_array(
        scipy.sparse.diags_array([-k[1:], k + np.append(k[1:], 0.0), -k[1:]], offsets=[-1, 0, 1])
    )


@pytest.mark.parametrize("sides", [(7,), (9, 11), (5, 6, 7)])
def test_entries_are_counted_as_a_dense_factorisation_fills_them(sides, library):
    A = laplacian(*sides)
    analysis = analysed(A)
    order = analysis.order
    assert analysis.library == library
    assert np.array_equal(np.sort(order), np.arange(A.shape[0]))

    factor = np.linalg.cholesky(A.toarray()[order][:, order] + 0.1 * np.eye(A.shape[0]))
    lengths = np.count_nonzero(np.abs(factor) > 1e-14, axis=0)
    expected = int(lengths.sum())

    assert factor_size(A, order, 10**6) == FactorSize(expected, float((lengths**2).sum()))
    assert factor_size(A, order, expected) is not None
    assert factor_size(A, order, expected - 1) is None
    assert expected < np.count_nonzero(np.abs(np.linalg.cholesky(A.toarray())) > 1e-14) or len(sides) == 1


def test_a_quick_look_takes_one_of_the_orders():
    A = laplacian(14, 14, 14)
    quick, thorough = (factor_size(A, analysed(A, quick=quick).order, 10**9) for quick in (True, False))
    assert thorough.entries <= quick.entries
    assert thorough.operations <= quick.operations


def test_predictions_grow_with_entries_and_operations(library):
    analysis = analysed(laplacian(5, 5))
    assert isinstance(analysis, CholmodAnalysis if library == "CHOLMOD" else SuperLUAnalysis)
    assert 0 < analysis.seconds(FactorSize(10**6, 1e8)) < analysis.seconds(FactorSize(10**6, 1e9))
    assert analysis.seconds(FactorSize(10**6, 1e8)) < analysis.seconds(FactorSize(2 * 10**6, 1e8))


def test_the_factors_solve_one_and_several_right_hand_sides():
    A = laplacian(12, 13)
    M = FactorisationSpec().build(CsrMatrix.from_csr(A))
    assert isinstance(M, SparseFactors)
    assert not M.capturable
    rng = np.random.default_rng(1)
    for b in (rng.normal(size=156), rng.normal(size=(156, 3))):
        x = M.apply(b)
        np.testing.assert_allclose(A @ x, b, atol=1e-9)
        out = np.ones_like(b)
        M.apply(b, out, alpha=2.0, beta=3.0)
        np.testing.assert_allclose(out, 2 * x + 3.0, atol=1e-9)
    left, right = rng.normal(size=(2, 156))
    assert abs(left @ M.apply(right) - right @ M.apply(left)) < 1e-11 * np.linalg.norm(left) * np.linalg.norm(right)


def test_cg_with_the_factors_is_refinement():
    A = path_of_stiffness(6000, 100.0)
    b = A @ np.random.default_rng(2).normal(size=6000)

    result = cg(A, b, M=FactorisationSpec().build(CsrMatrix.from_csr(A)), rtol=1e-8)

    assert result.converged
    assert result.iterations <= 3


def test_a_singular_matrix_is_solved_where_a_solution_exists():
    n = 7000
    k = 1e4 ** np.random.default_rng(3).random(n - 1)
    A = scipy.sparse.csr_array(
        scipy.sparse.diags_array([-k, np.append(k, 0.0) + np.append(0.0, k), -k], offsets=[-1, 0, 1])
    )
    b = A @ np.random.default_rng(4).normal(size=n)

    result = penstock.solve(A, b, preconditioner="factorisation", null_space="constants", rtol=1e-8)

    assert result.converged
    assert result.iterations <= 5
    assert np.linalg.norm(b - A @ result.x) <= 1e-8 * np.linalg.norm(b)


def test_what_cannot_be_factorised_is_refused():
    with pytest.raises(InputError, match="held in the memory of the host"):
        FactorisationSpec().build(scipy.sparse.linalg.aslinearoperator(laplacian(3, 3)))
    with pytest.raises(InputError, match="cannot be factorised without pivoting"):
        FactorisationSpec().build(CsrMatrix.from_csr(scipy.sparse.csr_array(np.array([[0.0, 1.0], [1.0, 0.0]]))))
    tied = scipy.sparse.csr_array(
        np.array([[1.0, 1.0 + 1e-12], [1.0 + 1e-12, 1.0]])
    )  # whose second pivot would be zero
    assert FactorisationSpec().build(CsrMatrix.from_csr(tied)).shape == (2, 2)
    assert FactorisationSpec().build(CsrMatrix.from_csr(scipy.sparse.csr_array((0, 0)))).shape == (0, 0)


def test_it_is_chosen_where_its_factor_is_small():
    plane, cube = (CsrMatrix.from_csr(laplacian(*sides)) for sides in ((120, 120), (30, 30, 30)))
    found = cheap_factorisation(plane, 1, near_null_space_known=False)
    assert found is not None
    assert 0 < found[1] < 0.2
    assert cheap_factorisation(cube, 1, near_null_space_known=True) is None


def test_long_rows_are_looked_at_if_that_is_worth_it():
    band = scipy.sparse.diags_array(
        [-1.0] * 22 + [50.0] + [-1.0] * 22, offsets=range(-22, 23), shape=(6000, 6000)
    ).tocsr()
    of_scalars = CsrMatrix.from_csr(band)
    of_nodes = BsrMatrix.from_csr(scipy.sparse.kron(band[:2000, :2000], np.ones((3, 3))).tocsr(), block_size=3)
    assert cheap_factorisation(of_scalars, 1, near_null_space_known=False) is None  # its count takes too long
    assert cheap_factorisation(of_nodes, 3, near_null_space_known=False) is not None


def test_of_blocks_the_nodes_are_counted():
    nodes = laplacian(40, 40)
    A = scipy.sparse.csr_array(scipy.sparse.kron(nodes, np.ones((3, 3)) + 3 * np.eye(3)))
    spec, seconds = FactorisationLook(BsrMatrix.from_csr(A, block_size=3), 3).within(10.0)
    of_rows, of_row_seconds = FactorisationLook(CsrMatrix.from_csr(A), 1).within(10.0)
    # Dense blocks on the diagonal count as a whole, not half; other orders of the rows have other factors.
    assert spec.entries == pytest.approx(of_rows.entries, rel=0.5)
    assert seconds == pytest.approx(of_row_seconds, rel=0.5)
    assert spec.workspace_nbytes(len(A.indptr) - 1, 1) == 24 * spec.entries
    b = np.ones(A.shape[0])
    np.testing.assert_allclose(A @ spec.build(BsrMatrix.from_csr(A, block_size=3)).apply(b), b, atol=1e-9)


def test_slow_convergence_leads_to_it_and_updates_go_on_with_it():
    A = path_of_stiffness(6000, 100.0)
    b = A @ np.random.default_rng(5).normal(size=6000)
    with penstock.prepare(A, device="cpu") as system:
        result = system.solve(b, rtol=1e-8)
        assert result.converged
        assert 50 <= result.iterations < 1500  # the residual falls at once, and then hardly any more
        assert "factorisation: jacobi promised" in system.explain()
        assert system.solve(2 * b, rtol=1e-8).iterations <= 3
        system.update(2.0 * A)
        assert system.solve(b, rtol=1e-8).iterations <= 3
        residual = b - 2.0 * (A @ system.solve(b, rtol=1e-8).x)
        assert np.linalg.norm(residual) <= 1e-8 * np.linalg.norm(b)


def test_with_coordinates_it_takes_the_place_of_multigrid(monkeypatch):
    A = laplacian(90, 90)
    points = np.stack(np.meshgrid(np.arange(90.0), np.arange(90.0), indexing="ij"), axis=-1).reshape(-1, 2)
    b = np.ones(A.shape[0])

    assert "factorisation: its factor has so few entries" in penstock.solve(A, b, coordinates=points).explain()
    monkeypatch.setattr(predicted, "_MOST_ROWS", 100)
    assert "multigrid: a coarse level" in penstock.solve(A, b, coordinates=points).explain()


@pytest.fixture
def slow_multigrid(monkeypatch):
    """A cube that multigrid is taken for, with its coordinates; after two iterations it counts as slow."""
    monkeypatch.setattr(placement, "cheap_factorisation", lambda *of, **known: None)
    changed = {"_TRIED_MULTIGRID": 2, "FASTER": 0.0, "WORTH_A_LOOK": 0, "_LONGEST_FACTORISATION": 10**6}
    for name, value in changed.items():
        monkeypatch.setattr(slow_convergence, name, value)
    points = np.stack(np.meshgrid(*[np.arange(20.0)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
    return laplacian(20, 20, 20), points


def test_it_takes_the_place_of_multigrid_that_is_slow(slow_multigrid, library):
    A, points = slow_multigrid
    b = A @ np.random.default_rng(6).normal(size=A.shape[0])
    with penstock.prepare(A, device="cpu", coordinates=points) as system:
        result = system.solve(b)
        assert result.converged
        assert 3 <= result.iterations <= 6
        assert "choice      factorisation: multigrid promised" in result.explain()
        assert f"preconditioner factorisation by {library}" in result.explain()
        assert system.solve(2 * b).iterations <= 2


def test_it_is_not_begun_when_no_iterations_are_left(slow_multigrid):
    A, points = slow_multigrid
    result = penstock.solve(A, np.ones(A.shape[0]), device="cpu", coordinates=points, maxiter=3, on_failure="return")
    assert "choice      multigrid" in result.explain()


def test_what_cannot_take_its_place_is_told(slow_multigrid, monkeypatch):
    A, points = slow_multigrid
    monkeypatch.setattr(FactorisationSpec, "workspace_nbytes", lambda *of, **more: 1 << 60)
    result = penstock.solve(A, np.ones(A.shape[0]), device="cpu", coordinates=points)
    assert result.converged
    assert "multigrid: it promised" in result.explain()
    assert "but the factorisation cannot be made: its set-up needs" in result.explain()


def test_blocks_that_are_not_dense_count_as_dense_ones():
    """The first unknown of a node is coupled with the second alone, which is coupled with other nodes."""
    nodes = laplacian(30, 30)
    inside = scipy.sparse.eye_array(900)
    A = scipy.sparse.csr_array(
        scipy.sparse.kron(inside, [[2.0, 1.0], [1.0, 2.0]]) + scipy.sparse.kron(nodes, [[0, 0], [0, 1.0]])
    )
    A.eliminate_zeros()
    spec, _ = FactorisationLook(CsrMatrix.from_csr(A), 2).within(10.0)
    of_nodes = factor_size(nodes, analysed(nodes).order, 10**9)
    assert spec.entries >= 4 * 0.8 * of_nodes.entries


@pytest.mark.parametrize("size", [1, 3])
def test_the_analysis_of_a_prediction_is_that_of_the_factorisation(library, monkeypatch, size):
    A = CsrMatrix.from_csr(scipy.sparse.kron(laplacian(12, 12, 12), np.ones((size, size)) + np.eye(size)).tocsr())
    monkeypatch.setattr(predicted, "_TIMES_ORDERS", 1e9)
    quick, _ = FactorisationLook(A, size).within(100.0)
    assert quick.analysis.is_thorough == (library == "SuperLU")  # which has one order
    monkeypatch.setattr(predicted, "_TIMES_ORDERS", 0)
    spec, _ = FactorisationLook(A, size).within(100.0)
    assert spec.analysis.is_thorough
    assert spec.entries <= quick.entries
    before = spec.build(A)
    assert before.analysis is spec.analysis
    b = np.random.default_rng(1).standard_normal((A.shape[0], 2))
    np.testing.assert_allclose(A @ before.apply(b), b, atol=1e-9)
    twice = CsrMatrix.from_csr(2.0 * A.to_csr())
    again = spec.rebuild(before, twice)
    assert again.analysis is before.analysis
    np.testing.assert_allclose(twice @ again.apply(b[:, 0]), b[:, 0], atol=1e-9)


def test_a_factor_too_large_for_the_library_is_not_made(library, monkeypatch):
    if library == "SuperLU":
        pytest.skip("it fails when it factorises")
    cholmod = types.SimpleNamespace(**vars(sparse_cholesky._cholmod()))

    def too_large(*_, **__):
        raise cholmod.CholmodTooLargeError("problem too large")

    cholmod.analyze = too_large
    monkeypatch.setattr(sparse_cholesky, "_cholmod", lambda: cholmod)
    A = laplacian(12, 12, 12)
    assert FactorisationLook(CsrMatrix.from_csr(A), 1).within(100.0) is None
    with pytest.raises(BudgetError, match="too large for CHOLMOD"):
        penstock.solve(A, np.ones(1728), preconditioner="factorisation", device="cpu")


def test_nodes_are_ordered_by_metis_where_that_is_better(library):
    """Approximate minimum degree of a solid's nodes takes more operations than nested dissection."""
    if library == "SuperLU":
        pytest.skip("it has one order")
    nodes = laplacian(16, 16, 16)
    quick, thorough = (CholmodAnalysis(nodes, 6, quick=quick) for quick in (True, False))
    sizes = [factor_size(nodes, one.order, 10**9).of_blocks(6) for one in (quick, thorough)]
    assert sizes[1].operations < 0.9 * sizes[0].operations


def test_a_scikit_sparse_of_another_interface_is_not_used(monkeypatch):
    found = {"other": types.ModuleType("sksparse.cholmod"), "known": types.ModuleType("sksparse.cholmod")}
    found["known"].analyze = lambda A: None
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, "sksparse", types.ModuleType("sksparse"))
        monkeypatch.setitem(sys.modules, "sksparse.cholmod", module)
        assert FIND_CHOLMOD.__wrapped__() is (module if name == "known" else None)


def test_the_reference_blas_is_told_from_an_optimised_one(library, monkeypatch):
    if library == "SuperLU":
        pytest.skip("its BLAS is that of SciPy")
    moments = itertools.count()
    for step, expected in ((1.0, sparse_cholesky._REFERENCE_SECONDS), (1e-6, sparse_cholesky._OPTIMISED_SECONDS)):
        monkeypatch.setattr(sparse_cholesky.time, "thread_time", lambda step=step: step * next(moments))
        assert sparse_cholesky._blas_seconds.__wrapped__() == expected


@pytest.mark.parametrize(
    ("of_cholmod", "of_lapack", "optimised"),
    [(0.1e-9, 0.03e-9, True), (0.3e-9, 0.07e-9, True), (0.6e-9, 0.06e-9, False), (0.5e-9, 0.45e-9, False)],
)
def test_a_slow_machine_is_told_from_a_slow_blas(library, monkeypatch, of_cholmod, of_lapack, optimised):
    if library == "SuperLU":
        pytest.skip("its BLAS is that of SciPy")
    seconds = iter((of_cholmod, of_lapack))
    monkeypatch.setattr(sparse_cholesky, "_seconds_of_operation", lambda factorise: factorise() and next(seconds))

    found = sparse_cholesky._blas_seconds.__wrapped__()

    assert found == (sparse_cholesky._OPTIMISED_SECONDS if optimised else sparse_cholesky._REFERENCE_SECONDS)


def neumann(m, seed=0):
    """A diffusion problem without any fixed value, singular but for the rounding of its entries to float32."""
    rng = np.random.default_rng(seed)
    k, i = np.exp(rng.uniform(-2.3, 2.3, (m, m))), np.arange(m * m).reshape(m, m)
    rows, columns = (np.concatenate([i[a].ravel(), i[:, a].ravel()]) for a in (slice(1, None), slice(None, -1)))
    values = np.concatenate([(k[1:] + k[:-1]).ravel(), (k[:, 1:] + k[:, :-1]).ravel()])
    both = (np.concatenate([rows, columns]), np.concatenate([columns, rows]))
    W = scipy.sparse.csr_array((np.tile(values, 2), both), shape=(m * m, m * m))
    return scipy.sparse.csr_array(scipy.sparse.diags_array(W.sum(axis=1)) - W).astype(np.float32).astype(np.float64)


def test_singular_but_for_rounding_to_float32():
    A = neumann(80)
    b = A @ np.random.default_rng(1).normal(size=A.shape[0])
    ones = np.ones((A.shape[0], 1))
    result = penstock.solve(A, b, near_null_space=ones, device="cpu", rtol=1e-6)
    assert result.converged
    assert "choice      factorisation" in result.explain()
    assert np.linalg.norm(b - A @ result.x) <= 1e-6 * np.linalg.norm(b)


def test_what_cannot_be_factorised_is_left_to_multigrid(monkeypatch):
    """First at once, then after new values of a matrix that could be factorised before."""

    def refuse(self, A, analysis):
        raise InputError("no pivot is left")

    A = laplacian(90, 90)
    b, ones = np.ones(A.shape[0]), np.ones((A.shape[0], 1))
    with penstock.prepare(A, near_null_space=ones, device="cpu") as system:
        assert "choice      factorisation" in system.explain()
        monkeypatch.setattr(SparseFactors, "__init__", refuse)
        system.update(2.0 * A, "values")
        assert system.solve(b).converged
        assert "multigrid: factorisation cannot be made: no pivot is left" in system.explain()
    result = penstock.solve(A, b, near_null_space=ones, device="cpu")
    assert result.converged
    assert "multigrid: factorisation cannot be made: no pivot is left" in result.explain()
    with pytest.raises(InputError, match="no pivot is left"):
        penstock.solve(A, b, preconditioner="factorisation", device="cpu")
    with pytest.raises(InputError, match="no option degree; it has block_size"):
        penstock.solve(
            A, b, preconditioner=penstock.solvers.preconditioner_spec("factorisation", degree=3), device="cpu"
        )


def test_multigrid_goes_on_where_factors_are_no_preconditioner(monkeypatch):
    A = laplacian(90, 90)
    b = np.ones(A.shape[0])
    monkeypatch.setattr(SparseFactors, "_apply", lambda self, x, out, alpha, beta: np.copyto(out, -alpha * x))
    with penstock.prepare(A, near_null_space=np.ones((len(b), 1)), device="cpu") as system:
        result = system.solve(b)
        assert result.converged
        assert np.linalg.norm(b - A @ result.x) <= 1e-8 * np.linalg.norm(b)
        assert "choice      multigrid: as factorisation in its place did not end well" in result.explain()
        assert system.solve(2.0 * b).converged


def test_by_name_factors_that_do_not_fit_are_refused(monkeypatch):
    A = laplacian(20, 20)
    monkeypatch.setattr(type(CPU), "free_nbytes", lambda self: 24 * 2_000)
    with pytest.raises(BudgetError, match=r"the factors would take more than the 46.88 KiB that are free"):
        FactorisationSpec().build(CsrMatrix.from_csr(A))


@pytest.mark.parametrize("seed", range(8))
def test_columns_of_the_factor_are_counted_exactly(seed):
    """Against the elimination of the columns one by one, on patterns with and without diagonal entries, and in several pieces."""
    rng = np.random.default_rng(seed)
    for _ in range(12):
        n = int(rng.integers(1, 40))
        half = scipy.sparse.random_array((n, n), density=rng.uniform(0, 0.2), rng=rng)
        A = scipy.sparse.csr_array(half + half.T + rng.integers(2) * scipy.sparse.eye_array(n))
        order = rng.permutation(n)
        filled = (A.toarray() != 0)[np.ix_(order, order)]
        lengths = []
        for column in range(n):
            below = column + 1 + np.flatnonzero(filled[column + 1 :, column])
            filled[np.ix_(below, below)] = True
            lengths.append(1 + len(below))
        size = factor_size(A, order, sum(lengths))
        assert (size.entries, size.operations) == (sum(lengths), sum(length**2 for length in lengths))
        assert factor_size(A, order, sum(lengths) - 1) is None


def test_columns_are_counted_without_counting_entries():
    """A chain, of which many rows are coupled with the first node and with one beyond the last: the factor has 6e10 entries."""
    n = rows = 200_000
    beyond, others = n, n + 1 + np.arange(rows)
    i = np.concatenate([np.arange(n), np.repeat(others, 2)])
    j = np.concatenate([np.arange(1, n + 1), np.tile([0, beyond], rows)])
    A = scipy.sparse.coo_array((np.ones(len(i)), (i, j)), shape=(n + 1 + rows,) * 2)
    A = (A + A.T + scipy.sparse.eye_array(n + 1 + rows)).tocsr()
    entries = n * (2 + rows) + (1 + rows) + rows * (rows + 1) // 2
    assert factor_size(A, np.arange(len(A.indptr) - 1), 10**12).entries == entries
