"""The box mesh: its numbering, its connections counted in closed form, and the cut into slabs."""

import itertools
import tracemalloc

import numpy as np
import pytest

from penstock.fem import BoxMesh, Cantilever
from penstock.spmv import InputError

# Ordered pairs of nodes that share an element, in cubes: (3 n - 2)^3.
CUBES = {96: 23_393_656, 128: 55_742_968, 160: 109_215_352, 256: 449_455_096}
SMALL = [(2, 2, 2), (4, 3, 5), (2, 5, 3), (7, 2, 2), (3, 3, 3)]
# A node is connected with at most 27, so a bound that lies on a node misses its target by less than that; the targets
# themselves are rounded down to whole connections.
MOST_CONNECTIONS_OF_A_NODE = 27
ROUNDING_OF_THE_MEAN = 1
# Counting a cube's 4.5e8 connections one by one, as bits even, would take fifty times this.
CLOSED_FORM_NBYTES = 1 << 20


def connections_of_each_node(counts: tuple[int, int, int]) -> np.ndarray:
    """Count, for every node, the nodes at most one step away along each direction, by comparing all pairs."""
    index = np.array(list(itertools.product(*map(range, counts))))
    return (abs(index[:, None] - index).max(axis=2) <= 1).sum(axis=1)


@pytest.mark.parametrize(("nodes", "connections"), CUBES.items())
@pytest.mark.parametrize("dof", [1, 3, 6])
def test_the_entries_of_a_cubes_matrix_are_counted_without_forming_anything(nodes, connections, dof):
    cube = Cantilever(nodes=nodes, dof=dof)

    tracemalloc.start()
    counted, stored = cube.mesh.connections, cube.nnz
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert counted == connections
    assert stored == connections * {1: 1, 3: 9, 6: 36}[dof]
    assert peak < CLOSED_FORM_NBYTES


@pytest.mark.parametrize("counts", SMALL)
def test_connections_before_a_node_agree_with_counting_pairs(counts):
    mesh = BoxMesh(counts)
    reference = [0, *np.cumsum(connections_of_each_node(counts))]

    before = [mesh.connections_before(node) for node in range(mesh.node_count + 1)]

    assert before == reference
    assert mesh.connections == reference[-1]


@pytest.mark.parametrize("counts", SMALL)
def test_every_cut_of_a_small_mesh_covers_it_in_balanced_parts(counts):
    mesh = BoxMesh(counts)

    for parts in range(1, mesh.node_count + 1):
        assert_balanced(mesh, mesh.cut(parts), parts)


@pytest.mark.parametrize("counts", [(128, 128, 128), (513, 9, 9), (2, 300, 200), (300, 200, 2)])
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 64, 1000])
def test_a_cut_of_a_large_mesh_covers_it_in_balanced_parts(counts, parts):
    mesh = BoxMesh(counts)

    assert_balanced(mesh, mesh.cut(parts), parts)


def assert_balanced(mesh: BoxMesh, bounds: list[int], parts: int) -> None:
    connections = np.diff([mesh.connections_before(bound) for bound in bounds])
    assert len(bounds) == parts + 1
    assert (bounds[0], bounds[-1]) == (0, mesh.node_count)
    assert bounds == sorted(bounds)
    if mesh.node_counts[0] % parts == 0:  # whole planes, of which those at the ends have fewer connections
        assert len(set(np.diff(bounds))) == 1
        return
    imbalance = abs(connections - mesh.connections / parts).max()
    assert imbalance < MOST_CONNECTIONS_OF_A_NODE + ROUNDING_OF_THE_MEAN


@pytest.mark.parametrize("parts", [0, -1, 28])
def test_a_cut_into_no_parts_or_more_parts_than_nodes_is_refused(parts):
    with pytest.raises(InputError, match=rf"27 nodes into {parts} parts"):
        BoxMesh(3).cut(parts)


def test_z_runs_fastest_in_the_numbering_and_x_slowest():
    mesh = BoxMesh((3, 4, 5), (2.0, 6.0, 2.0))

    coordinates = mesh.coordinates()

    for ix, iy, iz in itertools.product(range(3), range(4), range(5)):
        # Spacings 1, 2 and 0.5 are exact, so the coordinates are too.
        assert coordinates[(ix * 4 + iy) * 5 + iz].tolist() == [ix * 1.0, iy * 2.0, iz * 0.5]


def test_one_length_makes_cubic_elements_and_is_that_along_x():
    mesh = BoxMesh((9, 5, 3), 4.0)

    assert mesh.spacing == (0.5, 0.5, 0.5)
    assert mesh.side_lengths == (4.0, 2.0, 1.0)
    assert mesh.element_counts == (8, 4, 2)


def test_one_number_of_nodes_makes_a_cube():
    assert BoxMesh(4, 3.0) == BoxMesh((4, 4, 4), (3.0, 3.0, 3.0))


def test_numpy_numbers_are_as_good_as_pythons():
    expected = BoxMesh((4, 4, 4), (2.0, 2.0, 2.0))

    assert BoxMesh(np.int64(4), np.float32(2)) == expected
    assert BoxMesh(np.array([4, 4, 4]), np.array([2.0, 2.0, 2.0])) == expected


BAD_NODES = [
    0,
    1,
    -3,
    2.5,
    4.0,
    True,
    float("nan"),
    None,
    "many",
    (),
    (3,),
    (3, 3),
    (3, 3, 3, 3),
    (4, 1, 4),
    (4, 4, 0),
    (-4, 4, 4),
    (2.5, 3, 3),
    (4.0, 3, 3),
    (3, float("nan"), 3),
    (float("inf"), 3, 3),
    (3, True, 3),
    (3, 3, 3, True),
]


@pytest.mark.parametrize("nodes", BAD_NODES, ids=repr)
def test_nodes_that_are_not_whole_numbers_of_at_least_two_are_refused(nodes):
    with pytest.raises(InputError, match="at least 2") as refusal:
        BoxMesh(nodes)

    assert repr(nodes) in str(refusal.value)


BAD_LENGTHS = [
    0,
    0.0,
    -1.0,
    float("nan"),
    float("inf"),
    True,
    None,
    "long",
    "123",
    (),
    (1.0,),
    (1.0, 1.0),
    (1.0, 1.0, 1.0, 1.0),
    (1.0, 0.0, 1.0),
    (1.0, 1.0, -2.0),
    (float("nan"), 1.0, 1.0),
    (1.0, float("inf"), 1.0),
    (1.0, "long", 1.0),
]


@pytest.mark.parametrize("lengths", BAD_LENGTHS, ids=repr)
def test_lengths_that_are_not_positive_numbers_are_refused(lengths):
    with pytest.raises(InputError, match="positive") as refusal:
        BoxMesh(3, lengths)

    assert repr(lengths) in str(refusal.value)


def test_a_cantilever_refuses_a_bad_mesh_when_it_is_made():
    with pytest.raises(InputError, match="at least 2"):
        Cantilever(nodes=(9, 1, 3))
    with pytest.raises(InputError, match="positive"):
        Cantilever(nodes=3, lengths=-1.0)


@pytest.mark.parametrize("dof", [0, 2, 7, "3"])
def test_a_cantilever_knows_only_one_three_and_six_degrees_of_freedom(dof):
    with pytest.raises(InputError, match=r"1 \(conduction\), 3 \(elasticity\) or 6 \(micropolar\)"):
        Cantilever(nodes=3, dof=dof)
