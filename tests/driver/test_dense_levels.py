"""Coarse matrices that would be dense are predicted, and Jacobi goes on where multigrid would take longer for them."""

import re

import numpy as np
import pytest
import scipy.sparse

import penstock
from penstock.driver import predicted
from penstock.driver.predicted import dense_levels_seconds
from penstock.spmv import BsrMatrix, CsrMatrix

LINE = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(70, 70))

pytestmark = pytest.mark.usefixtures("small_matrices_are_worth_it")


def least_squares(rows, each=8):
    """Return normal equations, of whose unknowns each has hundreds of neighbours that have few in common."""
    random = np.random.default_rng(3)
    places = (np.repeat(np.arange(rows), each), random.integers(rows, size=each * rows))
    J = scipy.sparse.csr_array((random.normal(size=each * rows), places), shape=(rows, rows))
    return (J.T @ J + 1e-3 * scipy.sparse.eye_array(rows)).tocsr()


@pytest.mark.parametrize("size", [1, 3])
def test_coarse_matrices_are_predicted_to_be_dense_where_neighbours_have_few_neighbours_in_common(size):
    in_the_plane = scipy.sparse.kronsum(LINE, LINE)
    near, far = (scipy.sparse.kron(A, np.ones((size, size))).tocsr() for A in (in_the_plane, least_squares(2000)))
    assert dense_levels_seconds(CsrMatrix.from_csr(near), size) == 0
    n = size * 4000
    hub = scipy.sparse.coo_array((np.ones(n), (np.full(n, n - 1), np.arange(n))), shape=(n, n))
    around_a_hub = (hub + hub.T + scipy.sparse.eye_array(n)).tocsr()
    assert dense_levels_seconds(CsrMatrix.from_csr(around_a_hub), size) == 0  # which multigrid leaves out
    assert dense_levels_seconds(CsrMatrix.from_csr(scipy.sparse.csr_array((0, 0))), size) == 0
    of_rows = dense_levels_seconds(CsrMatrix.from_csr(far), size)
    of_nodes = dense_levels_seconds(BsrMatrix.from_csr(far, block_size=size), size)
    assert of_rows > 0.05
    assert of_nodes == pytest.approx(of_rows, rel=0.2)  # others are asked


def random_graph(n, degree):
    random = np.random.default_rng(4)
    ends = np.repeat(np.arange(n), degree), random.integers(n, size=degree * n)
    weights = scipy.sparse.coo_array((10.0 ** random.uniform(-3, 3, degree * n), ends), shape=(n, n)).tocsr()
    weights = weights + weights.T
    return scipy.sparse.csr_array(scipy.sparse.diags_array(weights.sum(axis=1) + 1e-6) - weights)


def test_random_graphs_are_predicted_to_have_dense_coarse_matrices_and_keep_jacobi(monkeypatch):
    A = random_graph(6000, 3)
    assert dense_levels_seconds(CsrMatrix.from_csr(A), 1) > 0.1
    monkeypatch.setattr(predicted, "_RANDOM_ENTRY_SECONDS", 1.0)  # however slow this machine is
    result = penstock.solve(A, np.random.default_rng(0).standard_normal(6000), device="cpu")
    assert result.converged
    assert re.search("choice +jacobi: it promised .* but multigrid is predicted to need", result.explain())


def test_jacobi_goes_on_where_dense_coarse_matrices_take_longer(monkeypatch):
    left = []
    monkeypatch.setattr(predicted, "dense_levels_seconds", lambda A, size: left.append(A) or 1e3)
    A = least_squares(2000)
    result = penstock.solve(A, np.ones(2000), device="cpu")
    assert result.converged
    assert len(left) == 1
    assert "iterations after the first" in result.explain()
    assert "multigrid is predicted to need 1e+03 s for its coarse matrices, which are dense" in result.explain()
    monkeypatch.setattr(predicted, "dense_levels_seconds", lambda A, size: 1e-9)
    assert "choice      multigrid" in penstock.solve(A, np.ones(2000), device="cpu").explain()
