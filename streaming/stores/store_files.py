"""The files of a store on disk: a JSON index, and the page-aligned slabs that it describes."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Callable, Iterable
from io import FileIO
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from penstock.spmv import BudgetError, SparseMatrix, StoreError
from penstock.spmv.formats.symmetric_image import SymmetricImageMatrix
from penstock.streaming.stores.buffers import PAGE_NBYTES, aligned_buffer
from penstock.streaming.stores.matrix_index import MatrixIndex, Subdivision, round_up
from penstock.streaming.stores.packing import IndexBuilder, pack
from penstock.streaming.stores.planes import LostSums, NoPlanesError, in_planes, join_in_place, plane_nbytes
from penstock.streaming.stores.store_place import writing

# Of a store whose values are stored as they are, and in two planes.
_VERSION, _PLANES_VERSION = 2, 3
INDEX, SLABS = "index.json", "slabs.bin"
#: The files of a store.
STORE_FILES = (INDEX, SLABS)


def _json_checksum(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


class Planes(NamedTuple):
    """The checksums of both planes of each subdivision; the bytes of the corrections, at the end of the file, and theirs."""

    checksums: list[tuple[int, int]]
    corrections_nbytes: int = 0
    corrections_checksum: int = 0

    @classmethod
    def from_json(cls, content: Any, index: MatrixIndex) -> Self:
        """Check what an index says of planes."""
        pairs = [(int(high), int(low)) for high, low in content["checksums"]]
        planes = cls(pairs, int(content["corrections_nbytes"]), int(content["corrections_checksum"]))
        if len(pairs) != len(index.subdivisions):
            raise ValueError(f"planes of {len(pairs)} subdivisions, but {len(index.subdivisions)} are stored")
        corrected = index.format_name == SymmetricImageMatrix.of_format
        expected = _padded_nbytes(index.shape[0], index.block_size) if corrected else 0
        if planes.corrections_nbytes != expected:
            raise ValueError(f"corrections of {planes.corrections_nbytes} bytes instead of {expected}")
        if index.values_dtype != np.float64:
            raise ValueError(f"planes of {index.values_dtype}")
        return planes


def _padded_nbytes(rows: int, size: int) -> int:
    """Return the bytes of the corrections of the image in float32, padded to whole pages."""
    return round_up(4 * rows * size, PAGE_NBYTES)


def stored_nbytes(subdivision: Subdivision, *, planes: bool) -> int:
    """Return the bytes of a subdivision in the file: each plane is padded to whole pages."""
    return subdivision.values_start + 2 * plane_nbytes(subdivision) if planes else subdivision.nbytes


def write_index(file_path: Path, index: MatrixIndex, label: str, store_path: Path, planes: Planes | None) -> None:
    """Write the index of a store."""
    content = {"label": label, **index.to_json()}
    if planes is not None:
        content["planes"] = planes._asdict()
    version = _VERSION if planes is None else _PLANES_VERSION
    with writing(store_path), open(file_path, "w", encoding="utf-8") as file:
        json.dump({"penstock_store": version, "checksum": _json_checksum(content), **content}, file)
        file.flush()
        os.fsync(file.fileno())


class SlabWriter:
    """Writes the slabs of the store that will be at ``path``, which errors name."""

    def __init__(self, path: Path, *, planes: bool | Literal["auto"]) -> None:
        self._path, self._must = path, planes is True
        self.planes = Planes([]) if planes else None
        self._lost: LostSums | None = None
        self._written: list[Subdivision] = []

    def write(
        self,
        file_path: Path,
        row_slabs: Iterable[SparseMatrix],
        shape: tuple[int, int] | None,
        progress: Callable[[int], None] | None,
    ) -> MatrixIndex:
        """Write row slabs to a file, and return their index."""
        builder, written, buffer = IndexBuilder(shape), 0, aligned_buffer(0)
        with contextlib.ExitStack() as files:
            with writing(self._path):
                file = files.enter_context(open(file_path, "w+b", buffering=0))
            for slab in row_slabs:  # outside of writing(): errors of the caller's iterable pass unchanged
                subdivision = builder.add(slab)
                if buffer.nbytes < subdivision.nbytes:
                    buffer = aligned_buffer(subdivision.nbytes)
                piece = buffer[: subdivision.nbytes]
                pack(slab, subdivision, piece)
                builder.set_checksums(piece)
                if self.planes is not None:
                    piece = self._in_planes_if_possible(file, slab, subdivision, piece)
                del slab  # before the next one is created
                self._write(file, piece)
                self._written.append(subdivision)
                written += subdivision.nbytes
                if progress is not None:
                    progress(written)
            index = builder.finish()
            if self._lost is not None and self.planes is not None:
                corrections = self._lost.corrections()
                piece = aligned_buffer(_padded_nbytes(index.shape[0], index.block_size))
                piece[: corrections.nbytes] = corrections.reshape(-1).view(np.uint8)
                self._write(file, piece)
                self.planes = Planes(self.planes.checksums, piece.nbytes, zlib.crc32(piece.data))
            with writing(self._path):
                os.fsync(file.fileno())
                if hasattr(os, "posix_fadvise"):  # reads bypass the page cache, so the file need not stay in it
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return index

    def _write(self, file: Any, piece: np.ndarray[Any, Any]) -> None:
        remaining = piece.data
        with writing(self._path):
            while remaining:
                remaining = remaining[file.write(remaining) :]

    def _in_planes_if_possible(
        self, file: FileIO, slab: SparseMatrix, subdivision: Subdivision, piece: np.ndarray[Any, Any]
    ) -> np.ndarray[Any, Any]:
        """Return the bytes of a subdivision with its values in two planes; as they are, once there are none."""
        try:
            stored = self._in_planes(subdivision, piece, slab.values_dtype)
            self._note_losses(slab, subdivision)
        except (NoPlanesError, BudgetError):
            if self._must:
                raise
            self._give_planes_up(file)
            return piece
        return stored

    def _give_planes_up(self, file: FileIO) -> None:
        """Join the planes that are written already, in the same file: joined values take no more bytes than planes."""
        read = written = 0
        with writing(self._path):
            for subdivision in self._written:
                stored = aligned_buffer(stored_nbytes(subdivision, planes=True))
                file.seek(read)
                done = 0
                while done < stored.size and (count := file.readinto(stored[done:].data)):
                    done += count
                start, plane = subdivision.values_start, plane_nbytes(subdivision)
                values = np.zeros(subdivision.nbytes - start, dtype=np.uint8)
                values[values.size - plane :] = stored[start + plane :]
                join_in_place(stored[start : start + values.size // 2].view(np.float32), values)
                piece = np.concatenate([stored[:start], values])
                read += stored.size
                file.seek(written)
                self._write(file, piece)
                written += piece.size
            file.truncate(written)
            file.seek(written)
        self.planes = self._lost = None

    def _note_losses(self, slab: SparseMatrix, subdivision: Subdivision) -> None:
        if LostSums.has_some(slab):
            self._lost = self._lost or LostSums(slab)
            self._lost.add(subdivision.row_start, slab)

    def _in_planes(
        self, subdivision: Subdivision, piece: np.ndarray[Any, Any], dtype: np.dtype[Any]
    ) -> np.ndarray[Any, Any]:
        """Return the bytes of a subdivision with its values in two planes, and note their checksums."""
        assert self.planes is not None, "planes are written"
        stored, start, plane = in_planes(subdivision, piece, dtype), subdivision.values_start, plane_nbytes(subdivision)
        self.planes.checksums.append(
            (zlib.crc32(stored[start : start + plane].data), zlib.crc32(stored[start + plane :].data))
        )
        return stored


def read_index(path: Path) -> tuple[MatrixIndex, str, Planes | None]:
    """Return the index of a store, its label, and what it says of planes; or raise a StoreError."""
    try:
        with open(path / INDEX, encoding="utf-8") as file:
            data = json.load(file)
    except FileNotFoundError:
        raise StoreError(f"{path} is not a store: it has no {INDEX}; make one with FileStore.create") from None
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"cannot read {path / INDEX}: {error}; build the store again") from error
    version = data.pop("penstock_store", None) if isinstance(data, dict) else None
    if version not in (_VERSION, _PLANES_VERSION):
        raise StoreError(
            f"{path / INDEX} is not an index of version {_VERSION}, or {_PLANES_VERSION} with planes; build the store again"
        )
    if data.pop("checksum", None) != _json_checksum(data):
        raise StoreError(f"{path / INDEX}: the index is damaged (its checksum does not match); build the store again")
    label, of_planes = str(data.pop("label", "")), data.pop("planes", None)
    index = MatrixIndex.from_json(data)
    if version == _VERSION:
        return index, label, None
    try:
        return index, label, Planes.from_json(of_planes, index)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise StoreError(f"{path / INDEX}: the index is damaged ({error}); build the store again") from error
