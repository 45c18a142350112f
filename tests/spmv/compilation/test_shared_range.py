"""Kernels of a range that Python's threads share."""

import functools
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytest

from penstock.spmv.compilation import jit
from penstock.spmv.compilation.jit import shared_range


@shared_range(least=10)
def number(begin, end, out, calls):
    calls[begin] = end
    for i in range(begin, end):
        out[i] = i


def called(count, threads):
    out, calls = np.full(max(count, 1), -1), np.zeros(max(count, 1), dtype=np.int64)
    before = numba.get_num_threads()
    numba.set_num_threads(threads)
    try:
        number(count, out, calls)
    finally:
        numba.set_num_threads(before)
    return out, calls


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("count", [1, 9, 19, 20, 1001])
def test_every_item_is_done_once(count, threads):
    out, calls = called(count, threads)

    assert (out == np.arange(count)).all()
    parts = np.count_nonzero(calls)
    assert parts == max(1, min(threads, count // 10))


@pytest.mark.parametrize("startable", [0, 1])
def test_every_item_is_done_once_where_threads_cannot_be_started(startable, monkeypatch):
    monkeypatch.setattr(jit, "_threads", functools.cache(lambda: ThreadPoolExecutor(4)))
    started, start = [], threading.Thread.start

    def refuse(thread):
        if len(started) >= startable:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(numba, "get_num_threads", lambda: 5)
    out, calls = np.full(1000, -1), np.zeros(1000, dtype=np.int64)

    number(1000, out, calls)

    assert (out == np.arange(1000)).all()
    assert np.count_nonzero(calls) == 5


def test_nothing_is_done_for_no_items():
    out, _ = called(0, 2)

    assert out[0] == -1


def test_a_count_of_a_narrow_type_does_not_overflow():
    out, calls = np.full(100, -1), np.zeros(100, dtype=np.int64)

    number(np.int8(100), out, calls)

    assert (out == np.arange(100)).all()


def test_an_error_of_the_kernel_reaches_the_caller():
    @shared_range(least=1)
    def fail(begin, end, out):
        if end == out.size:
            raise ValueError("the last part")

    with pytest.raises(ValueError, match="the last part"):
        fail(4, np.zeros(4))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
def test_a_forked_process_starts_threads_of_its_own():
    called(1001, 2)
    process = os.fork()
    if not process:
        out, _ = called(1001, 2)
        os._exit(0 if (out == np.arange(1001)).all() else 1)

    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def test_several_threads_may_call_at_once():
    results = []
    threads = [threading.Thread(target=lambda: results.append(called(1001, 2)[0])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(results) == 8
    assert all((out == np.arange(1001)).all() for out in results)


def test_a_thread_goes_on_when_python_ends():
    script = """
import subprocess
import sys
import threading
import numpy as np
import penstock.fem
from penstock.fem import Cantilever
beam = Cantilever(nodes=(21, 9, 9), dof=3)
A = beam.matrix("csr").to_csr()

def solve():
    threading.main_thread().join()
    print(penstock.solve(A, beam.load(), preconditioner="jacobi").converged)

threading.Thread(target=solve).start()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)

    assert ended.stdout.split() == ["True"], ended.stderr
