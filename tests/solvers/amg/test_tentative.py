"""The transfer to a coarse level agrees with dense matrices, on every kind of device."""

import numpy as np
import pytest
from kernel_targets import TARGETS, gpu_count

from penstock.solvers.amg.aggregates import Aggregates
from penstock.solvers.amg.grid_points import GridPoints
from penstock.solvers.amg.modes import rigid_body_modes
from penstock.solvers.amg.tentative import PackedTentative, RigidTentative, StoredTentative
from penstock.spmv import CPU, Device
from penstock.spmv.compilation.table import find_kernel


def scattered(nodes, count, seed=0):
    """Aggregates of different sizes whose nodes are scattered, among them one of a single node."""
    of_node = np.random.default_rng(seed).integers(1, count, nodes)
    of_node[nodes // 2] = 0
    _, of_node = np.unique(of_node, return_inverse=True)
    return Aggregates(of_node.astype(np.int32))


def transfer(size, modes, nodes=90, count=7):
    rng = np.random.default_rng(size + modes)
    candidates = rng.standard_normal((nodes * size, modes))
    free = rng.random(nodes * size) > 0.1
    return StoredTentative(candidates, free, scattered(nodes, count), size, CPU), candidates * free[:, None]


def dense(T):
    matrix = np.zeros((len(T.basis), T.unknowns))
    for node, aggregate in enumerate(T.of_node):
        rows = slice(node * T.block_size, (node + 1) * T.block_size)
        matrix[rows, aggregate * T.modes : (aggregate + 1) * T.modes] = T.rows(node, node + 1).blocks[0]
    return matrix


def members(T):
    order = np.argsort(T.of_node, kind="stable").astype(np.int32)
    return np.searchsorted(T.of_node[order], np.arange(T.aggregates.count + 1)).astype(np.int64), order


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("size", "modes"), [(1, 1), (3, 6), (6, 6), (2, 3), (3, 18)])
@pytest.mark.parametrize("vectors", [None, 1, 3, 8, 40])
def test_prolongation_and_restriction(target, size, modes, vectors):
    T, _ = transfer(size, modes)
    rng, shape = np.random.default_rng(3), () if vectors is None else (vectors,)
    coarse, fine = rng.standard_normal((T.unknowns, *shape)), rng.standard_normal((len(T.basis), *shape))
    offsets, order = members(T)

    with target.running():
        kind, put = target.device_kind, target.put
        up, down = put(np.full_like(fine, np.nan)), put(np.full_like(coarse, np.nan))
        basis = put(T.basis)
        find_kernel("aggregates", "prolong", kind)(put(T.of_node), basis, put(coarse), up)
        find_kernel("aggregates", "restrict", kind)(put(offsets), put(order), basis, put(fine), down)

    assert np.allclose(target.get(up), dense(T) @ coarse, atol=1e-14)
    assert np.allclose(target.get(down), dense(T).T @ fine, atol=1e-13)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("size", "modes"), [(1, 1), (3, 6), (6, 6), (2, 3), (3, 18)])
def test_a_basis_is_orthonormal_and_spans_what_was_given(target, size, modes):
    T, candidates = transfer(size, modes)
    candidates[:, -1] = candidates[:, 0] * (3.0 if modes > 1 else 1.0)  # a dependent mode adds nothing
    offsets, order = members(T)
    factors = np.zeros((T.aggregates.count, modes, modes))

    with target.running():
        basis, on_target = target.put(candidates.copy()), target.put(factors)
        find_kernel("aggregates", "orthonormalise", target.device_kind)(
            target.put(offsets), target.put(order), basis, on_target
        )
    T.basis, factors = target.get(basis), target.get(on_target)

    matrix = dense(T)
    present = np.einsum("aii->ai", factors).reshape(-1) > 0
    if modes > 1:
        assert not present.reshape(-1, modes)[:, -1].any()
    gram = matrix.T @ matrix
    assert np.allclose(gram, np.diag(present), atol=1e-13)
    assert np.allclose(matrix @ factors.reshape(T.unknowns, modes), candidates, atol=1e-12)


def rigid_body(size, nodes=90, count=7):
    """Nodes in space, of which some unknowns are held; one aggregate is a single node, one a line, one is wholly held."""
    rng = np.random.default_rng(size)
    points, free = 10 + rng.random((nodes, 3)), rng.random((nodes, size)) > 0.1
    aggregates = scattered(nodes, count)
    line = aggregates.of_node == 2
    points[line] = np.array([1.0, 2.0, 3.0]) + np.arange(line.sum())[:, None] * np.array([0.5, -1.0, 0.25])
    free[aggregates.of_node == 3] = False
    return points - points.mean(axis=0), free.reshape(-1), aggregates


def on_target(target, size, action):
    """Return the results of ``action(T)`` for T computed from coordinates by the kernels of a target."""
    points, free, aggregates = rigid_body(size)
    device = Device("cuda") if target.name == "gpu" else CPU
    with target.running():
        T = RigidTentative(points, free, aggregates, size, device)
        return [target.get(array) for array in action(T)]


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("size", [3, 6])
def test_a_basis_computed_from_coordinates_is_orthonormal_and_spans_the_rigid_motions(target, size):
    points, free, aggregates = rigid_body(size)

    blocks, candidates, missing, of_node = on_target(
        target, size, lambda T: (T.rows(0, 90).blocks, T.candidates, T.missing, T.of_node)
    )

    matrix = np.zeros((90 * size, len(candidates)))
    for node, aggregate in enumerate(of_node):
        matrix[node * size : (node + 1) * size, 6 * aggregate : 6 * (aggregate + 1)] = blocks[node]
    motions = rigid_body_modes(points, size) * free[:, None]
    assert np.allclose(matrix.T @ matrix, np.diag(~missing), atol=1e-13)
    assert np.allclose(matrix @ candidates, motions, atol=1e-11)
    ranks = [np.linalg.matrix_rank(motions[np.repeat(of_node == a, size)], tol=1e-9) for a in range(aggregates.count)]
    assert (~missing).reshape(-1, 6).sum(axis=1).tolist() == ranks
    if size == 3:
        assert ranks[0] <= 3
        assert ranks[2] <= 5
        assert ranks[3] == 0


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("size", [3, 6])
@pytest.mark.parametrize("vectors", [None, 1, 3, 40])
def test_transfers_computed_from_coordinates_agree_with_their_blocks(target, size, vectors):
    rng, shape = np.random.default_rng(3), () if vectors is None else (vectors,)
    coarse, fine = rng.standard_normal((42, *shape)), rng.standard_normal((90 * size, *shape))

    def transfers(T):
        up, down = target.put(np.full_like(fine, np.nan)), target.put(np.full_like(coarse, np.nan))
        T.prolong(target.put(coarse), up)
        T.restrict(target.put(fine), down)
        return up, down, T.rows(0, 40).blocks, T.rows(40, 90).blocks, T.of_node

    up, down, *blocks, of_node = on_target(target, size, transfers)

    matrix = np.zeros((90 * size, 42))
    for node, block in enumerate(np.concatenate(blocks)):
        matrix[node * size : (node + 1) * size, 6 * of_node[node] : 6 * (of_node[node] + 1)] = block
    # Motions about the origin that cancel on an aggregate: the rounding of one part in 1e16 grows by their sizes.
    assert np.allclose(up, matrix @ coarse, atol=1e-11)
    assert np.allclose(down, matrix.T @ fine, atol=1e-11)


GPU = (pytest.mark.gpu, pytest.mark.skipif(gpu_count() == 0, reason="no CUDA device"))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("vectors", [None, 3])
@pytest.mark.parametrize(("size", "modes", "piece"), [(1, 5, 1), (3, 9, 3), (2, 4, 2)])
def test_aggregates_with_columns_of_their_own_number(size, modes, piece, vectors, device):
    """Against the columns of the padded T that are used."""
    there = Device.parse(device)
    padded, candidates = transfer(size, modes)
    padded = StoredTentative(candidates, np.ones(len(candidates), dtype=bool), padded.aggregates, size, there)
    count = padded.aggregates.count
    columns = np.random.default_rng(5).integers(1, modes + 1, count)
    T = PackedTentative(padded, columns, piece)

    used = -(-columns // piece) * piece
    kept = np.concatenate([one * modes + np.arange(number) for one, number in enumerate(used)])
    of_node, basis = there.to_host(padded.of_node), there.to_host(padded.basis)
    whole = np.zeros((len(basis), count * modes))
    for row in range(len(basis)):
        first = of_node[row // size] * modes
        whole[row, first : first + modes] = basis[row]
    expected = whole[:, kept]

    assert (T.unknowns, T.modes, T.aggregates.count) == (len(kept), piece, len(kept) // piece)
    rng, shape = np.random.default_rng(6), () if vectors is None else (vectors,)
    coarse, fine = rng.standard_normal((T.unknowns, *shape)), rng.standard_normal((len(basis), *shape))
    up, down = there.xp.full(fine.shape, np.nan), there.xp.full(coarse.shape, np.nan)
    T.prolong(there.asarray(coarse), up)
    T.restrict(there.asarray(fine), down)
    np.testing.assert_allclose(there.to_host(up), expected @ coarse, atol=1e-13)
    np.testing.assert_allclose(there.to_host(down), expected.T @ fine, atol=1e-12)

    rows = T.rows(11, 40)
    offsets, own, blocks = (there.to_host(array) for array in (rows.offsets, rows.columns, rows.blocks))
    found = np.zeros((29 * size, T.unknowns))
    for node in range(29):
        for place in range(offsets[node], offsets[node + 1]):
            found[node * size : (node + 1) * size, own[place] * piece : (own[place] + 1) * piece] = blocks[place]
    np.testing.assert_array_equal(found, expected[11 * size : 40 * size])
    np.testing.assert_array_equal(there.to_host(T.candidates), there.to_host(padded.candidates)[kept])
    np.testing.assert_array_equal(there.to_host(T.missing), there.to_host(padded.missing)[kept])
    assert T.nbytes > padded.nbytes


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("size", [3, 6])
def test_the_coordinates_of_a_structured_mesh_follow_from_those_along_its_axes(target, size):
    rng = np.random.default_rng(size)
    points = GridPoints([rng.random(3), rng.random(5), rng.random(6)]).centred()
    free, aggregates = rng.random(90 * size) > 0.1, scattered(90, 7)
    coarse, fine = rng.standard_normal((42, 3)), rng.standard_normal((90 * size, 3))
    device = Device("cuda") if target.name == "gpu" else CPU

    found = []
    with target.running():
        for coordinates in (points, target.put(np.asarray(points))):
            T = RigidTentative(coordinates, free, aggregates, size, device)
            up, down = target.put(np.full_like(fine, np.nan)), target.put(np.full_like(coarse, np.nan))
            T.prolong(target.put(coarse), up)
            T.restrict(target.put(fine), down)
            found.append([target.get(array) for array in (up, down, T.rows(30, 90).blocks, T.candidates)])

    for computed, stored in zip(*found, strict=True):
        assert np.array_equal(computed, stored)
