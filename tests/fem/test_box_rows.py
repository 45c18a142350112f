"""Kernels make the rows of a box mesh with the bits of the sums that define them, in every layout and cut."""

import itertools

import numpy as np
import pytest
from kernel_targets import TARGETS

from penstock.fem import Cantilever, LognormalMaterial, TwoPhaseMaterial, UniformMaterial
from penstock.fem.box_rows import BoxElements
from penstock.fem.row_layouts import LAYOUTS
from penstock.spmv import Device
from penstock.spmv.compilation.table import find_kernel

CASES = {
    "beam": ((5, 4, 9), LognormalMaterial(1.0, 3)),
    "plates": ((2, 2, 33), TwoPhaseMaterial(1e6, 0.4)),
    "uniform": ((3, 5, 7), UniformMaterial()),
}


def reference(cantilever):
    """Add element matrices one after another in long double; return the sums, and those of the absolute values."""
    nodes, dof = cantilever.mesh.node_counts, cantilever.dof
    stiffness = cantilever.law.stiffness(cantilever.mesh.spacing).reshape(8, dof, 8, dof)
    total = np.zeros((cantilever.mesh.node_count, dof) * 2, dtype=np.longdouble)
    absolute = np.zeros(total.shape)
    corners = list(itertools.product((0, 1), repeat=3))
    counts = cantilever.mesh.element_counts
    for element in itertools.product(*(range(count) for count in counts)):
        factor = cantilever.material.layer(element[0], counts[1:])[element[1:]]
        numbers = [np.ravel_multi_index(np.add(element, corner), nodes) for corner in corners]
        for a, b in itertools.product(range(8), repeat=2):
            total[numbers[a], :, numbers[b], :] += np.longdouble(factor) * stiffness[a, :, b, :]
            absolute[numbers[a], :, numbers[b], :] += abs(factor * stiffness[a, :, b, :])
    if cantilever.clamped:
        held = np.arange(nodes[1] * nodes[2] * dof)
        matrix = total.reshape(cantilever.shape)
        diagonal = matrix.diagonal()[held].copy()
        matrix[held] = matrix[:, held] = 0
        matrix[held, held] = diagonal
    return total.reshape(cantilever.shape), absolute.reshape(cantilever.shape)


def _slabs(cantilever, name, values_dtype, count=1):
    bounds = cantilever._cut(count, name)
    symbolic = cantilever.symbolic_slabs(count, name, values_dtype=values_dtype)
    return [(first, last, slab) for (first, last), slab in zip(itertools.pairwise(bounds), symbolic, strict=True)]


def make(target, cantilever, name, values_dtype=np.float64, count=1, parts=("structure", "values"), planes=None):
    """Return the arrays of the slabs that a target makes, on the host."""
    device = Device("cuda") if target.name == "gpu" else Device("cpu")
    elements = BoxElements.of(
        cantilever.mesh,
        cantilever.law.stiffness(cantilever.mesh.spacing),
        cantilever.material,
        planes=planes,
        clamped=cantilever.clamped,
        device=device,
    )
    fill = find_kernel("box_rows", "fill", target.device_kind)
    made = []
    own = cantilever if planes is None else Cantilever(elements.mesh.node_counts, cantilever.dof)
    for start, stop, slab in _slabs(own, name, values_dtype, count):
        arrays = {
            key: target.put(np.full(array.shape, 77, array.dtype))
            for key, array in slab.arrays().items()
            if ("values" if key == "values" else "structure") in parts and key != "permutation"
        }
        starts = slab.arrays().get("chunk_offsets")
        with target.running():
            fill(elements, name, start, stop, arrays, None if starts is None else target.put(starts))
        made.append({key: target.get(array) for key, array in arrays.items()})
    return made


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dof", [1, 3, 6])
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_the_host(target, name, dof, case):
    nodes, material = CASES[case]
    cantilever = Cantilever(nodes, dof, (1.3, 0.7, 2.0), material)
    host = cantilever.matrix(name)

    [made] = make(target, cantilever, name)

    for key, array in made.items():
        assert array.tobytes() == host.arrays()[key].astype(array.dtype).tobytes(), key


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dof", [1, 3, 6])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("clamped", [True, False])
def test_the_host_adds_element_matrices(name, dof, case, clamped):
    nodes, material = CASES[case]
    cantilever = Cantilever(nodes, dof, (1.3, 0.7, 2.0), material, clamped=clamped)
    expected, absolute = reference(cantilever)

    A = cantilever.matrix(name).to_csr().toarray()

    assert (abs(A - expected) <= 8 * 2.0**-53 * absolute).all()  # eight products are added, with a rounding each
    assert (A == A.T).all()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("values_dtype", [np.float64, np.float32])
def test_cuts_change_no_bit(target, name, values_dtype):
    cantilever = Cantilever((5, 4, 9), 3, 1.0, LognormalMaterial(1.0, 3))

    [whole] = make(target, cantilever, name, values_dtype)
    slabs = make(target, cantilever, name, values_dtype, count=4)

    for key in ("column_indices", "values"):
        assert np.concatenate([slab[key] for slab in slabs]).tobytes() == whole[key].tobytes()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_parts_are_made_alone(target, name):
    cantilever = Cantilever((3, 4, 9), 3, 1.0, LognormalMaterial(1.0, 3))

    [whole] = make(target, cantilever, name)
    [structure] = make(target, cantilever, name, parts=("structure",))
    [values] = make(target, cantilever, name, parts=("values",))

    assert set(values) == {"values"}
    assert "values" not in structure
    for key, array in {**structure, **values}.items():
        assert array.tobytes() == whole[key].tobytes()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("material", [LognormalMaterial(1.0, 3), UniformMaterial()])
@pytest.mark.parametrize("planes", [slice(0, 2), slice(2, 5), slice(5, 7), slice(0, 7)])
def test_squares_of_ranks_have_the_bits_of_the_whole_matrix(target, name, material, planes):
    cantilever = Cantilever((7, 3, 6), 3, 1.0, material)
    plane = cantilever.unknowns // 7
    own = slice(planes.start * plane, planes.stop * plane)
    whole = cantilever.matrix("bsr").to_csr()
    expected = whole[own, own]

    [made] = make(target, cantilever, name, planes=planes)

    like = Cantilever((planes.stop - planes.start, 3, 6), 3).matrix(name)
    arrays = {key: array.astype(like.arrays()[key].dtype) for key, array in made.items()}
    if "permutation" in like.arrays():
        arrays["permutation"] = like.arrays()["permutation"]
    square = type(like).from_arrays(like.shape, like.dtype, arrays, like.parameters()).to_csr()
    assert (square != expected).nnz == 0
    assert square.nnz == expected.nnz
