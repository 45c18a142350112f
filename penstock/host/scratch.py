"""Makes temporary folders that only the process which made them removes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
