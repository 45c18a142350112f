"""A process that was forked after kernels ran can compute, and leaves to its parent what belongs to it."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

import penstock
from penstock.driver.inputs import GivenMatrix
from penstock.fem import Cantilever
from penstock.host import forks
from penstock.host.folders import scratch_folder
from penstock.solvers import cg
from penstock.spmv import CPU, Device, DeviceError, StoreError
from penstock.streaming import FileStore, HostStore, StreamedMatrix
from penstock.streaming.testing import FaultyStore

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
BEAM = Cantilever(nodes=(9, 5, 5), dof=3)


def in_child(act, seconds=30):
    """Return what a function returns or raises in a forked process, which is killed if it takes too long."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(seconds)
        try:
            told = act()
        except BaseException as error:
            told = error
        os.write(writer, pickle.dumps(told))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        content = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, "the child was killed"
    return pickle.loads(content)


def solved(scale=1.0):
    return penstock.solve(BEAM.matrix("csr").to_csr(), scale * BEAM.load(), device="cpu").x


@pytest.mark.parametrize("format", ["csr", "symmetric_bsr"])
def test_a_child_solves_with_the_same_bits(format):
    A, b = BEAM.matrix(format), BEAM.load()
    x = cg(A, b).x

    assert np.array_equal(in_child(lambda: cg(A, b).x), x)
    assert np.array_equal(in_child(lambda: in_child(lambda: cg(A, b).x)), x), "a child of a child"
    assert np.array_equal(cg(A, b).x, x), "the parent goes on"


def test_a_pool_of_forked_processes_solves():
    x = solved()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        results = pool.map_async(solved, [1.0, 1.0, 1.0]).get(timeout=60)

    assert all(np.array_equal(result, x) for result in results)


def test_a_thread_of_a_child_solves():
    x = solved()

    def act():
        got = []
        thread = threading.Thread(target=lambda: got.append(solved()))
        thread.start()
        thread.join()
        return got[0]

    assert np.array_equal(in_child(act), x)


def test_one_thread_has_to_do_where_openmp_cannot_release_its_threads():
    code = """
        import ctypes, os, numpy as np, numba
        from penstock.spmv.vectors.space import VectorSpace
        from penstock.spmv import CPU
        x = np.ones(10**6)
        space = VectorSpace(CPU)
        space.dot(x, x)
        ctypes.CDLL = lambda path: object()  # without the function that releases threads, as before GCC 9
        if os.fork() == 0:
            print(space.dot(x, x), numba.get_num_threads(), flush=True)
            os._exit(0)
        os._exit(os.waitstatus_to_exitcode(os.wait()[1]) != 0)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    threads = "1" if forks._gnu_layer() is not None else done.stdout.split()[1]
    assert done.stdout.split() == ["1000000.0", threads]


@pytest.fixture
def store(tmp_path):
    with FileStore.create(tmp_path / "A", BEAM.subdivisions(6, "bsr")) as store:
        yield store


def test_a_child_goes_on_with_a_streamed_matrix_and_leaves_the_one_of_its_parent_alone(store):
    x, other = BEAM.load(), np.random.default_rng(0).standard_normal(BEAM.unknowns)
    with StreamedMatrix(store, 2 * max(store.index.sizes["whole"])) as A:
        y, z = A @ x, A @ other
        child = in_child(lambda: [A @ x, A @ other, A.sweeps])
        assert np.array_equal(child[0], y)
        assert np.array_equal(child[1], z)
        assert np.array_equal(A @ x, y)


def test_a_child_does_not_write_into_the_slots_of_its_parent(store):
    with StreamedMatrix(store, 2 * max(store.index.sizes["whole"])) as A:
        before = {}
        A.sweep(lambda number, slab: before.setdefault(number, slab.values.copy()))

        def overwrite():
            A.sweep(lambda number, slab: slab.values.fill(7.0))

        after = {}

        def visit(number, slab):
            if not after:
                in_child(overwrite)
            after[number] = slab.values.copy()

        A.sweep(visit)
    assert all(np.array_equal(after[number], before[number]) for number in before)


@pytest.mark.parametrize("drop", ["close", "del"])
def test_a_child_drops_a_streamed_matrix_at_once(store, drop):
    held = [StreamedMatrix(store, 2 * max(store.index.sizes["whole"]), stall_seconds=20)]
    y = held[0] @ BEAM.load()

    def act():
        began = time.monotonic()
        if drop == "close":
            held[0].close()
        held.clear()
        return time.monotonic() - began

    assert in_child(act) < 5
    assert np.array_equal(held[0] @ BEAM.load(), y)
    held[0].close()


def test_a_sweep_that_was_forked_in_its_middle_is_one_error_in_the_child(store):
    told = []
    with StreamedMatrix(store, 2 * max(store.index.sizes["whole"]), stall_seconds=20) as A:
        y = A @ BEAM.load()

        def visit(number, slab):
            if not told and os.getpid() == parent:
                reader, writer = os.pipe()
                told.append(reader)
                if os.fork() == 0:
                    told.append(writer)
                    signal.alarm(30)
                else:
                    os.close(writer)

        parent = os.getpid()
        try:
            A.sweep(visit)
        except StoreError as error:
            if os.getpid() == parent:
                raise
            again = A @ BEAM.load()
            os.write(told[1], pickle.dumps((str(error), again)))
        finally:
            if os.getpid() != parent:
                os._exit(0)
        with os.fdopen(told[0], "rb") as pipe:
            message, again = pickle.loads(pipe.read())
        os.wait()
        assert "forked in the middle of a sweep" in message
        assert np.array_equal(again, y)
        assert np.array_equal(A @ BEAM.load(), y)


def test_a_child_can_sweep_while_a_thread_of_its_parent_does():
    reading, go = threading.Event(), threading.Event()

    def wait(read, number):
        if read > 20 and os.getpid() == parent and not go.is_set():
            reading.set()
            go.wait(30)

    parent, host = os.getpid(), HostStore.create(BEAM.subdivisions(6, "bsr"))
    with StreamedMatrix(FaultyStore(host, wait), 2 * max(host.index.sizes["whole"])) as A:
        y = A @ BEAM.load()
        thread = threading.Thread(target=lambda: [A @ BEAM.load() for _ in range(5)])
        thread.start()
        assert reading.wait(30)
        child = in_child(lambda: A @ BEAM.load())
        go.set()
        thread.join()
    assert np.array_equal(child, y)


def test_a_child_leaves_scratch_folders_to_its_parent(tmp_path):
    parent = os.getpid()
    try:
        with scratch_folder("scratch-", tmp_path) as folder:
            if os.fork() == 0:
                raise SystemExit  # leaves the block, as in a callback of a solve
            os.wait()
            assert folder.exists()
    finally:
        if os.getpid() != parent:
            os._exit(0)
    assert not list(tmp_path.iterdir())


def test_a_child_of_a_process_that_used_a_gpu_is_told_to_be_spawned(monkeypatch):
    class CUDARuntimeError(Exception):
        status = 3  # cudaErrorInitializationError, as the driver answers in such a child

    def free(pointer):
        raise CUDARuntimeError

    runtime = SimpleNamespace(CUDARuntimeError=CUDARuntimeError, free=free, getDeviceCount=lambda: 1)
    cuda = SimpleNamespace(runtime=runtime, Device=lambda index: contextlib.nullcontext())
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))

    with Device("cuda").current():
        pass
    for act in (lambda: Device.parse("cuda"), Device("cuda").current, Device("cuda").synchronize):
        error = in_child(act)
        assert isinstance(error, DeviceError)
        assert "'spawn'" in str(error)
    assert in_child(lambda: GivenMatrix(None, "store").find_device("auto")) == CPU
