"""A coarse level of lines of nodes across flat elements: D of lines, segments, aggregates, and systems that need them."""

import numpy as np
import pytest
import scipy.sparse
from awkward_systems import flat_hexahedra, jumping
from kernel_targets import DEVICES

import penstock
from penstock.fem import Cantilever, TwoPhaseMaterial
from penstock.solvers import SmoothedAggregationSpec, block_cg, cg, smoothed_aggregation
from penstock.solvers.amg.line_factors import LineFactors
from penstock.solvers.amg.line_order import find_lines
from penstock.solvers.amg.line_space import _segments, line_space
from penstock.solvers.amg.local_space import scales_of
from penstock.solvers.preconditioners import inverted_blocks
from penstock.spmv import BsrMatrix, CsrMatrix, Device, InputError
from penstock.spmv.formats.partition import row_slabs
from penstock.spmv.products.block_rows import BlockRows
from penstock.streaming import HostStore, LevelOrder, StreamedMatrix, Workload


def stretched_beam(size, nodes=(11, 8, 9), ratio=30.0, seed=0):
    """Return flat elements with several unknowns a node, those of different names coupled a little."""
    A = flat_hexahedra(nodes, ratio)
    rng = np.random.default_rng(seed)
    mixed = rng.uniform(-0.1, 0.1, (size, size))
    return scipy.sparse.csr_array(scipy.sparse.kron(A, np.eye(size) + mixed + mixed.T))


def streamed(A, size, parts, device, *, degree=5):
    """Return a matrix that is streamed in subdivisions of equal numbers of rows."""
    stored = CsrMatrix.from_csr(A) if size == 1 else BsrMatrix.from_csr(A, block_size=size)
    store = HostStore.create(row_slabs(stored, parts))
    return StreamedMatrix(store, stored.nbytes * 3 // 4, workload=Workload(degree=degree), device=device)


@pytest.mark.parametrize("ratio", [3.0, 10.0, 1000.0])
def test_iterations_do_not_depend_on_the_ratio_of_width_to_height(ratio):
    A = flat_hexahedra((14, 14, 40), ratio)
    b = np.random.default_rng(1).standard_normal(A.shape[0])
    matrix = CsrMatrix.from_csr(A)
    M = smoothed_aggregation(matrix, grouped="lines")
    result = cg(matrix, b, M=M, rtol=1e-8, maxiter=60)

    assert isinstance(M.level.groups, LineFactors)
    assert result.converged
    assert result.iterations <= 9
    assert np.linalg.norm(b - A @ result.x) <= 1e-8 * np.linalg.norm(b)
    before = cg(matrix, b, M=smoothed_aggregation(matrix), rtol=1e-8, maxiter=60)
    assert before.iterations > 2 * result.iterations


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1, 3])
def test_a_streamed_matrix_is_solved_in_few_sweeps_where_subdivisions_cut_lines(size, device):
    """At least five subdivisions begin in the middle of a line."""
    A = stretched_beam(size, (9, 9, 32), 1000.0)
    B = np.random.default_rng(2).standard_normal((A.shape[0], 2))
    there = Device.parse(device)
    with streamed(A, size, 11, device) as matrix:
        starts = np.asarray(matrix.row_bounds[1:-1]) // size % 32
        assert np.count_nonzero(starts) >= 5
        M = smoothed_aggregation(matrix, grouped="lines")
        assert M.level.groups.row_bounds == matrix.row_bounds
        result = block_cg(matrix, there.asarray(B), M=M, rtol=1e-8, maxiter=60)
    x = there.to_host(result.x)
    assert result.converged
    assert result.iterations <= 14
    assert (np.linalg.norm(B - A @ x, axis=0) <= 1e-8 * np.linalg.norm(B, axis=0)).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1, 3])
def test_d_of_subdivisions_agrees_with_dense_arithmetic(size, device):
    A = stretched_beam(size)
    there, nodes = Device.parse(device), A.shape[0] // size
    with streamed(A, size, 4, device) as matrix:
        space = line_space(matrix, scales_there(A, size, there), 64, 1, degree=5, rounds=2)
        D, bounds = space.D, matrix.row_bounds
        inverse = np.zeros(A.shape)
        column = np.arange(nodes) // 9  # of nodes above each other
        part = np.searchsorted(bounds, np.arange(nodes) * size, side="right")
        same = np.kron((column[:, None] == column) & (part[:, None] == part), np.ones((size, size)))
        inverse = np.linalg.inv(np.where(same, A.toarray(), 0.0))
        rng = np.random.default_rng(4)
        x = rng.standard_normal((A.shape[0], 2))
        np.testing.assert_allclose(
            there.to_host(D.apply(there.asarray(x))), inverse @ x, rtol=0, atol=1e-6 * abs(x).max()
        )
        f, y, v, out = (rng.standard_normal(A.shape[0]) for _ in range(4))
        rows = slice(bounds[1], bounds[3])
        arrays = [there.asarray(array[rows].copy()) for array in (f, y, v, out)]
        D.three_terms(rows, 0.5, arrays[0], arrays[1], 2.0, arrays[2], -1.0, arrays[3], clears=True)
        expected = 0.5 * inverse[rows, rows] @ (f - y)[rows] + 2.0 * v[rows] - out[rows]
        np.testing.assert_allclose(there.to_host(arrays[3]), expected, rtol=0, atol=1e-5)
        assert not there.to_host(arrays[1]).any()
        assert D.nbytes >= 16 * size * A.shape[0]

        width = 6  # rows of P - 0.7 D A P for two subdivisions
        P = np.kron(np.eye(nodes)[:, rng.permutation(nodes) < width], np.ones((size, 1)))
        first, last = rows.start // size, rows.stop // size
        own, image = (rows_on(there, dense[rows], size, first) for dense in (P, A @ P))
        found = D.smoothed(image, own, 0.7, width)
        dense = dense_of(there, found, width)
        np.testing.assert_allclose(dense, (P - 0.7 * inverse @ A @ P)[rows], rtol=0, atol=1e-5)
        assert (found.start, found.stop) == (first, last)


def scales_there(A, size, device):
    matrix = (CsrMatrix.from_csr(A) if size == 1 else BsrMatrix.from_csr(A, block_size=size)).to_device(device)
    return scales_of(inverted_blocks(matrix, matrix.diagonal_blocks(size)))


def rows_on(device, dense, size, start):
    """Return rows of blocks of one column, with all of their entries but zeros."""
    blocks = dense.reshape(-1, size, dense.shape[1]).swapaxes(1, 2)
    row, column = np.nonzero(np.any(blocks != 0.0, axis=2))
    offsets = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=len(blocks)))])
    of = (offsets.astype(np.int64), column.astype(np.int32), np.ascontiguousarray(blocks[row, column][:, :, None]))
    return BlockRows(start, *map(device.asarray, of))


def dense_of(device, rows, width):
    offsets, columns, blocks = (device.to_host(one) for one in (rows.offsets, rows.columns, rows.blocks))
    dense = np.zeros((len(offsets) - 1, blocks.shape[1], width))
    for row in range(len(offsets) - 1):
        for place in range(offsets[row], offsets[row + 1]):
            dense[row, :, columns[place]] += blocks[place, :, 0]
    return dense.reshape(-1, width)


def test_segments_have_the_same_height_and_lines_are_cut_after_eight():
    """A line of 6 low and 6 high nodes, one of 100 nodes that is 60 widths high, single nodes, and a chain without height."""
    number = np.repeat([0, 1, 2, 3, 4], [12, 100, 1, 1, 9000])
    heights = np.concatenate([[0.1] * 6, [1.0] * 6, [0.6] * 100, [0.5, 0.5], np.zeros(9000)])
    segment, piece, long = _segments(number, heights, 3.0)
    assert segment[:12].tolist() == [0] * 8 + [1] * 4 or segment[:12].tolist() == [0] * 9 + [1] * 3
    assert np.bincount(segment[12:112]).tolist() == [5] * 20
    assert np.bincount(piece[12:112]).tolist() in ([35, 35, 30], [30, 35, 35], [35, 30, 35])
    assert np.array_equal(
        np.unique(segment[12:112][piece[12:112] == 0]), np.arange(segment[12:112][piece[12:112] == 0].max() + 1)
    )
    assert segment[112:114].tolist() == [0, 0]
    assert np.bincount(piece[114:]).max() <= 4096
    assert long.tolist() == [True] * 112 + [False] * 2 + [True] * 9000


def finite_volumes(across, along, strength):
    """Return cells that are held at one side; the second axis is coupled by ``strength``."""

    def second_difference(n):
        return scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n))

    free = second_difference(along).tolil()
    free[0, 0] = free[along - 1, along - 1] = 1.0
    eye = scipy.sparse.eye_array
    A = scipy.sparse.kron(second_difference(across), eye(along))
    return scipy.sparse.csr_array(A + strength * scipy.sparse.kron(eye(across), free.tocsr()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("strength", [40.0, 400.0])
def test_lines_of_finite_volumes(device, strength):
    """With 40 the coarse level is too large for a dense inverse."""
    A = finite_volumes(200, 300, strength)
    there = Device.parse(device)
    matrix = CsrMatrix.from_csr(A).to_device(there)
    b = np.random.default_rng(1).standard_normal(A.shape[0])
    M = smoothed_aggregation(matrix, grouped="lines", aggregate_nodes=27, smoothing=1)
    result = cg(matrix, there.asarray(b), M=M, rtol=1e-8, maxiter=40)
    assert isinstance(M.level.groups, LineFactors)
    assert (M.level.T.unknowns > 800) == (strength < 100)
    assert result.converged
    assert result.iterations <= 20


def test_a_chain_is_no_line():
    """D of such a line would be all of the matrix."""
    A = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(20_000, 20_000)).tocsr()
    assert find_lines(CsrMatrix.from_csr(A), 1) is None
    assert smoothed_aggregation(CsrMatrix.from_csr(A), grouped="lines").level.groups is None


def test_without_lines_nodes_stay_alone():
    beam = Cantilever(nodes=(12, 5, 5), dof=3, material=TwoPhaseMaterial(contrast=100.0, fraction=0.3))
    A = beam.matrix()
    for matrix in (A, CsrMatrix.from_csr(jumping())):
        options = {"coordinates": beam.mesh.coordinates()} if matrix is A else {}
        lines = smoothed_aggregation(matrix, grouped="lines", **options)
        nodes = smoothed_aggregation(matrix, **options)
        assert lines.level.groups is None
        x = np.random.default_rng(1).standard_normal(matrix.shape[0])
        assert np.array_equal(lines @ x, nodes @ x)


def test_a_matrix_that_is_not_definite_on_a_line_is_refused():
    A = flat_hexahedra((5, 5, 9), 100.0).tolil()
    A[40, 40] *= 0.4
    matrix = CsrMatrix.from_csr(A.tocsr())
    with pytest.raises(InputError, match="not positive definite"):
        smoothed_aggregation(matrix, grouped="lines")


@pytest.mark.parametrize("given", ["rows", 2, None])
def test_other_groups_are_refused(given):
    with pytest.raises(InputError, match="grouped must be true, false or 'lines'"):
        SmoothedAggregationSpec(grouped=given)


@pytest.mark.parametrize("device", DEVICES)
def test_a_prepared_system_is_updated(device):
    A = flat_hexahedra((10, 10, 24), 200.0)
    b = np.random.default_rng(1).standard_normal(A.shape[0])
    given = {"preconditioner": SmoothedAggregationSpec(grouped="lines"), "memory": A.nnz * 3, "device": device}
    with penstock.prepare(A, **given) as prepared:
        first = prepared.solve(b, rtol=1e-8)
        prepared.update(2.0 * A, preconditioner="values")
        second = prepared.solve(b, rtol=1e-8)
    assert first.converged
    assert second.converged
    assert second.iterations == pytest.approx(first.iterations, abs=1)
    np.testing.assert_allclose(2.0 * second.x, first.x, atol=1e-5 * abs(first.x).max())


@pytest.mark.parametrize("device", DEVICES)
def test_solves_of_one_and_several_vectors_alternate(device):
    """Captured graphs of each number of vectors find their workspaces where they were."""
    A = flat_hexahedra((9, 9, 32), 300.0)
    B = np.random.default_rng(2).standard_normal((A.shape[0], 2))
    there = Device.parse(device)
    with streamed(A, 1, 6, device) as matrix:
        M = smoothed_aggregation(matrix, grouped="lines")
        for _ in range(3):
            for columns in (slice(0, 2), 0):
                b = there.asarray(np.ascontiguousarray(B[:, columns]))
                result = (block_cg if b.ndim == 2 else cg)(matrix, b, M=M, rtol=1e-8, maxiter=60)
                assert result.converged
                residual = B[:, columns] - A @ there.to_host(result.x)
                assert (np.linalg.norm(residual, axis=0) <= 1e-8 * np.linalg.norm(B[:, columns], axis=0)).all()


@pytest.mark.parametrize("size", [1, 3])
def test_memory_for_lines_is_reserved(size):
    A = stretched_beam(size, (9, 9, 32))
    matrix = CsrMatrix.from_csr(A) if size == 1 else BsrMatrix.from_csr(A, block_size=size)
    D = smoothed_aggregation(matrix, grouped="lines").level.groups
    held = D.nbytes + sum(array.nbytes for part in D._parts for array in (part._line, part._step, *part.workspaces))
    plain, lines = (
        SmoothedAggregationSpec(block_size=size, grouped=grouped).vectors(1, streamed_to_gpu=False)
        for grouped in (False, "lines")
    )
    assert held <= (lines - plain + 1) * 8 * A.shape[0]


def test_lines_that_new_values_undo_are_left():
    """Elements that were flat along one axis become cubes, and then flat along another."""
    nodes = (10, 10, 24)
    flat, cubes = flat_hexahedra(nodes, 200.0), flat_hexahedra(nodes, 1.2)
    b = np.random.default_rng(1).standard_normal(flat.shape[0])
    given = {"preconditioner": SmoothedAggregationSpec(grouped="lines"), "memory": flat.nnz * 3, "device": "cpu"}
    with penstock.prepare(flat, **given) as prepared:
        first = prepared.solve(b, rtol=1e-8)
        prepared.update(cubes, preconditioner="values")
        second = prepared.solve(b, rtol=1e-8)
    alone = penstock.solve(cubes, b, rtol=1e-8, **given)
    assert "solved as one" in first.message
    assert "solved as one" not in second.message
    assert second.iterations == alone.iterations


def test_rows_without_entries_are_put_in_order():
    order = LevelOrder(np.arange(6)[::-1].copy())
    empty = order.matrix(scipy.sparse.csr_array((6, 6)))
    assert empty.shape == (6, 6)
    assert empty.nnz == 0


def scattered(A, axis_order, nodes):
    """Return a matrix whose nodes are numbered with another axis fastest, and the new numbers; one face is held."""
    order = np.arange(A.shape[0]).reshape(nodes[0] - 1, *nodes[1:]).transpose(axis_order).ravel()
    return A[order][:, order].tocsr(), order


def test_lines_are_found_in_any_order_of_the_nodes():
    nodes = (9, 8, 20)
    A = flat_hexahedra(nodes, 100.0)
    assert find_lines(CsrMatrix.from_csr(A), 1).permutation is None  # the last axis is fastest: lines are runs
    planes, _ = scattered(A, (2, 0, 1), nodes)
    shuffle = np.random.default_rng(0).permutation(A.shape[0])
    for given in (planes, A[shuffle][:, shuffle].tocsr()):
        permutation = find_lines(CsrMatrix.from_csr(given), 1).permutation
        assert np.array_equal(np.sort(permutation), np.arange(A.shape[0]))
        ordered = given[permutation][:, permutation].tocsr()
        assert find_lines(CsrMatrix.from_csr(ordered), 1).permutation is None
        width = max(
            np.diff(ordered.indices[slice(*ordered.indptr[i : i + 2])][[0, -1]])[0] for i in range(len(permutation))
        )
        assert width <= 6 * 8 * 20  # a few planes of lines to either side
    assert find_lines(CsrMatrix.from_csr(flat_hexahedra(nodes, 1.0)), 1) is None
    assert find_lines(CsrMatrix.from_csr(jumping()), 1) is None
    assert find_lines(CsrMatrix.from_csr(A[:7, :7].tocsr()), 2) is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1, 3])
def test_solve_orders_a_streamed_matrix_by_lines(size, device):
    nodes = (14, 14, 26)
    A, order = scattered(flat_hexahedra(nodes, 300.0), (2, 0, 1), nodes)
    A = scipy.sparse.csr_array(scipy.sparse.kron(A, np.eye(size) + 0.1)).astype(float)
    b = np.random.default_rng(1).standard_normal(A.shape[0])
    modes = np.tile(np.eye(size), (len(order), 1))
    given = {"near_null_space": modes, "block_size": size, "precision": "float64", "device": device}
    result = penstock.solve(A, b, memory=A.nnz * 3, **given)

    assert result.converged
    assert result.iterations <= 20
    assert np.linalg.norm(b - A @ result.x) <= 1e-8 * np.linalg.norm(b)
    assert "by lines: nodes that are coupled strongly" in result.explain()
    assert "with lines of nodes" in result.explain()
    assert (
        "a coarse level with lines of nodes across flat elements, because its near-null space is given"
        in result.explain()
    )
    assert "lines of nodes across flat elements are solved as one" in result.message

    by_name = penstock.solve(A, b, memory=A.nnz * 3, preconditioner="smoothed_aggregation", **given)
    assert by_name.iterations == result.iterations
    assert "as requested" in by_name.explain()
