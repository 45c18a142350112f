"""Element matrices against the energies that their docstrings state, integrated independently."""

import itertools
import re

import numpy as np
import pytest
import scipy.linalg

from penstock.fem import Cantilever, HeatConduction, LinearElasticity, MicropolarElasticity
from penstock.spmv import InputError

EPS = np.finfo(np.float64).eps
# Entries of an element matrix sum some hundred products of rounded factors; energies sum the entries in turn.
ENTRY_TOLERANCE = 64 * EPS
ENERGY_TOLERANCE = 256 * EPS
# LAPACK's eigenvalues of a matrix of order n err by a modest multiple of n u times the largest.
ZERO_EIGENVALUE = 48 * 16 * EPS
# The softest deformation of an element of these shapes and moduli is far stiffer than that.
CLEARLY_POSITIVE = 1e-6

SPACINGS = [(1.0, 1.0, 1.0), (0.3, 1.0, 2.2), (0.1, 0.02, 0.05)]
ELEMENTS = [
    HeatConduction(2.5),
    LinearElasticity(3.0, 0.27),
    LinearElasticity(1.0, 0.49),
    LinearElasticity(2.0, -0.4),
    MicropolarElasticity(1.1, 0.6, 0.4, 0.2, 0.1, 0.3),
    MicropolarElasticity(-0.2, 1.1, 0.5, 0.1, -0.2, 0.3),
    MicropolarElasticity.from_engineering(2.0, 0.2, coupling=0.3, characteristic_length=0.4),
]
NULL_SPACE = {1: 1, 3: 6, 6: 6}

LEVI_CIVITA = np.zeros((3, 3, 3))
for i, j, k in itertools.permutations(range(3)):
    LEVI_CIVITA[i, j, k] = np.linalg.det(np.eye(3)[[i, j, k]])
DELTA = np.eye(3)


def corners(spacing: tuple[float, float, float]) -> np.ndarray:
    """Return the corners of one element, z running fastest, ``(8, 3)``."""
    return np.array(list(itertools.product((0.0, 1.0), repeat=3))) * spacing


def isotropic(a: float, b: float, c: float) -> np.ndarray:
    """Return the tensor of ``a (tr s)^2 + b s_ij s_ij + c s_ij s_ji``."""
    return (
        a * np.einsum("ij,kl->ijkl", DELTA, DELTA)
        + b * np.einsum("ik,jl->ijkl", DELTA, DELTA)
        + c * np.einsum("il,jk->ijkl", DELTA, DELTA)
    )


def strains_and_moduli(element) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the energy of a law as pairs of strain and moduli, as its docstring or a textbook states them.

    A strain is ``B[i, j, s, p]``: how the derivative s (along x, y, z, or none) of unknown p enters strain ij.
    """
    if isinstance(element, HeatConduction):
        gradient = np.zeros((3, 3, 4, 1))
        gradient[range(3), 0, range(3), 0] = 1
        return [(gradient, isotropic(0, element.conductivity, 0))]
    if isinstance(element, LinearElasticity):
        young, poisson = element.young, element.poisson
        lame_lambda, mu = young * poisson / (1 + poisson) / (1 - 2 * poisson), young / 2 / (1 + poisson)
        symmetric = np.zeros((3, 3, 4, 3))
        symmetric[:, :, :3] = (np.einsum("is,jp->ijsp", DELTA, DELTA) + np.einsum("js,ip->ijsp", DELTA, DELTA)) / 2
        return [(symmetric, isotropic(lame_lambda, 2 * mu, 0))]
    strain, curvature = np.zeros((2, 3, 3, 4, 6))
    strain[:, :, :3, :3] = np.einsum("is,jp->ijsp", DELTA, DELTA)
    strain[:, :, 3, 3:] = -LEVI_CIVITA
    curvature[:, :, :3, 3:] = np.einsum("is,jp->ijsp", DELTA, DELTA)
    return [
        (strain, isotropic(element.lame_lambda, element.mu + element.kappa, element.mu)),
        (curvature, isotropic(element.alpha, element.gamma, element.beta)),
    ]


def exact_stiffness(element, spacing: tuple[float, float, float]) -> np.ndarray:
    """Integrate the energy of trilinear fields exactly: products of integrals along the three edges."""
    integrals = np.empty((4, 4, 8, 8))  # of derivative s of shape function a times derivative t of b
    for s, t in itertools.product(range(4), repeat=2):
        edges = []
        for axis, h in enumerate(spacing):
            both, first, second = axis == s == t, axis == s, axis == t
            if both:
                edges.append(np.array([[1, -1], [-1, 1]]) / h)
            elif first:
                edges.append(np.array([[-1, -1], [1, 1]]) / 2)
            elif second:
                edges.append(np.array([[-1, 1], [-1, 1]]) / 2)
            else:
                edges.append(np.array([[2, 1], [1, 2]]) * h / 6)
        integrals[s, t] = np.kron(edges[0], np.kron(edges[1], edges[2]))
    K = sum(
        np.einsum("ijsp,ijkl,kltq,stab->apbq", B, C, B, integrals, optimize=True)
        for B, C in strains_and_moduli(element)
    )
    return K.reshape(8 * element.dof, 8 * element.dof)


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
class TestEveryElement:
    def test_its_matrix_is_the_exact_integral_of_its_energy(self, element, spacing):
        K = element.stiffness(spacing)

        reference = exact_stiffness(element, spacing)

        assert K.shape == reference.shape
        np.testing.assert_allclose(K, reference, rtol=0, atol=ENTRY_TOLERANCE * abs(reference).max())

    def test_its_matrix_is_symmetric_to_the_last_bit(self, element, spacing):
        K = element.stiffness(spacing)

        assert np.array_equal(K, K.T)

    def test_its_matrix_is_semidefinite_with_as_many_zeros_as_rigid_motions(self, element, spacing):
        eigenvalues = np.linalg.eigvalsh(scaled(element, spacing))

        zeros = NULL_SPACE[element.dof]
        assert abs(eigenvalues[:zeros]).max() < ZERO_EIGENVALUE * eigenvalues[-1]
        assert eigenvalues[zeros] > CLEARLY_POSITIVE * eigenvalues[-1]

    def test_its_rigid_body_modes_span_the_null_space(self, element, spacing):
        K = element.stiffness(spacing)

        modes = element.rigid_body_modes(corners(spacing))

        assert modes.shape == (8 * element.dof, NULL_SPACE[element.dof])
        assert np.linalg.matrix_rank(modes) == NULL_SPACE[element.dof]
        assert (abs(K @ modes) <= ENERGY_TOLERANCE * (abs(K) @ abs(modes))).all()


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("element", [element for element in ELEMENTS if element.dof != 6], ids=repr)
def test_an_element_twice_as_large_is_twice_as_stiff(element, spacing):
    """An energy of first derivatives over a volume grows with the length; a factor of two is exact in binary."""
    K = element.stiffness(spacing)

    doubled = element.stiffness(tuple(2 * h for h in spacing))

    assert np.array_equal(doubled, 2 * K)


def scaled(element, spacing: tuple[float, float, float]) -> np.ndarray:
    """Return D K D with D such that the diagonal is one: the units of u and phi no longer matter, the null space does."""
    K = element.stiffness(spacing)
    d = 1 / np.sqrt(np.diag(K))
    return d[:, None] * K * d


@pytest.mark.parametrize("spacing", SPACINGS)
def test_the_energy_of_a_linear_temperature_is_that_of_its_gradient(spacing):
    element = HeatConduction(2.5)
    gradient = np.random.default_rng(1).standard_normal(3)

    temperature = corners(spacing) @ gradient + 0.7

    assert energy(element, spacing, temperature) == pytest.approx(
        2.5 * gradient @ gradient / 2 * np.prod(spacing), rel=ENERGY_TOLERANCE
    )


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("seed", range(3))
def test_the_energy_of_a_linear_displacement_is_half_strain_times_stress(spacing, seed):
    young, poisson = 3.0, 0.27
    gradient = np.random.default_rng(seed).standard_normal((3, 3))
    strain = (gradient + gradient.T) / 2
    stress = young / (1 + poisson) * (strain + poisson / (1 - 2 * poisson) * np.trace(strain) * DELTA)  # Hooke's law

    displacement = corners(spacing) @ gradient

    assert energy(LinearElasticity(young, poisson), spacing, displacement) == pytest.approx(
        (strain * stress).sum() / 2 * np.prod(spacing), rel=ENERGY_TOLERANCE
    )


def test_stretching_a_free_bar_meets_youngs_modulus_and_contracts_by_poissons_ratio():
    young, poisson, spacing, stretch = 3.0, 0.27, (0.3, 1.0, 2.2), 0.01

    displacement = corners(spacing) * stretch * np.array([1, -poisson, -poisson])

    forces = (LinearElasticity(young, poisson).stiffness(spacing) @ displacement.ravel()).reshape(2, 2, 2, 3)
    area = spacing[1] * spacing[2]
    assert forces[1, :, :, 0].sum() == pytest.approx(young * stretch * area, rel=ENERGY_TOLERANCE)
    assert abs(forces[..., 1:]).max() < ENERGY_TOLERANCE * young * stretch * max(spacing) ** 2


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("curved", [False, True], ids=["constant rotation", "linear rotation"])
def test_the_micropolar_energy_is_that_of_the_docstring(spacing, seed, curved):
    """Strains are constant or linear, so that Simpson's rule integrates the docstring's formula exactly."""
    element = MicropolarElasticity(1.1, 0.6, 0.4, 0.2, 0.1, 0.3)
    generator = np.random.default_rng(seed)
    u_gradient, phi_gradient = generator.standard_normal((2, 3, 3))  # d_i u_j and d_i phi_j
    phi_gradient *= curved
    phi_at_origin = generator.standard_normal(3)
    expected = 0.0
    for index in itertools.product(range(3), repeat=3):
        weight = np.prod(np.array([1, 4, 1])[list(index)] / 6) * np.prod(spacing)
        phi = phi_at_origin + (np.array(index) / 2 * spacing) @ phi_gradient
        expected += weight * micropolar_energy_density(element, u_gradient, phi, phi_gradient)

    r = corners(spacing)
    x = np.hstack([r @ u_gradient, phi_at_origin + r @ phi_gradient])

    assert energy(element, spacing, x) == pytest.approx(expected, rel=ENERGY_TOLERANCE)


def micropolar_energy_density(m, u_gradient, phi, phi_gradient) -> float:
    """Evaluate the docstring term by term, with its indices written out."""
    e = np.empty((3, 3))
    for i, j in itertools.product(range(3), repeat=2):
        e[i, j] = u_gradient[i, j] - sum(LEVI_CIVITA[i, j, k] * phi[k] for k in range(3))
    c = phi_gradient
    total = m.lame_lambda * np.trace(e) ** 2 + m.alpha * np.trace(c) ** 2
    for i, j in itertools.product(range(3), repeat=2):
        total += (m.mu + m.kappa) * e[i, j] * e[i, j] + m.mu * e[i, j] * e[j, i]
        total += m.gamma * c[i, j] * c[i, j] + m.beta * c[i, j] * c[j, i]
    return total / 2


def energy(element, spacing, x) -> float:
    x = np.ravel(x)
    return float(x @ element.stiffness(spacing) @ x) / 2


@pytest.mark.parametrize("spacing", SPACINGS)
def test_a_rigid_micropolar_rotation_turns_the_nodes_with_the_body_and_not_against_it(spacing):
    element = MicropolarElasticity(1.1, 0.6, 0.4, 0.2, 0.1, 0.3)
    omega = np.array([0.4, -0.7, 1.3])
    r = corners(spacing)
    with_the_body = np.hstack([np.cross(omega, r), np.tile(omega, (8, 1))])
    against_it = np.hstack([np.cross(omega, r), np.tile(-omega, (8, 1))])

    resisted = energy(element, spacing, against_it)

    # phi differs from the macroscopic rotation by 2 omega; kappa |2 omega|^2 is the energy of that.
    assert resisted == pytest.approx(element.kappa * 4 * omega @ omega * np.prod(spacing), rel=ENERGY_TOLERANCE)
    assert abs(energy(element, spacing, with_the_body)) < ENERGY_TOLERANCE * resisted


@pytest.mark.parametrize("omega", np.eye(3))
def test_the_modes_of_the_micropolar_body_rotate_about_the_box_centre(omega):
    box = Cantilever((3, 4, 2), dof=6, lengths=(2.0, 1.0, 3.0))
    r = box.mesh.coordinates() - np.array([1.0, 0.5, 1.5])

    mode = box.rigid_body_modes().reshape(-1, 6, 6)[:, :, 3 + np.argmax(omega)]

    np.testing.assert_allclose(mode[:, :3], np.cross(omega, r), atol=4 * EPS)
    assert (mode[:, 3:] == omega).all()


ADMISSIBLE = {"lame_lambda": 1.0, "mu": 1.0, "kappa": 1.0, "alpha": 1.0, "beta": 0.5, "gamma": 1.0}
BROKEN = [
    ({"kappa": -0.5}, "kappa > 0"),
    ({"kappa": 0.0}, "kappa > 0"),
    ({"mu": -0.6}, "2 mu + kappa > 0"),
    ({"mu": -0.5}, "2 mu + kappa > 0"),
    ({"lame_lambda": -1.1}, "3 lambda + 2 mu + kappa > 0"),
    ({"lame_lambda": -1.0}, "3 lambda + 2 mu + kappa > 0"),
    ({"beta": 1.5}, "gamma > |beta|"),
    ({"beta": -1.0}, "gamma > |beta|"),
    ({"alpha": -1.0}, "3 alpha + beta + gamma > 0"),
    ({"alpha": -0.5}, "3 alpha + beta + gamma > 0"),
    ({"lame_lambda": float("nan")}, "3 lambda + 2 mu + kappa > 0"),
]


@pytest.mark.parametrize(("change", "condition"), BROKEN, ids=str)
def test_micropolar_moduli_that_break_one_condition_are_refused_by_its_name(change, condition):
    with pytest.raises(InputError, match=f": {re.escape(condition)} must hold$"):
        MicropolarElasticity(**ADMISSIBLE | change)


def test_micropolar_moduli_that_break_several_conditions_are_told_all_of_them():
    with pytest.raises(InputError, match=re.escape("kappa > 0, gamma > |beta| must hold")):
        MicropolarElasticity(**ADMISSIBLE | {"kappa": -0.5, "beta": 1.5})


def test_micropolar_moduli_are_refused_exactly_if_some_strain_has_no_energy():
    generator = np.random.default_rng(3)
    outcomes = set()
    for moduli in generator.uniform([-1.5, -1, -0.3, -1, -1, -0.3], [2, 2, 2, 1, 1, 2], (400, 6)):
        lame_lambda, mu, kappa, alpha, beta, gamma = moduli
        C = scipy.linalg.block_diag(
            isotropic(lame_lambda, mu + kappa, mu).reshape(9, 9), isotropic(alpha, gamma, beta).reshape(9, 9)
        )
        definite = bool(np.linalg.eigvalsh(C)[0] > 0)
        try:
            MicropolarElasticity(*moduli)
            accepted = True
        except InputError:
            accepted = False
        assert accepted == definite, moduli
        outcomes.add(accepted)
    assert outcomes == {True, False}


def test_engineering_moduli_are_those_asked_for():
    m = MicropolarElasticity.from_engineering(2.0, 0.2, coupling=0.3, characteristic_length=0.4)

    shear = 2 * m.mu + m.kappa
    # Eringen (1999), section 5.4, and the two measures that the docstring defines.
    young = shear * (3 * m.lame_lambda + shear) / (2 * m.lame_lambda + shear)
    poisson = m.lame_lambda / (2 * m.lame_lambda + shear)
    coupling = m.kappa / (2 * (m.mu + m.kappa))
    length = np.sqrt(m.gamma / (2 * shear))
    np.testing.assert_allclose([young, poisson, coupling, length], [2.0, 0.2, 0.3, 0.4], rtol=ENTRY_TOLERANCE)


@pytest.mark.parametrize("conductivity", [0.0, -1.0, float("nan"), float("inf")])
def test_a_conductivity_that_is_not_positive_is_refused(conductivity):
    with pytest.raises(InputError, match="conductivity must be positive"):
        HeatConduction(conductivity)


BAD_HOOKE = [(0.0, 0.3), (-1.0, 0.3), (1.0, 0.5), (1.0, -1.0), (float("nan"), 0.3), (1.0, float("nan"))]


@pytest.mark.parametrize(("young", "poisson"), [*BAD_HOOKE, (float("inf"), 0.3)])
@pytest.mark.parametrize("law", [LinearElasticity, MicropolarElasticity.from_engineering])
def test_youngs_modulus_and_poissons_ratio_outside_their_ranges_are_refused(law, young, poisson):
    with pytest.raises(InputError, match=r"young > 0 and -1 < poisson < 0\.5"):
        law(young, poisson)


@pytest.mark.parametrize(("coupling", "length"), [(0.0, 0.1), (1.0, 0.1), (0.5, 0.0), (0.5, -1.0)])
def test_a_coupling_or_length_outside_its_range_is_refused(coupling, length):
    with pytest.raises(InputError, match="0 < coupling < 1 and characteristic_length > 0"):
        MicropolarElasticity.from_engineering(coupling=coupling, characteristic_length=length)


def test_an_element_of_other_degrees_of_freedom_than_the_cantilever_is_refused():
    with pytest.raises(InputError, match="element has 1 degrees of freedom per node, but dof is 3"):
        Cantilever(3, dof=3, element=HeatConduction())
