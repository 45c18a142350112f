"""Fewer threads are used while other processes take the cores, without a change of bits."""

import itertools

import numba
import numpy as np
import pytest

from penstock import adaptive_threads as module
from penstock.adaptive_threads import ThreadChoice, adaptive_threads, most_threads
from penstock.fem import Cantilever
from penstock.solvers import block_cg, cg

needs_threads = pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one thread")


class Machine:
    """Iterations of a simulated machine: seconds of one, and the share that its threads compute, by number of threads."""

    def __init__(self, seconds, share):
        self.seconds, self.share = seconds, share

    def run(self, choice, duration):
        """Iterate for so long; return the numbers of threads used, one per iteration."""
        used, elapsed = [], 0.0
        while elapsed < duration:
            threads = choice.threads
            seconds = self.seconds(threads)
            choice.observe(1, seconds, seconds * threads * self.share(threads))
            used.append(threads)
            elapsed += seconds
        return used


QUIET = Machine(lambda threads: 0.16 / threads, lambda threads: 0.87)
# Two threads wait for each other and for two busy processes; one has its share of a core.
BUSY = Machine(lambda threads: {1: 0.03, 2: 0.037}[threads], lambda threads: {1: 0.6, 2: 0.35}[threads])
# Nobody takes the cores, but the threads wait for something that is not counted, each with as much to do.
WAITING = Machine(lambda threads: 0.16 / threads, lambda threads: 0.5)
SERIAL = Machine(lambda threads: 0.01, lambda threads: 1 / threads)


def test_a_quiet_machine_uses_all_threads_all_the_time():
    choice = ThreadChoice(16)

    assert set(QUIET.run(choice, 60)) == {16}
    assert choice.fewer_seconds == 0


def test_beside_busy_processes_fewer_threads_are_used_from_the_first_third_of_a_second_on():
    choice = ThreadChoice(2)
    used = BUSY.run(choice, 60)

    assert used.index(1) * BUSY.seconds(2) < 1 / 3
    assert used.count(2) < 0.05 * len(used)
    assert choice.fewer_seconds == pytest.approx(used.count(1) * BUSY.seconds(1))


def test_all_threads_are_used_again_when_the_machine_is_quiet():
    choice = ThreadChoice(16)
    busy = Machine(lambda threads: 0.02 * (1 + (threads > 2)), lambda threads: 0.3)
    assert busy.run(choice, 60)[-1] <= 2

    used = QUIET.run(choice, 60)

    assert set(used[-100:]) == {16}
    assert sum(QUIET.seconds(threads) for threads in used if threads < 16) < 15


def test_fewer_threads_that_are_slower_are_tried_more_and_more_rarely():
    used = WAITING.run(choice := ThreadChoice(8), 300)

    assert used.count(8) * WAITING.seconds(8) > 0.95 * 300
    assert choice.threads in (4, 8)
    trials = [key for key, _ in itertools.groupby(used)].count(4)
    assert 30 < trials < 300 / 8 + 6


def test_work_for_one_thread_ends_with_one():
    assert SERIAL.run(ThreadChoice(8), 60)[-1] <= 2


def test_loading_of_kernels_is_no_reason_for_fewer_threads():
    choice = ThreadChoice(2)

    assert choice.observe(1, 20.0, 20.0) == 2
    assert choice.observe(1, 0.2, 0.35) == 2


def test_a_single_thread_stays_one():
    assert set(BUSY.run(ThreadChoice(1), 5)) == {1}


@needs_threads
def test_the_number_of_threads_is_restored():
    before = numba.get_num_threads()
    with adaptive_threads() as choice:
        numba.set_num_threads(1)
        assert (choice.threads, most_threads()) == (before, before)
        with adaptive_threads() as inner:  # a solve in a monitor of a solve
            assert (inner.threads, most_threads()) == (1, before)
        assert (numba.get_num_threads(), most_threads()) == (1, before)
    assert (numba.get_num_threads(), most_threads()) == (before, before)


@needs_threads
@pytest.mark.parametrize("solver", [cg, block_cg])
def test_a_solve_with_fewer_threads_has_the_same_bits(monkeypatch, solver):
    beam = Cantilever(nodes=(9, 4, 4), dof=3)
    A, b = beam.matrix("symmetric_bsr"), beam.load()
    b = b if solver is cg else np.stack([b, b[::-1]], axis=1)
    alone = solver(A, b)
    monkeypatch.setattr(module, "_WINDOW", 0.0)
    monkeypatch.setattr("time.process_time", lambda: 0.0)  # as if other processes had all the time
    used = []

    beside = solver(A, b, monitor=lambda record: used.append((numba.get_num_threads(), most_threads())))

    assert min(used)[0] < max(used)[0] == numba.get_num_threads()
    assert {most for _, most in used} == {numba.get_num_threads()}
    assert np.array_equal(alone.x, beside.x)
    assert alone.timings.get("fewer_threads", 0) == 0 < beside.timings["fewer_threads"] < beside.timings["total"]
    assert "threads     half or fewer" in beside.explain()


def test_ranks_do_not_take_their_waiting_for_busy_cores(monkeypatch):
    from penstock.spmv.communicator import ALONE

    monkeypatch.setattr(module, "_WINDOW", 0.0)
    monkeypatch.setattr("time.process_time", lambda: 0.0)
    beam, used = Cantilever(nodes=(5, 3, 3), dof=3), []
    A, b = beam.matrix(), beam.load()
    monkeypatch.setattr(type(ALONE), "size", 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.ThreadChoice, "observe", lambda *args: used.append(args) or 1)
        cg(A, b, maxiter=3)

    assert used == []
