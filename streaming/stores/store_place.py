"""Where a store is written: beside its name until it is whole, and never in place of what is not a store."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from penstock.host.folders import folder_lock, scratch_folder
from penstock.spmv import InputError, StoreError, format_nbytes

#: A folder is locked at once after it was made; one that is older than this, and not locked, is of a process that has ended.
_LOCKED_AFTER_SECONDS = 60.0
#: Windows renames a folder only to a name that is free.
_RENAMES_TO_EMPTY_FOLDERS = os.name != "nt"


class StorePlace:
    """The folder of a store that is being built; ``overwrite`` lets it replace a store, which consists of ``files``."""

    def __init__(self, path: Path, *, overwrite: bool, files: tuple[str, ...]) -> None:
        with writing(path):  # a link that leads in a circle, for example
            self.path = path.resolve() if overwrite else path.absolute()
        self.overwrite, self.files = overwrite, files

    def check(self) -> None:
        """Raise an InputError if the name is taken by something that may not be replaced."""
        if os.path.lexists(self.path) and not (self.overwrite and self._holds_store(self.path)):
            advice = "" if self.overwrite else " or replace it (overwrite=True, --overwrite)"
            raise InputError(f"{self.path} exists; choose another name{advice}")

    def _holds_store(self, folder: Path) -> bool:
        """Return whether a folder is a store with nothing else in it."""
        if folder.is_symlink() or not folder.is_dir():
            return False
        return {entry.name for entry in folder.iterdir()} == set(self.files)

    @contextlib.contextmanager
    def building(self) -> Iterator[Path]:
        """Yield a new folder beside the place, and rename it to the place at the end of the ``with`` block.

        Whatever happens, nothing unfinished is left, and leftovers of killed builds are removed first. Raises an InputError if
        the name is taken, from the start or meanwhile, by something that may not be replaced, and a StoreError if the disk is
        full or fails.
        """
        self.check()
        with partial_folder(self.path) as partial:
            yield partial
            with writing(self.path):
                self._finish(partial)

    def _finish(self, partial: Path) -> None:
        """Give the finished store its name."""
        partial.chmod(0o755)
        # Not a name of unfinished builds, which are removed: if this process ends right here, the old store is still there.
        replaced = partial.with_name(partial.name.replace(".partial-", ".replaced-"))
        try:
            if self.overwrite and self._holds_store(self.path):
                self.path.rename(replaced)
            # Only one process can make this folder, and a folder can be renamed only to an empty one.
            if _RENAMES_TO_EMPTY_FOLDERS:
                self.path.mkdir()
            partial.rename(self.path)
        except FileExistsError:
            raise InputError(f"{self.path} was made by another process meanwhile; choose another name") from None
        finally:
            self._settle(replaced)

    def _settle(self, replaced: Path) -> None:
        """Remove a store that has been replaced, or, after an interrupt, give it its name back."""
        if not replaced.exists():
            return
        if not self._holds_store(self.path):
            with contextlib.suppress(OSError):
                if self.path.exists():
                    self.path.rmdir()  # made for the new store, which did not get there
                replaced.rename(self.path)
            return
        for name in self.files:
            with contextlib.suppress(OSError):
                (replaced / name).unlink()
        with contextlib.suppress(OSError):
            replaced.rmdir()


@contextlib.contextmanager
def partial_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder beside a place, removed at the end; leftovers of killed processes are removed first."""
    with contextlib.ExitStack() as held:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            for left in path.parent.glob(f"{glob.escape(path.name)}.partial-*"):
                _remove_if_left(left)
            partial = held.enter_context(scratch_folder(f"{path.name}.partial-", path.parent))
            held.enter_context(folder_lock(partial))  # without locks nothing that is left is removed
        yield partial


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of a write into a StoreError that names the store and the free space."""
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(path.parent).free if path.parent.exists() else 0
        advice = f"; {format_nbytes(free)} are free there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise StoreError(
            f"cannot write the store {path}: {error.strerror or error}{advice}; nothing was left"
        ) from error


def _remove_if_left(folder: Path) -> None:
    """Remove the folder of a build unless its process may still be at work."""
    with contextlib.suppress(OSError):
        if folder.is_symlink() or time.time() - folder.stat().st_mtime < _LOCKED_AFTER_SECONDS:
            return
        with folder_lock(folder) as locked:
            if locked:
                shutil.rmtree(folder, ignore_errors=True)
