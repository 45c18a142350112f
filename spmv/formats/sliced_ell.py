"""Sliced ELL: slices of rows, each padded to its longest row; the blocked ELLPACK of the AMD lab notes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from penstock.spmv.formats.sell import SellMatrix, register_sell
from penstock.spmv.formats.statistics import MatrixStatistics
from penstock.spmv.formats.traits import Traits


@dataclass(frozen=True, eq=False, repr=False)
class SlicedEllMatrix(SellMatrix, name="sliced_ell"):
    """SELL-C-1: rows in their natural order, in slices as high as a warp.

    Parameters
    ----------
    shape, dtype, chunk_offsets, column_indices, values, permutation, chunk_height, sorting_scope, lanes
        As for :class:`SellMatrix`; the permutation is empty and the sorting scope 1.

    Notes
    -----
    Sources: Monakov, Lokhmotov and Avetisyan (2010); AMD lab notes on SpMV, part 1 (2022).

    Examples
    --------
    >>> import scipy.sparse
    >>> from penstock.spmv import SlicedEllMatrix
    >>> A = SlicedEllMatrix.from_csr(scipy.sparse.eye_array(100, format="csr"), slice_height=64)
    >>> A.chunk_offsets.tolist(), A.nnz
    ([0, 64, 128], 100)
    """

    traits: ClassVar[Traits] = Traits(
        "sliced ELL", padded=("column_indices",), efficiency={"cpu": 0.7, "cuda": 0.96}, halving_columns=25
    )

    @classmethod
    def from_csr(cls, A: Any, *, slice_height: int = 32, values_dtype: Any = None, check: bool = True) -> Self:  # type: ignore[override]
        """Convert a CSR matrix on its device.

        Parameters
        ----------
        A : scipy.sparse.csr_array or CsrMatrix
        slice_height : int
            Rows of a slice, a power of two: 32 on NVIDIA's GPUs, 64 on many of AMD's.
        values_dtype : dtype, optional
        check : bool
        """
        return super().from_csr(
            A, chunk_height=slice_height, sorting_scope=1, lanes=1, values_dtype=values_dtype, check=check
        )

    @classmethod
    def slab_from_csr(cls, A: Any, first_row: int, *, sorting_scope: int = 1, **parameters: Any) -> Self:
        """Convert a row slab; its rows keep their order, as those of all slabs do."""
        return cls.from_csr(A, **parameters)

    def layout(self) -> dict[str, Any]:
        """Return the arguments of ``from_csr`` for the same arrays."""
        return {"slice_height": self.chunk_height}

    @classmethod
    def predicted_nbytes(cls, statistics: MatrixStatistics, *, slice_height: int = 32, **parameters: Any) -> int:
        """Return the bytes of a matrix in this format."""
        return super().predicted_nbytes(statistics, chunk_height=slice_height, sorting_scope=1)


register_sell("sliced_ell")
