"""Operators: what can become one, and what apply refuses."""

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg
from kernel_targets import gpu_count

from penstock.spmv import BsrMatrix, CsrMatrix, Device, DeviceError, InputError, Operator, as_operator


def random_csr(rows=12, columns=9, dtype=np.float64):
    return scipy.sparse.random_array(
        (rows, columns), density=0.4, rng=np.random.default_rng(0), format="csr", dtype=dtype
    )


@pytest.mark.parametrize(
    "convert",
    [
        lambda A: A,
        lambda A: A.tocsc(),
        lambda A: A.tocoo(),
        lambda A: scipy.sparse.csr_matrix(A),
        lambda A: A.tobsr((3, 3)),
        lambda A: A.toarray(),
        lambda A: scipy.sparse.linalg.aslinearoperator(A),
        lambda A: CsrMatrix.from_csr(A),
    ],
    ids=["csr", "csc", "coo", "csr_matrix", "bsr", "dense", "LinearOperator", "CsrMatrix"],
)
@pytest.mark.parametrize("columns", [None, 4])
def test_whatever_holds_a_matrix_becomes_the_same_operator(convert, columns):
    A = random_csr()
    x = np.random.default_rng(1).uniform(-1, 1, 9 if columns is None else (9, columns))
    out = np.ones((12,) if columns is None else (12, columns))

    B = convert(A)
    if scipy.sparse.issparse(B) and B.format == "bsr":
        B.has_sorted_indices = False
        B.sort_indices()
    operator = as_operator(B)
    operator.apply(x, out, alpha=2.0, beta=-1.0)

    assert isinstance(operator, Operator)
    np.testing.assert_allclose(out, 2 * (A @ x) - 1, rtol=1e-13, atol=1e-13)


def test_scipy_bsr_of_square_blocks_stays_bsr():
    assert isinstance(as_operator(scipy.sparse.bsr_array(np.eye(6), blocksize=(3, 3))), BsrMatrix)


def test_arrays_are_shared_not_copied():
    A = random_csr()

    assert np.shares_memory(as_operator(A).values, A.data)


def unsorted():
    A = random_csr(3, 3)
    A.indptr, A.indices, A.data = np.array([0, 2, 2, 2]), np.array([2, 0]), np.ones(2)
    return A


def duplicated():
    A = random_csr(3, 3)
    A.indptr, A.indices, A.data = np.array([0, 2, 2, 2]), np.array([1, 1]), np.ones(2)
    return A


def out_of_range():
    A = random_csr(3, 3)
    A.indptr, A.indices, A.data = np.array([0, 2, 2, 2]), np.array([1, 3]), np.ones(2)
    return A


def descending_offsets():
    A = random_csr(3, 3)
    A.indptr, A.indices, A.data = np.array([0, 2, 1, 2]), np.array([0, 1]), np.ones(2)
    return A


@pytest.mark.parametrize(
    ("matrix", "advice"),
    [
        (out_of_range, "column index 3, outside 0 to 2; check the shape"),
        (descending_offsets, "row offsets descend"),
        (lambda: random_csr().astype(complex), "only real numbers"),
        (lambda: np.eye(3, dtype=complex), "only real numbers"),
        (lambda: "a string", "scipy.sparse or cupyx.scipy.sparse"),
        (lambda: np.arange(3.0), "scipy.sparse or cupyx.scipy.sparse"),
    ],
)
def test_what_is_not_a_matrix_is_refused_with_advice(matrix, advice):
    with pytest.raises(InputError, match=advice):
        as_operator(matrix())


@pytest.mark.parametrize("make", [unsorted, duplicated])
def test_rows_of_a_callers_matrix_are_sorted_and_summed_in_a_copy(make):
    given = make()
    dense = given.tocoo().toarray()  # which adds up duplicates
    np.testing.assert_array_equal(as_operator(given) @ np.eye(3), dense)
    np.testing.assert_array_equal(given.indices, make().indices)


@pytest.mark.parametrize(
    ("x", "advice"),
    [
        (np.ones(8), r"shape \(9,\) or \(9, k\)"),
        (np.ones((9, 2, 1)), r"shape \(9,\)"),
        (np.ones(9, dtype=complex), "complex128"),
        (np.array(["a"] * 9), "works in float64"),
    ],
)
def test_an_x_that_does_not_fit_is_refused(x, advice):
    with pytest.raises(InputError, match=advice):
        as_operator(random_csr()).apply(x)


def test_a_float64_x_for_a_float32_operator_is_refused_rather_than_cut():
    with pytest.raises(InputError, match="digits would be lost"):
        as_operator(random_csr(dtype=np.float32)).apply(np.ones(9))


@pytest.mark.parametrize(
    ("out", "advice"),
    [
        (np.ones(11), r"shape \(12,\)"),
        (np.ones(12, dtype=np.float32), "type float64"),
        (np.ones(24)[::2], "C-contiguous"),
    ],
)
def test_an_out_that_does_not_fit_is_refused(out, advice):
    with pytest.raises(InputError, match=advice):
        as_operator(random_csr()).apply(np.ones(9), out)


def test_overlapping_x_and_out_are_refused():
    buffer = np.ones(12)

    with pytest.raises(InputError, match="overlap"):
        as_operator(random_csr(12, 12)).apply(buffer, buffer)


def test_beta_without_out_is_refused():
    with pytest.raises(InputError, match="out must be passed"):
        as_operator(random_csr()).apply(np.ones(9), beta=1.0)


def test_float32_storage_keeps_float64_vectors_and_halves_the_values():
    A = random_csr()

    stored = CsrMatrix.from_csr(A, values_dtype=np.float32)

    assert (stored.dtype, stored.values_dtype) == (np.float64, np.float32)
    assert (stored @ np.ones(9)).dtype == np.float64
    rounded = A.data.astype(np.float32).astype(np.float64)
    np.testing.assert_array_equal(stored.to_csr().data, rounded)


def test_a_block_size_that_does_not_divide_the_shape_is_refused():
    with pytest.raises(InputError, match="must divide the 12 rows"):
        BsrMatrix.from_csr(random_csr(12, 12), block_size=5)


def test_rows_off_the_block_grid_are_refused():
    with pytest.raises(InputError, match="multiples of the block size 3"):
        BsrMatrix.from_csr(random_csr(12, 12), block_size=3).rows(0, 4)


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cpu:1", ""])
def test_an_unknown_device_is_refused(name):
    with pytest.raises(InputError, match="expected 'cpu', 'cuda'"):
        Device.parse(name)


@pytest.mark.skipif(gpu_count() > 0, reason="a CUDA device is there")
def test_a_missing_gpu_is_said_with_what_to_do():
    with pytest.raises(DeviceError, match="use device: cpu"):
        Device.parse("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(gpu_count() == 0, reason="no CUDA device")
def test_cupy_sparse_matrices_become_operators_on_their_device():
    import cupy
    import cupyx.scipy.sparse

    A = random_csr()
    operator = as_operator(cupyx.scipy.sparse.csr_matrix(scipy.sparse.csr_matrix(A)))

    np.testing.assert_allclose((operator @ cupy.ones(9)).get(), A @ np.ones(9), rtol=1e-13)


@pytest.mark.gpu
@pytest.mark.skipif(gpu_count() == 0, reason="no CUDA device")
def test_vectors_of_another_device_are_refused():
    with pytest.raises(InputError, match="lives on cpu, the operator on cuda:0"):
        as_operator(random_csr()).to_device("cuda").apply(np.ones(9))
