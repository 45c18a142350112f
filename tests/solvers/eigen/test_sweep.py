"""A pass of the eigenvalue iteration, against products with whole matrices."""

import numpy as np
import pytest

from penstock.fem import Cantilever
from penstock.solvers import smoothed_aggregation
from penstock.solvers.eigen.mass import as_mass
from penstock.solvers.eigen.sweep import ModesSweep, weights_of_products
from penstock.spmv import CPU
from penstock.streaming import HostStore, Ring, StreamedMatrix, Workload


@pytest.fixture(scope="module")
def beam():
    return Cantilever(nodes=(49, 4, 4), dof=3, lengths=12.0)


def smoothed(M, K, vectors, *, scaled_first):
    """Return ``p(D K) v``, or ``p(K D) v``."""
    D = M.diagonal
    for step in M.smooth:
        vectors = vectors - step.a * (D @ (K @ vectors) if scaled_first else K @ (D @ vectors))
    return vectors


def of_coarse(M, fine):
    out = np.empty((M.level.T.unknowns, fine.shape[1]))
    M.level.T.restrict(np.ascontiguousarray(fine), out)
    return out


@pytest.mark.parametrize("smoothing", [1, 2, 3])
@pytest.mark.parametrize("lumped", [True, False])
@pytest.mark.parametrize("format_name", ["bsr", "symmetric_bsr", "streamed", "streamed half", "few slots"])
def test_a_pass_leaves_what_separate_products_give(beam, format_name, lumped, smoothing):
    A = beam.matrix("bsr")
    operator = A
    if format_name == "symmetric_bsr":
        operator = beam.matrix("symmetric_bsr")
    elif format_name != "bsr":
        stored = "symmetric_bsr" if format_name == "streamed half" else "bsr"
        slots = 4 if format_name == "few slots" else 16
        store = HostStore.create(beam.subdivisions(24 if stored == "symmetric_bsr" else 49, stored))
        operator = StreamedMatrix(store, 800 << 10, ring=Ring(slots=slots), workload=Workload(4, degree=14))
        assert operator.powers_per_sweep() == {"streamed": 15, "streamed half": 15, "few slots": 3}[format_name]
    degree = 5
    M = smoothed_aggregation(
        operator, coordinates=beam.mesh.coordinates(), aggregate_nodes=27, smoothing=smoothing, degree=degree
    )
    mass = as_mass(beam.mass(2.0, lumped=lumped), A.shape[0], 3, CPU)
    rng = np.random.default_rng(1)
    sweep = ModesSweep(operator, mass, M, 4)
    sweep.X[...] = rng.standard_normal(sweep.X.shape) * (mass.diagonal() > 0)[:, None]
    before, c, values = sweep.X.copy(), rng.standard_normal((M.level.T.unknowns, 4)), np.array([1.0, 2.0, 3.0, 4.0])
    below_f, below_u, below_t = sweep.run(c, values, lambda: True)

    prolonged = np.empty_like(before)
    M.level.T.prolong(c, prolonged)
    X = before + smoothed(M, A, prolonged, scaled_first=True)
    f = (mass @ X) * values - A @ X
    (first, *_), steps = [M.first], M.polynomial
    older, z = np.zeros_like(f), first * (M.diagonal @ f)
    for step in steps:
        older, z = z, step.a * (M.diagonal @ (f - A @ z)) + step.b * z + step.c * older
    u, t = A @ z, mass @ z
    for name, expected in (("X", X), ("f", f), ("m", z), ("u", u), ("t", t), ("of_mass", mass @ X)):
        scale = abs(expected).max()
        assert np.allclose(getattr(sweep, name), expected, rtol=0, atol=1e-11 * scale), name
    for below, fine in ((below_f, f), (below_u, u), (below_t, t)):
        expected = of_coarse(M, smoothed(M, A, fine, scaled_first=False))
        assert np.allclose(below, expected, rtol=0, atol=1e-10 * abs(expected).max())


def test_a_pass_in_memory_ends_with_the_residuals_if_that_is_all(beam):
    A = beam.matrix("bsr")
    M = smoothed_aggregation(A, coordinates=beam.mesh.coordinates(), aggregate_nodes=27)
    sweep = ModesSweep(A, as_mass(None, A.shape[0], 3, CPU), M, 2)
    sweep.X[:, 0] = 1.0
    assert sweep.run(np.zeros((M.level.T.unknowns, 2)), np.array([2.0, 1.0]), lambda: False) is None
    assert np.allclose(sweep.f[:, 0], 2.0 - A @ np.ones(A.shape[0]), atol=1e-12)
    assert not sweep.m.any()


def test_an_interrupted_sweep_leaves_nothing_in_the_images(beam):
    store = HostStore.create(beam.subdivisions(24, "symmetric_bsr"))
    with StreamedMatrix(store, 800 << 10, ring=Ring(slots=16), workload=Workload(2, degree=14)) as A:
        M = smoothed_aggregation(A, coordinates=beam.mesh.coordinates(), aggregate_nodes=27)
        sweep = ModesSweep(A, as_mass(beam.mass(), A.shape[0], 3, CPU), M, 2)
        c, values = np.ones((M.level.T.unknowns, 2)), np.ones(2)
        A.turn_to(1)
        first = sweep.run(c, values, lambda: True)
        sweep._recurrence.image[...] = sweep._recurrence.side.image[...] = np.nan  # as an interrupt may
        sweep.X[...] = 0.0
        A.turn_to(1)
        again = sweep.run(c, values, lambda: True)
    assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))


def test_weights_rebuild_the_smoothed_residual_from_the_products_of_the_polynomial(beam):
    A = beam.matrix("bsr")
    M = smoothed_aggregation(A, coordinates=beam.mesh.coordinates(), aggregate_nodes=27, smoothing=3, degree=7)
    weights = weights_of_products(M.first, M.polynomial, [step.a for step in M.smooth])
    r = np.random.default_rng(0).standard_normal((A.shape[0], 1))
    older, z, total = np.zeros_like(r), M.first * (M.diagonal @ r), r.copy()
    for weight, step in zip(weights, M.polynomial, strict=False):
        total += weight * (A @ z)
        older, z = z, step.a * (M.diagonal @ (r - A @ z)) + step.b * z + step.c * older
    expected = smoothed(M, A, r, scaled_first=False)
    assert np.allclose(total, expected, rtol=0, atol=1e-10 * abs(expected).max())
