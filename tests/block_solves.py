"""What the tests of solves with several right-hand sides share."""

import math

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
import scipy.sparse.linalg

from penstock.solvers import block_jacobi, jacobi
from penstock.spmv import as_operator

# The residuals are recomputed with the same product; only their norms are summed in another order.
NORM_SLACK = 1 + 1e-12


def mixing(A):
    """A positive definite function that couples neighbouring unknowns, on top of their diagonal."""
    scale = 1 / np.sqrt(A.to_csr().diagonal())
    kernel = scipy.sparse.csr_array(
        scipy.sparse.diags_array([0.2, 1.0, 0.2], offsets=[-1, 0, 1], shape=A.shape, dtype=A.dtype)
    )
    half = scale.astype(A.dtype)

    def apply(r):
        factors = half.reshape(-1, *[1] * (r.ndim - 1))
        return factors * (kernel @ (factors * r))

    return apply


PRECONDITIONERS = {
    "none": lambda A: None,
    "jacobi": jacobi,
    "block jacobi": lambda A: block_jacobi(A, 3),
    "function": mixing,
}


def lengths(block):
    return np.linalg.norm(block.astype(np.float64), axis=0)


def true_residuals(A, B, X):
    """``||b - A x||`` of each column, in the precision of the operator."""
    return lengths(as_operator(A).apply(X, B.copy(), alpha=-1.0, beta=1.0))


def check_honest(A, B, result, rtol, atol=0.0):
    """Converged if and only if the true residual says so, and every number told is that of the solution."""
    norms, residuals = lengths(B), true_residuals(A, B, result.x)
    assert len(result.columns) == B.shape[1]
    for column, (of, norm, residual) in enumerate(zip(result.columns, norms, residuals, strict=True)):
        np.testing.assert_array_equal(of.x, result.x[:, column])
        told = of.true_residual * (norm or 1.0)
        assert told == pytest.approx(residual, rel=1e-9, abs=1e-300)
        assert of.converged == (told <= max(rtol * norm, atol) * NORM_SLACK), of.message
        assert (of.info == 0) == of.converged
        assert of.message.startswith(of.reason.value)
        assert len(of.residual_norms) == result.iterations + 1
    assert np.isfinite(result.x).all()
    assert result.converged == all(of.converged for of in result.columns)


def right_hand_sides(n, columns, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).standard_normal((n, columns)).astype(dtype)


def staggered(n=252, columns=5):
    """Right-hand sides and an atol which they meet one after the other: each is a hundred times the next."""
    B = right_hand_sides(n, columns) * 100.0 ** -np.arange(columns)
    return B, 1e-3 * 100.0 ** -(columns - 1) * math.sqrt(n)


def same_solve(one, other):
    assert one.iterations == other.iterations
    np.testing.assert_array_equal(one.x, other.x)
    for mine, theirs in zip(one.columns, other.columns, strict=True):
        assert mine.reason is theirs.reason
        assert mine.residual_norms == theirs.residual_norms
        assert mine.true_residual == theirs.true_residual
