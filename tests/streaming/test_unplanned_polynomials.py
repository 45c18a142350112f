"""A matrix opened for single products says what a polynomial costs, and what would help."""

import warnings

import numpy as np
import pytest

from penstock.fem import Cantilever
from penstock.solvers import cg, chebyshev
from penstock.streaming import StreamedMatrix, Workload


@pytest.fixture(scope="module")
def matrix():
    return Cantilever(nodes=(33, 5, 5), dof=3).matrix("csr").to_csr()


def test_the_first_one_is_told_of_once(matrix):
    with StreamedMatrix(matrix, "300 KiB") as A, pytest.warns(UserWarning, match="degree=5") as told:
        result = cg(A, np.ones(A.shape[0]), M=chebyshev(A, 5), maxiter=3)
    assert len(told) == 1
    assert result.sweeps > 3 * 4


def test_the_advice_helps_and_is_then_not_repeated(matrix):
    with warnings.catch_warnings(), StreamedMatrix(matrix, "300 KiB", workload=Workload(degree=5)) as A:
        warnings.simplefilter("error")
        result = cg(A, np.ones(A.shape[0]), M=chebyshev(A, 5), maxiter=3)
    assert result.sweeps < 3 * 4


def test_nothing_is_said_of_a_matrix_that_is_resident(matrix):
    with warnings.catch_warnings(), StreamedMatrix(matrix, "100 MiB") as A:
        warnings.simplefilter("error")
        cg(A, np.ones(A.shape[0]), M=chebyshev(A, 5), maxiter=3)
