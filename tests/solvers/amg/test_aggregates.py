"""Aggregates cover all nodes, are connected and about as large as wanted, whatever they are made from."""

import numpy as np
import pytest
import scipy.sparse
from scipy.sparse.csgraph import connected_components

from penstock.fem import Cantilever
from penstock.solvers.amg import aggregates as aggregates_module
from penstock.solvers.amg.aggregates import (
    box_aggregates,
    coordinate_aggregates,
    graph_aggregates,
    numbered_aggregates,
)
from penstock.spmv import InputError


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


@pytest.mark.parametrize("seed", range(3))
def test_bisection_makes_equal_compact_parts(seed):
    points = np.random.default_rng(seed).random((4000, 3)) * [10, 1, 1]

    aggregates = coordinate_aggregates(points, 125)

    assert aggregates.count == 32
    assert sizes_of(aggregates).max() - sizes_of(aggregates).min() <= 2
    extents = [np.ptp(points[aggregates.of_node == number], axis=0).max() for number in range(aggregates.count)]
    assert max(extents) < 1.5


_GRID = np.stack(np.meshgrid(*[np.arange(12.0)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)


@pytest.mark.parametrize(
    "points",
    [
        np.random.default_rng(0).random((5000, 3)),
        _GRID,
        _GRID[:, :2],
        np.ones((3000, 3)),
        1e15 + _GRID,
        1e307 * (_GRID - 5.5) * 3,  # extents that overflow
        np.where(_GRID == 3, 1e300, _GRID),
    ],
    ids=["random", "grid", "doubled", "one point", "far away", "overflow", "unlike"],
)
def test_all_threads_together_cut_as_each_alone_does(points, monkeypatch):
    alone = coordinate_aggregates(points, 60)

    monkeypatch.setattr(aggregates_module, "_LARGE", 100)

    assert np.array_equal(coordinate_aggregates(points, 60).of_node, alone.of_node)


def test_runs_of_ascending_nodes_are_cut_as_others():
    line = np.arange(200_000.0)  # whose middle nodes would be the worst pivots: this took a minute with them
    for points in (np.concatenate([line, line]), np.concatenate([line, line[::-1]])):
        assert sizes_of(coordinate_aggregates(points[:, None], 27)).max() <= 28


def test_parts_do_not_depend_on_the_numbers_of_the_nodes():
    order = np.random.default_rng(1).permutation(len(_GRID))
    one, other = coordinate_aggregates(_GRID, 60).of_node, coordinate_aggregates(_GRID[order], 60).of_node

    assert np.array_equal(one[order], other)


def test_bisection_of_a_few_points_is_one_aggregate():
    assert coordinate_aggregates(np.zeros((7, 2)), 125).count == 1


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


def test_given_numbers_may_have_gaps_but_not_another_length():
    assert numbered_aggregates([7, 3, 7, 9], 4).of_node.tolist() == [1, 0, 1, 2]
    with pytest.raises(InputError, match="4 whole numbers"):
        numbered_aggregates([7, 3, 7], 4)
    with pytest.raises(InputError, match="whole numbers"):
        numbered_aggregates([0.5, 1, 2, 3], 4)


@pytest.mark.parametrize("coordinates", [np.zeros((0, 3)), np.zeros(5), np.array([[0.0, np.nan]])])
def test_coordinates_that_are_none_are_refused(coordinates):
    with pytest.raises(InputError, match="coordinates must be finite"):
        coordinate_aggregates(coordinates, 125)
