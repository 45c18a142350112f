"""Aggregates cover all nodes, are connected and about as large as wanted, whether of boxes or of a graph."""

import numpy as np
import pytest
import scipy.sparse
from kernel_targets import TARGETS
from scipy.sparse.csgraph import connected_components

from penstock.fem import Cantilever
from penstock.solvers import SmoothedAggregationSpec, smoothed_aggregation
from penstock.solvers.amg.aggregates import (
    box_aggregates,
    graph_aggregates,
    lattice_aggregates,
    numbered_aggregates,
)
from penstock.solvers.amg.bisection import bisected
from penstock.solvers.amg.modes import rigid_body_modes
from penstock.spmv import InputError
from penstock.spmv.compilation.table import find_kernel


def node_graph(nodes):
    """The pattern of a mesh's nodes."""
    A = Cantilever(nodes=nodes, dof=1).matrix("csr")
    return A.row_offsets, A.column_indices


def sizes_of(aggregates):
    return np.bincount(aggregates.of_node, minlength=aggregates.count)


@pytest.mark.parametrize(
    ("counts", "grid"),
    [
        ((25, 25, 25), (5, 5, 5)),
        ((24, 9, 8), (4, 2, 2)),
        ((7, 3, 1), (1, 1, 1)),
        ((10, 11), (2, 2)),
        ((64, 5, 14), (12, 1, 2)),
    ],
)
def test_boxes_are_cut_evenly(counts, grid):
    aggregates = box_aggregates(counts, 5)

    assert aggregates.grid == grid
    assert aggregates.count == np.prod(grid)
    numbers = aggregates.of_node.reshape(counts)
    for axis, boxes in enumerate(grid):
        along = np.moveaxis(numbers, axis, 0)[:, *([0] * (len(counts) - 1))]
        widths = np.unique(along, return_counts=True)[1]
        assert len(widths) == boxes
        assert widths.max() - widths.min() <= 1
        assert boxes <= 2 or widths.min() >= 5


def test_boxes_that_couple_with_others_than_neighbours_are_not_made():
    for count in range(15, 60):
        widths = np.bincount(box_aggregates((count,), 5).of_node)
        assert widths.min() >= 5


def lattice_of(counts, spacings=(1.0, 1.0, 1.0)):
    """The nodes of a lattice, the last axis fastest."""
    axes = [spacing * np.arange(count) for count, spacing in zip(counts, spacings, strict=False)]
    return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(counts))


@pytest.mark.parametrize("counts", [(12, 10, 11), (24, 35), (11, 6, 5), (25, 25, 1), (260,), (20_000,)])
@pytest.mark.parametrize("noise", [1e-15, 1e-5])
@pytest.mark.parametrize("target", TARGETS)
def test_nodes_that_fill_a_lattice_in_any_order_become_its_boxes(target, counts, noise):
    points = 0.1 * lattice_of(counts) - 0.3
    rng = np.random.default_rng(0)
    order = rng.permutation(len(points))
    points = points[order] + 0.1 * noise * rng.uniform(-1, 1, points.shape)  # as computed in several ways

    with target.running():
        aggregates = lattice_aggregates(target.put(points), 125)
        found = target.get(aggregates.of_node)

    boxes = box_aggregates(counts, round(125 ** (1 / sum(count > 1 for count in counts))))
    assert np.array_equal(found, boxes.of_node[order])
    assert (aggregates.grid, aggregates.count) == (boxes.grid, boxes.count)


_CUBE = lattice_of((10, 10, 10))


def test_empty_boxes_of_a_lattice_are_left_out():
    """As in an image of bone; then coarser levels, too, are not cut as those of a structured mesh."""
    inside = np.abs(_CUBE - 4.5).max(axis=1) > 0.6  # a cube without its core
    hollow = lattice_aggregates(_CUBE[inside], 27)
    empty = lattice_aggregates(_CUBE[(_CUBE < 3).any(axis=1)], 27)

    assert (hollow.grid, hollow.count) == ((3, 3, 3), 27)
    assert empty.grid is None
    assert empty.count == 27 - 2**3
    assert np.array_equal(np.unique(empty.of_node), np.arange(19))


def test_boxes_of_a_small_body_are_not_much_larger_than_wanted():
    assert lattice_aggregates(lattice_of((14, 14, 14)), 125).grid == (3, 3, 3)
    assert lattice_aggregates(lattice_of((34, 34, 34)), 125).grid == (7, 7, 7)
    assert lattice_aggregates(lattice_of((64, 64, 64)), 125).grid == (12, 12, 12)


def test_a_far_node_is_no_lattice():
    """Beside it, all others are on a plane, but that is thick."""
    assert lattice_aggregates(np.concatenate([_CUBE, np.full((1, 3), 1e8)]), 125) is None


def test_boxes_of_a_thin_body_are_longer():
    aggregates = lattice_aggregates(lattice_of((100, 20, 2)), 125)

    assert aggregates.count <= 2 * 4000 / 125
    assert aggregates.grid[2] == 1


@pytest.mark.parametrize(
    "points",
    [
        np.random.default_rng(0).random((1000, 3)),
        _CUBE * [1, 1, 0.1],
        _CUBE**1.5,
        lattice_of((500, 2), (1.0, 0.1)),
        _CUBE[(_CUBE == 0).sum(axis=1) >= 2],
        lattice_of((400, 2, 2)),
        3e307 * (_CUBE - 4.5),
        _CUBE + 0.01 * np.random.default_rng(0).random((1000, 3)),
        np.tile(_CUBE, (2, 1)),
        np.ones((1000, 3)),
    ],
    ids=[
        "scattered", "flat cells", "cells of several sizes", "a flat layer", "a frame", "a chain", "too far apart",
        "thick planes", "all twice", "one place",
    ],
)  # fmt: skip
def test_other_nodes_are_left_to_bisection(points):
    assert lattice_aggregates(np.ascontiguousarray(points), 125) is None


def test_boxes_of_a_lattice_couple_with_fewer_others_than_parts_of_a_bisection():
    beam = Cantilever(nodes=(33, 32, 32), dof=1)
    A, points = beam.matrix("csr"), beam.mesh.coordinates()
    parts = bisected(points, 125).of_node

    boxes, others = (
        smoothed_aggregation(A, coordinates=points, aggregates=of_node, smoothing=2).level.A
        for of_node in (None, parts)
    )

    assert 2 * boxes.column_indices.size / boxes.shape[0] < others.column_indices.size / others.shape[0]


@pytest.mark.parametrize("shuffled", [False, True])
def test_graph_aggregates_are_connected(shuffled):
    offsets, neighbours = node_graph((20, 15, 10))
    nodes = len(offsets) - 1
    graph = scipy.sparse.csr_array((np.ones(len(neighbours)), neighbours, offsets))
    if shuffled:
        order = np.random.default_rng(0).permutation(nodes)
        graph = graph[order][:, order].tocsr()

    aggregates = graph_aggregates(graph.indptr, graph.indices, 2, 125)

    assert aggregates.of_node.min() == 0
    assert (sizes_of(aggregates) > 0).all()
    assert np.median(sizes_of(aggregates)) > 40
    for number in range(aggregates.count):
        part = np.flatnonzero(aggregates.of_node == number)
        assert connected_components(graph[part][:, part])[0] == 1


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
