"""What every registered format promises, as functions that tests call with a format and a target."""

import numpy as np
import pytest
import scipy.sparse
from tolerances import product_bound

from penstock.spmv import format_named
from penstock.spmv.compilation.table import find_kernel, has_kernel

PRECISIONS = [
    pytest.param(np.float64, np.float64, id="f64"),
    pytest.param(np.float32, np.float64, id="f32-stored"),
    pytest.param(np.float32, np.float32, id="f32"),
]


def awkward_patterns(size: int) -> dict[str, scipy.sparse.csr_array]:
    """Return matrices of blocks of ``size``: shapes and row lengths just over a warp and a thread block, and empty ones."""
    generator = np.random.default_rng(size)

    def random(rows: int, columns: int, density: float) -> scipy.sparse.csr_array:
        return scipy.sparse.random_array((rows, columns), density=density, rng=generator, format="csr")

    full_row = random(35, 40, 0.05).tolil()
    full_row[17] = 1.0
    empty_rows = random(33, 33, 0.2).tolil()
    empty_rows[[0, 5, 32]] = 0.0
    return {
        "1x1": scipy.sparse.csr_array([[2.5]]),
        "no entries": scipy.sparse.csr_array((3, 4)),
        "empty rows": empty_rows.tocsr(),
        "one full row": full_row.tocsr(),
        "wide": random(7, 261, 0.3),
        "tall": random(259, 5, 0.4),
        "just over a block": random(257, 257, 0.03),
    }


def build(name: str, keywords: dict, pattern, values_dtype, dtype):
    """Fill a pattern of blocks with random values; return the matrix and the CSR matrix it stands for."""
    size = keywords.get("block_size", 1)
    generator = np.random.default_rng(7)
    A = scipy.sparse.kron(pattern, np.ones((size, size)), format="csr")
    A.sort_indices()
    A.data = generator.uniform(-1, 1, A.nnz).astype(values_dtype).astype(dtype)
    if format_named(name).traits.half:
        A = (A + A.T).tocsr()
        A.sort_indices()
        A.data = A.data.astype(values_dtype).astype(dtype)
    matrix = format_named(name).from_csr(A, **keywords, values_dtype=values_dtype)
    return matrix, A.astype(np.float64)


def patterns_for(name: str, size: int) -> dict[str, scipy.sparse.csr_array]:
    """Return the awkward patterns that a format can hold."""
    patterns = awkward_patterns(size)
    square = format_named(name).traits.half
    return {label: A for label, A in patterns.items() if A.shape[0] == A.shape[1] or not square}


def check_products(name, keywords, values_dtype, dtype, target) -> None:
    """Products with one vector and with blocks agree with the reference within the rounding bound."""
    generator = np.random.default_rng(3)
    with target.running():
        for label, pattern in patterns_for(name, keywords.get("block_size", 1)).items():
            matrix, A = build(name, keywords, pattern, values_dtype, dtype)
            # A slab has int32 offsets. Types and offsets meet nowhere in a CPU kernel, and Numba compiles each pair anew.
            paired = target.device_kind == "cuda" or values_dtype == dtype == np.float64
            slab = [matrix.rows(0, matrix.shape[0])] if "row_offsets" in matrix.arrays() and paired else []
            for offsets in [matrix, *slab]:
                blocks = (1, 3, 8) if has_kernel(name, "spmm", target.device_kind) else ()
                for columns in (None, *blocks):
                    for alpha, beta in ((1.0, 0.0), (-0.5, 2.0)):
                        shape = () if columns is None else (columns,)
                        x = generator.uniform(-1, 1, (A.shape[1], *shape)).astype(dtype)
                        out = generator.uniform(-1, 1, (A.shape[0], *shape)).astype(dtype)
                        expected = alpha * (A @ x.astype(np.float64)) + beta * out.astype(np.float64)
                        bound = product_bound(
                            abs(A), x, out, alpha, beta, dtype, additions=format_named(name).traits.adds
                        )
                        result = target.put(out.copy() if beta else np.full_like(out, np.nan))

                        operation = "spmv" if columns is None else "spmm"
                        kernel = find_kernel(name, operation, target.device_kind)
                        kernel(target.put_matrix(offsets), target.put(x), result, alpha, beta)

                        error = np.abs(target.get(result) - expected)
                        assert (error <= bound).all(), (label, columns, alpha, beta, float((error / bound).max()))


def check_special_values(name, keywords, special, target) -> None:
    """NaN or Inf in x reaches exactly the rows that read it."""
    pattern = awkward_patterns(1)["empty rows"]
    matrix, A = build(name, keywords, pattern, np.float64, np.float64)
    x = np.ones(A.shape[1])
    x[A.shape[1] // 2] = special
    touched = np.diff(A[:, [A.shape[1] // 2]].tocsr().indptr) > 0
    out = target.put(np.empty(A.shape[0]))

    with target.running():
        find_kernel(name, "spmv", target.device_kind)(target.put_matrix(matrix), target.put(x), out, 1.0, 0.0)

    assert touched.any()
    np.testing.assert_array_equal(~np.isfinite(target.get(out)), touched)
