"""Products of sparse matrices of blocks are those of SciPy, with ascending columns, on every kind of device."""

import numpy as np
import pytest
import scipy.sparse
from kernel_targets import TARGETS

from penstock.spmv.compilation.table import find_kernel
from penstock.spmv.products.block_products import block_product
from penstock.spmv.products.block_rows import BlockRows, block_rows

pytestmark = pytest.mark.usefixtures("one_thread")

EPS = np.finfo(np.float64).eps


def random_rows(counts, columns, height, width, seed, start=0):
    """Rows of the given numbers of blocks, at random places."""
    rng = np.random.default_rng(seed)
    chosen = [np.sort(rng.choice(columns, count, replace=False)) for count in counts]
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    blocks = rng.uniform(-1, 1, (offsets[-1], height, width))
    return BlockRows(start, offsets, np.concatenate([*chosen, np.empty(0)]).astype(np.int32), blocks)


def dense(rows, columns):
    count, (height, width) = len(rows.offsets) - 1, rows.blocks.shape[1:]
    shape = (count * height, columns * width)
    if not rows.columns.size:
        return np.zeros(shape)
    return scipy.sparse.bsr_array((rows.blocks, rows.columns, rows.offsets), shape=shape).toarray()


def put(target, rows):
    return BlockRows(rows.start, *(target.put(array) for array in (rows.offsets, rows.columns, rows.blocks)))


def product_on(target, A, B, columns):
    """The product by the kernels of a target, as host arrays."""
    kind = target.device_kind
    with target.running():
        A, B = put(target, A), put(target, B)
        offsets, found = find_kernel("block_rows", "pattern", kind)(A, B, columns)
        blocks = target.put(np.full((found.size, A.blocks.shape[1], B.blocks.shape[2]), np.nan))
        C = BlockRows(A.start, offsets, found, blocks)
        find_kernel("block_rows", "multiply", kind)(A, B, columns, C, False)
    return BlockRows(C.start, *(target.get(array) for array in (C.offsets, C.columns, C.blocks)))


SHAPES = [(1, 1, 1), (3, 3, 6), (6, 3, 6), (2, 2, 2), (6, 6, 6), (1, 2, 1)]


# Of rows of the product, and of rows: for which teams a GPU takes.
TEAMS = {
    "part of a warp": (1 << 30, 1 << 30, 0),
    "half a warp": (0, 1 << 30, 0),
    "a warp": (0, 0, 0),
    "a thread block": (0, 0, 1 << 30),
}
_LIMITS = ("_SHORT_ROW", "_MIDDLING_ROW", "_FEW_ROWS")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("team", TEAMS)
@pytest.mark.parametrize(("height", "inner", "across"), SHAPES[:4])
def test_products_are_those_of_dense_matrices(monkeypatch, target, team, height, inner, across):
    for name, value in zip(_LIMITS, TEAMS[team], strict=True):
        monkeypatch.setattr(f"penstock.spmv.products.block_products.{name}", value)
    a_counts, b_counts = [0, 3, 1, 27, 0, 12, 40, 2], [1, 0, 4, 9, 33, 2] * 10
    A = random_rows(a_counts, len(b_counts), height, inner, seed=1)
    B = random_rows(b_counts, 50, inner, across, seed=2)

    C = product_on(target, A, B, 50)

    expected = dense(A, len(b_counts)) @ dense(B, 50)
    bound = abs(dense(A, len(b_counts))) @ abs(dense(B, 50))
    assert (abs(dense(C, 50) - expected) <= 2 * EPS * inner * len(b_counts) * bound).all()
    assert len(C.columns) < 8 * 50
    if target.device_kind == "cuda":
        for row in range(len(a_counts)):
            assert (np.diff(C.columns[C.offsets[row] : C.offsets[row + 1]]) > 0).all()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("size", [1, 3])
def test_the_upper_half_of_a_product_is_that_of_the_whole(target, size):
    """A pattern that leaves places out, after rows and before rows that have them."""
    A, B = random_rows([3, 0, 12, 7, 2], 20, size, size, seed=21), random_rows([4, 1, 0, 5] * 5, 5, size, size, seed=22)
    kind = target.device_kind
    with target.running():
        A, B = put(target, A), put(target, B)
        offsets, columns = find_kernel("block_rows", "pattern", kind)(A, B, 5, upper=True)
        blocks = target.put(np.full((columns.size, size, size), np.nan))
        C = BlockRows(0, offsets, columns, blocks)
        find_kernel("block_rows", "multiply", kind)(A, B, 5, C, False)
    C = BlockRows(0, *(target.get(array) for array in (C.offsets, C.columns, C.blocks)))
    A, B = (BlockRows(0, *(target.get(array) for array in (of.offsets, of.columns, of.blocks))) for of in (A, B))

    of_blocks = np.kron(np.triu(np.ones((5, 5))), np.ones((size, size)))
    assert np.allclose(dense(C, 5), of_blocks * (dense(A, 20) @ dense(B, 5)), atol=1e-13)
    assert (C.columns >= np.repeat(np.arange(5), np.diff(C.offsets))).all()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("columns", [30, 600, 3000, 9000])
def test_the_upper_half_of_rows_from_one_on_begins_at_their_diagonal(target, columns):
    """By tables of every length, and dense rows; the first row is not row 0."""
    A, B = random_rows([5, 2, 0, 9], 9, 1, 1, seed=3, start=7), random_rows([columns // 2] * 9, columns, 1, 1, seed=4)
    kind = target.device_kind
    with target.running():
        A, B = put(target, A), put(target, B)
        whole = [target.get(of) for of in find_kernel("block_rows", "pattern", kind)(A, B, columns)]
        offsets, found = (
            target.get(of) for of in find_kernel("block_rows", "pattern", kind)(A, B, columns, upper=True)
        )

    rows = np.repeat(np.arange(4), np.diff(whole[0]))
    kept = whole[1] >= rows + 7
    assert 0 < kept.sum() < kept.size
    assert offsets.tolist() == [0, *np.cumsum(np.bincount(rows[kept], minlength=4))]
    for row in range(4):
        expected = whole[1][kept & (rows == row)]
        own = found[offsets[row] : offsets[row + 1]]
        assert (own if target.device_kind == "cuda" else np.sort(own)).tolist() == np.sort(expected).tolist()


@pytest.mark.parametrize("target", TARGETS[1:])
def test_results_do_not_depend_on_the_team(monkeypatch, target):
    """So they do not depend on where a streamed matrix is cut either."""
    A, B = random_rows([3, 70, 27, 300], 400, 3, 3, seed=5), random_rows([1, 40, 9, 2] * 100, 50, 3, 6, seed=6)
    found = []
    for team in TEAMS.values():
        for name, value in zip(_LIMITS, team, strict=True):
            monkeypatch.setattr(f"penstock.spmv.products.block_products.{name}", value)
        found.append(product_on(target, A, B, 50).blocks)

    for other in found[1:]:
        assert np.array_equal(found[0], other)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("columns", [127, 128, 600, 3000, 9000])
def test_rows_of_many_columns_take_larger_tables(target, columns):
    A, B = random_rows([5, 2], 5, 1, 1, seed=3), random_rows([columns, 1, columns, 0, 70], columns, 1, 1, seed=4)

    C = product_on(target, A, B, columns)

    assert np.allclose(dense(C, columns), dense(A, 5) @ dense(B, columns), atol=1e-14)
    assert C.offsets[1] == columns


@pytest.mark.parametrize("target", TARGETS)
def test_rows_of_b_may_begin_later_and_sums_go_on(target):
    """B holds rows 10 to 14; what C holds before is added to."""
    A, B = random_rows([2, 5], 5, 6, 3, seed=7), random_rows([3, 2, 4, 1, 2], 8, 3, 6, seed=8, start=10)
    A.columns += 10

    C = product_on(target, A, B, 8)
    kind = target.device_kind
    with target.running():
        again = put(target, BlockRows(0, C.offsets, C.columns, C.blocks.copy()))
        find_kernel("block_rows", "multiply", kind)(put(target, A), put(target, B), 8, again, True)

    A.columns -= 10
    assert np.allclose(dense(C, 8), dense(A, 5) @ dense(B, 8), atol=1e-13)
    assert np.allclose(target.get(again.blocks), 2 * C.blocks, atol=1e-13)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("size", "modes"), [(1, 1), (3, 6), (2, 1)])
def test_smoothed_rows(target, size, modes):
    own = random_rows([1, 2, 0, 3], 6, size, modes, seed=9)
    image = random_rows([6, 6, 2, 6], 6, size, modes, seed=10)
    diagonal = np.random.default_rng(11).uniform(-1, 1, (4, size, size))
    expected = dense(own, 6) - 0.3 * scipy.sparse.block_diag(diagonal) @ dense(image, 6)

    with target.running():
        given = put(target, BlockRows(0, image.offsets, image.columns, image.blocks.copy()))
        find_kernel("block_rows", "smooth", target.device_kind)(given, put(target, own), target.put(diagonal), 0.3)

    found = BlockRows(0, image.offsets, image.columns, target.get(given.blocks))
    assert np.allclose(dense(found, 6), expected, atol=1e-14)


def test_the_transpose_and_parts():
    A = random_rows([0, 4, 2, 7, 1], 9, 2, 3, seed=12)

    back = A.transposed(9)
    part = A.part(1, 4)

    assert np.array_equal(dense(back, 5), dense(A, 9).T)
    assert np.array_equal(dense(part, 9), dense(A, 9)[2:8])
    assert np.array_equal(dense(BlockRows.joined([A.part(0, 2), A.part(2, 5)], 0), 9), dense(A, 9))


def test_rows_that_no_part_has_are_empty():
    A = random_rows([2, 4, 2, 7, 1], 9, 2, 3, seed=12)

    joined = BlockRows.joined([A.part(1, 2), A.part(4, 5)], 0)

    expected = dense(A, 9)
    expected[[0, 1, 4, 5, 6, 7]] = 0
    assert joined.start == 0
    assert np.array_equal(dense(joined, 9), expected)


def test_blocks_in_any_order_become_rows():
    A = random_rows([3, 0, 2], 4, 2, 2, seed=13)
    rows = np.repeat(np.arange(3), np.diff(A.offsets))
    order = np.random.default_rng(14).permutation(len(rows))

    found = block_rows(0, 3, rows[order], A.columns[order], A.blocks[order], 4)

    assert np.array_equal(dense(found, 4), dense(A, 4))
    assert np.array_equal(found.columns, A.columns)
    assert found.reach == (A.columns.min(), A.columns.max())


def test_a_product_chooses_the_device_of_its_rows():
    A, B = random_rows([2, 1], 3, 2, 2, seed=15), random_rows([1, 2, 2], 4, 2, 2, seed=16)
    prepared = []

    C = block_product(A, B, 4, prepared.append)

    assert prepared[0] is C
    assert np.allclose(dense(C, 4), dense(A, 3) @ dense(B, 4), atol=1e-15)
