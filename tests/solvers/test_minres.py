"""The minimum residual method: indefinite, singular and definite systems, one and several right-hand sides."""

import copy

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg

import penstock
from penstock import InputError
from penstock.experiments.reporting.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from penstock.fem import Cantilever
from penstock.solvers import METHODS, absolute_jacobi, minres
from penstock.solvers.minres import MinimumResiduals
from penstock.solvers.problem import LinearProblem
from penstock.spmv import as_operator
from penstock.streaming import HostStore, StreamedMatrix

RNG = np.random.default_rng(8)


def _helmholtz(n=14, shift=1.7):
    line = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n))
    eye = scipy.sparse.eye_array(n)
    return (scipy.sparse.kron(line, eye) + scipy.sparse.kron(eye, line) - shift * scipy.sparse.eye_array(n * n)).tocsr()


def _saddle_point(n=120, m=40):
    K = scipy.sparse.diags_array([-1.0, 3.0, -1.0], offsets=[-1, 0, 1], shape=(n, n))
    C = scipy.sparse.random_array((m, n), density=0.1, rng=RNG) + scipy.sparse.eye_array(m, n)
    A = scipy.sparse.block_array([[K, C.T], [C, None]]).tocsr()
    A.sort_indices()
    return A


def _relative(A, x, b):
    return np.linalg.norm(b - A @ x, axis=0) / np.linalg.norm(b, axis=0)


@pytest.mark.parametrize("M", [None, "absolute_jacobi"])
@pytest.mark.parametrize("make", [_helmholtz, _saddle_point], ids=["helmholtz", "saddle point"])
@pytest.mark.parametrize("columns", [None, 1, 5])
def test_of_an_indefinite_matrix(make, columns, M):
    A = make()
    b = RNG.standard_normal(A.shape[0] if columns is None else (A.shape[0], columns))
    result = minres(A, b, M=M, rtol=1e-9)
    assert result.converged
    assert result.x.shape == b.shape
    assert (_relative(A, result.x, b) <= 1.01e-9).all()
    assert np.allclose(result.x, scipy.sparse.linalg.spsolve(A.tocsc(), b).reshape(b.shape), atol=1e-5)


def test_residuals_are_the_smallest_of_the_krylov_space():
    A, b = _helmholtz(), RNG.standard_normal(196)
    result = minres(A, b, maxiter=12, rtol=0.0)
    basis = [b / np.linalg.norm(b)]
    for k in range(1, 13):
        V = np.stack(basis, axis=1)
        y = np.linalg.lstsq(A @ V, b, rcond=None)[0]
        assert np.isclose(result.residual_norms[k], np.linalg.norm(b - A @ (V @ y)) / np.linalg.norm(b), rtol=1e-8)
        v = A @ basis[-1]
        for _ in range(2):
            v -= V @ (V.T @ v)
        basis.append(v / np.linalg.norm(v))


def test_the_recurrence_of_the_residual_is_the_residual():
    A, B = _saddle_point(), RNG.standard_normal((160, 3))
    method = MinimumResiduals(LinearProblem(A, B, "absolute_jacobi", rtol=1e-12, atol=0.0))
    state = method.start(None)
    for _ in range(20):
        method._iterate_once(state)
        assert np.allclose(state.r, B - A @ state.x, atol=1e-11)


def test_of_a_definite_matrix_it_is_no_worse_than_conjugate_gradients():
    beam = Cantilever(nodes=(9, 3, 3), dof=3)
    A, b = beam.matrix(), beam.load()
    ours, theirs = penstock.solve(A, b, device="cpu", method="minres"), penstock.solve(A, b, device="cpu", method="cg")
    assert ours.converged
    assert np.allclose(ours.x, theirs.x, rtol=1e-4, atol=1e-6 * abs(theirs.x).max())


def test_a_guess_that_solves_and_zero_right_hand_sides():
    A, b = _helmholtz(), np.zeros((196, 3))
    b[:, 1] = A @ np.ones(196)
    result = minres(A, b, rtol=1e-10)
    assert result.converged
    assert not result.x[:, [0, 2]].any()
    again = minres(A, b[:, 1], np.ones(196), rtol=1e-8)
    assert again.converged
    assert again.iterations == 0


@pytest.mark.parametrize("columns", [None, 3])
def test_a_resumed_solve_is_the_uninterrupted_one_bit_for_bit(columns, tmp_path):
    A = _saddle_point()
    b = RNG.standard_normal(A.shape[0] if columns is None else (A.shape[0], columns))
    whole = minres(A, b, M="absolute_jacobi", rtol=1e-10)
    part = minres(A, b, M="absolute_jacobi", rtol=1e-10, maxiter=17)
    write_checkpoint(tmp_path / "checkpoint.npz", Checkpoint(part.state))
    state = read_checkpoint(tmp_path / "checkpoint.npz", A.shape[0]).state
    resumed = minres(A, b, M="absolute_jacobi", rtol=1e-10, state=state)
    assert resumed.iterations == whole.iterations
    assert np.array_equal(resumed.x, whole.x)
    other = copy.deepcopy(part.state)
    with pytest.raises(InputError, match="another system"):
        minres(2.0 * A, b, M="absolute_jacobi", state=other)
    tighter = minres(A, b, M="absolute_jacobi", rtol=1e-11, state=whole.state)
    assert tighter.converged
    assert (_relative(A, tighter.x, b) <= 1e-11).all()


def test_singular_systems():
    A = _helmholtz(shift=0.0)
    line = scipy.sparse.csgraph.laplacian(scipy.sparse.diags_array([1.0, 1.0], offsets=[-1, 1], shape=(60, 60)).tocsr())
    b = RNG.standard_normal(60)
    result = minres(line, b, rtol=1e-8)
    assert result.reason.name == "INCONSISTENT"
    least = np.linalg.lstsq(line.toarray(), b, rcond=None)[0]
    assert np.isclose(np.linalg.norm(b - line @ result.x), np.linalg.norm(b - line @ least), rtol=1e-6)
    assert abs(result.x).max() < 1e6
    consistent = minres(line, b - b.mean(), rtol=1e-8)
    assert consistent.converged
    assert minres(A, A @ np.ones(196), rtol=1e-10).converged
    nothing = minres(scipy.sparse.csr_array((4, 4)), np.ones(4))
    assert not nothing.converged


def test_what_is_not_symmetric_or_not_definite_is_named():
    A = _helmholtz(n=20)
    skew = (A + scipy.sparse.diags_array([np.full(399, 0.9)], offsets=[1])).tocsr()
    b = RNG.standard_normal(400)
    assert minres(skew, b, rtol=1e-10).reason.name == "NOT_SYMMETRIC"
    indefinite = minres(
        A, b, M=lambda r: np.where(np.arange(len(r)) % 2, 1.0, -1.0).reshape(-1, *[1] * (r.ndim - 1)) * r
    )
    assert indefinite.reason.name == "PRECONDITIONER_NOT_POSITIVE_DEFINITE"
    b[3] = 1e200
    assert not minres(A, b).converged


def test_tolerances_below_rounding_end():
    A, b = _helmholtz(), RNG.standard_normal(196)
    result = minres(A, b, rtol=1e-17)
    assert result.reason.name == "ROUNDING_FLOOR"
    assert result.true_residual < 1e-13
    assert minres(A, b, maxiter=5, rtol=1e-10).reason.name == "MAXITER"
    assert minres(A, b, rtol=1e-10, monitor=lambda record: record.iteration >= 4).reason.name == "STOPPED"


@pytest.mark.parametrize("columns", [None, 3])
def test_streamed_it_is_chosen_by_name(columns):
    A = _saddle_point(1200, 300)
    b = RNG.standard_normal(A.shape[0] if columns is None else (A.shape[0], columns))
    for memory in (None, "60 KiB"):
        result = penstock.solve(A, b, device="cpu", memory=memory, method="minres")
        assert result.converged
        assert (_relative(A, result.x, b) <= 1.01e-8).all()
        assert "the minimum residual method" in result.explain()
        assert "absolute_jacobi: for matrices that need not be positive definite" in result.explain()
    with penstock.prepare(A, device="cpu", method="minres") as system:
        system.update(-A)
        assert (_relative(-A, system.solve(b).x, b) <= 1.01e-8).all()
    with pytest.raises(InputError, match="method='minres'"):
        penstock.solve(A, b, device="cpu")
    with pytest.raises(InputError, match="minres"):
        penstock.solve(A, b, device="cpu", method="gmres")


def test_streamed_products_are_shared_by_columns():
    beam = Cantilever(nodes=(17, 3, 3), dof=3)
    with StreamedMatrix(HostStore.create(beam.subdivisions(6)), "100 KiB") as A:
        B = RNG.standard_normal((A.shape[0], 4))
        result = minres(A, B, M=absolute_jacobi(A), rtol=1e-8)
        assert result.converged
        assert result.sweeps <= result.iterations + 4


def test_own_preconditioners():
    A, b = _helmholtz(), RNG.standard_normal(196)
    exact = scipy.sparse.linalg.splu((_helmholtz(shift=0.0)).tocsc())
    M = scipy.sparse.linalg.LinearOperator(A.shape, exact.solve)
    result = penstock.solve(A, b, device="cpu", method="minres", preconditioner=M)
    assert result.converged
    assert result.iterations < 100


def test_the_registry_has_it():
    assert METHODS["minres"].solve is minres
    assert not METHODS["minres"].definite
    assert as_operator(_helmholtz()).shape == (196, 196)


@pytest.mark.parametrize("scale", [1e-10, 1.0, 1e10, 1e50])
@pytest.mark.parametrize("M", [None, "absolute_jacobi"])
def test_scales_do_not_matter(scale, M):
    A, x = _helmholtz(20, 3.0), RNG.standard_normal(400)
    usual = minres(A, A @ x, M=M, rtol=1e-9).iterations
    for matrix, b in ((A, scale * (A @ x)), (scale * A, A @ x)):
        result = minres(matrix, b, M=M, rtol=1e-9)
        assert result.converged
        assert abs(result.iterations - usual) <= 3
    far = minres(A, A @ x, scale * 1e3 * x, M=M, rtol=1e-9 if scale < 1e5 else 1e-2)
    assert far.reason.name != "INCONSISTENT"


def _dependent_rows():
    A = _helmholtz(12, 2.3).tolil()
    for row in (140, 141, 142):
        A[row] = A[row - 30]
        A[:, row] = A[:, row - 30]
    A = scipy.sparse.csr_array(A)
    return scipy.sparse.csr_array((A + A.T) / 2)


def _zero_rows():
    A = _helmholtz(12, 2.3).tolil()
    for row in (3, 77):
        A[row] = 0
        A[:, row] = 0
    A = scipy.sparse.csr_array(A)
    A.eliminate_zeros()
    return A


def _neumann():
    return scipy.sparse.csgraph.laplacian((abs(_helmholtz(12, 0.0)) > 0).astype(float).tocsr()).tocsr()


@pytest.mark.parametrize("M", [None, "absolute_jacobi"])
@pytest.mark.parametrize("make", [_zero_rows, _neumann])
def test_a_least_squares_solution_where_there_is_no_other(make, M):
    A, b = scipy.sparse.csr_array(make()), np.random.default_rng(3).standard_normal(144)
    result = minres(A, b, M=M, rtol=1e-8)
    least = np.linalg.norm(b - A @ np.linalg.lstsq(A.toarray(), b, rcond=None)[0]) / np.linalg.norm(b)
    assert result.reason.name == "INCONSISTENT"
    if M is None:  # otherwise the residual is the smallest in another norm
        assert np.isclose(result.true_residual, least, rtol=1e-3)
    assert result.true_residual < 3 * least
    assert abs(result.x).max() < 1e5
    assert result.iterations < 400


@pytest.mark.parametrize("smallest", [1e-6, 1e-9, 1e-11, 1e-13])
def test_an_ill_conditioned_matrix_is_not_singular(smallest):
    A = scipy.sparse.diags_array([1.0, -1.0, 2.0, smallest]).tocsr()
    result = minres(A, np.ones(4), rtol=1e-8)
    assert result.converged
    assert np.isclose(result.x[3], 1 / smallest, rtol=1e-3)
