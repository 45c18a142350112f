"""A solve can be stopped anywhere and resumed, resident or streamed, and never tells the difference in any bit."""

import copy

import numba
import numpy as np
import pytest

from penstock.fem import Cantilever
from penstock.solvers import CgState, StopReason, block_jacobi, cg, jacobi
from penstock.spmv import StoreError
from penstock.streaming import FileStore, HostStore, StreamedMatrix
from penstock.streaming.planning.workload import Ring
from penstock.streaming.testing import FaultyStore

# Starting this far away costs so many digits that a true residual replaces the recursive one on the way to rtol.
DISTANCE, RTOL = 1e8, 1e-10

PRECONDITIONERS = {"plain": lambda A: None, "jacobi": jacobi, "block jacobi": lambda A: block_jacobi(A, 3)}
STOPS = ("first", "second", "middle", "before replacement", "at replacement", "after replacement", "last but one")


@pytest.fixture(scope="session")
def x0(b):
    return DISTANCE * np.random.default_rng(0).standard_normal(b.size)


@pytest.fixture(scope="session")
def stores(beam):
    return {name: HostStore.create(beam.subdivisions(8, name)) for name in ("csr", "bsr")}


def nbytes_of(plan, sweeps):
    return sum(map(plan.sweep_nbytes, sweeps))


def ring_nbytes(store):
    return 2 * max(subdivision.nbytes for subdivision in store.index.subdivisions)


@pytest.fixture(params=["csr", "bsr"])
def format_name(request):
    return request.param


@pytest.fixture(params=PRECONDITIONERS)
def preconditioner(request):
    return PRECONDITIONERS[request.param]


@pytest.fixture(params=["resident", "streamed"])
def operator(request, beam, stores, format_name):
    if request.param == "resident":
        yield beam.matrix(format_name)
    else:
        with StreamedMatrix(stores[format_name], ring_nbytes(stores[format_name]) + 20_000) as A:
            assert A.plan.slots
            yield A


def uninterrupted(A, b, x0, M):
    """Solve, and tell at which iteration the first true residual replaced the recursive one."""
    replaced = []
    result = cg(A, b, x0, M=M, rtol=RTOL, monitor=lambda record: replaced.append(record.state.replacements > 0))
    assert result.converged
    return result, replaced.index(True) + 1


def same_solve(one, other):
    assert one.reason is other.reason
    assert one.iterations == other.iterations
    assert one.residual_norms == other.residual_norms
    assert one.true_residual == other.true_residual
    np.testing.assert_array_equal(one.x, other.x)


class TestResume:
    @pytest.mark.parametrize("stop", STOPS)
    def test_a_stopped_solve_goes_on_bit_equal(self, operator, b, x0, preconditioner, stop):
        M = preconditioner(operator)
        whole, replacement = uninterrupted(operator, b, x0, M)
        last = whole.iterations
        assert 3 < replacement < last - 3
        after = dict(
            zip(STOPS, (1, 2, replacement // 2, replacement - 1, replacement, replacement + 1, last - 1), strict=True)
        )[stop]

        part = cg(operator, b, x0, M=M, rtol=RTOL, monitor=lambda record: record.iteration == after)
        assert part.reason is StopReason.STOPPED
        rest = cg(operator, b, M=M, rtol=RTOL, state=copy.deepcopy(part.state))

        same_solve(rest, whole)

    def test_a_state_copied_by_the_monitor_is_a_checkpoint(self, A, b, x0):
        """The solve that wrote it goes on undisturbed, and so does the one that reads it."""
        whole, _ = uninterrupted(A, b, x0, None)
        checkpoints = {}

        def keep(record):
            if record.iteration % 50 == 0:
                checkpoints[record.iteration] = copy.deepcopy(record.state)

        same_solve(cg(A, b, x0, rtol=RTOL, monitor=keep), whole)

        assert len(checkpoints) > 4
        for iteration, state in checkpoints.items():
            assert state.iteration == iteration
            same_solve(cg(A, b, rtol=RTOL, state=state), whole)

    def test_every_single_iteration_may_be_a_call_of_its_own(self, A, b):
        M = jacobi(A)
        whole = cg(A, b, M=M, rtol=1e-8)
        result = cg(A, b, M=M, rtol=1e-8, monitor=lambda record: True)
        while result.reason is StopReason.STOPPED:
            result = cg(A, b, M=M, rtol=1e-8, state=copy.deepcopy(result.state), monitor=lambda record: True)

        same_solve(result, whole)

    @pytest.mark.parametrize("after", [1, 40, 150])
    def test_a_solve_out_of_iterations_goes_on_bit_equal(self, A, b, preconditioner, after):
        """As its message advises: raise maxiter."""
        M = preconditioner(A)
        whole = cg(A, b, M=M, rtol=1e-9)
        part = cg(A, b, M=M, rtol=1e-9, maxiter=min(after, whole.iterations - 1))
        assert part.reason is StopReason.MAXITER

        same_solve(cg(A, b, M=M, rtol=1e-9, state=part.state), whole)

    @pytest.mark.parametrize("loose", [1e-2, 1e-5])
    def test_a_converged_solve_goes_on_to_a_tighter_tolerance(self, A, b, preconditioner, loose):
        """Starting again from a good iterate costs CG its memory, at worst as many iterations as from the start."""
        M = preconditioner(A)
        direct = cg(A, b, M=M, rtol=1e-9).iterations
        state = cg(A, b, M=M, rtol=loose).state
        before = state.iteration

        result = cg(A, b, M=M, rtol=1e-9, state=state)

        assert result.converged
        assert result.iterations - before <= direct * 1.1

    def test_a_converged_solve_is_not_iterated_again(self, A, b):
        done = cg(A, b, rtol=1e-8)
        x = done.x.copy()

        again = cg(A, b, rtol=1e-8, state=done.state)

        assert again.converged
        assert again.iterations == done.iterations
        np.testing.assert_array_equal(again.x, x)

    def test_a_state_from_a_good_first_guess_goes_on_to_a_tighter_tolerance(self, A, b):
        """That state has seen no search direction yet."""
        good = cg(A, b, rtol=1e-6).x
        state = cg(A, b, good, rtol=1e-5).state
        assert state.iteration == 0

        assert cg(A, b, rtol=1e-9, state=state).converged

    def test_maxiter_counts_the_iterations_before_the_stop(self, A, b):
        part = cg(A, b, rtol=1e-9, monitor=lambda record: record.iteration == 20)

        assert cg(A, b, rtol=1e-9, maxiter=30, state=copy.deepcopy(part.state)).iterations == 30
        assert cg(A, b, rtol=1e-9, maxiter=20, state=copy.deepcopy(part.state)).iterations == 20

    def test_the_state_is_changed_in_place(self, A, b):
        part = cg(A, b, monitor=lambda record: record.iteration == 5)
        state = part.state
        assert isinstance(state, CgState)

        result = cg(A, b, state=state)

        assert result.state is state
        assert state.iteration == result.iterations > 5


@pytest.fixture(scope="module")
def resident_results(beam, b):
    results = {}
    for name in ("csr", "bsr"):
        A = beam.matrix(name)
        for kind, make in PRECONDITIONERS.items():
            results[name, kind] = cg(A, b, M=make(A), rtol=1e-9)
    return results


class TestStreamedSolve:
    @pytest.mark.parametrize("overlap", [True, False])
    @pytest.mark.parametrize("share", [0.0, 0.5, 1.0], ids=["smallest", "half resident", "all resident"])
    @pytest.mark.parametrize("kind", PRECONDITIONERS)
    def test_is_bit_equal_to_the_resident_one_and_counts_its_traffic(
        self, stores, resident_results, b, format_name, share, overlap, kind
    ):
        store = stores[format_name]
        ring = ring_nbytes(store)
        budget = ring + int(share * (store.index.nbytes - ring))
        expected = resident_results[format_name, kind]
        with StreamedMatrix(store, budget, ring=Ring(overlap=overlap)) as A:
            M = PRECONDITIONERS[kind](A)
            sweeps, nbytes = A.sweeps, A.bytes_streamed

            result = cg(A, b, M=M, rtol=1e-9)

            assert result.sweeps == A.sweeps - sweeps
            assert result.bytes_streamed == A.bytes_streamed - nbytes == nbytes_of(A.plan, range(sweeps, A.sweeps))
            assert (result.bytes_streamed > 0) == (share < 1.0)
        same_solve(result, expected)
        assert result.sweeps == expected.sweeps

    @pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS == 1, reason="this machine computes in one thread")
    def test_the_number_of_threads_changes_no_bit(self, format_name):
        """Of vectors long enough for several partial sums."""
        beam = Cantilever(nodes=(25, 11, 11), dof=3)
        load, results = beam.load(), []
        with StreamedMatrix(HostStore.create(beam.subdivisions(6, format_name)), "4 MiB") as A:
            assert A.plan.slots
            for threads in (1, numba.config.NUMBA_NUM_THREADS):
                numba.set_num_threads(threads)
                results.append(cg(A, load, M=jacobi(A), maxiter=5))
            numba.set_num_threads(1)

        same_solve(*results)

    def test_records_tell_the_bytes_streamed_since_the_call(self, stores, b):
        with StreamedMatrix(stores["bsr"], ring_nbytes(stores["bsr"])) as A:
            A @ b
            told, counted, products = [], [], []

            def monitor(record):
                told.append(record.bytes_streamed)
                products.append(record.iteration + record.state.replacements)
                counted.append(A.bytes_streamed - A.plan.streamed_nbytes)

            result = cg(A, b, monitor=monitor, maxiter=60)  # later, symmetry is tested once

            assert told == counted
            assert told == [nbytes_of(A.plan, range(1, 1 + count)) for count in products]
            assert products[0] == 1
            assert nbytes_of(A.plan, range(1, 2 + products[-1])) == result.bytes_streamed  # and the true residual

    def test_the_floor_is_found_and_its_sweep_counted(self, stores, A, b):
        resident = cg(A, b, rtol=1e-30)
        with StreamedMatrix(stores["bsr"], ring_nbytes(stores["bsr"])) as streamed:
            result = cg(streamed, b, rtol=1e-30)

            assert result.sweeps == streamed.sweeps
        assert result.reason is StopReason.ROUNDING_FLOOR
        same_solve(result, resident)
        assert result.rounding_floor == resident.rounding_floor

    def test_it_goes_on_after_a_fault_of_the_disk_from_the_last_state(self, beam, A, b, tmp_path):
        """The state copied before the fault, a new matrix on the same store, and the same bits."""
        states = []
        with FileStore.create(tmp_path / "store", beam.subdivisions(8)) as store:

            def fail(read, number):
                if read == 500:
                    raise StoreError("the disk is gone")

            with (
                StreamedMatrix(FaultyStore(store, fail), ring_nbytes(store)) as streamed,
                pytest.raises(StoreError, match="the disk is gone"),
            ):
                cg(streamed, b, rtol=1e-9, monitor=lambda record: states.append(copy.deepcopy(record.state)))
            with StreamedMatrix(store, ring_nbytes(store)) as streamed:
                result = cg(streamed, b, rtol=1e-9, state=states[-1])

        same_solve(result, cg(A, b, rtol=1e-9))

    def test_a_preconditioner_that_sweeps_the_same_matrix_is_counted(self, stores, b):
        """One step of Richardson's iteration: z = 2 w r - w^2 A r with w below 1 / the largest eigenvalue."""
        with StreamedMatrix(stores["bsr"], ring_nbytes(stores["bsr"])) as A:
            weight = 0.5 / np.abs(A.apply_absolute(np.ones(b.size))).max()
            before = A.sweeps, A.bytes_streamed

            result = cg(A, b, M=lambda r: 2 * weight * r - weight**2 * (A @ r), rtol=1e-6)

            assert result.converged
            assert result.bytes_streamed == A.bytes_streamed - before[1]
            assert result.sweeps == A.sweeps - before[0] >= 2 * result.iterations
