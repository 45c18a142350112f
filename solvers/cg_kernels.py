"""Kernels for the three fused passes over vectors in an iteration of conjugate gradients, for CPUs and CUDA devices."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import prange

from penstock.spmv import Array, Device
from penstock.spmv.compilation.cuda_module import cuda_function, type_names
from penstock.spmv.compilation.jit import KernelPair, serial_and_parallel, serial_kernel
from penstock.spmv.vectors.space import CHUNK, SERIAL_CHUNKS, dot_of_range

__all__ = ["CgVectors", "CpuKernels", "CudaKernels", "Halt", "Scalar", "Sum"]


class Scalar(enum.IntEnum):
    """The scalars of the recurrence, by their index in the ledger."""

    RHO = 0  # r.z at the start of the iteration
    NEXT_RHO = enum.auto()  # r.z at its end
    ALPHA = enum.auto()
    CURVATURE = enum.auto()  # p.Ap
    RESIDUAL_SQUARED = enum.auto()  # r.r
    THRESHOLD_SQUARED = enum.auto()  # the iteration halts when r.r is below it
    UNIT = enum.auto()  # rounding unit of the vectors
    MATRIX_NORM = enum.auto()  # largest ||A p|| / ||p|| so far: a lower bound of ||A|| that is soon close
    DRIFT = enum.auto()  # bound of the distance between recursive and true residual
    FIRST_DRIFT = enum.auto()  # its value when the residual was last computed as b - A x
    ADVANCED = enum.auto()  # whether _close has yet to process an iteration
    ACTIVE = enum.auto()  # whether passes change the vectors
    HALT = enum.auto()  # a Halt
    ITERATION = enum.auto()


class Halt(enum.IntEnum):
    """Why the recurrence has halted until the host responds."""

    NO_HALT = 0
    SMALL = 1  # the recursive residual is below the threshold
    DRIFTED = 2  # it may have lost half of its digits to rounding and must be recomputed
    BAD_CURVATURE = 3  # p.Ap is not a positive number
    BAD_PRECONDITIONER = 4  # r.Mr is not positive
    NOT_FINITE = 5


_SMALL, _DRIFTED, _BAD_CURVATURE, _BAD_PRECONDITIONER, _NOT_FINITE = map(float, list(Halt)[1:])


class Sum(enum.IntEnum):
    """The rows of the partial sums."""

    P_Q = 0
    P_P = 1
    Q_Q = 2
    R_R = 3
    R_Z = 4
    X_X = 5


_P_Q, _P_P, _Q_Q, _R_R, _R_Z, _X_X = map(int, Sum)
_SUMS = len(Sum)
Pass = Callable[[], None]
_CUDA_THREADS, _CUDA_TILE, _CUDA_BLOCKS = 256, 1024, 512


@dataclass(frozen=True)
class CgVectors:
    """The arrays that the passes work on, all on one device.

    Parameters
    ----------
    x, r, p, q, z : array, (n,)
        Iterate, residual, direction, its image, and the preconditioned residual, which is ``r`` without a preconditioner.
    w : array, (n,)
        Image of z, for updating the image of the direction; z itself if q is computed by a product.
    blocks : array, (n / b, b, b), or None
        A preconditioner that the passes apply.
    numbers : float64 array, (len(Scalar),)
    norms_squared : float64 array
        ``r.r`` after each iteration; the newest overwrites the oldest.
    """

    x: Array
    r: Array
    p: Array
    q: Array
    z: Array
    w: Array
    blocks: Array | None
    numbers: Array
    norms_squared: Array

    @property
    def block_size(self) -> int:
        """Rows of a block of the preconditioner; 0 without one."""
        return 0 if self.blocks is None else int(self.blocks.shape[1])


class CudaKernels:
    """Starts the kernels of conjugate_gradients.cu."""

    def __init__(self, of: CgVectors, device: Device) -> None:
        parts = min(_CUDA_BLOCKS, -(-of.x.size // _CUDA_TILE))
        partials = device.xp.zeros((_SUMS, parts))
        blocks = of.r if of.blocks is None else of.blocks
        vector, n, tail = type_names(of.x), np.int64(of.x.size), (partials, of.numbers)

        def kernel(name: str, *arguments: Any, grid: int = parts) -> Pass:
            function = cuda_function("conjugate_gradients.cu", name)
            return functools.partial(function, (grid,), (_CUDA_THREADS,), arguments)

        self.curvature = kernel(f"cg_curvature<{vector}>", n, of.p, of.q, *tail)
        self.descend = kernel(f"cg_descend<{vector}, {of.block_size}>", n, of.q, blocks, of.r, of.z, *tail)
        self.residual_product = kernel(f"cg_residual_product<{vector}>", n, of.r, of.z, partials)
        kept = (of.norms_squared, np.int32(of.norms_squared.size))
        self.extend = kernel(f"cg_extend<{vector}>", n, of.z, of.x, of.p, *tail, *kept)
        self.extend_image = kernel(f"cg_extend_image<{vector}>", n, of.w, of.q, of.numbers)
        self.close = kernel("cg_close", np.int32(parts), *tail, grid=1)


class CpuKernels:
    """The same passes as Numba kernels."""

    def __init__(self, of: CgVectors, device: Device) -> None:
        chunk = CHUNK if of.blocks is None else CHUNK // of.block_size * of.block_size
        partials = device.xp.zeros((_SUMS, -(-of.x.size // chunk)))
        tail = (partials, of.numbers)

        def kernel(pair: KernelPair, *arguments: Any) -> Pass:
            return functools.partial(pair[partials.shape[1] > SERIAL_CHUNKS], chunk, *arguments)

        self.curvature = kernel(_curvature, of.p, of.q, *tail)
        if of.blocks is None:
            self.descend = kernel(_descend, of.q, of.r, *tail)
        elif of.block_size == 1:
            self.descend = kernel(_descend_diagonal, of.q, of.blocks.reshape(-1), of.r, of.z, *tail)
        else:
            self.descend = kernel(_descend_blocks, of.q, of.blocks, of.r, of.z, *tail)
        self.residual_product = kernel(_residual_product, of.r, of.z, partials)
        self.extend = kernel(_extend, of.z, of.x, of.p, *tail, of.norms_squared)
        self.extend_image = kernel(_extend_image, of.w, of.q, of.numbers)
        self.close: Pass = functools.partial(_close, *tail)


@serial_kernel
def _gather(partials: Array, which: int) -> float:
    total = 0.0
    for chunk in range(partials.shape[1]):
        total += partials[which, chunk]
    return total


@serial_kernel
def _close(partials: Array, numbers: Array) -> None:
    """End an iteration: update the bound of the distance between the recursive and the true residual.

    The bound of van der Vorst and Ye (2000), with the largest ``||A p|| / ||p||`` so far instead of the norm of A. They
    replace the residual when the bound has grown by a factor of 1.1, here it must be ten: a replacement costs a product,
    and a drift of ten times the smallest one is harmless. So is a drift of less than a tenth of the tolerance.
    """
    numbers[Scalar.RHO] = numbers[Scalar.NEXT_RHO]
    if numbers[Scalar.ADVANCED] != 0.0:
        unit, residual = numbers[Scalar.UNIT], math.sqrt(numbers[Scalar.RESIDUAL_SQUARED])
        solution = math.sqrt(_gather(partials, _X_X))
        drift = numbers[Scalar.DRIFT] + unit * (numbers[Scalar.MATRIX_NORM] * solution + residual)
        limit = math.sqrt(unit) * residual
        first = numbers[Scalar.FIRST_DRIFT]
        harmful = drift > limit and 100.0 * drift * drift > numbers[Scalar.THRESHOLD_SQUARED]
        if numbers[Scalar.HALT] == 0.0 and harmful and drift > 10.0 * first and first <= limit:
            numbers[Scalar.HALT] = _DRIFTED
        numbers[Scalar.DRIFT] = drift
        numbers[Scalar.ADVANCED] = 0.0
    numbers[Scalar.ACTIVE] = 1.0 if numbers[Scalar.HALT] == 0.0 else 0.0


@serial_and_parallel
def _curvature(chunk: int, p: Array, q: Array, partials: Array, numbers: Array) -> None:
    _close(partials, numbers)
    for k in prange(partials.shape[1]):
        start, stop = k * chunk, min((k + 1) * chunk, p.shape[0])
        partials[_P_Q, k] = dot_of_range(p, q, start, stop)
        partials[_P_P, k] = dot_of_range(p, p, start, stop)
        partials[_Q_Q, k] = dot_of_range(q, q, start, stop)


@serial_kernel
def _step_length(partials: Array, numbers: Array) -> float:
    """Return alpha, or NaN if the residual must not change."""
    if numbers[Scalar.ACTIVE] == 0.0:
        return math.nan
    curvature = _gather(partials, _P_Q)
    numbers[Scalar.CURVATURE] = curvature
    if not (curvature > 0.0 and curvature < math.inf):
        return math.nan
    alpha: float = numbers[Scalar.RHO] / curvature
    numbers[Scalar.ALPHA] = alpha
    stretched = math.sqrt(_gather(partials, _Q_Q) / _gather(partials, _P_P))
    numbers[Scalar.MATRIX_NORM] = max(numbers[Scalar.MATRIX_NORM], stretched)
    return alpha


@serial_kernel
def _subtract(alpha: float, q: Array, r: Array) -> None:
    """Set ``r -= alpha q``. The passes work on slices, like :func:`dot_of_range`."""
    for i in range(r.shape[0]):
        r[i] -= alpha * q[i]


@serial_and_parallel
def _descend(chunk: int, q: Array, r: Array, partials: Array, numbers: Array) -> None:
    alpha = _step_length(partials, numbers)
    if alpha == alpha:
        for k in prange(partials.shape[1]):
            start, stop = k * chunk, min((k + 1) * chunk, r.shape[0])
            _subtract(alpha, q[start:stop], r[start:stop])
            partials[_R_R, k] = partials[_R_Z, k] = dot_of_range(r, r, start, stop)


@serial_and_parallel
def _descend_diagonal(
    chunk: int, q: Array, diagonal: Array, r: Array, z: Array, partials: Array, numbers: Array
) -> None:
    alpha = _step_length(partials, numbers)
    if alpha == alpha:
        for k in prange(partials.shape[1]):
            start, stop = k * chunk, min((k + 1) * chunk, r.shape[0])
            _subtract(alpha, q[start:stop], r[start:stop])
            of_diagonal, of_r, of_z = diagonal[start:stop], r[start:stop], z[start:stop]
            for i in range(of_r.shape[0]):
                of_z[i] = of_diagonal[i] * of_r[i]
            partials[_R_R, k] = dot_of_range(r, r, start, stop)
            partials[_R_Z, k] = dot_of_range(r, z, start, stop)


@serial_and_parallel
def _descend_blocks(chunk: int, q: Array, blocks: Array, r: Array, z: Array, partials: Array, numbers: Array) -> None:
    alpha = _step_length(partials, numbers)
    if alpha == alpha:
        size = blocks.shape[1]
        for k in prange(partials.shape[1]):
            start, stop = k * chunk, min((k + 1) * chunk, r.shape[0])
            _subtract(alpha, q[start:stop], r[start:stop])
            for block in range(start // size, stop // size):
                for row in range(size):
                    total = 0.0
                    for column in range(size):
                        total += np.float64(blocks[block, row, column]) * np.float64(r[block * size + column])
                    z[block * size + row] = total
            partials[_R_R, k] = dot_of_range(r, r, start, stop)
            partials[_R_Z, k] = dot_of_range(r, z, start, stop)


@serial_and_parallel
def _residual_product(chunk: int, r: Array, z: Array, partials: Array) -> None:
    for k in prange(partials.shape[1]):
        partials[_R_Z, k] = dot_of_range(r, z, k * chunk, min((k + 1) * chunk, r.shape[0]))


@serial_kernel
def _judge(partials: Array, numbers: Array) -> float:
    """Return beta, or NaN if p must not change; set the halt."""
    residual_squared, rho = _gather(partials, _R_R), _gather(partials, _R_Z)
    numbers[Scalar.RESIDUAL_SQUARED] = residual_squared
    halt = 0.0
    if not residual_squared < math.inf:
        halt = _NOT_FINITE
    elif residual_squared <= numbers[Scalar.THRESHOLD_SQUARED]:
        halt = _SMALL
    elif not abs(rho) < math.inf:
        halt = _NOT_FINITE
    elif rho <= 0.0:
        halt = _BAD_PRECONDITIONER
    numbers[Scalar.HALT] = halt
    if halt != 0.0:
        return math.nan
    numbers[Scalar.NEXT_RHO] = rho
    beta: float = rho / numbers[Scalar.RHO]
    return beta


@serial_and_parallel
def _extend(chunk: int, z: Array, x: Array, p: Array, partials: Array, numbers: Array, norms_squared: Array) -> None:
    curvature = numbers[Scalar.CURVATURE]
    if numbers[Scalar.ACTIVE] != 0.0 and not (curvature > 0.0 and curvature < math.inf):
        numbers[Scalar.HALT] = _BAD_CURVATURE
    elif numbers[Scalar.ACTIVE] != 0.0:
        alpha, beta = numbers[Scalar.ALPHA], _judge(partials, numbers)
        norms_squared[int(numbers[Scalar.ITERATION]) % norms_squared.shape[0]] = numbers[Scalar.RESIDUAL_SQUARED]
        numbers[Scalar.ITERATION] += 1.0
        numbers[Scalar.ADVANCED] = 1.0
        for k in prange(partials.shape[1]):
            start, stop = k * chunk, min((k + 1) * chunk, x.shape[0])
            of_p, of_z, of_x = p[start:stop], z[start:stop], x[start:stop]
            for i in range(of_x.shape[0]):
                of_x[i] += alpha * of_p[i]
            if beta == beta:
                for i in range(of_p.shape[0]):
                    of_p[i] = of_z[i] + beta * of_p[i]
            partials[_X_X, k] = dot_of_range(x, x, start, stop)


@serial_and_parallel
def _extend_image(chunk: int, w: Array, q: Array, numbers: Array) -> None:
    if numbers[Scalar.ACTIVE] != 0.0 and numbers[Scalar.HALT] == 0.0:
        beta = numbers[Scalar.NEXT_RHO] / numbers[Scalar.RHO]
        for k in prange((q.shape[0] + chunk - 1) // chunk):
            of_w, of_q = w[k * chunk : (k + 1) * chunk], q[k * chunk : (k + 1) * chunk]
            for i in range(of_q.shape[0]):
                of_q[i] = of_w[i] + beta * of_q[i]
