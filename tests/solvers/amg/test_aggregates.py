"""Aggregates of a graph cover all nodes, are connected and about as large as wanted."""

import numba
import numpy as np
import pytest
import scipy.sparse
from kernel_targets import TARGETS
from scipy.sparse.csgraph import connected_components

from penstock.fem import Cantilever
from penstock.solvers import SmoothedAggregationSpec, smoothed_aggregation
from penstock.solvers.amg import aggregates as aggregates_module
from penstock.solvers.amg import matrix_rows
from penstock.solvers.amg.aggregates import graph_aggregates, numbered_aggregates
from penstock.solvers.amg.modes import rigid_body_modes
from penstock.spmv import InputError
from penstock.spmv.compilation.table import find_kernel


def node_graph(nodes):
    """The pattern of a mesh's nodes."""
    A = Cantilever(nodes=nodes, dof=1).matrix("csr")
    return A.row_offsets, A.column_indices


def sizes_of(aggregates):
    return np.bincount(aggregates.of_node, minlength=aggregates.count)


@pytest.mark.parametrize("least_of_part", [aggregates_module._LEAST_OF_PART, 500])
@pytest.mark.parametrize("shuffled", [False, True])
def test_graph_aggregates_are_connected(shuffled, least_of_part, monkeypatch):
    """Those of parts too; a shuffled graph is not divided, as all of its nodes have neighbours elsewhere."""
    monkeypatch.setattr(aggregates_module, "_LEAST_OF_PART", least_of_part)
    monkeypatch.setattr(aggregates_module, "_PART_OF_REACH", 4)
    monkeypatch.setattr(aggregates_module, "_PIECE", 7)
    offsets, neighbours = node_graph((20, 15, 10))
    nodes = len(offsets) - 1
    graph = scipy.sparse.csr_array((np.ones(len(neighbours)), neighbours, offsets))
    if shuffled:
        order = np.random.default_rng(0).permutation(nodes)
        graph = graph[order][:, order].tocsr()
        graph.sort_indices()

    found = graph_aggregates(graph.indptr, graph.indices, 2, 125)

    assert aggregates_module._count_parts(graph.indptr, graph.indices) == (
        4 if least_of_part == 500 and not shuffled else 1
    )
    assert found.of_node.min() == 0
    assert (sizes_of(found) > 0).all()
    assert np.median(sizes_of(found)) > 40
    for number in range(found.count):
        part = np.flatnonzero(found.of_node == number)
        assert connected_components(graph[part][:, part])[0] == 1


def test_aggregates_do_not_depend_on_the_threads(monkeypatch):
    monkeypatch.setattr(aggregates_module, "_LEAST_OF_PART", 300)
    monkeypatch.setattr(aggregates_module, "_PART_OF_REACH", 2)
    graph, before, found = node_graph((20, 15, 10)), numba.get_num_threads(), []
    for threads in (1, 2):
        numba.set_num_threads(threads)
        found.append(graph_aggregates(*graph, 2, 125).of_node)
    numba.set_num_threads(before)

    assert aggregates_module._count_parts(*graph) > 2
    assert np.array_equal(*found)


@pytest.mark.parametrize("visited", [1, 1 << 30])
@pytest.mark.parametrize("name", ["symmetric_bsr", "csr"])
def test_the_graph_of_a_matrix_is_its_pattern(name, visited, monkeypatch):
    monkeypatch.setitem(matrix_rows._SLAB_NBYTES, "cpu", visited)
    A = Cantilever(nodes=(9, 8, 7), dof=3).matrix(name)

    offsets, neighbours = matrix_rows.graph_of(A, 3)

    entries = A.to_csr()
    if name == "csr":  # whose entries are gathered in blocks, without those that are zero
        entries.eliminate_zeros()
    pattern = entries.tobsr((3, 3)).sorted_indices()
    assert np.array_equal(offsets, pattern.indptr)
    assert np.array_equal(neighbours, pattern.indices)


def test_nodes_without_neighbours_are_gathered():
    """Clamped nodes are such: if each were an aggregate, coarser levels would not become smaller."""
    lonely = graph_aggregates(np.arange(8), np.arange(7), 2, 3)

    assert sizes_of(lonely).tolist() == [3, 3, 1]


def test_aggregates_follow_the_pattern_where_coordinates_are_given_too():
    beam = Cantilever(nodes=(9, 5, 5), dof=3)
    A, points = beam.matrix(), beam.mesh.coordinates()
    options = {"aggregate_nodes": 27, "smoothing": 1}
    by_pattern = smoothed_aggregation(A, coordinates=points, aggregates="pattern", **options).level.T.aggregates
    of_modes = smoothed_aggregation(A, rigid_body_modes(points, 3), **options).level.T.aggregates
    by_place = smoothed_aggregation(A, coordinates=points, **options).level.T.aggregates

    np.testing.assert_array_equal(by_pattern.of_node, of_modes.of_node)
    assert not np.array_equal(by_pattern.of_node, by_place.of_node)
    spec = SmoothedAggregationSpec(block_size=3, coordinates=points, aggregates="pattern", aggregate_nodes=27)
    assert spec.in_order(lambda vectors: vectors[::-1]).aggregates == "pattern"
    for make in (
        lambda: smoothed_aggregation(A, aggregates="graph"),
        lambda: SmoothedAggregationSpec(aggregates="graph"),
    ):
        with pytest.raises(InputError, match="aggregates must be 'pattern'"):
            make()


def test_given_numbers_may_have_gaps_but_not_another_length():
    assert numbered_aggregates([7, 3, 7, 9], 4).of_node.tolist() == [1, 0, 1, 2]
    with pytest.raises(InputError, match="4 whole numbers"):
        numbered_aggregates([7, 3, 7], 4)
    with pytest.raises(InputError, match="whole numbers"):
        numbered_aggregates([0.5, 1, 2, 3], 4)


@pytest.mark.parametrize("target", TARGETS[1:])
def test_aggregates_of_a_gpu_are_balls_around_roots_that_are_far_from_each_other(target):
    offsets, columns = node_graph((9, 8, 7))
    offsets, nodes = offsets.astype(np.int64), len(offsets) - 1
    active = np.random.default_rng(0).random(nodes) < 0.9
    active[-20:] = False  # also behind the last root

    with target.running():
        there = [target.put(array) for array in (offsets, columns, active)]
        aggregates = find_kernel("graph", "aggregates", "cuda")(*there)

    of_node = target.get(aggregates.of_node)
    assert sorted(set(of_node[active].tolist())) == list(range(aggregates.count))
    assert of_node.min() == 0
    assert of_node.max() < aggregates.count
    couplings = scipy.sparse.csr_array((np.ones(len(columns)), columns, offsets), shape=(nodes, nodes))
    ways = scipy.sparse.diags_array(active.astype(float)) @ couplings @ scipy.sparse.diags_array(active.astype(float))
    reach = (ways @ ways @ ways @ ways).toarray() > 0  # from a root at most two edges, and as many back
    for number in range(aggregates.count):
        members = np.flatnonzero((of_node == number) & active)
        assert reach[np.ix_(members, members)].all()


@pytest.mark.parametrize("target", TARGETS[1:])
def test_nodes_none_of_which_is_active_are_one_aggregate(target):
    offsets, columns = node_graph((3, 3, 2))

    with target.running():
        there = [target.put(array) for array in (offsets.astype(np.int64), columns, np.zeros(18, dtype=bool))]
        aggregates = find_kernel("graph", "aggregates", "cuda")(*there)

    assert aggregates.count == 1
    assert not target.get(aggregates.of_node).any()


def random_graph(nodes, neighbours, seed):
    """A symmetric pattern with its diagonal, and some nodes without neighbours: offsets and columns."""
    rng = np.random.default_rng(seed)
    A = scipy.sparse.random_array((nodes, nodes), density=neighbours / nodes, rng=rng, format="csr")
    coupled = scipy.sparse.diags_array((rng.random(nodes) < 0.9).astype(float))
    pattern = (coupled @ (A + A.T) @ coupled + scipy.sparse.eye_array(nodes)).tocsr()
    pattern.sort_indices()
    return pattern.indptr, pattern.indices.astype(np.int32)


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("offset_type", [np.int32, np.int64])
@pytest.mark.parametrize("of", ["mesh", "sparse graph", "dense graph", "lonely nodes", "nothing"])
def test_balls_of_a_gpu_are_those_of_the_host(target, offset_type, of):
    graphs = {
        "mesh": lambda: node_graph((11, 8, 7)),
        "sparse graph": lambda: random_graph(700, 1.5, 1),
        "dense graph": lambda: random_graph(400, 20, 2),
        "lonely nodes": lambda: (np.arange(76), np.arange(75, dtype=np.int32)),
        "nothing": lambda: (np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int32)),
    }
    offsets, columns = graphs[of]()
    expected = graph_aggregates(offsets, columns, 1, 27)

    with target.running():
        there = target.put(offsets.astype(offset_type)), target.put(columns)
        found = find_kernel("graph", "balls", "cuda")(*there, 1, 27)

    assert np.array_equal(target.get(found.of_node), expected.of_node)
    assert found.count == expected.count


@pytest.mark.parametrize("target", TARGETS[1:])
def test_long_chains_are_left_to_the_host(target):
    """Along a path numbered from its end, two rounds pass for every root."""
    offsets, columns = path_graph(300)

    with target.running():
        assert find_kernel("graph", "balls", "cuda")(target.put(offsets), target.put(columns), 1, 27) is None


@pytest.mark.parametrize("target", TARGETS[1:])
def test_aggregates_of_a_gpu_cover_a_graph_whose_pattern_is_not_symmetric(target):
    rng = np.random.default_rng(4)
    pattern = (scipy.sparse.random_array((200, 200), density=0.02, rng=rng) + scipy.sparse.eye_array(200)).tocsr()
    pattern.sort_indices()

    with target.running():
        there = target.put(pattern.indptr.astype(np.int64)), target.put(pattern.indices.astype(np.int32))
        found = find_kernel("graph", "balls", "cuda")(*there, 1, 27)

    assert np.array_equal(np.unique(target.get(found.of_node)), np.arange(found.count))


def path_graph(nodes):
    diagonals = [np.ones(nodes - 1), np.ones(nodes), np.ones(nodes - 1)]
    path = scipy.sparse.diags_array(diagonals, offsets=[-1, 0, 1]).tocsr()
    return path.indptr.astype(np.int64), path.indices.astype(np.int32)
