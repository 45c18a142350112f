"""Threads are as many as the cores that this process may use, and wait without taking those from others."""

import math
import os
import subprocess
import sys
import textwrap
import threading

import pytest

from penstock.host import threads

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def in_new_process(code, **environment):
    kept = {name: value for name, value in os.environ.items() if name not in ("NUMBA_NUM_THREADS", *WAITING)}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**kept, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


TOLD = (
    "import os, penstock.spmv, numba; "
    "print(numba.get_num_threads(), *(os.environ.get(name) for name in ('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT')))"
)


def test_threads_are_those_of_the_cores_that_a_process_is_bound_to():
    first = min(os.sched_getaffinity(0))
    assert in_new_process(f"import os; os.sched_setaffinity(0, {{{first}}}); {TOLD}") == ["1", "passive", "1000"]
    assert in_new_process(TOLD) == [str(threads.usable_cores()), "passive", "1000"]


def test_the_environment_of_the_user_comes_first():
    assert in_new_process(TOLD, NUMBA_NUM_THREADS="1", OMP_WAIT_POLICY="active") == ["1", "active", "None"]
    assert in_new_process(TOLD, GOMP_SPINCOUNT="0")[1:] == ["passive", "0"]


def test_a_numba_that_is_loaded_already_is_told(monkeypatch):
    quota = (
        "import numba, penstock.host.threads as t; t.prepare_threads(); t.usable_cores = lambda: 1; t.prepare_threads()"
    )
    assert in_new_process(f"{quota}; print(numba.get_num_threads())") == ["1"]


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """A tree of control groups in the place of the system's."""
    monkeypatch.setattr(threads, "_CONTROL_GROUPS", tmp_path / "cgroup")
    real = threads.Path

    def made(own, **files):
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            path = tmp_path / "cgroup" / name.replace("__", "/").replace("_max", ".max").replace("cpu_cfs", "cpu.cfs")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setattr(
            threads, "Path", lambda path: real(tmp_path / "own" if path == "/proc/self/cgroup" else path)
        )

    return made


def test_a_quota_of_version_two_counts_also_of_a_group_above(groups):
    groups("0::/job/step\n", job__cpu_max="150000 100000\n", job__step__cpu_max="max 100000\n")

    assert threads._quota() == 1.5
    assert threads.usable_cores() == min(2, len(os.sched_getaffinity(0)))


def test_a_quota_of_version_one_counts(groups):
    groups("4:memory:/a\n3:cpu:/a\n0::/\n", cpu__a__cpu_cfs_quota_us="50000", cpu__a__cpu_cfs_period_us="100000")

    assert threads._quota() == 0.5
    assert threads.usable_cores() == 1


def test_without_a_quota_all_cores_count(groups):
    groups("3:cpu:/\n0::/\n", cpu__cpu_cfs_quota_us="-1", cpu__cpu_cfs_period_us="100000")

    assert threads._quota() == math.inf
    assert threads.usable_cores() == len(os.sched_getaffinity(0))


def test_blas_uses_no_more_threads_in_a_solve_than_kernels_do():
    threadpoolctl = pytest.importorskip("threadpoolctl")
    import numba
    import numpy as np
    import scipy.linalg  # noqa: F401 - its BLAS is another one, which would be loaded in the middle of this test

    from penstock.solvers import cg

    def threads():
        return {pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"}

    before, kernels, seen = threads(), numba.get_num_threads(), []
    with threadpoolctl.threadpool_limits(3, user_api="blas"):
        numba.set_num_threads(1)
        try:
            cg(np.diag([1.0, 2.0, 3.0]), np.ones(3), monitor=lambda record: seen.append(threads()))
        finally:
            numba.set_num_threads(kernels)
        assert seen[0] == {1}
        assert threads() == {3}
    assert threads() == before


def blas_threads():
    return [
        pool["num_threads"]
        for pool in pytest.importorskip("threadpoolctl").threadpool_info()
        if pool["user_api"] == "blas"
    ]


def test_the_limit_of_blas_holds_until_its_last_user_ends_in_whatever_thread():
    import numpy as np  # noqa: F401 - its BLAS
    import scipy.linalg  # noqa: F401 - and that of SciPy

    threads.find_pools.cache_clear()
    threads._pools.cache_clear()
    before, entered, leave, seen = blas_threads(), threading.Event(), threading.Event(), []

    def other():
        with threads.blas_limited(1):
            entered.set()
            leave.wait(30)
            seen.append(blas_threads())

    for first_in_this_thread in (True, False):
        entered.clear()
        leave.clear()
        thread = threading.Thread(target=other)
        if first_in_this_thread:
            with threads.blas_limited(1):
                thread.start()
                assert entered.wait(30)
            assert set(blas_threads()) == {1}, "the other thread still uses it"
            leave.set()
            thread.join()
        else:
            thread.start()
            assert entered.wait(30)
            with threads.blas_limited(1):
                leave.set()
                thread.join()
                assert set(blas_threads()) == {1}
        assert blas_threads() == before
    assert seen == [[1] * len(before)] * 2


def test_blas_uses_no_more_threads_than_the_user_allows():
    pools = pytest.importorskip("threadpoolctl")
    with pools.threadpool_limits(1, user_api="blas"), threads.blas_limited(2):
        assert set(blas_threads()) == {1}


def test_a_child_that_is_forked_beside_a_solve_has_blas_as_it_was():
    if not hasattr(os, "fork"):
        pytest.skip("this system does not fork")
    before, entered, leave = blas_threads(), threading.Event(), threading.Event()

    def other():
        with threads.blas_limited(1):
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(30)
    child = os.fork()
    if not child:
        with threads.blas_limited(1):
            inside = blas_threads()
        os._exit(0 if (inside, blas_threads()) == ([1] * len(before), before) else 1)
    leave.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert blas_threads() == before


def test_solves_at_once_have_the_bits_of_a_solve_alone():
    code = """
        import concurrent.futures, numpy as np, scipy.linalg, scipy.sparse as sp, penstock
        L = sp.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(60, 60))
        A = sp.csr_array(sp.kronsum(L, L))
        B = [np.random.default_rng(i).standard_normal(A.shape[0]) for i in range(4)]
        def solve(b):
            return penstock.solve(A, b, device="cpu", preconditioner="smoothed_aggregation").x.tobytes()
        alone = [solve(b) for b in B]
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            print(sum(x != y for _ in range(4) for x, y in zip(threads.map(solve, B), alone)))
    """
    assert in_new_process(textwrap.dedent(code), NUMBA_NUM_THREADS="1") == ["0"]


@pytest.fixture(params=[0, 1, 3])
def startable(request, monkeypatch):
    """So many threads can be started; after them the system refuses."""
    started, start = [], threading.Thread.start

    def refuse(thread):
        if len(started) >= request.param:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    return request.param


def test_a_function_is_called_once_for_each_item_whatever_threads_can_be_started(startable):
    calls = []

    made = threads.mapped(lambda item: calls.append(item) or 2 * item, range(50), 8)

    assert made == list(range(0, 100, 2))
    assert sorted(calls) == list(range(50))


@pytest.mark.parametrize("count", [1, 8])
def test_the_error_of_the_first_item_is_raised(count):
    def fail(item):
        if item in (3, 40):
            raise RuntimeError(f"item {item}")

    with pytest.raises(RuntimeError, match="item 3"):
        threads.mapped(fail, range(50), count)


@pytest.mark.parametrize("piece", [1, 7, 50, 60])
def test_pieces_follow_each_other(piece):
    places = threads.in_pieces(lambda place: list(range(50))[place], 50, piece)

    assert [number for part in places for number in part] == list(range(50))
    assert max(map(len, places)) == min(piece, 50)
    assert threads.in_pieces(lambda place: place, 0, piece) == []
