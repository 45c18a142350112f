"""A state knows its system: of another one, or altered, it is refused with the reason, and no claim is older than the solve."""

import copy

import numpy as np
import pytest
import scipy.sparse

from penstock.fem import Cantilever
from penstock.solvers import block_cg, block_jacobi, cg, chebyshev, jacobi, smoothed_aggregation
from penstock.spmv import CPU, InputError
from penstock.streaming import HostStore, StreamedMatrix

BEAM = Cantilever(nodes=(13, 5, 5), dof=3)


@pytest.fixture(scope="module")
def A():
    return BEAM.matrix()


def loads(columns):
    b = BEAM.load()
    return b if columns is None else np.stack([b * (1 + k) + k * b[::-1] for k in range(columns)], axis=1)


def with_coarse_level(A, nodes=60):
    mesh = BEAM.mesh
    return smoothed_aggregation(A, coordinates=mesh.coordinates(), aggregates=mesh.node_counts, aggregate_nodes=nodes)


PRECONDITIONERS = {
    "none": lambda A: None,
    "jacobi": jacobi,
    "chebyshev": lambda A: chebyshev(A, 5, block_size=3),
    "coarse": with_coarse_level,
}


@pytest.fixture(params=[None, 2], ids=["cg", "block_cg"])
def columns(request):
    return request.param


@pytest.fixture(params=PRECONDITIONERS)
def precondition(request):
    return PRECONDITIONERS[request.param]


def solver_of(columns):
    return cg if columns is None else block_cg


def begun(A, columns, M, maxiter=3, **options):
    return solver_of(columns)(A, loads(columns), M=M, rtol=1e-9, maxiter=maxiter, **options).state


class TestAnotherSystem:
    @pytest.mark.parametrize("maxiter", [3, None], ids=["stopped", "converged"])
    def test_another_matrix_is_refused(self, A, columns, precondition, maxiter):
        state = begun(A, columns, precondition(A), maxiter)
        other = A.from_arrays(A.shape, A.dtype, {**A.arrays(), "values": 1.5 * A.values}, A.parameters())

        with pytest.raises(InputError, match="belongs to another system: its residual differs from b - A x"):
            solver_of(columns)(other, loads(columns), M=precondition(other), rtol=1e-9, state=state)

    @pytest.mark.parametrize("maxiter", [3, None], ids=["stopped", "converged"])
    def test_another_right_hand_side_is_refused(self, A, columns, precondition, maxiter):
        M = precondition(A)
        state = begun(A, columns, M, maxiter)

        with pytest.raises(InputError, match=r"is of a right-hand side of norm .*, and this one has"):
            solver_of(columns)(A, 1.001 * loads(columns), M=M, rtol=1e-9, state=copy.deepcopy(state))
        with pytest.raises(InputError, match="A or b is another one"):  # of the same norm
            solver_of(columns)(A, -loads(columns), M=M, rtol=1e-9, state=state)

    def test_another_preconditioner_is_refused(self, A, columns):
        state = begun(A, columns, jacobi(A))

        with pytest.raises(InputError, match=r"preconditioner DiagonalBlocks, and this one has none; .* x0=state\.x"):
            solver_of(columns)(A, loads(columns), rtol=1e-9, state=state)

    def test_a_matrix_that_differs_a_little_gets_no_claim_of_the_other(self, A):
        """Where a difference is taken for rounding, columns that had converged are tested again."""
        B = loads(2)
        state = block_cg(A, B, M=jacobi(A), rtol=1e-10).state
        values = A.values * (1 + 1e-12 * np.random.default_rng(0).standard_normal(A.values.shape))
        other = A.from_arrays(A.shape, A.dtype, {**A.arrays(), "values": values}, A.parameters())

        result = block_cg(other, B, M=jacobi(other), rtol=1e-10, maxiter=state.iteration, state=state)

        truth = np.linalg.norm(B - other @ result.x, axis=0) / np.linalg.norm(B, axis=0)
        np.testing.assert_allclose([column.true_residual for column in result.columns], truth, rtol=1e-4)
        assert (truth > 1e-10).all()
        assert not result.converged


class TestAltered:
    @pytest.mark.parametrize(
        ("name", "change", "told"),
        [
            ("x", lambda x: x[:-3], "has shape"),
            ("p", lambda p: p[:-1], "has shape"),
            ("p", lambda p: np.concatenate([p, p]), "has shape"),
            ("p", lambda p: p.astype(complex), "type complex128"),
            ("p", lambda p: p.astype(np.float32), "type float32"),
            ("x", lambda x: x * np.nan, "holds nan at row 0"),
            ("p", lambda p: np.full_like(p, np.inf), "holds .* at row"),
            ("p", lambda p: p.tolist(), "has shape None"),
            ("iteration", lambda _: -1, "iteration of the state cannot be -1"),
            ("iteration", lambda _: 1.5, "iteration of the state cannot be 1.5"),
            ("residual_norms", lambda _: [], "damaged|do not fit each other"),
            ("residual_norms", lambda _: ["a"], "damaged|do not fit each other"),
        ],
    )
    def test_arrays_and_numbers_that_cannot_be_are_refused(self, A, columns, precondition, name, change, told):
        M = precondition(A)
        state = begun(A, columns, M)
        setattr(state, name, change(getattr(state, name)))

        with pytest.raises(InputError, match=told):
            solver_of(columns)(A, loads(columns), M=M, rtol=1e-9, state=state)

    @pytest.mark.parametrize("name", ["rho", "matrix_norm", "drift", "first_drift", "last_true_residual"])
    @pytest.mark.parametrize("value", [np.nan, -1.0, "a"])
    def test_numbers_of_cg_that_cannot_be_are_refused(self, A, name, value):
        state = begun(A, None, jacobi(A))
        setattr(state, name, value)

        with pytest.raises(InputError, match=f"{name} of the state cannot be"):
            cg(A, loads(None), M=jacobi(A), rtol=1e-9, state=state)

    @pytest.mark.parametrize("value", [np.nan, np.inf, "a"])
    def test_an_energy_that_cannot_be_is_refused(self, A, value):
        state = begun(A, None, jacobi(A))
        state.energy = value

        with pytest.raises(InputError, match="energy of the state cannot be"):
            cg(A, loads(None), M=jacobi(A), rtol=1e-9, state=state)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("t", np.eye(5)),
            ("phi", np.full((2, 2), np.nan)),
            ("phi", "text"),
            ("t", np.eye(2) + 0j),
            ("t", np.eye(2, dtype=np.float32)),
            ("active", [0, 7]),
            ("active", []),
            ("active", [1, 0]),
            ("active", [False, True]),
            ("reasons", [None]),
            ("last_true_residuals", [1.0]),
        ],
    )
    def test_parts_of_a_block_that_do_not_fit_each_other_are_refused(self, A, name, value):
        state = begun(A, 2, jacobi(A))
        setattr(state, name, value)

        with pytest.raises(InputError, match="the parts of the state do not fit each other"):
            block_cg(A, loads(2), M=jacobi(A), rtol=1e-9, state=state)

    def test_a_residual_that_is_not_of_the_iterate_is_refused(self, A):
        state = begun(A, None, jacobi(A))
        state.r = np.random.default_rng(0).standard_normal(state.r.size) * np.linalg.norm(state.r) / state.r.size**0.5

        with pytest.raises(InputError, match="its residual differs from b - A x"):
            cg(A, loads(None), M=jacobi(A), rtol=1e-9, state=state)

    def test_another_coarse_level_goes_on_from_the_iterates(self, A, columns):
        state = begun(A, columns, with_coarse_level(A))
        done, other, other_loads = state.iteration, with_coarse_level(A, nodes=20), loads(columns)[::-1].copy()

        result = solver_of(columns)(A, loads(columns), M=other, rtol=1e-9, state=copy.deepcopy(state))
        assert result.converged
        assert result.iterations > done
        with pytest.raises(InputError, match="state"):
            solver_of(columns)(A, other_loads, M=other, rtol=1e-9, state=copy.deepcopy(state))
        state = state.without_coarse_parts()
        assert solver_of(columns)(A, loads(columns), M=other, rtol=1e-9, state=state).converged


class TestRounding:
    def test_a_residual_at_the_floor_of_an_ill_conditioned_system_is_taken(self, columns):
        """There, the recorded residual and that of the iterate differ by much of the first one."""
        n = 200
        scales = np.logspace(0, 7, n)
        K = scipy.sparse.diags_array([-np.ones(n - 1), 2.0 * np.ones(n), -np.ones(n - 1)], offsets=[-1, 0, 1])
        A = scipy.sparse.csr_array(scipy.sparse.diags_array(scales) @ K @ scipy.sparse.diags_array(scales))
        B = np.random.default_rng(1).standard_normal((n, columns or 1))
        B = B[:, 0] if columns is None else B
        for dtype in (np.float64, np.float32):
            solve = solver_of(columns)
            for stop in (50, 400, 1500):
                state = solve(A.astype(dtype), B.astype(dtype), rtol=0.0, maxiter=stop).state
                solve(A.astype(dtype), B.astype(dtype), rtol=0.0, maxiter=stop + 5, state=state)

    def test_the_check_leaves_the_direction_of_sweeps_as_it_was(self, A):
        b = BEAM.load()
        store = HostStore.create(BEAM.subdivisions(6, "symmetric_bsr"))
        with StreamedMatrix(store, "2 MiB") as streamed:
            M = block_jacobi(streamed, 3)
            state = cg(streamed, b, M=M, rtol=1e-9, maxiter=4).state
            for direction in (1, -1):
                streamed.turn_to(direction)
                cg(
                    streamed, b, M=M, rtol=1e-9, maxiter=4, state=copy.deepcopy(state)
                )  # one sweep, for its true residual
                assert streamed.direction == (-direction if streamed.plan.ring.sweeps == "alternate" else direction)


class _Elsewhere:
    """Stands in for a GPU: its arrays are of another type than those of the host."""

    kind = "cuda"

    class Array(list):
        pass

    def asarray(self, array):
        return self.Array(array.tolist())


def test_a_state_that_is_moved_leaves_that_of_the_host_as_it_was(A, columns):
    state = solver_of(columns)(A, loads(columns), M=block_jacobi(A, 3), rtol=1e-9, maxiter=4).state
    moved = state.on_device(_Elsewhere(), but=("p",))

    assert moved is not state
    assert isinstance(moved.x, _Elsewhere.Array)
    assert moved.p is state.p
    for name in ("residual_norms", *(["reasons"] if columns else [])):
        assert getattr(moved, name) == getattr(state, name)
        assert getattr(moved, name) is not getattr(state, name)  # a solve extends them
    assert state.on_device(CPU) is state
