"""Residuals with twice the digits, against exact fractions."""

from fractions import Fraction

import numpy as np
import pytest
import scipy.sparse

from penstock.spmv import CsrMatrix
from penstock.spmv.products.accurate_residual import accurate_residual


@pytest.mark.parametrize("rows", [7, 5_000])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_what_cancels_is_not_lost(rows, dtype):
    rng = np.random.default_rng(0)
    A = scipy.sparse.random_array((rows, 40), density=0.5, rng=rng, format="csr")
    A.data = (A.data * 10.0 ** rng.integers(-8, 8, A.nnz)).astype(dtype)
    x = rng.standard_normal((40, 2)) * 10.0 ** rng.integers(-6, 6, (40, 1))
    b = A.astype(np.float64) @ x  # rounded: what is left are the digits that float64 loses

    found = accurate_residual(CsrMatrix.from_csr(A), x, b)

    lost = 0.0
    for row in range(0, rows, max(1, rows // 7)):
        for column in range(2):
            entries = range(A.indptr[row], A.indptr[row + 1])
            product = sum(Fraction(float(A.data[k])) * Fraction(x[A.indices[k], column]) for k in entries)
            exact = float(Fraction(b[row, column]) - product)
            scale = float(sum(abs(Fraction(float(A.data[k])) * Fraction(x[A.indices[k], column])) for k in entries))
            assert abs(found[row, column] - exact) <= 1e-15 * abs(exact) + 1e-29 * scale
            lost = max(lost, abs(exact))
    assert lost > 0.0
