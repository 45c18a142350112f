"""CG with a coarse level: few iterations at any size, one sweep each, the true residual, the same bits streamed."""

import contextlib
import copy

import numpy as np
import pytest
import scipy.sparse
import scipy.spatial

from penstock.fem import Cantilever, LognormalMaterial, TwoPhaseMaterial
from penstock.solvers import CoarseCgState, StopReason, block_cg, cg, chebyshev, smoothed_aggregation
from penstock.solvers.amg.sweep import CoarseSweep
from penstock.spmv import CsrMatrix
from penstock.streaming import HostStore, Ring, StreamedMatrix, Workload

# Of an iteration, and the first of these, which form its residual.
PRODUCTS, RESIDUAL = 14, 3


def beam_of(nodes, dof=3):
    return Cantilever(nodes=nodes, dof=dof, material=LognormalMaterial(sigma=0.5, seed=1))


def level_for(beam, A, **options):
    return smoothed_aggregation(A, beam.rigid_body_modes(), aggregates=beam.mesh.node_counts, **options)


def streamed(beam, name, count, slots, **ring):
    store = HostStore.create(beam.subdivisions(count, name))
    budget = slots * max(store.index.sizes["whole"])
    return StreamedMatrix(store, budget, workload=Workload(degree=PRODUCTS), ring=Ring(slots=slots, **ring))


def open_beam(beam, slots):
    """The matrix streamed through a few slots, or a context that holds all of it."""
    if slots is None:
        return contextlib.nullcontext(beam.matrix("symmetric_bsr"))
    store = HostStore.create(beam.subdivisions(20, "symmetric_bsr"))
    budget, workload = slots * max(store.index.sizes["whole"]), Workload(degree=PRODUCTS)
    return StreamedMatrix(store, budget, workload=workload, ring=Ring(slots=slots))


def true_residual(A, x, b):
    return np.linalg.norm(b - A.to_csr() @ x) / np.linalg.norm(b)


@pytest.mark.parametrize(
    ("nodes", "dof", "most"),
    [(16, 3, 11), (24, 3, 11), ((65, 9, 9), 3, 13), (12, 6, 11), (20, 1, 8), ((40, 2, 2), 3, 18)],
)
@pytest.mark.parametrize("name", ["bsr", "symmetric_bsr"])
def test_it_needs_about_ten_iterations_and_the_residual_is_true(nodes, dof, most, name):
    beam = beam_of(nodes, dof)
    A, b = beam.matrix(name), beam.load()

    result = cg(A, b, M=level_for(beam, A), rtol=1e-8)

    assert result.converged
    assert result.iterations <= most
    assert result.true_residual <= 1e-8
    assert result.true_residual == pytest.approx(true_residual(beam.matrix(), result.x, b), rel=3e-2)
    assert len(result.residual_norms) == result.iterations + 1


@pytest.mark.parametrize("slots", [None, 2, 16])
def test_what_is_computed_ahead_changes_no_bit(monkeypatch, slots):
    """As a GPU does, whose last digits vary, while the host waits; also where a solve then ends, at a limit or at a floor."""
    beam, results = beam_of((33, 5, 5)), []
    B = np.random.default_rng(0).standard_normal((beam.unknowns, 2))
    for ahead in (lambda sweep: None, CoarseSweep.complete):
        monkeypatch.setattr(CoarseSweep, "complete_ahead", ahead)
        with open_beam(beam, slots) as A:
            M, b = level_for(beam, A), B[:, 0].copy()
            stopped = cg(A, b, M=M, rtol=1e-10, maxiter=4)
            solved = [
                stopped,
                cg(A, b, M=M, rtol=1e-10, state=stopped.state),
                cg(A, b, M=M, rtol=1e-10),
                cg(A, b, x0=stopped.x, M=M, rtol=1e-6),
                block_cg(A, B, M=M, rtol=1e-8),
            ]
            if slots is None:  # where sweeps alternate, digits at the floor depend on the direction
                solved.append(cg(A, b, M=M, rtol=1e-15))
        results.append([(one.x.tobytes(), one.iterations, one.message) for one in solved])

    assert results[0] == results[1]


@pytest.mark.parametrize("near", [{}, {"coordinates": True}, {"near_null_space": True}])
def test_shuffled_nodes_need_a_few_more(near):
    beam = beam_of(14)
    size, n = 3, beam.unknowns
    order = np.random.default_rng(0).permutation(n // size)
    rows = (order[:, None] * size + np.arange(size)).reshape(-1)
    A = beam.matrix().to_csr()[rows][:, rows].tocsr()
    A.sort_indices()
    options = {"coordinates": beam.mesh.coordinates()[order]} if "coordinates" in near else {}
    if "near_null_space" in near:
        options = {"near_null_space": beam.rigid_body_modes()[rows]}

    M = smoothed_aggregation(A, block_size=size, **options)
    result = cg(M.A, beam.load()[rows], M=M, rtol=1e-8)

    assert result.converged
    assert result.iterations <= (17 if near else 30)


def test_a_tight_tolerance_is_met():
    beam = beam_of(16)
    A, b = beam.matrix(), beam.load()

    result = cg(A, b, M=level_for(beam, A), rtol=1e-12)

    assert result.converged
    assert true_residual(A, result.x, b) <= 2e-12
    assert result.iterations <= 17


@pytest.mark.parametrize("slots", [PRODUCTS + 1, 9, 3, 2])
@pytest.mark.parametrize("overlap", [True, False])
def test_streamed_it_has_the_same_bits(slots, overlap):
    beam = beam_of((32, 5, 5))
    A, b = beam.matrix(), beam.load()
    # The largest eigenvalue is measured in chunks of other sizes: the same one for both.
    resident = cg(A, b, M=level_for(beam, A), rtol=1e-8)

    with streamed(beam, "bsr", 32, slots, overlap=overlap) as S:
        M = level_for(beam, S)
        before = S.sweeps
        result = cg(S, b, M=M, rtol=1e-8)
        sweeps = S.sweeps - before

    assert result.iterations == resident.iterations
    assert np.array_equal(result.x, resident.x)
    together = slots - 1 if overlap else slots
    an_iteration = -(-PRODUCTS // together)
    for_the_start = -(-len(M.smooth) // together)
    # The last residual needs the first products of an iteration only, where others would be made in further sweeps.
    of_residual, of_rest = -(-RESIDUAL // together), -(-(PRODUCTS - RESIDUAL) // together)
    for_the_end = of_residual if of_residual + of_rest == an_iteration else an_iteration
    assert sweeps == result.iterations * an_iteration + for_the_start + for_the_end


def test_in_memory_no_product_follows_the_last_residual():
    beam = beam_of((32, 5, 5))
    A, b = beam.matrix(), beam.load()
    M = level_for(beam, A)

    whole, stopped = cg(A, b, M=M, rtol=1e-8), cg(A, b, M=M, maxiter=3)

    assert whole.sweeps == len(M.smooth) + whole.iterations * PRODUCTS + RESIDUAL
    assert stopped.sweeps == len(M.smooth) + 3 * PRODUCTS + RESIDUAL


def test_half_of_the_matrix_streamed_agrees_to_rounding():
    beam = beam_of((32, 6, 6))
    A, b = beam.matrix("symmetric_bsr"), beam.load()
    resident = cg(A, b, M=level_for(beam, A), rtol=1e-10)

    with streamed(beam, "symmetric_bsr", 8, PRODUCTS + 1) as S:
        result = cg(S, b, M=level_for(beam, S), rtol=1e-10)

    assert abs(result.iterations - resident.iterations) <= 1
    assert np.linalg.norm(result.x - resident.x) <= 1e-8 * np.linalg.norm(resident.x)


def test_an_initial_guess_is_used():
    beam = beam_of(10)
    A, b = beam.matrix(), beam.load()
    M = level_for(beam, A)
    x = cg(A, b, M=M, rtol=1e-6).x

    result = cg(A, b, x, M=M, rtol=1e-8)

    assert result.converged
    assert result.iterations < cg(A, b, M=M, rtol=1e-8).iterations / 2
    assert cg(A, b, x, M=M, rtol=1e-5).iterations == 0


def test_a_solve_resumes_with_the_same_bits():
    beam = beam_of((20, 6, 6))
    A, b = beam.matrix(), beam.load()
    M = level_for(beam, A)
    whole = cg(A, b, M=M, rtol=1e-9)

    first = cg(A, b, M=M, rtol=1e-9, maxiter=4)
    second = cg(A, b, M=M, rtol=1e-9, state=copy.deepcopy(first.state))

    assert first.reason is StopReason.MAXITER
    assert isinstance(first.state, CoarseCgState)
    assert first.true_residual == pytest.approx(true_residual(A, first.x, b), rel=1e-6)
    assert second.iterations == whole.iterations
    assert np.array_equal(second.x, whole.x)
    assert second.residual_norms == whole.residual_norms


def test_a_monitor_stops_it_between_two_iterations():
    beam = beam_of(10)
    A, b = beam.matrix(), beam.load()
    seen = []

    result = cg(A, b, M=level_for(beam, A), rtol=1e-9, monitor=lambda record: seen.append(record) or len(seen) == 3)

    assert result.reason is StopReason.STOPPED
    assert [record.iteration for record in seen] == [1, 2, 3]
    assert seen[-1].residual_norm == result.residual_norms[-1] == pytest.approx(true_residual(A, result.x, b), rel=1e-6)


def test_nothing_is_to_do_for_zero():
    beam = beam_of(6)
    A = beam.matrix()

    result = cg(A, np.zeros(beam.unknowns), M=level_for(beam, A))

    assert result.converged
    assert not result.x.any()


def test_an_indefinite_matrix_is_told():
    beam = beam_of(8)
    A = beam.matrix()
    M = level_for(beam, A)
    A.values[...] *= -1.0

    assert cg(A, beam.load(), M=M, maxiter=50).reason in {
        StopReason.NOT_POSITIVE_DEFINITE,
        StopReason.PRECONDITIONER_NOT_POSITIVE_DEFINITE,
    }


def test_the_rounding_floor_ends_the_solve():
    beam = beam_of(8)
    A, b = beam.matrix(), beam.load()

    result = cg(A, b, M=level_for(beam, A), rtol=1e-17)

    assert result.reason is StopReason.ROUNDING_FLOOR
    assert (
        result.iterations < 300
    )  # with those of plain conjugate gradients, as long as these get on; they depend on rounding
    assert max(result.residual_norms[12:]) < 1e-11  # they do not run away from there


def test_free_bodies_end_at_their_rounding_floor():
    """Springs between points in space; what is left of b is noise, partly in the null space, and so are directions."""
    for seed in range(5):
        rng, count = np.random.default_rng(seed), 150
        points = rng.random((count, 3))
        near = scipy.spatial.cKDTree(points).query(points, k=14)[1]
        springs = {(min(pair), max(pair)) for node in near for pair in zip([node[0]] * 13, node[1:], strict=True)}
        K = np.zeros((count, 3, count, 3))
        for i, j in springs:
            along = points[j] - points[i]
            stiffness = np.outer(along, along) / np.linalg.norm(along) ** 3
            K[i, :, i] += stiffness
            K[j, :, j] += stiffness
            K[i, :, j] -= stiffness
            K[j, :, i] -= stiffness
        A = CsrMatrix.from_csr(scipy.sparse.csr_array(K.reshape(3 * count, 3 * count)))
        modes = np.zeros((count, 3, 6))
        modes[:, range(3), range(3)] = 1.0
        for mode, (i, j) in enumerate(((0, 1), (1, 2), (2, 0)), start=3):
            modes[:, i, mode], modes[:, j, mode] = points[:, j], -points[:, i]
        modes = np.linalg.qr(modes.reshape(-1, 6))[0]
        b = rng.standard_normal(3 * count)

        result = cg(A, b - modes @ (modes.T @ b), M=smoothed_aggregation(A), rtol=1e-17, maxiter=2000)

        assert result.reason is StopReason.ROUNDING_FLOOR
        assert result.true_residual < 1e-14


def test_a_large_guess_is_overcome():
    """Rounding in a large x parts the true residual from that of the recurrence, from which no direction follows."""
    beam = Cantilever(nodes=(200, 3, 3), dof=3)
    A, b = beam.matrix(), beam.load()
    M = smoothed_aggregation(A, coordinates=beam.mesh.coordinates())
    guess = 1e9 * np.random.default_rng(8).standard_normal(beam.unknowns)

    result = cg(A, b, guess, M=M, rtol=1e-15)

    assert result.true_residual < 30 * cg(A, b, M=M, rtol=1e-15).true_residual


def test_for_another_matrix_it_is_a_preconditioner_like_any_other():
    beam = beam_of(12)
    A, b = beam.matrix(), beam.load()
    M = level_for(beam, A)

    result = cg(beam.matrix("csr"), b, M=M, rtol=1e-8)

    assert result.converged
    assert result.iterations <= 11


def test_block_cg_takes_it():
    beam = beam_of(10)
    A = beam.matrix()
    B = np.random.default_rng(0).standard_normal((beam.unknowns, 4))

    result = block_cg(A, B, M=level_for(beam, A), rtol=1e-8)

    assert all(column.converged for column in result.columns)
    assert max(column.iterations for column in result.columns) <= 12


def two_phase(contrast):
    material = TwoPhaseMaterial(fraction=0.3, contrast=contrast, seed=1)
    return Cantilever(nodes=12, dof=3, material=material)


@pytest.mark.parametrize("contrast", [1e3, 1e5])
def test_where_the_coarse_level_does_not_pay_the_polynomial_is_widened(contrast):
    """Stiffness that jumps from element to element: no aggregation sees it."""
    beam = two_phase(contrast)
    A, b = beam.matrix(), beam.load()

    result = cg(A, b, M=level_for(beam, A), rtol=1e-8)

    alone = cg(A, b, M=chebyshev(A, 13, block_size=3), rtol=1e-8)
    assert result.converged
    assert true_residual(A, result.x, b) <= 1.01e-8
    assert result.iterations <= 1.3 * alone.iterations
    assert "polynomial was widened" in result.message
    assert "widened" not in cg(A, b, M=level_for(beam, A), rtol=1e-8, maxiter=5).message


def test_a_solve_whose_polynomial_was_widened_resumes_with_the_same_bits():
    beam = two_phase(1e3)
    A, b = beam.matrix(), beam.load()
    M = level_for(beam, A)
    whole = cg(A, b, M=M, rtol=1e-8)
    columns = block_cg(A, np.stack([b, -2 * b], axis=1), M=M, rtol=1e-8)

    for stop in (6, 20):
        first = cg(A, b, M=M, rtol=1e-8, maxiter=stop)
        second = cg(A, b, M=M, rtol=1e-8, state=copy.deepcopy(first.state))
        assert first.state.widened == (stop > 10)
        assert np.array_equal(second.x, whole.x)
    assert columns.converged
    assert columns.state.widened
    assert abs(columns.iterations - whole.iterations) <= 3


@pytest.mark.parametrize("columns", [1, 3])
def test_half_of_a_matrix_resumes_with_the_same_bits_after_tests_for_the_floor(columns):
    """Such a test is a sweep, and half of a matrix adds in the order of the rows."""
    material = TwoPhaseMaterial(fraction=0.3, contrast=1e5, seed=1)
    beam = Cantilever(nodes=(60, 4, 8), dof=3, material=material)
    b = beam.load()
    B = b if columns == 1 else np.stack([b, *np.random.default_rng(0).standard_normal((columns - 1, len(b)))], axis=1)
    solve = cg if columns == 1 else block_cg
    taken = {}

    def keep(record):
        taken[record.iteration] = copy.deepcopy(record.state), S.direction

    with streamed(beam, "symmetric_bsr", 30, PRODUCTS + 1) as S:
        M = level_for(beam, S)
        whole = solve(S, B, M=M, rtol=1e-8, maxiter=40, monitor=keep)
        assert whole.sweeps > whole.iterations + 2  # tests were made
        for iteration in (3, 20):
            state, direction = taken[iteration]
            S.turn_to(direction)
            again = solve(S, B, M=M, rtol=1e-8, maxiter=40, state=state)
            assert np.array_equal(again.state.x, whole.state.x)
            assert again.iterations == whole.iterations


def test_a_block_tests_one_column_at_a_time():
    beam = two_phase(1e5)
    A = beam.matrix("bsr")
    B = np.random.default_rng(1).standard_normal((beam.unknowns, 8))
    calls = []
    absolute = type(A).apply_absolute

    with pytest.MonkeyPatch.context() as patch:
        M = level_for(beam, A)
        patch.setattr(type(A), "apply_absolute", lambda self, x: calls.append(1) or absolute(self, x))
        result = block_cg(A, B, M=M, rtol=1e-8, maxiter=40)

    assert 0 < len(calls) <= result.iterations / 8


def arrow(n):
    """A matrix of which the coarse level is nearly the inverse: directions after the first are rounding."""
    A = scipy.sparse.diags_array([2.0] * n).tolil()
    A[0, :] = A[:, 0] = 1.0
    A[0, 0] = n
    return scipy.sparse.csr_array(A)


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("rtol", [1e-12, 3e-13, 1e-17])
def test_curvature_that_rounding_has_spoiled_is_not_taken_for_a_matrix_that_is_not_definite(rtol, columns):
    A = arrow(400)
    B = np.random.default_rng(3).random((400, columns)) + (columns == 1)

    result = block_cg(A, B, M="smoothed_aggregation", rtol=rtol)

    for column, of in enumerate(result.columns):
        assert of.reason is (StopReason.CONVERGED if rtol > 1e-16 else StopReason.ROUNDING_FLOOR)
        residual = np.linalg.norm(B[:, column] - A @ result.x[:, column]) / np.linalg.norm(B[:, column])
        assert residual <= (2 * rtol if rtol > 1e-16 else 1e-12)
        assert len(of.residual_norms) <= result.iterations + 1


def test_a_column_that_has_ended_stays_when_others_begin_anew():
    A, rng = arrow(400), np.random.default_rng(5)
    B = rng.random((400, 4))
    B[:, 1], B[:, 2] = 0.0, A @ np.ones(400)
    guess = np.zeros_like(B)
    guess[:, 2] = 1.0

    result = block_cg(A, B, guess, M="smoothed_aggregation", rtol=1e-14)

    assert result.converged
    assert np.array_equal(result.x[:, 1], np.zeros(400))
    assert np.linalg.norm(B - A @ result.x, axis=0) == pytest.approx(np.zeros(4), abs=1e-12)


@pytest.mark.parametrize("columns", [1, 2])
def test_what_a_coarse_level_cannot_reach_is_not_called_the_floor(columns):
    """Constants say nothing of a matrix whose rows are scaled by exp(-14) to exp(14); Jacobi does not mind."""
    rng = np.random.default_rng(0)
    line = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(12, 12))
    square = scipy.sparse.kronsum(line, line)
    scale = scipy.sparse.diags_array(np.exp(rng.uniform(-14, 14, 144)))
    A = (scale @ square @ scale).tocsr()
    A = CsrMatrix.from_csr((A + A.T) / 2)
    b = rng.standard_normal((144, columns))

    M = smoothed_aggregation(A)
    result = cg(A, b[:, 0].copy(), M=M, rtol=1e-10) if columns == 1 else block_cg(A, b, M=M, rtol=1e-10)

    for number, column in enumerate(result.columns):
        bound = np.linalg.norm(abs(A.to_csr()) @ abs(column.x))
        floor = np.finfo(float).eps / 2 * bound / np.linalg.norm(b[:, number])
        assert not column.converged
        assert column.true_residual <= 1.0
        assert (column.reason is StopReason.ROUNDING_FLOOR) == (column.true_residual <= 100 * floor)


@pytest.mark.parametrize("columns", [1, 3])
def test_without_kept_vectors_a_solve_hands_over_its_own(columns):
    beam = beam_of((9, 5, 5))
    A, b = beam.matrix("bsr"), np.random.default_rng(0).standard_normal((beam.unknowns, columns)).squeeze()
    solve = cg if columns == 1 else block_cg
    kept, given = (level_for(beam, A) for _ in range(2))
    given.keeps_vectors = False

    first, second = solve(A, b, M=kept), solve(A, b, M=given)
    x = second.x.copy()
    again = solve(A, b, M=given, state=solve(A, b, M=given, maxiter=3).state)

    assert np.array_equal(first.x, second.x)
    assert np.array_equal(second.x, x)  # no later solve writes to it
    assert again.converged
    assert np.allclose(again.x, x, rtol=1e-6)
    assert len(kept.lend_vectors(b)) == 8
    assert not given._lent


def test_at_the_rounding_floor_it_is_as_accurate_as_plain_cg_with_the_same_preconditioner():
    beam = beam_of((160, 15, 15))
    A, b = beam.matrix("bsr"), beam.load("shear")
    M = level_for(beam, A)

    plain = cg(A, b, M=M.linear_operator(), rtol=1e-14, maxiter=30)
    one_sweep = cg(A, b, M=M, rtol=1.5 * plain.true_residual, maxiter=20)

    assert plain.reason is StopReason.ROUNDING_FLOOR
    assert one_sweep.converged


def test_directions_that_are_noise_are_not_taken_for_those_of_a_singular_matrix():
    beam = beam_of((600, 5, 5))
    A, b = beam.matrix("bsr"), beam.load("shear")

    result = cg(A, b, M=level_for(beam, A), rtol=1e-13, maxiter=60)

    assert result.reason is StopReason.ROUNDING_FLOOR
    assert result.true_residual < 1e-6
    assert np.linalg.norm(b - A @ result.x) == pytest.approx(result.true_residual * np.linalg.norm(b), rel=0.3)
