"""Images of symmetric BSR: what they hold, how far they are from their matrix, and products on every target."""

import numpy as np
import pytest
import scipy.sparse
from format_contract import build, patterns_for
from kernel_targets import TARGETS, converting

from penstock.fem import Cantilever, LognormalMaterial
from penstock.spmv import InputError, SymmetricBsrMatrix
from penstock.spmv.compilation.table import find_kernel
from penstock.spmv.formats.symmetric_image import SymmetricImageMatrix

TYPES = [pytest.param(np.float32, id="float32"), pytest.param(np.int16, id="int16")]
UNITS = {np.float32: 2.0**-24, np.int16: 2.0**-16}


def with_diagonal(size, label):
    """A random matrix of blocks, every row of which has one on the diagonal."""
    pattern = patterns_for("symmetric_bsr", size)[label]
    pattern = scipy.sparse.csr_array(pattern + scipy.sparse.eye_array(pattern.shape[0]))
    matrix, A = build("symmetric_bsr", {"block_size": size}, pattern, np.float64, np.float64)
    return matrix, A


@pytest.mark.parametrize("values_dtype", TYPES)
@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("label", ["1x1", "empty rows", "just over a block"])
@pytest.mark.parametrize("target", TARGETS)
def test_products_are_those_of_the_stored_numbers(target, label, size, values_dtype):
    matrix, A = with_diagonal(size, label)
    image = SymmetricImageMatrix.of(matrix, values_dtype)
    stored = image.to_csr()
    rng = np.random.default_rng(0)
    for shape in ((A.shape[0],), (A.shape[0], 3)):
        x, before = rng.uniform(-1, 1, shape), rng.uniform(-1, 1, shape)
        out = target.put(before.copy())
        with target.running():
            operation = "spmv" if x.ndim == 1 else "spmm"
            find_kernel("symmetric_image", operation, target.device_kind)(
                target.put_matrix(image), target.put(x), out, 0.7, 0.3
            )
        expected = 0.7 * (stored @ x) + 0.3 * before
        bound = 1e-13 * (abs(stored) @ abs(x) + abs(before))
        assert (abs(target.get(out) - expected) <= bound).all()


@pytest.mark.parametrize("values_dtype", TYPES)
@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("label", ["1x1", "empty rows", "just over a block"])
@pytest.mark.parametrize("target", TARGETS)
def test_bounds_of_products_on_every_target(target, label, size, values_dtype):
    """Products with absolute values, and with bounds of the rounding, are those of the reference."""
    matrix, A = with_diagonal(size, label)
    image = SymmetricImageMatrix.of(matrix, values_dtype)
    x, unit = np.random.default_rng(0).uniform(-1, 1, A.shape[0]), UNITS[values_dtype]
    with converting(target):
        on_target, of_sizes = target.put_matrix(image), target.put(np.zeros(A.shape[0]))
        on_target.add_absolute(0, target.put(abs(x)), of_sizes)
        bound = target.get(on_target.bound(target.put(x)))

    # On the diagonal what is stored and what corrects it count one by one.
    sizes, corrections = abs(image.to_csr()) @ abs(x), scipy.sparse.block_diag(list(abs(image.corrections))) @ abs(x)
    assert (target.get(of_sizes) >= sizes * (1 - 1e-12)).all()
    assert (target.get(of_sizes) <= (sizes + 2 * corrections) * (1 + 1e-12)).all()
    assert (abs(image.to_csr() - matrix.to_csr()) @ abs(x) <= bound * (1 + 1e-12)).all()
    largest = np.full(A.shape[0], abs(A).max()) * unit * (A != 0).sum(axis=1) * size * 2
    assert (bound <= largest * abs(x).max() + 2 * corrections).all()


@pytest.mark.parametrize("values_dtype", TYPES)
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_differences_are_bounded_and_compensated(size, values_dtype):
    _, A = with_diagonal(size, "just over a block")
    A = scipy.sparse.csr_array(A + 10.0 * scipy.sparse.eye_array(A.shape[0]))
    image = SymmetricImageMatrix.of(SymmetricBsrMatrix.from_csr(A, block_size=size), values_dtype)
    E = (image.to_csr() - A).toarray()

    assert (E == E.T).all()
    unit, largest = UNITS[values_dtype], abs(A).max()
    off = E - scipy.sparse.block_diag([E[i : i + size, i : i + size] for i in range(0, len(E), size)]).toarray()
    assert abs(off).max() <= unit * largest
    sums = (E @ np.tile(np.eye(size), (len(E) // size, 1))).reshape(-1, size, size)
    assert abs(sums + sums.swapaxes(1, 2)).max() <= 2.0**-22 * unit * largest * len(E)
    for seed in range(5):
        z = np.random.default_rng(seed).standard_normal(len(E)) ** 3
        assert (abs(E) @ abs(z) <= image.bound(z) * (1 + 1e-12)).all()
    assert np.linalg.norm(image.bound(z)) <= 200 * np.linalg.norm(E @ z)


@pytest.mark.parametrize("values_dtype", TYPES)
def test_values_of_any_size(values_dtype):
    """A block keeps its digits whatever its size; zero, and the largest number that is rounded up, are stored."""
    numbers = [0.0, 1e-20, 1.0, 1.0 - 2.0**-53, 2.0**15, -(2.0**15), 3.0e20, 1.0 - 2.0**-17]
    for number in numbers:
        S = scipy.sparse.csr_array([[1e30, number], [number, 1e30]])
        matrix = SymmetricBsrMatrix.from_csr(S, block_size=1)
        stored = SymmetricImageMatrix.of(matrix, values_dtype).to_csr().toarray()[0, 1]
        # Half a unit: of 16 bits, of the last place of the largest number of a block, which may have been rounded up.
        assert abs(stored - number) <= (2.0 if values_dtype is np.int16 else 1.0) * UNITS[values_dtype] * abs(number)


@pytest.mark.parametrize("values_dtype", TYPES)
def test_slabs_diagonals_and_absolute_values(values_dtype):
    A = Cantilever(nodes=(9, 5, 5), dof=3, material=LognormalMaterial(sigma=1.0)).matrix("symmetric_bsr")
    image = SymmetricImageMatrix.of(A, values_dtype)
    S, x = image.to_csr(), np.random.default_rng(0).standard_normal(A.shape[0])

    out = np.zeros(A.shape[0])
    for start in range(0, A.shape[0], 192):
        image.rows(start, min(start + 192, A.shape[0])).apply_slab(start, x, out, 1.0, 0.0)
    assert np.allclose(out, S @ x, rtol=0, atol=1e-12 * abs(S).max())
    for size in (1, 3):
        blocks = [S.toarray()[i : i + size, i : i + size] for i in range(0, A.shape[0], size)]
        assert np.allclose(image.diagonal_blocks(size), blocks, rtol=1e-15)
    assert (image.apply_absolute(abs(x)) >= (1 - 1e-12) * (abs(S) @ abs(x))).all()
    image.check_shapes()


def test_new_values_in_the_same_pattern():
    A = Cantilever(nodes=(9, 5, 5), dof=3).matrix("symmetric_bsr")
    image = SymmetricImageMatrix.of(A, np.int16)
    values = image.values
    image.refill(2.0 * A.to_csr())

    assert image.values is values
    twice = SymmetricImageMatrix.of(SymmetricBsrMatrix.from_csr(2.0 * A.to_csr()), np.int16)
    assert (image.to_csr() != twice.to_csr()).nnz == 0


def test_what_has_no_image():
    A = Cantilever(nodes=(9, 5, 5), dof=3).matrix("symmetric_bsr")
    with pytest.raises(InputError, match="float32 or int16"):
        SymmetricImageMatrix.of(A, np.float16)
    S = scipy.sparse.csr_array(scipy.sparse.coo_array(([1.0, 1.0, 1.0], ([0, 1, 1], [1, 0, 1])), shape=(2, 2)))
    with pytest.raises(InputError, match="empty block on the diagonal"):
        SymmetricImageMatrix.of(SymmetricBsrMatrix.from_csr(S, block_size=1), np.int16)
