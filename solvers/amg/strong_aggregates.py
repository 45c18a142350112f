"""Aggregates that follow strong couplings, where the stiffness jumps from node to node.

An aggregate across a jump has one constant for a stiff part and a soft one, so the modes in which stiff pieces move in a soft
body are missing from the coarse level. Where nodes are aggregated by strong couplings alone, no aggregate holds both.
"""

from __future__ import annotations

import numpy as np

from penstock.solvers.amg.aggregates import Aggregates, graph_aggregates
from penstock.solvers.amg.matrix_rows import Graph, visit_rows
from penstock.solvers.amg.strength import STRONG, count_strong, strong_among
from penstock.spmv import Array, Operator
from penstock.spmv.communicator import communicator_of, sharing_memory
from penstock.spmv.device import count_true
from penstock.spmv.products.block_rows import BlockRows, in_float64

# The stiffness jumps if the diagonal blocks of this share of neighbours by number differ by more than this factor, and if this
# share of the couplings is weak. Nodes of several unknowns are aggregated by stronger couplings.
_PAIRS, _FACTOR, _WEAK = 0.01, 8.0, 0.02
_STRONG_BLOCK = 0.05
# An aggregate among jumps couples with about this many others. The coarse matrix may have this many vectors of numbers, and take
# this share of the free memory.
_NEIGHBOURS, _MOST_VECTORS, _SHARE_OF_FREE = 50, 12, 0.25


def stiffness_jumps(norms: Array) -> bool:
    """Return whether the norms of the diagonal blocks of nodes, (nodes,), jump between neighbours by number."""
    one, other = norms[1:], norms[:-1]
    return count_true((one > _FACTOR * other) | (other > _FACTOR * one)) > _PAIRS * len(norms)


def strong_aggregates(A: Operator, norms: Array, size: int, modes: int, nodes: int, radius: int) -> Aggregates | None:
    """Return aggregates by strong couplings in one sweep; None if the stiffness does not jump, or if they are too small.

    Of ranks that share A each aggregates its own nodes by the couplings between these, if the stiffness jumps on any. Collective.

    Parameters
    ----------
    A : Operator
    norms : array, (nodes,)
        Frobenius norms of the diagonal blocks, of ``size`` unknowns.
    modes : int
        Columns of T of an aggregate.
    nodes, radius : int
        Nodes of an aggregate and its radius in edges, about, as for :func:`graph_aggregates`.
    """
    communicator = communicator_of(A)
    if not communicator.largest(float(stiffness_jumps(norms))):
        return None
    theta, graph, couplings, strong = STRONG if size == 1 else _STRONG_BLOCK, Graph(A.shape[0] // size), 0, 0

    def visit(rows: BlockRows) -> None:
        nonlocal couplings, strong
        rows = in_float64(rows)
        couplings += int(count_strong(rows, 0.0, norms).sum())  # without zeros, such as those of held unknowns
        strong += int(count_strong(rows, STRONG, norms).sum())
        graph.add(*strong_among(rows, theta, norms))

    with communicator.together():
        visit_rows(A, size, visit)
    of_all, weak = communicator.total(np.array([couplings, couplings - strong], dtype=np.float64))
    if weak <= _WEAK * of_all:
        return None
    with communicator.together():
        aggregates = graph_aggregates(*graph.arrays(), radius, nodes)
    count, unknowns = communicator.total(np.array([aggregates.count, A.shape[0]], dtype=np.float64))
    numbers = _NEIGHBOURS * count * modes**2
    exceeds = (
        8 * numbers * sharing_memory(A) > _SHARE_OF_FREE * A.device.free_nbytes() or numbers > _MOST_VECTORS * unknowns
    )
    return None if communicator.largest(float(exceeds)) else aggregates
