"""Builds a store from entries in any order: they are sorted in runs that fit the memory, and the runs are merged on disk."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import scipy.sparse

from penstock.spmv import InputError, format_named, parse_nbytes
from penstock.spmv.formats.limits import INT32_MAX
from penstock.spmv.formats.validation import check_indices
from penstock.streaming.stores.file_store import FileStore
from penstock.streaming.stores.packing import recut, symmetric_slabs
from penstock.streaming.stores.store_files import STORE_FILES
from penstock.streaming.stores.store_place import StorePlace, partial_folder, writing

Numbers = np.ndarray[Any, Any]

# Bytes of an entry in a run, and at most while a run is sorted: rows, columns and values, their order, and a copy of each.
_ENTRY_NBYTES, _SORTING_NBYTES = 20, 76
# Bytes of a row while a slab is made, and how many slabs a store may have: each takes a page of the disk, and a description.
_ROW_NBYTES, _MOST_SLABS = 64, 16_384
# Slabs end at whole blocks of 1 to 8 rows, and of chunks of 32 of them in formats that have chunks.
_BLOCKS, _CHUNK = 840, 32
_SLAB_NBYTES = 16 << 20
_MOST_PARTS = 1024
# Entries are counted in this many ranges of rows, to cut slabs of about equal size.
_RANGES = 65536


class StoreBuilder:
    """Builds a :class:`FileStore` from entries or element matrices in any order, in memory that is limited.

    What is added several times is summed. Entries are kept in memory until that is full, sorted, and written to disk as a *run*;
    at the end all runs are read side by side, a slab of rows at a time. So a matrix passes over the disk twice, and needs 20
    bytes an entry there until the store is finished.

    Parameters
    ----------
    path : path
        Directory of the store; its files are written beside it until it is whole.
    shape : (int, int)
        Of the whole matrix.
    memory : int or str
        For entries that are being sorted, and for a slab, which has 840 rows or more, 26,880 in formats of chunks.
    slab : int or str, optional
        About the bytes of a subdivision; by default 16 MiB or less, of that many rows at least.
    overwrite, label, format, block_size, planes
        As for :meth:`FileStore.create`.

    Raises
    ------
    InputError
        If the path exists, or the shape cannot be, or has more rows than 16,384 slabs that fit the memory.

    Examples
    --------
    Two elements of a bar that share a node, with a spring at one end:

    >>> import tempfile
    >>> import numpy as np
    >>> from penstock.streaming import StoreBuilder, StreamedMatrix
    >>> element = np.array([[1.0, -1.0], [-1.0, 1.0]])
    >>> with tempfile.TemporaryDirectory() as folder, StoreBuilder(f"{folder}/bar", (3, 3)) as builder:
    ...     builder.add_elements([[0, 1], [1, 2]], np.stack([element, element]))
    ...     builder.add([0], [0], [5.0])
    ...     with builder.finish() as store, StreamedMatrix(store, "1 MiB") as A:
    ...         print(A @ np.array([1.0, 2.0, 4.0]))
    [ 4. -1.  2.]
    """

    def __init__(
        self,
        path: str | Path,
        shape: tuple[int, int],
        *,
        memory: int | str = "1 GiB",
        overwrite: bool = False,
        label: str = "",
        format: str = "auto",
        block_size: int | Literal["auto"] = "auto",
        planes: bool | Literal["auto"] = False,
        slab: int | str | None = None,
    ) -> None:
        rows, columns = (int(size) for size in shape)
        if rows < 1 or not 1 <= columns <= INT32_MAX:
            raise InputError(f"a matrix of {rows} x {columns} cannot be stored; columns are numbered by 32 bits")
        self.shape = (rows, columns)
        if format != "auto":
            format_named(format)
        self._place = StorePlace(Path(path), overwrite=overwrite, files=STORE_FILES)
        self._place.check()
        self._options: dict[str, Any] = {
            "overwrite": overwrite, "label": label, "format": format, "block_size": block_size, "planes": planes
        }  # fmt: skip
        self._slab_nbytes = None if slab is None else parse_nbytes(slab)
        self._most = max(1, parse_nbytes(memory) // _SORTING_NBYTES)
        chunks = 1 if format in ("auto", "csr", "bsr") else _CHUNK
        self._multiple = (_BLOCKS if block_size == "auto" else int(block_size)) * chunks
        self._range = max(1, -(-rows // _RANGES // self._multiple)) * self._multiple
        self._most_rows = max(1, parse_nbytes(memory) // _ROW_NBYTES // self._multiple) * self._multiple
        if rows > _MOST_SLABS * self._most_rows:
            raise InputError(
                f"{rows} rows are more than {_MOST_SLABS} slabs of {self._most_rows} rows, the largest for {memory}; give more "
                "memory"
            )
        self._counts = np.zeros(-(-rows // self._range), dtype=np.int64)
        self._parts: list[tuple[Numbers, Numbers, Numbers]] = []
        self._held = 0
        self._runs: list[_Run] = []
        self._resources = ExitStack()
        self._folder = self._resources.enter_context(partial_folder(self._place.path))

    def add(self, rows: Any, columns: Any, values: Any) -> None:
        """Add entries; those of one place are summed.

        Parameters
        ----------
        rows, columns : array of integers
        values : array of real numbers
            All of one shape.

        Raises
        ------
        InputError
            If the shapes differ, an index is out of range, or a value is no finite real number.
        StoreError
            If the disk is full or fails.
        """
        self._check_open()
        rows, columns, values = (np.asarray(of).reshape(-1) for of in (rows, columns, values))
        if not rows.size == columns.size == values.size:
            raise InputError(
                f"{rows.size} rows, {columns.size} columns and {values.size} values do not belong together"
            )
        self._check(rows, columns, values)
        for start in range(0, rows.size, self._most):
            part = slice(start, start + self._most)
            self._hold(rows[part].astype(np.int64), columns[part].astype(np.int32), values[part].astype(np.float64))

    def add_elements(self, unknowns: Any, matrices: Any) -> None:
        """Add element matrices.

        Parameters
        ----------
        unknowns : array of integers, (elements, k)
            The rows, and columns, of the k unknowns of each element.
        matrices : array, (elements, k, k) or (k, k)
            One for each element, or one for all.
        """
        unknowns = np.asarray(unknowns)
        if unknowns.ndim != 2:
            raise InputError(f"unknowns must have shape (elements, k), not {unknowns.shape}")
        count, size = unknowns.shape
        try:
            values = np.broadcast_to(matrices, (count, size, size))
        except ValueError:
            raise InputError(
                f"matrices must have shape ({count}, {size}, {size}) or ({size}, {size}), not {np.shape(matrices)}"
            ) from None
        self.add(np.repeat(unknowns, size, axis=1), np.tile(unknowns, (1, size)), values)

    def add_matrix(self, matrix: Any, *, first_row: int = 0) -> None:
        """Add the entries of a SciPy matrix, whose row 0 is ``first_row`` of the whole matrix."""
        if scipy.sparse.issparse(matrix):
            check_indices(matrix, "the matrix")
        entries = scipy.sparse.coo_array(matrix)
        self.add(entries.row + np.int64(first_row), entries.col, entries.data)

    def finish(self, progress: Callable[[int], None] | None = None) -> FileStore:
        """Merge all entries, write the store and open it; the runs are removed.

        Parameters
        ----------
        progress : callable, optional
            Called with the bytes written so far after each slab.
        """
        self._check_open()
        self._write_run()
        slabs, options = self._slabs(), {**self._options}
        try:
            if self._slab_nbytes is not None:
                kind = options["format"], options["block_size"]
                slabs, options["block_size"] = recut(slabs, self._slab_nbytes, *kind)
            slabs = symmetric_slabs(slabs, self.shape[0], options["format"])
            return FileStore.create(self._place.path, slabs, shape=self.shape, progress=progress, **options)
        finally:
            self.close()

    def close(self) -> None:
        """Remove what was written, unless the store is finished."""
        self._runs.clear()
        self._parts.clear()
        self._resources.close()
        self._folder = None  # type: ignore[assignment]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._folder is None:
            raise InputError("the store is finished; begin another one with a StoreBuilder of its own")

    def _check(self, rows: Numbers, columns: Numbers, values: Numbers) -> None:
        if not rows.size:
            return
        for name, indices, size in (("row", rows, self.shape[0]), ("column", columns, self.shape[1])):
            if indices.dtype.kind not in "iu":
                raise InputError(f"{name}s must be integers, not {indices.dtype}")
            if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < size:
                wrong = indices[(indices < 0) | (indices >= size)][0]
                raise InputError(f"{name} {wrong} is outside 0 to {size - 1}")
        if values.dtype.kind not in "fiub" or not np.isfinite(values).all():
            raise InputError(f"values must be finite real numbers; these are {values.dtype}, or one is NaN or infinite")

    def _hold(self, rows: Numbers, columns: Numbers, values: Numbers) -> None:
        """Keep entries in memory, and write a run if they would be too many."""
        if self._held + rows.size > self._most:
            self._write_run()
        self._counts += np.bincount(rows // self._range, minlength=self._counts.size)
        self._parts.append((rows, columns, values))
        self._held += rows.size
        if len(self._parts) > _MOST_PARTS:  # small arrays need more memory than their entries
            self._parts = [tuple(np.concatenate(of) for of in zip(*self._parts, strict=True))]  # type: ignore[list-item]

    def _write_run(self) -> None:
        if self._held:
            rows, columns, values = (np.concatenate(of) for of in zip(*self._parts, strict=True))
            order = np.lexsort((columns, rows))
            with writing(self._place.path):
                self._runs.append(
                    _Run.write(self._folder / f"{len(self._runs)}", rows[order], columns[order], values[order])
                )
            self._parts, self._held = [], 0  # not before: an error must not lose them

    def _slabs(self) -> Iterator[scipy.sparse.csr_array]:
        """Yield the rows of the matrix in slabs of about equal bytes, each merged from all runs."""
        for start, stop in itertools.pairwise(self._bounds()):
            parts = [run.read(start, stop) for run in self._runs]
            rows, columns, values = (
                (np.concatenate(of) for of in zip(*parts, strict=True)) if parts else np.zeros((3, 0))
            )
            indices = (rows.astype(np.int64) - start, columns)
            slab = scipy.sparse.coo_array((values, indices), shape=(stop - start, self.shape[1])).tocsr()
            slab.sum_duplicates()
            yield slab

    def _bounds(self) -> list[int]:
        """Return the rows at which to cut."""
        most = min(_SLAB_NBYTES // _ENTRY_NBYTES, self._most)
        bounds, held = [0], 0
        for number, count in enumerate(self._counts.tolist()):
            start, stop = number * self._range, min((number + 1) * self._range, self.shape[0])
            if start > bounds[-1] and (held + count > most or stop - bounds[-1] > self._most_rows):
                bounds.append(start)
                held = 0
            share = (
                self._range * most // max(count, 1) // self._multiple * self._multiple
            )  # as if they were spread evenly
            step = max(self._multiple, min(self._most_rows, share))
            while stop - bounds[-1] > step and (count > most or stop - bounds[-1] > self._most_rows):
                bounds.append(bounds[-1] + step)
            held += count
        return [*bounds, self.shape[0]]


# Beyond every row.
_NO_ROW = 2**63 - 1


class _Run:
    """Sorted entries on disk."""

    def __init__(self, folder: Path, count: int) -> None:
        self._files = (("rows", np.int64), ("columns", np.int32), ("values", np.float64))
        self._folder, self._count = folder, count
        # Where the last slab ended, and the row of the next entry: most slabs of a sparse matrix hold nothing of most runs.
        self._stop, self._next = -1, -1

    @classmethod
    def write(cls, folder: Path, rows: Numbers, columns: Numbers, values: Numbers) -> Self:
        """Write sorted entries into a new folder."""
        folder.mkdir(exist_ok=True)  # a write that failed may be tried again
        for name, array in (("rows", rows), ("columns", columns), ("values", values)):
            array.tofile(folder / name)
        return cls(folder, rows.size)

    def read(self, start: int, stop: int) -> tuple[Numbers, Numbers, Numbers]:
        """Return the entries of some rows."""
        if start == self._stop and self._next >= stop:
            self._stop = stop
            return np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0)
        # Opened each time: there may be more runs than a process may have files open.
        rows_of_all = np.memmap(self._folder / "rows", dtype=np.int64, mode="r", shape=(self._count,))
        first, last = np.searchsorted(rows_of_all, [start, stop]).tolist()
        self._stop, self._next = stop, int(rows_of_all[last]) if last < self._count else _NO_ROW
        del rows_of_all
        read = (
            np.fromfile(self._folder / name, dtype=dtype, count=last - first, offset=first * np.dtype(dtype).itemsize)
            for name, dtype in self._files
        )
        rows, columns, values = read
        return rows, columns, values
