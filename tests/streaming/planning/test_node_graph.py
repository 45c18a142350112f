"""The graph of the nodes of a matrix is that of the definition, whatever its rows are like."""

import numpy as np
import pytest
import scipy.sparse

from penstock.streaming import LevelOrder
from penstock.streaming.planning.node_graph import node_graph


def by_definition(A, size):
    dense = np.abs(A.toarray()) + (np.asarray(A.toarray()) != 0)
    nodes = A.shape[0] // size
    return dense.reshape(nodes, size, nodes, size).sum(axis=(1, 3)) > 0


def with_pattern(kind, nodes, size):
    rng = np.random.default_rng(nodes)
    rows = nodes * size
    A = scipy.sparse.random_array((rows, rows), density=min(1.0, 6 / rows), rng=rng, format="csr")
    if kind == "dense blocks":
        A = scipy.sparse.kron(
            scipy.sparse.random_array((nodes, nodes), density=min(1.0, 4 / nodes), rng=rng), np.ones((size, size))
        ).tocsr()
    A.sort_indices()
    if kind == "unsorted":
        for row in range(rows):
            part = slice(A.indptr[row], A.indptr[row + 1])
            A.indices[part] = A.indices[part][::-1]
            A.data[part] = A.data[part][::-1]
    return A


@pytest.mark.parametrize("kind", ["any", "dense blocks", "unsorted"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("nodes", [1, 7, 300])
def test_nodes_are_neighbours_where_any_of_their_rows_couple(kind, size, nodes):
    A = with_pattern(kind, nodes, size)
    graph = node_graph(A.indptr, A.indices, size)
    np.testing.assert_array_equal(graph.toarray() > 0, by_definition(A, size))
    if size > 1:
        assert graph.has_canonical_format


def test_an_order_moves_rows_of_as_many_entries_in_other_columns():
    # The rows of a node have as many entries each, in columns that differ.
    columns = np.array([0, 3, 1, 2, 0, 2, 1, 3])
    A = scipy.sparse.csr_array((np.arange(1.0, 9.0), columns, [0, 2, 4, 6, 8]), shape=(4, 4))
    order = LevelOrder(np.array([1, 0]), block_size=2)
    np.testing.assert_array_equal(order.matrix(A).toarray(), A.toarray()[order.rows][:, order.rows])
