import numpy as np
import pytest
import scipy.sparse

from penstock.solvers.amg.dense_inverse import dense_inverse, inverse_of
from penstock.spmv import CsrMatrix, InputError


def matrix(values, seed=0):
    Q, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((len(values), len(values))))
    A = (Q * values) @ Q.T
    return (A + A.T) / 2


def test_of_a_definite_matrix():
    A = matrix(np.geomspace(1e-8, 1, 30))
    np.testing.assert_allclose(dense_inverse(A) @ A, np.eye(30), atol=1e-6)


@pytest.mark.parametrize("rounding", [0.0, 3e-14, 3e-12, -2e-13])
def test_of_a_free_body_it_is_the_pseudo_inverse(rounding):
    """Sums of rounding are larger than the rounding of the inverse: the gap to the other eigenvalues tells them."""
    values = np.concatenate([np.full(6, rounding), np.geomspace(1e-5, 1, 60)])

    assert np.linalg.norm(dense_inverse(matrix(values)), 2) < 1e7


def test_of_a_slender_beam_nothing_is_cut():
    values = np.linspace(1, 40, 40) ** 4 * 1e-11

    assert np.linalg.norm(dense_inverse(matrix(values)), 2) > 0.1 / values[0]


def test_of_what_is_only_rounding_it_is_zero():
    assert not dense_inverse(np.zeros((2, 2))).any()


def test_it_is_exactly_symmetric():
    inverse = dense_inverse(matrix(np.geomspace(1e-3, 1.0, 30)))

    assert (inverse == inverse.T).all()


def test_rows_of_zeros_are_kept():
    A = matrix(np.linspace(1.0, 2.0, 30))
    A[7], A[:, 7] = 0.0, 0.0

    inverse = inverse_of(CsrMatrix.from_csr(scipy.sparse.csr_array(A))).to_csr().toarray()

    assert not inverse[7].any()
    assert np.allclose(inverse @ A, np.diag(np.arange(30) != 7), atol=1e-10)


def test_numbers_out_of_range_are_refused():
    with pytest.raises(InputError, match="badly scaled"):
        dense_inverse(np.array([[np.inf]]))
