"""Groups of nodes that are smoothed together: which nodes are linked, D of them, and systems that need them."""

import numpy as np
import pytest
import scipy.sparse
from awkward_systems import flat_hexahedra
from kernel_targets import DEVICES, TARGETS, gpu_count

import penstock
from penstock.fem import Cantilever
from penstock.solvers import DiagonalBlocks, cg, multigrid
from penstock.solvers.amg import coarsening
from penstock.solvers.amg.group_inverses import GroupChebyshev, GroupInverses, largest_eigenvalue
from penstock.solvers.amg.groups import Groups, _cut_components, linked_groups
from penstock.solvers.amg.lines import LineInverses
from penstock.solvers.amg.links import links_between
from penstock.solvers.amg.paths import long_paths
from penstock.solvers.chebyshev import Chebyshev
from penstock.spmv import BsrMatrix, CsrMatrix, Device
from penstock.spmv.compilation.table import find_kernel
from penstock.spmv.products.block_rows import BlockRows, block_rows, rows_of
from penstock.spmv.products.multiply import product_of_rows


def random_rows(size, nodes=90, seed=0):
    """Rows of a symmetric matrix of blocks whose couplings are of both signs and all sizes."""
    rng = np.random.default_rng(seed)
    pattern = scipy.sparse.random_array((nodes, nodes), density=0.02, rng=rng).tocsr()
    pattern = (pattern + pattern.T + scipy.sparse.eye_array(nodes)).tocsr()
    pattern.sort_indices()
    of_row = np.repeat(np.arange(nodes), np.diff(pattern.indptr))
    blocks = rng.uniform(-1.0, 0.6, (pattern.nnz, size, size))
    blocks[of_row == pattern.indices] += 1.2 * np.eye(size)
    return BlockRows(0, pattern.indptr.astype(np.int64), pattern.indices.astype(np.int32), blocks, nodes), of_row


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("target", TARGETS)
def test_links_are_those_of_the_definition(target, size):
    rows, of_row = random_rows(size)
    unknowns = np.einsum("eii->ei", rows.blocks)
    diagonal = unknowns[of_row == rows.columns]
    scales = np.where(diagonal > 0, 1 / np.sqrt(np.maximum(diagonal, 1e-300)), 0.0)
    coupling = -(unknowns * scales[of_row] * scales[rows.columns]).mean(axis=1)
    other = of_row != rows.columns
    above = np.bincount(of_row[other & (coupling > 0.35)], minlength=90)
    negative = np.bincount(of_row[other], np.maximum(-coupling[other], 0.0), minlength=90)
    flat = (above > 0) & (above < 3) & (negative > 0.5)
    linked = other & ((coupling > 0.75) | ((coupling > 0.35) & flat[of_row] & flat[rows.columns]))
    assert 5 < flat.sum() < 85
    assert set(above.tolist()) >= {0, 1, 2, 3}
    assert linked.sum() > (coupling[other] > 0.75).sum() > 0

    shares = np.bincount(of_row[linked], -(unknowns * scales[of_row] ** 2).mean(axis=1)[linked], minlength=90)
    kind, found_scales = target.device_kind, target.put(np.zeros((90, size)))
    flags = [target.put(np.zeros(count, dtype=bool)) for count in (90, 50)]
    with target.running():
        there = BlockRows(0, *(target.put(array) for array in (rows.offsets, rows.columns, rows.blocks)), 90)
        find_kernel("links", "scale", kind)(there, found_scales)
        find_kernel("links", "find_flat", kind)(there, found_scales, np.inf, flags[0])
        of_all = links_on(target, there, found_scales, flags[0], 0)
        cut = BlockRows(20, *(target.put(array) for array in arrays_of(rows.part(20, 70))), 90)
        find_kernel("links", "find_flat", kind)(cut, found_scales, np.inf, flags[1])
        of_part = links_on(target, cut, found_scales, flags[1], 20)

    np.testing.assert_allclose(target.get(found_scales), scales, rtol=1e-14)
    assert np.array_equal(target.get(flags[0]), flat)
    assert np.array_equal(of_all[1], rows.columns[linked])
    assert np.array_equal(np.diff(of_all[0]), np.bincount(of_row[linked], minlength=90))
    np.testing.assert_allclose(of_all[2], shares, rtol=1e-12, atol=1e-14)
    # Of consecutive rows, those links of which both ends are there.
    inside = linked & (of_row >= 20) & (of_row < 70) & (rows.columns >= 20) & (rows.columns < 70)
    assert np.array_equal(target.get(flags[1]), flat[20:70])
    assert np.array_equal(of_part[1], rows.columns[inside] - 20)
    assert np.array_equal(np.diff(of_part[0]), np.bincount(of_row[inside] - 20, minlength=50))


def arrays_of(rows):
    return rows.offsets, rows.columns, rows.blocks


def links_on(target, rows, scales, flat, low):
    """Return offsets, columns and shares of links, found by the kernels of a target."""
    nodes, kind = len(rows.offsets) - 1, target.device_kind
    counts, shares = target.put(np.zeros(nodes, dtype=np.int64)), target.put(np.zeros(nodes))
    find_kernel("links", "count", kind)(rows, scales, low, flat, 0.75, counts, shares)
    offsets = np.concatenate([[0], np.cumsum(target.get(counts))])
    columns = target.put(np.empty(offsets[-1], dtype=np.int32))
    find_kernel("links", "list", kind)(rows, scales, low, flat, 0.75, target.put(offsets), columns)
    return offsets, target.get(columns), target.get(shares)


def test_lines_of_finite_volumes_are_found_by_their_share_of_the_diagonal():
    """Couplings are all of one sign there; at an end of a line it has one strong neighbour."""
    line = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(7, 7)).tolil()
    line[0, 0] = line[6, 6] = 1.0
    across = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(5, 5))
    eye = scipy.sparse.eye_array
    for strength, linked in ((100.0, 60), (1.0, 0)):
        A = scipy.sparse.kron(eye(5), strength * line.tocsr()) + scipy.sparse.kron(across, eye(7))
        rows = rows_of(CsrMatrix.from_csr(A.tocsr()))
        assert links_between(rows, ties=False, finite_volumes=True).columns.size == linked
        assert links_between(rows, ties=False).columns.size == 0


def joined(nodes, *pairs, seed=3):
    """Return a graph whose nodes are numbered at random, as offsets and neighbours, and these numbers."""
    number = np.random.default_rng(seed).permutation(nodes)
    i, j = (number[np.concatenate(side)] for side in zip(*pairs, strict=True))
    graph = scipy.sparse.coo_array((np.ones(2 * len(i)), (np.r_[i, j], np.r_[j, i])), shape=(nodes, nodes)).tocsr()
    return graph.indptr.astype(np.int64), graph.indices.astype(np.int32), number


def test_large_groups_are_cut_into_equal_parts_of_neighbours():
    """A line of 150 nodes, one of 3, and single nodes, all in random order."""
    place = np.arange(200)
    offsets, links, number = joined(200, (place[:149], place[1:150]), (place[150:152], place[151:153]))

    of_node, cut = _cut_components(offsets, links, 64)

    assert cut
    assert not _cut_components(offsets, links, 150)[1]
    assert np.array_equal(np.unique(of_node), np.arange(3 + 1 + 47))
    on_line = of_node[number[:150]]
    assert np.count_nonzero(np.diff(on_line)) == 2  # each part is a piece of the line
    assert sorted(np.unique(on_line, return_counts=True)[1].tolist()) == [50, 50, 50]
    assert len(set(of_node[number[150:153]].tolist())) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_long_paths_are_found_and_walked(device):
    """Two paths, one just too short, one just too long, a ring, a fork, and a single node, all in random order."""
    parts = [("path", 70), ("path", 71), ("path", 6), ("path", 5), ("ring", 20), ("fork", 22), ("path", 1)]
    pairs, expected, begin = [], [], 0
    for kind, count in parts:
        here = np.arange(begin, begin + count)
        begin += count
        if kind == "fork":  # from its first node on
            arms = here[1:].reshape(3, 7)
            pairs.append(
                (
                    np.concatenate([np.full(3, here[0]), arms[:, :-1].ravel()]),
                    np.concatenate([arms[:, 0], arms[:, 1:].ravel()]),
                )
            )
        else:
            pairs.append((here[:-1], here[1:]) if kind == "path" else (here, np.roll(here, -1)))
        expected.append(kind == "path" and 6 <= count <= 70)
    offsets, links, number = joined(begin, *pairs)
    put = Device.parse(device).asarray

    path, place = (Device.parse(device).to_host(one) for one in long_paths(put(offsets), put(links), 6, 70))

    begin = 0
    for (_, count), is_path in zip(parts, expected, strict=True):
        here = number[begin : begin + count]
        begin += count
        if not is_path:
            assert np.all(path[here] == -1)
            continue
        assert np.all(path[here] == min(here[0], here[-1]))
        assert place[here].tolist() == (list(range(count)) if here[0] < here[-1] else list(range(count))[::-1])


def test_links_in_one_direction_only_end_a_path():
    """Rounding may make a coupling a link from one side only."""
    place = np.arange(30)
    offsets, links, _ = joined(30, (place[:-1], place[1:]), seed=0)
    graph = scipy.sparse.csr_array((np.ones(len(links)), links, offsets), shape=(30, 30)).tolil()
    order = long_paths(offsets, links, 6, 30)[1].argsort()
    graph[order[11], order[12]] = 0  # which 12 still has to 11
    graph = graph.tocsr()
    graph.eliminate_zeros()
    path, _ = long_paths(graph.indptr.astype(np.int64), graph.indices.astype(np.int32), 6, 30)
    assert np.all(path[order[:12]] == path[order[0]])
    assert path[order[0]] >= 0
    assert np.all(path[order[12:]] == -1)


def test_smooth_meshes_have_no_groups():
    assert linked_groups(rows_of(Cantilever(nodes=7, dof=3).matrix("bsr"))) is None
    assert linked_groups(rows_of(CsrMatrix.from_csr(flat_hexahedra((8, 8, 8), 1.0)))) is None


def test_ties_may_be_left_out():
    tied = scipy.sparse.csr_array(np.array([[1.0, -0.9, 0.0], [-0.9, 1.0, -0.1], [0.0, -0.1, 1.0]]))
    rows = rows_of(CsrMatrix.from_csr(tied))
    assert linked_groups(rows).of_node.tolist() in ([0, 0, 1], [1, 1, 0])
    assert linked_groups(rows, ties=False) is None


def test_lines_across_flat_elements_are_groups():
    groups = linked_groups(rows_of(CsrMatrix.from_csr(flat_hexahedra((6, 5, 7), 20.0))))

    assert groups is not None
    assert groups.count == 25
    single = CsrMatrix.from_csr(flat_hexahedra((6, 5, 7), 20.0), values_dtype=np.float32)
    assert linked_groups(rows_of(single)).count == 25
    assert np.array_equal(groups.of_node.reshape(25, 7), np.broadcast_to(groups.of_node[::7, None], (25, 7)))


def test_a_line_of_which_distant_nodes_couple_is_no_line():
    """Its block is not tridiagonal, so it is cut and inverted as other groups are."""
    A = flat_hexahedra((4, 4, 100), 1000.0).tolil()
    plain = linked_groups(rows_of(CsrMatrix.from_csr(A.tocsr())))
    assert bool(plain.on_line.all())
    assert not plain.cut
    assert plain.sizes.tolist() == [100] * plain.count
    A[3, 9] = A[9, 3] = 1e-3
    groups = linked_groups(rows_of(CsrMatrix.from_csr(A.tocsr())))
    assert groups.cut
    assert int(groups.on_line.sum()) == plain.count - 1
    assert not groups.on_line[groups.of_node[3]]
    assert sorted(groups.sizes.tolist()) == [50, 50, *[100] * (plain.count - 1)]


def grouped(size, seed=1):
    """Return a positive definite matrix of blocks, groups of its nodes of 1 to 9 nodes, and both as dense arrays."""
    rng, nodes = np.random.default_rng(seed), 40
    rows, _ = random_rows(size, nodes, seed)
    dense = BsrMatrix.from_arrays(
        (nodes * size, nodes * size), np.float64,
        {"row_offsets": rows.offsets, "column_indices": rows.columns, "values": rows.blocks}, {},
    ).to_csr().toarray()  # fmt: skip
    dense = (dense + dense.T) / 2
    dense += np.diag(np.abs(dense).sum(axis=1))
    A = scipy.sparse.csr_array(dense)
    matrix = CsrMatrix.from_csr(A) if size == 1 else BsrMatrix.from_csr(A, block_size=size)
    of_node = np.repeat(np.arange(9), [1, 9, 2, 3, 8, 4, 1, 7, 5])[rng.permutation(nodes)].astype(np.int32)
    unknown = np.repeat(of_node, size)
    inside = np.where(unknown[:, None] == unknown, dense, 0.0)
    return matrix, Groups(of_node, 9), dense, np.linalg.inv(inside)


def lined(size, lengths=(3, 11, 2, 6, 6, 9, 3), seed=2):
    """Return a matrix of blocks, groups of its nodes among which are lines of up to 11 nodes, and both as dense arrays."""
    rng = np.random.default_rng(seed)
    on_line = np.array([False, True, False, True, True, True, False])
    nodes = sum(lengths)
    group, place = np.repeat(np.arange(7), lengths), np.concatenate([np.arange(n) for n in lengths])
    shuffle = rng.permutation(nodes)
    group, place = group[shuffle], place[shuffle]
    same = group[:, None] == group
    far = same & on_line[group][:, None] & (abs(place[:, None] - place) > 1)
    blocks = (
        rng.uniform(-1.0, 1.0, (nodes, size, nodes, size))
        * (~far & (same | (rng.random((nodes, nodes)) < 0.1)))[:, None, :, None]
    )
    dense = blocks.reshape(nodes * size, nodes * size)
    dense = dense + dense.T
    dense += np.diag(1.01 * np.abs(dense).sum(axis=1))
    A = scipy.sparse.csr_array(dense)
    matrix = CsrMatrix.from_csr(A) if size == 1 else BsrMatrix.from_csr(A, block_size=size)
    inside = np.where(np.kron(same, np.ones((size, size), dtype=bool)), dense, 0.0)
    groups = Groups(group.astype(np.int32), 7, False, on_line, place.astype(np.int64))
    return matrix, groups, dense, np.linalg.inv(inside)


def line_inverses(A, groups, target):
    """Return D of lines, with its arrays on a target."""
    D = LineInverses(rows_of(A), np.where(groups.on_line[groups.of_node], groups.of_node, -1), groups.place, 0.0)
    for name in ("starts", "nodes", "pivots", "below"):
        setattr(D, name, target.put(getattr(D, name)))
    return D


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("target", TARGETS)
def test_lines_are_solved(target, size):
    """Of a line of more than 32 nodes a lane has several, the last one perhaps none."""
    A, groups, _, inverse = lined(size, (3, 75, 2, 6, 40, 9, 3))
    on_line = np.repeat(groups.on_line[groups.of_node], size)
    rng, n = np.random.default_rng(1), A.shape[0]
    D = line_inverses(A, groups, target)
    step = find_kernel("lines", "step", target.device_kind)
    for shape in ((n,), (n, 3)):
        f, y, v, out = rng.normal(size=(4, *shape))
        solved = np.where(on_line, (inverse @ (f - y)).T, 0.0).T
        expected = np.where(on_line, (0.7 * solved + 0.3 * v - 0.5 * out).T, out.T).T
        alone = np.where(on_line, (-0.7 * (inverse @ y)).T, out.T).T
        there = [target.put(array.copy()) for array in (f, y, v, out, out)]
        work = target.put(np.full((len(D.nodes) * size, *shape[1:]), np.nan))
        with target.running():
            step(D, 0.7, None, there[1], 0.0, there[2], 0.0, work, there[4], False)
            step(D, 0.7, there[0], there[1], 0.3, there[2], -0.5, work, there[3], True)
        np.testing.assert_allclose(target.get(there[4]), alone, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(target.get(there[3]), expected, rtol=1e-12, atol=1e-13)
        assert not target.get(there[1])[on_line].any()


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("target", TARGETS)
def test_lines_are_factorised(target, size):
    """One line is not positive definite."""
    rng, starts = np.random.default_rng(4), np.array([0, 5, 9, 13, 14])
    blocks = rng.normal(size=(14, size, size))
    pivots = 9.0 * size * np.eye(size) + blocks + blocks.swapaxes(1, 2)
    below = rng.normal(size=(14, size, size))
    below[starts[:-1]] = 0.0
    pivots[12] *= -1.0  # the last node of the third line
    regular = np.ones(4, dtype=bool)
    found = [target.put(array.copy()) for array in (pivots, below, regular)]
    with target.running():
        find_kernel("lines", "factorise", target.device_kind)(target.put(starts), 1.25, *found)
    inverses, factors, fine = map(target.get, found)
    assert fine.tolist() == [True, True, False, True]
    for place in set(range(14)) - {12}:
        pivot = pivots[place] + 0.25 * np.diag(np.diag(pivots[place]))
        if place not in starts:
            factor = below[place] @ inverses[place - 1]
            np.testing.assert_allclose(factors[place], factor, rtol=1e-12, atol=1e-14)
            pivot = pivot - factor @ below[place].T
        np.testing.assert_allclose(inverses[place], np.linalg.inv(pivot), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("target", TARGETS)
def test_lines_are_solved_for_sparse_right_hand_sides(target, size):
    """Pairs of a line and a block column: two of the first line, one of the third, none of the second."""
    A, groups, _, inverse = lined(size)
    D = line_inverses(A, groups, target)
    first, nodes = target.get(D.starts), target.get(D.nodes)
    rng, line = np.random.default_rng(8), np.array([0, 0, 2])
    starts = np.concatenate([[0], np.cumsum(np.diff(first)[line])])
    values = rng.normal(size=(starts[-1], size, 2))
    found = target.put(values.copy())
    with target.running():
        find_kernel("lines", "solve_pairs", target.device_kind)(D, target.put(line), target.put(starts), found)
    for pair, of_line in enumerate(line):
        of_pair = slice(starts[pair], starts[pair + 1])
        rows = (nodes[first[of_line] : first[of_line + 1], None] * size + np.arange(size)).reshape(-1)
        expected = inverse[np.ix_(rows, rows)] @ values[of_pair].reshape(-1, 2)
        result = target.get(found)[of_pair].reshape(-1, 2)
        np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1, 3])
def test_groups_some_of_which_are_lines_agree_with_dense_arithmetic(size, device):
    A, groups, dense, inverse = lined(size)
    there = A.to_device(device)
    put = there.device.asarray
    D = GroupInverses(there, Groups(put(groups.of_node), 7, False, put(groups.on_line), put(groups.place)))
    assert D.matrix.to_device("cpu").to_csr().nnz == size**2 * (9 + 4 + 9)  # lines are not stored there
    rng, n = np.random.default_rng(5), A.shape[0]
    x = rng.normal(size=(n, 2))
    np.testing.assert_allclose(there.device.to_host(D.apply(put(x))), inverse @ x, rtol=1e-7, atol=1e-9)
    exact = np.linalg.eigvals(inverse @ dense).real.max()
    assert exact <= D.high <= 1.06 * exact

    nodes = n // size
    T = np.kron(np.eye(nodes)[:, rng.permutation(nodes) < 5], np.ones((size, 2)))  # most rows are empty
    places, of_columns = np.nonzero(np.kron(np.eye(nodes), np.ones((1, size))) @ T[:, ::2])
    own = block_rows(0, nodes, put(places), put(of_columns), put(np.ones((len(places), size, 2))), 5)
    image = product_of_rows(rows_of(there), own, 5)
    rows = D.smoothed(image, own, 0.7, 5)
    found = BlockRows(0, *(there.device.to_host(one) for one in (rows.offsets, rows.columns, rows.blocks)))
    wide = scipy.sparse.bsr_array((found.blocks, found.columns, found.offsets), shape=(n, 10)).toarray()
    np.testing.assert_allclose(wide, T - 0.7 * inverse @ dense @ T, rtol=1e-7, atol=1e-9)
    for row in range(nodes):
        assert np.all(np.diff(found.columns[found.offsets[row] : found.offsets[row + 1]]) > 0)


@pytest.mark.parametrize("device", DEVICES)
def test_long_lines_across_flat_elements_take_few_iterations(device):
    """They are solved as a whole; cut into parts of 64 nodes they take 70 iterations and more."""
    A = flat_hexahedra((10, 10, 150), 1000.0)
    b = np.random.default_rng(1).standard_normal(A.shape[0])
    result = penstock.solve(A, b, rtol=1e-8, preconditioner="multigrid", device=device)
    assert result.converged
    assert result.iterations <= 14


@pytest.mark.parametrize("size", [1, 3])
def test_inverses_polynomial_and_prolongator_agree_with_dense_arithmetic(size):
    A, groups, dense, inverse = grouped(size)
    rng, n = np.random.default_rng(5), A.shape[0]
    D = GroupInverses(A, groups)
    stored = D.matrix.to_csr().toarray()
    assert np.array_equal(stored, stored.T)
    # The diagonal is raised a little.
    np.testing.assert_allclose(stored, inverse, rtol=1e-8, atol=1e-9 * abs(inverse).max())

    exact = np.linalg.eigvals(inverse @ dense).real.max()
    assert exact <= largest_eigenvalue(A, D) <= 1.06 * exact

    x = rng.normal(size=(n, 2))
    z, before = np.zeros_like(x), np.zeros_like(x)
    M = GroupChebyshev(A, D, 5, D.high / 8, D.high)
    for a, c in [(M._first, 0.0), *M._steps]:
        z, before = z + c * (z - before) + a * inverse @ (x - dense @ z), z
    for vectors, expected in ((x, z), (x[:, 0].copy(), z[:, 0])):
        np.testing.assert_allclose(M.apply(vectors), expected, rtol=1e-7, atol=1e-9)
    out = x.copy()
    M.apply(x, out, alpha=2.0, beta=-1.0)
    np.testing.assert_allclose(out, 2 * z - x, rtol=1e-7, atol=1e-9)

    P = BlockRows(0, np.arange(41), rng.integers(0, 6, 40).astype(np.int32), rng.normal(size=(40, size, 2)), 6)
    image = coarsening.product_of_rows(rows_of(A), P, 6)
    found = _dense(D.smoothed(image, P, 0.3, 6), 6)
    np.testing.assert_allclose(found, _dense(P, 6) - 0.3 * inverse @ dense @ _dense(P, 6), rtol=1e-7, atol=1e-9)


def _dense(rows, width):
    count, (tall, wide) = len(rows.offsets) - 1, rows.blocks.shape[1:]
    out = np.zeros((count, tall, width, wide))
    of_row = np.repeat(np.arange(count), np.diff(rows.offsets))
    out[of_row, :, rows.columns] = rows.blocks
    return out.reshape(count * tall, width * wide)


def test_groups_of_single_nodes_are_block_jacobi():
    A, _, _, _ = grouped(3)
    D = GroupInverses(A, Groups(np.arange(40, dtype=np.int32), 40))
    blocks = DiagonalBlocks(np.ascontiguousarray(D.matrix.values))
    r = np.random.default_rng(2).normal(size=120)

    expected = Chebyshev(A, blocks, 3, D.high / 8, D.high).apply(r)

    np.testing.assert_allclose(GroupChebyshev(A, D, 3, D.high / 8, D.high).apply(r), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("ratio", [8.0, 1000.0])
def test_flat_elements_cost_few_iterations(ratio, monkeypatch):
    A = CsrMatrix.from_csr(flat_hexahedra((15, 15, 15), ratio))
    b = np.random.default_rng(0).normal(size=A.shape[0])

    together = cg(A, b, M=multigrid(A), rtol=1e-8)
    monkeypatch.setattr(coarsening, "linked_groups", lambda rows, ties: None)
    single = cg(A, b, M=multigrid(A), rtol=1e-8)

    assert together.converged
    assert together.iterations <= 14
    assert single.iterations > 2 * together.iterations


def test_lines_longer_than_a_group_cost_few_iterations():
    A = CsrMatrix.from_csr(flat_hexahedra((10, 10, 140), 1000.0))
    b = np.random.default_rng(0).normal(size=A.shape[0])

    result = cg(A, b, M=multigrid(A), rtol=1e-8)

    assert result.converged
    assert result.iterations <= 60  # it takes hundreds with aggregates across the parts of a line


def test_tied_nodes_are_smoothed_together():
    beam = Cantilever(nodes=11, dof=3)
    A = beam.matrix("bsr").to_csr()
    pairs = 3 * np.random.default_rng(4).permutation(np.arange(121, 1331))[:60].reshape(-1, 2)
    i, j = (np.concatenate([pairs[:, side] + unknown for unknown in range(3)]) for side in (0, 1))
    ties = scipy.sparse.coo_array((np.ones(len(i)), (i, j)), shape=A.shape)
    ties = 1e6 * (scipy.sparse.diags_array((ties + ties.T).sum(axis=1)) - ties - ties.T) * abs(A.data).max()
    A = BsrMatrix.from_csr((A + ties).tocsr(), block_size=3)
    x = np.random.default_rng(6).normal(size=A.shape[0])
    x[i] = x[j]

    result = cg(A, A @ x, M=multigrid(A, coordinates=beam.mesh.coordinates()), rtol=1e-8)

    assert result.converged
    assert result.iterations < 30


def test_a_body_that_is_one_group_may_be_free():
    """A chain without supports is a single group: its block is singular."""
    n = 40
    A = scipy.sparse.diags_array([-np.ones(n - 1), np.r_[1, np.full(n - 2, 2), 1], -np.ones(n - 1)], offsets=[-1, 0, 1])
    D = GroupInverses(CsrMatrix.from_csr(A.tocsr()), Groups(np.zeros(n, dtype=np.int32), 1))

    assert np.isfinite(D.matrix.values).all()
    assert np.isfinite(D.high)


@pytest.mark.gpu
@pytest.mark.skipif(gpu_count() == 0, reason="no CUDA device")
def test_flat_elements_on_a_gpu():
    A = CsrMatrix.from_csr(flat_hexahedra((15, 15, 30), 100.0)).to_device("cuda")
    b = A.device.asarray(np.random.default_rng(0).normal(size=A.shape[0]))

    M = multigrid(A)
    result = cg(A, b, M=M, rtol=1e-8)

    assert result.converged
    assert result.iterations <= 14
    assert bool((multigrid(A) @ b == M @ b).all())


@pytest.mark.gpu
@pytest.mark.skipif(gpu_count() == 0, reason="no CUDA device")
@pytest.mark.parametrize(
    ("ratio", "choice"),
    [
        (1.0, "smoothed_aggregation: a coarse level"),
        (300.0, "multigrid: smoothed_aggregation promised more than 100 iterations"),
    ],
)
def test_on_a_gpu_flat_elements_with_several_unknowns_get_multigrid(ratio, choice):
    """Two unknowns a node that hardly couple with each other."""
    scalar = flat_hexahedra((14, 14, 26), ratio)
    A = scipy.sparse.kron(scalar, np.array([[1.0, 1e-3], [1e-3, 1.0]])).tocsr()
    modes, b = np.tile(np.eye(2), (scalar.shape[0], 1)), np.random.default_rng(1).standard_normal(A.shape[0])

    result = penstock.solve(A, b, near_null_space=modes, block_size=2, device="cuda")

    assert result.converged
    assert choice in result.explain()
    assert result.iterations < 50
