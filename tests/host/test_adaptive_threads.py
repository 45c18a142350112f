"""Fewer threads are used while other processes take the cores, without a change of bits."""

import contextlib
import itertools
import subprocess
import sys
import time
from collections import namedtuple
from types import SimpleNamespace

import numba
import numpy as np
import psutil
import pytest

from penstock.fem import Cantilever
from penstock.host import adaptive_threads as module
from penstock.host.adaptive_threads import ThreadChoice, adaptive_threads, cores_of_others, most_threads
from penstock.solvers import block_cg, cg
from penstock.solvers.cg import ConjugateGradients

needs_threads = pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one thread")


class Machine:
    """A simulated machine: ``seconds(threads)`` of an iteration, and the cores that others use beside so many threads."""

    def __init__(self, cores, seconds=lambda threads: 0.16 / threads, others=lambda threads: 0.0):
        self.cores, self.seconds, self.others = cores, seconds, others
        self.choice = ThreadChoice(cores, cores, lambda: lambda: self.others(self.choice.threads))

    def run(self, duration):
        """Iterate for so long; return the numbers of threads used, one per iteration."""
        used, elapsed = [], 0.0
        while elapsed < duration:
            used.append(self.choice.threads)
            elapsed += self.seconds(used[-1])
            self.choice.observe(1, self.seconds(used[-1]))
        return used


def beside(loops, cores):
    """A machine whose cores run so many other processes in turn; threads of a kernel wait for the slowest of them."""

    def busy(threads):
        return loops * min(1.0, cores / (loops + threads))

    def seconds(threads):
        shared = max(1.0, (threads + loops) / cores)
        return 0.16 / threads * shared * (1.65 if shared > 1 and threads > 1 else 1)  # as measured

    return Machine(cores, seconds, busy)


def test_a_quiet_machine_uses_all_threads_all_the_time():
    machine = Machine(16, others=lambda threads: 0.3)

    assert set(machine.run(60)) == {16}
    assert machine.choice.fewer_seconds == 0


@pytest.mark.parametrize(
    ("loops", "cores", "threads"), [(1, 2, 1), (2, 2, 1), (6, 2, 1), (1, 16, 15), (2, 16, 14), (8, 16, 8)]
)
def test_beside_busy_processes_threads_use_the_cores_that_are_left(loops, cores, threads):
    machine = beside(loops, cores)
    used = machine.run(60)

    assert used[-1] == threads
    assert [machine.seconds(number) for number in used].index(machine.seconds(threads)) < 40, "soon"
    assert machine.choice.fewer_seconds == pytest.approx(
        sum(machine.seconds(number) for number in used if number < cores)
    )


def test_all_threads_are_used_again_as_soon_as_the_cores_are_free():
    machine = beside(2, 16)
    assert machine.run(10)[-1] == 14
    machine.others, machine.seconds = lambda threads: 0.1, lambda threads: 0.16 / threads

    used = machine.run(10)

    assert used.index(16) * machine.seconds(14) < 0.3
    assert set(used[used.index(16) :]) == {16}


def test_fewer_threads_that_are_slower_are_tried_more_and_more_rarely():
    machine = Machine(16, others=lambda threads: 8.0)  # which do not slow the solve
    used = machine.run(300)

    assert sum(machine.seconds(16) for number in used if number == 16) > 0.9 * 300
    trials = [number for number, _ in itertools.groupby(used)].count(8)
    assert 30 < trials < 300 / 8 + 6


def test_the_first_iteration_is_not_judged():
    asked = []
    choice = ThreadChoice(2, 2, lambda: lambda: asked.append(1) or 2.0)

    choice.observe(1, 20.0)  # kernels were compiled
    choice.observe(1, 0.05)
    assert (asked, choice.threads) == ([], 2)
    choice.observe(1, 0.05)
    assert choice.threads == 1


def test_a_short_solve_does_not_look_at_the_cores():
    choice = ThreadChoice(2, 2, lambda: pytest.fail("looked"))

    for _ in range(19):
        choice.observe(1, 0.001)


def test_a_given_number_of_threads_is_not_exceeded():
    choice = ThreadChoice(2, 16, lambda: lambda: 3.0)

    for _ in range(20):
        choice.observe(1, 0.06)
        assert choice.threads == 2


def test_cores_that_others_use_are_counted_and_ours_are_not():
    cores, loop = len(module.bound_cores()), "while True: pass"

    def measured(seconds=0.5):
        used, until = cores_of_others(), time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass
        return used()

    def least(count):
        return min(measured() for _ in range(count))

    before = least(3)
    other = subprocess.Popen([sys.executable, "-c", loop])
    try:
        time.sleep(0.2)
        beside = max(measured() for _ in range(3))
    finally:
        other.kill()
        other.wait()

    assert 0 <= before <= cores
    assert beside > min(before + 0.3, 0.3 * cores)


@pytest.mark.parametrize("told", [OSError("no /proc/stat"), psutil.AccessDenied(1), ValueError("strange"), []])
def test_a_system_that_does_not_tell_counts_as_quiet(monkeypatch, told):
    def cpu_times(percpu):
        if isinstance(told, Exception):
            raise told
        return told

    monkeypatch.setattr(psutil, "cpu_times", cpu_times)

    assert cores_of_others()() == 0


@pytest.mark.parametrize("listed", [3, 5])
def test_cores_that_are_not_listed_by_their_number_count_as_busy_as_all(monkeypatch, listed):
    now = [0.0]
    line = namedtuple("line", ("user", "idle"))
    monkeypatch.setattr(
        psutil, "cpu_times", lambda percpu: [line(user=now[0] * (k > 0), idle=now[0] * (k == 0)) for k in range(listed)]
    )
    monkeypatch.setattr(module.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(module, "bound_cores", lambda: {0, 1, 3})
    monkeypatch.setattr(time, "process_time", lambda: 0.0)
    others = cores_of_others()
    now[0] = 7.0

    assert others() == pytest.approx(3 * (listed - 1) / listed)


@needs_threads
def test_the_number_of_threads_is_restored():
    before = numba.get_num_threads()
    with adaptive_threads() as choice:
        choice.threads = 1
        with choice.applied():
            assert (numba.get_num_threads(), most_threads()) == (1, before)
            with adaptive_threads() as inner:  # a solve in a product of a solve
                assert (inner.most, most_threads()) == (1, before)
        assert (numba.get_num_threads(), most_threads()) == (before, before)
    assert (numba.get_num_threads(), most_threads()) == (before, before)


@pytest.fixture
def crowded(monkeypatch):
    """A machine all of whose cores other processes use, at which every iteration looks."""
    monkeypatch.setattr(module, "_BEGINNING", 0.0)
    monkeypatch.setattr(module, "_WINDOW", 0.0)
    monkeypatch.setattr(module, "_LARGEST_LOSS", 1e9)
    monkeypatch.setattr(module, "cores_of_others", lambda: lambda: 99.0)


@needs_threads
@pytest.mark.parametrize("solver", [cg, block_cg])
def test_a_solve_with_fewer_threads_has_the_same_bits(solver, request, monkeypatch):
    beam = Cantilever(nodes=(9, 4, 4), dof=3)
    A, b = beam.matrix("symmetric_bsr"), beam.load()
    b = b if solver is cg else np.stack([b, b[::-1]], axis=1)
    alone = solver(A, b)
    request.getfixturevalue("crowded")
    product, used, told = type(A).apply, [], []
    monkeypatch.setattr(
        type(A), "apply", lambda *args, **more: used.append(numba.get_num_threads()) or product(*args, **more)
    )

    beside = solver(A, b, monitor=lambda record: told.append((numba.get_num_threads(), most_threads())))

    assert min(used) == 1
    assert set(told) == {(numba.get_num_threads(),) * 2}, "a monitor has all threads"
    assert np.array_equal(alone.x, beside.x)
    assert alone.timings.get("fewer_threads", 0) == 0 < beside.timings["fewer_threads"] < beside.timings["total"]
    assert "threads     fewer than usual for" in beside.explain()


@pytest.mark.parametrize(("kind", "ranks"), [("cpu", 2), ("cuda", 1)])
def test_ranks_and_gpus_keep_their_threads(kind, ranks):
    method = object.__new__(ConjugateGradients)
    space = SimpleNamespace(communicator=SimpleNamespace(size=ranks))
    A = SimpleNamespace(device=SimpleNamespace(kind=kind))
    method.problem = SimpleNamespace(A=A, space=space, waited_seconds=0.0)
    method.advance = lambda state, iterations: iterations
    choice = SimpleNamespace(observe=lambda *_: pytest.fail("observed"), applied=contextlib.nullcontext)

    assert method._advance_observed(SimpleNamespace(iteration=0), 3, choice) == 3
