"""Parts of a mesh, as ranks have them, and windows of it, as a GPU gets them: rows are those of the whole matrix."""

import itertools

import numpy as np
import pytest
from element_bodies import body
from element_slabs import make
from kernel_targets import TARGETS, gpu_count

import penstock
from penstock.fem.element_rows import FORMATS
from penstock.fem.host_elements import windows_of
from penstock.fem.mesh_parts import coupling_of, square_of
from penstock.spmv import Device, InputError
from penstock.spmv.compilation.table import find_kernel


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", ["tetrahedra", "hexahedra"])
@pytest.mark.parametrize("dof", [1, 3])
def test_a_part_of_a_mesh_makes_a_square_of_its_matrix(target, name, shape, dof):
    matrix = body(shape, dof, shuffled=True)
    square = square_of(matrix, 40, 130)
    host = square.matrix(name)

    [made] = make(target, square, name)

    own = slice(40 * dof, 130 * dof)
    assert len(square.ghosts)
    assert (host.to_csr() != matrix.matrix(name).to_csr()[own, own]).nnz == 0
    for key, array in made.items():
        bound = 100 * 2.0**-53 * abs(host.values).max() if key == "values" else 0
        np.testing.assert_allclose(array, host.arrays()[key], rtol=0, atol=bound)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", ["tetrahedra", "hexahedra"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_window_of_a_mesh_makes_the_same_rows(target, name, shape, shuffled):
    if target.name == "cpu":
        pytest.skip("elements are in its memory")
    matrix = body(shape, 3, shuffled=shuffled, fixed=shape == "tetrahedra")
    matrix = matrix if shape == "tetrahedra" else matrix.with_material(None)
    [whole] = make(target, matrix, name)
    maker, slabs = matrix.row_maker(name), matrix.symbolic_slabs(4, name)
    stops = np.cumsum([slab.shape[0] // 3 for slab in slabs]).tolist()
    made = []

    for slab, start, stop in zip(slabs, [0, *stops], stops, strict=False):
        [parts] = windows_of(maker.elements, maker.pattern, [start, stop])
        elements, pattern = (part.to_device(Device("cuda")) if target.name == "gpu" else part for part in parts)
        arrays = {key: target.put(np.full(array.shape, 77, array.dtype)) for key, array in slab.arrays().items()}
        arrays.pop("permutation", None)
        with target.running():
            find_kernel("element_rows", "fill", "cuda")(elements, pattern, name, start, stop, arrays)
        made.append({key: target.get(array) for key, array in arrays.items()})

    assert shuffled or len(elements.coordinates) < 0.6 * len(matrix.coordinates)
    # Tetrahedra of these bodies are ordered by their place in a hexahedron.
    assert shuffled or len(elements.connectivity) < 0.6 * len(matrix.connectivity)
    for key in ("column_indices", "values"):
        assert np.concatenate([slab[key] for slab in made]).tobytes() == whole[key].tobytes()


def test_a_part_of_a_mesh_is_a_matrix_of_its_own():
    matrix = body("tetrahedra", 3, (12, 5, 5), shuffled=True)
    square = square_of(matrix, 30, 240)
    expected = matrix.to_csr()[90:720, 90:720]
    b = np.random.default_rng(3).standard_normal(630)
    permutation = np.random.default_rng(4).permutation(210)
    unknowns = (3 * permutation[:, None] + np.arange(3)).ravel()

    result = penstock.solve(square, b, memory="150 KiB", device="cpu")

    assert np.linalg.norm(b - expected @ result.x) <= 1.01e-8 * np.linalg.norm(b)
    assert (
        abs(square.renumbered(permutation).to_csr() - expected[unknowns][:, unknowns]).max()
        < 1e-13 * abs(expected).max()
    )
    with pytest.raises(InputError, match="part of a mesh"):
        square.mass()
    with pytest.raises(InputError, match="part of a mesh already"):
        coupling_of(square, 0, 10)


def test_other_columns_of_a_part_of_a_mesh_are_those_of_its_matrix():
    for dof, (start, stop) in itertools.product((1, 3), ((0, 180), (17, 90), (100, 180))):
        matrix = body("tetrahedra", dof, shuffled=True)
        expected = matrix.to_csr()[start * dof : stop * dof].tolil()
        expected[:, start * dof : stop * dof] = 0

        assert (coupling_of(matrix, start, stop).to_csr() != expected.tocsr()).nnz == 0


@pytest.mark.gpu
@pytest.mark.skipif(gpu_count() == 0, reason="no CUDA device")
@pytest.mark.parametrize("shape", ["tetrahedra", "hexahedra"])
@pytest.mark.parametrize("dof", [1, 3])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("share", [None, 0.3])
def test_elements_stay_on_the_host_where_they_do_not_fit_a_gpu(shape, dof, shuffled, share, monkeypatch):
    matrix = body(shape, dof, (25, 9, 9), shuffled=shuffled)
    A, rng = matrix.matrix("symmetric_bsr"), np.random.default_rng(3)
    b = rng.standard_normal(matrix.shape[0]) * (matrix.fixed == 0 if matrix.fixed.size else 1)
    other = matrix.with_material(rng.uniform(1, 2, len(matrix.connectivity)))
    memory = None if share is None else int(share * A.nbytes)
    monkeypatch.setattr(penstock.ElementMatrix, "elements_nbytes", lambda *_: 1 << 50)

    with penstock.prepare(matrix, device="cuda", memory=memory) as system:
        result = system.solve(b, rtol=1e-9)
        system.update(other)
        updated = system.solve(b, rtol=1e-9)

    for of, found in ((A.to_csr(), result), (other.to_csr(), updated)):
        assert np.linalg.norm(b - of @ found.x) <= 1.01e-9 * np.linalg.norm(b)
    assert ("over the link" in result.explain()) == (result.bytes_streamed > 0) == (share is not None)


@pytest.mark.parametrize("memory", [None, "300 KiB"])
def test_a_renumbered_matrix_or_a_part_takes_another_material(memory):
    whole = body("tetrahedra", 3, (17, 7, 7), shuffled=True)
    ordered = body("tetrahedra", 3, (17, 7, 7))
    backwards = np.arange(len(whole.coordinates))[::-1]
    for matrix in (whole.renumbered(backwards), ordered.renumbered(backwards), square_of(whole, 100, 800)):
        other = matrix.with_material(matrix.factors[::-1].copy())
        b = np.random.default_rng(3).standard_normal(matrix.shape[0])
        with penstock.prepare(matrix, device="cpu", memory=memory) as system:
            system.update(other)
            x = system.solve(b).x
        assert np.linalg.norm(b - other.to_csr() @ x) <= 1.01e-8 * np.linalg.norm(b)


def test_a_part_refuses_what_is_of_another_mesh():
    whole = body("tetrahedra", 3, (17, 7, 7))
    square, points = square_of(whole, 100, 800), whole.coordinates.copy()
    points[:50, 0] -= 0.01
    moved = penstock.ElementMatrix(points, whole.connectivity, material=whole.factors, fixed=whole.fixed > 0)
    with penstock.prepare(square, device="cpu") as system, pytest.raises(InputError, match="see its ghosts"):
        system.update(square_of(moved, 100, 800))
    with pytest.raises(InputError, match="renumbering of one of 3456 elements, not of"):
        square.with_factors_of(square)
    assert square.reach == abs(square.graph().tocoo().row - square.graph().tocoo().col).max()


def test_slabs_whose_elements_are_copied_begin_at_whole_chunks():
    matrix = body("hexahedra", 3)
    assert matrix.window_nbytes("bsr", [0, 33, 540])[0] > 0
    with pytest.raises(InputError, match="multiples of 96 rows"):
        matrix.window_nbytes("symmetric_bsr", [0, 33, 540])
