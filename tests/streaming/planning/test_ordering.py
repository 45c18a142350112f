"""Any symmetric matrix takes several products a sweep once its unknowns are in the order of levels."""

import numpy as np
import pytest
import scipy.sparse
import scipy.spatial

from penstock.fem import Cantilever
from penstock.solvers import cg, chebyshev
from penstock.spmv import BsrMatrix, InputError, SymmetricBsrMatrix
from penstock.streaming import (
    ColumnExtents,
    FileStore,
    HostStore,
    Ring,
    StreamedMatrix,
    Workload,
    layer_order,
    level_order,
    plan_stream,
    reach_of,
    reach_of_store,
)

BEAM = Cantilever(nodes=(33, 5, 4), dof=3)


def shuffled(seed=0, kind="csr"):
    """The beam's matrix with its nodes in any order, and that order's rows."""
    nodes = np.random.default_rng(seed).permutation(BEAM.unknowns // 3)
    rows = (3 * nodes[:, None] + np.arange(3)).ravel()
    A = BEAM.matrix("csr").to_csr()[rows][:, rows].tocsr()
    A.sort_indices()
    return (A if kind == "csr" else A.tobsr((3, 3))), rows


@pytest.mark.parametrize("kind", ["csr", "bsr"])
@pytest.mark.parametrize("block_size", [3, 6])
def test_the_matrix_in_the_new_order_is_the_same_matrix(kind, block_size):
    A, _ = shuffled(kind=kind)
    order = level_order(A, block_size)
    B = order.matrix(A)

    assert B.format == kind
    assert sorted(order.rows) == list(range(A.shape[0]))
    np.testing.assert_array_equal(B.toarray(), A.toarray()[order.rows][:, order.rows])
    assert B.tocsr().has_canonical_format
    x = np.random.default_rng(0).standard_normal((A.shape[0], 2))
    np.testing.assert_array_equal(order.back(order.forward(x)), x)
    for move in (order.forward, order.back):
        with pytest.raises(InputError, match="do not belong to"):
            move(x[: len(order.permutation)])
    np.testing.assert_allclose(order.back(B @ order.forward(x)), A @ x, atol=1e-12)


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("shape", [(60, 9), (40, 8, 6)])
def test_nodes_in_layers_couple_with_few_layers(shape, is_turned):
    rng, axes = np.random.default_rng(2), [np.arange(count) for count in shape]
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(shape))
    points = rng.permutation(grid) + rng.uniform(-0.2, 0.2, grid.shape)
    turn = np.linalg.qr(rng.standard_normal((len(shape),) * 2))[0] if is_turned else np.eye(len(shape))

    order = layer_order(points @ turn, 3)

    assert order.block_size == 3
    assert sorted(order.permutation) == list(range(len(points)))
    place, neighbours = (
        np.argsort(order.permutation),
        scipy.spatial.cKDTree(points).query_pairs(1.5, output_type="ndarray"),
    )
    assert abs(place[neighbours[:, 0]] - place[neighbours[:, 1]]).max() <= 4 * len(points) // shape[0]


@pytest.mark.parametrize(
    "points", [np.zeros((5, 3)), np.ones((1, 2)), np.array([[2.0, 0.0, 0.0]] * 2 + [[1.0, 0.0, 0.0]])]
)
def test_nodes_in_one_place_stay_in_their_order(points):
    permutation = layer_order(points).permutation

    assert permutation.tolist() == sorted(range(len(points)), key=lambda node: points[node, 0])


def test_reach_is_that_of_the_definition():
    rng = np.random.default_rng(3)
    A = scipy.sparse.random_array((60, 60), density=0.02, rng=rng, format="csr")
    A.sort_indices()
    for starts in ([0], [0, 30], list(range(0, 60, 7)), list(range(60))):
        slab = np.searchsorted(starts, np.arange(60), side="right") - 1
        rows, columns = A.nonzero()
        expected = max(1, *(abs(slab[row] - slab[column]) for row, column in zip(rows, columns, strict=True)))
        assert ColumnExtents.of(A).reach(starts) == expected


def test_reach_of_many_rows_is_that_of_the_definition():
    """Whose extents are joined in runs, wherever slabs begin."""
    rows = 5000
    near = np.arange(rows)[:, None] + np.random.default_rng(4).integers(-300, 300, (rows, 3))
    columns = np.sort(np.clip(near, 0, rows - 1), axis=1)
    A = scipy.sparse.csr_array((np.ones(3 * rows), columns.reshape(-1), np.arange(0, 3 * rows + 1, 3)), (rows, rows))
    extents = ColumnExtents.of(A)
    for starts in ([0], [0, 2048], [0, 1024, 3072], list(range(0, rows, 37)), [0, 1, 1025, 4999]):
        slab = np.searchsorted(starts, np.arange(rows), side="right") - 1
        expected = max(1, abs(slab[:, None] - slab[columns]).max())
        assert extents.reach(starts) == expected


def test_a_block_counts_as_a_whole():
    A = scipy.sparse.csr_array(([1.0, 1.0, 1.0], [3, 1, 2], [0, 1, 2, 3, 3]), shape=(4, 4))
    assert ColumnExtents.of(A).last.tolist() == [3, 1, 2, 3]
    assert ColumnExtents.of(A, 2).last.tolist() == [3, 1, 3, 3]
    assert ColumnExtents.of(A, 2).first.tolist() == [2, 0, 2, 2]


@pytest.mark.parametrize("format_", [BsrMatrix, SymmetricBsrMatrix])
def test_a_shuffled_matrix_sweeps_once_for_many_products(format_):
    A, rows = shuffled()
    order = level_order(A, 3)
    ordered = format_.from_csr(order.matrix(A))
    b = BEAM.load()[rows]
    expected = cg(BsrMatrix.from_csr(A), b, M=chebyshev(BsrMatrix.from_csr(A), 9), rtol=1e-10)
    store = HostStore.from_matrix(ordered, 14)
    plan = plan_stream(store.index, None, workload=Workload(degree=9), ring=Ring(slots=10))
    with StreamedMatrix(store, plan.budget_nbytes, plan=plan) as streamed:
        assert streamed.powers_per_sweep() >= 5
        result = cg(streamed, order.forward(b), M=chebyshev(streamed, 9), rtol=1e-10)

        assert result.converged
        assert result.sweeps <= 2 * result.iterations + 10
        np.testing.assert_allclose(order.back(result.x), expected.x, rtol=0, atol=1e-6 * np.abs(expected.x).max())


@pytest.mark.parametrize(
    ("make", "block_size", "message"),
    [
        (lambda: scipy.sparse.csr_array((4, 6)), 1, "square"),
        (lambda: scipy.sparse.eye_array(4, format="csr"), 0, "a square matrix that blocks of 0 rows divide"),
        (lambda: np.eye(4), 1, "a SciPy CSR or BSR matrix, not ndarray"),
        (lambda: scipy.sparse.eye_array(7, format="csr"), 3, "a square matrix that blocks of 3 rows divide"),
        (lambda: scipy.sparse.eye_array(12, format="csr").tobsr((2, 2)), 3, "blocks of 2 rows"),
    ],
)
def test_what_is_not_made_of_nodes_is_refused(make, block_size, message):
    with pytest.raises(InputError, match=message):
        level_order(make(), block_size)


@pytest.mark.parametrize("nodes", [(5, 4, 3), (4, 2, 6), (7, 3, 3), (2, 2, 2)])
def test_a_mesh_knows_how_far_its_nodes_couple(nodes):
    beam = Cantilever(nodes=nodes, dof=1)
    couplings, count = (
        ColumnExtents.of(Cantilever(nodes=nodes, dof=1, clamped=False).matrix("csr").to_csr()),
        beam.unknowns,
    )
    for start in range(count):
        for stop in range(start + 1, count + 1):
            assert beam.mesh.last_neighbour(start, stop) == couplings.last[start:stop].max()
    for starts in ([0], list(range(0, count, 4)), list(range(0, count, nodes[1] * nodes[2]))):
        lasts = [beam.mesh.last_neighbour(*slab) for slab in zip(starts, [*starts[1:], count], strict=True)]
        columns = [range(start, last + 1) for start, last in zip(starts, lasts, strict=True)]
        assert reach_of(starts, columns) == couplings.reach(starts)


@pytest.mark.parametrize("name", ["csr", "bsr", "sliced_bsr", "symmetric_bsr"])
def test_a_store_tells_its_reach_by_its_structure(name, tmp_path):
    slabs = list(BEAM.subdivisions(9, name))
    store = FileStore.create(tmp_path / "store", slabs, shape=BEAM.shape)
    with store, StreamedMatrix(store, store.index.nbytes // 2) as A:
        starts = store.index.row_starts
        assert reach_of_store(store) == A.reach == ColumnExtents.of(BEAM.matrix("bsr").to_csr(), 3).reach(starts)
