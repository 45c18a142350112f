"""SELL-C-sigma: what sorting saves, permutations, lanes and slabs; and chunks that begin past entry 2**31."""

import numpy as np
import pytest
import scipy.sparse

from penstock.solvers import cg
from penstock.spmv import CooMatrix, InputError, SellMatrix, SlicedBsrMatrix, format_named
from penstock.spmv.formats.convert import chunk_offsets, length_permutation
from penstock.spmv.formats.sell import choose_sorting_scope
from penstock.spmv.model.roofline import chunk_occupancy

BASE = 2**33


def with_lengths(lengths, columns=None):
    """Return a CSR matrix whose rows have these lengths, with seeded values; row i begins at column i if that fits."""
    lengths = np.asarray(lengths)
    columns = columns or max(int(lengths.max()), 1)
    starts = [min(row % columns, columns - length) for row, length in enumerate(lengths)]
    indices = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    values = np.random.default_rng(0).uniform(0.5, 1, int(lengths.sum()))
    return scipy.sparse.csr_array((values, np.concatenate(indices), offsets), shape=(lengths.size, columns))


def worst_lengths(rows, height):
    """Row lengths of Kreutzer et al. (2014), section 3.4: one full row in every chunk, single entries otherwise."""
    return np.where(np.arange(rows) % height == 0, rows, 1)


def occupancy(matrix):
    return matrix.nnz / matrix.values.size


@pytest.mark.parametrize(("rows", "height"), [(64, 4), (128, 8), (512, 16)])
def test_a_scope_of_the_square_of_the_height_fills_the_worst_case(rows, height):
    A = with_lengths(worst_lengths(rows, height))

    natural = SellMatrix.from_csr(A, chunk_height=height, sorting_scope=1)
    ordered = SellMatrix.from_csr(A, chunk_height=height, sorting_scope=height**2)

    assert occupancy(natural) == chunk_occupancy(np.diff(A.indptr), height) == (rows + height - 1) / (height * rows)
    assert occupancy(ordered) == chunk_occupancy(np.diff(A.indptr), height, height**2) == 1.0
    np.testing.assert_allclose(ordered @ np.ones(rows), A @ np.ones(rows), rtol=1e-14)


def test_a_scope_half_as_large_leaves_half_of_every_first_chunk_empty():
    assert chunk_occupancy(worst_lengths(128, 8), 8, 32) == (16 * 128 + 112) / (4 * (8 * 128 + 3 * 8))


@pytest.mark.parametrize("scope", [1, 2, 4, 8, 16, 32])
def test_sorting_inside_a_divisor_of_the_height_changes_no_chunk(scope):
    lengths = np.random.default_rng(1).integers(0, 50, 32 * 7 + 5)

    ordered = lengths[length_permutation(lengths, scope)]

    np.testing.assert_array_equal(chunk_offsets(ordered, 32), chunk_offsets(lengths, 32))
    assert chunk_occupancy(lengths, 32, scope) == chunk_occupancy(lengths, 32)


@pytest.mark.parametrize("scope", [1, 3, 8, 64, 256])
def test_the_permutation_orders_each_scope_by_length_and_keeps_equal_lengths_in_order(scope):
    lengths = np.random.default_rng(scope).integers(0, 6, 203)

    permutation = length_permutation(lengths, scope)

    assert permutation.dtype == np.int32
    for start in range(0, 203, scope):
        place = np.arange(start, min(start + scope, 203))
        expected = place[np.argsort(-lengths[place], kind="stable")]
        np.testing.assert_array_equal(permutation[place], expected)


def test_there_is_a_permutation_of_no_rows_and_of_empty_rows():
    assert length_permutation(np.zeros(0, dtype=np.int64), 32).size == 0
    with pytest.raises(InputError, match="at least 1, not 0"):
        length_permutation(np.ones(3, dtype=np.int64), 0)
    np.testing.assert_array_equal(length_permutation(np.zeros(5, dtype=np.int64), 4), np.arange(5))


@pytest.mark.parametrize("height", [1, 4, 32])
def test_even_rows_are_not_sorted(height):
    assert choose_sorting_scope(np.full(1000, 27), height) == 1
    assert choose_sorting_scope(np.zeros(0, dtype=np.int64), height) == 1


def test_rows_that_alternate_are_sorted_in_the_square_of_the_height():
    assert choose_sorting_scope(worst_lengths(256, 4), 4) == 16
    assert choose_sorting_scope(worst_lengths(512, 8), 8) == 64


@pytest.mark.parametrize("seed", range(4))
def test_the_scope_chosen_stores_little_more_than_a_full_sort_and_a_smaller_one_does_not(seed):
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, generator.integers(3, 400), 900)

    scope = choose_sorting_scope(lengths, 8)

    full = chunk_occupancy(lengths, 8, 1024)
    assert scope == 1 or (scope % 8 == 0 and scope & (scope - 1) == 0)
    assert chunk_occupancy(lengths, 8, scope) >= full / 1.02
    assert scope == 1 or chunk_occupancy(lengths, 8, scope // 2 if scope > 16 else 1) < full / 1.02


def test_a_solver_works_in_the_permuted_space_and_its_solution_is_permuted_back():
    generator = np.random.default_rng(5)
    lower = scipy.sparse.random_array((300, 300), density=0.01, rng=generator, format="lil")
    lower[:, ::17] = scipy.sparse.random_array((300, 18), density=0.5, rng=generator)
    A = scipy.sparse.tril(lower, -1)
    A = (A + A.T).tocsr()
    A = (A + scipy.sparse.diags_array(np.asarray(abs(A).sum(axis=1)).ravel() + 1)).tocsr()
    A.sort_indices()
    b = generator.uniform(-1, 1, 300)

    p = length_permutation(np.diff(A.indptr), 64)
    permuted = A[p][:, p].tocsr()
    permuted.sort_indices()
    matrix = SellMatrix.from_csr(permuted, chunk_height=8, sorting_scope=1)
    x = np.empty(300)
    x[p] = cg(matrix, b[p], rtol=1e-12).x

    rows_only = SellMatrix.from_csr(A, chunk_height=8, sorting_scope=64)
    assert (
        matrix.values.size
        == rows_only.values.size
        < 0.8 * SellMatrix.from_csr(A, chunk_height=8, sorting_scope=1).values.size
    )
    np.testing.assert_allclose(x, scipy.sparse.linalg.spsolve(A.tocsc(), b), rtol=1e-9)
    np.testing.assert_allclose(rows_only @ x, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "keywords",
    [
        {"chunk_height": 0},
        {"chunk_height": 24},
        {"chunk_height": -4},
        {"chunk_height": 8.0},
        {"chunk_height": 8, "sorting_scope": 24},
        {"chunk_height": 8, "sorting_scope": 0},
        {"chunk_height": 8, "sorting_scope": 4},
        {"chunk_height": 8, "sorting_scope": "all"},
        {"lanes": 3},
        {"lanes": 0},
        {"lanes": 64},
        {"chunk_height": 64, "lanes": 32},
    ],
    ids=str,
)
def test_numbers_that_sell_cannot_use_are_refused(keywords):
    with pytest.raises(InputError, match=r"power of two|at most 1024"):
        SellMatrix.from_csr(with_lengths([2, 1, 3]), **keywords)


@pytest.mark.parametrize("scope", [8, 16, 48, 33, -32])
def test_scopes_that_sliced_bsr_cannot_use_are_refused(scope):
    with pytest.raises(InputError, match="power of two"):
        SlicedBsrMatrix.from_csr(with_lengths([2, 1, 3]), block_size=1, sorting_scope=scope)


def test_a_scope_of_0_is_refused_by_sliced_bsr():
    with pytest.raises(InputError, match="power of two"):
        SlicedBsrMatrix.from_csr(with_lengths([2, 1, 3]), block_size=1, sorting_scope=0)


@pytest.mark.parametrize(("start", "stop"), [(0, 8), (8, 32), (4, 16), (16, 24), (1, 50), (16, 49)])
def test_slabs_that_cut_a_scope_are_refused(start, stop):
    matrix = SellMatrix.from_csr(with_lengths(np.arange(1, 51)), chunk_height=4, sorting_scope=16)

    with pytest.raises(InputError, match="multiples of 16"):
        matrix.rows(start, stop)


def test_slabs_of_whole_scopes_hold_permutations_of_their_own_rows():
    A = with_lengths(np.random.default_rng(3).integers(0, 20, 50))
    matrix = SellMatrix.from_csr(A, chunk_height=4, sorting_scope=16, lanes=2)

    for start, stop in ((0, 16), (16, 48), (32, 50), (0, 50)):
        slab = matrix.rows(start, stop)
        np.testing.assert_array_equal(np.sort(slab.permutation), np.arange(stop - start))
        assert (slab.chunk_offsets[0], slab.lanes) == (0, 2)
        assert (slab.to_csr() != A[start:stop]).nnz == 0
        slab.check_shapes()


@pytest.mark.parametrize(
    ("rows", "length", "lanes"), [(64, 300, 32), (64, 100, 8), (64, 16, 1), (64, 17, 2), (1, 4000, 32), (3000, 40, 4)]
)
def test_few_long_rows_get_more_lanes_as_long_as_each_has_eight_entries(rows, length, lanes):
    A = with_lengths(np.full(rows, length))

    assert SellMatrix.from_csr(A).lanes == lanes
    assert lanes == 1 or length >= 8 * lanes
    assert format_named("sliced_ell").from_csr(A).lanes == 1


def test_many_rows_keep_a_single_lane_and_high_chunks_leave_room_for_few():
    ones = scipy.sparse.csr_array(np.ones((2, 4000)))

    assert SellMatrix.from_csr(ones, chunk_height=512).lanes == 2
    assert SellMatrix.from_csr(with_lengths(np.full(2**18, 33)), sorting_scope=1).lanes == 1


class FarAway(np.ndarray):
    """A one-dimensional array whose first entry has number ``first``; what lies before does not exist."""

    first = 0

    def __getitem__(self, key):
        assert isinstance(key, slice)
        return np.asarray(self)[key.start - self.first : key.stop - self.first]

    def searchsorted(self, *arguments, **keywords):
        return np.asarray(self).searchsorted(*arguments, **keywords) + self.first


def far_away(array, first):
    result = array.view(FarAway)
    result.first = first
    return result


@pytest.mark.parametrize(
    ("name", "keywords", "scalars"),
    [
        ("sell", {"chunk_height": 32, "sorting_scope": 64}, 1),
        ("sell", {"chunk_height": 4, "sorting_scope": 1}, 1),
        ("sliced_ell", {}, 1),
        ("sliced_bsr", {"block_size": 3}, 9),
        ("sliced_bsr", {"block_size": 2, "sorting_scope": 32}, 4),
    ],
)
def test_chunks_past_2_to_the_33_are_kept_and_a_slab_of_them_starts_at_0(name, keywords, scalars):
    A = with_lengths(np.random.default_rng(9).integers(0, 30, 384), columns=384)
    near = format_named(name).from_csr(A, **keywords)
    arrays = {
        "chunk_offsets": near.chunk_offsets + BASE,
        "column_indices": far_away(near.column_indices, BASE),
        "values": far_away(near.values, BASE * scalars),
        "permutation": near.permutation,
    }
    far = format_named(name).from_arrays(near.shape, near.dtype, arrays, near.parameters())
    x = np.random.default_rng(1).uniform(-1, 1, 384)

    for start, stop in ((0, 384), (near.row_granularity, 384), (0, near.row_granularity)):
        slab = far.rows(start, stop)
        assert slab.chunk_offsets.dtype == np.int64
        assert (slab.chunk_offsets[0], slab.chunk_offsets[-1]) == (0, slab.column_indices.size)
        slab.check_shapes()
        np.testing.assert_allclose(slab @ x, A[start:stop] @ x, rtol=1e-13, atol=1e-13)
    assert far.chunk_offsets[0] == BASE


def test_coordinates_past_2_to_the_33_are_found_for_a_slab():
    A = with_lengths(np.random.default_rng(9).integers(0, 30, 100), columns=50)
    near = CooMatrix.from_csr(A)
    far = CooMatrix.from_arrays(
        near.shape, near.dtype, {name: far_away(array, BASE) for name, array in near.arrays().items()}, {}
    )

    slab = far.rows(30, 70)

    assert slab.row_indices.dtype == np.int32
    assert (slab.to_csr() != A[30:70]).nnz == 0


def test_offsets_of_chunks_and_orders_of_rows_do_not_overflow_32_bits():
    lengths = np.array([1, 2**31 - 1, 5, 2**31 - 1, 7, 8], dtype=np.int64)

    np.testing.assert_array_equal(chunk_offsets(lengths, 4), [0, 4 * (2**31 - 1), 4 * (2**31 - 1) + 32])
    np.testing.assert_array_equal(chunk_offsets(lengths.astype(np.int32), 4), chunk_offsets(lengths, 4))
    np.testing.assert_array_equal(length_permutation(lengths, 2**20), [1, 3, 5, 4, 2, 0])
    np.testing.assert_array_equal(length_permutation(lengths.astype(np.int32), 4), [1, 3, 2, 0, 5, 4])
