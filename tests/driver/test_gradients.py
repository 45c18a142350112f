"""Derivatives of a solution agree with finite differences, and are refused where they would be of another matrix."""

import numpy as np
import pytest
import scipy.sparse

import penstock
from penstock.driver import gradients
from penstock.driver.gradients import (
    DifferentiableSystem,
    accurate_modes,
    checked_gradient,
    eigenvalues_gradient,
    system_for,
    values_gradient,
)
from penstock.fem import Cantilever

A = Cantilever(nodes=(4, 3, 2), dof=3).matrix("csr").to_csr()
A = A / A.diagonal().max()
N = A.shape[0]
ROWS, COLUMNS = np.repeat(np.arange(N), np.diff(A.indptr)), A.indices


def of_values(matrix):
    return scipy.sparse.csr_array((matrix, A.indices, A.indptr), shape=A.shape)


def prepared(matrix=A, maxiter=None):
    return DifferentiableSystem(penstock.prepare(matrix, device="cpu"), 1e-12, maxiter)


@pytest.mark.parametrize("shape", [(N,), (N, 3)])
@pytest.mark.parametrize("gathered", [1 << 20, 100])
def test_gradients_agree_with_finite_differences(shape, gathered, monkeypatch):
    monkeypatch.setattr(gradients, "_GATHERED", gathered)
    rng = np.random.default_rng(0)
    b, weights, db = rng.normal(size=(3, *shape))
    change = rng.normal(size=A.nnz) * abs(A.data)
    change = (of_values(change) + of_values(change).T) / 2
    step = 1e-5

    def loss(matrix, b):
        return (weights * scipy.sparse.linalg.spsolve(matrix.tocsc(), b).reshape(shape) ** 2).sum()

    system = prepared()
    x = system.solve(b)
    adjoint = system.adjoint(2 * weights * x, version=0)
    gradient = values_gradient(ROWS, COLUMNS, adjoint, x)

    of_b = (loss(A, b + step * db) - loss(A, b - step * db)) / (2 * step)
    of_matrix = (loss(A + step * change, b) - loss(A - step * change, b)) / (2 * step)
    np.testing.assert_allclose((adjoint * db).sum(), of_b, rtol=1e-6)
    np.testing.assert_allclose((gradient * change[ROWS, COLUMNS]).sum(), of_matrix, rtol=1e-6)
    np.testing.assert_allclose(of_values(gradient).toarray(), of_values(gradient).toarray().T, rtol=1e-12)


def test_gradients_of_float32_are_float32():
    x = np.ones((N, 2), dtype=np.float32)
    assert values_gradient(ROWS, COLUMNS, x, x).dtype == np.float32


def test_a_system_that_was_updated_after_the_solve_is_refused():
    known = prepared()
    assert known.system.version == 0
    x = known.solve(np.ones(N))
    known.system.update(2.0 * A)

    assert known.system.version == 1
    with pytest.raises(
        penstock.InputError, match=r"from version 0 of its values to 1: compute gradients before update\(\)"
    ):
        known.adjoint(x, version=0)
    np.testing.assert_allclose(known.adjoint(np.ones(N), version=1), x / 2, rtol=1e-8)


def test_a_refused_update_leaves_the_version():
    system = prepared().system
    with pytest.raises(penstock.InputError, match="pattern"):
        system.update(scipy.sparse.eye_array(N, format="csr"))
    assert system.version == 0


def test_both_solves_must_converge():
    known = prepared(maxiter=1)
    with pytest.raises(penstock.NotConvergedError):
        known.solve(np.ones(N))
    with pytest.raises(penstock.NotConvergedError):
        known.adjoint(np.ones(N), version=0)


def test_a_prepared_system_takes_no_options_of_the_set_up():
    system = prepared().system
    assert system_for(system, 1, {}) is system
    with pytest.raises(penstock.InputError, match=r"give device, memory to penstock\.prepare"):
        system_for(system, 1, {"memory": "1 GiB", "device": "cpu"})


def test_gradients_of_eigenvalues_agree_with_finite_differences():
    rng = np.random.default_rng(2)
    M = scipy.sparse.diags_array(1.0 + rng.random(N)).tocsr()
    change = of_values(rng.normal(size=A.nnz) * abs(A.data))
    change, of_mass = (change + change.T) / 2, scipy.sparse.diags_array(rng.normal(size=N))
    modes = accurate_modes(A, 4, M, {"device": "cpu"})
    weights = np.array([1.0, -2.0, 0.5, 0.25])
    of_k = eigenvalues_gradient(ROWS, COLUMNS, modes.vectors, weights)
    of_m = eigenvalues_gradient(np.arange(N), np.arange(N), modes.vectors, -modes.values * weights)
    step = 1e-6

    def loss(sign, k, m):
        K, B = (A + sign * step * k * change).toarray(), (M + sign * step * m * of_mass).toarray()
        return weights @ scipy.linalg.eigh(K, B, eigvals_only=True)[:4]

    for of, given in (((1, 0), of_k @ np.asarray(change[ROWS, COLUMNS])), ((0, 1), of_m @ of_mass.diagonal())):
        np.testing.assert_allclose(given, (loss(1, *of) - loss(-1, *of)) / (2 * step), rtol=1e-6)


@pytest.mark.parametrize(
    ("values", "zeros", "following", "gradient", "error"),
    [
        ([1.0, 2.0, 3.0], 0, 4.0, [1.0, 2.0, 3.0], None),
        ([1.0, 2.0, 2.0], 0, np.nan, [1.0, 5.0, 5.0], None),
        ([1.0, 2.0, 2.0], 0, 3.0, [1.0, 5.0, 4.0], "eigenvalues 2 to 3 are equal"),
        ([1.0, 2.0], 0, 2.0, [0.0, 1.0], "eigenvalue 2 has the gradient 1, but the next one is equal"),
        ([1.0, 2.0], 0, 2.0, [1.0, 0.0], None),
        ([-1e-15, 3e-15, 1.0], 2, 2.0, [0.0, 0.0, 1.0], None),
        ([-1e-15, 3e-15, 1.0], 2, 2.0, [1.0, 0.0, 1.0], "eigenvalues 1 to 2 are equal"),
        ([0.0, 0.0], 2, 1.0, [1.0, 1.0], None),
        ([1.0], 0, np.nan, [1.0], None),
    ],
)
def test_equal_eigenvalues_have_no_derivatives_of_their_own(values, zeros, following, gradient, error):
    arguments = (np.array(values), zeros, following, np.array(gradient))
    if error is None:
        assert np.array_equal(checked_gradient(*arguments), gradient)
    else:
        with pytest.raises(penstock.InputError, match=error):
            checked_gradient(*arguments)


def test_modes_that_are_not_accurate_have_no_gradients():
    beam = Cantilever(nodes=(17, 6, 6), dof=3)
    options = {"coordinates": beam.mesh.coordinates(), "device": "cpu"}
    with pytest.raises(penstock.NotConvergedError):
        accurate_modes(beam.matrix(), 2, beam.mass(), {**options, "maxiter": 1})
    with pytest.raises(penstock.InputError, match="leave out on_failure"):
        accurate_modes(beam.matrix(), 2, beam.mass(), {**options, "on_failure": "return"})
