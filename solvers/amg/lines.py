"""D of lines of nodes: the inverses of the block tridiagonal matrices that A is on them, factorised.

The inverse of a line of n nodes has n^2 blocks, its factors have 2 n. A product with D is a forward and a backward substitution
along every line, for all lines at once (Golub and Van Loan 2013, section 4.5.1). So a line of thousands of nodes need not be cut.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
from numba import prange

from penstock.solvers.amg.links import STRONG
from penstock.spmv import Array, InputError
from penstock.spmv.compilation.cuda_module import CudaSource, launch
from penstock.spmv.compilation.jit import embedded_kernel, parallel_kernel, shared_range
from penstock.spmv.compilation.table import find_kernel, register_kernel
from penstock.spmv.device import count_true
from penstock.spmv.products.block_rows import BlockRows, row_numbers

LINE_KERNELS = CudaSource("penstock.solvers.kernels", "lines.cu")

#: Nodes of a line, at least and at most: a shorter one has a dense inverse as small as its factors, and where stiffness jumps at
#: random a few nodes often are on a line, too; in a longer one, the ends are too far from each other to matter.
LEAST_LINE, LONGEST_LINE = 6, 4096
#: Lines are worth while where at least this share of the nodes is on one.
WORTH_WHILE = 0.1
#: A line or a group may be all of a body without supports, whose block is singular: this share of its diagonal is added.
ADDED = 1e-10
_TINY = 1e-300
# Threads of a block, and those of a line of more than _SHORT nodes on a GPU; a shorter one has one.
_THREADS, _LANES, _SHORT = 128, 32, 8


class LineInverses:
    """The inverses of the blocks of a matrix on lines of nodes; rows and columns of other nodes are zero.

    ``rows`` are those of all nodes, or consecutive ones of them; nodes are numbered from the first of these. ``line`` and
    ``place``, int (nodes,), are the line of every node, or -1, and its position there; numbers of lines may have gaps.

    Lines are sorted by descending length, and ``nodes[starts[k] + s]``, int32, is node s of line k. ``pivots`` and ``below``,
    ``(nodes on lines, size, size)``, are the inverses of the pivots and the blocks below the diagonal of the unit factor, in the
    same order. Diagonals are raised by the share ``added``, because a line may be a whole body without supports.

    Raises
    ------
    InputError
        If the block of a line is not positive definite.
    """

    def __init__(self, rows: BlockRows, line: Array, place: Array, added: float) -> None:
        self.device, xp = rows.device, rows.device.xp
        on_lines, self._added = xp.flatnonzero(line >= 0), added
        numbers, of_node = xp.unique(line[on_lines], return_inverse=True)
        sizes = xp.diff(xp.searchsorted(xp.sort(line[on_lines]), xp.append(numbers, numbers[-1:] + 1)))
        descending = xp.argsort(-sizes, kind="stable")
        lengths = sizes[descending]
        self.starts = xp.zeros(len(numbers) + 1, dtype=np.int64)
        xp.cumsum(lengths, out=self.starts[1:])
        #: Lines of many nodes, the first ones.
        self.long = count_true(lengths > _SHORT)
        rank = xp.empty(len(numbers), dtype=np.int32)
        rank[descending] = xp.arange(len(numbers), dtype=np.int32)
        #: The line of every node, or -1, and its step there.
        self._line, self._step = xp.full(len(line), -1, dtype=np.int32), place.astype(np.int32)
        self._line[on_lines] = rank[of_node.reshape(-1)]
        self.nodes = xp.empty(len(on_lines), dtype=np.int32)
        self.nodes[self._position(on_lines)] = on_lines
        self._take_values(rows)
        # What products use, by shape, and keep: captured graphs have the addresses.
        self._work: dict[tuple[int, ...], Array] = {}
        self._workspace(())

    def of_values(self, rows: BlockRows) -> LineInverses:
        """Return the inverses on the same lines for other values of the matrix."""
        other = copy(self)
        other._take_values(rows)
        return other

    @property
    def count(self) -> int:
        """Number of lines."""
        return len(self.starts) - 1

    @property
    def workspaces(self) -> tuple[Array, ...]:
        """The arrays of forward substitutions: one for each number of vectors that have been multiplied together."""
        return tuple(self._work.values())

    def _workspace(self, columns: tuple[int, ...]) -> Array:
        if columns not in self._work:
            self._work[columns] = self.device.xp.empty((len(self.nodes) * self.pivots.shape[1], *columns))
        return self._work[columns]

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The lists of nodes and the factors."""
        return (self.starts, self.nodes, self.pivots, self.below)

    def _position(self, nodes: Array) -> Array:
        """Return the places of nodes on lines in the order of :attr:`nodes`."""
        return self.starts[self._line[nodes]] + self._step[nodes]

    def _take_values(self, rows: BlockRows) -> None:
        """Factorise the lines of a matrix."""
        xp, size = self.device.xp, int(rows.blocks.shape[1])
        row, columns = row_numbers(rows.offsets, rows.columns.size), rows.columns - rows.start
        near = xp.flatnonzero((columns >= 0) & (columns < len(self._line)))
        of_row, of_column = row[near], columns[near]
        inside = (self._line[of_row] >= 0) & (self._line[of_row] == self._line[of_column])
        steps = self._step[of_row] - self._step[of_column]
        blocks = []
        for distance in (0, 1):
            entries = xp.flatnonzero(inside & (steps == distance))
            block = xp.zeros((len(self.nodes), size, size))
            block[self._position(of_row[entries])] = rows.blocks[near[entries]]
            blocks.append(block)
        self.pivots, self.below = pivots, below = blocks
        #: How many neighbours on lines are coupled strongly, and how many there are.
        self.couplings = self._counted(pivots, below)
        regular = xp.ones(len(self.starts) - 1, dtype=bool)
        find_kernel("lines", "factorise", self.device.kind)(self.starts, 1.0 + self._added, pivots, below, regular)
        if count_true(~regular):
            raise InputError("the matrix is not positive definite: the block of some nodes of it is not")

    def _counted(self, pivots: Array, below: Array) -> tuple[int, int]:
        xp = self.device.xp
        first = xp.zeros(len(self.nodes), dtype=bool)
        first[self.starts[:-1]] = True
        roots = xp.sqrt(xp.maximum(xp.einsum("nii->ni", pivots), 0.0))
        scaled = -xp.einsum("nii->ni", below[1:]) / xp.maximum(roots[1:] * roots[:-1], _TINY)
        after = ~first[1:]
        return count_true((scaled.mean(axis=1) > STRONG) & after), count_true(after)

    def three_terms(
        self, a: float, f: Array | None, y: Array, b: float, v: Array, c: float, out: Array, clears: bool = False
    ) -> None:
        """Set ``out = a D (f - y) + b v + c out`` at nodes on lines, as :meth:`VectorSpace.three_terms`.

        Reads the pivots once, the blocks below the diagonal twice, and f, y, v and out once.
        """
        work = self._workspace(out.shape[1:])
        find_kernel("lines", "step", self.device.kind)(self, a, f, y, b, v, c, work, out, clears)

    def product_of(self, rows: BlockRows) -> BlockRows:
        """Return the rows of ``D B`` from those of a sparse B of all nodes; every node of a line has the columns of all of it."""
        xp, nodes = self.device.xp, len(self._line)
        row = row_numbers(rows.offsets, rows.columns.size)
        entries = xp.flatnonzero(self._line[row] >= 0)
        row, columns = row[entries], rows.columns[entries].astype(np.int64)
        width = int(columns.max()) + 1 if columns.size else 1
        # A pair is a line and a block column that some node of it has.
        pairs, of_entry = xp.unique(self._line[row] * np.int64(width) + columns, return_inverse=True)
        line, column = pairs // width, (pairs % width).astype(np.int32)
        first = xp.searchsorted(line, xp.arange(len(self.starts)))
        starts = xp.zeros(len(pairs) + 1, dtype=np.int64)
        xp.cumsum(self.starts[line + 1] - self.starts[line], out=starts[1:])
        values = xp.zeros((int(starts[-1]), *rows.blocks.shape[1:]))
        values[starts[of_entry.reshape(-1)] + self._step[row]] = rows.blocks[entries]
        find_kernel("lines", "solve_pairs", self.device.kind)(self, line, starts, values)
        of_node = xp.where(self._line >= 0, self._line, 0)
        counts = xp.where(self._line >= 0, first[of_node + 1] - first[of_node], 0)
        offsets = xp.zeros(nodes + 1, dtype=np.int64)
        xp.cumsum(counts, out=offsets[1:])
        node = row_numbers(offsets, int(offsets[-1]))
        pair = first[self._line[node]] + xp.arange(len(node)) - offsets[node]
        return BlockRows(rows.start, offsets, column[pair], values[starts[pair] + self._step[node]], rows.width)

    def identity(self) -> BlockRows:
        """Return the rows of the matrix that is the identity on lines and zero for other nodes."""
        xp, nodes, size = self.device.xp, len(self._line), self.pivots.shape[1]
        offsets = xp.zeros(nodes + 1, dtype=np.int64)
        xp.cumsum(self._line >= 0, out=offsets[1:])
        columns = xp.flatnonzero(self._line >= 0).astype(np.int32)
        return BlockRows(0, offsets, columns, xp.tile(xp.eye(size), (len(columns), 1, 1)), nodes)


@register_kernel("lines", "factorise", "cpu")
def _factorise_cpu(starts: Array, factor: float, pivots: Array, below: Array, regular: Array) -> None:
    _factorise(len(regular), starts, factor, pivots, below, regular)


@register_kernel("lines", "factorise", "cuda")
def _factorise_cuda(starts: Array, factor: float, pivots: Array, below: Array, regular: Array) -> None:
    lines, size = len(regular), pivots.shape[1]
    arguments = (np.int32(lines), np.float64(factor), starts, pivots, below, regular)
    launch(LINE_KERNELS.function(f"factorise_lines<{size}>"), lines, _THREADS, arguments)


@register_kernel("lines", "step", "cpu")
def _step_cpu(
    D: LineInverses, a: float, f: Array | None, y: Array, b: float, v: Array, c: float, work: Array, out: Array, clears: bool
) -> None:  # fmt: skip
    size, vectors = D.pivots.shape[1], 1 if out.ndim == 1 else out.shape[1]
    arrays = [array.reshape(-1, size, vectors) for array in (v if f is None else f, y, v, work, out)]
    _step(D.starts, D.nodes, D.pivots, D.below, f is not None, clears, a, b, c, *arrays)


@register_kernel("lines", "step", "cuda")
def _step_cuda(
    D: LineInverses, a: float, f: Array | None, y: Array, b: float, v: Array, c: float, work: Array, out: Array, clears: bool
) -> None:  # fmt: skip
    size, lines, vectors = D.pivots.shape[1], D.count, 1 if out.ndim == 1 else out.shape[1]
    flags = (np.int32(f is not None), np.int32(clears), *map(np.float64, (a, b, c)))
    arrays: tuple[Any, ...] = (*D.arrays, v if f is None else f, y, v, work, out)
    for name, first, last, lanes in (("long", 0, D.long, _LANES), ("short", D.long, lines, 1)):
        if first < last:
            arguments = (np.int32(first), np.int32(last), np.int32(vectors), *flags, *arrays)
            function = LINE_KERNELS.function(f"step_{name}_lines<{size}>")
            launch(function, (last - first) * vectors * lanes, _THREADS, arguments)


@register_kernel("lines", "solve_pairs", "cpu")
def _solve_pairs_cpu(D: LineInverses, line: Array, starts: Array, values: Array) -> None:
    _solve_pairs(len(line), D.starts, D.pivots, D.below, line, starts, values)


@register_kernel("lines", "solve_pairs", "cuda")
def _solve_pairs_cuda(D: LineInverses, line: Array, starts: Array, values: Array) -> None:
    size, width = values.shape[1:]
    arguments = (np.int64(len(line)), np.int32(width), D.starts, D.pivots, D.below, line, starts, values)
    launch(LINE_KERNELS.function(f"solve_pairs<{size}>"), len(line) * width, _THREADS, arguments)


@embedded_kernel
def _invert(block: Array, work: Array) -> bool:
    """Replace a symmetric positive definite block by its inverse ``W^T W``, where ``W = L^-1``; return whether it is one."""
    size = block.shape[0]
    for i in range(size):
        for j in range(i + 1):
            total = block[i, j]
            for k in range(j):
                total -= work[i, k] * work[j, k]
            if i == j:
                if not total > 0.0:
                    return False
                work[i, i] = np.sqrt(total)
            else:
                work[i, j] = total / work[j, j]
    for j in range(size):  # L by W, column by column
        for i in range(j, size):
            total = 1.0 if i == j else 0.0
            for k in range(j, i):
                total -= work[i, k] * block[k, j]
            block[i, j] = total / work[i, i]
    for i in range(size):
        for j in range(i + 1):
            total = 0.0
            for k in range(i, size):
                total += block[k, i] * block[k, j]
            work[i, j] = total
    for i in range(size):
        for j in range(i + 1):
            block[i, j] = work[i, j]
            block[j, i] = work[i, j]
    return True


@shared_range(least=64)
def _factorise(begin: int, end: int, starts: Array, factor: float, pivots: Array, below: Array, regular: Array) -> None:
    """Factorise lines from their diagonal blocks and those below them, in place."""
    size = pivots.shape[1]
    work, coupling = np.zeros((size, size)), np.empty((size, size))
    for line in range(begin, end):
        for place in range(starts[line], starts[line + 1]):
            for i in range(size):
                pivots[place, i, i] *= factor
            if place > starts[line]:
                before = place - 1
                for i in range(size):
                    for j in range(size):
                        coupling[i, j] = below[place, i, j]
                for i in range(size):
                    for j in range(size):
                        total = 0.0
                        for k in range(size):
                            total += coupling[i, k] * pivots[before, k, j]
                        below[place, i, j] = total
                for i in range(size):
                    for j in range(size):
                        for k in range(size):
                            pivots[place, i, j] -= below[place, i, k] * coupling[j, k]
            if not _invert(pivots[place], work):
                regular[line] = False
                break


@parallel_kernel
def _step(
    starts: Array, nodes: Array, pivots: Array, below: Array, driven: bool, clears: bool, a: float, b: float, c: float,
    f: Array, y: Array, v: Array, work: Array, out: Array,
) -> None:  # fmt: skip
    size, vectors = y.shape[1], y.shape[2]
    for line in prange(starts.shape[0] - 1):
        first, end = starts[line], starts[line + 1]
        for place in range(first, end):
            node = nodes[place]
            for i in range(size):
                for vector in range(vectors):
                    total = (f[node, i, vector] if driven else 0.0) - y[node, i, vector]
                    if clears:
                        y[node, i, vector] = 0.0
                    if place > first:
                        for j in range(size):
                            total -= below[place, i, j] * work[place - 1, j, vector]
                    work[place, i, vector] = total
        solved = np.empty(size)
        for place in range(end - 1, first - 1, -1):
            node = nodes[place]
            for vector in range(vectors):
                for i in range(size):
                    solved[i] = 0.0
                    for j in range(size):
                        solved[i] += pivots[place, i, j] * work[place, j, vector]
                    if place + 1 < end:
                        for j in range(size):
                            solved[i] -= below[place + 1, j, i] * work[place + 1, j, vector]
                for i in range(size):
                    work[place, i, vector] = solved[i]
                    total = a * solved[i]
                    if b != 0.0:
                        total += b * v[node, i, vector]
                    if c != 0.0:
                        total += c * out[node, i, vector]
                    out[node, i, vector] = total


@shared_range(least=64)
def _solve_pairs(
    begin: int, end: int, first: Array, pivots: Array, below: Array, line: Array, starts: Array, values: Array
) -> None:  # fmt: skip
    """Replace right-hand sides of lines by solutions; that of a pair at a step is ``values[starts[pair] + step]``."""
    size, width = values.shape[1], values.shape[2]
    solved = np.empty((size, width))
    for pair in range(begin, end):
        low, high = starts[pair], starts[pair + 1]
        place = first[line[pair]] - low  # from places of values to those of factors
        for here in range(low + 1, high):
            for i in range(size):
                for j in range(size):
                    for k in range(width):
                        values[here, i, k] -= below[place + here, i, j] * values[here - 1, j, k]
        for here in range(high - 1, low - 1, -1):
            solved[...] = 0.0
            for i in range(size):
                for j in range(size):
                    for k in range(width):
                        solved[i, k] += pivots[place + here, i, j] * values[here, j, k]
            if here + 1 < high:
                for i in range(size):
                    for j in range(size):
                        for k in range(width):
                            solved[i, k] -= below[place + here + 1, j, i] * values[here + 1, j, k]
            values[here] = solved
