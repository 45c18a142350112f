"""How rows are handed to CPU threads: equal shares unless a matrix is large and uneven; the bits are the same."""

import numpy as np
import pytest
import scipy.sparse
from numba import get_num_threads

from penstock.spmv import CsrMatrix, SellMatrix, format_named
from penstock.spmv.compilation import chunk_size as scheduling
from penstock.spmv.compilation.chunk_size import chunk_size, last_level_cache_nbytes
from penstock.spmv.formats import chunk_products

BIG = 1 << 50


def offsets_of(lengths):
    return np.concatenate(([0], np.cumsum(lengths)))


def uneven(rows):
    return np.where(np.arange(rows) % 50 == 0, 40, 2)


def matrix_of(lengths, columns):
    generator = np.random.default_rng(0)
    indices = np.concatenate([np.sort(generator.permutation(columns)[:length]) for length in lengths])
    values = generator.uniform(-1, 1, indices.size)
    return scipy.sparse.csr_array((values, indices, offsets_of(lengths)), shape=(lengths.size, columns))


def test_a_matrix_that_fits_the_cache_is_shared_out_at_once():
    assert chunk_size(offsets_of(uneven(10_000)), last_level_cache_nbytes()) == 0
    assert chunk_size(offsets_of(uneven(10_000)), last_level_cache_nbytes() + 1) > 0


@pytest.mark.parametrize("lengths", [np.full(10_000, 27), np.zeros(10_000, dtype=int), np.arange(10_000) % 2 + 4])
def test_even_rows_are_shared_out_at_once(lengths):
    assert chunk_size(offsets_of(lengths), BIG) == 0


def test_the_limit_is_a_coefficient_of_variation_of_0_4():
    assert chunk_size(offsets_of(np.array([6, 14] * 500)), BIG) == 0  # 4 / 10
    assert chunk_size(offsets_of(np.array([59, 141] * 500)), BIG) > 0  # 41 / 100


def test_few_rows_are_shared_out_at_once():
    assert chunk_size(offsets_of(uneven(63)), BIG) == 0
    assert chunk_size(offsets_of(uneven(64)), BIG) == 1
    assert chunk_size(np.array([0]), BIG) == 0


def test_a_large_uneven_matrix_goes_out_in_32_pieces_a_thread():
    rows = 3200 * get_num_threads()

    assert chunk_size(offsets_of(uneven(rows)), BIG) == 100


def test_the_last_level_cache_has_a_plausible_size():
    assert 1 << 15 <= last_level_cache_nbytes() <= 1 << 36


def test_matrices_know_their_rows_at_once(monkeypatch):
    A = matrix_of(uneven(2000), 60)
    assert CsrMatrix.from_csr(A).chunk_size == 0
    assert SellMatrix.from_csr(A).chunk_size == 0

    monkeypatch.setattr(scheduling, "last_level_cache_nbytes", lambda: 0)

    assert CsrMatrix.from_csr(A).chunk_size == 2000 // (32 * get_num_threads())
    natural = SellMatrix.from_csr(A, chunk_height=4, sorting_scope=1)
    assert natural.chunk_size == max(1, 500 // (32 * get_num_threads())) * 4


@pytest.mark.parametrize("columns", [None, 3])
@pytest.mark.parametrize(
    ("name", "keywords"),
    [
        ("csr", {}),
        ("sell", {"chunk_height": 32, "sorting_scope": 64}),
        ("sell", {"chunk_height": 8, "sorting_scope": 1}),
        ("sell", {"chunk_height": 4, "sorting_scope": 1}),
        ("sliced_ell", {}),
    ],
    ids=str,
)
def test_products_do_not_depend_on_the_rows_at_once(name, keywords, columns):
    A = matrix_of(uneven(1003), 200)
    generator = np.random.default_rng(2)
    x = generator.uniform(-1, 1, (200,) if columns is None else (200, columns))
    out = generator.uniform(-1, 1, (1003, *x.shape[1:]))

    def product(rows):
        matrix = format_named(name).from_csr(A, **keywords)
        vars(matrix)["chunk_size"] = rows  # in the place of what would be computed
        return matrix.apply(x, out.copy(), alpha=1.5, beta=-1.0)

    expected = product(0)

    np.testing.assert_allclose(expected, 1.5 * (A @ x) - out, rtol=1e-12, atol=1e-12)
    for rows in (1, 5, 16, 100, 1003, 10**6):
        np.testing.assert_array_equal(product(rows), expected)


def test_strips_of_rows_are_handed_out_by_the_number_of_rows(monkeypatch):
    seen = []
    scheduled = chunk_products.scheduled
    monkeypatch.setattr(chunk_products, "scheduled", lambda count: seen.append(count) or scheduled(count))
    A = matrix_of(uneven(300), 60)

    for height in (32, 8, 2):
        matrix = SellMatrix.from_csr(A, chunk_height=height, sorting_scope=1)
        vars(matrix)["chunk_size"] = 64
        matrix @ np.ones(60)

    assert seen == [4, 8, 64]
