"""Writes files whole or not at all: beside their place first, then renamed."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from penstock.spmv import StoreError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to, and rename it to ``path`` at the end of the ``with`` block.

    Whatever happens, ``path`` is either what it was before or the complete new file. After an error or an interrupt the
    partial file is removed. Raises a StoreError if the disk is full or fails.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)  # renamed, it is not there any more


def write_file(path: Path, write: Callable[[BinaryIO], object], *, sync: bool = False) -> None:
    """Write a file by ``write(file)``, completely or not at all, or raise a StoreError if the disk is full or fails.

    With ``sync`` the data are on the disk before the file is renamed, so that it survives a power failure.
    """
    with replacing(path) as partial, open(partial, "wb") as file:
        write(file)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8; errors as for :func:`write_file`."""
    write_file(path, lambda file: file.write(text.encode()))


def write_json(path: Path, data: Any, *, indent: int = 2) -> None:
    """Write plain values as JSON; NaN and infinite numbers become null, since JSON has no such numbers."""
    write_text(path, json.dumps(_without_nan(data), indent=indent, allow_nan=False) + "\n")


def _without_nan(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _without_nan(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_without_nan(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return data
