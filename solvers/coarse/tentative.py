"""The tentative prolongator T: on each aggregate an orthonormal basis of the near-null space."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numba import prange

from penstock.solvers.coarse.aggregates import Aggregates
from penstock.spmv import Array, Device
from penstock.spmv.compilation.cuda_module import CudaSource, launch
from penstock.spmv.compilation.jit import serial_and_parallel
from penstock.spmv.compilation.table import find_kernel, register_kernel
from penstock.spmv.products.block_rows import BlockRows

AGGREGATE_KERNELS = CudaSource("penstock.solvers.kernels", "aggregates.cu")

#: A mode whose part that is new on an aggregate is smaller than this share of it adds nothing there.
DEPENDENT = 1e-6
# Up to this many entries of T, one thread is faster than waking others.
_SERIAL_ENTRIES = 1 << 18
_CUDA_THREADS = 256


class Tentative(ABC):
    """T: on each aggregate an orthonormal basis of the near-null space, of ``modes`` columns; ``unknowns`` in all."""

    #: ``T^T`` times the near-null space, (unknowns, modes): the near-null space of the coarse level.
    candidates: Array

    def __init__(self, aggregates: Aggregates, block_size: int, modes: int, device: Device) -> None:
        xp = device.xp
        self.aggregates, self.block_size, self.modes, self.device = aggregates, block_size, modes, device
        self.unknowns = aggregates.count * modes
        self.of_node = device.asarray(aggregates.of_node)
        # The nodes by aggregate, in ascending order.
        self._order = xp.argsort(self.of_node, kind="stable").astype(np.int32)
        self._offsets = xp.searchsorted(self.of_node[self._order], xp.arange(aggregates.count + 1)).astype(np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of T."""
        return int(self.of_node.nbytes + self._order.nbytes + self._offsets.nbytes)

    @property
    def missing(self) -> Array:
        """The columns that vanish: a single node has three rigid motions, clamped nodes have none."""
        factors = self.candidates.reshape(-1, self.modes, self.modes)
        return self.device.xp.diagonal(factors, axis1=1, axis2=2).reshape(-1) == 0.0

    def rows(self, start: int, stop: int) -> BlockRows:
        """Return the rows of some nodes: for each its block ``(block_size, modes)``."""
        return BlockRows(
            start, self.device.xp.arange(stop - start + 1), self.of_node[start:stop], self._blocks(start, stop)
        )

    @abstractmethod
    def prolong(self, coarse: Array, out: Array) -> None:
        """Set ``out = T coarse``, a vector or a block of vectors."""

    @abstractmethod
    def restrict(self, fine: Array, out: Array) -> None:
        """Set ``out = T^T fine``, a vector or a block of vectors."""

    @abstractmethod
    def _blocks(self, start: int, stop: int) -> Array:
        """Return the blocks of some nodes, ``(nodes, block_size, modes)``."""


class StoredTentative(Tentative):
    """T for any near-null space of 1 to 8 modes, (n, modes), whose entries are ``basis``; 8 bytes for each unknown and mode.

    ``free``, bool (n,), is False at unknowns that the coarse level leaves out, such as clamped ones.
    """

    def __init__(self, candidates: Array, free: Array, aggregates: Aggregates, block_size: int, device: Device) -> None:
        super().__init__(aggregates, block_size, int(candidates.shape[1]), device)
        xp = device.xp
        self.basis = xp.ascontiguousarray(
            device.asarray(candidates, dtype=np.float64) * device.asarray(free)[:, None].astype(np.float64)
        )
        factors = xp.zeros((aggregates.count, self.modes, self.modes))
        if aggregates.count:
            find_kernel("aggregates", "orthonormalise", device.kind)(self._offsets, self._order, self.basis, factors)
        self.candidates = factors.reshape(self.unknowns, self.modes)

    @property
    def nbytes(self) -> int:
        """Bytes of T."""
        return int(super().nbytes + self.basis.nbytes)

    def prolong(self, coarse: Array, out: Array) -> None:
        """Set ``out = T coarse``, a vector or a block of vectors."""
        find_kernel("aggregates", "prolong", self.device.kind)(self.of_node, self.basis, coarse, out)

    def restrict(self, fine: Array, out: Array) -> None:
        """Set ``out = T^T fine``, a vector or a block of vectors."""
        find_kernel("aggregates", "restrict", self.device.kind)(self._offsets, self._order, self.basis, fine, out)

    def _blocks(self, start: int, stop: int) -> Array:
        return self.basis.reshape(-1, self.block_size, self.modes)[start:stop]


def _vectors(array: Array) -> int:
    return 1 if array.ndim == 1 else int(array.shape[1])


def _as_block(array: Array) -> Array:
    return array.reshape(len(array), -1)


@register_kernel("aggregates", "prolong", "cpu")
def _prolong_cpu(of_node: Array, basis: Array, coarse: Array, out: Array) -> None:
    _prolong[basis.size > _SERIAL_ENTRIES](of_node, basis, _as_block(coarse), _as_block(out))


@register_kernel("aggregates", "restrict", "cpu")
def _restrict_cpu(offsets: Array, order: Array, basis: Array, fine: Array, out: Array) -> None:
    size = len(basis) // len(order)
    _restrict[basis.size > _SERIAL_ENTRIES](offsets, order, size, basis, _as_block(fine), _as_block(out))


@register_kernel("aggregates", "orthonormalise", "cpu")
def _orthonormalise_cpu(offsets: Array, order: Array, basis: Array, factors: Array) -> None:
    size = len(basis) // len(order)
    _orthonormalise[basis.size > _SERIAL_ENTRIES](offsets, order, size, basis, factors)


@register_kernel("aggregates", "prolong", "cuda")
def _prolong_cuda(of_node: Array, basis: Array, coarse: Array, out: Array) -> None:
    function = AGGREGATE_KERNELS.function(f"prolong<{basis.shape[1]}>")
    size = np.int32(len(basis) // len(of_node))
    entries = int(out.size)
    arguments = (np.int64(entries), size, np.int32(_vectors(out)), of_node, basis, coarse, out)
    launch(function, entries, _CUDA_THREADS, arguments)


@register_kernel("aggregates", "restrict", "cuda")
def _restrict_cuda(offsets: Array, order: Array, basis: Array, fine: Array, out: Array) -> None:
    function = AGGREGATE_KERNELS.function(f"restrict_rows<{basis.shape[1]}>")
    count, size, vectors = len(offsets) - 1, np.int32(len(basis) // len(order)), _vectors(fine)
    across = np.int32(min(32, 1 << (vectors - 1).bit_length()))
    arguments = (np.int64(count), size, np.int32(vectors), across, offsets, order, basis, fine, out)
    launch(function, 32 * count, _CUDA_THREADS, arguments)


@register_kernel("aggregates", "orthonormalise", "cuda")
def _orthonormalise_cuda(offsets: Array, order: Array, basis: Array, factors: Array) -> None:
    function = AGGREGATE_KERNELS.function(f"orthonormalise<{basis.shape[1]}>")
    count, size = len(offsets) - 1, np.int32(len(basis) // len(order))
    arguments = (np.int64(count), size, offsets, order, basis, factors, np.float64(DEPENDENT**2))
    launch(function, 32 * count, _CUDA_THREADS // 2, arguments)


@serial_and_parallel
def _prolong(of_node: Array, basis: Array, coarse: Array, out: Array) -> None:
    size, modes = basis.shape[0] // of_node.shape[0], basis.shape[1]
    for node in prange(of_node.shape[0]):
        first = of_node[node] * modes
        for row in range(node * size, (node + 1) * size):
            for k in range(out.shape[1]):
                total = 0.0
                for mode in range(modes):
                    total += basis[row, mode] * coarse[first + mode, k]
                out[row, k] = total


@serial_and_parallel
def _restrict(offsets: Array, order: Array, size: int, basis: Array, fine: Array, out: Array) -> None:
    modes = basis.shape[1]
    for aggregate in prange(offsets.shape[0] - 1):
        total = np.zeros((modes, fine.shape[1]))
        for place in range(offsets[aggregate], offsets[aggregate + 1]):
            for row in range(order[place] * size, (order[place] + 1) * size):
                for mode in range(modes):
                    for k in range(fine.shape[1]):
                        total[mode, k] += basis[row, mode] * fine[row, k]
        for mode in range(modes):
            for k in range(fine.shape[1]):
                out[aggregate * modes + mode, k] = total[mode, k]


@serial_and_parallel
def _orthonormalise(offsets: Array, order: Array, size: int, basis: Array, factors: Array) -> None:
    """Gram and Schmidt's algorithm, twice, on every aggregate (Golub and Van Loan 2013, section 5.2.9)."""
    modes = basis.shape[1]
    for aggregate in prange(offsets.shape[0] - 1):
        nodes = order[offsets[aggregate] : offsets[aggregate + 1]]
        count = nodes.shape[0] * size
        local = np.empty((modes, count))
        for i in range(count):
            for mode in range(modes):
                local[mode, i] = basis[nodes[i // size] * size + i % size, mode]
        for mode in range(modes):
            original = 0.0
            for i in range(count):
                original += local[mode, i] * local[mode, i]
            for _ in range(2):
                for earlier in range(mode):
                    product = 0.0
                    for i in range(count):
                        product += local[mode, i] * local[earlier, i]
                    factors[aggregate, earlier, mode] += product
                    for i in range(count):
                        local[mode, i] -= product * local[earlier, i]
            square = 0.0
            for i in range(count):
                square += local[mode, i] * local[mode, i]
            if square <= DEPENDENT * DEPENDENT * original or square == 0.0:
                for i in range(count):
                    local[mode, i] = 0.0
            else:
                norm = np.sqrt(square)
                factors[aggregate, mode, mode] = norm
                for i in range(count):
                    local[mode, i] /= norm
        for i in range(count):
            for mode in range(modes):
                basis[nodes[i // size] * size + i % size, mode] = local[mode, i]
