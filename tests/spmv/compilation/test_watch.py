"""Compilation is noticed, and is not counted as work."""

import threading
import time

import numba
import pytest

from penstock.spmv.compilation.watch import compile_seconds, compiling, seconds_without_compiling, watched_compilation


def test_a_kernel_that_numba_compiles_is_noticed_once():
    called = []
    kernel = numba.njit(lambda x: x + 1)
    before = compile_seconds()
    with watched_compilation(lambda: called.append("compiling")):
        assert kernel(1) == 2
        spent = compile_seconds() - before
        assert kernel(2) == 3
    assert called == ["compiling"]
    assert spent > 0
    assert compile_seconds() - before == spent


def test_kernels_inside_a_kernel_are_counted_once():
    called, before, began = [], compile_seconds(), time.perf_counter()
    with watched_compilation(lambda: called.append("compiling")), compiling(), compiling():
        time.sleep(0.05)
        inside = compile_seconds() - before
    assert 0.05 <= inside <= compile_seconds() - before <= time.perf_counter() - began
    assert called == ["compiling"]


def test_a_clock_stands_still_meanwhile():
    real, clock = time.perf_counter(), seconds_without_compiling()
    with compiling():
        time.sleep(0.05)
    passed = seconds_without_compiling() - clock
    assert 0 <= passed <= time.perf_counter() - real - 0.05


def test_nobody_is_told_after_the_end_or_after_an_error():
    called = []
    with pytest.raises(ZeroDivisionError), watched_compilation(lambda: called.append("compiling")):
        raise ZeroDivisionError
    with compiling():
        pass
    with pytest.raises(ZeroDivisionError), compiling():
        raise ZeroDivisionError
    spent = compile_seconds()
    time.sleep(0.01)
    assert compile_seconds() == spent
    assert called == []


def test_threads_that_compile_at_once_are_counted_once():
    before = compile_seconds()
    began = time.perf_counter()

    def compile_something():
        with compiling():
            time.sleep(0.1)

    threads = [threading.Thread(target=compile_something) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.1 <= compile_seconds() - before <= time.perf_counter() - began
