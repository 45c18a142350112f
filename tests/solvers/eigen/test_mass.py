"""Mass matrices of callers."""

import numpy as np
import pytest
import scipy.sparse

from penstock.fem import Cantilever
from penstock.solvers.eigen.mass import ConsistentMass, LumpedMass, as_mass, mass_norms
from penstock.spmv import CPU, InputError, NodeMatrix


@pytest.fixture(scope="module")
def beam():
    return Cantilever(nodes=(6, 3, 3), dof=3, clamped=False)


def test_a_mass_of_equal_unknowns_is_stored_by_nodes(beam):
    M = beam.mass(2.0)
    mass = as_mass(M.to_csr(), 162, 3, CPU)
    assert isinstance(mass, ConsistentMass)
    assert mass.nbytes == M.nbytes < M.to_csr().data.nbytes
    x = np.random.default_rng(0).standard_normal((162, 2))
    assert np.allclose(mass @ x, M.to_csr() @ x, rtol=1e-14)


def test_weights_of_unknowns_are_found():
    beam = Cantilever(nodes=(5, 3, 3), dof=6, clamped=False)
    M = beam.mass(3.0, rotary_inertia=0.01)
    again = as_mass(M.to_csr(), M.shape[0], 6, CPU)
    assert again.nbytes == M.nbytes
    assert abs(again.to_csr() - M.to_csr()).max() < 1e-15


def test_a_mass_that_couples_different_unknowns_is_used_as_it_is():
    rng = np.random.default_rng(0)
    dense = rng.standard_normal((12, 12))
    M = scipy.sparse.csr_array(dense @ dense.T + 12 * np.eye(12))
    mass = as_mass(M, 12, 3, CPU)
    x = rng.standard_normal((12, 3))
    assert np.allclose(mass @ x, M @ x)
    rows = mass.node_rows(3, 1, 3)
    assert np.allclose(rows.blocks[0], M.toarray()[3:6, 0:3])


@pytest.mark.parametrize("M", [np.arange(1.0, 13.0), scipy.sparse.diags_array(np.arange(1.0, 13.0)), None])
def test_diagonals_are_lumped(M):
    mass = as_mass(M, 12, 3, CPU)
    assert isinstance(mass, LumpedMass)
    expected = np.ones(12) if M is None else np.arange(1.0, 13.0)
    assert np.array_equal(mass @ np.ones(12), expected)
    assert np.array_equal(mass.node_rows(3, 2, 4).blocks[1], np.diag(expected[9:]))


@pytest.mark.parametrize(
    ("M", "match"),
    [
        (np.ones(5), "M has shape"),
        (np.array([1.0] * 11 + [np.nan]), "not finite"),
        (np.array([1.0] * 11 + [-1.0]), "not positive definite"),
        (scipy.sparse.csr_array(np.triu(np.ones((12, 12)))), "not symmetric"),
        (scipy.sparse.csr_array(np.eye(12) * 1j), "real"),
        (np.ones((12, 12)), "sparse matrix"),
        ("lumped", "sparse matrix"),
    ],
)
def test_what_is_no_mass_is_refused(M, match):
    with pytest.raises(InputError, match=match):
        as_mass(M, 12, 3, CPU)


@pytest.mark.parametrize("lumped", [True, False])
def test_norms_in_the_inverse_of_the_mass(beam, lumped):
    M = beam.mass(2.0, lumped=lumped)
    vectors = np.random.default_rng(0).standard_normal((162, 5))
    exact = np.sqrt(np.einsum("ij,ij->j", vectors, np.linalg.solve(M.to_csr().toarray(), vectors)))
    norms = mass_norms(as_mass(M, 162, 3, CPU), vectors)
    assert np.all(norms >= exact)
    assert np.all(norms <= 1.02 * exact)


def test_a_matrix_of_nodes_leaves_fixed_unknowns_out():
    S = scipy.sparse.csr_array([[2.0, 1.0], [1.0, 2.0]])
    M = NodeMatrix(S, [1.0, 1.0], fixed=[True, False, False, False])
    dense = np.kron(S.toarray(), np.eye(2))
    dense[0] = dense[:, 0] = 0.0
    assert np.array_equal(M @ np.eye(4), dense)
    assert np.array_equal(M.to_csr().toarray(), dense)
    assert np.array_equal(M.diagonal(), np.diag(dense))


@pytest.mark.parametrize(("nodes", "weights"), [(np.ones((2, 3)), [1.0]), (np.eye(2), [np.inf]), (np.eye(2), [[1.0]])])
def test_a_matrix_of_nodes_must_be_one(nodes, weights):
    with pytest.raises(InputError, match="matrix of nodes"):
        NodeMatrix(scipy.sparse.csr_array(nodes), weights)
