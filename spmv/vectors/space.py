"""Arithmetic on vectors: inner products, norms and updates.

Inner products are summed over a fixed partition that depends only on the length, so results do not change with the
memory budget, the number of subdivisions or the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numba import prange

from penstock.spmv.communicator import ALONE, Communicator, communicator_of
from penstock.spmv.compilation.cuda_module import CudaSource, launch, type_names
from penstock.spmv.compilation.jit import (
    reassociating_kernel,
    rounded_kernel,
    rounded_serial_and_parallel,
    serial_and_parallel,
)
from penstock.spmv.compilation.table import find_kernel, register_kernel
from penstock.spmv.device import Array, Device, count_true, loadable_in_pairs
from penstock.spmv.operator import Operator

VECTOR_KERNELS = CudaSource("penstock.spmv.kernels", "vectors.cu")

#: Rows that one thread sums at a time on the CPU.
CHUNK = 8192
#: Up to this many chunks, one thread is faster than waking others.
SERIAL_CHUNKS = 2
_CUDA_BLOCKS, _CUDA_THREADS = 512, 256


@dataclass(frozen=True)
class VectorSpace:
    """Inner products, norms and updates of vectors ``(n,)`` on one device, which may be this rank's rows of longer vectors.

    Solvers reach what depends on all rows only through this object.

    Parameters
    ----------
    device : Device
    communicator : Communicator
        Ranks that have the other rows.

    Examples
    --------
    >>> import numpy as np
    >>> from penstock.spmv import CPU, VectorSpace
    >>> space, x, y = VectorSpace(CPU), np.array([3.0, 4.0]), np.ones(2)
    >>> space.combine(2.0, x, -1.0, y)
    >>> space.dot(x, x), space.norm(x), y.tolist()
    (25.0, 5.0, [5.0, 7.0])
    """

    device: Device
    communicator: Communicator = ALONE

    @classmethod
    def of(cls, operator: Operator) -> VectorSpace:
        """Return the space of the vectors of a square operator."""
        return cls(operator.device, communicator_of(operator))

    def length(self, rows: int) -> int:
        """Return the global number of rows, given the local one."""
        return round(float(self.communicator.total(np.array([float(rows)]))[0]))

    def any(self, x: Array) -> bool:
        """Return whether any entry of a vector is not zero."""
        return self.communicator.largest(float(bool(count_true(x != 0)))) > 0

    def maximum(self, x: Array) -> float:
        """Return the largest entry of a vector."""
        return self.communicator.largest(float(x.max()) if x.size else -math.inf)

    def dot(self, x: Array, y: Array) -> float:
        """Return ``x . y`` accumulated in float64; reads 2 n values. On CUDA the host waits for the result."""
        return self.dots((x, y))[0]

    def dots(self, *pairs: tuple[Array, Array]) -> list[float]:
        """Return ``x . y`` of several pairs, as :meth:`dot` does; the host and the ranks wait once."""
        return self.dots_later(*pairs)()

    def dots_later(self, *pairs: tuple[Array, Array]) -> Callable[[], list[float]]:
        """Begin to compute ``x . y`` of several pairs; return a function that waits for them, but not for what begins later."""
        cuda = self.device.kind == "cuda"
        longest = max(x.size for x, _ in pairs)
        partials = self.device.xp.zeros((len(pairs), _CUDA_BLOCKS if cuda else -(-longest // CHUNK)))
        kernel = find_kernel("vector", "dot", self.device.kind)
        for (x, y), partial in zip(pairs, partials, strict=True):
            kernel(x, y, partial if cuda else partial[: -(-x.size // CHUNK)])
        fetched = self.device.fetch_later(partials)

        def wait() -> list[float]:
            # From left to right, a fixed order; Python's own sum would depend on its version. Empty vectors have no partials.
            own = np.cumsum(fetched(), axis=1)[:, -1:].sum(axis=1)
            return [float(total) for total in self.communicator.total(own)]

        return wait

    def norm(self, x: Array) -> float:
        """Return the Euclidean norm of ``x``."""
        square = self.dot(x, x)
        return math.sqrt(square) if square >= 0 else math.nan

    def combine(self, alpha: float, x: Array, beta: float, y: Array) -> None:
        """Set ``y = alpha * x + beta * y`` in one pass that reads 2 n and writes n values."""
        find_kernel("vector", "combine", self.device.kind)(float(alpha), x, float(beta), y)

    def write(self, alpha: float, z: Array, beta: float, out: Array) -> None:
        """Set ``out = alpha z + beta out`` for vectors or blocks of vectors; with ``beta == 0`` out is not read."""
        if beta != 0.0:
            self.combine(alpha, z.reshape(-1), beta, out.reshape(-1))
            return
        out[...] = z
        if alpha != 1.0:
            out *= out.dtype.type(alpha)

    def three_terms(
        self,
        a: float,
        diagonal: Array | None,
        f: Array | None,
        y: Array,
        b: float,
        v: Array,
        c: float,
        out: Array,
        clears: bool = False,
    ) -> None:
        """Set ``out = a D (f - y) + b v + c out`` for vectors ``(n,)`` or blocks ``(n, k)``.

        D is a diagonal ``(n,)``, or dense blocks on it ``(n / size, size, size)``. D and f may be left out. Reads 5 n k values
        and writes n k; terms with a zero ``b`` or ``c`` are not read. With ``y = A v`` this is the step of a three-term
        recurrence of polynomials in ``D A``. ``clears`` sets y to zero afterwards.
        """
        kernel = find_kernel("vector", "three_terms", self.device.kind)
        kernel(a, diagonal, f, y, b, v, c, out, clears)


@reassociating_kernel
def dot_of_range(x: Array, y: Array, start: int, stop: int) -> float:
    """Return the part of ``x . y`` from row start to row stop, in float64."""
    # Slices, with indices that cannot be negative, and sums in any order both let the compiler use vector registers.
    of_x, of_y = x[start:stop], y[start:stop]
    total = 0.0
    for i in range(of_x.shape[0]):
        total += np.float64(of_x[i]) * np.float64(of_y[i])
    return total


@serial_and_parallel
def _dot(x: Array, y: Array, partial: Array) -> None:
    for chunk in prange(partial.shape[0]):
        partial[chunk] = dot_of_range(x, y, chunk * CHUNK, min((chunk + 1) * CHUNK, x.shape[0]))


@serial_and_parallel
def _combine(alpha: float, x: Array, beta: float, y: Array) -> None:
    for i in prange(x.shape[0]):
        y[i] = alpha * x[i] + beta * y[i]


@register_kernel("vector", "dot", "cpu")
def _dot_cpu(x: Array, y: Array, partial: Array) -> None:
    _dot[partial.size > SERIAL_CHUNKS](x, y, partial)


@register_kernel("vector", "combine", "cpu")
def _combine_cpu(alpha: float, x: Array, beta: float, y: Array) -> None:
    _combine[x.size > SERIAL_CHUNKS * CHUNK](alpha, x, beta, y)


@register_kernel("vector", "dot", "cuda")
def _dot_cuda(x: Array, y: Array, partial: Array) -> None:
    function = VECTOR_KERNELS.function(f"dot_partial<{type_names(x)}>")
    function((_CUDA_BLOCKS,), (_CUDA_THREADS,), (np.int64(x.size), x, y, partial))


@register_kernel("vector", "combine", "cuda")
def _combine_cuda(alpha: float, x: Array, beta: float, y: Array) -> None:
    if x.size == 0:
        return
    function = VECTOR_KERNELS.function(f"combine<{type_names(x)}>")
    grid = (-(-x.size // _CUDA_THREADS),)
    function(grid, (_CUDA_THREADS,), (np.int64(x.size), np.float64(alpha), x, np.float64(beta), y))


_AT_ONCE = 800  # approximate rows that go through all passes below before the next rows
# Up to this many numbers, one thread is faster than two; fewer than above, since products have just woken the others.
_SERIAL_STEP = 4096


@rounded_kernel
def _three_terms_of_rows(
    start: int,
    stop: int,
    scaled: bool,
    driven: bool,
    clears: bool,
    a: float,
    blocks: Array,
    f: Array,
    y: Array,
    b: float,
    v: Array,
    c: float,
    out: Array,
) -> None:
    size, rows, of_y, of_out = blocks.shape[1], stop - start, y[start:stop], out[start:stop]
    # One simple loop after the other, so that each uses vector registers.
    change, total = np.empty(rows), np.empty(rows)
    if driven:
        of_f = f[start:stop]
        for i in range(rows):
            change[i] = np.float64(of_f[i]) - np.float64(of_y[i])
    else:
        for i in range(rows):
            change[i] = 0.0 - np.float64(of_y[i])
    if scaled and size == 1:
        of_diagonal = blocks[start:stop, 0, 0]
        for i in range(rows):
            total[i] = a * (np.float64(of_diagonal[i]) * change[i])
    elif scaled and size == 3:
        for block in range(start // 3, stop // 3):
            first = 3 * block - start
            c0, c1, c2 = change[first], change[first + 1], change[first + 2]
            for r in range(3):
                d0, d1, d2 = blocks[block, r, 0], blocks[block, r, 1], blocks[block, r, 2]
                total[first + r] = a * (np.float64(d0) * c0 + np.float64(d1) * c1 + np.float64(d2) * c2)
    elif scaled:
        for block in range(start // size, stop // size):
            first = block * size - start
            for row in range(size):
                scalar = 0.0
                for column in range(size):
                    scalar += np.float64(blocks[block, row, column]) * change[first + column]
                total[first + row] = a * scalar
    else:
        for i in range(rows):
            total[i] = a * change[i]
    if b != 0.0:
        of_v = v[start:stop]
        for i in range(rows):
            total[i] += b * np.float64(of_v[i])
    if c != 0.0:
        for i in range(rows):
            total[i] += c * np.float64(of_out[i])
    for i in range(rows):
        of_out[i] = total[i]
    if clears:
        for i in range(rows):
            of_y[i] = 0.0


@rounded_serial_and_parallel
def _three_terms_of_vector(
    scaled: bool,
    driven: bool,
    clears: bool,
    a: float,
    blocks: Array,
    f: Array,
    y: Array,
    b: float,
    v: Array,
    c: float,
    out: Array,
) -> None:
    size = blocks.shape[1]
    most = max(_AT_ONCE // size, 1) * size
    for part in prange(-(-out.shape[0] // most)):
        stop = min((part + 1) * most, out.shape[0])
        _three_terms_of_rows(part * most, stop, scaled, driven, clears, a, blocks, f, y, b, v, c, out)


@rounded_serial_and_parallel
def _three_terms_of_block(
    scaled: bool,
    driven: bool,
    clears: bool,
    a: float,
    blocks: Array,
    f: Array,
    y: Array,
    b: float,
    v: Array,
    c: float,
    out: Array,
) -> None:
    size = blocks.shape[1]
    for block in prange(out.shape[0] // size):
        for row in range(size):
            i = block * size + row
            for j in range(out.shape[1]):
                change = 0.0
                if scaled:
                    for column in range(size):
                        other = block * size + column
                        difference = (np.float64(f[other, j]) if driven else 0.0) - np.float64(y[other, j])
                        change += np.float64(blocks[block, row, column]) * difference
                else:
                    change = (np.float64(f[i, j]) if driven else 0.0) - np.float64(y[i, j])
                total = a * change
                if b != 0.0:
                    total += b * np.float64(v[i, j])
                if c != 0.0:
                    total += c * np.float64(out[i, j])
                out[i, j] = total
        if clears:
            for i in range(block * size, (block + 1) * size):
                for j in range(out.shape[1]):
                    y[i, j] = 0.0


def _as_blocks(diagonal: Array | None, out: Array) -> Array:
    """Return a diagonal as 1 x 1 blocks; without one, a placeholder that is not read."""
    diagonal = out.reshape(-1) if diagonal is None else diagonal
    return diagonal if diagonal.ndim == 3 else diagonal[: out.shape[0]].reshape(-1, 1, 1)


@register_kernel("vector", "three_terms", "cpu")
def _three_terms_cpu(
    a: float, diagonal: Array | None, f: Array | None, y: Array, b: float, v: Array, c: float, out: Array, clears: bool
) -> None:
    kernels = _three_terms_of_vector if out.ndim == 1 else _three_terms_of_block
    arrays = (a, _as_blocks(diagonal, out), v if f is None else f, y, b, v, c, out)
    kernels[out.size > _SERIAL_STEP](diagonal is not None, f is not None, clears, *arrays)


@register_kernel("vector", "three_terms", "cuda")
def _three_terms_cuda(
    a: float, diagonal: Array | None, f: Array | None, y: Array, b: float, v: Array, c: float, out: Array, clears: bool
) -> None:
    blocks = _as_blocks(diagonal, out)
    size = int(blocks.shape[1])
    blocks = loadable_in_pairs(blocks, size)
    flags = tuple(np.int32(flag) for flag in (diagonal is not None, f is not None, clears))
    rest = (*flags, np.float64(a), np.float64(b), np.float64(c), blocks, v if f is None else f, y, v, out)
    if out.ndim == 1:
        function = VECTOR_KERNELS.function(f"three_terms<{type_names(out)}, {size}>")
        threads = _CUDA_THREADS // (32 * size) * 32 * size  # whole blocks, in whole warps
        launch(function, out.size, threads, (np.int64(out.size), *rest))
    else:
        function = VECTOR_KERNELS.function(f"three_terms_of_block<{type_names(out)}, {size}>")
        launch(function, out.size // size, _CUDA_THREADS, (np.int64(out.size), np.int32(out.shape[1]), *rest))
