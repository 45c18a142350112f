"""The tentative prolongator of bodies in space, computed from the coordinates of their nodes instead of stored."""

from __future__ import annotations

import numpy as np

from penstock.solvers.coarse.aggregates import Aggregates
from penstock.solvers.coarse.tentative import DEPENDENT, Tentative
from penstock.spmv import Array, Device
from penstock.spmv.compilation.cuda_module import CudaSource, launch

MOTION_KERNELS = CudaSource("penstock.solvers.kernels", "rigid_motions.cu")

_MODES = 6
_THREADS = 256


class RigidTentative(Tentative):
    """T whose near-null space is the rigid motions in space, on a GPU: a third of the memory of T, or less.

    It takes 24 bytes a node for coordinates and 1 an unknown, where the entries would take 48 an unknown, and its products read
    as much less. A host has the memory, and computing them there costs more than reading.

    Coordinates, (nodes, 3), are relative to a point near the centre of the body: digits are lost far from it. ``free``, bool
    (n,), is False at unknowns that the coarse level leaves out. ``factors``, (aggregates, 6, 6), are upper triangular: they
    turn motions about the centre of the nodes into a basis that is orthonormal on the aggregate.
    """

    def __init__(
        self, coordinates: Array, free: Array, aggregates: Aggregates, block_size: int, device: Device
    ) -> None:
        super().__init__(aggregates, block_size, _MODES, device)
        xp = device.xp
        self._coordinates = xp.ascontiguousarray(device.asarray(coordinates, dtype=np.float64))
        self._free = device.asarray(free, dtype=np.bool_)
        self.factors = xp.empty((aggregates.count, _MODES, _MODES))
        self.candidates = xp.empty((self.unknowns, _MODES))
        function = MOTION_KERNELS.function(f"factor_motions<{block_size}>")
        arguments = (
            np.int64(aggregates.count), self._offsets, self._order, self._free, self._coordinates, self.factors,
            self.candidates, np.float64(DEPENDENT**2),
        )  # fmt: skip
        launch(function, 32 * aggregates.count, _THREADS // 2, arguments)

    @property
    def nbytes(self) -> int:
        """Bytes of T."""
        return int(super().nbytes + self._coordinates.nbytes + self._free.nbytes + self.factors.nbytes)

    def prolong(self, coarse: Array, out: Array) -> None:
        """Set ``out = T coarse``, a vector or a block of vectors."""
        motions = self._apply_factors(coarse, transposed=False)
        function = MOTION_KERNELS.function(f"move_nodes<{self.block_size}>")
        arguments = (np.int64(out.size), _vectors(out), self.of_node, self._free, self._coordinates, motions, out)
        launch(function, int(out.size), _THREADS, arguments)

    def restrict(self, fine: Array, out: Array) -> None:
        """Set ``out = T^T fine``, a vector or a block of vectors."""
        loads, vectors, count = self.device.xp.empty_like(out), _vectors(fine), self.aggregates.count
        function = MOTION_KERNELS.function(f"sum_loads<{self.block_size}>")
        across = np.int32(min(32, 1 << (int(vectors) - 1).bit_length()))
        lists = (self._offsets, self._order, self._free, self._coordinates)
        launch(function, 32 * count, _THREADS, (np.int64(count), vectors, across, *lists, fine, loads))
        out[...] = self._apply_factors(loads, transposed=True)

    def _apply_factors(self, vectors: Array, *, transposed: bool) -> Array:
        out = self.device.xp.empty_like(vectors)
        function = MOTION_KERNELS.function(f"apply_factors<{str(transposed).lower()}>")
        launch(function, int(out.size), _THREADS, (np.int64(out.size), _vectors(out), self.factors, vectors, out))
        return out

    def _blocks(self, start: int, stop: int) -> Array:
        out = self.device.xp.empty((stop - start, self.block_size, _MODES))
        function = MOTION_KERNELS.function(f"motion_blocks<{self.block_size}>")
        arguments = (
            np.int64(out.size),
            np.int64(start),
            self.of_node,
            self._free,
            self._coordinates,
            self.factors,
            out,
        )
        launch(function, int(out.size), _THREADS, arguments)
        return out


def _vectors(array: Array) -> np.int32:
    return np.int32(1 if array.ndim == 1 else array.shape[1])
