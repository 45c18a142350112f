"""Bisection makes equal and compact parts, the same on every device and for any numbers of the nodes."""

import numpy as np
import pytest
from kernel_targets import TARGETS

from penstock.solvers.amg import bisection
from penstock.solvers.amg.bisection import bisected, coordinate_aggregates
from penstock.spmv import InputError
from penstock.spmv.compilation.table import find_kernel


def sizes_of(aggregates):
    return np.bincount(aggregates.of_node, minlength=aggregates.count)


@pytest.mark.parametrize("seed", range(3))
def test_bisection_makes_equal_compact_parts(seed):
    points = np.random.default_rng(seed).random((4000, 3)) * [10, 1, 1]

    aggregates = bisected(points, 125)

    assert aggregates.count == 32
    assert sizes_of(aggregates).max() - sizes_of(aggregates).min() <= 2
    extents = [np.ptp(points[aggregates.of_node == number], axis=0).max() for number in range(aggregates.count)]
    assert max(extents) < 1.5


_GRID = np.stack(np.meshgrid(*[np.arange(12.0)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)


_BODIES = {
    "random": np.random.default_rng(0).random((5000, 3)),
    "grid": _GRID,
    "doubled": _GRID[:, :2],
    "one point": np.ones((3000, 3)),
    "far away": 1e15 + _GRID,
    "overflow": 1e307 * (_GRID - 5.5) * 3,  # extents that overflow
    "tiny": 1e-307 * np.random.default_rng(2).random((2000, 3)),
    "smallest": 5e-324 * _GRID,
    "unlike": np.where(_GRID == 3, 1e300, _GRID),
    "line": np.linspace(1, 0, 1000)[:, None],
    "signed zeros": np.where(_GRID < 6, -0.0, 0.0) * np.sign(_GRID - 3),
}


@pytest.mark.parametrize("body", _BODIES)
def test_all_threads_together_cut_as_each_alone_does(body, monkeypatch):
    points = _BODIES[body]
    alone = bisected(points, 60)

    monkeypatch.setattr(bisection, "_LARGE", 100)

    assert np.array_equal(bisected(points, 60).of_node, alone.of_node)


@pytest.mark.parametrize(("size", "wide"), [(1, False), (60, False), (60, True), (10_000, False)])
@pytest.mark.parametrize("body", _BODIES)
@pytest.mark.parametrize("target", TARGETS)
def test_all_devices_make_the_same_parts(target, body, size, wide, monkeypatch):
    """Also with keys of 64 bits, which a GPU sorts where there are many nodes."""
    if wide:
        monkeypatch.setattr(bisection, "INT32_MAX", 0)
    points = _BODIES[body]
    expected = bisected(points, size)

    with target.running():
        levels, starts = bisection._levels(len(points), size)
        of_node = find_kernel("points", "bisect", target.device_kind)(
            target.put(np.ascontiguousarray(points)), levels, starts
        )
        found = target.get(of_node)

    assert np.array_equal(found, expected.of_node)
    assert expected.count == len(starts) == found.max() + 1


def test_runs_of_ascending_nodes_are_cut_as_others():
    line = np.arange(200_000.0)  # whose middle nodes would be the worst pivots: this took a minute with them
    for points in (np.concatenate([line, line]), np.concatenate([line, line[::-1]])):
        assert sizes_of(bisected(points[:, None], 27)).max() <= 28


def test_parts_do_not_depend_on_the_numbers_of_the_nodes():
    order = np.random.default_rng(1).permutation(len(_GRID))
    one, other = bisected(_GRID, 60).of_node, bisected(_GRID[order], 60).of_node

    assert np.array_equal(one[order], other)


def test_bisection_of_a_few_points_is_one_aggregate():
    assert coordinate_aggregates(np.zeros((7, 2)), 125).count == 1


@pytest.mark.parametrize(
    "coordinates",
    [np.zeros((0, 3)), np.zeros((5, 0)), np.zeros(5), np.array([[0.0, np.nan]]), np.zeros((5, 2)) + 1j],
    ids=["no nodes", "no columns", "one dimension", "NaN", "complex"],
)
def test_coordinates_that_are_none_are_refused(coordinates):
    with pytest.raises(InputError, match="coordinates must be finite"):
        coordinate_aggregates(coordinates, 125)


@pytest.mark.parametrize("size", [0, -1, float("nan")])
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises(InputError, match=f"size must be a positive number of nodes, not {size}"):
        coordinate_aggregates(_GRID, size)
