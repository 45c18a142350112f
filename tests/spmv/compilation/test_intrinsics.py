"""What kernels ask of the processor by name does what arrays would."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit
from numba.core.errors import TypingError

from penstock.spmv.compilation.intrinsics import (
    WIDTH,
    add_triples,
    consecutive,
    load,
    load_triples,
    multiply,
    multiply_add,
    prefetch,
    store,
)

pytestmark = pytest.mark.parametrize("dtype", [np.float64, np.float32])


@njit
def _combined(a, b, c, out):
    store(out, 1, multiply_add(load(a, 2), load(b, 3), load(c, 1)))
    store(out, 6, multiply(load(a, 0), load(b, 0)))


def test_loads_products_and_stores(dtype):
    a, b, c = np.random.default_rng(0).standard_normal((3, 9)).astype(dtype)
    out = np.zeros(11, dtype)

    _combined(a, b, c, out)

    wide = [vector.astype(np.float64) for vector in (a, b, c)]
    expected = np.zeros(11, dtype)
    expected[1:5] = wide[0][2:6] * wide[1][3:7] + wide[2][1:5]
    expected[6:10] = wide[0][:4] * wide[1][:4]
    np.testing.assert_allclose(out, expected, rtol=2 * np.finfo(dtype).eps)
    assert out[0] == out[5] == out[10] == 0


@njit
def _triples(x, parts, out):
    xs, ys, zs = load_triples(x, 2)
    store(parts, 0, xs)
    store(parts, WIDTH, ys)
    store(parts, 2 * WIDTH, zs)
    add_triples(out, 1, xs, ys, zs)


def test_triples_are_taken_apart_and_put_together(dtype):
    x, parts, out = np.arange(15, dtype=dtype), np.zeros(12, dtype), np.full(14, 100, dtype)

    _triples(x, parts, out)

    np.testing.assert_array_equal(parts.reshape(3, WIDTH), x[2:14].reshape(WIDTH, 3).T)
    np.testing.assert_array_equal(out, [100, *(100 + x[2:14]), 100])


@njit
def _follow(columns, index):
    return consecutive(columns, index)


@pytest.mark.parametrize("integer", [np.int32, np.int64])
def test_integers_that_follow_each_other(dtype, integer):
    columns = np.array([4, 5, 6, 7, 9, 10, 11, 11, 12], integer)

    assert [bool(_follow(columns, index)) for index in range(6)] == [True, False, False, False, False, False]


def test_other_than_contiguous_vectors_are_refused(dtype):
    x, parts, out = np.zeros(30, dtype)[::2], np.zeros(12, dtype), np.zeros(14, dtype)

    with pytest.raises(TypingError, match="contiguous arrays of one dimension"):
        _triples(x, parts, out)


@njit
def _last_after_asking_ahead(x):
    prefetch(x, x.shape[0] + 10_000_000)
    prefetch(x, -1)
    return x[x.shape[0] - 1]


def test_prefetching_becomes_an_instruction_that_reads_nothing(dtype):
    assert _last_after_asking_ahead(np.arange(5, dtype=dtype)) == 4
    for signature in _last_after_asking_ahead.signatures:
        assert "llvm.prefetch" in _last_after_asking_ahead.inspect_llvm(signature)
