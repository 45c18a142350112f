"""Statistics that decide the speed of a product: how many entries, in which rows, in which blocks, and whether symmetric."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, Self

import numpy as np

from penstock.spmv.compilation.cuda_module import launch, type_names
from penstock.spmv.compilation.jit import serial_kernel, shared_range
from penstock.spmv.device import CPU, Array, Device
from penstock.spmv.errors import InputError
from penstock.spmv.formats.limits import INT32_MAX, LARGEST_DENSE_BLOCK, ascend, check_block_size
from penstock.spmv.formats.survey import CONVERSION_KERNELS, Defect, Survey, survey
from penstock.spmv.formats.symmetry import Symmetry, measure_symmetry
from penstock.spmv.formats.through_device import WORTH_NBYTES, Rows, survey_through

#: Blocks are worth a blocked format if more than this share of their scalars is stored.
_WORTHWHILE_FILL = 0.5
# Fills of large matrices are those of some runs of rows, evenly spaced; whole blocks of every size fit into a run.
_RUN, _RUNS = math.lcm(*range(2, LARGEST_DENSE_BLOCK + 1)), 32
# A size is counted only if shorter and fewer runs, of about as many rows, have more than this fill: most sizes are far from it.
_BRIEF_RUN, _BRIEF_RUNS, _PROMISING_FILL = 256, 8, 0.4
# Multiples of it, without their whole parts, are spread evenly between 0 and 1.
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


class PieceConverter(Protocol):
    """Converts pieces of a matrix while a GPU looks at them, as :class:`~penstock.spmv.formats.upper_half.UpperHalf` does."""

    def __init__(self, device: Device, size: int, blocks: int, values_dtype: Any) -> None: ...

    @property
    def granularity(self) -> int:
        """Of how many rows pieces are multiples."""

    def add(self, rows: Rows, counts: Array) -> None:
        """Convert the next rows, of whose blocks ``counts`` are to be stored in each block row."""

    def arrays(self, rows: int) -> tuple[Array, Array, Array] | None:
        """Return offsets, column indices and values of all rows."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


@dataclass(frozen=True, eq=False)
class MatrixStatistics:
    """Statistics of a sparse matrix; each is computed on first use, and once.

    Parameters
    ----------
    shape : (int, int)
    nnz : int
        Stored entries.
    dtype, values_dtype : dtype
        Types of the vectors and of the stored values.
    device : Device
    row_offsets, column_indices, values : array
        The matrix in CSR, on that device.
    matrix : CsrMatrix, optional
        That matrix, if it is one of penstock, which knows its :class:`CsrStrategy`.
    through : Device, optional
        A GPU that looks at a large matrix of the host, and converts it, piece by piece.
    converter : type, optional
        Converts the pieces of a square matrix of blocks while they are on the GPU; :meth:`take_converted` returns the result.
    """

    shape: tuple[int, int]
    nnz: int
    dtype: np.dtype[np.generic]
    values_dtype: np.dtype[np.generic]
    device: Device
    row_offsets: Array
    column_indices: Array
    values: Array
    matrix: Any = None
    through: Device | None = None
    converter: type[PieceConverter] | None = None
    _counts: dict[tuple[int, bool], Array] = field(default_factory=dict, repr=False)
    _converted: dict[int, tuple[Array, Array, Array]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        A: Any,
        *,
        values_dtype: Any = None,
        through: Device | None = None,
        converter: type[PieceConverter] | None = None,
    ) -> Self:
        """Return the statistics of a :class:`CsrMatrix` or a SciPy CSR matrix with sorted rows."""
        matrix = A if hasattr(A, "row_offsets") else None
        if matrix is not None:
            arrays = (A.row_offsets, A.column_indices, A.values)
        else:
            arrays = (A.indptr.astype(np.int64, copy=False), A.indices.astype(np.int32, copy=False), A.data)
        return cls(
            (int(A.shape[0]), int(A.shape[1])),
            int(arrays[0][-1]) if arrays[0].size else 0,
            np.dtype(A.dtype),
            np.dtype(values_dtype or arrays[2].dtype),
            getattr(A, "device", CPU),
            *arrays,
            matrix,
            through if sum(int(array.nbytes) for array in arrays) >= WORTH_NBYTES else None,
            converter,
        )

    @cached_property
    def lengths(self) -> np.ndarray[Any, Any]:
        """Stored entries of each row: int64, (rows,), on the host."""
        lengths: np.ndarray[Any, Any] = np.diff(CPU.asarray(self.row_offsets)).astype(np.int64, copy=False)
        return lengths

    @cached_property
    def survey(self) -> Survey:
        """What one pass over the entries sees."""
        arrays = (self.row_offsets, self.column_indices, self.values)
        if self.through is not None:
            return self._survey_through(self.through, arrays)
        return survey(self.device, self.shape[1], *arrays)

    def _survey_through(self, device: Device, arrays: tuple[Array, Array, Array]) -> Survey:
        """Let a GPU survey the rows, and count the blocks of the upper half, if there are such of one size."""
        offsets, entries = self.row_offsets, min(self.column_indices.size, self.values.size)
        if not (offsets[0] == 0 and ascend(offsets) and offsets[-1] <= entries):
            return Survey(Defect.OFFSETS)
        size, counts = max(self.fills, key=lambda size: (self.fills[size], size), default=1), []
        with contextlib.ExitStack() as resources:
            converter = self._begun_converter(device, size)
            if converter is not None:
                resources.enter_context(converter)

            def look(rows: Rows, sound: Callable[[], bool]) -> None:
                shape, upper = (rows.row_offsets.size - 1, self.shape[1]), rows.first // size
                counts.append(count_blocks(device, shape, rows.row_offsets, rows.column_indices, size, upper=upper))
                if converter is not None and sound():
                    converter.add(rows, counts[-1])

            granularity = size if converter is None else converter.granularity
            found = survey_through(device, self.shape[1], arrays, granularity, look)
            if not found.defects:
                self._counts[size, True] = np.concatenate([device.to_host(of_piece) for of_piece in counts])
                if converter is not None and (converted := converter.arrays(self.shape[0])) is not None:
                    self._converted[size] = converted
        return found

    def _begun_converter(self, device: Device, size: int) -> PieceConverter | None:
        if self.converter is None or size == 1 or self.shape[0] != self.shape[1]:
            return None
        block_rows, blocks = self.shape[0] // size, self.nnz / (self.fills[size] * size * size)
        try:
            return self.converter(device, size, int(blocks + block_rows) // 2, self.values_dtype)
        except MemoryError:  # it is converted later, when more is known
            return None

    def take_converted(self, size: int, values_dtype: Any) -> tuple[Array, Array, Array] | None:
        """Return what has been made of the pieces in blocks of a size, if it was made; all of it is forgotten here."""
        converted = self._converted.pop(size, None)
        self._converted.clear()
        return converted if converted is not None and converted[2].dtype == values_dtype else None

    @property
    def values_itemsize(self) -> int:
        """Bytes of a stored value."""
        return self.values_dtype.itemsize

    @property
    def mean(self) -> float:
        """Mean row length."""
        return self.nnz / max(self.shape[0], 1)

    @property
    def longest(self) -> int:
        """Entries of the longest row."""
        return self.survey.longest

    @property
    def variation(self) -> float:
        """Coefficient of variation of the row lengths: standard deviation over mean."""
        if not self.nnz:
            return 0.0
        variance = (self.survey.squares * self.shape[0] - self.nnz**2) / self.shape[0] ** 2  # of exact integers
        return math.sqrt(max(variance, 0.0)) / self.mean

    @cached_property
    def symmetry(self) -> Symmetry:
        """How far entries are from their mirror images; nothing is searched for in a symmetric matrix."""
        if self.shape[0] == self.shape[1] and not self.survey.skew:
            return Symmetry(0)
        return measure_symmetry(self.device, self.shape, self.row_offsets, self.column_indices, self.values)

    @cached_property
    def fills(self) -> dict[int, float]:
        """The fill of every block size, 2 to 8, for which it exceeds one half; of large matrices estimated from some rows."""
        fills = {size: self.fill(size) for size in range(2, LARGEST_DENSE_BLOCK + 1)}
        return {size: fill for size, fill in fills.items() if fill > _WORTHWHILE_FILL}

    def fill(self, size: int) -> float:
        """Return the share of the scalars in blocks of a size that are stored; 0 if the size does not divide the shape.

        Where some rows show that it is small, this is the share in these rows.
        """
        if self.shape[0] % size or self.shape[1] % size:
            return 0.0
        brief = (-(-_BRIEF_RUN // size) * size, _BRIEF_RUNS)
        if self._are_many_more(*brief) and (fill := self._fill_of_runs(size, *brief)) <= _PROMISING_FILL:
            return fill
        return self._fill_of_runs(size, *((_RUN, _RUNS) if self._are_many_more(_RUN, _RUNS) else (self.shape[0], 1)))

    def _are_many_more(self, length: int, count: int) -> bool:
        """Return whether there are many more rows than those of some runs."""
        return self.shape[0] > 4 * length * count

    def _fill_of_runs(self, size: int, length: int, count: int) -> float:
        """Return the share of the scalars in the blocks of some runs of rows, evenly spaced, that are stored."""
        (rows, columns), offsets = self.shape, self.row_offsets
        starts = np.arange(count) * (rows // count // max(1, length) * length)
        ends = self.device.asarray(np.stack([starts, starts + length]))
        entries = (offsets[ends[1]] - offsets[ends[0]]).sum()
        runs = (offsets[start : start + length + 1] for start in starts.tolist())
        blocks = sum(count_blocks(self.device, (length, columns), run, self.column_indices, size).sum() for run in runs)
        return int(entries) / max(1, int(blocks) * size * size)  # a GPU is waited for here only

    def blocks(self, size: int, *, upper: bool = False) -> Array:
        """Return the number of ``size`` x ``size`` blocks of each block row; with ``upper`` none left of the diagonal."""
        if (size, upper) not in self._counts:
            self._counts[size, upper] = count_blocks(
                self.device, self.shape, self.row_offsets, self.column_indices, size, upper=0 if upper else None
            )
        return self._counts[size, upper]


def spread(count: int, most: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return ``most`` of the numbers below ``count``, or all: one at an irregular place in each of equal intervals.

    Rows at equal steps could all be those of the same unknown of a node, or of the same layer of a mesh. On the host.
    """
    some = min(count, most)
    numbers = np.arange(some)
    places = (numbers + numbers * _GOLDEN % 1.0) * (count / max(some, 1))
    return np.minimum(places.astype(np.int64), count - 1)


def count_blocks(
    device: Device,
    shape: tuple[int, int],
    row_offsets: Array,
    column_indices: Array,
    size: int,
    *,
    upper: int | None = None,
) -> Array:
    """Count the blocks of ``size`` x ``size`` that each block row of a CSR matrix needs: int64, (block rows,).

    ``upper`` leaves out the blocks left of the diagonal: the number of the first block row in the matrix of which this is a
    slab.
    """
    if not 1 <= size <= LARGEST_DENSE_BLOCK:
        largest = LARGEST_DENSE_BLOCK
        raise InputError(f"blocks must be 1 x 1 to {largest} x {largest}, not {size} x {size}")
    check_block_size(size, shape[1])
    block_rows = int(check_block_size(size, shape[0]))
    counts = device.xp.zeros(block_rows, dtype=np.int64)
    if device.kind == "cpu":
        _count_blocks(block_rows, size, first_kept(upper), wide_offsets(row_offsets), column_indices, counts)
    else:
        function = CONVERSION_KERNELS.function(f"count_blocks<{type_names(row_offsets)}, {size}>")
        arguments = (np.int64(block_rows), np.int64(first_kept(upper)), row_offsets, column_indices, counts)
        launch(function, 8 * block_rows, 256, arguments)
    return counts


def first_kept(upper: int | None) -> int:
    """Return the offset from a block row to the first block column that kernels store."""
    return -INT32_MAX if upper is None else upper


def wide_offsets(row_offsets: Array) -> Array:
    """Return offsets as int64: kernels that read a matrix once are compiled for these only."""
    return row_offsets.astype(np.int64, copy=False)


@serial_kernel
def next_block(block_row: int, entries: Array, row_offsets: Array, source_columns: Array) -> int:
    """Return the next block column among the remaining entries of a block row, or a number above INT32_MAX at its end."""
    size, none = entries.size, np.int64(INT32_MAX) + 1
    column = none
    for r in range(size):
        if entries[r] < row_offsets[block_row * size + r + 1]:
            column = min(column, np.int64(source_columns[entries[r]]))
    return column if column == none else column // size  # type: ignore[return-value]


@shared_range(least=4096)
def _count_blocks(
    begin: int, end: int, size: int, upper: int, row_offsets: Array, source_columns: Array, counts: Array
) -> None:
    for block_row in range(begin, end):
        entries = np.empty(size, dtype=np.int64)  # how far each scalar row has come
        for r in range(size):
            entries[r] = row_offsets[block_row * size + r]
        count = 0
        while True:
            column = next_block(block_row, entries, row_offsets, source_columns)
            if column > INT32_MAX:
                break
            behind = column * size + size  # columns ascend, so those of the block are below it: nothing is divided
            for r in range(size):
                entry, stop = entries[r], row_offsets[block_row * size + r + 1]
                while entry < stop and source_columns[entry] < behind:
                    entry += 1
                entries[r] = entry
            count += column >= block_row + upper
        counts[block_row] = count
