"""Tests of whether constants count as slow modes of a matrix, from all of its rows or some of them."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse

from penstock.driver import slow_modes
from penstock.fem import Cantilever, LognormalMaterial
from penstock.spmv import CsrMatrix


def elasticity(shift: float) -> scipy.sparse.csr_array:
    A = Cantilever(nodes=(14, 9, 8), dof=3, material=LognormalMaterial(sigma=0.5)).matrix("csr").to_csr()
    return scipy.sparse.csr_array(A + shift * A.diagonal().mean() * scipy.sparse.eye_array(A.shape[0]))


def half_shifted(share: float) -> scipy.sparse.csr_array:
    """Return a Laplacian of which a share of the rows, spread evenly, do not add up to zero."""
    line = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(4000, 4000))
    shifted = np.modf(np.arange(4000) * (np.sqrt(5) - 1) / 2)[0] < share
    return scipy.sparse.csr_array(line + scipy.sparse.diags_array(shifted.astype(float)))


def slow_by_products(A: scipy.sparse.csr_array, block_size: int) -> bool:
    sums = abs(A) @ np.ones(A.shape[0])
    constants = np.tile(np.eye(block_size), (A.shape[0] // block_size, 1))
    return bool(((abs(A @ constants) <= 1e-3 * sums[:, None]).mean(axis=0) >= 0.6).all())


@pytest.mark.parametrize("sample", [1 << 20, 500])
@pytest.mark.parametrize(
    ("A", "block_size"),
    [(elasticity(0.0), 3), (elasticity(0.0), 1), (elasticity(0.1), 3), (half_shifted(0.3), 1), (half_shifted(0.5), 1)],
    ids=["elasticity", "sums of all unknowns", "shifted", "most rows", "too few rows"],
)
def test_are_those_of_products_with_constants(A, block_size, sample, monkeypatch):
    monkeypatch.setattr(slow_modes, "_SAMPLE", sample)

    assert slow_modes.constants_are_slow(CsrMatrix.from_csr(A), block_size) == slow_by_products(A, block_size)


@pytest.mark.parametrize("sample", [1 << 20, 500])
def test_a_band_is_seen_in_some_rows(sample, monkeypatch):
    monkeypatch.setattr(slow_modes, "_SAMPLE", sample)
    A = half_shifted(0.0)
    order = np.random.default_rng(1).permutation(A.shape[0])
    shuffled = scipy.sparse.csr_array(A[order][:, order])
    shuffled.sort_indices()

    assert slow_modes.has_band(CsrMatrix.from_csr(A))
    assert not slow_modes.has_band(CsrMatrix.from_csr(shuffled))
