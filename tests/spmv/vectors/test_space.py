"""Arithmetic on whole vectors."""

import math

import numpy as np
import pytest
from kernel_targets import TARGETS

from penstock.spmv import CPU, Device, VectorSpace
from penstock.spmv.compilation.table import find_kernel

SIZES = (1, 31, 33, 255, 257, 8192, 8193, 20_011)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_dot_agrees_with_the_exact_sum_within_the_rounding_bound(dtype, target):
    generator = np.random.default_rng(0)
    for size in SIZES:
        x, y = generator.uniform(-1, 1, (2, size)).astype(dtype)
        partial = target.put(np.full(512 if target.device_kind == "cuda" else -(-size // 8192), np.nan))

        with target.running():
            find_kernel("vector", "dot", target.device_kind)(target.put(x), target.put(y), partial)

        exact = math.fsum(float(a) * float(b) for a, b in zip(x, y, strict=True))
        bound = size * np.finfo(np.float64).eps * float(np.abs(x.astype(float)) @ np.abs(y.astype(float)))
        assert abs(float(np.sum(target.get(partial))) - exact) <= bound


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_combine_agrees_with_numpy_to_two_roundings(dtype, target):
    generator = np.random.default_rng(0)
    for size in SIZES:
        x, y = generator.uniform(-1, 1, (2, size)).astype(dtype)
        result = target.put(y.copy())

        with target.running():
            find_kernel("vector", "combine", target.device_kind)(0.3, target.put(x), -1.7, result)

        expected = 0.3 * x.astype(float) - 1.7 * y.astype(float)
        np.testing.assert_allclose(target.get(result), expected, rtol=0, atol=4 * np.finfo(dtype).eps)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("columns", [(), (3,)])
@pytest.mark.parametrize("c", [0.0, -0.6])
@pytest.mark.parametrize(
    ("scaled", "driven", "clears"), [(True, True, False), (False, False, True), (True, False, True)]
)
def test_three_terms_agree_with_numpy_to_a_few_roundings(dtype, columns, c, scaled, driven, clears, target):
    generator = np.random.default_rng(0)
    for size, b in zip(SIZES[:6], (1.6, 0.0) * 3, strict=True):
        f, y, v, out = generator.uniform(-1, 1, (4, size, *columns)).astype(dtype)
        diagonal = generator.uniform(1, 2, size).astype(dtype)
        starts = (np.full_like(out, np.nan) if factor == 0.0 else a for factor, a in ((b, v), (c, out)))
        arrays = [target.put(a.copy()) for a in (diagonal, f, y, *starts)]

        with target.running():
            kernel = find_kernel("vector", "three_terms", target.device_kind)
            given = (arrays[0] if scaled else None, arrays[1] if driven else None)
            kernel(0.3, *given, arrays[2], b, arrays[3], c, arrays[4], clears)

        d = diagonal.astype(float).reshape(-1, *[1] * len(columns)) if scaled else 1.0
        expected = 0.3 * d * ((f if driven else 0.0) - y.astype(float)) + b * v.astype(float) + c * out.astype(float)
        np.testing.assert_allclose(target.get(arrays[4]), expected, rtol=0, atol=8 * np.finfo(dtype).eps)
        np.testing.assert_array_equal(target.get(arrays[2]), np.zeros_like(y) if clears else y)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("columns", [(), (2,)])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8])
def test_three_terms_with_dense_blocks_on_the_diagonal(dtype, columns, size, target):
    generator = np.random.default_rng(size)
    for count in (1, 5, 300):
        f, y, v, out = generator.uniform(-1, 1, (4, size * count, *columns)).astype(dtype)
        blocks = generator.uniform(-1, 1, (count, size, size)).astype(dtype)
        arrays = [target.put(a.copy()) for a in (blocks, f, y, v, out)]

        with target.running():
            kernel = find_kernel("vector", "three_terms", target.device_kind)
            kernel(0.3, *arrays[:3], 1.6, arrays[3], -0.6, arrays[4], True)

        change = (f.astype(float) - y).reshape(count, size, -1)
        change = np.einsum("irc,ick->irk", blocks.astype(float), change).reshape(out.shape)
        expected = 0.3 * change + 1.6 * v.astype(float) - 0.6 * out.astype(float)
        np.testing.assert_allclose(target.get(arrays[4]), expected, rtol=0, atol=8 * size * np.finfo(dtype).eps)
        np.testing.assert_array_equal(target.get(arrays[2]), 0)


@pytest.mark.parametrize("columns", [(), (3,)])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_three_terms_have_the_same_bits_however_the_rows_are_cut(columns, size):
    """One thread or all, the compiled loop rounds alike."""
    f, y, v, out = np.random.default_rng(0).standard_normal((4, 63_000, *columns))
    blocks, space = np.random.default_rng(1).uniform(1, 2, (63_000 // size, size, size)), VectorSpace(CPU)
    whole, parts = out.copy(), out.copy()

    space.three_terms(0.3, blocks, f, y, 1.7, v, -0.7, whole)
    for start in range(0, 63_000, 1260):
        rows, of_blocks = slice(start, start + 1260), slice(start // size, (start + 1260) // size)
        space.three_terms(0.3, blocks[of_blocks], f[rows], y[rows], 1.7, v[rows], -0.7, parts[rows])

    np.testing.assert_array_equal(whole, parts)


def test_dot_has_the_same_bits_for_any_number_of_threads():
    import numba

    x = np.random.default_rng(1).uniform(-1, 1, 100_003)
    space, before = VectorSpace(CPU), numba.get_num_threads()

    results = set()
    for threads in range(1, before + 1):
        numba.set_num_threads(threads)
        results.add(space.dot(x, x))
    numba.set_num_threads(before)

    assert len(results) == 1


@pytest.mark.parametrize("name", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_products_fetched_later_are_of_what_the_vectors_held(name):
    if name == "cuda":
        pytest.importorskip("cupy")
    space = VectorSpace(Device.parse(name))
    x = space.device.asarray(np.arange(1e5))
    expected = space.dot(x, x)

    products = [space.dots_later((x, x)), space.dots_later((x, x), (x, x))]
    x[...] = 0

    assert [product() for product in products] == [[expected], [expected, expected]]


def test_the_norm_of_nan_is_nan_and_of_nothing_is_zero():
    space = VectorSpace(CPU)

    assert math.isnan(space.norm(np.array([1.0, np.nan])))
    assert space.norm(np.empty(0)) == 0.0
