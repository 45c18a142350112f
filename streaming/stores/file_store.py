"""Stores a matrix on disk, in a directory with a JSON index and one file of page-aligned slabs."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from penstock.host.checksums import checksum_of
from penstock.host.threads import PIECE_NBYTES, mapped, usable_cores
from penstock.spmv import CsrMatrix, InputError, SparseMatrix, StoreError
from penstock.streaming.stores.buffers import PAGE_NBYTES, aligned_buffer
from penstock.streaming.stores.matrix_index import MatrixIndex, Part
from penstock.streaming.stores.packing import IndexBuilder, SlabConverter, pack, row_slabs_of
from penstock.streaming.stores.store_place import StorePlace, writing

_VERSION = 2
_INDEX, _DATA = "index.json", "slabs.bin"
#: The files of a store.
STORE_FILES = (_INDEX, _DATA)
_SEEKING = threading.Lock()
_CLOCK_TICK = 100_000_000  # nanoseconds: systems stamp files a hundred times a second or more often


class FileStore:
    """Open a matrix on disk.

    Parameters
    ----------
    path : path
        The directory that :meth:`create` made.
    direct : bool, optional
        Bypass the page cache (``O_DIRECT``), so that a matrix larger than memory does not evict everything else and timings
        are those of the disk. By default wherever the file system supports it.
    verify : {"once", "always"}
        Verify each subdivision when it is first read, and again if the file has been altered since (by its size, its times
        and its identity, which are looked at after each read); or at every read.

    Raises
    ------
    StoreError
        If the store is missing, unfinished, truncated or of another version.

    Notes
    -----
    To verify a subdivision is to compare its checksums, and to check its offsets and indices against its shape.

    Examples
    --------
    >>> import tempfile
    >>> from penstock.fem import Cantilever
    >>> from penstock.streaming import FileStore
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     FileStore.create(f"{folder}/A", Cantilever(nodes=4, dof=3).subdivisions(2), label="cube").close()
    ...     with FileStore(f"{folder}/A") as store:
    ...         store.index.shape, store.index.format_name, len(store.index.subdivisions)
    ((192, 192), 'bsr', 2)
    """

    def __init__(
        self, path: str | Path, *, direct: bool | None = None, verify: Literal["once", "always"] = "once"
    ) -> None:
        if verify not in ("once", "always"):
            raise InputError(f"verify must be 'once' or 'always', not {verify!r}")
        self.path, self.verify = Path(path), verify
        self.index, self.label = _read_index(self.path)
        lengths = [subdivision.nbytes for subdivision in self.index.subdivisions]
        self._offsets = np.cumsum([0, *lengths]).tolist()
        # When each piece was verified, as the state of the file; None if it may have been altered since.
        self._verified: dict[tuple[int, int, int], _State | None] = {}
        data = self.path / _DATA
        nbytes = data.stat().st_size if data.exists() else 0
        if nbytes != self._offsets[-1]:
            raise StoreError(
                f"{data} has {nbytes} bytes instead of {self._offsets[-1]}: it was truncated or is not finished; build the "
                "store again"
            )
        self._file, self.direct = _open_for_reading(data, direct)
        self._opened = self._last = _state_of(self._file)

    @classmethod
    def create(
        cls,
        path: str | Path,
        row_slabs: Iterable[Any],
        *,
        shape: tuple[int, int] | None = None,
        overwrite: bool = False,
        label: str = "",
        format: str = "auto",
        block_size: int | Literal["auto"] = "auto",
        slab: int | str | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Self:
        """Write row slabs to disk one by one and open the store.

        Parameters
        ----------
        path : path
            Directory to create. The store is written under a temporary name beside it and renamed at the end, so an
            interrupted build leaves nothing that could be mistaken for a matrix.
        row_slabs : iterable, or a whole matrix
            SciPy CSR or BSR matrices, or penstock formats, in row order, each with all columns of the matrix. One is held
            at a time. A whole SciPy or penstock matrix is cut into slabs.
        shape : (int, int), optional
            Expected shape of the whole matrix.
        overwrite : bool
            Replace a store of that name; of a symbolic link, the store it leads to. A folder with anything else in it stays.
        label : str
            A description, saved with the store.
        format : str
            Format of the stored slabs. ``"auto"``: SciPy slabs made of dense blocks, for example of a node's unknowns, become
            BSR; other SciPy slabs and penstock formats stay as they are. ``"symmetric_bsr"`` stores the upper half of a
            matrix that the caller knows to be symmetric: slabs must begin at multiples of the block size.
        block_size : int or "auto"
            Rows of the dense blocks; ``"auto"`` detects them in the first slab.
        slab : int or str, optional
            About the bytes of a subdivision into which a whole matrix is cut, such as ``"16 MiB"``; two or more of them must
            fit the memory budget of a streamed matrix. By default 64 subdivisions or fewer, of 1 MiB or more.
        progress : callable, optional
            Called with the bytes written so far after each slab.

        Raises
        ------
        InputError
            If a slab is not valid, the slabs do not add up to ``shape``, or ``path`` exists, from the start or at the end.
        StoreError
            If the disk is full or fails.
        """
        place = StorePlace(Path(path), overwrite=overwrite, files=STORE_FILES)
        with place.building() as partial:
            converter = SlabConverter(format, block_size)
            slabs = map(converter.convert, row_slabs_of(row_slabs, format, block_size=block_size, slab=slab))
            index = _write_slabs(place.path, partial / _DATA, slabs, shape, progress)
            _write_index(partial / _INDEX, index, label, place.path)
        return cls(place.path)

    def refilled(self, A: CsrMatrix) -> Self:
        """Replace the values on disk by those of a matrix with the same pattern, and open the store anew.

        The new store is written beside the old one, at the cost of its bytes, and takes its name at the end: whatever
        interrupts this, the disk has the old store or the new one. This object goes on reading the old values until it is closed.

        Parameters
        ----------
        A : CsrMatrix, on the host

        Raises
        ------
        InputError
            If A has another pattern.
        StoreError
            If the disk is full or fails.
        """

        def slabs() -> Iterator[SparseMatrix]:
            for number, of in enumerate(self.index.subdivisions):
                buffer = aligned_buffer(of.nbytes)
                self.read_into(number, buffer)
                slab = self.index.view(number, buffer)
                slab.refill(A.rows(of.row_start, of.row_stop), of.row_start)
                yield slab

        return self.create(self.path, slabs(), shape=self.index.shape, overwrite=True, label=self.label)

    def __repr__(self) -> str:
        return f"<FileStore {self.path}: {self.index}>"

    def read_into(self, number: int, buffer: np.ndarray[Any, Any], part: Part = "whole") -> None:
        """Read a part of subdivision ``number`` into a page-aligned buffer.

        Raises
        ------
        StoreError
            If the disk fails, the file ends early, or a checksum does not match; the message names file, subdivision and rows.
        """
        now = before = self._last
        subdivision = self.index.subdivisions[number]
        where = f"subdivision {number} ({subdivision}) of {self.path}"
        if self._file.closed:
            raise StoreError(f"cannot read {where}: the store is closed; open it again with FileStore(path)")
        start, nbytes = subdivision.bytes_of(part).start, subdivision.part_nbytes(part)
        target = buffer[:nbytes]
        try:
            done = _read_from(self._file, target, self._offsets[number] + start)
            now = _state_of(self._file)
        except OSError as error:
            raise StoreError(f"cannot read {where}: {error.strerror or error}; check the disk") from error
        except ValueError as error:  # of a closed file
            raise StoreError(f"cannot read {where}: the store was closed meanwhile") from error
        if done < nbytes:
            raise StoreError(f"{where} ends after {start + done} of {subdivision.nbytes} bytes; build the store again")
        self._last = now
        for piece, checksum in subdivision.checksums_of(part):
            key = (number, piece.start, piece.stop)
            if self.verify == "always" or self._verified.get(key) != now:
                content = target[piece.start - start : piece.stop - start]
                if checksum_of(content, _reading_threads(content.size)) != checksum:
                    when = "" if now == self._opened else " while it was open"
                    raise StoreError(
                        f"{where} does not match its checksum: the file was altered{when}; build the store again"
                    )
                if piece.start == 0:  # the structure, which kernels follow
                    try:
                        self.index.check_structure(number, target)
                    except InputError as error:
                        raise StoreError(f"{where} is damaged: {error}; build the store again") from error
                # What was written during the read, or at the same tick of the clock, may differ from what was verified.
                self._verified[key] = now if now == before and now.is_settled() else None

    def close(self) -> None:
        """Close the file; the store stays on disk."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self.close()


class _State(NamedTuple):
    """What changes when a file is altered: identity, size, and times in nanoseconds."""

    device: int
    inode: int
    nbytes: int
    modified: int
    changed: int

    def is_settled(self) -> bool:
        """Return whether the file was altered so long ago that another alteration would have another time."""
        return not 0 <= time.time_ns() - self.changed < _CLOCK_TICK


def _state_of(file: FileIO) -> _State:
    status = os.fstat(file.fileno())
    return _State(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _json_checksum(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _write_index(file_path: Path, index: MatrixIndex, label: str, store_path: Path) -> None:
    content = {"label": label, **index.to_json()}
    with writing(store_path), open(file_path, "w", encoding="utf-8") as file:
        json.dump({"penstock_store": _VERSION, "checksum": _json_checksum(content), **content}, file)
        file.flush()
        os.fsync(file.fileno())


def _write_slabs(
    path: Path,
    data: Path,
    row_slabs: Iterable[SparseMatrix],
    shape: tuple[int, int] | None,
    progress: Callable[[int], None] | None,
) -> MatrixIndex:
    builder, written, buffer = IndexBuilder(shape), 0, aligned_buffer(0)
    with contextlib.ExitStack() as files:
        with writing(path):
            file = files.enter_context(open(data, "wb", buffering=0))
        for slab in row_slabs:  # outside of writing(): errors of the caller's iterable pass unchanged
            subdivision = builder.add(slab)
            if buffer.nbytes < subdivision.nbytes:
                buffer = aligned_buffer(subdivision.nbytes)
            piece = buffer[: subdivision.nbytes]
            pack(slab, subdivision, piece)
            del slab  # before the next one is created
            builder.set_checksums(piece)
            remaining = piece.data
            with writing(path):
                while remaining:
                    remaining = remaining[file.write(remaining) :]
            written += subdivision.nbytes
            if progress is not None:
                progress(written)
        with writing(path):
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):  # reads bypass the page cache, so the file need not stay in it
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return builder.finish()


def _read_index(path: Path) -> tuple[MatrixIndex, str]:
    try:
        with open(path / _INDEX, encoding="utf-8") as file:
            data = json.load(file)
    except FileNotFoundError:
        raise StoreError(f"{path} is not a store: it has no {_INDEX}; make one with FileStore.create") from None
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"cannot read {path / _INDEX}: {error}; build the store again") from error
    if not isinstance(data, dict) or data.pop("penstock_store", None) != _VERSION:
        raise StoreError(f"{path / _INDEX} is not an index of version {_VERSION}; build the store again")
    if data.pop("checksum", None) != _json_checksum(data):
        raise StoreError(f"{path / _INDEX}: the index is damaged (its checksum does not match); build the store again")
    label = str(data.pop("label", ""))
    return MatrixIndex.from_json(data), label


def _open_for_reading(data: Path, direct: bool | None) -> tuple[FileIO, bool]:
    """Return an open file and whether it bypasses the page cache.

    A file, unlike a descriptor, closes itself when an interrupt comes before anything holds it.
    """
    file = FileIO(data)
    if direct is not False and hasattr(os, "O_DIRECT"):
        import fcntl

        with contextlib.suppress(OSError):  # some file systems refuse the flag, and some accept it but refuse the read
            before = fcntl.fcntl(file, fcntl.F_GETFL)
            fcntl.fcntl(file, fcntl.F_SETFL, before | os.O_DIRECT)
            try:
                os.preadv(file.fileno(), [aligned_buffer(PAGE_NBYTES).data], 0)
                return file, True
            except OSError:
                fcntl.fcntl(file, fcntl.F_SETFL, before)
                raise
    if direct:
        file.close()
        raise StoreError(f"{data}: this file system cannot bypass the page cache; leave direct=None")
    return file, False


def _read_from(file: FileIO, target: np.ndarray[Any, Any], offset: int) -> int:
    """Read from a place of a file until an array is full or the file ends, by several threads; return the bytes read."""

    def read(start: int) -> int:
        piece, done = target[start : start + PIECE_NBYTES].data, 0
        while done < len(piece) and (count := _read_at(file, piece[done:], offset + start + done)):
            done += count
        return done

    total = 0
    starts = range(0, target.size, PIECE_NBYTES)
    for start, done in enumerate(mapped(read, starts, _reading_threads(target.size))):
        total += done
        if done < min(PIECE_NBYTES, target.size - start * PIECE_NBYTES):
            break
    return total


def _reading_threads(nbytes: int) -> int:
    """Return how many threads read: a disk is fastest with several requests, but there is work to be done beside."""
    return max(1, usable_cores() // 2) if nbytes > PIECE_NBYTES else 1  # to count cores takes as long as a short read


def _read_at(file: FileIO, buffer: memoryview, offset: int) -> int:
    """Read from a place of a file, and return the number of bytes."""
    if hasattr(os, "preadv"):
        return os.preadv(file.fileno(), [buffer], offset)
    with _SEEKING:  # on Windows all readers of a file share one position
        file.seek(offset)
        return file.readinto(buffer) or 0
