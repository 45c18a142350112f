"""Starts the fused passes of conjugate gradients on CPUs and CUDA devices, and adds up their sums over ranks in between."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.solvers import cg_kernels as kernels
from penstock.solvers.cg_kernels import Halt, Scalar, Sum
from penstock.spmv import Array, Device
from penstock.spmv.communicator import ALONE, Communicator
from penstock.spmv.compilation.cuda_module import CudaSource, type_names
from penstock.spmv.compilation.jit import KernelPair
from penstock.spmv.vectors.space import CHUNK, SERIAL_CHUNKS

CG_KERNELS = CudaSource("penstock.solvers.kernels", "conjugate_gradients.cu", enums=(Scalar, Sum, Halt))

Pass = Callable[[], None]
_CUDA_THREADS, _CUDA_TILE, _CUDA_BLOCKS = 256, 1024, 512
# Ranks add up the rows of partial sums before R_R after the first pass, the others before the last.
_FIRST_SUMS, _LAST_SUMS = slice(0, int(Sum.R_R)), slice(int(Sum.R_R), int(Sum.W_Z))


@dataclass(frozen=True)
class CgVectors:
    """The arrays that the passes work on, all on one device."""

    x: Array
    r: Array
    p: Array
    q: Array  # image of p
    z: Array  # preconditioned residual: r without a preconditioner
    w: Array  # image of z, for updating the image of the direction; z itself if q is computed by a product
    blocks: Array | None  # (n / b, b, b): a preconditioner that the passes apply
    numbers: Array  # float64, (len(Scalar),)
    norms_squared: Array  # r.r after each iteration, in float64; the newest overwrites the oldest

    @property
    def block_size(self) -> int:
        """Rows of a block of the preconditioner; 0 without one."""
        return 0 if self.blocks is None else int(self.blocks.shape[1])


class Passes:
    """Three fused passes: curvature, descend and extend, those between and after them, and sums over ranks.

    A pass writes partial sums, and the next one reads sums of all ranks: alone, both are the same memory.

    Where all sums of an iteration are formed ``at_once``, by ``add_up`` after ``image_product``, ``foresee`` deduces from them
    the curvature that the next iteration needs.
    """

    curvature: Pass
    descend: Pass
    residual_product: Pass
    image_product: Pass
    add_up: Pass
    foresee: Pass
    extend: Pass
    extend_image: Pass
    close: Pass

    def _sums(self, xp: Any, parts: int, communicator: Communicator, at_once: bool) -> tuple[Array, Array]:
        """Return memory for partial sums and for sums."""
        partials = xp.zeros((len(Sum), parts))
        return partials, xp.zeros((len(Sum), parts)) if communicator.size > 1 or at_once else partials

    def _add_up_between(self, partials: Array, sums: Array, communicator: Communicator, at_once: bool) -> None:
        """Let passes add up what they have summed, where there are several ranks."""
        if at_once:
            add_up = functools.partial(communicator.add_up, partials, sums)
            self.add_up = add_up if communicator.size > 1 else functools.partial(_copy, partials, sums)
            return
        if communicator.size == 1:
            return
        first, last = (
            functools.partial(communicator.add_up, partials[rows], sums[rows]) for rows in (_FIRST_SUMS, _LAST_SUMS)
        )
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

    def __init__(
        self, of: CgVectors, device: Device, communicator: Communicator = ALONE, *, at_once: bool = False
    ) -> None:
        closes = communicator.size == 1 and not at_once
        # Ranks add up block by block, so all start the same number of blocks.
        parts = int(communicator.largest(max(1, min(_CUDA_BLOCKS, -(-of.x.size // _CUDA_TILE)))))
        partials, sums = self._sums(device.xp, parts, communicator, at_once)
        blocks = of.r if of.blocks is None else of.blocks
        vector, n, tail = type_names(of.x), np.int64(of.x.size), (partials, sums, of.numbers)

        def kernel(name: str, *arguments: Any, grid: int = parts) -> Pass:
            return functools.partial(CG_KERNELS.function(name), (grid,), (_CUDA_THREADS,), arguments)

        self.curvature = kernel(f"cg_curvature<{vector}>", n, of.p, of.q, *tail, np.bool_(closes))
        self.descend = kernel(f"cg_descend<{vector}, {of.block_size}>", n, of.q, blocks, of.r, of.z, *tail)
        product = f"cg_residual_product<{vector}>"
        self.residual_product = kernel(product, n, of.r, of.z, partials, np.int32(Sum.R_Z))
        self.image_product = kernel(product, n, of.w, of.z, partials, np.int32(Sum.W_Z))
        self.foresee = kernel("cg_foresee", np.int32(parts), sums, of.numbers, grid=1)
        history = (of.norms_squared, np.int32(of.norms_squared.size))
        self.extend = kernel(f"cg_extend<{vector}>", n, of.z, of.x, of.p, *tail, *history)
        self.extend_image = kernel(f"cg_extend_image<{vector}>", n, of.w, of.q, of.numbers)
        self.close = kernel("cg_close", np.int32(parts), sums, of.numbers, grid=1)
        self._add_up_between(partials, sums, communicator, at_once)


class CpuPasses(Passes):
    """The same passes as Numba kernels."""

    def __init__(
        self, of: CgVectors, device: Device, communicator: Communicator = ALONE, *, at_once: bool = False
    ) -> None:
        closes = communicator.size == 1 and not at_once
        chunk = CHUNK if of.blocks is None else CHUNK // of.block_size * of.block_size
        partials, sums = self._sums(device.xp, max(1, -(-of.x.size // chunk)), communicator, at_once)
        tail = (partials, sums, of.numbers)

        def kernel(pair: KernelPair, *arguments: Any) -> Pass:
            return functools.partial(pair[partials.shape[1] > SERIAL_CHUNKS], chunk, *arguments)

        self.curvature = kernel(kernels.curvature, closes, of.p, of.q, *tail)
        if of.blocks is None:
            self.descend = kernel(kernels.descend, of.q, of.r, *tail)
        elif of.block_size == 1:
            self.descend = kernel(kernels.descend_diagonal, of.q, of.blocks.reshape(-1), of.r, of.z, *tail)
        else:
            self.descend = kernel(kernels.descend_blocks, of.q, of.blocks, of.r, of.z, *tail)
        self.residual_product = kernel(kernels.residual_product, of.r, of.z, partials, int(Sum.R_Z))
        self.image_product = kernel(kernels.residual_product, of.w, of.z, partials, int(Sum.W_Z))
        self.foresee = functools.partial(kernels.foresee, sums, of.numbers)
        self.extend = kernel(kernels.extend, of.z, of.x, of.p, *tail, of.norms_squared)
        self.extend_image = kernel(kernels.extend_image, of.w, of.q, of.numbers)
        self.close = functools.partial(kernels.close, sums, of.numbers)
        self._add_up_between(partials, sums, communicator, at_once)


def passes_for(of: CgVectors, device: Device, communicator: Communicator = ALONE, *, at_once: bool = False) -> Passes:
    """Return the passes over some vectors."""
    return (CudaPasses if device.kind == "cuda" else CpuPasses)(of, device, communicator, at_once=at_once)
