"""One process at a time writes into a folder: it holds a lock there, which the system lets go of when the process ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from penstock.spmv import InputError, StoreError

__all__ = ["LOCK_NAME", "FolderTakenError", "owned"]

#: The file in a folder that its owner holds locked; it says who that is.
LOCK_NAME = ".owner"


class FolderTakenError(InputError):
    """A folder that was free is in use by another process, or holds what another one has written."""


@contextlib.contextmanager
def owned(folder: Path, advice: str) -> Iterator[None]:
    """Own a folder that exists while the block runs.

    However a process ends, another one can own the folder after it. Where the file system has no locks, nothing is checked.

    Raises
    ------
    FolderTakenError
        If another process owns it; the message names that process and ends with the advice.
    StoreError
        If nothing can be written there.
    """
    path = folder / LOCK_NAME
    descriptor = _locked(path, folder, advice)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        with contextlib.suppress(OSError):  # the folder may be gone
            path.unlink()
        os.close(descriptor)


def _locked(path: Path, folder: Path, advice: str) -> int:
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreError(f"cannot write in {folder}: {error.strerror or error}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise FolderTakenError(f"{folder} is in use by {owner}; {advice}") from None
        except OSError:
            return descriptor
        # Its owner may have removed the file between our opening and locking it; then what we hold is no lock of this folder.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)
