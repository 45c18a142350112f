"""The coarse level written out with dense and SciPy matrices: the slow, obvious reference."""

import numpy as np
import scipy.linalg


def smoothed_prolongator(A, D, T, factors):
    """``prod (I - w D A) T``."""
    P = T.toarray() if hasattr(T, "toarray") else np.asarray(T)
    for factor in factors:
        P = P - factor * (D @ (A @ P))
    return P


def block_inverse(A, size):
    """The inverse of the dense blocks on the diagonal."""
    dense = A.toarray()
    blocks = [np.linalg.inv(dense[i : i + size, i : i + size]) for i in range(0, len(dense), size)]
    return scipy.linalg.block_diag(*blocks)


def tentative(M):
    """T of a preconditioner as a dense matrix."""
    T = M.level.T
    dense, out = np.empty((M.shape[0], T.unknowns)), np.empty(M.shape[0])
    for column in range(T.unknowns):
        unit = np.zeros(T.unknowns)
        unit[column] = 1.0
        T.prolong(unit, out)
        dense[:, column] = out
    return dense
