"""Solves with an image in fewer digits: what converges has in long double, in few passes, and what is unfit says so."""

import copy
import functools

import numpy as np
import pytest
import scipy.sparse
from kernel_targets import gpu_count
from random_systems import KINDS, residual

from penstock.fem import Cantilever, LognormalMaterial
from penstock.solvers import StopReason, block_jacobi, cg, image_solve, jacobi, method_named, smoothed_aggregation
from penstock.solvers.image_solve import ImageUnfitError, solve_by_image
from penstock.spmv import CPU, CsrMatrix, Device, InputError, SymmetricBsrMatrix, format_named
from penstock.spmv.communicator import ALONE
from penstock.spmv.formats.partition import row_slabs
from penstock.spmv.formats.symmetric_image import has_image, image_of
from penstock.streaming import HostPlaneStore, HostStore, StreamedMatrix
from penstock.streaming.stores.host_planes import joined

SOLVE = method_named("cg").solve


def streamed(A, device="cpu", subdivisions=4, values_dtype=np.float32, planes=False):
    """A streamed with memory for half of it, and its image, on a device; in two planes passes may read one of them."""
    count = min(subdivisions, -(-A.shape[0] // A.row_granularity))
    whole = HostStore.from_matrix(A, count)
    store = joined(HostPlaneStore.create(row_slabs(A, count)), Device(device)) if planes else whole
    memory = max(2 * max(store.index.sizes["whole"]), A.nbytes // 2)
    return StreamedMatrix(store, memory, device=device), image_of(A, values_dtype).to_device(device)


@pytest.fixture(scope="module")
def beam():
    return Cantilever(nodes=(41, 5, 5), dof=3, material=LognormalMaterial(sigma=0.5))


@pytest.fixture(scope="module")
def half(beam):
    return format_named("symmetric_bsr").from_csr(beam.matrix().to_csr(), block_size=3)


@pytest.fixture(scope="module")
def system(half):
    with streamed(half)[0] as A:
        yield A, image_of(half)


@pytest.fixture(scope="module")
def M(beam, half):
    return smoothed_aggregation(image_of(half), coordinates=beam.mesh.coordinates(), aggregate_nodes=27)


@pytest.mark.parametrize("verify", ["bound", "norm"])
@pytest.mark.parametrize("kind", KINDS)
def test_random_systems(kind, verify):
    """What plain iterations with A solve is solved, but for a few images that are refused; and what is claimed is so."""
    refused = sum(not is_solved_by_image(kind, seed, verify) for seed in range(50))
    assert refused <= 5


def is_solved_by_image(kind, seed, verify):
    rng = np.random.default_rng(1000 + seed)
    S, size = kind(rng)
    S = scipy.sparse.csr_array(S)
    S.sort_indices()
    A = CsrMatrix.from_csr(S)
    if rng.random() < 0.5:
        A = format_named("symmetric_bsr").from_csr(A, block_size=size)
    B = S @ rng.standard_normal((S.shape[0], int(rng.integers(1, 4))))
    B = B[:, 0] if B.shape[1] == 1 and rng.random() < 0.5 else B
    exact = SOLVE(A, B, None, M=jacobi(A), rtol=1e-8)

    low = np.int16 if isinstance(A, SymmetricBsrMatrix) and rng.random() < 0.5 else np.float32
    stream, image = streamed(A, values_dtype=low, planes=rng.random() < 0.5)
    with stream:
        try:
            found = solve_by_image(SOLVE, stream, image, B, M=jacobi(image), rtol=1e-8, verify=verify)
        except ImageUnfitError:
            return False

    assert found.converged or not exact.converged
    for number, column in enumerate(found.columns):
        b, x = (B, found.x) if B.ndim == 1 else (B[:, number], found.x[:, number])
        if column.converged:
            assert residual(S, b, x) <= 1.001e-8
        assert residual(S, b, x) <= 1.001 * column.true_residual + 1e-14
    return True


def test_few_passes_and_a_residual_that_is_a_bound(system, beam, half, M):
    A, image = system

    result = solve_by_image(SOLVE, A, image, beam.load(), M=M, rtol=1e-8)

    alone = cg(half, beam.load(), M=smoothed_aggregation(half, coordinates=beam.mesh.coordinates()), rtol=1e-8)
    assert result.converged
    assert result.sweeps <= 2
    assert result.bytes_streamed <= result.sweeps * A.store.index.nbytes
    assert result.iterations <= alone.iterations + 15
    assert residual(beam.matrix().to_csr(), beam.load(), result.x) <= result.true_residual <= 1e-8
    assert len(result.residual_norms) == result.iterations + 1


@pytest.mark.parametrize(("values_dtype", "most"), [(np.float32, 1), (np.int16, 4)])
def test_passes_of_each_precision(half, beam, values_dtype, most):
    """For random loads, which have all frequencies."""
    A, image = streamed(half, values_dtype=values_dtype)
    b = np.random.default_rng(0).standard_normal(A.shape[0])
    with A:
        M = smoothed_aggregation(image, coordinates=beam.mesh.coordinates())
        result = solve_by_image(SOLVE, A, image, b, M=M, rtol=1e-8)

    assert result.converged
    assert result.sweeps <= most
    assert residual(beam.matrix().to_csr(), b, result.x) <= result.true_residual <= 1e-8


def test_passes_read_one_plane_where_that_is_enough(half, beam):
    """The reported residual is a bound of the true one."""
    B = np.random.default_rng(0).standard_normal((half.shape[0], 2))
    found, moved = [], []
    for planes, verify in ((False, "bound"), (True, "bound"), (True, "norm")):
        A, image = streamed(half, subdivisions=16, values_dtype=np.int16, planes=planes)
        with A:
            M = smoothed_aggregation(image, coordinates=beam.mesh.coordinates())
            found.append(solve_by_image(SOLVE, A, image, B, M=M, rtol=1e-8, verify=verify))
            moved.append(A.bytes_streamed / found[-1].sweeps)
    assert moved[1] < 0.85 * moved[0]
    assert moved[2] > 0.9 * moved[0]
    for result in found:
        assert result.converged
        for number, column in enumerate(result.columns):
            true = residual(beam.matrix().to_csr(), B[:, number], result.x[:, number])
            assert true <= 1.001 * column.true_residual
            assert column.true_residual <= 1e-8


@pytest.fixture
def worst_products(monkeypatch):
    """Let products with the matrix in float32 be as wrong as they may be; return their calls."""
    calls = []

    def apply_rounded(self, x, out=None):
        y = self.apply(x, out)
        for number in range(y.size // len(y)):
            of_y, of_x = (vectors.reshape(len(y), -1)[:, number] for vectors in (y, x))
            of_y += 2.0**-24 * self.apply_absolute(abs(of_x)) * np.where(np.arange(len(y)) % 2, 1.0, -1.0)
        calls.append(x)
        return y

    monkeypatch.setattr(StreamedMatrix, "apply_rounded", apply_rounded)
    return calls


@pytest.mark.parametrize("allowed", [2e-3, 0.2])
@pytest.mark.parametrize("maxiter", [9, 12, 15, None])
@pytest.mark.parametrize("columns", [1, 2])
def test_residuals_are_bounded_whatever_products_in_float32_lose(
    half, beam, worst_products, monkeypatch, maxiter, columns, allowed
):
    monkeypatch.setattr(image_solve, "_LOST_OF_EXPECTED", allowed)
    A, image = streamed(half, values_dtype=np.int16, planes=True)
    B = np.random.default_rng(0).standard_normal((A.shape[0], columns))
    with A:
        M = smoothed_aggregation(image, coordinates=beam.mesh.coordinates())
        result = solve_by_image(SOLVE, A, image, B, M=M, rtol=1e-9, maxiter=maxiter)
    assert worst_products or maxiter is not None
    assert result.converged == (maxiter is None)
    for number, column in enumerate(result.columns):
        assert residual(beam.matrix().to_csr(), B[:, number], result.x[:, number]) <= column.true_residual + 1e-13


@pytest.mark.parametrize("maxiter", [2, 5, 8, 11])
def test_columns_of_a_solve_that_ends_early_have_converged_only_if_they_have(half, beam, maxiter):
    """For one of them the image gives all that it can in few iterations, which is not what was asked for."""
    A, image = streamed(half, values_dtype=np.int16)
    easy = half.apply(np.linalg.inv(half.diagonal_blocks(3))[:, :, 0].reshape(-1))
    B = np.stack([1e-3 * easy, np.random.default_rng(0).standard_normal(A.shape[0])], axis=1)
    with A:
        M = smoothed_aggregation(image, coordinates=beam.mesh.coordinates())
        result = solve_by_image(SOLVE, A, image, B, M=M, rtol=1e-9, maxiter=maxiter)
    assert not result.converged
    for number, column in enumerate(result.columns):
        true = residual(beam.matrix().to_csr(), B[:, number], result.x[:, number])
        assert true <= 1.001 * column.true_residual + 1e-14
        assert column.converged == (column.true_residual <= 1e-9)


def test_several_columns_of_which_one_is_zero(system, beam, M):
    A, image = system
    B = np.stack([beam.load(), np.zeros(A.shape[0]), np.random.default_rng(0).standard_normal(A.shape[0])], axis=1)

    result = solve_by_image(SOLVE, A, image, B, M=M, rtol=1e-9)

    assert result.converged
    assert not result.x[:, 1].any()
    for number in (0, 2):
        assert residual(beam.matrix().to_csr(), B[:, number], result.x[:, number]) <= 1e-9
        assert result.columns[number].true_residual <= 1e-9


def test_a_tolerance_that_float64_cannot_reach_ends_at_its_floor(system, beam, half, M):
    A, image = system

    result = solve_by_image(SOLVE, A, image, beam.load(), M=M, rtol=1e-17)

    assert result.reason is StopReason.ROUNDING_FLOOR
    alone = cg(half, beam.load(), M=block_jacobi(half, 3), rtol=1e-17)
    assert residual(beam.matrix().to_csr(), beam.load(), result.x) <= 3 * alone.true_residual


def test_a_guess_is_taken_up(system, beam, M):
    A, image = system
    anew = solve_by_image(SOLVE, A, image, beam.load(), M=M, rtol=1e-6)
    x = solve_by_image(SOLVE, A, image, beam.load(), M=M, rtol=1e-11).x

    result = solve_by_image(SOLVE, A, image, beam.load(), (1 + 1e-5) * x, M=M, rtol=1e-6)

    assert result.converged
    assert result.iterations < anew.iterations
    assert residual(beam.matrix().to_csr(), beam.load(), result.x) <= 1e-6


@pytest.mark.parametrize("most", [0, 3, 12])
def test_iterations_are_limited_in_all(system, beam, M, most):
    A, image = system

    result = solve_by_image(SOLVE, A, image, beam.load(), M=M, rtol=1e-12, maxiter=most)

    assert result.reason is StopReason.MAXITER
    assert result.iterations <= most
    K, b = beam.matrix().to_csr(), beam.load()
    rounding = 2.0**-53 * np.linalg.norm(abs(K) @ abs(result.x)) / np.linalg.norm(b)
    assert result.true_residual == pytest.approx(residual(K, b, result.x), rel=1e-4, abs=rounding)


def test_a_monitor_sees_all_iterations_and_stops_any(system, beam, M):
    A, image = system
    seen = []
    whole = solve_by_image(SOLVE, A, image, beam.load(), M=M, rtol=1e-10, monitor=lambda record: seen.append(record))

    assert [record.iteration for record in seen] == list(range(1, whole.iterations + 1))
    assert seen[-1].residual_norm < 1e-8
    for stop in (2, whole.iterations - 1):
        result = solve_by_image(
            SOLVE, A, image, beam.load(), M=M, rtol=1e-10, monitor=lambda record, stop=stop: record.iteration == stop
        )
        assert result.reason in (StopReason.STOPPED, StopReason.CONVERGED)  # with what the last correction had reached
        resumed = solve_by_image(SOLVE, A, image, beam.load(), M=M, rtol=1e-10, state=result.state)
        assert resumed.converged


@pytest.mark.parametrize("columns", [None, 2])
def test_what_corrections_have_gained_is_not_lost_where_a_solve_ends_early(half, system, beam, M, columns):
    A, image = system
    b = beam.load() if columns is None else np.random.default_rng(1).standard_normal((beam.unknowns, columns))
    solve = functools.partial(solve_by_image, SOLVE, A, image, b, M=M, rtol=1e-10)
    records = []
    whole = solve(monitor=lambda record: records.append((record.iteration, copy.deepcopy(record.state))))
    refined = [(iteration, state) for iteration, state in records if state.refined]
    stopped = solve(monitor=lambda record: record.iteration == refined[-1][0])

    assert whole.converged
    assert refined
    assert stopped.state.refined
    for iteration, state in (refined[-1], (stopped.iterations, stopped.state)):
        saved = type(state).from_arrays(state.to_arrays(), CPU)
        for one in (state, saved):
            resumed = solve(state=copy.deepcopy(one))
            assert resumed.converged
            assert resumed.iterations - one.iteration <= 0.7 * whole.iterations
            assert one.iteration <= iteration
            assert len(resumed.columns[0].residual_norms) == resumed.columns[0].iterations + 1
        # Without an image it goes on from the iterate, too.
        level = smoothed_aggregation(half, coordinates=beam.mesh.coordinates(), aggregate_nodes=27)
        again = SOLVE(half, b, None, M=level, rtol=1e-9, state=saved)
        assert again.converged
        assert again.columns[0].residual_norms[saved.iteration] < 1e-3
    with pytest.raises(InputError, match="resume with the system that it came from"):
        solve_by_image(SOLVE, A, image, 2.0 * b, M=M, state=saved)


@pytest.mark.parametrize("columns", [None, 3])
def test_a_solve_in_small_pieces_gets_on(system, beam, columns):
    """They end within corrections, whose part is kept; one right-hand side is zero, and so ends before the others."""
    A, image = system
    b = beam.load()
    if columns is not None:
        b = np.random.default_rng(1).standard_normal((beam.unknowns, columns))
        b[:, 1] = 0
    solve = functools.partial(solve_by_image, SOLVE, A, image, b, M=block_jacobi(image, 3), rtol=1e-10)
    whole, result = solve(), None

    for most in range(whole.iterations // 2, 8 * whole.iterations, whole.iterations // 2):
        state = None if result is None else type(result.state).from_arrays(result.state.to_arrays(), CPU)
        result = solve(state=state, maxiter=most)
        assert all(len(one.residual_norms) == one.iterations + 1 for one in result.columns)
        if result.converged:
            break

    assert result.converged
    assert result.iterations <= 6 * whole.iterations


class OfTwo(type(ALONE)):
    """The communicator of two ranks; ``answers`` are the numbers of the other rank, one for each call of ``largest``."""

    def __init__(self, answers):
        self.answers = iter(answers)

    def largest(self, number):
        return max(number, next(self.answers))


def test_an_interrupt_of_another_rank_ends_the_solve_here(half, beam, M):
    """Ranks would wait for each other for ever if one of them ended a solve and the others went on."""
    A, image = streamed(half, values_dtype=np.int16)
    A.communicator = OfTwo([0.0, 1.0])  # while its first correction was computed

    with A:
        result = solve_by_image(SOLVE, A, image, beam.load(), M=M, rtol=1e-12, verify="norm")

    assert result.reason is StopReason.STOPPED
    assert A.sweeps == 2  # for the first solve, and for the part of the correction that there was


def test_an_image_that_is_not_definite_is_refused():
    """Rounding takes more from the row sums than the shift that makes this Laplacian definite."""
    rng = np.random.default_rng(0)
    weights = rng.uniform(1, 2, 999)
    L = scipy.sparse.diags_array([-weights, -weights], offsets=[-1, 1], shape=(1000, 1000))
    S = scipy.sparse.csr_array(L + scipy.sparse.diags_array(-L.sum(axis=1) + 1e-10))
    A, image = streamed(CsrMatrix.from_csr(S))

    with A, pytest.raises(ImageUnfitError):
        solve_by_image(SOLVE, A, image, rng.standard_normal(1000), M=jacobi(image), rtol=1e-8)


@pytest.mark.parametrize(("most", "is_fit"), [(4.0, True), (400.0, False)])
def test_slow_passes_go_on_while_they_get_on(most, is_fit):
    """The image is that of another matrix, so that passes gain less than a factor of five each."""
    rng, line = (
        np.random.default_rng(4),
        scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(30, 30)),
    )
    S = scipy.sparse.csr_array(scipy.sparse.kronsum(line, line) + scipy.sparse.eye_array(900))
    other = CsrMatrix.from_csr(scipy.sparse.csr_array(S + scipy.sparse.diags_array(rng.uniform(0, most, 900))))
    A, image = streamed(CsrMatrix.from_csr(S))[0], image_of(other)
    b = rng.standard_normal(900)

    with A:
        if not is_fit:
            with pytest.raises(ImageUnfitError, match="3 passes did not halve the residual"):
                solve_by_image(SOLVE, A, image, b, M=jacobi(image), rtol=1e-8, verify="norm")
            return
        result = solve_by_image(SOLVE, A, image, b, M=jacobi(image), rtol=1e-8, verify="norm")

    assert result.converged
    assert 10 < result.sweeps < 40
    assert residual(S, b, result.x) <= 1.001 * result.true_residual <= 1.001e-8


def test_a_matrix_that_is_not_definite_is_left_to_others():
    S = scipy.sparse.csr_array(scipy.sparse.diags_array(np.r_[np.ones(50), -1.0, np.ones(49)]))
    A, image = streamed(CsrMatrix.from_csr(S))

    with A, pytest.raises(ImageUnfitError, match="not positive definite"):
        solve_by_image(SOLVE, A, image, np.ones(100), rtol=1e-8)


def test_only_images_of_float32_of_the_same_shape(system, half):
    A, _ = system
    with pytest.raises(InputError, match="float32 or int16"):
        solve_by_image(SOLVE, A, half, np.ones(A.shape[0]))
    with pytest.raises(InputError, match="shape"):
        solve_by_image(SOLVE, A, image_of(CsrMatrix.from_csr(scipy.sparse.eye_array(3, format="csr"))), np.ones(3))


def test_values_that_leave_the_range_of_float32_have_no_image():
    assert has_image(np.array([1e-9, 1e12]), CPU)
    assert not has_image(np.array([1e-30, 1.0]), CPU)
    assert not has_image(np.array([1.0, 1e25]), CPU)
    assert not has_image(np.array([0.0, 1.0]), CPU)


@pytest.mark.gpu
@pytest.mark.skipif(gpu_count() == 0, reason="no CUDA device")
@pytest.mark.parametrize("values_dtype", [np.float32, np.int16])
@pytest.mark.parametrize("columns", [1, 3])
def test_on_a_gpu(beam, half, columns, values_dtype):
    device = Device("cuda")
    A, image = streamed(half, device, values_dtype=values_dtype)
    S = beam.matrix().to_csr()
    B = np.random.default_rng(0).standard_normal((S.shape[0], columns))
    B = B[:, 0] if columns == 1 else B
    with A:
        M = smoothed_aggregation(image, coordinates=beam.mesh.coordinates(), aggregate_nodes=27)
        result = solve_by_image(SOLVE, A, image, device.asarray(B), M=M, rtol=1e-8)

        assert result.converged
        assert result.sweeps <= 4
        x = device.to_host(result.x)
    for number in range(columns):
        of_b, of_x = (B, x) if columns == 1 else (B[:, number], x[:, number])
        assert residual(S, of_b, of_x) <= 1e-8
