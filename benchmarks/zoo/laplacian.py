"""Laplacians of weighted graphs."""

from __future__ import annotations

import scipy.sparse

from zoo.system import Array

__all__ = ["laplacian"]


def laplacian(n: int, lines: Array, weights: Array, diagonal: Array | float = 0.0) -> scipy.sparse.csr_array:
    """Return the Laplacian of a graph, plus a diagonal.

    Parameters
    ----------
    n : int
    lines : array of int, (lines, 2)
    weights : array, (lines,)
    diagonal : array, (n,), or float
    """
    i, j = lines.T
    beside = scipy.sparse.coo_array((weights, (i, j)), shape=(n, n)).tocsr()
    beside = beside + beside.T
    return scipy.sparse.csr_array(scipy.sparse.diags_array(beside.sum(axis=1) + diagonal) - beside)
