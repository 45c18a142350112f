"""Predicts the seconds of ways to solve a system: iterations with Jacobi, multigrid, groups of nodes, and a factorisation."""

from __future__ import annotations

from functools import cached_property, partial

import numpy as np
import scipy.sparse

from penstock.solvers import Multigrid
from penstock.solvers.amg.coarsening import most_couplings
from penstock.solvers.factorisation import FactorisationSpec
from penstock.solvers.sparse_cholesky import Analysis, analysed, factor_size, most_entries, seconds_to_try_orders
from penstock.spmv import Array, BsrMatrix, BudgetError, CsrMatrix, SparseMatrix
from penstock.spmv.model.suggestion import NOMINAL_BANDWIDTH
from penstock.streaming import StreamPlan
from penstock.streaming.planning.node_graph import node_graph

# Multigrid's set-up and solve take about as long as this many iterations with Jacobi, of a scalar matrix and of blocks, whose
# coarse levels have relatively fewer entries; and some time that no matrix is too small for.
_WORTH_SCALAR, _WORTH_BLOCKS, _OVERHEAD_SECONDS = 400, 250, {"cpu": 0.02, "cuda": 0.06}
# To start an iteration with Jacobi.
_START_SECONDS = {"cpu": 20e-6, "cuda": 40e-6}
# A quick look, which takes a tenth to a third of a thorough one, is not taken where rows have more entries than this on average,
# block rows more blocks, because it would take too long, unless a thorough one takes less than such a share of what may be saved;
# no look at more rows than these, where multigrid gains from further cores, which factorisations hardly use.
_MOST_ENTRIES_A_ROW, _SHARE_OF_LOOK, _MOST_ROWS = 40, 0.5, 200_000
# A quick look takes about as long as this for a node and for an entry, or a block, of the matrix.
_LOOK_NODE_SECONDS, _LOOK_ENTRY_SECONDS = 0.4e-6, 0.06e-6
# All orders are tried if the factorisation is predicted to take this many times as long as trying them.
_TIMES_ORDERS = 2
#: A factorisation is worth it if the iterations that are left would take the first number of times as long, and a look at it if
#: they would take the second number of times as long as the look.
FASTER, WORTH_A_LOOK = 2.0, 3
# Multigrid on one core, set-up and solve of systems that need some 15 iterations: in any case, for a row, and for an entry of a
# scalar matrix and of blocks. As measured for fifty systems of 90,000 rows; a quarter as large ones, which stay in the cache,
# take a tenth to a third less.
_MULTIGRID_SECONDS, _MULTIGRID_ROW_SECONDS = 0.02, 2.0e-6
_MULTIGRID_ENTRY_SECONDS, _MULTIGRID_BLOCK_ENTRY_SECONDS = 0.12e-6, 0.11e-6
# Coarse matrices are dense where nodes have many more neighbours of neighbours than neighbours. The further seconds are this
# constant times the entries of the matrix, times the neighbours of neighbours of a node, times what their ratio to the neighbours
# exceeds the usual one by. Both numbers are means over some nodes, evenly spaced.
_USUAL_GROWTH, _DENSE_ENTRY_SECONDS, _NODES_ASKED, _ROWS_ASKED = 6.0, 0.037e-9, 32, 128
# So they are on random graphs, where neighbours grow in number at the same rate in the next step, which is asked of fewer nodes.
# In space it grows by less than this. Then the seconds are this constant times the nodes and the entries of the matrix.
_USUAL_FURTHER_GROWTH, _RANDOM_ENTRY_SECONDS, _NODES_ASKED_FURTHER = 3.3, 0.5e-9, 8
# Frames and shells, whose nodes have as many unknowns as these, need this many times as long.
_UNKNOWNS_OF_FRAMES, _FRAMES = 6, 3.8
# An iteration with it, for a byte of a level at each visit: of scalar matrices a third less, of blocks as much more.
_ITERATION_BYTE_SECONDS = 1.3e-9
# The set-up of a coarse level of groups of nodes, for a row and for an entry.
_GROUPS_SECONDS = {"cpu": (16e-6, 1.4e-6), "cuda": (1.5e-6, 0.045e-6)}
# Where Jacobi is slow and no near-null space is known, it needs more iterations; but of scalar matrices without positive entries
# beside the diagonal, such as of diffusion and graphs, nearly all need few. Positive entries below this share of the smallest
# diagonal entry are rounding, as in hexahedra whose stiffnesses cancel.
_NOTHING_KNOWN, _DIFFUSION, _ROUNDING = 1.2, 0.6, 1e-12


def jacobi_seconds(storage_nbytes: int, device_kind: str) -> float:
    """Return the seconds of an iteration with Jacobi."""
    return storage_nbytes / NOMINAL_BANDWIDTH[device_kind] + _START_SECONDS[device_kind]


def multigrid_iterations(storage_nbytes: int, block_size: int, device_kind: str) -> int:
    """Return the number of Jacobi iterations that cost about as much as set-up and solve with multigrid."""
    overhead = _OVERHEAD_SECONDS[device_kind] / jacobi_seconds(storage_nbytes, device_kind)
    return (_WORTH_SCALAR if block_size == 1 else _WORTH_BLOCKS) + round(overhead)


def multigrid_seconds(A: SparseMatrix, block_size: int, *, near_null_space_known: bool) -> float:
    """Return the seconds of set-up and solve with multigrid where it converges as it should and coarse matrices are sparse."""
    entry_seconds = _MULTIGRID_ENTRY_SECONDS if block_size == 1 else _MULTIGRID_BLOCK_ENTRY_SECONDS
    seconds = _MULTIGRID_SECONDS + _MULTIGRID_ROW_SECONDS * A.shape[0] + entry_seconds * A.nnz
    harder = _FRAMES if block_size >= _UNKNOWNS_OF_FRAMES else 1.0
    return seconds * harder * (1.0 if near_null_space_known else _NOTHING_KNOWN)


def dense_levels_seconds(A: SparseMatrix, block_size: int) -> float:
    """Return the further seconds of multigrid's set-up where coarse matrices are dense: of least squares and random graphs."""
    if A.device.kind != "cpu" or not isinstance(A, (CsrMatrix, BsrMatrix)):
        return 0.0
    nodes = len(A.row_offsets) - 1
    couplings = partial(_couplings, A.row_offsets, A.column_indices, most_couplings(len(A.column_indices), nodes))
    near = couplings(np.linspace(0, nodes - 1, min(_NODES_ASKED, nodes)).astype(np.int64))
    if not near:
        return 0.0
    beyond = [np.unique(np.concatenate([of, *couplings(of)])) for of in near]
    reached = sum(map(len, beyond))
    growth, each = reached / sum(map(len, near)), reached / len(near)
    if isinstance(A, CsrMatrix):  # of unknowns in place of nodes
        each /= block_size
    seconds = _DENSE_ENTRY_SECONDS * max(0.0, growth - _USUAL_GROWTH) * each * A.nnz
    some = beyond[:: max(1, len(beyond) // _NODES_ASKED_FURTHER)]
    further = sum(np.unique(np.concatenate([of, *couplings(of)])).size for of in some)
    if further > _USUAL_FURTHER_GROWTH * sum(map(len, some)):
        seconds += _RANDOM_ENTRY_SECONDS * nodes * A.nnz
    return seconds


def _couplings(offsets: Array, columns: Array, most: int, rows: Array) -> list[Array]:
    """Return the columns of some rows, except of hubs, which multigrid leaves out; of very many rows some, evenly spaced."""
    rows = rows[:: max(1, len(rows) // _ROWS_ASKED)]
    rows = rows[offsets[rows + 1] - offsets[rows] <= most]
    return [columns[offsets[row] : offsets[row + 1]] for row in rows]


def multigrid_iteration_seconds(M: Multigrid) -> float:
    """Return the seconds of an iteration with multigrid on a CPU, from the bytes of its levels."""
    visits = 2 if M.cycle == "W" else 1
    nbytes: int = sum(level.nbytes * visits**number for number, level in enumerate(M.levels))
    return _ITERATION_BYTE_SECONDS * nbytes


def grouped_iterations(rows: int, nonzeros: int, plan: StreamPlan, device_kind: str) -> int:
    """Return the iterations of a streamed matrix that take as long as the set-up of a coarse level of groups of nodes."""
    of_row, of_entry = _GROUPS_SECONDS[device_kind]
    assert plan.workload.iterations is not None, "those of a coarse level are known"
    iteration = plan.estimated_solve_seconds() / plan.workload.iterations
    return round((of_row * rows + of_entry * nonzeros) / iteration)


def look_seconds(A: SparseMatrix, block_size: int) -> float:
    """Return the seconds in which :meth:`FactorisationLook.within` tries all orders."""
    return seconds_to_try_orders(A.shape[0] // block_size, A.nnz // block_size**2)


def quick_look_seconds(A: SparseMatrix, block_size: int) -> float:
    """Return the seconds of a quick look of :class:`FactorisationLook`, which tries one order."""
    return _LOOK_NODE_SECONDS * A.shape[0] / block_size + _LOOK_ENTRY_SECONDS * A.nnz / block_size**2


class FactorisationLook:
    """How long the factorisation of a matrix takes; what is found out is kept for further questions.

    The entries of the factor are counted exactly in an order of the rows, or of the nodes of a matrix of blocks, in which the
    matrix is factorised then.
    """

    def __init__(self, A: SparseMatrix, block_size: int) -> None:
        self.A, self.block_size, self._taken = A, block_size, False
        self._instead: tuple[FactorisationSpec, float] | None = None

    @cached_property
    def _pattern(self) -> scipy.sparse.csr_array:
        return self.A.to_csr() if self.block_size == 1 else pattern_of_nodes(self.A, self.block_size)

    @cached_property
    def _analysis(self) -> Analysis:
        return analysed(self._pattern, self.block_size, quick=True)

    def within(self, most_seconds: float) -> tuple[FactorisationSpec, float] | None:
        """Return the specification of a factorisation and its predicted seconds, or None if it would take longer.

        Other orders, of which the best may have half of the entries, are tried only if the factorisation is worth it.
        """
        A, size = self.A, self.block_size
        if A.device.kind != "cpu" or A.shape[0] > _MOST_ROWS:
            return None
        thorough = look_seconds(A, size)
        if thorough > _SHARE_OF_LOOK * most_seconds and A.nnz > _MOST_ENTRIES_A_ROW * A.shape[0] * size:
            return None
        most = most_entries(most_seconds) // size**2
        first = self._found(most)
        if first is None or first[1] > most_seconds:
            return None
        if self._analysis.is_thorough or first[1] <= _TIMES_ORDERS * thorough:
            return first
        self._analysis = self._analysis.with_best_order(self._pattern)
        return self._found(most)

    def found(self, most_seconds: float = 0.0) -> tuple[FactorisationSpec, float] | None:
        """Return what takes no longer than these seconds, or than multigrid if that is more; the first answer is kept."""
        if not self._taken:
            self._taken = True
            self._instead = self.within(max(most_seconds, self.multigrid_seconds))
        return self._instead

    def pays(self, left_seconds: float) -> bool:
        """Return whether a factorisation is predicted to take much less than the iterations that are left, if a look is short."""
        if not self._taken and left_seconds < WORTH_A_LOOK * quick_look_seconds(self.A, self.block_size):
            return False
        found = self.found(left_seconds)
        return found is not None and FASTER * found[1] < left_seconds

    @cached_property
    def dense_seconds(self) -> float:
        """Seconds of multigrid that dense coarse matrices cost."""
        return dense_levels_seconds(self.A, self.block_size)

    @cached_property
    def multigrid_seconds(self) -> float:
        """Seconds of multigrid without a near-null space, these among them."""
        usual = multigrid_seconds(self.A, self.block_size, near_null_space_known=False)
        return (_DIFFUSION if self._is_diffusion else 1.0) * usual + self.dense_seconds

    @property
    def _is_diffusion(self) -> bool:
        A = self.A
        if self.block_size > 1 or not isinstance(A, CsrMatrix):
            return False
        rounding = _ROUNDING * float(A.diagonal_blocks(1).min(initial=np.inf))
        return int(np.count_nonzero(A.values > rounding)) <= A.shape[0]

    def _found(self, most: int) -> tuple[FactorisationSpec, float] | None:
        try:
            counted = factor_size(self._pattern, self._analysis.order, most)
        except BudgetError:  # too large for the library, however long it might take
            return None
        if counted is None:
            return None
        counted = counted.of_blocks(self.block_size)
        spec = FactorisationSpec(block_size=self.block_size, analysis=self._analysis, entries=counted.entries)
        return spec, self._analysis.seconds(counted)


def pattern_of_nodes(A: SparseMatrix, size: int) -> scipy.sparse.csr_array:
    """Return which nodes of ``size`` unknowns a matrix on the host couples, with ones as entries."""
    if isinstance(A, BsrMatrix) and A.row_granularity == size:
        graph = node_graph(A.row_offsets, A.column_indices, 1)
    else:
        matrix = A.to_csr()
        graph = node_graph(matrix.indptr, matrix.indices, size)
    return graph.astype(np.float64)


def cheap_factorisation(
    A: SparseMatrix, block_size: int, *, near_null_space_known: bool
) -> tuple[FactorisationSpec, float] | None:
    """Return the specification of a factorisation and its predicted seconds, or None if multigrid is predicted to be faster."""
    seconds = multigrid_seconds(A, block_size, near_null_space_known=near_null_space_known)
    seconds += dense_levels_seconds(A, block_size)
    return FactorisationLook(A, block_size).within(seconds)
