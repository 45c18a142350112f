"""What decides the speed of a sparse product before any value is known: how many entries, in what rows, in what blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from penstock.spmv.device import CPU
from penstock.spmv.formats.csr import CsrMatrix
from penstock.spmv.formats.from_csr import count_blocks

__all__ = ["MatrixStructure"]


@dataclass(frozen=True, eq=False)
class MatrixStructure:
    """Statistics of a sparse matrix.

    Parameters
    ----------
    shape : (int, int)
    lengths : int64 array, (rows,)
        Stored entries of each row, on the host.
    values_itemsize : int
        Bytes of a stored value.
    source : CsrMatrix
        The matrix itself, for counting blocks.
    """

    shape: tuple[int, int]
    lengths: np.ndarray[Any, Any]
    values_itemsize: int
    source: CsrMatrix
    _counts: dict[tuple[int, bool], np.ndarray[Any, Any]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, A: Any, *, values_dtype: Any = None, check: bool = True) -> Self:
        """Return the structure of a SciPy CSR matrix or a :class:`CsrMatrix`."""
        A = CsrMatrix.from_csr(A, values_dtype=values_dtype, check=check)
        lengths = np.diff(CPU.asarray(A.row_offsets)).astype(np.int64)
        return cls(A.shape, lengths, A.values_dtype.itemsize, A)

    @property
    def nnz(self) -> int:
        """Stored entries."""
        return int(self.lengths.sum())

    @property
    def mean(self) -> float:
        """Mean row length."""
        return self.nnz / max(self.shape[0], 1)

    @property
    def longest(self) -> int:
        """Entries of the longest row."""
        return int(self.lengths.max()) if self.lengths.size else 0

    @property
    def variation(self) -> float:
        """Coefficient of variation of the row lengths: standard deviation over mean."""
        return float(self.lengths.std() / self.mean) if self.nnz else 0.0

    def fill(self, size: int) -> float:
        """Return the share of the scalars in blocks of a size that are stored entries; 0 where it does not divide the shape."""
        if self.shape[0] % size or self.shape[1] % size:
            return 0.0
        return self.nnz / max(1, int(self.blocks(size).sum()) * size * size)

    def blocks(self, size: int, *, upper: bool = False) -> np.ndarray[Any, Any]:
        """Return the number of ``size`` x ``size`` blocks of each block row, those left of the diagonal left out if upper."""
        if (size, upper) not in self._counts:
            self._counts[size, upper] = CPU.asarray(count_blocks(self.source, size, upper=0 if upper else None))
        return self._counts[size, upper]
