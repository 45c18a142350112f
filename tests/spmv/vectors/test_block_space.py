"""Gram matrices and combinations of blocks of vectors, on every kind of device, against NumPy."""

import numpy as np
import pytest
from kernel_targets import TARGETS

from penstock.spmv import CPU, Device
from penstock.spmv.vectors.block_space import BlockSpace, _Cuda

# Rows, columns of W and Z, of P, of X, and of out: odd and even, one to several tiles of eight, blocks that shrink.
SHAPES = [
    (1, 1, 1, 1, 1),
    (9, 3, 3, 5, 3),
    (263, 8, 8, 8, 8),
    (37, 13, 13, 16, 9),
    (70, 2, 12, 13, 2),
    (41, 40, 40, 50, 33),
]


def space_for(target, n, columns, dtype):
    """The space of a target; under the emulator, that of CUDA on arrays of the host."""
    if target.name == "gpu":
        return BlockSpace(Device("cuda"), n, columns)
    space = BlockSpace(CPU, n, columns)
    if target.name.startswith("emulated"):
        space._operations = _Cuda(_EmulatedDevice(), n, columns)
    return space


class _EmulatedDevice:
    """What the CUDA operations need of a device, in host memory."""

    xp = np
    pinned_like = staticmethod(np.zeros_like)

    @staticmethod
    def copy_to_pinned(array, twin):
        twin[...] = array

    @staticmethod
    def copy_to_device(source, array):
        array[...] = source


@pytest.fixture(params=SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def shape(request):
    return request.param


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("weighted", [False, True])
class TestAgainstNumpy:
    def blocks(self, target, shape, dtype, weighted):
        n, k, k_p, k_x, _k_out = shape
        rng = np.random.default_rng(n)
        hosts = [rng.uniform(-1, 1, (n, columns)).astype(dtype) for columns in (k, k, k_p, k_x)]
        diagonal = rng.uniform(0.5, 2, n).astype(dtype) if weighted else None
        there = [target.put(host.copy()) for host in hosts]
        given = None if diagonal is None else target.put(diagonal)
        factors = np.ones((n, 1)) if diagonal is None else diagonal.astype(float)[:, None]
        return [host.astype(float) for host in hosts], there, given, factors

    def test_gram(self, target, shape, dtype, weighted):
        (x, *_), (x_there, *_), diagonal, factors = self.blocks(target, shape, dtype, weighted)
        space = space_for(target, shape[0], shape[3], dtype)

        with target.running():
            gram = space.gram(x_there, x_there, diagonal)

        bound = (shape[0] + 2) * np.finfo(float).eps * (np.abs(x).T @ (factors * np.abs(x)))
        assert (np.abs(gram - x.T @ (factors * x)) <= bound).all()
        np.testing.assert_array_equal(gram, gram.T)

    def test_descend(self, target, shape, dtype, weighted):
        n, k, *_ = shape
        (w, s, *_), (w_there, s_there, *_), diagonal, factors = self.blocks(target, shape, dtype, weighted)
        t, xi = np.random.default_rng(1).uniform(-1, 1, (2, k, k))
        space = space_for(target, n, shape[3], dtype)

        with target.running():
            plain, preconditioned = space.descend(w_there, t, s_there, xi, diagonal)

        found, expected = target.get(w_there), w @ t - s @ xi
        size = np.abs(w) @ np.abs(t) + np.abs(s) @ np.abs(xi)
        assert (np.abs(found - expected) <= (2 * k + 2) * np.finfo(dtype).eps * size).all()
        # float32: sums are of what was computed in float64, before it was rounded to be stored.
        bound = 8 * (n + 4 * k) * np.finfo(dtype).eps * (size.T @ (factors * size) + size.T @ size)
        assert (np.abs(plain - expected.T @ expected) <= bound).all()
        assert (np.abs(preconditioned - expected.T @ (factors * expected)) <= bound).all()

    def test_extend_and_combine(self, target, shape, dtype, weighted):
        n, k, k_p, k_x, k_out = shape
        (z, _, p, x), (z_there, _, p_there, x_there), diagonal, factors = self.blocks(target, shape, dtype, weighted)
        rng = np.random.default_rng(2)
        t, c, gamma = (rng.uniform(-1, 1, s) for s in ((k, k_out), (k_p, k_out), (k_p, k_x)))
        out = target.put(np.full((n, k_out), np.nan, dtype=dtype))
        combined = target.put(np.full((n, k_out), np.nan, dtype=dtype))
        space = space_for(target, n, max(shape[1:]), dtype)

        with target.running():
            space.combine(combined, z_there, t, diagonal)
            space.extend(out, z_there, t, diagonal, p_there, c, x_there, gamma)
            in_place = k_out == k_p
            if in_place:
                x_again = target.put(x.astype(dtype))
                space.extend(p_there, z_there, t, diagonal, p_there, c, x_again, gamma)

        unit = np.finfo(dtype).eps
        images = (factors * z) @ t
        size = factors * np.abs(z) @ np.abs(t) + np.abs(p) @ np.abs(c)
        assert (np.abs(target.get(combined) - images) <= (k + 4) * unit * size).all()
        assert (np.abs(target.get(out) - (images + p @ c)) <= (k + k_p + 4) * unit * size).all()
        moved = np.abs(x) + np.abs(p) @ np.abs(gamma)
        assert (np.abs(target.get(x_there) - (x + p @ gamma)) <= (k_p + 4) * unit * moved).all()
        if in_place:
            np.testing.assert_array_equal(target.get(p_there), target.get(out))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_add_leaves_everything_else_alone(target, shape, dtype):
    n, k, k_p, _k_x, k_out = shape
    rng = np.random.default_rng(n)
    z, p = (rng.uniform(-1, 1, (n, columns)).astype(dtype) for columns in (k, k_p))
    t, c = rng.uniform(-1, 1, (k, k_out)), rng.uniform(-1, 1, (k_p, k_out))
    space, z_there, p_there = (
        space_for(target, n, max(k, k_p, k_out), dtype),
        target.put(z.copy()),
        target.put(p.copy()),
    )
    out = target.put(np.full((n, k_out), np.nan, dtype=dtype))

    with target.running():
        space.add(out, z_there, t, p_there, c)
        if k_out == k_p:
            kept = target.get(p_there).copy()
            space.add(p_there, z_there, t, p_there, c)

    unit = float(np.finfo(dtype).eps)
    expected = z.astype(float) @ t + p.astype(float) @ c
    np.testing.assert_allclose(target.get(out), expected, rtol=0, atol=8 * (k + k_p) * unit)
    np.testing.assert_array_equal(target.get(z_there), z)
    if k_out == k_p:
        np.testing.assert_array_equal(kept, p)
        np.testing.assert_array_equal(target.get(p_there), target.get(out))


@pytest.mark.parametrize("columns", [1, 7, 16])
def test_the_number_of_threads_changes_no_bit(columns):
    import numba

    rng = np.random.default_rng(0)
    w, s = rng.uniform(-1, 1, (2, 20_003, columns))
    t, before, seen = np.eye(columns), numba.get_num_threads(), set()
    for threads in range(1, before + 1):
        numba.set_num_threads(threads)
        mine = w.copy()
        grams = BlockSpace(CPU, len(w), columns).descend(mine, t, s, t, w[:, 0] ** 2)
        seen.add(mine.tobytes() + grams[0].tobytes() + grams[1].tobytes())
    numba.set_num_threads(before)

    assert len(seen) == 1
