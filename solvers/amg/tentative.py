"""The tentative prolongator T: on each aggregate an orthonormal basis of the near-null space.

Its entries are stored, or computed from coordinates; each of the ranks that share a matrix has the rows of its own nodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from penstock.solvers.amg.aggregates import Aggregates
from penstock.solvers.amg.grid_points import GridPoints
from penstock.solvers.amg.modes import MOTION_KERNELS
from penstock.spmv import Array, Device
from penstock.spmv.communicator import Communicator
from penstock.spmv.compilation.cuda_module import CudaSource, launch
from penstock.spmv.compilation.jit import shared_range
from penstock.spmv.compilation.table import find_kernel, register_kernel
from penstock.spmv.products.block_rows import BlockRows, grouped, row_numbers

AGGREGATE_KERNELS = CudaSource("penstock.solvers.kernels", "aggregates.cu")

# A mode whose part that is new on an aggregate is smaller than this share of it adds nothing there.
_DEPENDENT = 1e-6
_CUDA_THREADS = 256
_RIGID_MOTIONS = 6  # of a body in space


class Tentative(ABC):
    """T: on each aggregate an orthonormal basis of the near-null space, of ``modes`` columns; ``unknowns`` in all."""

    #: ``T^T`` times the near-null space, (unknowns, modes): the near-null space of the coarse level.
    candidates: Array

    def __init__(self, aggregates: Aggregates, block_size: int, modes: int, device: Device) -> None:
        self.aggregates, self.block_size, self.modes, self.device = aggregates, block_size, modes, device
        self.unknowns = aggregates.count * modes
        self.of_node = device.asarray(aggregates.of_node)
        # The nodes by aggregate, in ascending order.
        order, self._offsets = grouped(self.of_node, aggregates.count)
        self._order = order.astype(np.int32)

    @property
    def nbytes(self) -> int:
        """Bytes of T."""
        return int(self.of_node.nbytes + self._order.nbytes + self._offsets.nbytes)

    @property
    def missing(self) -> Array:
        """The columns that vanish: a single node has three rigid motions, clamped nodes have none."""
        diagonals = self.candidates.reshape(-1, self.modes**2)[:, :: self.modes + 1]
        return (diagonals == 0.0).reshape(-1)

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
    """T for any near-null space of some modes, (n, modes), whose entries are ``basis``; 8 bytes for each unknown and mode.

    ``free``, bool (n,), is False at unknowns that the coarse level leaves out, such as clamped ones; None: there are none.
    """

    def __init__(
        self, candidates: Array, free: Array | None, aggregates: Aggregates, block_size: int, device: Device
    ) -> None:
        super().__init__(aggregates, block_size, int(candidates.shape[1]), device)
        xp, candidates = device.xp, device.asarray(candidates, dtype=np.float64)
        self.basis = xp.array(candidates, order="C")
        if free is not None:
            self.basis *= device.asarray(free)[:, None]
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


class PackedTentative(Tentative):
    """T whose aggregates have different numbers of columns, in pieces of ``piece`` columns each.

    A piece is to the coarse matrix what an aggregate is otherwise: a block row. ``padded`` is T with as many columns on all
    aggregates, a multiple of ``piece``; the first ``columns`` of an aggregate, int (aggregates,), are used, rounded up to pieces.
    """

    # It has what a Tentative has, but leaves the lists of nodes to the padded one, and the numbers of aggregates to its pieces.
    def __init__(self, padded: StoredTentative, columns: Array, piece: int) -> None:
        xp, self._padded = padded.device.xp, padded
        self.block_size, self.modes, self.device, self.of_node = padded.block_size, piece, padded.device, padded.of_node
        self._pieces = -(-padded.device.asarray(columns, dtype=np.int64) // piece)
        ends = xp.cumsum(self._pieces)
        self._starts = ends - self._pieces
        total = int(ends[-1]) if len(ends) else 0
        self.aggregates = Aggregates(np.empty(0, dtype=np.int32), count=total)
        self.unknowns = total * piece
        aggregate = xp.searchsorted(ends, xp.arange(total), side="right")
        first = aggregate * padded.modes + (xp.arange(total) - self._starts[aggregate]) * piece
        self._place = (first[:, None] + xp.arange(piece)).reshape(-1)  # of the columns among those of the padded one
        self.candidates = padded.candidates[self._place]

    @property
    def nbytes(self) -> int:
        """Bytes of T."""
        return int(self._padded.nbytes + self._place.nbytes + 2 * self._pieces.nbytes)

    @property
    def missing(self) -> Array:
        """The columns that vanish."""
        return self._padded.missing[self._place]

    def rows(self, start: int, stop: int) -> BlockRows:
        """Return the rows of some nodes: for each the blocks ``(block_size, piece)`` of its aggregate."""
        xp, of_node = self.device.xp, self.of_node[start:stop]
        offsets = xp.zeros(len(of_node) + 1, dtype=np.int64)
        xp.cumsum(self._pieces[of_node], out=offsets[1:])
        node = row_numbers(offsets, int(offsets[-1]))
        number = xp.arange(len(node)) - offsets[node]
        columns = (self._starts[of_node[node]] + number).astype(np.int32)
        most = self._padded.modes // self.modes
        blocks = self._blocks(start, stop).reshape(len(of_node), self.block_size, most, self.modes).swapaxes(1, 2)
        return BlockRows(start, offsets, columns, blocks.reshape(-1, self.block_size, self.modes)[node * most + number])

    def prolong(self, coarse: Array, out: Array) -> None:
        """Set ``out = T coarse``, a vector or a block of vectors."""
        padded = self.device.xp.zeros((self._padded.unknowns, *coarse.shape[1:]))
        padded[self._place] = coarse
        self._padded.prolong(padded, out)

    def restrict(self, fine: Array, out: Array) -> None:
        """Set ``out = T^T fine``, a vector or a block of vectors."""
        padded = self.device.xp.empty((self._padded.unknowns, *fine.shape[1:]))
        self._padded.restrict(fine, padded)
        out[...] = padded[self._place]

    def _blocks(self, start: int, stop: int) -> Array:
        return self._padded._blocks(start, stop)


class RigidTentative(Tentative):
    """T whose near-null space is the rigid motions in space, on a GPU: a third of the memory of T, or less.

    It takes 24 bytes a node for coordinates, or none where the mesh is structured, and 1 an unknown, where the entries would take
    48 an unknown, and its products read as much less. A host has the memory, and computing them there costs more than reading.

    Coordinates, (nodes, 3), are relative to a point near the centre of the body: digits are lost far from it. ``free``, bool
    (n,), is False at unknowns that the coarse level leaves out. ``factors``, (aggregates, 6, 6), are upper triangular: they
    turn motions about the centre of the nodes into a basis that is orthonormal on the aggregate.
    """

    def __init__(
        self, coordinates: Array | GridPoints, free: Array, aggregates: Aggregates, block_size: int, device: Device
    ) -> None:
        super().__init__(aggregates, block_size, _RIGID_MOTIONS, device)
        xp = device.xp
        #: Coordinates as kernels take them: those of all nodes and three zeros, or those along the axes and their numbers.
        self._points = _coordinates_of_kernels(coordinates, device)
        self._free = device.asarray(free, dtype=np.bool_)
        self.factors = xp.empty((aggregates.count, _RIGID_MOTIONS, _RIGID_MOTIONS))
        self.candidates = xp.empty((self.unknowns, _RIGID_MOTIONS))
        function = MOTION_KERNELS.function(f"factor_motions<{block_size}>")
        arguments = (
            np.int64(aggregates.count), self._offsets, self._order, self._free, *self._points, self.factors, self.candidates,
            np.float64(_DEPENDENT**2),
        )  # fmt: skip
        launch(function, 32 * aggregates.count, _CUDA_THREADS // 2, arguments)

    @property
    def nbytes(self) -> int:
        """Bytes of T."""
        return int(super().nbytes + self._points[0].nbytes + self._free.nbytes + self.factors.nbytes)

    def prolong(self, coarse: Array, out: Array) -> None:
        """Set ``out = T coarse``, a vector or a block of vectors."""
        motions = self._apply_factors(coarse, transposed=False)
        function = MOTION_KERNELS.function(f"move_nodes<{self.block_size}>")
        arguments = (np.int64(out.size), _vectors(out), self.of_node, self._free, *self._points, motions, out)
        launch(function, int(out.size), _CUDA_THREADS, arguments)

    def restrict(self, fine: Array, out: Array) -> None:
        """Set ``out = T^T fine``, a vector or a block of vectors."""
        loads, vectors, count = self.device.xp.empty_like(out), _vectors(fine), self.aggregates.count
        function = MOTION_KERNELS.function(f"sum_loads<{self.block_size}>")
        across = _across(vectors)
        lists = (self._offsets, self._order, self._free, *self._points)
        launch(function, 32 * count, _CUDA_THREADS, (np.int64(count), vectors, across, *lists, fine, loads))
        out[...] = self._apply_factors(loads, transposed=True)

    def _apply_factors(self, vectors: Array, *, transposed: bool) -> Array:
        out = self.device.xp.empty_like(vectors)
        function = MOTION_KERNELS.function(f"apply_factors<{str(transposed).lower()}>")
        launch(function, int(out.size), _CUDA_THREADS, (np.int64(out.size), _vectors(out), self.factors, vectors, out))
        return out

    def _blocks(self, start: int, stop: int) -> Array:
        out = self.device.xp.empty((stop - start, self.block_size, _RIGID_MOTIONS))
        function = MOTION_KERNELS.function(f"motion_blocks<{self.block_size}>")
        nodes = (self.of_node, self._free, *self._points)
        arguments = (np.int64(out.size), np.int64(start), *nodes, self.factors, out)
        launch(function, int(out.size), _CUDA_THREADS, arguments)
        return out


def _coordinates_of_kernels(coordinates: Array | GridPoints, device: Device) -> tuple[Any, ...]:
    if isinstance(coordinates, GridPoints):
        return device.asarray(np.concatenate(coordinates.axes)), *(np.int32(count) for count in coordinates.counts)
    stored = device.xp.ascontiguousarray(device.asarray(coordinates, dtype=np.float64))
    return stored, *(np.int32(0) for _ in range(3))


def shared(own: Tentative, communicator: Communicator) -> Tentative:
    """Return T of all ranks from that of one; a single rank has the whole. Collective."""
    return own if communicator.size == 1 else SharedTentative(own, communicator)


class SharedTentative(Tentative):
    """This rank's rows of T, from T of its own nodes. Constructing it is collective, as :meth:`restrict` is.

    Aggregates do not cross ranks and are numbered rank after rank; coarse vectors are whole on all.
    """

    # It has what a Tentative has, but leaves the lists of nodes to that of the rank.
    def __init__(self, own: Tentative, communicator: Communicator) -> None:
        self._own, self._communicator = own, communicator
        self.block_size, self.modes, self.device, self.of_node = own.block_size, own.modes, own.device, own.of_node
        count = own.aggregates.count
        on_host = map(own.device.to_host, (own.candidates, own.missing))
        of_ranks = communicator.of_all((own.aggregates.grid, count, *on_host))
        total = sum(of_rank[1] for of_rank in of_ranks)
        self._first = sum(of_rank[1] for of_rank in of_ranks[: communicator.rank])
        self._rows = slice(self._first * self.modes, (self._first + count) * self.modes)
        self.unknowns = total * self.modes
        # Numbers of all aggregates, of which no list of nodes exists.
        grid = _joined_grid([of_rank[0] for of_rank in of_ranks if of_rank[1]], total)
        self.aggregates = Aggregates(np.empty(0, dtype=np.int32), grid, total)
        # Those of ranks with further columns are wider; all begin with the near-null space.
        fewest = min(of_rank[2].shape[1] for of_rank in of_ranks)
        self.candidates = own.device.asarray(np.concatenate([of_rank[2][:, :fewest] for of_rank in of_ranks]))
        self._missing = own.device.asarray(np.concatenate([of_rank[3] for of_rank in of_ranks]))

    @property
    def nbytes(self) -> int:
        """Bytes of T."""
        return self._own.nbytes

    @property
    def missing(self) -> Array:
        """The columns that vanish, of all ranks."""
        return self._missing

    def rows(self, start: int, stop: int) -> BlockRows:
        """Return the rows of some nodes of this rank, with the columns of all ranks."""
        own = self._own.rows(start, stop)
        return BlockRows(own.start, own.offsets, own.columns + np.int32(self._first), own.blocks)

    def prolong(self, coarse: Array, out: Array) -> None:
        """Set ``out = T coarse`` for the rows of this rank."""
        if len(out):
            self._own.prolong(coarse[self._rows], out)

    def restrict(self, fine: Array, out: Array) -> None:
        """Set ``out = T^T fine``, the sum over all ranks. Collective."""
        out[...] = 0
        if len(fine):
            self._own.restrict(fine, out[self._rows])
        column = out.reshape(-1, 1)
        self._communicator.add_up(column, column)

    def _blocks(self, start: int, stop: int) -> Array:
        return self._own._blocks(start, stop)


def _joined_grid(grids: list[tuple[int, ...] | None], total: int) -> tuple[int, ...] | None:
    """Return the grid of boxes that those of the ranks form along the first axis, or None if they do not."""
    known = [grid for grid in grids if grid is not None]
    if not known or len(known) < len(grids) or len({grid[1:] for grid in known}) > 1:
        return None
    joined = (sum(grid[0] for grid in known), *known[0][1:])
    return joined if int(np.prod(joined)) == total else None


def _vectors(array: Array) -> np.int32:
    return np.int32(1 if array.ndim == 1 else array.shape[1])


def _across(vectors: np.int32) -> np.int32:
    """Return the lanes beside each other that read the vectors of a row."""
    return np.int32(min(32, 1 << (int(vectors) - 1).bit_length()))


def _as_block(array: Array) -> Array:
    return array.reshape(len(array), -1)


@register_kernel("aggregates", "prolong", "cpu")
def _prolong_cpu(of_node: Array, basis: Array, coarse: Array, out: Array) -> None:
    _prolong(len(of_node), of_node, basis, _as_block(coarse), _as_block(out))


@register_kernel("aggregates", "restrict", "cpu")
def _restrict_cpu(offsets: Array, order: Array, basis: Array, fine: Array, out: Array) -> None:
    size = len(basis) // len(order)
    _restrict(len(offsets) - 1, offsets, order, size, basis, _as_block(fine), _as_block(out))


@register_kernel("aggregates", "orthonormalise", "cpu")
def _orthonormalise_cpu(offsets: Array, order: Array, basis: Array, factors: Array) -> None:
    size = len(basis) // len(order)
    _orthonormalise(len(offsets) - 1, offsets, order, size, basis, factors)


@register_kernel("aggregates", "prolong", "cuda")
def _prolong_cuda(of_node: Array, basis: Array, coarse: Array, out: Array) -> None:
    function = AGGREGATE_KERNELS.function(f"prolong<{basis.shape[1]}>")
    size = np.int32(len(basis) // len(of_node))
    entries = int(out.size)
    arguments = (np.int64(entries), size, _vectors(out), of_node, basis, coarse, out)
    launch(function, entries, _CUDA_THREADS, arguments)


@register_kernel("aggregates", "restrict", "cuda")
def _restrict_cuda(offsets: Array, order: Array, basis: Array, fine: Array, out: Array) -> None:
    function = AGGREGATE_KERNELS.function(f"restrict_rows<{basis.shape[1]}>")
    count, size, vectors = len(offsets) - 1, np.int32(len(basis) // len(order)), _vectors(fine)
    arguments = (np.int64(count), size, vectors, _across(vectors), offsets, order, basis, fine, out)
    launch(function, 32 * count, _CUDA_THREADS, arguments)


@register_kernel("aggregates", "orthonormalise", "cuda")
def _orthonormalise_cuda(offsets: Array, order: Array, basis: Array, factors: Array) -> None:
    function = AGGREGATE_KERNELS.function(f"orthonormalise<{basis.shape[1]}>")
    count, size = len(offsets) - 1, np.int32(len(basis) // len(order))
    arguments = (np.int64(count), size, offsets, order, basis, factors, np.float64(_DEPENDENT**2))
    launch(function, 32 * count, _CUDA_THREADS // 2, arguments)


@shared_range(least=8192)
def _prolong(begin: int, end: int, of_node: Array, basis: Array, coarse: Array, out: Array) -> None:
    size, modes = basis.shape[0] // of_node.shape[0], basis.shape[1]
    for node in range(begin, end):
        first = of_node[node] * modes
        for row in range(node * size, (node + 1) * size):
            for k in range(out.shape[1]):
                total = 0.0
                for mode in range(modes):
                    total += basis[row, mode] * coarse[first + mode, k]
                out[row, k] = total


@shared_range(least=256)
def _restrict(
    begin: int, end: int, offsets: Array, order: Array, size: int, basis: Array, fine: Array, out: Array
) -> None:
    modes = basis.shape[1]
    for aggregate in range(begin, end):
        total = np.zeros((modes, fine.shape[1]))
        for place in range(offsets[aggregate], offsets[aggregate + 1]):
            for row in range(order[place] * size, (order[place] + 1) * size):
                for mode in range(modes):
                    for k in range(fine.shape[1]):
                        total[mode, k] += basis[row, mode] * fine[row, k]
        for mode in range(modes):
            for k in range(fine.shape[1]):
                out[aggregate * modes + mode, k] = total[mode, k]


@shared_range(least=64)
def _orthonormalise(
    begin: int, end: int, offsets: Array, order: Array, size: int, basis: Array, factors: Array
) -> None:
    """Gram and Schmidt's algorithm, twice, on every aggregate (Golub and Van Loan 2013, section 5.2.9)."""
    modes = basis.shape[1]
    for aggregate in range(begin, end):
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
            if square <= _DEPENDENT * _DEPENDENT * original or square == 0.0:
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
