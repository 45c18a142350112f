"""What every sparse format shares: arrays that a store can write and a slot can hold, and products through the table."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np

from penstock.spmv.device import Array, Device, device_of
from penstock.spmv.errors import InputError
from penstock.spmv.kernel_table import find_kernel
from penstock.spmv.operator import ValidatedOperator, as_vectors

__all__ = ["INT32_MAX", "SparseFormat", "format_named", "format_names"]

INT32_MAX = 2**31 - 1
_ABSOLUTE_SLAB_NBYTES = 32 << 20

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

    Notes
    -----
    ``dtype`` is the type of the vectors and of the result; ``values_dtype`` is the type the values are stored in, which
    may be narrower. Kernels accumulate in float64.
    """

    name: ClassVar[str]
    values: Array

    def __init_subclass__(cls, *, name: str, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.name = name
        _FORMATS[name] = cls

    @classmethod
    @abstractmethod
    def from_csr(cls, A: Any) -> Self:
        """Convert a SciPy CSR matrix; stored zeros stay stored. Formats add keyword arguments of their own."""

    @abstractmethod
    def to_csr(self) -> Any:
        """Return a SciPy CSR matrix with the same stored entries."""

    @abstractmethod
    def rows(self, start: int, stop: int) -> Self:
        """Return rows ``start`` to ``stop`` in the same format, with int32 offsets that start at 0.

        Indices and values are views; only the offsets are new.
        """

    @abstractmethod
    def arrays(self) -> dict[str, Array]:
        """Return the arrays by name, in the order a store writes them."""

    @property
    @abstractmethod
    def nnz(self) -> int:
        """Number of stored scalars, padding left out."""

    @abstractmethod
    def array_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes that the arrays must have for the matrix's shape and number of stored entries."""

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
        """Return the scalar parameters by name."""
        return {}

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

    def to_device(self, device: Device | str) -> Self:
        """Return this matrix on another device."""
        device = Device.parse(device)
        arrays = {name: device.asarray(array) for name, array in self.arrays().items()}
        return self.from_arrays(self.shape, self.dtype, arrays, self.parameters())

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        find_kernel(self.name, "spmv" if x.ndim == 1 else "spmm", self.device.kind)(self, x, out, alpha, beta)

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
        out = self.device.xp.empty(self.shape[0], dtype=self.dtype)
        slabs = max(1, -(-self.values.nbytes // _ABSOLUTE_SLAB_NBYTES))
        step = max(1, self.shape[0] // slabs // self.row_granularity) * self.row_granularity
        for start in range(0, self.shape[0], step):
            slab = self.rows(start, min(start + step, self.shape[0]))
            slab.absolute()._apply(x, out[start : start + slab.shape[0]], 1.0, 0.0)
        return out

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
        find_kernel(self.name, "diagonal_blocks", self.device.kind)(self, first_row, blocks)


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
