"""Folders that belong to one process: temporary ones, and ones that it locks, which the system releases however it ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]


@contextmanager
def scratch_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Yield a new folder, in the system's place for temporary files by default, and remove it at the end.

    A child that is forked in the block leaves it to its parent, unlike a :class:`tempfile.TemporaryDirectory`.
    """
    process, folder = os.getpid(), Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        yield folder
    finally:
        if os.getpid() == process:
            shutil.rmtree(folder, ignore_errors=True)


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


@contextmanager
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
