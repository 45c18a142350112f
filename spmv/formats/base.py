"""What every sparse format shares: arrays that a store can write and a slot can hold, and products through the table."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import scipy.sparse

from penstock.spmv.device import CPU, Array, Device, device_of
from penstock.spmv.errors import InputError
from penstock.spmv.kernel_table import find_kernel, has_kernel
from penstock.spmv.operator import ValidatedOperator, as_vectors

if TYPE_CHECKING:
    from penstock.spmv.structure import MatrixStructure

__all__ = ["INT32_MAX", "SparseFormat", "format_named", "format_names"]

INT32_MAX = 2**31 - 1
_SLAB_NBYTES = 32 << 20

_FORMATS: dict[str, type[SparseFormat]] = {}


def format_named(name: str) -> type[SparseFormat]:
    """Return the format class of that name.

    Raises
    ------
    InputError
        If no such format is registered; the message lists those that are.
    """
    try:
        return _FORMATS[name]
    except KeyError:
        raise InputError(f"unknown format {name!r}; known: {', '.join(format_names())}") from None


def format_names() -> list[str]:
    """Return the names of all registered formats, sorted."""
    return sorted(_FORMATS)


class SparseFormat(ValidatedOperator):
    """Base of sparse formats. A subclass is a frozen dataclass whose fields are its arrays and scalar parameters.

    A subclass is declared as ``class CsrMatrix(SparseFormat, name="csr")``, which registers it, and its constructor
    takes ``shape``, ``dtype`` and what ``arrays()`` and ``parameters()`` return, by name.

    A new format needs ``from_csr``, ``triplets``, ``rows`` and one kernel, ``"spmv"``; blocks of vectors then
    go through it column by column until it has a kernel ``"spmm"`` of its own.

    Notes
    -----
    ``dtype`` is the type of the vectors and of the result; ``values_dtype`` is the type the values are stored in, which
    may be narrower. Kernels accumulate in float64.
    """

    name: ClassVar[str]
    #: Whether a row slab also adds to rows outside itself, as half of a symmetric matrix does: ``out`` is then scaled by
    #: beta once, before the first slab.
    scatters: ClassVar[bool] = False
    values: Array

    def __init_subclass__(cls, *, name: str, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.name = name
        _FORMATS[name] = cls

    @classmethod
    @abstractmethod
    def from_csr(cls, A: Any, *, values_dtype: Any = None, check: bool = True) -> Self:
        """Convert a SciPy CSR matrix, or a :class:`CsrMatrix` on its device; stored zeros stay stored.

        Parameters
        ----------
        A : scipy.sparse.csr_array or CsrMatrix
        values_dtype : dtype, optional
            Type to store the values in; the vectors keep the type of ``A``.
        check : bool
            Verify order, range and finiteness of the entries of a SciPy matrix.

        Formats add keyword arguments of their own.
        """

    @classmethod
    def slab_from_csr(cls, A: Any, first_row: int, **parameters: Any) -> Self:
        """Convert a row slab of a larger matrix, whose row 0 is ``first_row``; parameters as for ``from_csr``."""
        return cls.from_csr(A, **parameters)

    @abstractmethod
    def triplets(self) -> tuple[Array, Array, Array]:
        """Return row indices, column indices and values of all stored scalars, padding left out, in any order."""

    @abstractmethod
    def rows(self, start: int, stop: int) -> Self:
        """Return rows ``start`` to ``stop`` in the same format, with offsets that start at 0.

        Indices and values are views where the layout allows it.
        """

    def arrays(self) -> dict[str, Array]:
        """Return the arrays by name, in the order of the fields, which is the order a store writes them in."""
        return {name: value for name, value in self._contents().items() if hasattr(value, "ndim")}

    def _contents(self) -> dict[str, Any]:
        names = (entry.name for entry in fields(self))  # type: ignore[arg-type]
        return {name: getattr(self, name) for name in names if name not in ("shape", "dtype")}

    @property
    def nnz(self) -> int:
        """Number of stored scalars, padding left out."""
        return int(self.triplets()[0].size)

    @classmethod
    def predicted_nbytes(cls, structure: MatrixStructure, **parameters: Any) -> int:
        """Return the bytes this format would take for a matrix, without building it; parameters as for ``from_csr``.

        The type of the values is that of the structure.

        What is not foreseen is taken to be as large as CSR.
        """
        return structure.nnz * (structure.values_itemsize + 4) + 8 * (structure.shape[0] + 1)

    def product_nbytes(self, columns: int = 1, *, beta: float = 0.0) -> int:
        """Return the bytes a product with ``columns`` vectors moves at least: the matrix, x and out, each once.

        With ``beta != 0`` out is read as well.
        """
        vectors = self.shape[1] + self.shape[0] * (2 if beta else 1)
        return self.nbytes + columns * vectors * self.dtype.itemsize

    def to_csr(self) -> Any:
        """Return a SciPy CSR array on the host with the same stored entries."""
        rows, columns, values = (CPU.asarray(array) for array in self.triplets())
        A = scipy.sparse.coo_array((values, (rows, columns)), shape=self.shape).tocsr()
        A.sort_indices()
        return A

    def array_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes that the arrays must have for the matrix's shape and number of stored entries."""
        return {name: tuple(array.shape) for name, array in self.arrays().items()}

    def check_shapes(self) -> None:
        """Refuse arrays that do not fit each other, such as those described by a damaged index.

        Raises
        ------
        InputError
            Naming the array and both shapes.
        """
        for name, shape in self.array_shapes().items():
            found = tuple(self.arrays()[name].shape)
            if found != shape:
                raise InputError(f"{self.name} array {name} has shape {found} instead of {shape}")

    def parameters(self) -> dict[str, int]:
        """Return the scalar parameters by name: the fields that are neither arrays nor the matrix's shape and type."""
        return {name: int(value) for name, value in self._contents().items() if not hasattr(value, "ndim")}

    @classmethod
    def tuned(cls, nnz: int, rows: int) -> dict[str, int]:
        """Return the parameters that follow from the size of the *whole* matrix, which every slab of it must share."""
        return {}

    @classmethod
    def from_arrays(
        cls, shape: tuple[int, int], dtype: Any, arrays: Mapping[str, Array], parameters: Mapping[str, int]
    ) -> Self:
        """Wrap arrays that already have this format's layout; nothing is copied or checked."""
        return cls(shape=shape, dtype=np.dtype(dtype), **arrays, **parameters)  # type: ignore[call-arg]

    @property
    def values_dtype(self) -> np.dtype[np.generic]:
        """Type the values are stored in."""
        dtype: np.dtype[np.generic] = np.dtype(self.values.dtype)
        return dtype

    @property
    def device(self) -> Device:  # type: ignore[override]
        """Where the arrays live."""
        return device_of(self.values)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(int(array.nbytes) for array in self.arrays().values())

    @property
    def row_granularity(self) -> int:
        """Row slabs start and stop at multiples of this."""
        return 1

    @property
    def chunk_rows(self) -> int:
        """Rows between two of the offsets that are stored; the granularity may be a multiple of it."""
        return self.row_granularity

    def to_device(self, device: Device | str) -> Self:
        """Return this matrix on another device."""
        device = Device.parse(device)
        arrays = {name: device.asarray(array) for name, array in self.arrays().items()}
        return self.from_arrays(self.shape, self.dtype, arrays, self.parameters())

    @property
    def recordable(self) -> bool:
        """Products with vectors and blocks of vectors start kernels only."""
        return True

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        kind = self.device.kind
        if x.ndim == 2 and x.shape[1] == 1:
            x, out = x.reshape(-1), out.reshape(-1)
        if x.ndim == 1:
            find_kernel(self.name, "spmv", kind)(self, x, out, alpha, beta)
        elif has_kernel(self.name, "spmm", kind):
            find_kernel(self.name, "spmm", kind)(self, x, out, alpha, beta)
        else:
            spmv, xp = find_kernel(self.name, "spmv", kind), self.device.xp
            for k in range(x.shape[1]):
                column = xp.ascontiguousarray(out[:, k])
                spmv(self, xp.ascontiguousarray(x[:, k]), column, alpha, beta)
                out[:, k] = column

    def apply_slab(self, first_row: int, x: Array, out: Array, alpha: float, beta: float) -> None:
        """Add this slab's share of a product into ``out``, that of the whole matrix; its row 0 is ``first_row``.

        A format that ``scatters`` ignores ``beta``: ``out`` was scaled before.
        """
        self._apply(x, out[first_row : first_row + self.shape[0]], alpha, beta)

    def slabs(self, nbytes: int = _SLAB_NBYTES) -> Iterator[tuple[int, Self]]:
        """Cut the matrix into slabs of about ``nbytes`` of values each; yields the first row and the slab."""
        count = max(1, -(-self.values.nbytes // nbytes))
        step = max(1, self.shape[0] // count // self.row_granularity) * self.row_granularity
        for start in range(0, self.shape[0], step):
            yield start, self.rows(start, min(start + step, self.shape[0]))

    def cut(self, parts: int) -> list[int]:
        """Return ``parts + 1`` row numbers that cut a matrix on the CPU into slabs with nearly equal numbers of stored entries.

        No slab is empty, and all but the last end at a multiple of the granularity. Formats that keep no offsets of rows or
        chunks are cut into equal numbers of rows.

        Raises
        ------
        InputError
            If there are not that many slabs in it.
        """
        granules = -(-self.shape[0] // self.row_granularity)
        if not 1 <= parts <= granules:
            raise InputError(f"cannot cut {granules} pieces of {self.row_granularity} rows into {parts} slabs")
        offsets = (self.arrays().get(name) for name in ("row_offsets", "chunk_offsets"))
        stored: Array = next((found for found in offsets if found is not None), np.arange(granules + 1))
        if stored.size > granules + 1:  # several chunks a sorting scope
            stored = np.append(stored[: -1 : self.row_granularity // self.chunk_rows], stored[-1])
        targets = [int(stored[-1]) * part // parts for part in range(parts)]
        bounds = np.searchsorted(stored, targets, side="left")
        # At least one granule a slab, and one left for each slab to come.
        each = np.arange(parts)
        bounds = np.minimum(np.maximum.accumulate(np.maximum(bounds, each) - each) + each, granules - parts + each)
        return [*(int(bound) * self.row_granularity for bound in bounds), self.shape[0]]

    def column_range(self) -> range:
        """Return the columns from the first to the last stored entry's; of blocks, all of their columns."""
        size = self.parameters().get("block_size", self.values.shape[-1] if self.values.ndim == 3 else 1)
        first, last = self.shape[1], -1
        for name, indices in self.arrays().items():
            if name.endswith("column_indices") and indices.size:
                valid = indices[indices >= 0]  # padding is negative
                if valid.size:
                    first, last = min(first, size * int(valid.min())), max(last, size * (int(valid.max()) + 1) - 1)
        return range(first, last + 1)

    def absolute(self) -> Self:
        """Return ``|A|``: the same structure, with a new array of absolute values."""
        return self.from_arrays(
            self.shape, self.dtype, {**self.arrays(), "values": abs(self.values)}, self.parameters()
        )

    def apply_absolute(self, x: Array) -> Array:
        """Return ``|A| @ x``, formed slab by slab in at most 32 MiB of further memory."""
        x = as_vectors(x, self.shape[1], self, "x")
        if x.ndim != 1:
            raise InputError(f"x must have shape ({self.shape[1]},), not {x.shape}: this product takes one vector")
        with self.device.current():
            out = self.device.xp.zeros(self.shape[0], dtype=self.dtype)
            self.add_absolute(0, x, out)
        return out

    def add_absolute(self, first_row: int, x: Array, out: Array) -> None:
        """Put this slab's share of ``|A| @ x`` into ``out``, that of the whole matrix, zeroed before."""
        for start, slab in self.slabs():
            slab.absolute().apply_slab(first_row + start, x, out, 1.0, 0.0)

    def diagonal_blocks(self, size: int) -> Array:
        """Return the dense blocks on the diagonal.

        Parameters
        ----------
        size : int
            Rows of a block; must divide the number of rows.

        Returns
        -------
        array, (rows / size, size, size) of ``dtype``
        """
        blocks = self.device.xp.zeros((check_block_size(size, self.shape[0]), size, size), dtype=self.dtype)
        self.add_diagonal_blocks(0, blocks)
        return blocks

    def add_diagonal_blocks(self, first_row: int, blocks: Array) -> None:
        """Fill ``blocks``, those of the whole matrix, with what this slab holds of them; its row 0 is ``first_row``."""
        kind = self.device.kind
        if has_kernel(self.name, "diagonal_blocks", kind):
            find_kernel(self.name, "diagonal_blocks", kind)(self, first_row, blocks)
            return
        for start, slab in self.slabs():
            rows, columns, values = slab.triplets()
            copy_diagonal_blocks(rows.astype(np.int64) + (first_row + start), columns, values, blocks)


def copy_diagonal_blocks(rows: Array, columns: Array, values: Array, blocks: Array) -> None:
    """Copy those of some entries that lie in dense blocks on the diagonal."""
    size = blocks.shape[1]
    inside = rows // size == columns // size
    blocks[rows[inside] // size, rows[inside] % size, columns[inside] % size] = values[inside]


def scale(out: Array, beta: float) -> None:
    """Multiply ``out`` by ``beta``; with 0 its old content, NaN or not, has no effect."""
    if beta == 0.0:
        out.fill(0)
    elif beta != 1.0:
        out *= out.dtype.type(beta)


def check_block_size(size: int, rows: int) -> int:
    """Return the number of diagonal blocks, or refuse a size that does not divide the rows."""
    if size < 1 or rows % size:
        raise InputError(f"a block size must divide the {rows} rows of the matrix; {size} does not")
    return rows // size


def narrow_offsets(offsets: Array, start: int, stop: int) -> Array:
    """Return ``offsets[start : stop + 1]`` counted from 0 as int32, as every subdivision holds them.

    Raises
    ------
    InputError
        If the slab holds more than 2**31 - 1 entries.
    """
    part = offsets[start : stop + 1] - offsets[start]
    if part.size and int(part[-1]) > INT32_MAX:
        raise InputError(
            f"rows {start} to {stop} hold {int(part[-1])} entries, more than a slab's {INT32_MAX}: cut finer"
        )
    return part.astype(np.int32)
