"""D of lines of nodes for a matrix that is streamed: block tridiagonal factors, subdivision by subdivision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from penstock.solvers.amg.group_inverses import smoothed_by
from penstock.solvers.amg.lines import LineInverses
from penstock.solvers.amg.matrix_rows import visit_rows
from penstock.spmv import Array, Device, Operator, ValidatedOperator
from penstock.spmv.products.block_rows import BlockRows, in_float64


class LinesLostError(Exception):
    """The lines of a coarse level are none any more, because the values of the matrix are others."""


class LineFactors(ValidatedOperator):
    """D, the inverse of the blocks of a matrix on lines of nodes; a node alone is a line of one.

    It takes ``16 size`` bytes for an unknown and, for the lists, 20 for a node; a product takes a further vector.

    Parameters
    ----------
    parts : sequence of LineInverses
        Those of the nodes of each subdivision, in ascending order: no line leaves its subdivision.
    bounds : sequence of int
        Rows at which subdivisions begin, and the end; strictly ascending.
    size : int
        Unknowns of a node.
    device : Device
    """

    #: What a solve says of it.
    remark: ClassVar[str] = "lines of nodes across flat elements are solved as one"

    def __init__(self, parts: Sequence[LineInverses], bounds: Sequence[int], size: int, device: Device) -> None:
        self.block_size, self.device, self.dtype = size, device, np.dtype(np.float64)
        self._parts, self.row_bounds = list(parts), tuple(map(int, bounds))
        self.shape = (self.row_bounds[-1],) * 2

    @property
    def device_arrays(self) -> tuple[Array, ...]:
        """All arrays that a product uses, on whose addresses captured graphs depend."""
        return tuple(array for part in self._parts for array in (*part.arrays, *part.workspaces))

    @property
    def nbytes(self) -> int:
        """Bytes of the factors and lists."""
        return int(sum(array.nbytes for part in self._parts for array in part.arrays))

    @property
    def capturable(self) -> bool:
        """A product only starts kernels, one or two for each subdivision."""
        return True

    def three_terms(
        self,
        rows: slice,
        a: float,
        f: Array | None,
        y: Array,
        b: float,
        v: Array,
        c: float,
        out: Array,
        clears: bool = False,
    ) -> None:
        """Set ``out = a D (f - y) + b v + c out`` for some rows, which are whole subdivisions; all arrays hold these rows only.

        As :meth:`VectorSpace.three_terms`: f may be left out, terms with a zero factor are not read, ``clears`` sets y to zero.
        """
        for number, start, stop in self._parts_of(rows.start, rows.stop):
            of = slice(start - rows.start, stop - rows.start)
            driven = None if f is None else f[of]
            self._parts[number].three_terms(a, driven, y[of], b, v[of], c, out[of], clears)

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        self.three_terms(slice(0, self.shape[0]), -alpha, None, x, 0.0, x, beta, out)

    def smoothed(self, image: BlockRows, own: BlockRows, factor: float, width: int) -> BlockRows:
        """Return the rows of ``P - factor D A P``, of ``width`` columns of blocks, from those of ``A P`` and of P."""
        size, rows = self.block_size, list[BlockRows]()
        for number, start, stop in self._parts_of(image.start * size, image.stop * size):
            part, of = self._parts[number], (start // size, stop // size)
            rows.append(smoothed_by(part.identity(), part.product_of(image.part(*of)), own.part(*of), factor, width))
        return BlockRows.joined(rows, image.start)

    def of_values(self, A: Operator) -> LineFactors:
        """Return D of the same lines for new values of the matrix; one sweep.

        Raises
        ------
        LinesLostError
            If most neighbours on lines are not coupled strongly any more.
        """
        parts, size = list[LineInverses](), self.block_size

        def visit(rows: BlockRows) -> None:
            for number, start, stop in self._parts_of(rows.start * size, rows.stop * size):
                parts.append(self._parts[number].of_values(in_float64(rows.part(start // size, stop // size))))

        visit_rows(A, size, visit, self.row_bounds)
        strong, neighbours = (sum(of) for of in zip(*(part.couplings for part in parts), strict=True))
        if 2 * strong < neighbours:
            raise LinesLostError
        return LineFactors(parts, self.row_bounds, size, self.device)

    def _parts_of(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Yield the numbers of the subdivisions of some rows, with the rows of each."""
        bounds = self.row_bounds
        for number in range(bounds.index(first), len(bounds) - 1):
            if bounds[number] >= last:
                return
            yield number, bounds[number], bounds[number + 1]
