"""What rows of blocks are turned into: transposes, whole symmetric matrices, and diagonals without vanishing entries."""

import itertools

import numpy as np
import pytest
import scipy.sparse
from kernel_targets import TARGETS

from penstock.spmv import BsrMatrix
from penstock.spmv.compilation.table import find_kernel
from penstock.spmv.products import block_rows as module
from penstock.spmv.products.block_rows import BlockRows

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def kernels_of(monkeypatch):
    """Make the functions of the module take the kernels of a target, also those of the emulator, whose arrays are of NumPy."""

    def use(target):
        monkeypatch.setattr(module, "find_kernel", lambda name, way, kind: find_kernel(name, way, target.device_kind))

    return use


def random_upper(count, size, seed):
    """The upper half of a symmetric matrix with empty rows and without some diagonal blocks, and the whole of it."""
    rng = np.random.default_rng(seed)
    present = np.triu(rng.random((count, count)) < 0.2)
    present[[3, 7]], present[:, [3, 7]] = False, False
    rows, columns = np.nonzero(present)
    blocks = rng.uniform(-1, 1, (len(rows), size, size))
    on_diagonal = rows == columns
    blocks[on_diagonal] += blocks[on_diagonal].swapaxes(1, 2)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=count))])
    upper = BlockRows(0, offsets, columns.astype(np.int32), blocks, count)
    half = scipy.sparse.bsr_array((blocks, columns, offsets), shape=(count * size,) * 2).toarray()
    return upper, half + np.triu(half, 1).T * np.kron(1 - np.eye(count), np.ones((size, size)))


def put(target, rows):
    return BlockRows(rows.start, *(target.put(of) for of in (rows.offsets, rows.columns, rows.blocks)), rows.width)


def dense(target, rows, columns):
    offsets, indices, blocks = (target.get(of) for of in (rows.offsets, rows.columns, rows.blocks))
    for first, stop in itertools.pairwise(offsets):
        assert (np.diff(indices[first:stop]) > 0).all()
    shape = ((len(offsets) - 1) * blocks.shape[1], columns * blocks.shape[2])
    return scipy.sparse.bsr_array((blocks, indices, offsets), shape=shape).toarray()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("size", [1, 3, 6])
def test_a_symmetric_matrix_is_made_of_its_upper_half(target, kernels_of, size):
    kernels_of(target)
    upper, expected = random_upper(70, size, seed=size)

    with target.running():
        whole = module.both_halves(put(target, upper))

    assert np.array_equal(dense(target, whole, 70), expected)
    assert whole.offsets[3] == whole.offsets[4]


@pytest.mark.parametrize("target", TARGETS)
def test_a_matrix_without_blocks_has_an_empty_mirror_image(target, kernels_of):
    kernels_of(target)
    nothing = BlockRows(0, np.zeros(5, dtype=np.int64), np.empty(0, dtype=np.int32), np.empty((0, 2, 2)), 4)

    with target.running():
        whole = module.both_halves(put(target, nothing))

    assert target.get(whole.offsets).tolist() == [0] * 5
    assert whole.blocks.shape == (0, 2, 2)


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("tall", "wide"), [(1, 1), (3, 6), (2, 1)])
def test_transposes_are_those_of_numpy(target, monkeypatch, dtype, tall, wide):
    rng = np.random.default_rng(tall)
    present = rng.random((40, 90)) < 0.1
    present[:, [0, 5, 89]], present[11] = False, False
    rows, columns = np.nonzero(present)
    blocks = rng.uniform(-1, 1, (len(rows), tall, wide)).astype(dtype)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=40))])
    A = put(target, BlockRows(0, offsets, columns.astype(np.int32), blocks, 90))

    with target.running(), monkeypatch.context() as patch:
        patch.setattr(module, "find_kernel", lambda name, way, kind: find_kernel(name, way, "cuda"))
        number = module.row_numbers(A.offsets, len(rows))
        pattern = A.transposed_pattern(90)
        scalars = target.put(np.empty((len(rows), wide, tall), dtype=dtype))
        function = module.BLOCK_ROW_KERNELS.function(f"transpose_blocks<{module.type_names(scalars)}>")
        arguments = (np.int64(scalars.size), np.int32(tall), np.int32(wide), pattern.order, A.blocks, scalars)
        module.launch(function, scalars.size, 256, arguments)

        if target.name == "gpu":
            whole_of_gpu = A.transposed(90)
            assert np.array_equal(target.get(whole_of_gpu.blocks), target.get(scalars))
            assert np.array_equal(target.get(whole_of_gpu.columns), target.get(pattern.columns))

    assert np.array_equal(target.get(number), rows)
    found = BlockRows(0, pattern.offsets, pattern.columns, scalars, 40)
    whole = scipy.sparse.bsr_array((blocks, columns, offsets), shape=(40 * tall, 90 * wide)).toarray()
    assert np.array_equal(dense(target, found, 40), whole.T)


@pytest.mark.parametrize("target", TARGETS)
def test_groups_begin_where_their_first_key_is(target, kernels_of):
    kernels_of(target)
    keys = np.array([4, 1, 4, 4, 1, 6], dtype=np.int32)

    with target.running():
        order, offsets = module.grouped(target.put(keys), 9)

        none = module.grouped(target.put(keys[:0]), 3)[1]
        wide = np.sort(np.random.default_rng(0).integers(20_000, 21_000, 3000)).astype(np.int32)
        of_wide = module.grouped(target.put(wide), 50_000)[1]

    assert target.get(order).tolist() == [1, 4, 0, 2, 3, 5]
    assert target.get(offsets).tolist() == [0, 0, 2, 2, 2, 5, 5, 6, 6, 6]
    assert target.get(none).tolist() == [0] * 4
    assert np.array_equal(target.get(of_wide), np.searchsorted(wide, np.arange(50_001)))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kept", [1.0, -1.0, np.nan])  # what is not rounding stays
def test_diagonal_entries_that_vanish_are_replaced_where_there_is_a_diagonal_block(target, kernels_of, kept):
    kernels_of(target)
    offsets, columns = np.array([0, 2, 3, 4]), np.array([0, 2, 1, 0], dtype=np.int32)
    values, sizes = np.zeros((4, 2, 2)), np.array([4.0, 3.0, 2.0, 2.0, 5.0, 5.0])
    values[0, 0, 0], values[0, 1, 1], values[2, 0, 0], values[2, 1, 1] = kept, 1e-14, -1e-14, 1e-12
    A = BsrMatrix((6, 6), np.dtype(np.float64), target.put(offsets), target.put(columns), target.put(values))

    with target.running():
        replaced = find_kernel("block_rows", "replace_vanishing", target.device_kind)(A, target.put(sizes), 1e-13)

    assert target.get(replaced).tolist() == [False, True, True, False, False, False]
    expected = values.copy()
    expected[0, 1, 1], expected[2, 0, 0] = 3.0, 2.0  # the third row has no diagonal block
    assert np.array_equal(target.get(A.values), expected, equal_nan=True)


@pytest.mark.parametrize("target", TARGETS)
def test_rows_with_entries_are_counted(target):
    offsets = np.cumsum(np.arange(2001) % 7 % 3)

    with target.running():
        found = find_kernel("block_rows", "count_with_entries", target.device_kind)(target.put(offsets))

    assert found == np.count_nonzero(np.diff(offsets))
