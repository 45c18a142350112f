"""A solve that is left open begins with Jacobi, goes on with multigrid where that promises to be faster, and back if it fails."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse
from awkward_systems import flat_hexahedra, jumping

import penstock
from penstock.driver import placement, predicted, slow_convergence
from penstock.driver.open_system import OpenSystem
from penstock.driver.predicted import FactorisationLook, grouped_iterations, multigrid_iterations
from penstock.driver.request import Request
from penstock.fem import Cantilever
from penstock.solvers import StopReason
from penstock.solvers.amg import coarsening, local_space, strong_aggregates
from penstock.solvers.amg.specs import MultigridSpec, SmoothedAggregationSpec
from penstock.solvers.factorisation import FactorisationSpec
from penstock.spmv import CPU, BudgetError, CsrMatrix, InputError

N = 70
LINE = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(N, N))
SLOW = (scipy.sparse.kronsum(LINE, LINE) + 1e-6 * scipy.sparse.eye_array(N * N)).tocsr()  # two dimensions
QUICK = (SLOW + 2.0 * scipy.sparse.eye_array(N * N)).tocsr()
RNG = np.random.default_rng(0)
B = RNG.normal(size=(N * N, 3))


pytestmark = pytest.mark.usefixtures("small_matrices_are_worth_it")


@pytest.fixture
def nodes_alone(monkeypatch):
    """Aggregates do not follow strong couplings, so that jumps are slow."""
    monkeypatch.setattr(strong_aggregates, "stiffness_jumps", lambda norms: False)


@pytest.mark.parametrize("b", [B[:, 0], B], ids=["one", "several"])
def test_a_slow_system_gets_multigrid_and_goes_on_from_its_iterate(b):
    result = penstock.solve(SLOW, b, device="cpu")

    assert result.converged
    assert "choice      multigrid: jacobi promised more than 70 iterations" in result.explain()
    assert 50 <= result.iterations < 75
    for column in result.columns:
        assert len(column.residual_norms) >= 50
    x = result.x.reshape(N * N, -1)
    assert (
        np.linalg.norm(b.reshape(N * N, -1) - SLOW @ x, axis=0) <= 1e-8 * np.linalg.norm(b.reshape(N * N, -1), axis=0)
    ).all()


def test_a_quick_system_keeps_jacobi():
    result = penstock.solve(QUICK, B[:, 0], device="cpu")

    assert result.converged
    assert result.iterations < 50
    assert "choice      jacobi" in result.explain()


def test_a_prepared_system_learns_once():
    with penstock.prepare(SLOW, device="cpu") as system:
        first, second = system.solve(B[:, 0]), system.solve(B[:, 1])
        assert first.converged
        assert second.converged
        assert second.iterations < 15
        system.update(3.0 * SLOW)
        third = system.solve(B[:, 1])
    assert third.converged
    assert third.iterations < 15
    assert np.allclose(3 * third.x, second.x, atol=1e-6 * abs(second.x).max())


def test_the_callers_choice_and_monitor_and_limit_are_kept():
    named = penstock.solve(SLOW, B[:, 0], device="cpu", preconditioner="jacobi")
    assert named.converged
    assert named.iterations > 100
    seen = []
    stopped = penstock.solve(SLOW, B[:, 0], device="cpu", monitor=lambda record: seen.append(1) or len(seen) == 20)
    assert stopped.columns[0].reason is StopReason.STOPPED
    assert "jacobi" in stopped.explain()
    limited = penstock.solve(SLOW, B[:, 0], device="cpu", maxiter=53, on_failure="return")
    assert limited.iterations == 53
    assert limited.columns[0].reason is StopReason.MAXITER


def free_chains(*lengths):
    """Return a matrix of free chains, each of which maps a constant to zero, and of some rows of their own."""
    chains = []
    for length in lengths:
        chain = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(length, length)).tolil()
        chain[0, 0] = chain[length - 1, length - 1] = 1.0
        chains.append(chain)
    return scipy.sparse.block_diag([*chains, 1e-8 * scipy.sparse.eye_array(50)]).tocsr()


def residuals(A, b, x):
    return np.linalg.norm((b - A @ x).reshape(len(b), -1), axis=0) / np.linalg.norm(b.reshape(len(b), -1), axis=0)


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("lengths", [(250, 250), (120,) * 7], ids=["two", "seven"])
def test_a_system_without_a_solution_ends_as_with_jacobi(lengths, columns):
    A = free_chains(*lengths)
    b = np.random.default_rng(1).normal(size=(A.shape[0], columns))
    b = b[:, 0] if columns == 1 else b
    options = {"device": "cpu", "on_failure": "return"}
    early = penstock.solve(A, b, preconditioner="jacobi", maxiter=50, **options)
    alone = penstock.solve(A, b, preconditioner="jacobi", **options)
    result = penstock.solve(A, b, **options)

    assert {column.reason for column in alone.columns} == {StopReason.INCONSISTENT}
    assert {column.reason for column in result.columns} == {StopReason.INCONSISTENT}
    assert "choice      jacobi: again, as multigrid in its place did not end well" in result.explain()
    assert (residuals(A, b, result.x) <= 1.001 * residuals(A, b, early.x)).all()
    assert result.columns[0].true_residual == pytest.approx(residuals(A, b, result.x)[0])
    assert result.iterations < 1.1 * alone.iterations


def too_small_for_smoothers(monkeypatch):
    """The eigenvalues by which multigrid smooths are measured wrongly, that of the level of a sweep is not."""
    measured = coarsening.largest_eigenvalue

    def measure(*arguments, **options):
        return (1.0 if options["settled"] is None else 0.6) * measured(*arguments, **options)

    monkeypatch.setattr(coarsening, "largest_eigenvalue", measure)


@pytest.mark.parametrize("b", [B[:, 0], B], ids=["one", "several"])
def test_multigrid_that_was_chosen_at_once_and_breaks_down_gives_way_to_a_level_that_cannot(monkeypatch, b):
    too_small_for_smoothers(monkeypatch)
    monkeypatch.setattr(placement, "cheap_factorisation", lambda *a, **options: None)
    with penstock.prepare(SLOW, columns=b.size // N**2, near_null_space=np.ones((N * N, 1)), device="cpu") as system:
        first = system.solve(b, on_failure="return")
        second = system.solve(b)

    assert first.converged
    assert second.converged
    told = "choice      smoothed_aggregation: as multigrid in its place did not end well (preconditioner not positive definite)"
    assert told in second.explain()


def test_where_the_level_cannot_be_made_either_the_result_is_returned(monkeypatch):
    def refuse(spec, A):
        raise InputError("for a test")

    too_small_for_smoothers(monkeypatch)
    monkeypatch.setattr(placement, "cheap_factorisation", lambda *a, **options: None)
    monkeypatch.setattr(SmoothedAggregationSpec, "build", refuse)

    result = penstock.solve(SLOW, B[:, 0], near_null_space=np.ones((N * N, 1)), device="cpu", on_failure="return")

    assert result.columns[0].reason is StopReason.PRECONDITIONER_NOT_POSITIVE_DEFINITE


@pytest.mark.parametrize("reason", ["NOT_FINITE", "PRECONDITIONER_NOT_POSITIVE_DEFINITE"])
def test_what_multigrid_spoils_jacobi_solves_and_stays(monkeypatch, reason):
    made = []

    class Spoilt:
        shape, dtype, device = SLOW.shape, np.dtype(np.float64), CPU

        def apply(self, x, out=None, alpha=1.0, beta=0.0):
            result = np.full_like(x, np.nan) if reason == "NOT_FINITE" else -x
            if out is None:
                return result
            out[...] = result
            return out

    monkeypatch.setattr(MultigridSpec, "build", lambda self, A: made.append(A) or Spoilt())
    with penstock.prepare(SLOW, device="cpu") as system:
        for number in range(2):
            result = system.solve(B[:, number])
            assert result.converged
            told = f"again, as multigrid in its place did not end well ({reason.lower().replace('_', ' ')})"
            assert told in result.explain()
        assert len(made) == 1
        system.update(2.0 * SLOW, "values")
        assert system.solve(B[:, 2]).converged
        assert len(made) == 2


def test_a_later_right_hand_side_without_a_solution_is_found_out_too():
    A = free_chains(1000, 1000)
    solvable = A @ np.random.default_rng(1).normal(size=A.shape[0])
    with penstock.prepare(A, device="cpu") as system:
        first = system.solve(solvable, rtol=1e-8)
        assert "choice      multigrid" in first.explain()
        assert first.converged
        other = system.solve(np.random.default_rng(2).normal(size=A.shape[0]), on_failure="return")
        assert other.reason is StopReason.INCONSISTENT
        assert system.solve(solvable, rtol=1e-8).converged


def test_a_solve_that_is_stopped_on_request_is_not_gone_on_with(monkeypatch):
    monkeypatch.setattr(slow_convergence, "_DOUBTFUL", (StopReason.STOPPED,))
    stopped = penstock.solve(SLOW, B[:, 0], device="cpu", monitor=lambda record: record.iteration >= 53)

    assert stopped.iterations == 53
    assert stopped.reason is StopReason.STOPPED


@pytest.mark.parametrize("failure", [MemoryError("none"), InputError("no level"), BudgetError("no room")])
def test_jacobi_goes_on_where_multigrid_cannot_be_made(monkeypatch, failure):
    made = []

    def refused(self, A):
        made.append(A)
        raise failure

    monkeypatch.setattr(MultigridSpec, "build", refused)
    with penstock.prepare(SLOW, device="cpu") as system:
        for number in range(3):
            result = system.solve(B[:, number])
            assert result.converged
            choice = "choice      jacobi: it promised more than 70 iterations after the first 50, but multigrid cannot be made: "
            assert choice + str(failure) in result.explain()
    assert len(made) == 1


@pytest.mark.parametrize(("seconds", "chosen"), [(0.0, "factorisation"), (1e9, "jacobi")])
def test_a_factorisation_that_takes_much_less_than_what_is_left_is_not_waited_for(seconds, chosen, monkeypatch):
    looks = []

    def within(self, most):
        looks.append(most)
        return FactorisationSpec(), seconds

    monkeypatch.setattr(predicted, "_WORTH_SCALAR", 10**6)  # multigrid is not worth it
    monkeypatch.setattr(FactorisationLook, "within", within)
    monkeypatch.setattr(predicted, "quick_look_seconds", lambda A, size: 0.0)
    result = penstock.solve(SLOW, B[:, 0], device="cpu")
    assert result.converged
    assert re.search(rf"choice +{chosen}: ", result.explain())
    [most] = looks
    assert most > 0
    if chosen == "factorisation":
        assert re.search(r"jacobi promised \d+ iterations after the first \d\d, the", result.explain())
        assert result.iterations < 80


def test_a_prepared_system_looks_once(monkeypatch):
    looks = []
    monkeypatch.setattr(predicted, "_WORTH_SCALAR", 10**6)
    monkeypatch.setattr(FactorisationLook, "within", lambda *of: looks.append(of))
    monkeypatch.setattr(predicted, "quick_look_seconds", lambda A, size: 0.0)
    with penstock.prepare(SLOW, device="cpu") as system:
        assert all(system.solve(B[:, number]).converged for number in range(3))
        system.update(2.0 * SLOW)
        assert system.solve(B[:, 0]).converged
    assert len(looks) == 1


def test_a_look_that_takes_too_long_is_not_taken(monkeypatch):
    monkeypatch.setattr(predicted, "quick_look_seconds", lambda A, size: 1e9)
    monkeypatch.setattr(predicted, "_WORTH_SCALAR", 10**6)
    monkeypatch.setattr(FactorisationLook, "within", lambda *of: 1 / 0)
    assert penstock.solve(SLOW, B[:, 0], device="cpu").converged


def test_without_room_for_multigrid_jacobi_goes_on(monkeypatch):
    monkeypatch.setattr(MultigridSpec, "workspace_nbytes", lambda *arguments, **options: 1 << 60)
    result = penstock.solve(SLOW, B[:, 0], device="cpu")

    assert result.converged
    assert "but multigrid cannot be made: its set-up needs" in result.explain()


@pytest.mark.parametrize("refresh", ["auto", "values", "keep"])
def test_an_update_before_the_first_solve_leaves_the_choice_open(refresh):
    with penstock.prepare(SLOW, device="cpu") as system:
        system.update(3.0 * SLOW, refresh)
        result = system.solve(B[:, 0])
        assert result.converged
        assert "choice      multigrid" in result.explain()
        assert "preconditioner of the values now" in result.explain()
        assert system.solve(B[:, 1]).iterations < 15
        system.update(2.0 * SLOW, "keep")
        assert "preconditioner of earlier values" in system.explain()
        assert system.solve(B[:, 1]).iterations < 15


@pytest.mark.parametrize("b", [B[:, 0], B], ids=["one", "several"])
def test_an_absolute_tolerance_decides_as_a_relative_one_does(b):
    norm = np.linalg.norm(b, axis=0).max()
    hard = penstock.solve(SLOW, b, device="cpu", rtol=0.0, atol=1e-8 * norm)
    assert hard.converged
    assert "choice      multigrid" in hard.explain()
    easy = penstock.solve(SLOW, b, device="cpu", rtol=1e-12, atol=0.02 * norm)
    assert easy.converged
    assert "choice      jacobi" in easy.explain()


def test_what_numbers_of_float32_can_mean_is_the_tolerance():
    narrow = QUICK.astype(np.float32) - 1.9 * scipy.sparse.eye_array(N * N, dtype=np.float32)
    b = B[:, 0].astype(np.float32)
    seen = penstock.solve(narrow, b, device="cpu", rtol=1e-16, preconditioner="jacobi").iterations
    assert 50 < seen < 100
    assert "choice      jacobi" in penstock.solve(narrow, b, device="cpu", rtol=1e-16).explain()


def test_multigrid_is_not_made_for_hardly_an_iteration(monkeypatch):
    made = []
    build = MultigridSpec.build
    monkeypatch.setattr(MultigridSpec, "build", lambda self, A: made.append(A) or build(self, A))
    for maxiter in (50, 51, 59):
        limited = penstock.solve(SLOW, B[:, 0], device="cpu", maxiter=maxiter, on_failure="return")
        assert limited.iterations == maxiter
        assert limited.reason is StopReason.MAXITER
    assert not made
    assert penstock.solve(SLOW, B[:, 0], device="cpu", maxiter=90).converged
    assert made


def test_large_matrices_are_worth_fewer_iterations():
    assert multigrid_iterations(10**6, 1, "cuda") > multigrid_iterations(10**10, 1, "cuda") >= 70
    assert multigrid_iterations(10**10, 3, "cuda") == 250 + round(0.06 / (1e10 / 4.4e12 + 40e-6))


@pytest.mark.usefixtures("nodes_alone")
def test_a_streamed_matrix_goes_on_with_groups_of_nodes():
    A = jumping((14, 14, 26), 1e6)
    b = np.random.default_rng(1).standard_normal(A.shape[0])
    given = {"near_null_space": np.ones(A.shape[0]), "memory": A.nnz * 3, "device": "cpu"}

    with penstock.prepare(A, **given) as system:
        first = system.solve(b)
        second = system.solve(b + 1.0)

    assert first.converged
    assert second.converged
    promise = r"nodes alone promised more than \d+ iterations after the first \d+, so they are grouped"
    assert re.search(promise, first.explain())
    assert "smoothed together" in first.message
    assert 25 <= first.iterations < 75
    assert second.iterations < 40
    assert np.linalg.norm(b - A @ first.x) <= 1e-8 * np.linalg.norm(b)


def test_in_memory_a_slow_coarse_level_gives_way_to_multigrid(monkeypatch):
    """As blocks do on a GPU, where the coarse level of a sweep is tried first."""
    monkeypatch.setattr(Request, "specs_in_memory", lambda self, size: self.specs(size, streamed=False))
    A = flat_hexahedra((14, 14, 26), 300.0)
    b = np.random.default_rng(1).standard_normal(A.shape[0])

    with penstock.prepare(A, near_null_space=np.ones(A.shape[0]), device="cpu") as system:
        first, second = system.solve(b), system.solve(b + 1.0)

    assert first.converged
    assert second.converged
    assert "multigrid: smoothed_aggregation promised more than 100 iterations after the first 25" in first.explain()
    assert 25 <= first.iterations < 45
    assert second.iterations < 20
    assert np.linalg.norm(b - A @ first.x) <= 1e-8 * np.linalg.norm(b)


def test_groups_are_worth_more_iterations_where_these_are_fast():
    def worth(seconds, kind="cuda"):
        plan = SimpleNamespace(estimated_solve_seconds=lambda: 10 * seconds, workload=SimpleNamespace(iterations=10.0))
        return grouped_iterations(2_650_000, 210_000_000, plan, kind)

    assert worth(0.01) == pytest.approx(1350, rel=0.1)
    assert worth(0.1) == pytest.approx(135, rel=0.1)
    assert worth(0.1, "cpu") > 10 * worth(0.1)


@pytest.mark.parametrize("refused", ["", "for a test"])
def test_multigrid_takes_jumps_at_once_in_memory(monkeypatch, refused):
    """A GPU begins with the coarse level of a sweep in memory, too, where nodes have several unknowns."""
    monkeypatch.setattr(Request, "specs_in_memory", lambda self, block_size: self.specs(block_size, streamed=False))
    monkeypatch.setattr(placement, "cheap_factorisation", lambda *a, **options: None)
    if refused:
        monkeypatch.setattr(OpenSystem, "use_instead", lambda system, spec, why: refused)
    A = jumping((14, 14, 26), 1e6)
    b = np.random.default_rng(1).standard_normal((A.shape[0], 2))

    with penstock.prepare(A, columns=2, near_null_space=np.ones(A.shape[0]), device="cpu") as system:
        first = system.solve(b)
        second = system.solve(b)

    assert first.converged
    assert second.converged
    told = f"smoothed_aggregation: multigrid cannot be made: {refused}" if refused else "multigrid: the stiffness jumps"
    for result in (first, second):
        assert f"choice      {told}" in result.explain()


@pytest.mark.usefixtures("nodes_alone")
def test_groups_that_are_refused_leave_the_nodes(monkeypatch):
    monkeypatch.setattr(OpenSystem, "use_instead", lambda system, spec, why: "for a test")
    A = jumping((14, 14, 26), 1e6)
    b = np.random.default_rng(1).standard_normal(A.shape[0])
    given = {"near_null_space": np.ones(A.shape[0]), "memory": A.nnz * 3, "device": "cpu", "maxiter": 60}

    with pytest.warns(penstock.NotConvergedWarning):
        result = penstock.solve(A, b, **given)

    assert "with groups of nodes cannot be made: for a test" in result.explain()
    assert result.iterations == 60


@pytest.mark.usefixtures("nodes_alone")
def test_nodes_that_cannot_be_grouped_are_not_said_to_be(monkeypatch):
    monkeypatch.setattr(local_space, "_TOO_MANY", -1.0)
    A = jumping((14, 14, 26), 1e6)
    b = np.random.default_rng(1).standard_normal(A.shape[0])
    given = {"near_null_space": np.ones(A.shape[0]), "memory": A.nnz * 3, "device": "cpu", "maxiter": 120}

    result = penstock.solve(A, b, on_failure="return", **given)

    assert "but its nodes cannot be grouped here" in result.explain()
    assert "with groups of nodes" not in result.explain()


def beside_each_other(nodes=(41, 13, 2)):
    """Two plates that hardly leave a gap and do not touch, with the coordinates of their nodes."""
    plate = Cantilever(nodes=nodes, dof=3)
    A, points = plate.matrix("csr").to_csr(), plate.mesh.coordinates()
    gap = [0.0, 0.0, 0.1 * min(plate.mesh.spacing)]
    return scipy.sparse.block_diag([A, 2.0 * A], format="csr"), np.concatenate([points, points + gap])


def test_where_aggregates_bridge_gaps_those_of_the_pattern_take_their_place():
    A, points = beside_each_other()
    b = np.random.default_rng(1).standard_normal(A.shape[0])
    given = {"coordinates": points, "memory": A.nnz * 4, "device": "cpu", "precision": "float64"}

    with penstock.prepare(A, **given) as system:
        first, second = system.solve(b), system.solve(b + 1.0)

    assert first.converged
    assert second.converged
    promise = "aggregates by coordinates promised more than 100 iterations after the first 25, so aggregates follow the pattern"
    assert promise in first.explain()
    assert second.iterations < first.iterations < 100
    assert np.linalg.norm(b - A @ first.x) <= 1e-8 * np.linalg.norm(b)


def grouped_in_the_end():
    """Solve a streamed system with jumps and coordinates, which ends with groups of nodes."""
    A = jumping((14, 14, 26), 1e6)
    points = np.stack(np.meshgrid(*map(np.arange, (14, 14, 26)), indexing="ij"), axis=-1).reshape(-1, 3).astype(float)
    b = np.random.default_rng(1).standard_normal(A.shape[0])

    result = penstock.solve(A, b, coordinates=points, memory=A.nnz * 3, device="cpu")

    assert result.converged
    assert "so they are grouped" in result.explain()
    return result


@pytest.mark.usefixtures("nodes_alone")
def test_where_the_pattern_does_not_help_groups_follow():
    result = grouped_in_the_end()
    assert 50 <= result.iterations < 100


@pytest.mark.usefixtures("nodes_alone")
def test_where_the_pattern_is_refused_groups_follow(monkeypatch):
    use_instead = OpenSystem.use_instead

    def refuse_the_pattern(system, spec, why):
        return "for a test" if getattr(spec, "aggregates", None) == "pattern" else use_instead(system, spec, why)

    monkeypatch.setattr(OpenSystem, "use_instead", refuse_the_pattern)
    grouped_in_the_end()


def test_multigrid_is_predicted_to_take_as_long_where_positive_entries_are_rounding():
    def predicted_seconds(value):
        """Of a matrix of the plane whose every other coupling has this value."""
        A = scipy.sparse.csr_array(scipy.sparse.kronsum(LINE, LINE))
        places = np.flatnonzero(A.data == -1.0)[::2]
        A.data[places] = value
        return FactorisationLook(CsrMatrix.from_csr(A), 1).multigrid_seconds

    assert predicted_seconds(1e-16) == predicted_seconds(-1.0) < 0.7 * predicted_seconds(1e-3)
