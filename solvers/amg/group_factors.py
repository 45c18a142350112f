"""D of groups of nodes for a matrix that is streamed: ``D = W^T W``, the factors W of all groups in single precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
from numba import prange

from penstock.solvers.amg.group_inverses import dense_groups, rows_on_groups, size_classes, smoothed_by
from penstock.solvers.amg.groups import Groups
from penstock.solvers.amg.matrix_rows import visit_rows
from penstock.spmv import Array, Device, InputError, Operator, ValidatedOperator, device_of
from penstock.spmv.compilation.cuda_module import CudaSource, launch
from penstock.spmv.compilation.jit import parallel_kernel, reassociating_kernel
from penstock.spmv.compilation.table import find_kernel, register_kernel
from penstock.spmv.products.block_rows import BlockRows, row_numbers

GROUP_FACTOR_KERNELS = CudaSource("penstock.solvers.kernels", "group_factors.cu")
#: Unknowns of a group, at most: the CUDA kernel keeps as many numbers in shared memory.
MOST_UNKNOWNS = 160
_CUDA_THREADS = 128


class GroupPart(NamedTuple):
    """The groups of consecutive nodes and their factors: nodes by group, first nodes of groups, first entries of factors."""

    order: Array
    starts: Array
    places: Array
    factors: Array


class GroupFactors(ValidatedOperator):
    """D, the inverse of the blocks of a matrix on groups of nodes, ``D = W^T W`` with ``W = L^-1`` of Cholesky's factor L.

    W is stored in float32, 2 bytes for an unknown and each unknown of its group: half of D. A product of factors is symmetric and
    positive semidefinite however it is rounded; inverses rounded to float32 are not where nodes are tied or hardly held.

    Parameters
    ----------
    parts : sequence of GroupPart
        In ascending order of their nodes.
    bounds : sequence of int
        Rows at which subdivisions begin, and the end: no group leaves its subdivision.
    """

    #: What a solve says of it.
    remark: ClassVar[str] = "strongly coupled nodes are smoothed together"

    def __init__(self, parts: Sequence[GroupPart], bounds: Sequence[int], size: int, device: Device) -> None:
        xp = device.xp
        self.block_size, self.device, self.dtype = size, device, np.dtype(np.float64)
        self.order = xp.concatenate([part.order for part in parts])
        self.starts, self.places = (_joined([part[k] for part in parts], xp) for k in (1, 2))
        self.factors = xp.concatenate([part.factors for part in parts])
        self.shape = (len(self.order) * size,) * 2
        # The first group of every subdivision, by its first row.
        first_groups = np.searchsorted(device.to_host(self.starts), np.asarray(bounds) // size)
        self._first_group = dict(zip(map(int, bounds), first_groups.tolist(), strict=True))

    @property
    def row_bounds(self) -> tuple[int, ...]:
        """Rows between which groups stay."""
        return tuple(self._first_group)

    @property
    def count(self) -> int:
        """Number of groups."""
        return len(self.starts) - 1

    @property
    def of_node(self) -> Array:
        """The group of every node, int32."""
        of_node = self.device.xp.empty(len(self.order), dtype=np.int32)
        of_node[self.order] = row_numbers(self.starts, len(self.order)).astype(np.int32)
        return of_node

    @property
    def device_arrays(self) -> tuple[Array, ...]:
        """The lists and the factors."""
        return (self.order, self.starts, self.places, self.factors)

    @property
    def nbytes(self) -> int:
        """Bytes of the factors and lists."""
        return int(sum(array.nbytes for array in self.device_arrays))

    @property
    def capturable(self) -> bool:
        """A product starts one kernel."""
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
        first, last = self._first_group[rows.start], self._first_group[rows.stop]
        find_kernel("group_factors", "step", self.device.kind)(
            self, first, last, rows.start, a, f, y, b, v, c, out, clears
        )

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        self.three_terms(slice(0, self.shape[0]), -alpha, None, x, 0.0, x, beta, out)

    def solve(self, x: Array) -> Array:
        """Return the product with the inverse of D, the blocks of the matrix on groups, for a vector or block of vectors."""
        out = x.copy()
        find_kernel("group_factors", "solve", self.device.kind)(self, out)
        return out

    def of_values(self, A: Operator) -> GroupFactors:
        """Return D of the same groups for new values of the matrix; one sweep."""
        of_node, parts = self.of_node, list[GroupPart]()

        def visit(rows: BlockRows) -> None:
            of_rows = of_node[rows.start : rows.stop]
            parts.append(factored(rows, of_rows - of_rows.min() if len(of_rows) else of_rows))

        visit_rows(A, self.block_size, visit, self.row_bounds)
        return GroupFactors(parts, self.row_bounds, self.block_size, self.device)

    def smoothed(self, image: BlockRows, own: BlockRows, factor: float, width: int) -> BlockRows:
        """Return the rows of ``P - factor D A P``, of ``width`` columns of blocks, from those of ``A P`` and of P."""
        return smoothed_by(self._rows(image.start, image.stop), image, own, factor, width)

    def _rows(self, start: int, stop: int) -> BlockRows:
        """Return rows of D of whole subdivisions; their columns are numbered from the first row."""
        size = self.block_size
        first, last = (self._first_group[node * size] for node in (start, stop))
        low, high = (int(self.starts[group]) for group in (first, last))
        starts = self.starts[first : last + 1] - low
        products = _products(starts, self.places[first : last + 1], self.factors, size)
        return rows_on_groups(starts, self.order[low:high] - start, size, products)


def _joined(parts: Sequence[Array], xp: Array) -> Array:
    """Return offsets of parts, each of which begins with 0, as offsets of all."""
    ends = np.cumsum([0, *(int(part[-1]) for part in parts)])
    return xp.concatenate([parts[0][:1], *(part[1:] + end for part, end in zip(parts, ends, strict=False))])


def factored(rows: BlockRows, of_node: Array) -> GroupPart:
    """Return the groups of the nodes of some rows, and the factors of the blocks of these rows on the groups.

    ``of_node``: the group of each node, numbered from 0; entries in other columns are left out.
    """
    groups = Groups(of_node, int(of_node.max()) + 1 if len(of_node) else 0)
    starts, order = groups.lists
    xp, size = rows.device.xp, int(rows.blocks.shape[1])
    unknowns = xp.diff(starts) * size
    places = xp.zeros(groups.count + 1, dtype=np.int64)
    xp.cumsum(unknowns * (unknowns + 1) // 2, out=places[1:])
    factors = xp.empty(int(places[-1]), dtype=np.float32)
    for number, dense in dense_groups(rows, groups):
        lower = _inverse_factors(dense, xp)
        i, j = (xp.asarray(index) for index in np.tril_indices(dense.shape[1]))
        inside = i[None, :] < unknowns[number][:, None]
        place = places[number][:, None] + (i * (i + 1) // 2 + j)[None, :]
        factors[place[inside]] = lower[:, i, j][inside]
    return GroupPart((order + rows.start).astype(np.int32), starts, places, factors)


def _inverse_factors(dense: Array, xp: Array) -> Array:
    """Return ``L^-1`` of Cholesky's factors L of symmetric matrices, scaled to a unit diagonal meanwhile."""
    scale = 1.0 / xp.sqrt(xp.einsum("gii->gi", dense))
    try:
        lower = xp.linalg.cholesky(dense * scale[:, :, None] * scale[:, None, :])
    except np.linalg.LinAlgError as error:
        raise InputError("the matrix is not positive definite: the block of some nodes of it is not") from error
    return xp.linalg.inv(lower) * scale[:, None, :]


def _products(starts: Array, places: Array, factors: Array, size: int) -> Iterator[tuple[Array, Array]]:
    """Yield numbers of groups of similar size, and ``W^T W`` of them."""
    xp, sizes = device_of(factors).xp, device_of(factors).xp.diff(starts)
    for most, chosen in size_classes(sizes):
        i, j = (xp.asarray(index) for index in np.tril_indices(most * size))
        inside = i[None, :] < (sizes[chosen] * size)[:, None]
        place = xp.where(inside, places[chosen][:, None] + (i * (i + 1) // 2 + j)[None, :], 0)
        W = xp.zeros((len(chosen), most * size, most * size))
        W[:, i, j] = xp.where(inside, factors[place], 0.0)
        yield chosen, xp.matmul(W.swapaxes(1, 2), W)


@register_kernel("group_factors", "step", "cpu")
def _step_cpu(
    D: GroupFactors, first: int, last: int, first_row: int, a: float, f: Array | None, y: Array,
    b: float, v: Array, c: float, out: Array, clears: bool,
) -> None:  # fmt: skip
    of_groups = (D.block_size, D.order, D.starts, D.places, D.factors)
    vectors = [one if one.ndim == 2 else one.reshape(-1, 1) for one in (v if f is None else f, y, v, out)]
    _step(first, last, first_row, *of_groups, f is not None, clears, a, b, c, *vectors)


@register_kernel("group_factors", "step", "cuda")
def _step_cuda(
    D: GroupFactors, first: int, last: int, first_row: int, a: float, f: Array | None, y: Array,
    b: float, v: Array, c: float, out: Array, clears: bool,
) -> None:  # fmt: skip
    vectors = np.int32(1 if out.ndim == 1 else out.shape[1])
    flags = (np.int32(f is not None), np.int32(clears))
    arguments = (
        np.int64(first), np.int32(D.block_size), vectors, np.int64(first_row), *flags, *map(np.float64, (a, b, c)),
        D.starts, D.order, D.places, D.factors, v if f is None else f, y, v, out,
    )  # fmt: skip
    launch(GROUP_FACTOR_KERNELS.function("group_step"), (last - first) * _CUDA_THREADS, _CUDA_THREADS, arguments)


@register_kernel("group_factors", "solve", "cpu")
def _solve_cpu(D: GroupFactors, out: Array) -> None:
    block = out if out.ndim == 2 else out.reshape(-1, 1)
    _solve(D.block_size, D.order, D.starts, D.places, D.factors, block)


@register_kernel("group_factors", "solve", "cuda")
def _solve_cuda(D: GroupFactors, out: Array) -> None:
    vectors = 1 if out.ndim == 1 else out.shape[1]
    arguments = (
        np.int64(D.count), np.int32(D.block_size), np.int32(vectors), D.starts, D.order, D.places, D.factors, out
    )  # fmt: skip
    launch(GROUP_FACTOR_KERNELS.function("group_solve"), D.count * vectors, _CUDA_THREADS, arguments)


@parallel_kernel
def _step(
    first: int, last: int, first_row: int, size: int, order: Array, starts: Array, places: Array, factors: Array,
    driven: bool, clears: bool, a: float, b: float, c: float, f: Array, y: Array, v: Array, out: Array,
) -> None:  # fmt: skip
    for group in prange(first, last):
        unknowns, columns = (starts[group + 1] - starts[group]) * size, out.shape[1]
        rows = np.empty(unknowns, dtype=np.int64)
        given, halfway = np.empty((columns, unknowns)), np.empty((columns, unknowns))
        for i in range(unknowns):
            rows[i] = order[starts[group] + i // size] * size + i % size - first_row
            for k in range(columns):
                given[k, i] = (f[rows[i], k] if driven else 0.0) - y[rows[i], k]
                if clears:
                    y[rows[i], k] = 0.0
        for i in range(unknowns):
            of_row = factors[places[group] + i * (i + 1) // 2 :][: i + 1]
            for k in range(columns):
                halfway[k, i] = _dot(of_row, given[k])
        given[...] = 0.0
        for i in range(unknowns):
            of_row = factors[places[group] + i * (i + 1) // 2 :][: i + 1]
            for k in range(columns):
                _add(halfway[k, i], of_row, given[k])
        for i in range(unknowns):
            for k in range(columns):
                total = a * given[k, i]
                if b != 0.0:
                    total += b * v[rows[i], k]
                if c != 0.0:
                    total += c * out[rows[i], k]
                out[rows[i], k] = total


@reassociating_kernel
def _dot(of_row: Array, vector: Array) -> float:
    total = 0.0
    for j in range(of_row.shape[0]):
        total += np.float64(of_row[j]) * vector[j]
    return total


@reassociating_kernel
def _add(factor: float, of_row: Array, vector: Array) -> None:
    for j in range(of_row.shape[0]):
        vector[j] += factor * np.float64(of_row[j])


@parallel_kernel
def _solve(size: int, order: Array, starts: Array, places: Array, factors: Array, out: Array) -> None:
    for group in prange(starts.shape[0] - 1):
        unknowns, columns, W = (starts[group + 1] - starts[group]) * size, out.shape[1], places[group]
        local, rows = np.empty((unknowns, columns)), np.empty(unknowns, dtype=np.int64)
        for i in range(unknowns):
            rows[i] = order[starts[group] + i // size] * size + i % size
            local[i] = out[rows[i]]
        for i in range(unknowns - 1, -1, -1):  # W^T u = x: what is known of u goes to the unknowns above
            of_row = W + i * (i + 1) // 2
            for k in range(columns):
                local[i, k] /= factors[of_row + i]
                for j in range(i):
                    local[j, k] -= factors[of_row + j] * local[i, k]
        for i in range(unknowns):  # W out = u
            of_row = W + i * (i + 1) // 2
            for k in range(columns):
                for j in range(i):
                    local[i, k] -= factors[of_row + j] * local[j, k]
                local[i, k] /= factors[of_row + i]
        for i in range(unknowns):
            out[rows[i]] = local[i]
