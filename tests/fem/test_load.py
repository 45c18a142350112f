"""Loads: their resultants are those asked for, and consistent loads do the work of the fields they integrate."""

import numpy as np
import pytest

from penstock.fem import (
    LOAD_KINDS,
    BoxMesh,
    Cantilever,
    body_load,
    end_load,
    face_load,
    integrate_body_load,
)
from penstock.spmv import InputError

# Sums over a few hundred nodes of terms that are rounded some ten times: far above their error, far below any mistake.
TOLERANCE = 1e-12
NODES, LENGTHS = (5, 4, 7), (3.0, 0.8, 1.7)
MAGNITUDE = 2.5
FORCE = {"shear": (0, 0, -1), "shear_y": (0, 1, 0), "axial": (1, 0, 0), "torsion": (0, 0, 0)}
ON_THE_END = tuple(FORCE)


def box(dof: int, *, clamped: bool = True) -> Cantilever:
    return Cantilever(NODES, dof, LENGTHS, clamped=clamped)


def resultants(problem: Cantilever, load: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the total force, and the total moment about the centre of the end face."""
    forces = load.reshape(-1, problem.dof)[:, :3]
    x, y, z = problem.mesh.side_lengths
    arms = problem.mesh.coordinates() - np.array([x, y / 2, z / 2])
    return forces.sum(axis=0), np.cross(arms, forces).sum(axis=0)


@pytest.mark.parametrize("dof", [3, 6])
@pytest.mark.parametrize("clamped", [True, False], ids=["clamped", "free"])
@pytest.mark.parametrize("kind", ON_THE_END)
class TestLoadsOnTheEnd:
    def test_they_have_the_force_and_moment_asked_for(self, dof, clamped, kind):
        problem = box(dof, clamped=clamped)

        force, moment = resultants(problem, problem.load(kind, magnitude=MAGNITUDE))

        expected_moment = (MAGNITUDE if kind == "torsion" else 0, 0, 0)
        np.testing.assert_allclose(force, MAGNITUDE * np.array(FORCE[kind]), atol=TOLERANCE)
        np.testing.assert_allclose(moment, expected_moment, atol=TOLERANCE)

    def test_they_act_on_nodes_of_the_end_face_only_and_apply_no_couples(self, dof, clamped, kind):
        problem = box(dof, clamped=clamped)

        load = problem.load(kind).reshape(*NODES, dof)

        assert not load[:-1].any()
        assert not load[..., 3:].any()
        assert load[-1].any()


@pytest.mark.parametrize("nodes", [(2, 2, 2), (3, 2, 9), (3, 9, 2)])
def test_the_moment_of_torsion_does_not_depend_on_the_mesh(nodes):
    problem = Cantilever(nodes, 3, LENGTHS)

    _, moment = resultants(problem, problem.load("torsion", magnitude=-MAGNITUDE))

    np.testing.assert_allclose(moment, (-MAGNITUDE, 0, 0), atol=TOLERANCE)


@pytest.mark.parametrize("nodes", [NODES, (40, 21, 17)])
@pytest.mark.parametrize("kind", ON_THE_END)
def test_loads_on_the_end_have_the_bits_of_a_formula_over_all_nodes(nodes, kind):
    """A checkpoint knows its load by its bits, also one of a version that looked at all nodes."""
    problem = Cantilever(nodes, 3, LENGTHS)
    mesh, (_, y, z) = problem.mesh, LENGTHS
    points = mesh.coordinates()
    shares = [np.where((np.arange(count) % (count - 1)) > 0, 1, 0.5) for count in nodes[1:]]
    areas = ((y / (nodes[1] - 1) * shares[0])[:, None] * (z / (nodes[2] - 1) * shares[1])).ravel()
    tractions = np.zeros((mesh.node_count, 3))
    if kind == "torsion":
        tractions[:, 1], tractions[:, 2] = z / 2 - points[:, 2], points[:, 1] - y / 2
    else:
        tractions[:] = MAGNITUDE / (y * z) * np.array(FORCE[kind])
    expected = np.zeros((mesh.node_count, 3))
    expected[-areas.size :] = areas[:, None] * tractions[-areas.size :]
    if kind == "torsion":
        arms = points - np.array([0, y / 2, z / 2])
        expected *= MAGNITUDE / float((arms[:, 1] * expected[:, 2] - arms[:, 2] * expected[:, 1]).sum())

    assert np.array_equal(problem.load(kind, magnitude=MAGNITUDE), expected.ravel())


@pytest.mark.parametrize(("dof", "component", "sign"), [(1, 0, 1), (3, 2, -1), (6, 2, -1)])
def test_a_body_load_on_a_free_box_adds_up_to_its_magnitude(dof, component, sign):
    problem = box(dof, clamped=False)

    load = problem.load("body", magnitude=MAGNITUDE).reshape(-1, dof)

    expected = np.zeros(dof)
    expected[component] = sign * MAGNITUDE
    np.testing.assert_allclose(load.sum(axis=0), expected, atol=TOLERANCE)


@pytest.mark.parametrize(("dof", "component", "sign"), [(1, 0, 1), (3, 2, -1), (6, 2, -1)])
def test_a_body_load_on_a_clamped_box_misses_the_share_of_the_clamp(dof, component, sign):
    problem = box(dof)

    load = problem.load("body", magnitude=MAGNITUDE).reshape(-1, dof)

    # The clamped face carries half a layer of elements out of nx - 1.
    share = 1 / (2 * (NODES[0] - 1))
    assert load[:, component].sum() == pytest.approx(sign * MAGNITUDE * (1 - share), rel=TOLERANCE)


@pytest.mark.parametrize(("dof", "kind"), [(1, "body"), *((dof, kind) for dof in (3, 6) for kind in LOAD_KINDS)])
def test_every_load_is_zero_at_clamped_unknowns(dof, kind):
    problem = box(dof)

    load = problem.load(kind).reshape(*NODES, dof)

    assert load.dtype == np.float64
    assert not load[0].any()
    assert load.any()


def test_the_magnitude_scales_every_load():
    problem = box(3)

    for kind in LOAD_KINDS:
        np.testing.assert_allclose(problem.load(kind, magnitude=-3.0), -3 * problem.load(kind), rtol=TOLERANCE)
        assert not problem.load(kind, magnitude=0.0).any()


@pytest.mark.parametrize("dof", [3, 6])
def test_several_kinds_make_adjacent_columns_equal_to_the_single_ones(dof):
    problem = box(dof)

    loads = problem.load(*LOAD_KINDS, magnitude=MAGNITUDE)

    assert loads.shape == (problem.unknowns, len(LOAD_KINDS))
    assert loads.flags.c_contiguous
    for column, kind in zip(loads.T, LOAD_KINDS, strict=True):
        assert np.array_equal(column, problem.load(kind, magnitude=MAGNITUDE))


def test_one_kind_makes_a_vector():
    assert box(3).load("axial").shape == (box(3).unknowns,)


@pytest.mark.parametrize(("dof", "kind"), [(1, "body"), (3, "shear"), (6, "shear")])
def test_the_default_load_is_shear_or_a_source(dof, kind):
    assert np.array_equal(box(dof).load(), box(dof).load(kind))


@pytest.mark.parametrize("kind", ON_THE_END)
def test_heat_conduction_takes_no_forces_and_the_error_says_what_it_takes(kind):
    with pytest.raises(InputError, match=rf"{kind}.*'body'"):
        box(1).load(kind)


def test_an_unknown_load_is_refused_and_the_known_ones_are_named():
    with pytest.raises(InputError, match="unknown load 'wind'") as refusal:
        box(3).load("shear", "wind")

    assert all(kind in str(refusal.value) for kind in LOAD_KINDS)


@pytest.mark.parametrize("magnitude", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", LOAD_KINDS)
def test_a_magnitude_that_is_not_finite_is_refused(kind, magnitude):
    with pytest.raises(InputError, match=f"finite, not {magnitude}"):
        box(3).load(kind, magnitude=magnitude)


MESH = BoxMesh(NODES, LENGTHS)
CONSTANT = np.array([0.3, -1.2, 2.0])


def constant_field(positions: np.ndarray) -> np.ndarray:
    return np.broadcast_to(CONSTANT, (len(positions), 3))


def test_integrating_a_constant_density_is_the_closed_form():
    integrated = integrate_body_load(MESH, constant_field, 3)

    closed_form = body_load(MESH, CONSTANT)

    np.testing.assert_allclose(integrated, closed_form, rtol=TOLERANCE)
    np.testing.assert_allclose(closed_form.reshape(-1, 3).sum(axis=0), CONSTANT * np.prod(LENGTHS), rtol=TOLERANCE)


def test_integrating_a_constant_traction_on_the_end_is_the_closed_form():
    integrated = face_load(MESH, 0, 1, constant_field, 3)

    closed_form = end_load(MESH, constant_field, 3)

    np.testing.assert_allclose(integrated, closed_form, rtol=TOLERANCE)


def test_a_linear_traction_on_the_end_keeps_its_force_and_moment():
    def traction(positions):
        return np.stack([positions[:, 1] - 2 * positions[:, 2], 1 + positions[:, 1], positions[:, 2]], axis=1)

    lumped, consistent = end_load(MESH, traction, 3), face_load(MESH, 0, 1, traction, 3)

    _, y, z = LENGTHS
    exact_force = y * z * np.array([y / 2 - z, 1 + y / 2, z / 2])
    np.testing.assert_allclose(lumped.reshape(-1, 3).sum(axis=0), exact_force, rtol=TOLERANCE)
    np.testing.assert_allclose(consistent.reshape(-1, 3).sum(axis=0), exact_force, rtol=TOLERANCE)


def trilinear(positions: np.ndarray) -> np.ndarray:
    """Return (1 + x)(2 - y)(1 + 3 z), which the mesh interpolates exactly."""
    x, y, z = positions.T
    return (1 + x) * (2 - y) * (1 + 3 * z)


def polynomial(positions: np.ndarray) -> np.ndarray:
    """Return one component for each term of x^2 + y z^3 + x y^2, whose products with the field are integrated exactly."""
    x, y, z = positions.T
    return np.stack([x**2, y * z**3, x * y**2], axis=1)


POWERS = [(2, 0, 0), (0, 1, 3), (1, 2, 0)]  # of the three components of polynomial()
FIELD = [np.polynomial.Polynomial(c) for c in ([1, 1], [2, -1], [1, 3])]  # the factors of trilinear()


def moment_along(axis: int, power: int) -> float:
    """Integrate the field's factor along an axis times a power of the coordinate, over the whole side."""
    integral = (FIELD[axis] * np.polynomial.Polynomial([0] * power + [1])).integ()
    return float(integral(LENGTHS[axis]) - integral(0))


def test_a_body_load_does_the_work_of_its_density():
    """The load times a field that the mesh interpolates exactly is the integral of density times field."""
    load = integrate_body_load(MESH, polynomial, 3).reshape(-1, 3)

    work = load.T @ trilinear(MESH.coordinates())

    exact = [np.prod([moment_along(axis, powers[axis]) for axis in range(3)]) for powers in POWERS]
    np.testing.assert_allclose(work, exact, rtol=TOLERANCE)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("side", [0, 1])
def test_a_face_load_does_the_work_of_its_traction(axis, side):
    load = face_load(MESH, axis, side, polynomial, 3)

    work = load.reshape(-1, 3).T @ trilinear(MESH.coordinates())

    place = LENGTHS[axis] * side
    exact = [
        np.prod([moment_along(other, powers[other]) for other in range(3) if other != axis])
        * FIELD[axis](place)
        * place ** powers[axis]
        for powers in POWERS
    ]
    np.testing.assert_allclose(work, exact, rtol=TOLERANCE, atol=TOLERANCE)
    on_the_face = np.moveaxis(load.reshape(*NODES, 3), axis, 0)[-1 if side else 0]
    assert abs(load).sum() == pytest.approx(abs(on_the_face).sum())  # and nowhere else


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_traction_is_asked_for_at_points_of_its_face(axis, side):
    seen = []

    def traction(positions):
        seen.append(positions.copy())
        return np.zeros((len(positions), 1))

    face_load(MESH, axis, side, traction, 1)

    positions = np.concatenate(seen)
    assert (positions[:, axis] == LENGTHS[axis] * side).all()
    assert ((positions >= 0) & (positions <= LENGTHS)).all()


def test_the_tip_deflection_is_the_mean_over_the_end_in_the_direction_that_moves_most():
    problem = box(6)
    solution = np.zeros((*NODES, 6))
    solution[-1, ..., 1] = 0.5
    solution[-1, ..., 2] = np.linspace(-1.0, -5.0, NODES[1])[:, None]  # of mean -3
    solution[-1, ..., 4] = 100.0  # a rotation is no deflection
    solution[:-1] = 1e3  # nor does it matter what the rest does

    assert problem.tip_deflection(solution.ravel()) == pytest.approx(-3.0, rel=TOLERANCE)
    assert box(1).tip_deflection(solution[..., 2].ravel()) == pytest.approx(-3.0, rel=TOLERANCE)
