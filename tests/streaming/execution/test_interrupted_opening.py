"""An interrupt anywhere while a streamed matrix is opened leaves no thread and no open file."""

import gc
import os
import sys
import threading
import time

import pytest

from penstock.fem import Cantilever
from penstock.streaming import FileStore, StreamedMatrix

needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no list of open files on this system")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "A"
    FileStore.create(path, Cantilever(nodes=4, dof=3).subdivisions(4)).close()
    return path


class Interruption:
    """Raises KeyboardInterrupt at a line of penstock, or of the threading module, counted from the start."""

    def __init__(self, at):
        self.at, self.lines = at, 0

    def __call__(self, frame, event, argument):
        name = frame.f_code.co_filename
        if "/penstock/" not in name and "/streaming/" not in name and not name.endswith("threading.py"):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def opened(folder, at=None):
    """Open a matrix and close it again, interrupted at a line; return the number of lines."""
    interruption = Interruption(at)
    before = sys.gettrace()
    sys.settrace(interruption)
    try:
        with StreamedMatrix(folder, "100 KiB"):
            sys.settrace(before)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return interruption.lines


def left_behind(folder):
    """Return the threads that read a store, and the open files of this one: other tests may hold other stores open."""
    threads = [thread.name for thread in threading.enumerate() if thread.name == "penstock-reader"]
    files = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_open(name)]
    return threads, [name for name in files if name.startswith(f"{folder}/")]


def _is_open(name):
    return os.path.islink(f"/proc/self/fd/{name}")


@needs_proc
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_line_leaves_nothing(folder):
    others, _ = left_behind(folder)
    lines = opened(folder)
    assert lines > 200
    for at in range(1, lines, 3):
        opened(folder, at)
        deadline = time.monotonic() + 5.0
        while left_behind(folder) != (others, []) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.001)
        assert left_behind(folder) == (others, []), f"interrupted at line {at} of {lines}"
