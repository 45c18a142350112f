"""Aggregates that are boxes are even, of about as many nodes as wanted, and made of lattices only."""

import numpy as np
import pytest
from kernel_targets import TARGETS

from penstock.fem import Cantilever
from penstock.solvers import smoothed_aggregation
from penstock.solvers.amg.bisection import bisected
from penstock.solvers.amg.boxes import box_aggregates, lattice_aggregates


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
