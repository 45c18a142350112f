"""Coarse levels of groups of nodes for matrices that are streamed: D, groups, aggregates, further columns, and solves."""

import numpy as np
import pytest
import scipy.sparse
from awkward_systems import flat_hexahedra, jumping
from kernel_targets import TARGETS, gpu_count

import penstock
from penstock.fem import Cantilever, TwoPhaseMaterial
from penstock.solvers import SmoothedAggregationSpec, block_cg, cg, smoothed_aggregation
from penstock.solvers.amg import local_space as local_space_module
from penstock.solvers.amg.group_factors import GroupFactors, GroupPart, factored
from penstock.solvers.amg.group_growth import couplings, grown_groups
from penstock.solvers.amg.group_matching import matched_groups
from penstock.solvers.amg.inner_iterations import InnerIterations
from penstock.solvers.amg.tentative import PackedTentative
from penstock.spmv import CPU, CsrMatrix, Device
from penstock.spmv.compilation.table import find_kernel
from penstock.spmv.products.block_rows import BlockRows, rows_of
from penstock.streaming import HostStore, StreamedMatrix, Workload

GPU = (pytest.mark.gpu, pytest.mark.skipif(gpu_count() == 0, reason="no CUDA device"))


def grouped_blocks(size, nodes=37, seed=2):
    """Return rows of a positive definite matrix of blocks, the group of each node, and the matrix as a dense array."""
    rng = np.random.default_rng(seed)
    dense = rng.standard_normal((nodes * size, nodes * size))
    dense = dense @ dense.T + nodes * size * np.eye(nodes * size)
    blocks = dense.reshape(nodes, size, nodes, size).swapaxes(1, 2).reshape(-1, size, size)
    rows = BlockRows(0, np.arange(nodes + 1) * nodes, np.tile(np.arange(nodes, dtype=np.int32), nodes), blocks.copy())
    of_node = rng.integers(0, 7, nodes)
    of_node[5] = 7  # a group of a single node
    return rows, np.unique(of_node, return_inverse=True)[1].astype(np.int32), dense


def dense_of(D, n):
    return D @ np.eye(n)


@pytest.mark.parametrize("size", [1, 3, 6])
def test_factors_are_those_of_the_inverse_blocks(size):
    rows, of_node, dense = grouped_blocks(size)
    n = len(dense)
    D = GroupFactors([factored(rows, of_node)], (0, n), size, CPU)
    unknown = np.repeat(of_node, size)
    expected = np.linalg.inv(np.where(unknown[:, None] == unknown, dense, 0.0))
    found = dense_of(D, n)
    assert np.array_equal(D.of_node, of_node)
    assert D.nbytes < 4 * sum((np.bincount(of_node) * size) ** 2) + 200 * n
    np.testing.assert_allclose(found, expected, atol=1e-5 * abs(expected).max())
    np.testing.assert_allclose(found @ D.solve(np.eye(n)), np.eye(n), atol=1e-10)


@pytest.mark.parametrize("vectors", [None, 2])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_apply_the_factors_that_are_stored(target, size, vectors):
    rows, of_node, dense = grouped_blocks(size)
    n, rng = len(dense), np.random.default_rng(1)
    part = factored(rows, of_node)
    on_cpu = GroupFactors([part], (0, n), size, CPU)
    W = np.zeros((n, n))
    for group in range(on_cpu.count):
        nodes = part.order[part.starts[group] : part.starts[group + 1]]
        own = (nodes[:, None] * size + np.arange(size)).ravel()
        i, j = np.tril_indices(len(own))
        W[own[i], own[j]] = part.factors[part.places[group] : part.places[group + 1]]
    D = W.T @ W
    shape = (n,) if vectors is None else (n, vectors)
    f, y, v, out = (rng.standard_normal(shape) for _ in range(4))
    expected = 0.7 * D @ (f - y) - 1.3 * v + 0.4 * out
    scale = abs(D).sum(axis=1).max() * 4 + 4

    with target.running():
        there = GroupFactors([GroupPart(*map(target.put, part))], (0, n), size, CPU)
        on_target = [target.put(array.copy()) for array in (f, y, v, out)]
        step = find_kernel("group_factors", "step", target.device_kind)
        step(there, 0, there.count, 0, 0.7, *on_target[:2], -1.3, on_target[2], 0.4, on_target[3], True)
        assert not np.any(target.get(on_target[1]))  # cleared
        first = target.get(on_target[3]).copy()
        step(there, 0, there.count, 0, -1.0, None, target.put(f), 0.0, target.put(v), 0.0, on_target[3], False)
        second = target.get(on_target[3]).copy()
        find_kernel("group_factors", "solve", target.device_kind)(there, on_target[3])
        third = target.get(on_target[3])

    np.testing.assert_allclose(first, expected, atol=1e-14 * n * scale)
    np.testing.assert_allclose(second, D @ f, atol=1e-14 * n * scale)
    np.testing.assert_allclose(third, f, atol=1e-12 * np.linalg.cond(D))


def test_tied_nodes_keep_a_positive_definite_inverse():
    tied = np.array([[1.0, -1.0], [-1.0, 1.0]]) * 1e10 + np.eye(2)
    blocks = tied.reshape(4, 1, 1)
    rows = BlockRows(0, np.array([0, 2, 4]), np.array([0, 1, 0, 1], dtype=np.int32), blocks)
    D = dense_of(GroupFactors([factored(rows, np.zeros(2, dtype=np.int32))], (0, 2), 1, CPU), 2)
    assert np.linalg.eigvalsh(D).min() > 0
    values = np.sort(np.linalg.eigvals(D @ tied).real)
    assert values[0] > 0.2
    assert values[1] < 1.1  # in float32, D itself would be off by more than 1


def test_groups_follow_lines_across_flat_elements():
    counts = (6, 5, 7)
    A = flat_hexahedra(counts, 50.0)
    rows = rows_of(CsrMatrix.from_csr(A))
    scales = 1 / np.sqrt(A.diagonal())[:, None]
    of_node = grown_groups(0, couplings(rows, scales), (0, A.shape[0]), 32, alike=0.1)
    assert np.array_equal(of_node.reshape(25, 7), np.broadcast_to(of_node[::7, None], (25, 7)))
    assert np.bincount(of_node).max() <= 48


@pytest.mark.parametrize("most", [4, 12, 32])
def test_groups_stay_small_and_inside_their_parts(most):
    A = jumping()
    rows, parts = rows_of(CsrMatrix.from_csr(A)), (0, 200, 201, 500, A.shape[0])
    found = couplings(rows, 1 / np.sqrt(A.diagonal())[:, None])
    of_node = grown_groups(0, found, parts, most, alike=0.1)
    sizes = np.bincount(of_node)
    assert sizes.min() >= 1
    assert sizes.max() <= 1.5 * most
    part = np.searchsorted(parts, np.arange(A.shape[0]), side="right")
    assert all(len(set(part[of_node == group])) == 1 for group in range(len(sizes)))
    assert np.array_equal(of_node, grown_groups(0, found, parts, most, alike=0.1))
    # Those of a part do not depend on the others.
    some = rows.part(201, 500)
    alone = grown_groups(201, couplings(some, 1 / np.sqrt(A.diagonal())[:, None]), (201, 500), most, alike=0.1)
    assert np.array_equal(alone, of_node[201:500] - of_node[201])


def test_a_matrix_without_rows_has_no_groups():
    empty = (np.zeros(1, dtype=np.int64), np.empty(0, dtype=np.int32), np.empty(0), np.empty(0))
    assert len(grown_groups(0, empty, (0, 0), 8)) == 0


@pytest.fixture(scope="module")
def system():
    A = jumping((14, 14, 20))
    return A, np.random.default_rng(5).standard_normal((A.shape[0], 2))


def test_groups_save_iterations(system):
    A, B = system
    matrix, b = CsrMatrix.from_csr(A), B[:, 0].copy()
    M = smoothed_aggregation(matrix, grouped=True)
    assert isinstance(M.level.groups, GroupFactors)
    result = cg(matrix, b, M=M, rtol=1e-8, maxiter=60)
    before = cg(matrix, b, M=smoothed_aggregation(matrix, grouped=False), rtol=1e-8, maxiter=60)
    assert result.converged
    assert result.iterations <= 20
    assert result.iterations < 0.7 * before.iterations
    assert "smoothed together" in result.message
    assert np.linalg.norm(b - A @ result.x) <= 1e-8 * np.linalg.norm(b)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("half", [False, True])
def test_a_streamed_matrix_is_solved_alike(system, half, device):
    A, B = system
    name = "symmetric_bsr" if half else "csr"
    options = {"block_size": 1} if half else {}
    matrix = penstock.spmv.as_operator(CsrMatrix.from_csr(A))
    stored = penstock.spmv.format_named(name).from_csr(A, **options)
    store = HostStore.create(penstock.spmv.formats.partition.row_slabs(stored, 6))
    workload, there = Workload(degree=5), Device.parse(device)
    with StreamedMatrix(store, stored.nbytes * 3 // 4, workload=workload, device=device) as streamed:
        M = smoothed_aggregation(streamed, grouped=True)
        assert isinstance(M.level.groups, GroupFactors)
        bounds = M.level.groups.row_bounds
        assert len(bounds) == len(streamed.plan.index.subdivisions) + 1
        result = block_cg(streamed, there.asarray(B), M=M, rtol=1e-8, maxiter=60)
    x = there.to_host(result.x)
    assert result.converged
    alone = cg(matrix, B[:, 0].copy(), M=smoothed_aggregation(matrix, grouped=True), rtol=1e-8, maxiter=60)
    assert result.iterations <= 1.6 * alone.iterations + 3  # groups are cut between subdivisions
    assert (np.linalg.norm(B - A @ x, axis=0) <= 1e-8 * np.linalg.norm(B, axis=0)).all()


def test_new_values_keep_groups_and_make_the_same_level(system):
    A, _ = system
    matrix = CsrMatrix.from_csr(A)
    first = smoothed_aggregation(matrix, grouped=True)
    D, again = first.level.groups, first.level.groups.of_values(matrix)
    assert np.array_equal(again.factors, D.factors)
    scaled = D.of_values(CsrMatrix.from_csr(4.0 * A))
    np.testing.assert_allclose(scaled.factors, 0.5 * D.factors, rtol=1e-6)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_a_prepared_system_is_updated(system, device):
    A, B = system
    b = B[:, 0].copy()
    given = {"preconditioner": SmoothedAggregationSpec(grouped=True), "memory": A.nnz * 3, "device": device}
    with penstock.prepare(A, **given) as prepared:
        first = prepared.solve(b, rtol=1e-8)
        prepared.update(2.0 * A, preconditioner="values")
        second = prepared.solve(b, rtol=1e-8)
    assert first.converged
    assert second.converged
    assert abs(second.iterations - first.iterations) <= 2
    np.testing.assert_allclose(2.0 * second.x, first.x, atol=1e-5 * abs(first.x).max())


def test_without_memory_nodes_are_not_grouped(system, monkeypatch):
    A, _ = system
    monkeypatch.setattr(local_space_module, "_SETUP_NUMBERS", 1 << 60)
    assert smoothed_aggregation(CsrMatrix.from_csr(A), grouped=True).level.groups is None


def test_inner_iterations_solve_blocks_with_columns_of_zeros():
    A = CsrMatrix.from_csr(jumping((6, 6, 6)))
    B = np.random.default_rng(3).standard_normal((A.shape[0], 3))
    B[:, 1] = 0.0
    inverse = InnerIterations(A, penstock.solvers.jacobi(A))
    X = inverse.apply(B)
    assert not X[:, 1].any()
    residuals = np.linalg.norm(B - A.apply(X), axis=0)
    assert (residuals[[0, 2]] < 0.3 * np.linalg.norm(B[:, [0, 2]], axis=0)).all()
    twice = inverse.apply(B, X.copy(), alpha=2.0, beta=-1.0)
    np.testing.assert_allclose(twice, X, atol=1e-12 * abs(X).max())


def test_entries_of_the_coarse_matrix_are_counted_on_a_sample(monkeypatch):
    """Against the pattern of the coarse matrix, on a grid of groups, with aggregates of different sizes and columns."""
    A = abs(jumping((16, 15, 14))).tocsr()
    A.data[...] = 1.0
    count = A.shape[0]
    of_group = np.unique(np.random.default_rng(0).geometric(0.3, count).cumsum() // 9, return_inverse=True)[1]
    total = of_group.max() + 1
    T = scipy.sparse.csr_array((np.ones(count), (np.arange(count), of_group)), shape=(count, total))
    coupled = (T.T @ A @ A @ A @ T) > 0
    columns = np.random.default_rng(1).integers(1, 9, total)
    exact = int(columns @ (coupled @ columns))
    assert total > 128
    monkeypatch.setattr(local_space_module, "_SAMPLED", total)
    assert local_space_module._coarse_entries(A, of_group, 3)(columns) == exact
    monkeypatch.setattr(local_space_module, "_SAMPLED", total // 3)
    assert local_space_module._coarse_entries(A, of_group, 3)(columns) == pytest.approx(exact, rel=0.1)
    assert local_space_module._coarse_entries(A, of_group, 3)(columns) != exact


def graph_of(A):
    """The couplings of the unknowns of a matrix, as of groups."""
    return couplings(rows_of(CsrMatrix.from_csr(A)), 1 / np.sqrt(A.diagonal())[:, None])


@pytest.mark.parametrize("most", [2, 5, 12, 48])
def test_matched_aggregates_are_connected_and_of_the_size_that_is_asked_for(most):
    A = jumping()
    graph = graph_of(A)
    of_group = matched_groups(graph, most, 0.0)
    sizes = np.bincount(of_group)
    assert sizes.min() >= 1
    assert sizes.max() <= 1.5 * most
    assert np.median(sizes) > most / 2
    assert np.array_equal(of_group, matched_groups(graph, most, 0.0))
    inside = A.tocoo()
    kept = of_group[inside.coords[0]] == of_group[inside.coords[1]]
    parts = scipy.sparse.coo_array((np.ones(kept.sum()), (inside.coords[0][kept], inside.coords[1][kept])), A.shape)
    assert scipy.sparse.csgraph.connected_components(parts)[0] == len(sizes)


def test_matched_aggregates_do_not_cross_weak_couplings():
    """Two cubes that a soft layer joins: the couplings between them are a hundredth of those inside."""
    A = scipy.sparse.csr_array(flat_hexahedra((12, 5, 5), 1.0))
    side = np.arange(A.shape[0]) // (A.shape[0] // 2)
    coo = A.tocoo()
    across = side[coo.coords[0]] != side[coo.coords[1]]
    data = np.where(across, 0.01, 1.0) * coo.data
    weakened = scipy.sparse.csr_array((data, coo.coords), A.shape)
    of_group = matched_groups(graph_of(weakened), 40, 0.05)
    assert all(len(set(side[of_group == one])) == 1 for one in range(of_group.max() + 1))
    assert any(len(set(side[matched_groups(graph_of(A), 40, 0.05) == one])) == 2 for one in range(5))


def test_nothing_to_match():
    empty = (np.zeros(1, dtype=np.int64), np.empty(0, dtype=np.int32), np.empty(0), np.empty(0))
    assert len(matched_groups(empty, 8, 0.0)) == 0
    alone = (np.arange(4), np.arange(3, dtype=np.int32), -np.ones(3), np.ones(3))
    assert matched_groups(alone, 8, 0.0).tolist() == [0, 0, 0]  # D alone solves for them


def test_aggregates_have_the_columns_that_they_need():
    """A body of two materials that alternate at random has slow modes that rigid motions miss."""
    beam = Cantilever(nodes=(25, 13, 13), dof=3, material=TwoPhaseMaterial(contrast=1000.0))
    given = {"coordinates": beam.mesh.coordinates(), "grouped": True}
    mixed = smoothed_aggregation(beam.matrix(), **given)
    T, A = mixed.level.T, beam.matrix()
    assert isinstance(T, PackedTentative)
    assert T.modes == 3
    assert T.unknowns > 2 * 3 * len(np.unique(T.of_node))
    assert mixed.level.A.values.size <= 1.2 * 0.05 * A.to_csr().nnz
    assert mixed.level.near_null_space.shape == (T.unknowns, 6)
    result = cg(A, beam.load(), M=mixed, rtol=1e-8)
    nodes_alone = cg(A, beam.load(), M=smoothed_aggregation(A, **{**given, "grouped": False}), rtol=1e-8)
    assert result.converged
    assert result.iterations < 0.6 * nodes_alone.iterations


def test_uncoupled_groups_form_an_aggregate_beside_the_others():
    A = scipy.sparse.block_diag([2.0 * scipy.sparse.eye_array(3), abs(jumping((5, 5, 5))), scipy.sparse.eye_array(2)])
    A = scipy.sparse.csr_array(A)
    A.data[...] = -1.0
    A.setdiag(30.0)
    of_group = matched_groups(graph_of(A), 8, 0.0)
    assert of_group[[0, 1, 2, -1, -2]].tolist() == [0] * 5
    assert of_group[3:-2].min() == 1
    assert np.array_equal(of_group[3:-2] - 1, matched_groups(graph_of(A[3:-2][:, 3:-2]), 8, 0.0))


@pytest.mark.parametrize(("share", "expected"), [(1.0, 24), (0.65, 12), (0.55, 12)])
def test_less_memory_means_fewer_random_vectors_and_smaller_groups(share, expected, monkeypatch):
    A = CsrMatrix.from_csr(jumping())
    enough = 2 * (2 * 96 + 8 * (4 * 24 + 8)) * A.shape[0]
    monkeypatch.setattr(Device, "free_nbytes", lambda self: int(share * enough))
    nodes, vectors = local_space_module._group_nodes_and_vectors(A, 3)
    assert vectors == expected
    assert nodes == (32 if share > 0.6 else 16)


class Sums:
    known, piece, most = 3, 3, 9


def test_columns_come_in_pieces_and_within_a_budget():
    worth = np.array([[9.0, 2.0, 0.1], [0.1, 0.0, 0.0], [5.0, 4.0, 3.0]])
    columns_within = local_space_module._columns_within

    used, bound, capped = columns_within(worth, Sums, sum, 100)
    assert (used.tolist(), bound, capped) == ([6, 3, 6], 0.5, 0.0)
    used, bound, capped = columns_within(worth, Sums, sum, 12)
    assert used.tolist() == [6, 3, 3]
    assert 5.0 <= bound < 9.0
    used, bound, capped = columns_within(worth, Sums, sum, 1)  # not even the near-null space
    assert used.tolist() == [3, 3, 3]
    assert bound > 9.0
    Sums.most = 3
    assert columns_within(worth, Sums, sum, 100)[2] == pytest.approx(2 / 3)
    Sums.most = 9


def test_directions_that_are_rounding_become_no_columns():
    """Two groups whose relaxed vectors are in the near-null space but for one direction."""
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((6, 2 + 4))
    vectors[:, 3:] = vectors[:, :2] @ rng.standard_normal((2, 3))
    gram = vectors.T @ vectors

    class Relaxed:
        known, grams, energies = 2, gram[None], np.ones((1, 2))

    worth, directions = local_space_module._missing(np.zeros(1, dtype=np.int64), Relaxed, 1.0)
    assert np.count_nonzero(worth) == 1
    assert not directions[0, :, 1:].any()
    assert abs(directions).max() < 1e3


def test_groups_are_not_widened(system):
    A, B = system
    matrix = CsrMatrix.from_csr(A)
    result = cg(matrix, B[:, 0].copy(), M=smoothed_aggregation(matrix, grouped=True), rtol=1e-8, maxiter=60)
    assert "widened" not in result.message


def test_around_a_hub_nodes_are_not_grouped():
    n = 600
    star = scipy.sparse.coo_array((np.ones(n - 1), (np.zeros(n - 1, dtype=int), np.arange(1, n))), shape=(n, n))
    star = (star + star.T).tocsr()
    A = (scipy.sparse.diags_array(star.sum(axis=1) + 1e-3) - star).tocsr()
    M = smoothed_aggregation(CsrMatrix.from_csr(A), grouped=True)
    assert M.level.groups is None
    assert cg(CsrMatrix.from_csr(A), np.arange(1.0, n + 1), M=M, rtol=1e-8).converged
