"""The vectors of a point of the study, and the check of every product with them."""

from __future__ import annotations

import numpy as np

from penstock.spmv import Array, Device, SparseMatrix
from penstock.streaming.execution.budget import check_room

_BASES = 3
_EPSILON = float(np.finfo(np.float64).eps)


class CheckedVectors:
    """Vectors, their products, and the values that the products must have.

    Each vector is a combination of three, whose products are computed on the host by the CPU's kernels. So each of the many
    products is checked, entry by entry, against a bound of rounding, for rows of at most ``row_length`` entries.
    """

    def __init__(self, A: SparseMatrix, row_length: int, device: Device, repeats: int, columns: int) -> None:
        self._device = device
        generator = np.random.default_rng(0)
        bases = [generator.standard_normal(A.shape[1]) for _ in range(_BASES)]
        with device.current():
            need = 8 * ((repeats * columns) * sum(A.shape) + 4 * _BASES * max(A.shape))
            check_room(device, need, f"{repeats * columns} vectors and their products")
            self._bases = [device.asarray(base) for base in bases]
            self._products = [device.asarray(A @ base) for base in bases]
            magnitude = A.apply_absolute(np.sum(np.abs(bases), axis=0))
            self._bound = device.asarray(8 * _EPSILON * (row_length + _BASES) * magnitude)
            shape = (repeats, columns, _BASES)
            self._factors = generator.uniform(0.5, 1.0, shape) * generator.choice([-1, 1], shape)
            block = (columns,) if columns > 1 else ()
            self.x = device.xp.empty((repeats, A.shape[1], *block))
            self.products = device.xp.empty((repeats, A.shape[0], *block))
            self._result: Array = np.empty((A.shape[0], *block))
            if device.kind == "cuda":
                import cupyx

                self._result = cupyx.empty_pinned(self._result.shape)
        self.change()

    def change(self) -> None:
        """Write all vectors."""
        for x, factors in zip(self.x, self._factors, strict=True):
            for column, weights in zip(x.reshape(x.shape[0], -1).T, factors, strict=True):
                column[:] = _combined(self._bases, weights)

    def copy_result(self) -> None:
        """Copy the result of the last product from a GPU to the host."""
        if self._device.kind == "cuda":
            self.products[-1].get(out=self._result)

    def forget(self) -> None:
        """Fill the products with NaN, so that products of an earlier run cannot pass for those of the next."""
        self.products.fill(np.nan)

    def worst_error(self) -> float:
        """Return the largest deviation of an entry of a product, in units of its bound of rounding."""
        xp, worst = self._device.xp, 0.0
        for product, factors in zip(self.products, self._factors, strict=True):
            for column, weights in zip(product.reshape(product.shape[0], -1).T, factors, strict=True):
                error = float(xp.max(xp.abs(column - _combined(self._products, weights)) / self._bound))
                worst = max(worst, np.inf if np.isnan(error) else error)
        return worst


def _combined(vectors: list[Array], factors: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> Array:
    total = float(factors[0]) * vectors[0]
    for vector, factor in zip(vectors[1:], factors[1:], strict=True):
        total += float(factor) * vector
    return total
