"""penstock.eigsh for systems with parts that hardly move together: held by penalties, free, or coupled by next to nothing."""

import numpy as np
import pytest
import scipy.sparse
from modes_reference import box, chain, reference
from scipy.sparse.linalg import eigsh
from seven_point import seven_point

import penstock
from penstock.solvers import SmoothedAggregationSpec


@pytest.fixture(scope="module", autouse=True)
def always_in_one_thread(one_thread):
    """These systems are small."""


@pytest.mark.parametrize("stiffness", [1e-3, 1e-5, 1e-7])
@pytest.mark.parametrize("springs", ["everywhere", "at corners"])
def test_a_body_on_soft_springs(stiffness, springs):
    K, M, X, _ = box((17, 6, 6), 3.0, clamped=False)
    M = M.to_csr()
    at = np.ones(len(X), dtype=bool) if springs == "everywhere" else np.isin(X[:, 0], [0.0, X[:, 0].max()])
    springs_of = scipy.sparse.diags_array(stiffness * M.diagonal().max() * np.repeat(at, 3)).tocsr()
    K = K + springs_of
    modes = penstock.eigsh(K, 8, M, coordinates=X, device="cpu", on_failure="return")
    assert modes.reason.name in ("CONVERGED", "ROUNDING_FLOOR")
    assert modes.zeros == 0
    # Rounding in a factor of K spoils the higher values of the reference, those of the free body are nearly the same.
    rigid = reference(K, M, 8)[:6]
    assert np.allclose(modes.values[:6], rigid, rtol=1e-7 if stiffness > 1e-6 else 1e-5)
    free = penstock.eigsh(K - springs_of, 8, M, coordinates=X, device="cpu").values[6:]
    assert np.allclose(modes.values[6:], free, rtol=20 * stiffness)


def mounted(bodies):
    """Return K, M and coordinates of cubes that stand beside each other on soft mounts."""
    K, M, X, _ = box(7, clamped=False)
    feet = np.isin(X[:, 0], [0.0, X[:, 0].max()]) & np.isin(X[:, 1], [0.0, X[:, 1].max()]) & (X[:, 2] == 0.0)
    K = K + scipy.sparse.diags_array(3e-6 * K.diagonal().max() * np.repeat(feet, 3))
    K, M = (scipy.sparse.csr_array(scipy.sparse.block_diag(bodies * [A])) for A in (K, M.to_csr()))
    return K, M, np.concatenate([X + np.array([1.5 * body, 0.0, 0.0]) for body in range(bodies)])


@pytest.mark.parametrize(("bodies", "k"), [(2, 4), (2, 12), (3, 12), (3, 20), (4, 4), (4, 30), (6, 4), (10, 4)])
def test_several_bodies_on_soft_mounts(bodies, k):
    """Each has six modes far below all others, however many are wanted, and is by itself on the coarse level."""
    K, M, X = mounted(bodies)

    modes = penstock.eigsh(K, k, M, coordinates=X, device="cpu")

    assert modes.converged
    assert not modes.zeros
    assert modes.iterations <= 12
    np.testing.assert_allclose(modes.values, reference(K, M, k), rtol=1e-6)


def test_coordinates_of_several_bodies_reach_the_coarse_level_in_every_way():
    K, M, X = mounted(2)
    expected = penstock.eigsh(K, 8, M, coordinates=X, device="cpu").values
    with penstock.prepare(K, coordinates=X, device="cpu") as system:
        prepared = system.eigsh(8, M)
    late = SmoothedAggregationSpec(block_size=3, coordinates=lambda: X)
    made_late = penstock.eigsh(K, 8, M, preconditioner=late, device="cpu", on_failure="return")
    assert prepared.converged
    np.testing.assert_allclose(prepared.values, expected, rtol=1e-6)
    assert np.isfinite(made_late.values).all()  # aggregates of coordinates hold nodes of both


def test_a_limit_of_memory_keeps_the_block():
    """Twelve modes are soft, and eight vectors iterate: fewer digits are better than more memory than was allowed."""
    K, M, X = mounted(2)
    planned = penstock.eigsh(K, 2, M, coordinates=X, device="cpu", memory="8 MiB", on_failure="return")
    free = penstock.eigsh(K, 2, M, coordinates=X, device="cpu")
    assert "represent all modes far below" in free.explain()
    assert "represent all modes far below" not in planned.explain()


def test_a_gap_high_in_the_spectrum_is_not_that_above_soft_modes():
    """Single nodes whose blocks have values from 1 to 1e8."""
    K, M, *_ = box(8)
    q = np.linalg.qr(np.random.default_rng(0).standard_normal((3, 3)))[0]
    single = K.diagonal().max() * (q @ np.diag([1.0, 1e4, 1e8]) @ q.T)
    K = scipy.sparse.csr_array(scipy.sparse.block_diag([K] + 10 * [single]))
    M = scipy.sparse.csr_array(scipy.sparse.block_diag([M.to_csr(), M.diagonal().mean() * np.eye(30)]))

    modes = penstock.eigsh(K, 6, M, device="cpu", block_size=3)

    assert modes.converged
    np.testing.assert_allclose(modes.values, reference(K, M, 6), rtol=1e-6)


def test_springs_by_themselves_beside_a_mass_a_billion_times_the_others():
    """No unknown is held only because others are heavy."""
    K = scipy.sparse.csr_array(scipy.sparse.block_diag([seven_point(12), np.diag([0.1, 0.2, 0.3])]))
    masses = np.ones(K.shape[0])
    masses[800] = 1e9

    modes = penstock.eigsh(K, 5, masses, device="cpu")

    assert modes.converged
    expected = eigsh(K.tocsc(), 9, M=scipy.sparse.diags_array(masses).tocsc(), sigma=0)[0]
    np.testing.assert_allclose(modes.values, np.sort(expected)[:5], rtol=1e-6)


@pytest.mark.parametrize("penalty", [1e6, 1e12, 1e14, 1e30])
def test_unknowns_that_a_penalty_holds(penalty):
    """Values are those of the matrix without them, but for the stiffness of the penalty."""
    K = seven_point(12)
    held = np.zeros(1728)
    held[::50] = penalty
    expected = np.sort(eigsh(scipy.sparse.csc_array(K[held == 0][:, held == 0]), 4, sigma=0)[0])

    modes = penstock.eigsh(scipy.sparse.csr_array(K + scipy.sparse.diags_array(held)), 4, device="cpu")

    assert modes.converged
    np.testing.assert_allclose(modes.values, expected, rtol=max(1e-10, 5 / penalty))


@pytest.mark.parametrize("penalty", [1e5, 1e6, 1e7, 1e8, 1e9])
def test_residuals_beside_a_held_face_reach_the_tolerance(penalty):
    """Held unknowns have no part in the coarse level, where they would be small differences of large numbers."""
    held = np.zeros(1728)
    held[:144] = penalty

    modes = penstock.eigsh(
        scipy.sparse.csr_array(seven_point(12) + scipy.sparse.diags_array(held)), 6, device="cpu", tol=1e-9
    )

    assert modes.converged
    assert modes.iterations <= 14


@pytest.mark.parametrize("tol", [1e-6, 1e-9])
@pytest.mark.parametrize("coupling", [1e-3, 1e-6, 1e-8, 1e-11, 0.0])
def test_masses_on_springs_that_hardly_touch_a_body(coupling, tol):
    """Their modes are found once, and with the couplings if there are any."""
    body, stiffness = seven_point(12), np.array([0.25, 0.3, 0.4, 0.5])
    n, at = body.shape[0], 100 + 37 * np.arange(4)
    own = scipy.sparse.diags_array(stiffness * (1 + coupling))
    couplings = scipy.sparse.csr_array((-coupling * stiffness, (at, np.arange(4))), shape=(n, 4))
    K = scipy.sparse.block_array([[body, couplings], [couplings.T, own]], format="csr")

    modes = penstock.eigsh(K, 8, device="cpu", tol=tol)

    assert modes.converged
    np.testing.assert_allclose(modes.values, np.sort(eigsh(K.tocsc(), 8, sigma=0)[0]), rtol=1e-9)
    np.testing.assert_allclose(modes.vectors.T @ modes.vectors, np.eye(8), atol=1e-9)


@pytest.mark.parametrize("nodes", [(9, 7, 6), (11, 7, 6)])  # by LAPACK, and by iterations
@pytest.mark.parametrize("lumped", [True, False])
@pytest.mark.parametrize("penalty", [1e10, 1e14])
def test_a_penalty_holds_unknowns_that_the_mass_couples(penalty, lumped, nodes):
    K, M, X, k = box(nodes, k=4, clamped=False, lumped=lumped)
    M = M.to_csr()
    held = np.repeat(X[:, 0] == 0.0, 3)
    free = np.flatnonzero(~held)

    modes = penstock.eigsh(K + scipy.sparse.diags_array(penalty * held), k, M, coordinates=X, device="cpu")

    assert modes.converged
    assert not modes.zeros
    np.testing.assert_allclose(modes.values, reference(K[free][:, free], M[free][:, free], k), rtol=10 / penalty + 1e-9)


@pytest.mark.parametrize("scale", [1e-20, 1.0])
@pytest.mark.parametrize("coupling", [1e-8, 1e-6])
def test_unknowns_that_hardly_couple_are_not_taken_for_single_ones(scale, coupling):
    L = scipy.sparse.csc_array(seven_point(12))
    expected = 1.0 + coupling * np.sort(eigsh(L, 4, sigma=0)[0])

    modes = penstock.eigsh(
        scipy.sparse.csr_array(scale * (scipy.sparse.eye_array(1728) + coupling * L)), 4, device="cpu", tol=1e-10
    )

    assert modes.converged
    np.testing.assert_allclose(modes.values / scale - 1.0, expected - 1.0, rtol=1e-3)


@pytest.mark.parametrize("points", [2, 3, 5, 40])
def test_chains_that_nothing_holds_beside_a_body(points):
    """Most of them are a column of the prolongator that K maps to zero."""
    K = scipy.sparse.csr_array(scipy.sparse.block_diag([seven_point(12)] + 3 * [chain(points)]))
    modes = penstock.eigsh(K, 7, device="cpu")
    assert modes.converged
    assert modes.zeros == 3
    assert modes.iterations <= 12
    np.testing.assert_allclose(modes.values, np.sort(eigsh(K.tocsc(), 7, sigma=-0.01)[0]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scale", [1.0, 3.0, 1e12, 1e-12])
def test_more_motions_without_energy_than_modes(scale):
    K = scale * scipy.sparse.csr_array(scipy.sparse.block_diag([seven_point(12)] + 30 * [chain(3)]))
    modes = penstock.eigsh(K, 8, device="cpu")
    assert modes.converged
    assert (modes.zeros, modes.iterations) == (8, 0)
    assert modes.residuals.max() < 1e-12
    assert modes.cuts_cluster
    assert np.abs(K @ modes.vectors).max() < 1e-14 * scale


def test_many_islands_take_little_time_each():
    """As many parts as are wanted are looked at, not all."""
    islands = scipy.sparse.kron(scipy.sparse.eye_array(10_000), chain(7))
    K = scipy.sparse.csr_array(scipy.sparse.block_diag([seven_point(12), islands]))
    modes = penstock.eigsh(K, 4, device="cpu")
    assert (modes.zeros, modes.iterations) == (4, 0)


@pytest.mark.parametrize("distance", [None, 3.0, 8.0, 40.0, 70.0, 1e3, 1e5])
@pytest.mark.parametrize("side", [2, 3, 4])
def test_a_small_free_body_beside_a_held_one(side, distance):
    (K, M, X, _), (free_K, free_M, free_X, _) = box(8), box(side, 2.0, clamped=False)
    K, M = (scipy.sparse.csr_array(scipy.sparse.block_diag(of)) for of in ((K, free_K), (M.to_csr(), free_M.to_csr())))
    X = None if distance is None else np.concatenate([X, free_X + distance])
    modes = penstock.eigsh(K, 10, M, coordinates=X, device="cpu")
    assert modes.converged
    assert modes.zeros == 6
    np.testing.assert_allclose(modes.values[6:], reference(K, M, 10, -0.01)[6:], rtol=1e-9)
