"""Stores a matrix on disk, in a directory with a JSON index and one file of page-aligned slabs."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from io import FileIO
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from penstock.host.checksums import checksum_of
from penstock.host.threads import PIECE_NBYTES, mapped, usable_cores
from penstock.spmv import CsrMatrix, InputError, StoreError
from penstock.streaming.stores.buffers import PAGE_NBYTES, aligned_buffer
from penstock.streaming.stores.loading import refilled_slabs
from penstock.streaming.stores.matrix_index import Part
from penstock.streaming.stores.packing import SlabConverter, row_slabs_of
from penstock.streaming.stores.planes import join_in_place, plane_nbytes
from penstock.streaming.stores.store_files import (
    INDEX,
    SLABS,
    STORE_FILES,
    SlabWriter,
    read_index,
    stored_nbytes,
    write_index,
)
from penstock.streaming.stores.store_place import StorePlace

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
    To verify a subdivision is to compare its checksums, and to check its offsets and indices against its shape. To join two
    planes takes a buffer for each thread that reads, of half the bytes of the largest values.

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
        self.index, self.label, self._planes = read_index(self.path)
        lengths = [stored_nbytes(subdivision, planes=self.planes) for subdivision in self.index.subdivisions]
        self._offsets = np.cumsum([0, *lengths]).tolist()
        # A buffer of each thread, for high words that are joined.
        self._own, self._joining_threads = threading.local(), max(1, usable_cores() // 2)
        # When each piece was verified, as the state of the file; None if it may have been altered since.
        self._verified: dict[tuple[int, int, int], _State | None] = {}
        data = self.path / SLABS
        nbytes = data.stat().st_size if data.exists() else 0
        expected = self._offsets[-1] + (0 if self._planes is None else self._planes.corrections_nbytes)
        if nbytes != expected:
            raise StoreError(
                f"{data} has {nbytes} bytes instead of {expected}: it was truncated or is not finished; build the store again"
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
        planes: bool | Literal["auto"] = False,
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
        planes : bool or "auto"
            Store values of float64 in two planes: float32 numbers, and 32 bits each that complete them; ``"auto"`` if there are
            such planes, and memory for what is summed up of them. They take the same bytes. A solve by an image of the matrix,
            ``precision`` of :func:`penstock.solve`, then reads half of them for the image, and with an image in float32 half of
            them for each residual; other sweeps join both.
        progress : callable, optional
            Called with the bytes written so far after each slab.

        Raises
        ------
        InputError
            If a slab is not valid, the slabs do not add up to ``shape``, or ``path`` exists, from the start or at the end; with
            ``planes=True``, if values are not of float64, or beyond the range of float32.
        StoreError
            If the disk is full or fails.
        """
        place = StorePlace(Path(path), overwrite=overwrite, files=STORE_FILES)
        with place.building() as partial:
            converter = SlabConverter(format, block_size)
            slabs = map(converter.convert, row_slabs_of(row_slabs, format, block_size=block_size, slab=slab))
            writer = SlabWriter(place.path, planes=planes)
            index = writer.write(partial / SLABS, slabs, shape, progress)
            write_index(partial / INDEX, index, label, place.path, writer.planes)
        return cls(place.path)

    def refilled(self, A: CsrMatrix) -> Self:
        """Replace the values on disk by those of a matrix with the same pattern, and open the store anew.

        The new store is written beside the old one, at the cost of its bytes, and takes its name at the end: whatever
        interrupts this, the disk has the old store or the new one. This object goes on reading the old values until it is closed.
        Values are stored in planes if they were and can be.

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
        kept: dict[str, Any] = {"shape": self.index.shape, "overwrite": True, "label": self.label}
        return self.create(self.path, refilled_slabs(self, A), planes="auto" if self.planes else False, **kept)

    @property
    def planes(self) -> bool:
        """Whether values are stored in two planes."""
        return self._planes is not None

    def corrections(self) -> np.ndarray[Any, Any] | None:
        """Return the corrections of the image in float32, (block rows, block size, block size); None if there are none."""
        if self._planes is None or not self._planes.corrections_nbytes:
            return None
        buffer, where = aligned_buffer(self._planes.corrections_nbytes), f"the corrections in {self.path}"
        try:
            done = _read_from(self._file, buffer, self._offsets[-1])
        except (OSError, ValueError) as error:
            raise StoreError(f"cannot read {where}: {error}; check the disk, or open the store again") from error
        if done < buffer.size or zlib.crc32(buffer.data) != self._planes.corrections_checksum:
            raise StoreError(f"{where} do not match their checksum: the file was altered; build the store again")
        rows, size = self.index.shape[0], self.index.block_size
        return buffer.view(np.float32)[: rows * size].reshape(-1, size, size)

    def __repr__(self) -> str:
        return f"<FileStore {self.path}: {self.index}>"

    def read_into(self, number: int, buffer: np.ndarray[Any, Any], part: Part = "whole") -> None:
        """Read a part of subdivision ``number`` into a page-aligned buffer.

        Raises
        ------
        StoreError
            If the disk fails, the file ends early, or a checksum does not match; the message names file, subdivision and rows.
        """
        subdivision = self.index.subdivisions[number]
        nbytes = subdivision.part_nbytes(part)
        if self._planes is None:
            start = subdivision.bytes_of(part).start
            self._read(number, buffer[:nbytes], start, subdivision.checksums_of(part))
            return
        if part != "values":
            structure = subdivision.values_start
            self._read(number, buffer[:structure], 0, subdivision.checksums_of("structure"))
        if part != "structure":
            plane = plane_nbytes(subdivision)
            high: np.ndarray[Any, Any] | None = getattr(self._own, "high", None)
            if high is None or high.nbytes < plane:
                high = self._own.high = aligned_buffer(plane)
            self.read_high(number, high)
            self.read_low(number, buffer[nbytes - plane : nbytes])
            values = buffer[nbytes - subdivision.part_nbytes("values") : nbytes]
            join_in_place(high[: values.nbytes // 2].view(np.float32), values, self._joining_threads)

    def read_high(self, number: int, buffer: np.ndarray[Any, Any]) -> None:
        """Read the high words of the values of a subdivision, of a store of two planes, into a page-aligned buffer."""
        self._read_plane(number, buffer, 0)

    def read_low(self, number: int, buffer: np.ndarray[Any, Any]) -> None:
        """Read the low words likewise."""
        self._read_plane(number, buffer, 1)

    def _read_plane(self, number: int, buffer: np.ndarray[Any, Any], plane: int) -> None:
        assert self._planes is not None, "the store has planes"
        subdivision = self.index.subdivisions[number]
        nbytes = plane_nbytes(subdivision)
        start = subdivision.values_start + plane * nbytes
        checksum = self._planes.checksums[number][plane]
        self._read(number, buffer[:nbytes], start, [(slice(start, start + nbytes), checksum)])

    def _read(self, number: int, target: np.ndarray[Any, Any], start: int, checksums: list[tuple[slice, int]]) -> None:
        """Read what is stored of a subdivision from an offset on, and verify the pieces of it that have a checksum."""
        now = before = self._last
        subdivision = self.index.subdivisions[number]
        where = f"subdivision {number} ({subdivision}) of {self.path}"
        if self._file.closed:
            raise StoreError(f"cannot read {where}: the store is closed; open it again with FileStore(path)")
        try:
            done = _read_from(self._file, target, self._offsets[number] + start)
            now = _state_of(self._file)
        except OSError as error:
            raise StoreError(f"cannot read {where}: {error.strerror or error}; check the disk") from error
        except ValueError as error:  # of a closed file
            raise StoreError(f"cannot read {where}: the store was closed meanwhile") from error
        if done < target.size:
            stored = stored_nbytes(subdivision, planes=self.planes)
            raise StoreError(f"{where} ends after {start + done} of {stored} bytes; build the store again")
        self._last = now
        for piece, checksum in checksums:
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
