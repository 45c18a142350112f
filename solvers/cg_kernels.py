"""The scalars of conjugate gradients, and the three fused passes over vectors of an iteration as Numba kernels."""

from __future__ import annotations

import enum
import math
from collections import namedtuple
from typing import Any

import numpy as np
from numba import prange

from penstock.spmv import Array
from penstock.spmv.compilation.jit import serial_and_parallel, serial_kernel
from penstock.spmv.vectors.space import dot_of_range


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
    ADVANCED = enum.auto()  # whether close has yet to process an iteration
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
    """The rows of the partial sums; see :class:`penstock.solvers.cg_passes.Passes` for when ranks add them up."""

    X_X = 0
    P_Q = 1
    P_P = 2
    Q_Q = 3
    R_R = 4
    R_Z = 5
    W_Z = 6  # with one sum an iteration, w = A z


_X_X, _P_Q, _P_P, _Q_Q, _R_R, _R_Z, _W_Z = map(int, Sum)
# Indices for the kernels below: Numba takes members of an IntEnum as indices only in later versions than 0.65.
_AT: Any = namedtuple("_AT", Scalar.__members__)(*map(int, Scalar))  # type: ignore[arg-type]


@serial_kernel
def _gather(sums: Array, which: int) -> float:
    total = 0.0
    for chunk in range(sums.shape[1]):
        total += sums[which, chunk]
    return total


@serial_kernel
def close(sums: Array, numbers: Array) -> None:
    """End an iteration: update the bound of the distance between the recursive and the true residual.

    The bound of van der Vorst and Ye (2000), with the largest ``||A p|| / ||p||`` so far instead of the norm of A. They
    replace the residual when the bound has grown by a factor of 1.1, here it must be ten: a replacement costs a product,
    and a drift of ten times the smallest one is harmless. So is a drift of less than a tenth of the tolerance.
    """
    numbers[_AT.RHO] = numbers[_AT.NEXT_RHO]
    if numbers[_AT.ADVANCED] != 0.0:
        unit, residual = numbers[_AT.UNIT], math.sqrt(numbers[_AT.RESIDUAL_SQUARED])
        solution = math.sqrt(_gather(sums, _X_X))
        drift = numbers[_AT.DRIFT] + unit * (numbers[_AT.MATRIX_NORM] * solution + residual)
        limit = math.sqrt(unit) * residual
        first = numbers[_AT.FIRST_DRIFT]
        harmful = drift > limit and 100.0 * drift * drift > numbers[_AT.THRESHOLD_SQUARED]
        if numbers[_AT.HALT] == 0.0 and harmful and drift > 10.0 * first and first <= limit:
            numbers[_AT.HALT] = _DRIFTED
        numbers[_AT.DRIFT] = drift
        numbers[_AT.ADVANCED] = 0.0
    numbers[_AT.ACTIVE] = 1.0 if numbers[_AT.HALT] == 0.0 else 0.0


@serial_and_parallel
def curvature(chunk: int, closes: bool, p: Array, q: Array, partials: Array, sums: Array, numbers: Array) -> None:
    """Sum ``p.q``, ``p.p`` and ``q.q``; ``closes`` ends the last iteration too."""
    if closes:
        close(sums, numbers)
    for k in prange(partials.shape[1]):
        start, stop = k * chunk, min((k + 1) * chunk, p.shape[0])
        partials[_P_Q, k] = dot_of_range(p, q, start, stop)
        partials[_P_P, k] = dot_of_range(p, p, start, stop)
        partials[_Q_Q, k] = dot_of_range(q, q, start, stop)


@serial_kernel
def _step_length(sums: Array, numbers: Array) -> float:
    """Return alpha, or NaN if the residual must not change."""
    if numbers[_AT.ACTIVE] == 0.0:
        return math.nan
    curvature = _gather(sums, _P_Q)
    numbers[_AT.CURVATURE] = curvature
    if not (curvature > 0.0 and curvature < math.inf):
        return math.nan
    alpha: float = numbers[_AT.RHO] / curvature
    numbers[_AT.ALPHA] = alpha
    stretched = math.sqrt(_gather(sums, _Q_Q) / _gather(sums, _P_P))
    numbers[_AT.MATRIX_NORM] = max(numbers[_AT.MATRIX_NORM], stretched)
    return alpha


@serial_kernel
def _subtract(alpha: float, q: Array, r: Array) -> None:
    """Set ``r -= alpha q``. The passes work on slices, like :func:`dot_of_range`."""
    for i in range(r.shape[0]):
        r[i] -= alpha * q[i]


@serial_and_parallel
def descend(chunk: int, q: Array, r: Array, partials: Array, sums: Array, numbers: Array) -> None:
    """Set ``r -= alpha q``, and sum ``r.r``, which is ``r.z`` without a preconditioner."""
    alpha = _step_length(sums, numbers)
    if alpha == alpha:
        for k in prange(partials.shape[1]):
            start, stop = k * chunk, min((k + 1) * chunk, r.shape[0])
            _subtract(alpha, q[start:stop], r[start:stop])
            partials[_R_R, k] = partials[_R_Z, k] = dot_of_range(r, r, start, stop)


@serial_and_parallel
def descend_diagonal(
    chunk: int, q: Array, diagonal: Array, r: Array, z: Array, partials: Array, sums: Array, numbers: Array
) -> None:
    """Set ``r -= alpha q`` and ``z = D r`` for a diagonal D, and sum ``r.r`` and ``r.z``."""
    alpha = _step_length(sums, numbers)
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
def descend_blocks(
    chunk: int, q: Array, blocks: Array, r: Array, z: Array, partials: Array, sums: Array, numbers: Array
) -> None:
    """Do the same for a matrix D of dense diagonal blocks."""
    alpha = _step_length(sums, numbers)
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
def residual_product(chunk: int, r: Array, z: Array, partials: Array, which: int) -> None:
    """Sum ``r.z``, or another product of two vectors."""
    for k in prange(partials.shape[1]):
        partials[which, k] = dot_of_range(r, z, k * chunk, min((k + 1) * chunk, r.shape[0]))


@serial_kernel
def foresee(sums: Array, numbers: Array) -> None:
    """Put the curvature of the next direction ``z + beta p`` in the place of its sum (Chronopoulos and Gear 1989)."""
    if numbers[_AT.ACTIVE] != 0.0:
        beta = _gather(sums, _R_Z) / numbers[_AT.RHO]
        curvature = _gather(sums, _W_Z) - beta * beta * numbers[_AT.CURVATURE]
        sums[_P_Q, :] = 0.0
        sums[_P_Q, 0] = curvature


@serial_kernel
def _judge(sums: Array, numbers: Array) -> float:
    """Return beta, or NaN if p must not change; set the halt."""
    residual_squared, rho = _gather(sums, _R_R), _gather(sums, _R_Z)
    numbers[_AT.RESIDUAL_SQUARED] = residual_squared
    halt = 0.0
    if not residual_squared < math.inf:
        halt = _NOT_FINITE
    elif residual_squared <= numbers[_AT.THRESHOLD_SQUARED]:
        halt = _SMALL
    elif not abs(rho) < math.inf:
        halt = _NOT_FINITE
    elif rho <= 0.0:
        halt = _BAD_PRECONDITIONER
    numbers[_AT.HALT] = halt
    if halt != 0.0:
        return math.nan
    numbers[_AT.NEXT_RHO] = rho
    beta: float = rho / numbers[_AT.RHO]
    return beta


@serial_and_parallel
def extend(
    chunk: int, z: Array, x: Array, p: Array, partials: Array, sums: Array, numbers: Array, norms_squared: Array
) -> None:
    """Set ``x += alpha p`` and ``p = z + beta p``, judge the residual, and sum ``x.x``."""
    curvature = numbers[_AT.CURVATURE]
    if numbers[_AT.ACTIVE] != 0.0 and not (curvature > 0.0 and curvature < math.inf):
        numbers[_AT.HALT] = _BAD_CURVATURE
    elif numbers[_AT.ACTIVE] != 0.0:
        alpha, beta = numbers[_AT.ALPHA], _judge(sums, numbers)
        norms_squared[int(numbers[_AT.ITERATION]) % norms_squared.shape[0]] = numbers[_AT.RESIDUAL_SQUARED]
        numbers[_AT.ITERATION] += 1.0
        numbers[_AT.ADVANCED] = 1.0
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
def extend_image(chunk: int, w: Array, q: Array, numbers: Array) -> None:
    """Set ``q = w + beta q``."""
    if numbers[_AT.ACTIVE] != 0.0 and numbers[_AT.HALT] == 0.0:
        beta = numbers[_AT.NEXT_RHO] / numbers[_AT.RHO]
        for k in prange((q.shape[0] + chunk - 1) // chunk):
            of_w, of_q = w[k * chunk : (k + 1) * chunk], q[k * chunk : (k + 1) * chunk]
            for i in range(of_q.shape[0]):
                of_q[i] = of_w[i] + beta * of_q[i]
