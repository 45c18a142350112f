"""A caller's matrix in CSR or BSR as it is, before anybody has looked at its entries: it becomes CSR where it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from penstock.host.threads import PIECE_NBYTES, in_pieces
from penstock.spmv.device import CPU, Array, Device
from penstock.spmv.errors import InputError
from penstock.spmv.formats.csr import CsrMatrix, lengths_fit
from penstock.spmv.formats.limits import as_type, check_columns, narrowed
from penstock.spmv.formats.validation import check_indices, in_sorted_rows, real_values
from penstock.spmv.host_memory import available_nbytes
from penstock.spmv.products.block_rows import BlockRows, as_csr
from penstock.spmv.sizes import format_nbytes

# Row offsets are widened on the host if the values take more than this many times their bytes.
_MANY_TIMES = 50


@dataclass(frozen=True, eq=False)
class UncheckedEntries:
    """The arrays of a caller's CSR or BSR matrix on the host, shared with it; ``dtype`` is the type of its vectors.

    On a GPU, wide indices are narrowed and blocks are taken apart there, so that the host makes no copy. The lengths of the
    arrays fit each other, and what offsets and indices of blocks lead to exists; nothing else is known. Indices that 32 bits do
    not hold become others out of range. Arrays may be those of a file that is mapped into memory, if it is ``in_file``.
    """

    shape: tuple[int, int]
    dtype: np.dtype[Any]
    row_offsets: Array
    column_indices: Array
    values: Array  # (entries,), or blocks (count, height, width)
    in_file: bool = False

    @classmethod
    def of(cls, A: Any, what: str = "the matrix", *, in_file: bool = False) -> Self:
        """Wrap a SciPy matrix in CSR or BSR; refuse arrays that do not fit each other, and values that are not real."""
        if A.format == "bsr":
            check_indices(A, what)
        elif not lengths_fit(A):
            A = in_sorted_rows(A, what)  # which says what is wrong
        values, entries = real_values(A, what), int(A.indptr[-1])  # arrays may be longer than that
        check_columns(A.shape[1], what)
        shape = (int(A.shape[0]), int(A.shape[1]))
        offsets, indices, values = map(np.ascontiguousarray, (A.indptr, A.indices[:entries], values[:entries]))
        return cls(shape, values.dtype, offsets, indices, values, in_file)

    @property
    def device(self) -> Device:
        """The host."""
        return CPU

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays in CSR, with indices of 32 bits."""
        return int(self.values.nbytes + 4 * self.values.size + 8 * (self.shape[0] + 1))

    def arrays(self) -> dict[str, Array]:
        """Return the arrays by name."""
        return {"row_offsets": self.row_offsets, "column_indices": self.column_indices, "values": self.values}

    def parameters(self) -> dict[str, Any]:
        """Return what else is known: whether arrays may lie in a file."""
        return {"in_file": self.in_file}

    @classmethod
    def from_arrays(
        cls, shape: tuple[int, int], dtype: Any, arrays: Mapping[str, Array], parameters: Mapping[str, Any]
    ) -> Self:
        """Return entries of these arrays, for vectors of another type."""
        return cls(shape, np.dtype(dtype), **arrays, **parameters)

    def owned(self) -> UncheckedEntries:
        """Return entries for longer use, or for the host: what lies in a file is copied, as the file may change.

        Raises
        ------
        InputError
            If they do not fit the memory.
        """
        if not self.in_file:
            return self
        arrays = self.row_offsets, self.column_indices, self.values
        nbytes = sum(array.nbytes for array in arrays if lies_in_file(array))
        if nbytes > available_nbytes():
            raise InputError(
                f"the matrix in a file takes {format_nbytes(nbytes)}, but {format_nbytes(available_nbytes())} of memory are "
                "available"
            )
        copies = [_copied(array) if lies_in_file(array) else array for array in arrays]
        return UncheckedEntries(self.shape, self.dtype, *copies)

    def to_device(self, device: Device) -> CsrMatrix:
        """Return the matrix in CSR on a device, which shares the arrays on the host if their types allow."""
        if self.in_file and device.kind == "cpu":
            return self.owned().to_device(device)
        offsets = self.row_offsets
        if _MANY_TIMES * offsets.nbytes < self.values.nbytes:  # no kernel is compiled for a few numbers
            offsets = as_type(offsets, np.int64)
        offsets = as_type(device.asarray(offsets), np.int64)
        columns = device.asarray(self.column_indices)
        if columns.dtype != np.int32:
            columns = narrowed(columns)
        values = device.asarray(self.values)
        if values.ndim == 3:
            rows = BlockRows(0, offsets, columns, values)
            return as_csr(rows, self.shape[1] // values.shape[2], self.dtype)
        arrays = {"row_offsets": offsets, "column_indices": columns, "values": values}
        matrix = CsrMatrix.from_arrays(self.shape, self.dtype, arrays, {})
        matrix.check_shapes()
        return CsrMatrix.from_csr(matrix, strategy="auto")


def lies_in_file(array: Any) -> bool:
    """Whether the numbers of an array are those of a file that is mapped into memory."""
    while array is not None and not isinstance(array, np.memmap):
        array = getattr(array, "base", None)
    return array is not None


def _copied(array: Array) -> Array:
    """Return a copy of a contiguous array, at an even address, made by all cores."""
    copy = np.empty(array.shape, array.dtype)
    source, target = (of.reshape(-1).view(np.uint8) for of in (array, copy))

    def take(place: slice) -> None:
        target[place] = source[place]

    in_pieces(take, source.size, PIECE_NBYTES)
    return copy
