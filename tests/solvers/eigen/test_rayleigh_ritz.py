"""The Rayleigh-Ritz step from Gram matrices."""

import numpy as np
import pytest
import scipy.linalg

from penstock.solvers.eigen.rayleigh_ritz import complement, new_directions, ritz_pairs


def pencil(n, seed=0, condition=1e3):
    rng = np.random.default_rng(seed)
    q, _ = np.linalg.qr(rng.standard_normal((n, n)))
    K = q @ np.diag(np.geomspace(1.0, condition, n)) @ q.T
    L = np.eye(n) + 0.1 * rng.standard_normal((n, n))
    return (K + K.T) / 2, L @ L.T


def test_pairs_of_the_whole_space_are_those_of_lapack():
    K, M = pencil(12)
    pairs = ritz_pairs(K, M, 5)
    assert np.allclose(pairs.values, scipy.linalg.eigh(K, M, eigvals_only=True)[:5], rtol=1e-12)
    assert np.allclose(pairs.coefficients.T @ M @ pairs.coefficients, np.eye(5), atol=1e-12)


def test_low_values_keep_their_digits_beside_very_high_ones():
    _, M = pencil(10)
    K = np.diag(np.geomspace(1.0, 1e15, 10))
    exact = 1 / scipy.linalg.eigh(M, K, eigvals_only=True)[-1]
    for scale in (1.0, 1e9):  # of a direction
        of_direction = np.diag([scale, *[1.0] * 9])
        lowest = ritz_pairs(of_direction @ K @ of_direction, of_direction @ M @ of_direction, 1).values[0]
        assert lowest == pytest.approx(exact, rel=1e-13)


def test_dependent_and_vanishing_directions_are_ignored():
    K, M = pencil(8)
    F = np.eye(8)[:, [0, 1, 2, 2, 3]]
    F = np.concatenate([F, np.zeros((8, 1)), F[:, :1] + 1e-9 * F[:, 1:2]], axis=1)
    pairs = ritz_pairs(F.T @ K @ F, F.T @ M @ F, 6)
    assert np.allclose(pairs.values, scipy.linalg.eigh(K[:4, :4], M[:4, :4], eigvals_only=True), rtol=1e-6)


def test_a_singular_matrix_needs_a_shift():
    K, M = pencil(9)
    v = np.linalg.eigh(K)[1][:, 0]
    K = K - np.linalg.eigvalsh(K)[0] * np.outer(v, v)  # one value is zero to rounding
    exact = scipy.linalg.eigh(K, M, eigvals_only=True)[:4]
    pairs = ritz_pairs(K, M, 4, sigma=1e-6 * exact[-1])
    assert np.allclose(pairs.values, exact, rtol=1e-9, atol=1e-12 * exact[-1])


def test_new_directions_are_orthogonal_to_the_vectors_and_to_each_other():
    K, M = pencil(12)
    pairs = ritz_pairs(K, M, 4)
    B = new_directions(K, M, pairs, slice(0, 3), slice(0, 4))
    assert B.shape[1] == 3
    assert np.allclose(B.T @ K @ B, np.eye(3), atol=1e-10)
    assert np.allclose(pairs.coefficients.T @ K @ B, 0, atol=1e-10)


def test_the_complement_of_found_directions_is_orthogonal_to_them_in_the_mass():
    _, M = pencil(7)
    found = np.array([False, True, False, False, True, False, False])
    others = complement(M, found)
    assert others.shape == (7, 5)
    assert np.allclose(M[found] @ others, 0, atol=1e-13)
    assert np.array_equal(others[~found], np.eye(5))
