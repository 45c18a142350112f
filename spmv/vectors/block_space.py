"""Arithmetic on blocks of vectors ``(n, k)``: Gram matrices and combinations of columns.

Solvers sum over rows only here and in :class:`VectorSpace`. Partitions depend only on n and k.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import prange

from penstock.spmv.communicator import ALONE, Communicator
from penstock.spmv.compilation.cuda_module import CudaSource, type_names
from penstock.spmv.compilation.jit import parallel_kernel, serial_kernel
from penstock.spmv.device import Array, Device

BLOCK_VECTOR_KERNELS = CudaSource("penstock.spmv.kernels", "block_vectors.cu")

#: Largest number of vectors in a block.
LARGEST_VECTOR_BLOCK = 64
Matrix = np.ndarray[Any, Any]


class BlockSpace:
    """Gram matrices and combinations of blocks of at most ``columns`` vectors of length ``n`` on one device.

    Matrices of coefficients live on the host, so computing a Gram matrix waits for the device.
    """

    def __init__(self, device: Device, n: int, columns: int, communicator: Communicator = ALONE) -> None:
        self.device, self._communicator = device, communicator
        self._operations: _Cpu | _Cuda = _Cpu(n, columns) if device.kind == "cpu" else _Cuda(device, n, columns)

    def gram(self, x: Array, y: Array, diagonal: Array | None = None) -> Matrix:
        """Return ``X^T D Y``, which must be symmetric, in float64; reads 2 k n values."""
        return self._total(self._operations.gram(x, y, diagonal))[0]

    def dots(self, x: Array, y: Array) -> Matrix:
        """Return the inner products of equal columns, in float64; computes the whole Gram matrix."""
        dots: Matrix = np.diag(self.gram(x, y)).copy()
        return dots

    def descend(
        self, w: Array, t: Matrix, s: Array, xi: Matrix, diagonal: Array | None = None
    ) -> tuple[Matrix, Matrix]:
        """Set ``W = W T - S Xi``; return ``W^T W`` and ``W^T D W``.

        Reads 2 k n values and writes k n; beyond 32 columns, each Gram matrix reads 2 k n more.
        """
        squares, weighted = self._total(*self._operations.descend(w, t, s, xi, diagonal))
        return squares, weighted

    def _total(self, *grams: Matrix) -> Sequence[Matrix]:
        """Return the sums over ranks."""
        return grams if self._communicator.size == 1 else list(self._communicator.total(np.stack(grams)))

    def extend(
        self, out: Array, z: Array, t: Matrix, diagonal: Array | None, p: Array, c: Matrix, x: Array, gamma: Matrix
    ) -> None:
        """Set ``out = D Z T + P C`` and ``X = X + P Gamma``; ``out`` may be ``P``.

        With k columns everywhere, reads 3 k n values and writes 2 k n.
        """
        self._operations.extend(out, z, t, diagonal, p, c, x, gamma)

    def add(self, out: Array, z: Array, t: Matrix, p: Array, c: Matrix) -> None:
        """Set ``out = Z T + P C``; ``out`` may be ``P``. With k columns everywhere, reads 2 k n values and writes k n."""
        self._operations.extend(out, z, t, None, p, c, p[:, :0], np.zeros((p.shape[1], 0)))

    def combine(self, out: Array, z: Array, t: Matrix, diagonal: Array | None = None) -> None:
        """Set ``out = D Z T``; reads k n values and writes all of ``out``."""
        self._operations.extend(out, z, t, diagonal, None, None, None, None)


#: Tiles of eight columns for which kernels are compiled.
TILES = (1, 2, 4, 8)
_THREADS, _BLOCKS = 256, 528
FUSED_TILES = 4  # with more tiles, Gram matrices and vectors do not fit the registers together


def gram_parts(tiles: int) -> int:
    """Return the number of parts in which a Gram matrix is computed so that the sums fit the registers."""
    return 1 if tiles <= FUSED_TILES else 4


class _Cuda:
    """Launches the kernels of block_vectors.cu."""

    def __init__(self, device: Device, n: int, columns: int) -> None:
        self.device, self.n = device, n
        self.tiles = next(tiles for tiles in TILES if 8 * tiles >= columns)
        self.numbers = 64 * self.tiles**2
        self.blocks = max(1, min(_BLOCKS, -(-n // _THREADS)))
        self.partials = device.xp.empty(2 * self.blocks * self.numbers)
        self.sums = device.xp.empty(2 * self.numbers)
        self.pinned_sums = device.pinned_like(self.sums)
        self.coefficients = device.xp.zeros((3, 64 * self.tiles * self.tiles))
        self.staged = np.zeros(self.coefficients.shape)
        lane = np.arange(32)
        step, tile = np.divmod(np.arange(2 * self.tiles * self.tiles), self.tiles)
        row, column = (8 * (step // 2) + step % 2)[:, None] + 2 * (lane % 4), 8 * tile[:, None] + lane // 4
        self._order = (8 * self.tiles * row + column).ravel()

    def _launch(self, name: str, arguments: tuple[Any, ...], grid: tuple[int, ...] | None = None) -> None:
        BLOCK_VECTOR_KERNELS.function(name)(grid or (self.blocks,), (_THREADS,), arguments)

    def _upload(self, *matrices: Matrix | None) -> tuple[list[np.uint64], list[Array]]:
        """Copy coefficients to the device in the order that lanes read; return masks of nonzero tiles, and the copies."""
        masks = []
        for place, matrix in enumerate(matrices):
            padded = np.zeros((8 * self.tiles, 8 * self.tiles))
            if matrix is not None:
                padded[: matrix.shape[0], : matrix.shape[1]] = matrix
            self.staged[place] = padded.ravel()[self._order]
            used = padded.reshape(self.tiles, 8, self.tiles, 8).any(axis=(1, 3)).ravel()
            masks.append(np.uint64(sum(1 << int(number) for number in np.flatnonzero(used))))
        self.device.copy_to_device(self.staged, self.coefficients)
        return masks, list(self.coefficients)

    def _gather(self, k: int, count: int) -> list[Matrix]:
        """Sum the parts that the thread blocks left of Gram matrices, and copy the sums to the host."""
        for number in range(count):
            part = self.partials[number * self.blocks * self.numbers :]
            arguments = (np.int32(self.numbers), np.int32(self.blocks), part, self.sums[number * self.numbers :])
            self._launch("block_sum", arguments, (-(-self.numbers // _THREADS),))
        self.device.copy_to_pinned(self.sums, self.pinned_sums)
        grams = []
        for number in range(count):
            # Axes: row and column of the tile, row and column inside the tile; a lane holds two neighbouring numbers.
            sums = self.pinned_sums[number * self.numbers : (number + 1) * self.numbers]
            tiled = sums.reshape(self.tiles, self.tiles, 8, 8).swapaxes(1, 2)
            gram = tiled.reshape(8 * self.tiles, 8 * self.tiles)[:k, :k]
            grams.append(np.triu(gram) + np.triu(gram, 1).T)
        return grams

    def gram(self, x: Array, y: Array, diagonal: Array | None) -> Matrix:
        k = x.shape[1]
        parts = gram_parts(self.tiles)
        name = f"block_gram<{type_names(x)}, {self.tiles}, {parts}>"
        factors, weighted = (x, False) if diagonal is None else (diagonal, True)
        self._launch(
            name,
            (np.int64(self.n), np.int32(k), np.bool_(weighted), x, y, factors, self.partials),
            (self.blocks, parts),
        )
        return self._gather(k, 1)[0]

    def descend(self, w: Array, t: Matrix, s: Array, xi: Matrix, diagonal: Array | None) -> tuple[Matrix, Matrix]:
        k = w.shape[1]
        grams = 0 if self.tiles > FUSED_TILES else 1 if diagonal is None else 2
        masks, (device_t, device_minus_xi, _) = self._upload(t, -xi)
        name = f"block_descend<{type_names(w)}, {self.tiles}, {grams}>"
        sizes = (np.int64(self.n), np.int32(k))
        factors = s if diagonal is None else diagonal
        self._launch(name, (*sizes, *masks, device_t, device_minus_xi, s, factors, w, self.partials))
        if grams:
            matrices = self._gather(k, grams)
        else:
            matrices = [self.gram(w, w, None), *([] if diagonal is None else [self.gram(w, w, diagonal)])]
        return matrices[0], matrices[-1]

    def extend(
        self,
        out: Array,
        z: Array,
        t: Matrix,
        diagonal: Array | None,
        p: Array | None,
        c: Matrix | None,
        x: Array | None,
        gamma: Matrix | None,
    ) -> None:
        masks, coefficients = self._upload(t, c, gamma)
        columns = (z.shape[1], 0 if p is None else p.shape[1], 0 if x is None else x.shape[1], out.shape[1])
        sizes = (np.int64(self.n), *map(np.int32, columns), np.bool_(diagonal is not None))
        # Stand-ins for missing arrays are never read.
        arrays = (z, z if diagonal is None else diagonal, z if p is None else p, out, out if x is None else x)
        name = f"block_extend<{type_names(z)}, {self.tiles}>"
        self._launch(name, (*sizes, *masks, *coefficients, *arrays))


class _Cpu:
    """The same operations in Numba, one chunk of rows at a time."""

    def __init__(self, n: int, columns: int) -> None:
        self.n = n
        self.chunks = max(1, -(-n // _ROWS))
        self.partials = np.empty((2, self.chunks, columns, columns))

    def _sum(self, k: int, which: int) -> Matrix:
        gram = self.partials[which, :, :k, :k].sum(axis=0)
        mirrored: Matrix = np.triu(gram) + np.triu(gram, 1).T
        return mirrored

    def gram(self, x: Array, y: Array, diagonal: Array | None) -> Matrix:
        _gram(x, y, *_factors(diagonal, x), self.partials[0])
        return self._sum(x.shape[1], 0)

    def descend(self, w: Array, t: Matrix, s: Array, xi: Matrix, diagonal: Array | None) -> tuple[Matrix, Matrix]:
        k, weighted = w.shape[1], diagonal is not None
        coefficients = np.concatenate([t, -xi])
        _descend(w, s, coefficients, *_factors(diagonal, w), self.partials)
        return self._sum(k, 0), self._sum(k, int(weighted))

    def extend(
        self,
        out: Array,
        z: Array,
        t: Matrix,
        diagonal: Array | None,
        p: Array | None,
        c: Matrix | None,
        x: Array | None,
        gamma: Matrix | None,
    ) -> None:
        of_z = (out, z, *_factors(diagonal, z))
        if p is None or c is None or x is None or gamma is None:
            _extend(*of_z, np.ascontiguousarray(t), z, out[:, :0], t[:0])
        else:
            _extend(*of_z, np.concatenate([t, c]), p, x, np.ascontiguousarray(gamma))


def _factors(diagonal: Array | None, vectors: Array) -> tuple[Array, bool]:
    """Return the diagonal and whether there is one; the placeholder has the same type, so that one kernel serves both."""
    return (np.empty(0, vectors.dtype), False) if diagonal is None else (diagonal, True)


_ROWS = 4096


@serial_kernel
def _add_products(x: Array, y: Array, diagonal: Array, weighted: bool, start: int, stop: int, sums: Array) -> None:
    """Set the upper triangle of ``sums`` to that of ``X^T D Y`` over some rows, four at a time."""
    k = x.shape[1]
    sums[:k, :k] = 0.0
    scaled = np.zeros((4, k))
    for first in range(start, stop, 4):
        count = min(4, stop - first)
        for row in range(4):
            factor = 0.0 if row >= count else (np.float64(diagonal[first + row]) if weighted else 1.0)
            for column in range(k):
                scaled[row, column] = factor * np.float64(y[first + min(row, count - 1), column])
        for i in range(k):
            x0, x1 = np.float64(x[first, i]), np.float64(x[first + min(1, count - 1), i])
            x2, x3 = np.float64(x[first + min(2, count - 1), i]), np.float64(x[first + count - 1, i])
            for j in range(i, k):
                sums[i, j] += (x0 * scaled[0, j] + x1 * scaled[1, j]) + (x2 * scaled[2, j] + x3 * scaled[3, j])


@parallel_kernel
def _gram(x: Array, y: Array, diagonal: Array, weighted: bool, partials: Array) -> None:
    for chunk in prange(partials.shape[0]):
        start, stop = chunk * _ROWS, min((chunk + 1) * _ROWS, x.shape[0])
        _add_products(x, y, diagonal, weighted, start, stop, partials[chunk])


@serial_kernel
def _combine_row(one: Array, other: Array, coefficients: Array, total: Array) -> None:
    """Set ``total`` to a row of ``[one, other]`` times the coefficients."""
    total[:] = 0.0
    k = one.shape[0]
    for inner in range(k):
        factor = np.float64(one[inner])
        for column in range(total.shape[0]):
            total[column] += factor * coefficients[inner, column]
    for inner in range(other.shape[0]):
        factor = np.float64(other[inner])
        for column in range(total.shape[0]):
            total[column] += factor * coefficients[k + inner, column]


@parallel_kernel
def _descend(w: Array, s: Array, coefficients: Array, diagonal: Array, weighted: bool, partials: Array) -> None:
    for chunk in prange(partials.shape[1]):
        start, stop = chunk * _ROWS, min((chunk + 1) * _ROWS, w.shape[0])
        total = np.empty(w.shape[1])
        for row in range(start, stop):
            _combine_row(w[row], s[row], coefficients, total)
            for column in range(total.shape[0]):
                w[row, column] = total[column]
        for number in range(1 + weighted):
            # Of constants here, Numba would compile a version for each.
            _add_products(w, w, diagonal, number == 1, start, stop, partials[number, chunk])


@parallel_kernel
def _extend(
    out: Array, z: Array, diagonal: Array, weighted: bool, coefficients: Array, p: Array, x: Array, gamma: Array
) -> None:
    for chunk in prange(-(-z.shape[0] // _ROWS)):
        start, stop = chunk * _ROWS, min((chunk + 1) * _ROWS, z.shape[0])
        moved, total = np.empty(x.shape[1]), np.empty(out.shape[1])
        scaled, nothing = np.empty(z.shape[1]), np.empty(0)
        for row in range(start, stop):
            factor = np.float64(diagonal[row]) if weighted else 1.0
            for column in range(scaled.shape[0]):
                scaled[column] = factor * np.float64(z[row, column])
            if gamma.shape[0] == 0:
                _combine_row(scaled, nothing, coefficients, total)
            else:
                _combine_row(p[row], nothing, gamma, moved)
                for column in range(moved.shape[0]):
                    x[row, column] += moved[column]
                _combine_row(scaled, p[row], coefficients, total)
            for column in range(total.shape[0]):
                out[row, column] = total[column]
