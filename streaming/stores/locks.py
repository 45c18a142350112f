"""File locks that the system releases however a process ends; on Windows nothing is locked."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def try_lock(descriptor: int) -> bool:
    """Lock an open file or folder until it is closed and return whether it is locked; False where locks are not supported.

    Raises a BlockingIOError if another process has locked it.
    """
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[bool]:
    """Lock a folder while the block runs, and yield whether it is locked for this process."""
    if fcntl is None:  # Windows cannot open a folder either
        yield False
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        locked = False
        with contextlib.suppress(BlockingIOError):
            locked = try_lock(descriptor)
        yield locked
    finally:
        os.close(descriptor)
