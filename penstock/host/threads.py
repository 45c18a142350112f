"""How many threads compute on the CPU, and how they wait for each other: set before the libraries that start them are loaded."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")

#: Bytes that a thread takes at once of what threads share: enough that sharing takes no time.
PIECE_NBYTES = 16 << 20

#: Whether the user has said how many threads to use; else ranks of a host share its cores.
THREADS_ARE_GIVEN = "NUMBA_NUM_THREADS" in os.environ

# Spins of a waiting thread of GNU's OpenMP before it sleeps: some tens of microseconds.
_SPINS = "1000"
_CONTROL_GROUPS = Path("/sys/fs/cgroup")


def prepare_threads() -> None:
    """Use as many threads as this process has cores, which soon let others compute while they wait.

    ``NUMBA_NUM_THREADS`` and ``OMP_WAIT_POLICY`` of the environment come first. Threads that spin while they wait take the cores
    from those that they wait for, on a machine that does anything else: a solve beside two busy processes on two cores took
    sixty times as long as alone. Threads that never spin have to be woken for every kernel, which took half as long again as
    the kernels where none were busy. So they spin for about as long as it takes to wake one.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    if THREADS_ARE_GIVEN:
        return
    threads = usable_cores()
    if "numba" in sys.modules:  # it has read the environment
        import numba

        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
    elif threads < (os.cpu_count() or 1):
        os.environ["NUMBA_NUM_THREADS"] = str(threads)


# BLAS libraries with a number of threads per process, and those with one per thread.
_SHARED_BLAS, _OWN_BLAS = ("openblas", "blis", "flexiblas"), ("mkl",)


class _BlasLimit:
    """The process-wide limit of BLAS threads, in force from its first user to the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: list[int] = []  # the thread of each
        self._limited: Any = None
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin_child)

    def enter(self, threads: int) -> None:
        """Begin to use BLAS in the calling thread."""
        with self._lock:
            if not self._users and (pools := _pools(_SHARED_BLAS)) is not None:
                self._limited = pools.limit(limits=_capped(pools, threads))
                _release_control(pools)
            self._users.append(threading.get_ident())

    def leave(self) -> None:
        """End the use by the calling thread."""
        with self._lock:
            self._users.remove(threading.get_ident())
            self._restore_if_unused()

    def _restore_if_unused(self) -> None:
        if not self._users and self._limited is not None:
            self._limited.restore_original_limits()
            _release_control(_pools(_SHARED_BLAS))
            self._limited = None

    def _begin_child(self) -> None:
        """Forget the users that this process was not forked with."""
        self._lock = threading.Lock()
        self._users = [thread for thread in self._users if thread == threading.get_ident()]
        self._restore_if_unused()


def _release_control(pools: Any) -> None:
    """Let other threads set the limits: threadpoolctl 3.8 reserves them for the last thread that did, until it leaves a block."""
    with pools.limit(limits=None):
        pass


def _capped(pools: Any, threads: int) -> int:
    """Return a number of threads that is not more than any of these libraries may use now, as far as they tell."""
    allowed = (library.num_threads for library in pools.lib_controllers)
    return min([threads, *(int(number) for number in allowed if number)])


_BLAS_LIMIT = _BlasLimit()


@contextlib.contextmanager
def blas_limited(threads: int) -> Iterator[None]:
    """Let BLAS use no more threads in the block than kernels do, which respect quotas and ranks that share the cores.

    Nor more than the user allows, by ``OPENBLAS_NUM_THREADS`` or a limit of threadpoolctl.

    Sums of BLAS depend on the number of threads: ``threads`` is that of kernels on a quiet machine, which other processes do
    not change. Blocks that run at once in several threads share the limit of the first, and the last to end restores the old
    limit.
    """
    pools = _pools(_OWN_BLAS)
    _BLAS_LIMIT.enter(threads)
    try:
        with contextlib.nullcontext() if pools is None else pools.limit(limits=_capped(pools, threads)):
            yield
    finally:
        _BLAS_LIMIT.leave()


@functools.cache
def find_pools() -> Any:
    """Return the thread pools of the libraries that are loaded, which takes milliseconds; None where they cannot be found.

    Call it before a thread is started that loads libraries: the search holds the lock of the dynamic linker and waits for
    Python's, while an import holds Python's lock and waits for that of the linker.
    """
    from threadpoolctl import ThreadpoolController

    try:
        return ThreadpoolController()
    except OSError:  # a Linux without /proc, as in some sandboxes
        return None


@functools.cache
def _pools(libraries: tuple[str, ...]) -> Any:
    """Return the thread pools of these libraries, None if none of them is loaded."""
    pools = find_pools()
    pools = pools and pools.select(internal_api=list(libraries))
    return pools or None


def mapped(
    function: Callable[[Item], Made],
    items: Iterable[Item],
    threads: int | None = None,
    pool: Callable[[], Executor] | None = None,
) -> list[Made]:
    """Return what a function makes of items, with as many threads as cores; in this thread, if no other can be started.

    The function is called once for each item. If it fails, items after that one may be left out; the first error is raised.
    ``pool`` returns threads that are kept, else threads are started for this call.
    """
    items = list(items)
    count = min(threads or usable_cores(), len(items))
    if count < 2:
        return [function(item) for item in items]
    left, finished = deque(enumerate(items)), threading.Semaphore(0)
    made, errors = dict[int, Made](), dict[int, BaseException]()

    def work() -> None:
        while left:
            try:
                number, item = left.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                if number < min(list(errors), default=len(items)):
                    made[number] = function(item)
            except BaseException as error:  # raised below, in the caller's thread
                errors[number] = error
            finally:
                finished.release()

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(RuntimeError):  # no thread can be started, or Python is ending
            workers = stack.enter_context(ThreadPoolExecutor(count - 1)) if pool is None else pool()
            for _ in range(count - 1):
                workers.submit(work)
        work()  # whoever is free takes the next item, so threads that start late are not waited for
        for _ in items:
            finished.acquire()
    if errors:
        raise errors[min(errors)]
    return [made[number] for number in range(len(items))]


def in_pieces(function: Callable[[slice], Made], count: int, piece: int) -> list[Made]:
    """Return what a function makes of slices of ``piece`` places, of which there are ``count`` in all, as :func:`mapped`."""
    return mapped(function, [slice(start, min(start + piece, count)) for start in range(0, count, piece)])


def usable_cores() -> int:
    """Return the cores that this process may use: those it is bound to, and no more than its control groups let it use."""
    return max(1, math.ceil(min(len(bound_cores()), _quota())))


def bound_cores() -> set[int]:
    """Return the cores that this process is bound to; all of them where the system does not say, as on macOS and Windows."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _quota() -> float:
    """Return the cores whose time the control groups of this process allow, as containers and job schedulers set them."""
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return math.inf
    least = math.inf
    for _, controllers, own in groups:
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = _CONTROL_GROUPS / controllers if controllers else _CONTROL_GROUPS
        folder = root / own.lstrip("/")
        for group in (folder, *(parent for parent in folder.parents if parent.is_relative_to(root))):
            least = min(least, _quota_of(group))
    return least


def _quota_of(group: Path) -> float:
    """Return the cores that one control group allows, of version 2 or 1."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):  # no such group, or "max"
        return math.inf
