"""The tentative prolongator of a matrix that ranks share: each has the aggregates of its own nodes."""

from __future__ import annotations

import numpy as np

from penstock.solvers.coarse.aggregates import Aggregates
from penstock.solvers.coarse.tentative import Tentative
from penstock.spmv import Array
from penstock.spmv.communicator import Communicator
from penstock.spmv.products.block_rows import BlockRows


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
        of_ranks = communicator.of_all((own.aggregates.grid, count, own.device.to_host(own.candidates)))
        total = sum(of_rank[1] for of_rank in of_ranks)
        self._first = sum(of_rank[1] for of_rank in of_ranks[: communicator.rank])
        self._rows = slice(self._first * self.modes, (self._first + count) * self.modes)
        self.unknowns = total * self.modes
        # Numbers of all aggregates, of which no list of nodes exists.
        grid = _joined_grid([of_rank[0] for of_rank in of_ranks if of_rank[1]], total)
        self.aggregates = Aggregates(np.empty(0, dtype=np.int32), grid, total)
        self.candidates = own.device.asarray(np.concatenate([of_rank[2] for of_rank in of_ranks]))

    @property
    def nbytes(self) -> int:
        """Bytes of T."""
        return self._own.nbytes

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
