"""HYB: the first entries of every row in ELL, the rest in COO."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from penstock.spmv.compilation.cuda_module import NOMINAL_WARPS
from penstock.spmv.compilation.table import find_kernel, register_kernel
from penstock.spmv.device import Array
from penstock.spmv.errors import InputError
from penstock.spmv.formats.base import SparseMatrix
from penstock.spmv.formats.convert import chunks_of_slots
from penstock.spmv.formats.coo import CooMatrix
from penstock.spmv.formats.csr import CsrMatrix
from penstock.spmv.formats.ell import EllMatrix
from penstock.spmv.formats.statistics import MatrixStatistics
from penstock.spmv.formats.traits import Traits

_LIMIT = 1e-4


def ell_width(lengths: Array, partition: str, values_itemsize: int = 8) -> int:
    """Return how many entries of a row go to the ELL part.

    Parameters
    ----------
    lengths : integer array, (rows,)
        Row lengths.
    partition : str
        ``"hybrid{n}"``: the n % quantile of the lengths (Anzt, Tomov and Dongarra 2014). ``"hybridlimit{n}"``: that, but
        at most 0.0001 times the number of rows (Tsai, Cojean and Anzt 2020, section 3.4). ``"minstorage"``: the width
        with the least memory, the quantile at ``4 / (values + 8)``: a slot of padding costs ``values + 4`` bytes per row,
        moving an entry to COO 4 more.
    values_itemsize : int

    Raises
    ------
    InputError
        If the partition is none of these.
    """
    match = re.fullmatch(r"hybrid(limit)?(\d{1,3})", partition)
    if partition != "minstorage" and (not match or int(match[2]) > 100):
        raise InputError(f"partition must be hybrid<n>, hybridlimit<n> (n in percent) or minstorage, not {partition!r}")
    if lengths.size == 0:
        return 0
    # Storing w entries per row in ELL costs w (v + 4) per row, the rest (v + 8) per entry; the minimum is where a share
    # of (v + 4) / (v + 8) of the rows is longer than w, that is at the quantile 4 / (v + 8).
    quantile = 4 / (values_itemsize + 8) if match is None else int(match[2]) / 100
    ascending = lengths.copy()
    ascending.sort()
    width = int(ascending[min(int(quantile * lengths.size), lengths.size - 1)])
    return min(width, int(_LIMIT * lengths.size)) if match is not None and match[1] else width


@dataclass(frozen=True, eq=False, repr=False)
class HybMatrix(SparseMatrix, name="hyb"):
    """A sparse matrix in two parts that are multiplied one after the other.

    Parameters
    ----------
    shape : (int, int)
    dtype : dtype
        Type of the vectors.
    ell_column_indices : array, (width, rows) int32
    ell_values : array, (width, rows) float64 or float32
    row_indices, column_indices : array, (rest,) int32
    values : array, (rest,) float64 or float32
        The remaining entries, in row order.
    groups, blocks_per_row : int
        Of the ELL part; see :class:`EllMatrix`.

    Notes
    -----
    Source: Bell and Garland (2008); the partition of Tsai, Cojean and Anzt (2020). The COO part uses atomic additions on a
    GPU, so last digits may differ between runs.

    Examples
    --------
    >>> import scipy.sparse
    >>> from penstock.spmv import HybMatrix
    >>> arrow = scipy.sparse.csr_array([[4.0, 1.0, 1.0], [1.0, 4.0, 0.0], [1.0, 0.0, 4.0]])
    >>> A = HybMatrix.from_csr(arrow, partition="minstorage")
    >>> A.ell.width, A.ell.nnz, A.coo.nnz
    (2, 6, 1)
    """

    traits: ClassVar[Traits] = Traits(
        "HYB", padded=("ell_column_indices",), adds=True, uneven_rows_wait=False, efficiency={"cpu": 0.5, "cuda": 0.75}
    )

    shape: tuple[int, int]
    dtype: np.dtype[np.generic]
    ell_column_indices: Array
    ell_values: Array
    row_indices: Array
    column_indices: Array
    values: Array
    groups: int = 1
    blocks_per_row: int = 1

    @classmethod
    def from_csr(
        cls, A: Any, *, partition: str | int = "hybridlimit33", values_dtype: Any = None, check: bool = True
    ) -> Self:
        """Convert a CSR matrix on its device.

        Parameters
        ----------
        A : scipy.sparse.csr_array or CsrMatrix
        partition : str or int
            How the width of the ELL part is chosen, see ``penstock.spmv.formats.hyb.ell_width``, or the width itself.
        values_dtype : dtype, optional
        check : bool

        Raises
        ------
        InputError
            If the partition is unknown.
        """
        A = CsrMatrix.from_csr(A, values_dtype=values_dtype, check=check)
        xp, rows = A.device.xp, A.shape[0]
        lengths = xp.diff(A.row_offsets)
        itemsize = A.values_dtype.itemsize
        width = ell_width(lengths, partition, itemsize) if isinstance(partition, str) else partition
        offsets = xp.asarray([0, rows * width], dtype=np.int64)
        none = xp.empty(0, dtype=np.int32)
        indices, values = chunks_of_slots(A, none, offsets, max(rows, 1), A.values_dtype)
        row_indices = CooMatrix.from_csr(A, check=False).row_indices
        rest = xp.flatnonzero(xp.arange(A.nnz) - A.row_offsets[row_indices] >= width)
        return cls(
            A.shape,
            A.dtype,
            indices.reshape(width, rows),
            values.reshape(width, rows),
            row_indices[rest],
            A.column_indices[rest],
            A.values[rest],
            **EllMatrix.configuration(width, rows, warps=NOMINAL_WARPS),
        )

    @classmethod
    def predicted_nbytes(
        cls, statistics: MatrixStatistics, *, partition: str = "hybridlimit33", **parameters: Any
    ) -> int:
        """Return the bytes of a matrix in this format."""
        itemsize = statistics.values_itemsize
        width = ell_width(statistics.lengths, partition, itemsize)
        rest = int(np.maximum(statistics.lengths - width, 0).sum())
        return width * statistics.shape[0] * (itemsize + 4) + rest * (itemsize + 8)

    @property
    def ell(self) -> EllMatrix:
        """The regular part; shares the arrays."""
        arrays = (self.ell_column_indices, self.ell_values)
        return EllMatrix(self.shape, self.dtype, *arrays, groups=self.groups, blocks_per_row=self.blocks_per_row)

    @property
    def coo(self) -> CooMatrix:
        """The rest; shares the arrays."""
        return CooMatrix(self.shape, self.dtype, self.row_indices, self.column_indices, self.values)

    def triplets(self) -> tuple[Array, Array, Array]:
        """Return row indices, column indices and values of both parts."""
        xp, parts = self.device.xp, zip(self.ell.triplets(), self.coo.triplets(), strict=True)
        rows, columns, values = (xp.concatenate(pair) for pair in parts)
        return rows, columns, values

    def layout(self) -> dict[str, Any]:
        """Return the arguments of ``from_csr`` for the same arrays."""
        return {"partition": self.ell.width}

    def rows(self, start: int, stop: int) -> Self:
        """Return rows ``start`` to ``stop``; the ELL part is a copy."""
        ell, coo = self.ell.rows(start, stop), self.coo.rows(start, stop)
        arrays = {"ell_column_indices": ell.column_indices, "ell_values": ell.values, **coo.arrays()}
        return self.from_arrays((stop - start, self.shape[1]), self.dtype, arrays, self.parameters())

    def array_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes that fit the number of rows, the width and the number of remaining entries."""
        shapes = self.ell.array_shapes()
        ell = {"ell_column_indices": shapes["column_indices"], "ell_values": shapes["values"]}
        return {**ell, **self.coo.array_shapes()}

    @property
    def nnz(self) -> int:
        """Number of stored scalars, padding left out."""
        return self.ell.nnz + self.coo.nnz

    def absolute(self) -> Self:
        """Return ``|A|``: the same structure, with new arrays of absolute values."""
        arrays = {**self.arrays(), "ell_values": abs(self.ell_values), "values": abs(self.values)}
        return self.from_arrays(self.shape, self.dtype, arrays, self.parameters())


def _register(operation: str, kind: str) -> None:
    @register_kernel("hyb", operation, kind)
    def product(A: HybMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
        find_kernel("ell", operation, kind)(A.ell, x, out, alpha, beta)
        find_kernel("coo", operation, kind)(A.coo, x, out, alpha, 1.0)


for _operation in ("spmv", "spmm"):
    for _kind in ("cpu", "cuda"):
        _register(_operation, _kind)
