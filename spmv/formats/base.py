"""Base class of the sparse formats: named arrays, slabs, and products through the table of kernels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, ClassVar, Self

import numpy as np
import scipy.sparse

from penstock.spmv.compilation.table import find_kernel, has_kernel
from penstock.spmv.device import CPU, Array, Device, device_of
from penstock.spmv.errors import InputError
from penstock.spmv.formats.limits import check_block_size
from penstock.spmv.formats.statistics import MatrixStatistics
from penstock.spmv.formats.structure import check_structure
from penstock.spmv.formats.traits import Traits
from penstock.spmv.operator import ValidatedOperator, as_vectors
from penstock.spmv.registry import Registry
from penstock.spmv.sizes import format_nbytes

_SLAB_NBYTES, _LARGE_SLAB_NBYTES = 32 << 20, 256 << 20
# Fills are estimates, which a bound of a size must not rely on wholly.
_BOUND = 0.97
#: Coefficient of variation of row lengths above which some lanes of a warp wait for others.
UNEVEN_VARIATION = 0.5

#: All formats by name; packages add theirs in the entry point group ``penstock.formats``.
FORMATS: Registry[str, type[SparseMatrix]] = Registry("format", "penstock.formats")


def format_named(name: str) -> type[SparseMatrix]:
    """Return the format class of that name.

    Parameters
    ----------
    name : str, one of :func:`format_names`

    Raises
    ------
    InputError
        If no such format is registered; the message lists those that are.

    Examples
    --------
    >>> format_named("sliced_bsr").__name__
    'SlicedBsrMatrix'
    """
    return FORMATS[name]


def format_names() -> list[str]:
    """Return the names of all registered formats, sorted.

    Examples
    --------
    >>> [name for name in format_names() if name.endswith("bsr")]
    ['bsr', 'sliced_bsr', 'symmetric_bsr']
    """
    return FORMATS.keys()


class SparseMatrix(ValidatedOperator):
    """Base of sparse formats. A subclass is a frozen dataclass whose fields are its arrays and scalar parameters.

    A subclass is declared as ``class CsrMatrix(SparseMatrix, name="csr")``, which registers it, and its constructor
    accepts ``shape``, ``dtype`` and what ``arrays()`` and ``parameters()`` return, by name.
    A new format needs ``from_csr``, ``triplets``, ``rows`` and one kernel, ``"spmv"``; blocks of vectors are then
    multiplied column by column until it has a kernel ``"spmm"`` of its own.
    ``dtype`` is the type of the vectors and of the result; ``values_dtype`` is the type the values are stored in, which
    may be narrower. Kernels accumulate in float64.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> A = Cantilever(nodes=3, dof=1).matrix("csr")
    >>> A.name, A.shape, A.nnz, A.rows(0, 9).shape, sorted(A.arrays())
    ('csr', (27, 27), 343, (9, 27), ['column_indices', 'row_offsets', 'values'])
    """

    name: ClassVar[str]
    traits: ClassVar[Traits] = Traits("unnamed")
    values: Array

    def __init_subclass__(cls, *, name: str, chosen: bool = True, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.name = name
        if "traits" not in cls.__dict__:
            cls.traits = Traits(name)
        if chosen:  # an image of another matrix is not
            FORMATS.add(name, cls)

    def __new__(cls, *arguments: Any, **fields: Any) -> Self:
        """Refuse a matrix where arrays are expected."""
        if len(arguments) == 1 and not fields:
            raise InputError(
                f"{cls.__name__} is made of arrays; to convert a matrix use {cls.__name__}.from_csr(A), with A in CSR"
            )
        return super().__new__(cls)

    @classmethod
    def candidates(cls, statistics: MatrixStatistics) -> Iterator[dict[str, Any]]:
        """Yield the parameters of ``from_csr`` that are worth trying for a matrix, the most promising first.

        Blocked formats try the two block sizes with the fewest added zeros. Formats that store half a matrix are tried only
        for symmetric matrices, with block size 1 if no larger one fits.
        """
        if cls.traits.half and not statistics.symmetry.to_rounding:
            return
        fills = statistics.fills
        sizes = sorted(fills, key=lambda size: (fills[size], size), reverse=True)[:2]
        if not cls.traits.blocked:
            yield {}
        elif sizes or cls.traits.half:
            yield from ({"block_size": size} for size in sizes or [1])

    @classmethod
    def efficiency(cls, statistics: MatrixStatistics, device_kind: str, columns: int = 1) -> float:
        """Return the share of the memory bandwidth that products with ``columns`` vectors are expected to reach."""
        traits = cls.traits
        share = traits.efficiency[device_kind]
        if device_kind == "cpu":
            return share
        share /= traits.slowdown(columns)
        waits = traits.uneven_rows_wait and statistics.variation > UNEVEN_VARIATION
        return share / (1 + statistics.variation) if waits else share

    @classmethod
    @abstractmethod
    def from_csr(cls, A: Any, *, values_dtype: Any = None, check: bool = True) -> Self:
        """Convert a SciPy CSR matrix, or a :class:`CsrMatrix` on its device; formats add keyword arguments of their own.

        Parameters
        ----------
        A : scipy.sparse.csr_array or CsrMatrix, whose stored zeros stay stored
        values_dtype : dtype, optional
            Type to store the values in; the vectors keep the type of ``A``.
        check : bool
            Verify order, range and finiteness of the entries of a SciPy matrix.
        """

    @classmethod
    def slab_from_csr(cls, A: Any, first_row: int, **parameters: Any) -> Self:
        """Convert a row slab that begins at row ``first_row`` of a larger matrix; parameters as for ``from_csr``."""
        return cls.from_csr(A, **parameters)

    def layout(self) -> dict[str, Any]:
        """Return the keyword arguments of ``from_csr`` that give a matrix of the same pattern the same arrays but for values."""
        return dict(self.parameters())

    def refill(self, A: Any, first_row: int = 0, *, check: bool = True) -> None:
        """Replace the values by those of a matrix with the same pattern, where they are: whoever holds the arrays sees them.

        A large matrix is converted slab by slab, in about 512 MiB of further memory.

        Parameters
        ----------
        A : SciPy CSR matrix or CsrMatrix, on any device
            With the pattern of the matrix that this one was converted from, of which this is a slab.
        first_row : int
            The row of the whole matrix at which this slab and A begin.
        check : bool
            Whether to compare the patterns first.

        Raises
        ------
        InputError
            If its entries have other places here; no value has then been replaced.

        Examples
        --------
        >>> from penstock.fem import Cantilever
        >>> A = Cantilever(nodes=4, dof=3).matrix("symmetric_bsr")
        >>> stiffer = 2.0 * A.to_csr()
        >>> A.refill(stiffer)
        >>> bool((A.to_csr() != stiffer).nnz)
        False
        """
        if check:
            self.check_pattern(A, first_row)
        source: Any = format_named("csr").from_csr(A, check=False)
        for start, slab in self._refillable():
            take = slab._write_values if source.device == slab.device else slab._copy_values
            take(source.rows(start, start + slab.shape[0]), first_row + start)

    def _write_values(self, A: Any, first_row: int) -> None:
        """Replace the values by those of a CsrMatrix on the same device; formats override this to do without a conversion."""
        self._copy_values(A, first_row)

    def _copy_values(self, A: Any, first_row: int) -> None:
        """Replace the values by those of a CsrMatrix, where it is converted."""
        new = self._converted_again(A, first_row).arrays()
        for name, array in self.arrays().items():
            if array.dtype.kind == "f":
                array[...] = self.device.asarray(new[name])

    def _converted_again(self, A: Any, first_row: int) -> Self:
        return self.slab_from_csr(A, first_row, values_dtype=self.values_dtype, check=False, **self.layout())

    def check_pattern(self, A: Any, first_row: int = 0) -> None:
        """Refuse a matrix that :meth:`refill` has no places for, at the cost of a conversion; parameters as there.

        Raises
        ------
        InputError
            The message names the array that differs, and rows that hold the difference.
        """
        source: Any = format_named("csr").from_csr(A, check=False)
        for start, slab in self._refillable():
            rows = range(first_row + start, first_row + start + slab.shape[0])
            new = slab._converted_again(source.rows(start, start + slab.shape[0]), rows.start).arrays()
            for name, array in slab.arrays().items():
                same = new[name].shape == array.shape
                if same and array.dtype.kind != "f":
                    same = bool((self.device.asarray(new[name]) == array).all())
                if not same:
                    raise InputError(
                        f"the matrix has another pattern: in rows {rows.start} to {rows.stop - 1} the {self.name} array {name} "
                        "differs"
                    )

    def _refillable(self) -> Iterator[tuple[int, Self]]:
        """Yield slabs whose arrays are views of those of this matrix; a format whose slabs are copies has but one."""
        views = self.slabs(_LARGE_SLAB_NBYTES)
        first, slab = next(views, (0, self))
        if any(self._is_copy(name, array) for name, array in slab.arrays().items() if array.dtype.kind == "f"):
            yield 0, self
            return
        yield first, slab
        yield from views

    def _is_copy(self, name: str, array: Array) -> bool:
        whole = self.arrays()[name]
        return bool(array.size) and not self.device.xp.may_share_memory(array, whole)

    @abstractmethod
    def triplets(self) -> tuple[Array, Array, Array]:
        """Return row indices, column indices and values of all stored scalars, padding left out, in any order."""

    @abstractmethod
    def rows(self, start: int, stop: int) -> Self:
        """Return rows ``start`` to ``stop`` in the same format, offsets from 0; indices and values are views where possible."""

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
    def of_statistics(cls, statistics: MatrixStatistics, **parameters: Any) -> Self:
        """Convert a valid matrix, of which the statistics may know what the format needs; parameters as for ``from_csr``."""
        statistics.take_converted(0, None)  # into another format: its memory is needed
        return cls.from_csr(statistics.matrix, check=False, **parameters)

    @classmethod
    def predicted_nbytes(cls, statistics: MatrixStatistics, **parameters: Any) -> int:
        """Return the bytes of a matrix in this format, without building it; parameters as for ``from_csr``.

        Values have the type of the statistics. A format without its own prediction is assumed to be as large as CSR.
        """
        return statistics.nnz * (statistics.values_itemsize + 4) + 8 * (statistics.shape[0] + 1)

    @classmethod
    def least_nbytes(cls, statistics: MatrixStatistics, *, block_size: int = 1, **parameters: Any) -> float:
        """Return a bound below :meth:`predicted_nbytes` at once, without a look at the matrix: no padding of rows."""
        entry = statistics.values_itemsize + 4 / (block_size**2 if cls.traits.blocked else 1)
        filled = statistics.fills.get(block_size, 1.0) if cls.traits.blocked else 1.0
        return _BOUND * statistics.nnz / filled * entry / (2 if cls.traits.half else 1)

    def product_nbytes(self, columns: int = 1, *, beta: float = 0.0) -> int:
        """Return the least bytes of a product with ``columns`` vectors: matrix, x and out once; with a beta, out twice."""
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
        """Refuse arrays whose shapes do not fit each other, for example from a damaged index.

        Raises
        ------
        InputError
            If a shape is wrong; the message names the array and both shapes.
        """
        for name, shape in self.array_shapes().items():
            actual = tuple(self.arrays()[name].shape)
            if actual != shape:
                raise InputError(f"{self.name} array {name} has shape {actual} instead of {shape}")

    def check_structure(self, first_row: int = 0) -> None:
        """Refuse offsets and indices that lead out of a slab whose row 0 is ``first_row``, as :func:`check_structure` does."""
        size = self._rows_of_index
        check_structure(self.arrays(), *(n // size for n in (*self.shape, self.chunk_rows)), padded=self.traits.padded)

    @property
    def _rows_of_index(self) -> int:
        return self.parameters().get("block_size", self.values.shape[-1] if self.values.ndim == 3 else 1)

    def parameters(self) -> dict[str, int]:
        """Return the scalar parameters by name: the fields that are neither arrays nor the matrix's shape and type."""
        return {name: int(value) for name, value in self._contents().items() if not hasattr(value, "ndim")}

    @classmethod
    def whole_matrix_parameters(cls, nnz: int, rows: int) -> dict[str, int]:
        """Return the parameters that follow from the size of the *whole* matrix, which every slab of it must share."""
        return {}

    @classmethod
    def from_arrays(
        cls, shape: tuple[int, int], dtype: Any, arrays: Mapping[str, Array], parameters: Mapping[str, int]
    ) -> Self:
        """Wrap arrays that already have this format's layout; nothing is copied or checked."""
        return cls(shape=shape, dtype=np.dtype(dtype), **arrays, **parameters)

    def numbers(self) -> Array:
        """Return the numbers that the stored values stand for, in their order: these themselves, but in an image."""
        return self.values

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
        """Rows between two stored offsets; the granularity may be a multiple of this."""
        return self.row_granularity

    def _facts(self) -> list[str]:
        shape, *rest = super()._facts()
        stored = f"{self.values.size:,} {'values, padding among them' if self.traits.padded else 'entries'}"
        return [shape, stored, format_nbytes(self.nbytes), *rest]

    def to_device(self, device: Device | str) -> Self:
        """Return this matrix on another device."""
        device = Device.parse(device)
        arrays = {name: device.asarray(array) for name, array in self.arrays().items()}
        return self.from_arrays(self.shape, self.dtype, arrays, self.parameters())

    @property
    def capturable(self) -> bool:
        """True: products with vectors and blocks of vectors only launch kernels."""
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
        """Add this slab's share of a product to ``out``, the result of the whole matrix; its row 0 is ``first_row``.

        Formats that store half a matrix ignore ``beta``: ``out`` was scaled before.
        """
        self._apply(x, out[first_row : first_row + self.shape[0]], alpha, beta)

    def slabs(self, nbytes: int | None = None) -> Iterator[tuple[int, Self]]:
        """Yield slabs with about ``nbytes`` of values each, by default 32 MiB, or 256 MiB on a GPU: first row and slab."""
        # Between slabs a GPU is waited for, which takes as long as reading 1 GiB.
        nbytes = nbytes or (_SLAB_NBYTES if self.device.kind == "cpu" else _LARGE_SLAB_NBYTES)
        count = max(1, -(-self.values.nbytes // nbytes))
        if count == 1:  # with its own type of offsets, for which kernels are compiled anyway
            yield 0, self
            return
        step = max(1, self.shape[0] // count // self.row_granularity) * self.row_granularity
        for start in range(0, self.shape[0], step):
            yield start, self.rows(start, min(start + step, self.shape[0]))

    def column_range(self) -> range:
        """Return the range from the first to the last column with a stored entry; blocks count with all their columns."""
        size = self._rows_of_index
        first, last = self.shape[1], -1
        for name, indices in self.arrays().items():
            if name.endswith("column_indices") and indices.size:
                greatest = int(indices.max())
                if greatest >= 0:  # padding is negative, and large without a sign
                    least = int(indices.view(np.uint32).min())
                    first, last = min(first, size * least), max(last, size * (greatest + 1) - 1)
        return range(first, last + 1)

    def absolute(self) -> Self:
        """Return ``|A|``: the same structure, with a new array of absolute values."""
        return self.from_arrays(
            self.shape, self.dtype, {**self.arrays(), "values": abs(self.values)}, self.parameters()
        )

    def apply_absolute(self, x: Array) -> Array:
        """Return ``|A| @ x``, computed slab by slab in at most 32 MiB of additional memory, or 256 MiB on a GPU."""
        x = as_vectors(x, self.shape[1], self, "x")
        if x.ndim != 1:
            raise InputError(f"x must have shape ({self.shape[1]},), not {x.shape}: this product needs one vector")
        with self.device.current():
            out = self.device.xp.zeros(self.shape[0], dtype=self.dtype)
            self.add_absolute(0, x, out)
        return out

    def add_absolute(self, first_row: int, x: Array, out: Array) -> None:
        """Add this slab's share of ``|A| @ x`` to ``out``, the result of the whole matrix, zeroed before."""
        for start, slab in self.slabs():
            slab.absolute().apply_slab(first_row + start, x, out, 1.0, 0.0)

    def diagonal_blocks(self, size: int) -> Array:
        """Return the dense blocks on the diagonal, ``(rows / size, size, size)`` of ``dtype``; size must divide the rows."""
        with self.device.current():
            blocks = self.device.xp.zeros((check_block_size(size, self.shape[0]), size, size), dtype=self.dtype)
            self.add_diagonal_blocks(0, blocks)
        return blocks

    def add_diagonal_blocks(self, first_row: int, blocks: Array) -> None:
        """Fill this slab's part of ``blocks``, the diagonal blocks of the whole matrix; its row 0 is ``first_row``."""
        kind = self.device.kind
        if has_kernel(self.name, "diagonal_blocks", kind):
            find_kernel(self.name, "diagonal_blocks", kind)(self, first_row, blocks)
            return
        for start, slab in self.slabs():
            rows, columns, values = slab.triplets()
            copy_diagonal_blocks(rows.astype(np.int64) + (first_row + start), columns, values, blocks)


def copy_diagonal_blocks(rows: Array, columns: Array, values: Array, blocks: Array) -> None:
    """Copy the entries that lie in dense blocks on the diagonal, from the triplets of a matrix."""
    size = blocks.shape[1]
    inside = rows // size == columns // size
    blocks[rows[inside] // size, rows[inside] % size, columns[inside] % size] = values[inside]
