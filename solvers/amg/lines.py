"""D of lines of nodes: the inverses of the block tridiagonal matrices that A is on them, factorised.

The inverse of a line of n nodes has n^2 blocks, its factors have 2 n. A product with D is a forward and a backward substitution
along every line, for all lines at once (Golub and Van Loan 2013, section 4.5.1). So a line of thousands of nodes need not be cut.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numba import prange

from penstock.solvers.amg.dense_inverse import symmetric_inverses
from penstock.solvers.amg.groups import Groups
from penstock.spmv import Array
from penstock.spmv.compilation.cuda_module import CudaSource, launch
from penstock.spmv.compilation.jit import parallel_kernel
from penstock.spmv.compilation.table import find_kernel, register_kernel
from penstock.spmv.products.block_rows import BlockRows, row_numbers

LINE_KERNELS = CudaSource("penstock.solvers.kernels", "lines.cu")


class LineInverses:
    """The inverses of the blocks of a matrix on the lines of :class:`Groups`; rows and columns of other nodes are zero.

    Lines are sorted by descending length, and nodes are stored step by step: ``nodes[starts[s] + k]``, int32, is node s of line
    k, for the lines of more than s nodes. ``pivots`` and ``below``, ``(nodes on lines, size, size)``, are the inverses of the
    pivots and the blocks below the diagonal of the unit factor, in the same order. Diagonals are raised by the share ``added``,
    because a line may be a whole body without supports.
    """

    def __init__(self, rows: BlockRows, groups: Groups, added: float) -> None:
        assert groups.on_line is not None
        assert groups.place is not None
        xp = rows.device.xp
        self.device = rows.device
        numbers = xp.flatnonzero(groups.on_line)
        sizes = groups.sizes[numbers]
        descending = xp.argsort(-sizes, kind="stable")
        self.lengths = sizes[descending].astype(np.int32)
        rank = xp.full(groups.count, -1, dtype=np.int64)
        rank[numbers[descending]] = xp.arange(len(numbers))
        #: The line of every node, or -1, and its step there.
        self._line, self._step = rank[groups.of_node], groups.place.astype(np.int64)
        lengths = rows.device.to_host(self.lengths)
        # How many lines have more nodes than each step.
        active = len(lengths) - np.searchsorted(lengths[::-1], np.arange(int(lengths[0])), side="right")
        self._bounds = np.concatenate([[0], np.cumsum(active)])
        self.starts = rows.device.asarray(self._bounds)
        on_lines = xp.flatnonzero(self._line >= 0)
        self.nodes = xp.empty(len(on_lines), dtype=np.int32)
        self.nodes[self._position(on_lines)] = on_lines
        self._factorise(rows, added)
        self._work: Array | None = None

    def _position(self, nodes: Array) -> Array:
        """Return the places of nodes on lines in the order of :attr:`nodes`."""
        return self.starts[self._step[nodes]] + self._line[nodes]

    def _factorise(self, rows: BlockRows, added: float) -> None:
        xp, size = self.device.xp, int(rows.blocks.shape[1])
        row = row_numbers(rows.offsets, rows.columns.size)
        inside = (self._line[row] >= 0) & (self._line[row] == self._line[rows.columns])
        steps = self._step[row] - self._step[rows.columns]
        blocks = []
        for distance in (0, 1):
            entries = xp.flatnonzero(inside & (steps == distance))
            block = xp.zeros((len(self.nodes), size, size))
            block[self._position(row[entries])] = rows.blocks[entries]
            blocks.append(block)
        self.pivots, self.below = blocks
        diagonal = xp.arange(size)
        self.pivots[:, diagonal, diagonal] *= 1.0 + added
        for step, (first, end) in enumerate(pairwise(self._bounds)):
            if step:
                before = slice(self._bounds[step - 1], self._bounds[step - 1] + end - first)
                coupling = self.below[first:end].copy()
                self.below[first:end] = _times(coupling, self.pivots[before])
                self.pivots[first:end] -= _times(self.below[first:end], coupling.swapaxes(1, 2))
            pivots = self.pivots[first:end]
            pivots[...] = 1.0 / pivots if size == 1 else symmetric_inverses(pivots)

    def add_product(self, x: Array, out: Array, alpha: float) -> None:
        """Set ``out += alpha D x``, for a vector or a block of vectors. Reads the pivots once, the blocks below the
        diagonal twice, x once and ``out`` on the lines."""
        shape = (len(self.nodes) * self.pivots.shape[1], *x.shape[1:])
        if self._work is None or self._work.shape != shape:
            self._work = self.device.xp.empty(shape)
        find_kernel("lines", "solve", self.device.kind)(self, x, self._work, out, alpha)

    def product_of(self, rows: BlockRows) -> BlockRows:
        """Return the rows of ``D B`` from those of a sparse B of all nodes; every node of a line has the columns of all of it."""
        xp, nodes = self.device.xp, len(self._line)
        row = row_numbers(rows.offsets, rows.columns.size)
        entries = xp.flatnonzero(self._line[row] >= 0)
        row, columns = row[entries], rows.columns[entries].astype(np.int64)
        # A pair is a line and a column of it; pairs are ordered by line, so the longest are first.
        width = int(columns.max()) + 1 if columns.size else 1
        pairs, of_entry = xp.unique(self._line[row] * width + columns, return_inverse=True)
        line, column = pairs // width, (pairs % width).astype(np.int32)
        first = xp.searchsorted(line, xp.arange(len(self.lengths) + 1))
        active = first[self.starts[1:] - self.starts[:-1]]
        starts = xp.zeros(len(active) + 1, dtype=np.int64)
        xp.cumsum(active, out=starts[1:])
        bounds = self.device.to_host(starts)
        values = xp.zeros((int(bounds[-1]), *rows.blocks.shape[1:]))
        values[starts[self._step[row]] + of_entry.reshape(-1)] = rows.blocks[entries]
        self._substitute(values, line, bounds)
        of_node = xp.where(self._line >= 0, self._line, 0)
        counts = xp.where(self._line >= 0, first[of_node + 1] - first[of_node], 0)
        offsets = xp.zeros(nodes + 1, dtype=np.int64)
        xp.cumsum(counts, out=offsets[1:])
        node = row_numbers(offsets, int(offsets[-1]))
        pair = first[self._line[node]] + xp.arange(len(node)) - offsets[node]
        return BlockRows(rows.start, offsets, column[pair], values[starts[self._step[node]] + pair], rows.width)

    def _substitute(self, values: Array, line: Array, bounds: Array) -> None:
        """Replace right-hand sides by solutions: those at each step follow each other, and have the lines ``line``."""
        steps = [slice(first, end) for first, end in pairwise(bounds)]
        at = [start + line[: here.stop - here.start] for start, here in zip(self._bounds, steps, strict=False)]
        for step in range(1, len(steps)):
            here, before = steps[step], steps[step - 1].start
            longer = slice(before, before + here.stop - here.start)
            values[here] -= _times(self.below[at[step]], values[longer])
        for step in reversed(range(len(steps))):
            here = steps[step]
            values[here] = _times(self.pivots[at[step]], values[here])
            if step + 1 < len(steps):
                after = steps[step + 1]
                longer = slice(here.start, here.start + after.stop - after.start)
                values[longer] -= _times(self.below[at[step + 1]].swapaxes(1, 2), values[after])

    def identity(self) -> BlockRows:
        """Return the rows of the matrix that is the identity on lines and zero for other nodes."""
        xp, nodes, size = self.device.xp, len(self._line), self.pivots.shape[1]
        offsets = xp.zeros(nodes + 1, dtype=np.int64)
        xp.cumsum(self._line >= 0, out=offsets[1:])
        columns = xp.flatnonzero(self._line >= 0).astype(np.int32)
        return BlockRows(0, offsets, columns, xp.tile(xp.eye(size), (len(columns), 1, 1)), nodes)


def _times(left: Array, right: Array) -> Array:
    """Return the products of pairs of matrices."""
    return left * right if left.shape[2] == 1 else left @ right


@register_kernel("lines", "solve", "cpu")
def _solve_cpu(D: LineInverses, x: Array, work: Array, out: Array, alpha: float) -> None:
    size, vectors = D.pivots.shape[1], 1 if x.ndim == 1 else x.shape[1]
    of_columns = [array.reshape(-1, size, vectors) for array in (x, work, out)]
    _solve(D.lengths, D.starts, D.nodes, D.pivots, D.below, *of_columns, alpha)


@register_kernel("lines", "solve", "cuda")
def _solve_cuda(D: LineInverses, x: Array, work: Array, out: Array, alpha: float) -> None:
    size, lines, vectors = D.pivots.shape[1], len(D.lengths), 1 if x.ndim == 1 else x.shape[1]
    arrays: tuple[Any, ...] = (D.lengths, D.starts, D.nodes, D.pivots, D.below, x, work, out)
    arguments = (np.int32(lines), np.int32(vectors), np.float64(alpha), *arrays)
    launch(LINE_KERNELS.function(f"solve_lines<{size}>"), lines * vectors, 128, arguments)


@parallel_kernel
def _solve(
    lengths: Array, starts: Array, nodes: Array, pivots: Array, below: Array, x: Array, work: Array, out: Array, alpha: float
) -> None:  # fmt: skip
    size, vectors = x.shape[1], x.shape[2]
    for line in prange(lengths.shape[0]):
        length = lengths[line]
        for step in range(length):
            place = starts[step] + line
            for i in range(size):
                for vector in range(vectors):
                    total = x[nodes[place], i, vector]
                    if step:
                        for j in range(size):
                            total -= below[place, i, j] * work[starts[step - 1] + line, j, vector]
                    work[place, i, vector] = total
        solved = np.empty(size)
        for step in range(length - 1, -1, -1):
            place = starts[step] + line
            for vector in range(vectors):
                for i in range(size):
                    solved[i] = 0.0
                    for j in range(size):
                        solved[i] += pivots[place, i, j] * work[place, j, vector]
                    if step + 1 < length:
                        after = starts[step + 1] + line
                        for j in range(size):
                            solved[i] -= below[after, j, i] * work[after, j, vector]
                for i in range(size):
                    work[place, i, vector] = solved[i]
                    out[nodes[place], i, vector] += alpha * solved[i]
