"""Aggregates of about three nodes a side, formed on the device of the graph."""

from __future__ import annotations

import numpy as np

from penstock.solvers.coarse.aggregates import Aggregates, graph_aggregates
from penstock.spmv import Array, device_of
from penstock.spmv.compilation.cuda_module import CudaSource, launch
from penstock.spmv.compilation.table import find_kernel, register_kernel

AGGREGATION_KERNELS = CudaSource("penstock.solvers.kernels", "aggregation.cu")

_SIDE, _ROOT = 3, 2


def aggregate_nodes(offsets: Array, columns: Array, active: Array, kind: str) -> Aggregates:
    """Return aggregates of the nodes of a graph in CSR, each a root with its neighbours and some of theirs.

    Nodes that are not ``active`` couple with no other and are put anywhere: they have no part in the coarse level. On a GPU by
    maximal independent sets of distance 2 (Bell, Dalton and Olson 2012), the same in every run; on a CPU by the passes of
    Vanek, Mandel and Brezina (1996).
    """
    aggregates: Aggregates = find_kernel("graph", "aggregates", kind)(offsets, columns, active)
    return aggregates


@register_kernel("graph", "aggregates", "cpu")
def _aggregates_cpu(offsets: Array, columns: Array, active: Array) -> Aggregates:
    return graph_aggregates(offsets, columns, 1, _SIDE**3)


@register_kernel("graph", "aggregates", "cuda")
def _aggregates_cuda(offsets: Array, columns: Array, active: Array) -> Aggregates:
    xp, nodes = device_of(offsets).xp, len(offsets) - 1
    keys, near, far = (xp.empty(nodes, dtype=np.uint64) for _ in range(3))
    count = np.int32(nodes)
    launch(AGGREGATION_KERNELS.function("make_keys"), nodes, 256, (count, active, keys))
    find_largest, decide = (AGGREGATION_KERNELS.function(name) for name in ("find_largest", "decide"))
    left = 1
    while left:
        open_ = xp.zeros(1, dtype=np.int32)
        launch(find_largest, nodes, 256, (count, offsets, columns, active, keys, near))
        launch(find_largest, nodes, 256, (count, offsets, columns, active, near, far))
        launch(decide, nodes, 256, (count, far, keys, open_))
        left = int(open_[0])
    roots = (keys >> np.uint64(62)) == _ROOT
    numbers = xp.cumsum(roots, dtype=np.int32)
    labels = xp.where(roots, numbers - 1, np.int32(-1)).astype(np.int32)
    for _ in range(3):  # active nodes are one or two edges from a root, and nodes beside them one more
        joined = xp.empty_like(labels)
        launch(
            AGGREGATION_KERNELS.function("join_aggregates"),
            nodes,
            256,
            (count, offsets, columns, active, labels, joined),
        )
        labels = joined
    # What is left has no active neighbours, and no part in the coarse level. By number, so that one aggregate does not get all.
    return Aggregates(xp.where(labels < 0, xp.maximum(numbers - 1, 0), labels))
