"""One process at a time writes into a folder: it holds a lock there, which the system releases when the process ends."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from penstock.host.folders import try_lock
from penstock.spmv import InputError, StoreError

#: The file in a folder that its owner holds locked; it says who that is.
LOCK_NAME = ".owner"


class FolderTakenError(InputError):
    """A folder that was free is in use by another process, or holds what another one has written."""


@contextlib.contextmanager
def owned(folder: Path, advice: str) -> Iterator[None]:
    """Own a folder that exists while the block runs; a FolderTakenError names the process that owns it already.

    However a process ends, another one can own the folder after it. Where the file system, or Windows, has no locks, nothing
    is checked.
    """
    path = folder / LOCK_NAME
    descriptor, locked = _opened(path, folder, advice)
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        if not locked:  # Windows removes no open file
            os.close(descriptor)
        with contextlib.suppress(OSError):  # the folder may be gone
            path.unlink()
        if locked:  # not before: another process may then hold it
            os.close(descriptor)


def _opened(path: Path, folder: Path, advice: str) -> tuple[int, bool]:
    """Return the descriptor of the lock, and whether it is locked."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StoreError(f"cannot write in {folder}: {error.strerror or error}") from error
        try:
            locked = try_lock(descriptor)
        except BlockingIOError:
            owner = os.read(descriptor, 200).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise FolderTakenError(f"{folder} is in use by {owner}; {advice}") from None
        if not locked:
            return descriptor, False
        # Its owner may have removed the file between our opening and locking it; then what we hold is no lock of this folder.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor, True
        os.close(descriptor)
