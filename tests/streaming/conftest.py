"""Matrices, their cuts and their stores, shared by the tests of streaming."""

import itertools

import numpy as np
import pytest
import scipy.sparse

from penstock.fem import Cantilever, LognormalMaterial
from penstock.spmv import BsrMatrix, CsrMatrix


@pytest.fixture(autouse=True, scope="module")
def always_in_one_thread(one_thread):
    """These systems are small."""


def _irregular(rows, columns, seed=0):
    """A matrix whose rows hold from none to all columns, so that kernels and cuts meet both extremes."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.choice([0, 0, 1, 2, 7, 30], size=rows), columns)
    lengths[rows // 3] = columns
    lengths[-1] = 0
    indices = [np.sort(rng.choice(columns, size=length, replace=False)) for length in lengths]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return scipy.sparse.csr_array(
        (rng.standard_normal(offsets[-1]), np.concatenate(indices), offsets), shape=(rows, columns)
    )


@pytest.fixture(scope="session")
def irregular():
    """``irregular(rows, columns, seed)`` makes a SciPy CSR array with rows of every length."""
    return _irregular


@pytest.fixture(scope="session")
def cut():
    """``cut(matrix, bounds)`` yields the row slabs of a SciPy or penstock matrix between successive bounds."""

    def slabs(matrix, bounds):
        for start, stop in itertools.pairwise(bounds):
            yield matrix[start:stop] if scipy.sparse.issparse(matrix) else matrix.rows(start, stop)

    return slabs


@pytest.fixture(scope="session")
def beam():
    """A cantilever of random stiffness: 420 rows, about 20,000 stored scalars."""
    return Cantilever(nodes=(7, 5, 4), dof=3, material=LognormalMaterial(sigma=1.0, seed=3))


@pytest.fixture(scope="session")
def matrices(beam, cut):
    """By name: a resident matrix, and the slabs of the same matrix in 9 to 11 unequal pieces."""
    found = {}
    for format_name, dtype in itertools.product(("csr", "bsr"), (np.float64, np.float32)):
        found[f"beam {format_name} {np.dtype(dtype)} storage"] = (
            beam.matrix(format_name, values_dtype=dtype),
            list(beam.subdivisions(10, format_name, values_dtype=dtype)),
        )
    wide = _irregular(240, 312)
    bounds = [0, 4, 20, 24, 80, 100, 136, 160, 200, 240]
    found["irregular csr"] = (CsrMatrix.from_csr(wide), list(cut(wide, bounds)))
    blocks = BsrMatrix.from_csr(wide, block_size=4)
    found["irregular bsr"] = (blocks, list(cut(blocks, bounds)))
    single = wide.astype(np.float32)
    found["irregular csr float32 vectors"] = (CsrMatrix.from_csr(single), list(cut(single, bounds)))
    return found
