"""How the blocks of matrix rows of a mesh are stored: symbolic slabs, and the arrays of a slab as kernels take them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from penstock.spmv import Array, BsrMatrix, Device, SparseMatrix, format_named
from penstock.spmv.formats.sliced_bsr import HEIGHT


class Layout(IntEnum):
    """How the blocks of a row of nodes are stored."""

    BLOCK_ROWS = 0  # one block after another
    SCALAR_ROWS = 1  # one row of scalars after another
    CHUNKS = 2  # in chunks of HEIGHT nodes


LAYOUTS = {
    "bsr": Layout.BLOCK_ROWS,
    "csr": Layout.SCALAR_ROWS,
    "sliced_bsr": Layout.CHUNKS,
    "symmetric_bsr": Layout.CHUNKS,
}
_STRUCTURE, _VALUES = 1, 2


class SlabArrays(NamedTuple):
    """The arrays of a slab as the kernels on a GPU take them; those that are not to be written are empty."""

    offsets: Array
    columns: Array
    values: Array
    parts: int  # 1 if offsets and columns are written, and 2 if values are
    template: str  # of the kernel's arguments the last two: the layout, and whether half of the matrix is stored

    @classmethod
    def of(cls, format_name: str, arrays: Mapping[str, Array], xp: Any) -> Self:
        """Return the arrays by what they are; ``xp`` is the module of their device."""
        layout, none = LAYOUTS[format_name], xp.empty(0)
        no_offsets = none.view(np.int64 if layout is Layout.CHUNKS else np.int32)
        offsets = next((arrays[key] for key in ("chunk_offsets", "row_offsets") if key in arrays), no_offsets)
        columns, values = arrays.get("column_indices", none.view(np.int32)), arrays.get("values", none)
        parts = _STRUCTURE * ("column_indices" in arrays) + _VALUES * ("values" in arrays)
        half = "true" if format_named(format_name).traits.half else "false"
        return cls(offsets, columns, values.reshape(-1), parts, f"{layout.name}, {half}")


def padded_rows(rows: int) -> int:
    """Return the rows of whole chunks that hold some rows."""
    return -(-rows // HEIGHT) * HEIGHT


def symbolic_array(dtype: Any, *lengths: int) -> Array:
    """Return one zero, broadcast to a shape."""
    return np.broadcast_to(np.zeros((), dtype), lengths)


def symbolic_blocks(
    shape: tuple[int, int], stored: int, dof: int, offsets_dtype: Any, values_dtype: Any = np.float64
) -> BsrMatrix:
    """Return a symbolic slab of BSR that stores some blocks."""
    arrays = {
        "row_offsets": symbolic_array(offsets_dtype, shape[0] // dof + 1),
        "column_indices": symbolic_array(np.int32, stored),
        "values": symbolic_array(values_dtype, stored, dof, dof),
    }
    return BsrMatrix.from_arrays(shape, np.float64, arrays, {})


def symbolic_chunks(
    format_name: str, shape: tuple[int, int], starts: Array, dof: int, values_dtype: Any = np.float64
) -> SparseMatrix:
    """Return a symbolic slab in a format of chunks, which begin at ``starts``, in blocks and from any origin."""
    offsets = starts - starts[0]
    arrays = {
        "chunk_offsets": offsets,
        "column_indices": symbolic_array(np.int32, int(offsets[-1])),
        "values": symbolic_array(values_dtype, int(offsets[-1]) * dof * dof),
        "permutation": symbolic_array(np.int32, 0),
    }
    parameters = {"block_size": dof} | ({"sorting_scope": 1} if format_name == "sliced_bsr" else {})
    return format_named(format_name).from_arrays(shape, np.float64, arrays, parameters)


class _Maker(Protocol):
    @property
    def device(self) -> Device: ...

    def make(self, row_start: int, row_stop: int, arrays: Mapping[str, Array]) -> None: ...


def assembled(outline: SparseMatrix, maker: _Maker) -> SparseMatrix:
    """Return the whole matrix of a symbolic one, in the memory of the device that makes its rows."""
    xp = maker.device.xp
    with maker.device.current():
        arrays = {name: xp.empty(array.shape, array.dtype) for name, array in outline.arrays().items()}
        maker.make(0, outline.shape[0], arrays)
    return outline.from_arrays(outline.shape, outline.dtype, arrays, outline.parameters())
