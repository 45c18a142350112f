"""Matrices of tetrahedra and hexahedra: their entries, on every target and in every cut, and what is solved with them."""

import itertools

import numpy as np
import pytest
from element_bodies import LAWS, body
from element_slabs import make
from kernel_targets import DEVICES, TARGETS, gpu_count

import penstock
from penstock.fem import BoxMesh
from penstock.fem.elasticity import lame_parameters
from penstock.fem.element_rows import FORMATS
from penstock.spmv import CsrMatrix, InputError, format_named


def gradients_of(x, point):
    """Gradients in long double, and the weight of the point."""
    if len(x) == 4:
        reference = np.array([[-1, -1, -1], [1, 0, 0], [0, 1, 0], [0, 0, 1]], dtype=np.longdouble)
        weight = np.longdouble(1) / 6
    else:
        corners = np.array([(-1, -1, -1), (1, -1, -1), (1, 1, -1), (-1, 1, -1)], dtype=np.longdouble)
        corners = np.concatenate([corners, corners * [1, 1, -1]])
        at = corners[point] / np.sqrt(np.longdouble(3))
        factors = 1 + corners * at
        others = [factors[:, [1, 2]], factors[:, [2, 0]], factors[:, [0, 1]]]
        reference = np.stack([corners[:, axis] * others[axis].prod(axis=1) / 8 for axis in range(3)], axis=1)
        weight = np.longdouble(1)
    jacobian = reference.T @ x.astype(np.longdouble)
    cofactor = np.stack(
        [np.cross(jacobian[1], jacobian[2]), np.cross(jacobian[2], jacobian[0]), np.cross(jacobian[0], jacobian[1])]
    )
    determinant = jacobian[0] @ cofactor[0]
    return reference @ cofactor / determinant, weight * abs(determinant)


def reference(matrix):
    """The sums that define the matrix, in long double, and those of absolute values."""
    dof, nodes = matrix.dof, len(matrix.coordinates)
    law = matrix.element
    moduli = lame_parameters(law.young, law.poisson) if dof == 3 else (law.conductivity, 0.0)
    total = np.zeros((nodes, dof, nodes, dof), dtype=np.longdouble)
    absolute = np.zeros(total.shape)
    for element, factor in zip(matrix.connectivity, matrix.factors, strict=True):
        for point in range(1 if len(element) == 4 else 8):
            g, weight = gradients_of(matrix.coordinates[element], point)
            for a, b in itertools.product(range(len(element)), repeat=2):
                outer, dot = np.outer(g[a], g[b]), g[a] @ g[b]
                block = (
                    np.array([[moduli[0] * dot]])
                    if dof == 1
                    else moduli[0] * outer + moduli[1] * (outer.T + dot * np.eye(3))
                )
                total[element[a], :, element[b], :] += factor * weight * block
                absolute[element[a], :, element[b], :] += abs(factor * weight * block).max().astype(float)
    total, absolute = total.reshape(matrix.shape), absolute.reshape(matrix.shape)
    if matrix.fixed.size:
        held = np.flatnonzero(matrix.fixed)
        diagonal = total[held, held].copy()
        total[held] = total[:, held] = 0
        total[held, held] = diagonal
    return total, absolute


@pytest.mark.parametrize("shape", ["tetrahedra", "hexahedra"])
@pytest.mark.parametrize("dof", [1, 3])
@pytest.mark.parametrize("fixed", [True, False])
def test_entries_are_the_sums_that_define_them(shape, dof, fixed):
    matrix = body(shape, dof, (3, 4, 3), shuffled=True, fixed=fixed)
    expected, absolute = reference(matrix)

    for name in FORMATS:
        A = matrix.matrix(name).to_csr().toarray()
        assert (
            abs(A - expected) <= 200 * 2.0**-53 * absolute
        ).all()  # gradients of distorted elements, and eight points
        assert (A == A.T).all()
    assert matrix.nnz == matrix.to_csr().nnz


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", ["tetrahedra", "hexahedra"])
@pytest.mark.parametrize("dof", [1, 3])
def test_every_target_makes_the_same_rows(target, name, shape, dof):
    matrix = body(shape, dof)
    host = matrix.matrix(name)

    [made] = make(target, matrix, name)

    for key, array in made.items():
        if key == "values":
            np.testing.assert_allclose(array, host.values, rtol=0, atol=100 * 2.0**-53 * abs(host.values).max())
        else:
            assert np.array_equal(array, host.arrays()[key]), key


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", ["tetrahedra", "hexahedra"])
def test_neither_cuts_nor_parts_change_a_bit(target, name, shape):
    matrix = body(shape, 3, shuffled=True)

    [whole] = make(target, matrix, name)
    slabs = make(target, matrix, name, count=4)
    [values] = make(target, matrix, name, parts=("values",))
    [structure] = make(target, matrix, name, parts=("structure",))

    for key in ("column_indices", "values"):
        assert np.concatenate([slab[key] for slab in slabs]).tobytes() == whole[key].tobytes()
    for key, array in {**structure, **values}.items():
        assert array.tobytes() == whole[key].tobytes()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", ["tetrahedra", "hexahedra"])
@pytest.mark.parametrize("dof", [1, 3])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("share", [None, 0.3])
def test_systems_are_solved_in_memory_and_on_arrival(device, shape, dof, shuffled, share):
    matrix = body(shape, dof, (25, 9, 9), shuffled=shuffled)
    b = np.random.default_rng(3).standard_normal(matrix.shape[0])
    b[matrix.fixed > 0] = 0
    memory = None if share is None else int(share * matrix.matrix("symmetric_bsr").nbytes)

    result = penstock.solve(matrix, b, device=device, memory=memory, rtol=1e-9)

    assert result.converged
    assert np.linalg.norm(b - matrix.to_csr() @ result.x) <= 1.01e-9 * np.linalg.norm(b)
    assert result.bytes_streamed == 0
    assert ("made        " in result.explain()) == (share is not None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("memory", [None, "300 KiB"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_prepared_system_takes_another_material(device, memory, shuffled):
    matrix = body("tetrahedra", 3, (17, 7, 7), shuffled=shuffled)
    b = np.random.default_rng(3).standard_normal(matrix.shape[0])
    b[matrix.fixed > 0] = 0
    other = matrix.with_material(matrix.factors[::-1].copy())

    with penstock.prepare(matrix, device=device, memory=memory) as system:
        assert system.solve(b).converged
        system.update(other)
        x = system.solve(b).x
        with pytest.raises(InputError, match=r"another mesh or law .* see its coordinates"):
            system.update(body("tetrahedra", 3, (17, 7, 7), seed=2, shuffled=True))
        with pytest.raises(InputError, match="with_material"):
            system.update(matrix.to_csr())

    assert np.linalg.norm(b - other.to_csr() @ x) <= 1.01e-8 * np.linalg.norm(b)


def test_the_box_of_the_generator_is_a_mesh_like_any_other():
    from penstock.fem import Cantilever, LognormalMaterial

    beam = Cantilever((6, 4, 5), 3, (1.3, 0.7, 2.0), LognormalMaterial(1.0, 3))
    factors = np.stack([beam.material.layer(layer, (3, 4)) for layer in range(5)]).reshape(-1)
    matrix = penstock.ElementMatrix(
        beam.mesh.coordinates(), beam.mesh.connectivity(), material=factors, fixed=np.arange(60)
    )

    A, B = beam.matrix("csr").to_csr(), matrix.to_csr()

    assert abs(A - B).max() <= 1e-14 * abs(A).max()
    assert A.nnz == B.nnz


def test_entries_are_those_of_scikit_fem():
    skfem = pytest.importorskip("skfem")
    from skfem.models.elasticity import lame_parameters as lame
    from skfem.models.elasticity import linear_elasticity

    mesh = skfem.MeshTet.init_tensor(*(np.linspace(0, 1, count) for count in (4, 3, 5)))
    basis = skfem.Basis(mesh, skfem.ElementVector(skfem.ElementTetP1()))
    expected = skfem.asm(linear_elasticity(*lame(2.0, 0.4)), basis)

    A = penstock.ElementMatrix(mesh.p.T, mesh.t.T, element=LAWS[3]).to_csr()

    assert abs(A - expected).max() <= 1e-13 * abs(expected).max()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"coordinates": np.zeros((3, 5))}, "shape .nodes, 3., not .3, 5.; transpose it"),
        ({"coordinates": np.full((36, 3), np.nan)}, "not finite"),
        ({"connectivity": np.zeros((8, 3), dtype=int)}, "transpose it"),
        ({"connectivity": np.zeros((2, 4))}, "whole numbers"),
        ({"connectivity": np.array([[0, 1, 2, 40]])}, "names nodes 0 to 40, but there are 36"),
        ({"connectivity": np.array([[0, 1, 2, 3]])}, "no volume"),
        ({"connectivity": np.array([[0, 1, 3, 12]])}, "belong to no element"),
        ({"material": np.zeros(1)}, "material must be one number or one for each of 12"),
        ({"material": -1.0}, "positive"),
        ({"fixed": [108]}, "names unknowns 108 to 108, but there are 108"),
        ({"fixed": np.zeros(3, dtype=bool)}, "must have shape .108,."),
        ({"fixed": [0.5]}, "numbers of unknowns or a mask"),
        ({"coordinates": [["a", "b", "c"]]}, "coordinates must be an array of real numbers"),
        ({"coordinates": np.ones((36, 3)) * 1j}, "coordinates must be an array of real numbers: they are complex"),
        ({"connectivity": [[0, 1], [2]]}, "connectivity must be an array"),
        ({"material": "steel"}, "material must be an array of real numbers"),
        ({"element": "elastic"}, "HeatConduction or OwnElement, not str"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    mesh = BoxMesh((4, 3, 3))
    arguments = {"coordinates": mesh.coordinates(), "connectivity": mesh.connectivity(), **change}

    with pytest.raises(InputError, match=message):
        penstock.ElementMatrix(**arguments)


def test_options_that_contradict_the_elements_are_refused():
    matrix = body("tetrahedra", 3)
    b = np.ones(matrix.shape[0])

    with pytest.raises(InputError, match="3 unknowns, not block_size=1"):
        penstock.solve(matrix, b, device="cpu", block_size=1)
    with pytest.raises(InputError, match="assembled in sliced_bsr, bsr or symmetric_bsr, not csr"):
        matrix.matrix("csr")


class TestHexahedra:
    POINTS, CORNERS = BoxMesh((3, 3, 3)).coordinates(), BoxMesh((3, 3, 3)).connectivity()

    def test_of_another_order_are_refused(self):
        by_axes = self.CORNERS[:, [0, 1, 3, 2, 4, 5, 7, 6]]  # x runs fastest, then y, then z

        with pytest.raises(InputError, match=r"8 elements, the first is 0, .* go once around the bottom"):
            penstock.ElementMatrix(self.POINTS, by_axes)

    def test_that_are_folded_are_refused(self):
        points = self.POINTS.copy()
        points[-1] = -1.0  # beyond the opposite corner

        with pytest.raises(InputError, match="1 elements, the first is 7"):
            penstock.ElementMatrix(points, self.CORNERS)

    @pytest.mark.parametrize("turned", [False, True])
    @pytest.mark.gpu
    def test_may_be_mirrored_or_wedges(self, turned):
        """A corner may coincide with its neighbour: of eight points none lies there."""
        order = [1, 2, 3, 0, 5, 6, 7, 4] if turned else range(8)
        points = self.POINTS * [1, 1, -1]
        elements = np.stack([corners[[0, 1, 2, 2, 4, 5, 6, 6]] for corners in self.CORNERS[:, list(order)]])
        used, numbers = np.unique(elements, return_inverse=True)
        matrix = penstock.ElementMatrix(points[used], numbers.reshape(elements.shape))

        A = matrix.to_csr().toarray()

        assert abs(A - A.T).max() <= 1e-15 * abs(A).max()  # a node has two places in an element
        if gpu_count():  # where several lanes make a row
            made = matrix.matrix("symmetric_bsr", device="cuda").to_device("cpu").to_csr().toarray()
            assert abs(made - A).max() <= 1e-13 * abs(A).max()
        eigenvalues = np.linalg.eigvalsh(A)
        assert (eigenvalues > -1e-12 * eigenvalues[-1]).all()
        assert (eigenvalues < 1e-10 * eigenvalues[-1]).sum() >= 6  # rigid motions


@pytest.mark.parametrize("scale", [1e-9, 1e9])
def test_the_unit_of_length_does_not_matter(scale):
    mesh = BoxMesh((4, 3, 3))
    one, other = (penstock.ElementMatrix(mesh.coordinates() * unit, mesh.connectivity()) for unit in (1.0, scale))

    difference = one.to_csr() * scale - other.to_csr()

    assert abs(difference).max() <= 1e-14 * scale * abs(one.to_csr()).max()


def test_a_mesh_with_long_rows_is_assembled_beside_short_ones():
    """A fan of tetrahedra around one edge: rows of two nodes are longer than those that kernels hold in shared memory."""
    angles = np.linspace(0, 2 * np.pi, 80, endpoint=False)
    ring = np.stack([np.cos(angles), np.sin(angles), np.zeros(80)], axis=1)
    points = np.concatenate([[[0, 0, -1], [0, 0, 1.0]], ring])
    around = np.arange(80)
    tetrahedra = np.stack([np.zeros(80, int), np.ones(80, int), 2 + around, 2 + (around + 1) % 80], axis=1)
    matrix = penstock.ElementMatrix(points, tetrahedra, material=2.0)
    expected, absolute = reference(matrix)

    for target in (target.values[0] for target in TARGETS if not target.marks):
        [made] = make(target, matrix, "symmetric_bsr")
        host = matrix.matrix("symmetric_bsr")
        np.testing.assert_allclose(made["values"], host.values, rtol=0, atol=1e-13 * abs(host.values).max())
    assert (abs(matrix.to_csr().toarray() - expected) <= 200 * 2.0**-53 * absolute).all()


def test_an_update_refuses_what_is_no_other_material():
    matrix = body("tetrahedra", 3, (9, 4, 4))
    moved = penstock.ElementMatrix(
        matrix.coordinates * 2, matrix.connectivity, element=matrix.element, fixed=np.flatnonzero(matrix.fixed)
    )
    other_law = penstock.ElementMatrix(
        matrix.coordinates, matrix.connectivity, fixed=np.flatnonzero(matrix.fixed), material=2.0
    )

    with penstock.prepare(matrix, device="cpu") as system:
        with pytest.raises(InputError, match="see its coordinates"):
            system.update(moved)
        with pytest.raises(InputError, match="see its element"):
            system.update(other_law)
        with pytest.raises(InputError, match="element"):
            penstock.prepare(matrix.to_csr(), device="cpu").update(matrix)


@pytest.mark.parametrize("memory", [None, "300 KiB"])
def test_what_a_caller_changes_afterwards_changes_nothing(memory):
    matrix = body("tetrahedra", 3, (17, 7, 7))
    points, elements, factors = (array.copy() for array in (matrix.coordinates, matrix.connectivity, matrix.factors))
    given = penstock.ElementMatrix(
        points, elements, element=matrix.element, material=factors, fixed=np.flatnonzero(matrix.fixed)
    )
    b = np.random.default_rng(3).standard_normal(matrix.shape[0])
    b[matrix.fixed > 0] = 0

    with penstock.prepare(given, device="cpu", memory=memory) as system:
        points *= 2.0
        factors *= 5.0
        elements[:] = 0
        x = system.solve(b).x

    assert np.linalg.norm(b - matrix.to_csr() @ x) <= 1.01e-8 * np.linalg.norm(b)


@pytest.mark.parametrize("memory", [None, "300 KiB"])
def test_other_methods_take_elements_too(memory):
    matrix = body("tetrahedra", 3, (17, 7, 7))
    b = matrix.to_csr() @ np.ones(matrix.shape[0])

    result = penstock.solve(matrix, b, device="cpu", memory=memory, method="minres", rtol=1e-6)

    assert result.converged


def test_no_fixed_unknowns_are_none():
    mesh = BoxMesh((3, 3, 3))
    masks = ([], None, np.zeros(81, dtype=bool))

    assert all(
        penstock.ElementMatrix(mesh.coordinates(), mesh.connectivity(), fixed=mask).fixed.size == 0 for mask in masks
    )


def test_products_are_refused_with_advice():
    with pytest.raises(InputError, match="assemble the matrix once"):
        body("tetrahedra", 1) @ np.ones(180)


def test_multigrid_solves_what_a_cpu_holds():
    A = body("tetrahedra", 3)
    b = np.random.default_rng(4).standard_normal(A.shape[0])
    b[A.fixed > 0] = 0
    stored = format_named("symmetric_bsr").from_csr(CsrMatrix.from_csr(A.to_csr()), block_size=3)
    for matrix, known in ((A, {}), (stored, {"coordinates": A.coordinates})):
        result = penstock.solve(matrix, b, device="cpu", **known)

        assert result.converged
        assert "preconditioner multigrid" in result.explain()
