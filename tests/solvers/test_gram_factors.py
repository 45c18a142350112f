"""Orthonormal bases from Gram matrices, whatever their rank."""

import numpy as np
import pytest
from block_solves import lengths

from penstock.solvers.gram_factors import GramFactors, GramFault, factor_gram


class TestGramFactors:
    @pytest.mark.parametrize("columns", [1, 2, 5, 16, 64])
    @pytest.mark.parametrize("deficit", [0, 1, "half"])
    def test_vectors_are_those_of_an_orthonormal_basis(self, columns, deficit):
        rank = max(1, columns - (columns // 2 if deficit == "half" else deficit))
        for seed in range(10):
            rng = np.random.default_rng(seed)
            W = rng.standard_normal((200, rank))
            if rank < columns:
                W = W @ np.linalg.qr(rng.standard_normal((columns, rank)))[0].T
            W *= 10 ** rng.uniform(-8, 8, columns)

            factors = factor_gram(W.T @ W)

            assert isinstance(factors, GramFactors)
            assert factors.rank == rank
            assert factors.well == (rank == columns)
            assert (factors.t.shape, factors.c.shape) == ((columns, rank), (rank, columns))
            Q = W @ factors.t
            # What is dropped is told from zero by the Gram matrix, which has half of the digits.
            tolerance = 1e-12 if factors.well else 1e-6
            assert (lengths(Q @ factors.c - W) <= tolerance * lengths(W)).all()
            np.testing.assert_allclose(Q.T @ Q, np.eye(rank), rtol=0, atol=1e-9 if factors.well else 1e-3)
            np.testing.assert_allclose(factors.t @ factors.t.T, factors.inverse, rtol=1e-14)

    @pytest.mark.parametrize("closeness", np.arange(0, 17))
    def test_orthonormal_to_nine_digits_if_called_well_whatever_the_angle(self, closeness):
        """One column that nears the span of the others digit by digit, until it cannot be told from it."""
        rng = np.random.default_rng(int(closeness))
        W = rng.standard_normal((300, 4))
        W[:, 3] = W[:, :3].sum(axis=1) + 10.0**-closeness * W[:, 3]

        factors = factor_gram(W.T @ W)

        Q = W @ factors.t
        assert (lengths(Q @ factors.c - W) <= 3e-6 * lengths(W)).all()
        deviation = np.abs(Q.T @ Q - np.eye(factors.rank)).max()
        assert deviation <= (1e-9 if factors.well else 1e-3)
        assert factors.well == (closeness <= 2) or closeness == 3
        assert factors.rank == (4 if closeness <= 5 else 3) or closeness == 6

    def test_a_second_pass_mends_what_the_first_left(self):
        rng = np.random.default_rng(0)
        W = rng.standard_normal((300, 6)) * 10.0 ** np.arange(-8, 4, 2)
        W[:, 5] = W[:, 0] * 1e3 + 1e-12 * W[:, 5]
        first = factor_gram(W.T @ W)
        assert not first.well
        Q = W @ first.t

        second = factor_gram(Q.T @ Q)

        assert second.well
        Q = Q @ second.t
        np.testing.assert_allclose(Q.T @ Q, np.eye(first.rank), rtol=0, atol=1e-12)
        assert (lengths(Q @ second.c @ first.c - W) <= 1e-6 * lengths(W)).all()

    def test_zero_columns_are_dropped(self):
        W = np.insert(np.random.default_rng(0).standard_normal((50, 3)), [1, 3], 0.0, axis=1)

        factors = factor_gram(W.T @ W)

        assert factors.rank == 3
        assert not factors.t[[1, 4]].any()
        np.testing.assert_allclose(W @ factors.t @ factors.c, W, rtol=0, atol=1e-12)
        assert factor_gram(np.zeros((4, 4))).rank == 0

    def test_the_inverse_is_that_of_the_matrix(self, spd):
        gram = spd(6, 1e4) * np.outer(*[10.0 ** np.arange(-6, 6, 2)] * 2)

        np.testing.assert_allclose(factor_gram(gram).inverse @ gram, np.eye(6), rtol=0, atol=1e-2)
        np.testing.assert_allclose(gram @ factor_gram(gram).inverse @ gram, gram, rtol=1e-9)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_what_is_not_finite_is_told(self, value):
        gram = np.eye(4)
        gram[2, 1] = gram[1, 2] = value

        assert factor_gram(gram) is GramFault.NOT_FINITE

    @pytest.mark.parametrize(
        "gram",
        [
            -np.eye(3),
            np.diag([1.0, 1.0, -1e-30]),
            np.array([[1.0, 2.0], [2.0, 1.0]]),
            np.array([[1.0, 1.0 + 1e-7], [1.0 + 1e-7, 1.0]]) * 1e-12,
            np.array([[1.0, 2e8], [2e8, 1e16]]),
        ],
        ids=["negative", "a negative square", "indefinite", "slightly indefinite", "indefinite once scaled"],
    )
    def test_what_is_not_positive_is_told(self, gram):
        assert factor_gram(gram) is GramFault.NOT_POSITIVE

    def test_rounding_is_not_taken_for_a_negative_square(self):
        gram = np.array([[1.0, 1.0 + 1e-15], [1.0 + 1e-15, 1.0]])

        assert factor_gram(gram).rank == 1
