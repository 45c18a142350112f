"""The three fused passes over vectors of an iteration of conjugate gradients: as Numba kernels, as launches, and over ranks."""

from __future__ import annotations

import enum
import functools
import math
from abc import ABC, abstractmethod
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numba import prange

from penstock.spmv import Array, Device
from penstock.spmv.communicator import ALONE, Communicator
from penstock.spmv.compilation.cuda_module import CudaSource, type_names
from penstock.spmv.compilation.jit import KernelPair, serial_and_parallel, serial_kernel
from penstock.spmv.vectors.space import CHUNK, SERIAL_CHUNKS, dot_of_range


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
    """The rows of the partial sums; see :class:`Passes` for when ranks add them up."""

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
def halts(sums: Array, numbers: Array) -> bool:
    """Return whether the recurrence has halted, or will in :func:`extend`, as the residual is small.

    Where the curvature is bad, r.r is that of an earlier iteration; ``extend`` halts then in any case.
    """
    return bool(numbers[_AT.ACTIVE] == 0.0 or _gather(sums, _R_R) <= numbers[_AT.THRESHOLD_SQUARED])


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


CG_KERNELS = CudaSource("penstock.solvers.kernels", "conjugate_gradients.cu", enums=(Scalar, Sum, Halt))

Pass = Callable[[], None]
_CUDA_THREADS, _CUDA_TILE, _CUDA_BLOCKS = 256, 1024, 512
# Ranks add up the rows of partial sums before R_R after the first pass, the others before the last.
_FIRST_SUMS, _LAST_SUMS = slice(0, int(Sum.R_R)), slice(int(Sum.R_R), int(Sum.W_Z))


@dataclass(eq=False)
class Passes(ABC):
    """Three fused passes over vectors: curvature, descend and extend, those between and after them, and sums over ranks.

    A pass writes partial sums, and the next one reads sums of all ranks: alone, both are the same memory.

    Where all sums of an iteration are formed ``at_once``, by ``add_up`` after ``image_product``, ``foresee`` deduces from them
    the curvature that the next iteration needs.
    """

    x: Array
    r: Array
    p: Array
    q: Array  # image of p
    z: Array  # preconditioned residual: r without a preconditioner
    w: Array  # image of z, for updating the image of the direction; z itself if q is computed by a product
    blocks: Array | None  # (n / b, b, b): a preconditioner that the passes apply
    numbers: Array  # float64, (len(Scalar),)
    norms_squared: Array  # r.r after each iteration, in float64; the newest overwrites the oldest
    device: Device
    communicator: Communicator = ALONE
    at_once: bool = False
    curvature: Pass = field(init=False)
    descend: Pass = field(init=False)
    residual_product: Pass = field(init=False)
    image_product: Pass = field(init=False)
    add_up: Pass = field(init=False)
    foresee: Pass = field(init=False)
    extend: Pass = field(init=False)
    extend_image: Pass = field(init=False)
    close: Pass = field(init=False)

    def __post_init__(self) -> None:
        self._prepare()

    @abstractmethod
    def _prepare(self) -> None:
        """Bind each pass to the arrays."""

    @property
    def block_size(self) -> int:
        """Rows of a block of the preconditioner; 0 without one."""
        return 0 if self.blocks is None else int(self.blocks.shape[1])

    @property
    def closes(self) -> bool:
        """Whether the first pass also ends the last iteration."""
        return self.communicator.size == 1 and not self.at_once

    @property
    def will_halt(self) -> bool:
        """Whether the recurrence is known to halt in this iteration, so that nothing reads z and w."""
        return False

    def _sums(self, parts: int) -> tuple[Array, Array]:
        """Return memory for partial sums and for sums."""
        partials = self.device.xp.zeros((len(Sum), parts))
        return partials, partials if self.closes else self.device.xp.zeros((len(Sum), parts))

    def _add_up_between(self, partials: Array, sums: Array) -> None:
        """Let passes add up what they have summed, where there are several ranks."""
        if self.closes:
            return
        alone, add_up = self.communicator.size == 1, self.communicator.add_up
        if self.at_once:
            self.add_up = functools.partial(_copy if alone else add_up, partials, sums)
            return
        first, last = (functools.partial(add_up, partials[rows], sums[rows]) for rows in (_FIRST_SUMS, _LAST_SUMS))
        close = self.close
        self.close = _in_turn(first, close)
        self.curvature = _in_turn(self.curvature, first, close)
        self.extend = _in_turn(last, self.extend)


def _in_turn(*passes: Pass) -> Pass:
    def run() -> None:
        for one in passes:
            one()

    return run


def _copy(partials: Array, sums: Array) -> None:
    sums[...] = partials


class CudaPasses(Passes):
    """Starts the kernels of conjugate_gradients.cu."""

    def _prepare(self) -> None:
        # Ranks add up block by block, so all start the same number of blocks.
        parts = int(self.communicator.largest(max(1, min(_CUDA_BLOCKS, -(-self.x.size // _CUDA_TILE)))))
        partials, sums = self._sums(parts)
        blocks = self.r if self.blocks is None else self.blocks
        vector, n, tail = type_names(self.x), np.int64(self.x.size), (partials, sums, self.numbers)

        def kernel(name: str, *arguments: Any, grid: int = parts) -> Pass:
            return functools.partial(CG_KERNELS.function(name), (grid,), (_CUDA_THREADS,), arguments)

        self.curvature = kernel(f"cg_curvature<{vector}>", n, self.p, self.q, *tail, np.bool_(self.closes))
        self.descend = kernel(f"cg_descend<{vector}, {self.block_size}>", n, self.q, blocks, self.r, self.z, *tail)
        product = f"cg_residual_product<{vector}>"
        self.residual_product = kernel(product, n, self.r, self.z, partials, np.int32(Sum.R_Z))
        self.image_product = kernel(product, n, self.w, self.z, partials, np.int32(Sum.W_Z))
        self.foresee = kernel("cg_foresee", np.int32(parts), sums, self.numbers, grid=1)
        history = (self.norms_squared, np.int32(self.norms_squared.size))
        self.extend = kernel(f"cg_extend<{vector}>", n, self.z, self.x, self.p, *tail, *history)
        self.extend_image = kernel(f"cg_extend_image<{vector}>", n, self.w, self.q, self.numbers)
        self.close = kernel("cg_close", np.int32(parts), sums, self.numbers, grid=1)
        self._add_up_between(partials, sums)


class CpuPasses(Passes):
    """The same passes as Numba kernels."""

    def _prepare(self) -> None:
        chunk = CHUNK if self.blocks is None else CHUNK // self.block_size * self.block_size
        partials, sums = self._sums(max(1, -(-self.x.size // chunk)))
        tail = (partials, sums, self.numbers)
        self._halts = functools.partial(halts, sums, self.numbers)

        def kernel(pair: KernelPair, *arguments: Any) -> Pass:
            return functools.partial(pair[partials.shape[1] > SERIAL_CHUNKS], chunk, *arguments)

        self.curvature = kernel(curvature, self.closes, self.p, self.q, *tail)
        if self.blocks is None:
            self.descend = kernel(descend, self.q, self.r, *tail)
        elif self.block_size == 1:
            self.descend = kernel(descend_diagonal, self.q, self.blocks.reshape(-1), self.r, self.z, *tail)
        else:
            self.descend = kernel(descend_blocks, self.q, self.blocks, self.r, self.z, *tail)
        self.residual_product = kernel(residual_product, self.r, self.z, partials, int(Sum.R_Z))
        self.image_product = kernel(residual_product, self.w, self.z, partials, int(Sum.W_Z))
        self.foresee = functools.partial(foresee, sums, self.numbers)
        self.extend = kernel(extend, self.z, self.x, self.p, *tail, self.norms_squared)
        self.extend_image = kernel(extend_image, self.w, self.q, self.numbers)
        self.close = functools.partial(close, sums, self.numbers)
        self._add_up_between(partials, sums)

    @property
    def will_halt(self) -> bool:
        """Whether it is known to halt; with several ranks, or one sum an iteration, nobody knows before all sums are formed."""
        return self.closes and self._halts()
