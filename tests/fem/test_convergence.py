"""Solutions meet beam theory and closed forms, and approach smooth solutions at the rates of trilinear elements."""

import itertools
import math

import numpy as np
import pytest
import scipy.sparse.linalg

from penstock.fem import (
    BoxMesh,
    Cantilever,
    HeatConduction,
    LinearElasticity,
    LognormalMaterial,
    MicropolarElasticity,
    cosine_mode,
    cosine_mode_source,
    face_load,
    integrate_body_load,
    timoshenko_tip_deflection,
    uniform_source_profile,
)
from penstock.solvers import block_jacobi, cg

pytestmark = pytest.mark.usefixtures("one_thread")

# Far below the discretization errors measured here, far above rounding.
SOLVER_TOLERANCE = 1e-10
# Cowper's beam does not know that the clamp hinders the section's contraction, and 8 trilinear elements over the height
# are a little stiff in bending: (h / H)^2 = 1 / 64 is the scale of that error.
BEAM_TOLERANCE = 0.02
# How far fitted rates may lie from those in the limit: the coarsest meshes are not yet in it.
RATE_TOLERANCE = 0.15
REFINEMENTS = (5, 9, 17, 33)


def solve(problem: Cantilever, load: np.ndarray, rtol: float = SOLVER_TOLERANCE) -> np.ndarray:
    A = problem.matrix()
    result = cg(A, load, M=block_jacobi(A, problem.dof), rtol=rtol)
    assert result.converged
    return result.x


def solve_directly(problem: Cantilever, load: np.ndarray) -> np.ndarray:
    return scipy.sparse.linalg.spsolve(problem.matrix().to_csr().tocsc(), load)


def without_clamped(problem: Cantilever, load: np.ndarray) -> np.ndarray:
    """Return a load with zeros where the solution is held at zero."""
    load = load.reshape(*problem.mesh.node_counts, problem.dof).copy()
    load[0] = 0
    return load.ravel()


def rate(nodes, errors) -> float:
    """Fit ``errors ~ h^rate`` by least squares in the logarithms."""
    return float(np.polyfit(-np.log(np.array(nodes) - 1), np.log(errors), 1)[0])


def errors_by_quadrature(mesh: BoxMesh, nodal: np.ndarray, exact, exact_gradient) -> tuple[float, float]:
    """Return the L2 norms of the error and of its gradient, by 3 Gauss points a direction.

    ``nodal`` has shape ``(nodes, c)``; ``exact`` maps positions ``(m, 3)`` to ``(m, c)``, ``exact_gradient`` to
    ``(m, 3, c)``.
    """
    nodal = nodal.reshape(*mesh.node_counts, -1)
    counts, spacing = mesh.element_counts, np.array(mesh.spacing)
    element = np.stack(np.meshgrid(*map(np.arange, counts), indexing="ij"), axis=-1).reshape(-1, 3)
    points, weights = np.polynomial.legendre.leggauss(3)
    value_error = gradient_error = 0.0
    for index in itertools.product(range(3), repeat=3):
        place = (1 + points[list(index)]) / 2  # within the element, 0 to 1
        weight = (weights[list(index)] / 2 * spacing).prod()
        positions = (element + place) * spacing
        value, gradient = -exact(positions), -exact_gradient(positions)
        for corner in itertools.product((0, 1), repeat=3):
            at_corner = nodal[tuple(slice(c, c + n) for c, n in zip(corner, counts, strict=True))]
            at_corner = at_corner.reshape(len(positions), -1)
            along = np.where(corner, place, 1 - place)
            slopes = np.where(corner, 1, -1) / spacing
            value += along.prod() * at_corner
            for axis in range(3):
                gradient[:, axis] += slopes[axis] * np.delete(along, axis).prod() * at_corner
        value_error += weight * (value**2).sum()
        gradient_error += weight * (gradient**2).sum()
    return math.sqrt(value_error), math.sqrt(gradient_error)


# ---------------------------------------------------------------- one degree of freedom


@pytest.mark.parametrize(
    ("nodes", "lengths"), [((9, 3, 4), (2.0, 0.5, 3.0)), ((17, 5, 5), 1.5), ((3, 2, 2), (0.1, 1.0, 7.0))]
)
def test_a_uniform_source_heats_the_nodes_to_the_parabola_exactly(nodes, lengths):
    problem = Cantilever(nodes, dof=1, lengths=lengths, element=HeatConduction(2.5))
    x, volume = problem.mesh.coordinates()[:, 0], math.prod(problem.mesh.side_lengths)

    temperature = solve(problem, problem.load("body", magnitude=3.0 * volume))

    exact = uniform_source_profile(x, problem.mesh.side_lengths[0], source=3.0, conductivity=2.5)
    np.testing.assert_allclose(temperature, exact, rtol=0, atol=10 * SOLVER_TOLERANCE * exact.max())


def test_the_parabola_has_its_source_and_meets_the_boundary_conditions():
    length, source, conductivity = 2.0, 3.0, 2.5

    u = uniform_source_profile(np.array([0.0, 0.5, 1.0, 1.5, 2.0, 2.5]), length, source, conductivity)

    # Differences of a parabola are exact.
    assert u[0] == 0
    np.testing.assert_allclose(-conductivity * np.diff(u, 2) / 0.5**2, source, rtol=1e-12)
    assert u[5] - u[3] == pytest.approx(0, abs=1e-12)  # no slope at x = 2


def test_the_source_of_the_cosine_mode_is_its_negative_laplacian_times_the_conductivity():
    lengths, step = (1.0, 0.7, 1.4), 1e-3
    positions = np.random.default_rng(1).uniform(0, 1, (50, 3)) * lengths
    laplacian = sum(
        cosine_mode(positions + shift, lengths) - 2 * cosine_mode(positions, lengths) + cosine_mode(positions - shift, lengths)
        for shift in step * np.eye(3)
    ) / step**2  # fmt: skip

    source = cosine_mode_source(positions, lengths, conductivity=2.5)

    # The difference quotient errs by step^2 / 12 times fourth derivatives of size (pi / 0.7)^4.
    np.testing.assert_allclose(source, -2.5 * laplacian, atol=2.5 * step**2 * (np.pi / 0.7) ** 4)


def test_a_cosine_temperature_is_approached_at_rate_two_and_its_gradient_at_rate_one():
    lengths = (1.0, 0.7, 1.4)
    at_nodes, in_l2, in_h1 = [], [], []

    def exact(positions):
        return cosine_mode(positions, lengths)[:, None]

    def exact_gradient(positions):
        a, b, c = k = np.pi / np.array(lengths) * (0.5, 1, 1)
        x, y, z = (positions * k).T
        slopes = (
            a * np.cos(x) * np.cos(y) * np.cos(z),
            -b * np.sin(x) * np.sin(y) * np.cos(z),
            -c * np.sin(x) * np.cos(y) * np.sin(z),
        )
        return np.stack(slopes, axis=1)[:, :, None]

    for nodes in REFINEMENTS:
        problem = Cantilever(nodes, dof=1, lengths=lengths, element=HeatConduction(2.5))
        load = integrate_body_load(problem.mesh, lambda r: cosine_mode_source(r, lengths, 2.5)[:, None], 1)
        temperature = solve(problem, without_clamped(problem, load))
        at_nodes.append(math.sqrt(np.mean((temperature - cosine_mode(problem.mesh.coordinates(), lengths)) ** 2)))
        l2, h1 = errors_by_quadrature(problem.mesh, temperature, exact, exact_gradient)
        in_l2.append(l2)
        in_h1.append(h1)

    assert rate(REFINEMENTS, at_nodes) == pytest.approx(2, abs=RATE_TOLERANCE)
    assert rate(REFINEMENTS, in_l2) == pytest.approx(2, abs=RATE_TOLERANCE)
    assert rate(REFINEMENTS, in_h1) == pytest.approx(1, abs=RATE_TOLERANCE)


# ---------------------------------------------------------------- three degrees of freedom


class SmoothDisplacement:
    """A displacement whose components are products of functions of x, y and z, zero on the face x = 0.

    ``u = (sin(pi x / 2) cos(y) exp(z / 2), x sin(y + 0.3) (1 + z^2), x^2 exp(-y) cos(z))``; all that follows from it is
    written with the exact first and second derivatives of the factors.
    """

    # For each component and each direction: the factor, its derivative and its second derivative.
    FACTORS = (
        (
            (
                lambda x: np.sin(np.pi * x / 2),
                lambda x: np.pi / 2 * np.cos(np.pi * x / 2),
                lambda x: -((np.pi / 2) ** 2) * np.sin(np.pi * x / 2),
            ),
            (np.cos, lambda y: -np.sin(y), lambda y: -np.cos(y)),
            (lambda z: np.exp(z / 2), lambda z: np.exp(z / 2) / 2, lambda z: np.exp(z / 2) / 4),
        ),
        (
            (lambda x: x, lambda x: 1 + 0 * x, lambda x: 0 * x),
            (lambda y: np.sin(y + 0.3), lambda y: np.cos(y + 0.3), lambda y: -np.sin(y + 0.3)),
            (lambda z: 1 + z**2, lambda z: 2 * z, lambda z: 2 + 0 * z),
        ),
        (
            (lambda x: x**2, lambda x: 2 * x, lambda x: 2 + 0 * x),
            (lambda y: np.exp(-y), lambda y: -np.exp(-y), lambda y: np.exp(-y)),
            (np.cos, lambda z: -np.sin(z), lambda z: -np.cos(z)),
        ),
    )

    def __init__(self, young: float, poisson: float):
        self.lame_lambda = young * poisson / (1 + poisson) / (1 - 2 * poisson)
        self.mu = young / 2 / (1 + poisson)

    def derivative(self, positions, *along):
        """Return the derivative of all components along the given directions, ``(m, 3)``."""
        orders = [along.count(axis) for axis in range(3)]
        return np.stack(
            [
                math.prod(factors[axis][orders[axis]](positions[:, axis]) for axis in range(3))
                for factors in self.FACTORS
            ],
            axis=1,
        )

    def displacement(self, positions):
        return self.derivative(positions)

    def gradient(self, positions):
        """Return ``d_i u_j``, ``(m, 3, 3)``."""
        return np.stack([self.derivative(positions, axis) for axis in range(3)], axis=1)

    def stress(self, positions):
        gradient = self.gradient(positions)
        divergence = np.trace(gradient, axis1=1, axis2=2)[:, None, None]
        return self.lame_lambda * divergence * np.eye(3) + self.mu * (gradient + gradient.swapaxes(1, 2))

    def body_force(self, positions):
        """Return ``-(lambda + mu) grad div u - mu laplace u``."""
        second = np.array(
            [[self.derivative(positions, i, j) for j in range(3)] for i in range(3)]
        )  # d_i d_j u_k at ijmk
        gradient_of_divergence = np.einsum("ijmj->mi", second)
        laplacian = np.einsum("iimk->mk", second)
        return -(self.lame_lambda + self.mu) * gradient_of_divergence - self.mu * laplacian


YOUNG, POISSON, ELASTIC_BOX = 2.2, 0.3, (1.0, 0.8, 1.2)


def test_the_smooth_displacement_is_in_balance_with_its_body_force():
    """Complex steps differentiate to the last digits without a derivative written by hand."""
    smooth = SmoothDisplacement(YOUNG, POISSON)
    positions = np.random.default_rng(4).uniform(0, 1, (40, 3)) * ELASTIC_BOX
    steps = 1e-30j * np.eye(3)
    gradient = np.stack([smooth.displacement(positions + step).imag * 1e30 for step in steps], axis=1)
    strain = (gradient + gradient.swapaxes(1, 2)) / 2
    trace = np.trace(strain, axis1=1, axis2=2)[:, None, None]
    hooke = YOUNG / (1 + POISSON) * (strain + POISSON / (1 - 2 * POISSON) * trace * np.eye(3))

    divergence = sum(smooth.stress(positions + step).imag[:, axis] * 1e30 for axis, step in enumerate(steps))

    np.testing.assert_allclose(smooth.gradient(positions), gradient, atol=1e-14)
    np.testing.assert_allclose(smooth.stress(positions), hooke, atol=1e-13)
    np.testing.assert_allclose(smooth.body_force(positions), -divergence, atol=1e-13)
    assert not smooth.displacement(positions * (0, 1, 1)).any()


def test_a_smooth_displacement_is_approached_at_rate_two_and_its_gradient_at_rate_one():
    smooth = SmoothDisplacement(YOUNG, POISSON)
    refinements, in_l2, in_h1 = (5, 9, 17, 25), [], []

    for nodes in refinements:
        problem = Cantilever(nodes, 3, ELASTIC_BOX, element=LinearElasticity(YOUNG, POISSON))
        load = integrate_body_load(problem.mesh, smooth.body_force, 3)
        for axis, side in [(0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]:  # all faces but the clamped one
            outwards = 1 if side else -1

            def traction(positions, axis=axis, outwards=outwards):
                return outwards * smooth.stress(positions)[:, axis]

            load += face_load(problem.mesh, axis, side, traction, 3)
        u = solve(problem, without_clamped(problem, load)).reshape(-1, 3)
        l2, h1 = errors_by_quadrature(problem.mesh, u, smooth.displacement, smooth.gradient)
        in_l2.append(l2)
        in_h1.append(h1)

    assert rate(refinements, in_l2) == pytest.approx(2, abs=RATE_TOLERANCE)
    assert rate(refinements, in_h1) == pytest.approx(1, abs=RATE_TOLERANCE)


def test_a_slender_cantilever_bends_as_timoshenko_says():
    beam = Cantilever(nodes=(129, 9, 9), dof=3, lengths=16.0)
    assert beam.mesh.side_lengths == (16.0, 1.0, 1.0)

    # A residual of 1e-8 leaves the tip far closer than the tolerance.
    deflection = beam.tip_deflection(solve(beam, beam.load("shear"), rtol=1e-8))

    assert deflection == pytest.approx(-timoshenko_tip_deflection(1.0, 16.0, 1.0, 1.0), rel=BEAM_TOLERANCE)


def test_the_timoshenko_formula_has_its_textbook_limits():
    force, length, height, width, young, poisson = 2.0, 10.0, 0.5, 0.3, 7.0, 0.2
    bending = force * length**3 / (3 * young * width * height**3 / 12)
    shear = 1.2 * force * length / (young / 2 * width * height)  # k = 5/6 and G = E/2 without contraction

    assert timoshenko_tip_deflection(force, length, height, width, young, 0.0) == pytest.approx(bending + shear)
    slender = timoshenko_tip_deflection(force, 1e4 * length, height, width, young, poisson)
    assert slender == pytest.approx(bending * 1e12, rel=1e-6)
    short = timoshenko_tip_deflection(force, 1e-6, height, width, 1.0, 0.3)
    coefficient = force * 1e-6 / (short / (2 * 1.3) * width * height)
    assert coefficient == pytest.approx(0.850, abs=5e-4)  # what Cowper (1966) gives for a rectangle, to its digits


def test_the_beam_is_deflected_along_its_height_and_the_formula_measures_it_there():
    """Turning a flat beam by a quarter turn and loading it along y instead of z changes nothing but the direction."""
    upright = Cantilever((33, 3, 5), 3, (8.0, 0.5, 1.0))
    lying = Cantilever((33, 5, 3), 3, (8.0, 1.0, 0.5))

    along_z = upright.tip_deflection(solve_directly(upright, upright.load("shear")))
    along_y = lying.tip_deflection(solve_directly(lying, lying.load("shear_y")))
    across = lying.tip_deflection(solve_directly(lying, lying.load("shear")))

    assert along_y == pytest.approx(-along_z, rel=1e-9)
    # Twice as flat is four times as soft in bending, and coarse meshes are stiffer.
    expected = timoshenko_tip_deflection(1, 8, 0.5, 1.0) / timoshenko_tip_deflection(1, 8, 1.0, 0.5)
    assert across / along_z == pytest.approx(expected, rel=0.3)


@pytest.mark.parametrize("dof", [3, 6])
def test_a_bar_that_does_not_contract_stretches_by_force_times_length_over_stiffness(dof):
    """Without contraction the clamp hinders nothing, and the exact displacement is linear."""
    law = {3: LinearElasticity(2.5, 0.0), 6: MicropolarElasticity.from_engineering(2.5, 0.0)}[dof]
    bar = Cantilever((5, 3, 4), dof, (3.0, 0.5, 0.8), element=law)

    u = solve_directly(bar, bar.load("axial", magnitude=0.7)).reshape(-1, dof)

    exact = np.zeros_like(u)
    exact[:, 0] = 0.7 / (2.5 * 0.5 * 0.8) * bar.mesh.coordinates()[:, 0]
    np.testing.assert_allclose(u, exact, atol=1e-12)


def test_the_work_of_a_load_falls_as_the_material_stiffens():
    soft = Cantilever((6, 4, 4), material=LognormalMaterial(0.5))

    class Stiffer:
        def layer(self, index, shape):
            factors = soft.material.layer(index, shape)
            factors[0] *= 2  # a few elements only
            return factors

    load = soft.load()
    compliance = [
        load @ solve_directly(Cantilever((6, 4, 4), material=material), load) for material in (soft.material, Stiffer())
    ]

    assert compliance[1] < compliance[0] * 0.999


# ---------------------------------------------------------------- six degrees of freedom

BEAM = {"nodes": (13, 4, 4), "lengths": (6.0, 1.5, 1.5)}


def tip(law=None, kind="shear") -> float:
    beam = Cantilever(dof=3 if law is None else 6, element=law, **BEAM)
    return abs(beam.tip_deflection(solve_directly(beam, beam.load(kind))))


def twist(law=None) -> float:
    """Return the work of a unit torque at the end: the angle by which it turns."""
    beam = Cantilever(dof=3 if law is None else 6, element=law, **BEAM)
    load = beam.load("torsion")
    return float(load @ solve_directly(beam, load))


@pytest.mark.parametrize("deflection", [tip, twist])
def test_a_micropolar_beam_approaches_the_classical_one_as_the_coupling_vanishes(deflection):
    couplings = np.array([1e-5, 1e-6, 1e-7])
    classical = deflection()

    stiffening = np.array(
        [1 - deflection(MicropolarElasticity.from_engineering(coupling=coupling)) / classical for coupling in couplings]
    )

    # The nodes' rotations lag behind the body's, at an energy in proportion to the coupling; the body's are some
    # (L / H)^2 times its strains, hence the factor.
    assert (stiffening > 0).all()
    assert stiffening[-1] < 1000 * couplings[-1]
    slope = np.polyfit(np.log(couplings), np.log(stiffening), 1)[0]
    assert slope == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("deflection", [tip, twist])
def test_a_micropolar_beam_stiffens_with_its_characteristic_length(deflection):
    lengths = (0.02, 0.1, 0.3, 1.0, 3.0)

    deflections = [
        deflection(MicropolarElasticity.from_engineering(characteristic_length=length)) for length in lengths
    ]

    assert (np.diff(deflections) < 0).all()
    # A length as large as the section doubles the stiffness and more, one far smaller hardly matters.
    assert deflections[-2] < 0.5 * deflections[0]
    assert deflections[0] == pytest.approx(deflection(), rel=0.1)
