"""The assembled matrix against a slow, obvious reference, its slabs against the whole, and the physics it must keep."""

import itertools
import tracemalloc

import numpy as np
import pytest

from penstock.fem import (
    Cantilever,
    HeatConduction,
    LinearElasticity,
    LognormalMaterial,
    MicropolarElasticity,
    TwoPhaseMaterial,
    UniformMaterial,
)
from penstock.spmv import BsrMatrix, CsrMatrix, InputError

UNIT = np.finfo(np.float64).eps / 2
# An entry sums at most 8 products of two factors, here and in the reference: 8 u of sum |factor K| each.
ENTRY_MULTIPLE = 16
# |A v| <= c u |A| |v| where A v = 0 in exact arithmetic. Element entries carry a few u of their largest terms and a row
# sums up to 27 dof products whose errors mostly cancel; measured are at most 7.3 (patch test) and 4.4 (rigid modes).
NULL_MULTIPLE = 16
# As above, for fields whose nodal values are rounded as well: 4 more products and sums, relative to sum |x_i| |g_i|.
ROUNDED_FIELD_MULTIPLE = 16

DOFS = [1, 3, 6]
FORMATS = ["bsr", "csr"]
LOGNORMAL = LognormalMaterial(sigma=1.0, seed=5)
LAWS = [
    HeatConduction(2.7),
    LinearElasticity(210.0, 0.2),
    LinearElasticity(1.0, 0.45),
    MicropolarElasticity.from_engineering(),
    MicropolarElasticity(1.1, 0.7, 0.4, 0.2, 0.1, 0.3),
    MicropolarElasticity.from_engineering(coupling=0.1, characteristic_length=0.01),
]
# Node coordinates on these are exact in binary, so that fields with whole coefficients are too.
EXACT_GRIDS = [((9, 9, 9), 1.0), ((13, 9, 7), (3.0, 4.0, 1.5)), ((17, 5, 5), 8.0)]
ROUNDED_GRIDS = [((11, 8, 7), 1.0), ((13, 8, 6), (1.7, 0.6, 2.1)), ((6, 7, 8), (1000.0, 1.3, 0.1))]


def box(dof: int, *, nodes=(4, 3, 5), material=LOGNORMAL, clamped=True) -> Cantilever:
    return Cantilever(nodes, dof, (1.3, 0.7, 2.0), material, clamped=clamped)


def element_loop(problem: Cantilever) -> tuple[np.ndarray, np.ndarray]:
    """Add up elements one by one in a dense matrix; return it and the same sum of absolute values."""
    nx, ny, nz = problem.mesh.node_counts
    K = problem.law.stiffness(problem.mesh.spacing)
    A, magnitude = np.zeros((2, *problem.shape))
    for ex in range(nx - 1):
        layer = problem.material.layer(ex, (ny - 1, nz - 1))
        for ey, ez in itertools.product(range(ny - 1), range(nz - 1)):
            nodes = [
                ((ex + x) * ny + ey + y) * nz + ez + z for x, y, z in itertools.product((0, 1), repeat=3)
            ]  # the corners with z running fastest
            unknowns = np.add.outer(np.array(nodes) * problem.dof, np.arange(problem.dof)).ravel()
            A[np.ix_(unknowns, unknowns)] += layer[ey, ez] * K
            magnitude[np.ix_(unknowns, unknowns)] += layer[ey, ez] * abs(K)
    if problem.clamped:
        clamped = np.arange(ny * nz * problem.dof)
        diagonal = A[clamped, clamped]
        A[clamped, :] = A[:, clamped] = 0
        A[clamped, clamped] = diagonal
    return A, magnitude


def bits(array: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    return str(array.dtype), array.shape, array.tobytes()


def on_interior_nodes(problem: Cantilever) -> np.ndarray:
    """Mark the unknowns of nodes that lie on no face."""
    interior = np.zeros((*problem.mesh.node_counts, problem.dof), bool)
    interior[1:-1, 1:-1, 1:-1] = True
    return interior.ravel()


@pytest.mark.parametrize("dof", DOFS)
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("clamped", [True, False], ids=["clamped", "free"])
class TestTheMatrix:
    @pytest.mark.parametrize("nodes", [(4, 3, 5), (2, 2, 2), (2, 4, 2), (5, 2, 3)], ids=str)
    def test_it_agrees_with_a_loop_over_elements(self, dof, format_name, clamped, nodes):
        problem = box(dof, nodes=nodes, clamped=clamped)
        reference, magnitude = element_loop(problem)

        A = problem.matrix(format_name)

        assert A.shape == reference.shape
        assert A.nnz == problem.nnz == A.to_csr().nnz
        assert (abs(A.to_csr().toarray() - reference) <= ENTRY_MULTIPLE * UNIT * magnitude).all()

    def test_it_stores_every_connection_once_in_ascending_order(self, dof, format_name, clamped):
        problem = box(dof, clamped=clamped)
        index = np.array(list(itertools.product(*map(range, problem.mesh.node_counts))))
        connected = abs(index[:, None] - index).max(axis=2) <= 1

        A = problem.matrix(format_name)

        stored = connected if format_name == "bsr" else np.kron(connected, np.ones((dof, dof), bool))
        columns = np.nonzero(stored)[1]
        assert np.array_equal(A.row_offsets, [0, *np.cumsum(stored.sum(axis=1))])
        assert np.array_equal(A.column_indices, columns)

    def test_it_is_symmetric_to_the_last_bit(self, dof, format_name, clamped):
        A = box(dof, nodes=(9, 6, 7), clamped=clamped).matrix(format_name).to_csr()

        transposed = A.T.tocsr()
        transposed.sort_indices()

        assert np.array_equal(A.indptr, transposed.indptr)
        assert np.array_equal(A.indices, transposed.indices)
        assert A.data.tobytes() == transposed.data.tobytes()


@pytest.mark.parametrize("dof", DOFS)
@pytest.mark.parametrize("clamped", [True, False], ids=["clamped", "free"])
def test_both_formats_hold_the_same_numbers(dof, clamped):
    problem = box(dof, clamped=clamped)

    bsr, csr = problem.matrix("bsr").to_csr(), problem.matrix("csr").to_csr()

    assert np.array_equal(bsr.toarray(), csr.toarray())


@pytest.mark.parametrize("format_name", FORMATS)
def test_values_stored_in_single_precision_are_the_rounded_ones(format_name):
    problem = box(3)

    single = problem.matrix(format_name, values_dtype=np.float32)

    assert single.values_dtype == np.float32
    assert single.dtype == np.float64  # that of the vectors
    assert bits(single.values) == bits(problem.matrix(format_name).values.astype(np.float32))


@pytest.mark.parametrize("dof", DOFS)
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("values_dtype", [np.float64, np.float32])
class TestSlabs:
    @pytest.mark.parametrize("count", [1, 2, 3, 7, "nodes"])
    def test_put_together_they_are_the_whole_bit_for_bit(self, dof, format_name, values_dtype, count):
        problem = box(dof, nodes=(5, 3, 3))
        count = problem.mesh.node_count if count == "nodes" else count
        whole = problem.matrix(format_name, values_dtype=values_dtype)

        slabs = list(problem.subdivisions(count, format_name, values_dtype=values_dtype))

        ends = np.cumsum([0, *(int(slab.row_offsets[-1]) for slab in slabs)])
        offsets = [slab.row_offsets[:-1] + start for slab, start in zip(slabs, ends[:-1], strict=True)]
        assert len(slabs) == count
        assert sum(slab.shape[0] for slab in slabs) == problem.unknowns
        assert np.array_equal(np.concatenate([*offsets, ends[-1:]]), whole.row_offsets)
        assert bits(np.concatenate([slab.column_indices for slab in slabs])) == bits(whole.column_indices)
        assert bits(np.concatenate([slab.values for slab in slabs])) == bits(whole.values)

    def test_their_offsets_are_narrow_and_those_of_the_whole_wide(self, dof, format_name, values_dtype):
        problem = box(dof)

        whole = problem.matrix(format_name, values_dtype=values_dtype)
        slabs = list(problem.subdivisions(3, format_name, values_dtype=values_dtype))

        assert whole.row_offsets.dtype == np.int64
        assert whole.parameters() == whole.whole_matrix_parameters(whole.nnz, whole.shape[0])
        for slab in slabs:
            assert slab.row_offsets.dtype == np.int32
            assert slab.row_offsets[0] == 0
            assert slab.shape[1] == problem.unknowns
            assert (slab.values_dtype, slab.dtype) == (values_dtype, np.float64)
            # Lanes fix the order in which a GPU sums a row: products would differ otherwise.
            assert slab.parameters() == whole.parameters()

    @pytest.mark.parametrize("count", [1, 4, 45])
    def test_outlines_tell_their_shapes_and_types_and_take_no_memory(self, dof, format_name, values_dtype, count):
        problem = box(dof, nodes=(5, 3, 3))

        symbolic_slabs = problem.symbolic_slabs(count, format_name, values_dtype=values_dtype)

        slabs = list(problem.subdivisions(count, format_name, values_dtype=values_dtype))
        for outline, slab in zip(symbolic_slabs, slabs, strict=True):
            assert type(outline) is type(slab)
            assert (outline.shape, outline.dtype, outline.nnz) == (slab.shape, slab.dtype, slab.nnz)
            assert outline.nbytes == slab.nbytes
            assert outline.parameters() == slab.parameters()
            assert list(outline.arrays()) == list(slab.arrays())
            for name, array in outline.arrays().items():
                assert (array.shape, array.dtype) == (slab.arrays()[name].shape, slab.arrays()[name].dtype)
                assert set(array.strides) == {0}


def test_the_outline_of_a_matrix_larger_than_memory_is_small():
    problem = Cantilever(256, dof=6)

    tracemalloc.start()
    symbolic_slabs = problem.symbolic_slabs(64)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert sum(outline.nnz for outline in symbolic_slabs) == problem.nnz
    assert sum(outline.nbytes for outline in symbolic_slabs) > 100e9
    assert peak < 1 << 20


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_slab_of_more_entries_than_its_offsets_can_count_is_refused(format_name):
    nodes = {"csr": 256, "bsr": 440}[format_name]  # 4.0e9 scalars, and 2.3e9 blocks

    with pytest.raises(InputError, match="2147483647"):
        Cantilever(nodes, dof=3).symbolic_slabs(1, format_name)


@pytest.mark.parametrize(("format_name", "nodes"), [("csr", 900), ("bsr", 1300)])
def test_a_matrix_of_more_columns_than_their_indices_can_tell_apart_is_refused(format_name, nodes):
    with pytest.raises(InputError, match="32-bit column indices"):
        Cantilever(nodes, dof=3).symbolic_slabs(64, format_name)


@pytest.mark.parametrize(
    "make", [lambda problem: problem.matrix("dia"), lambda problem: problem.symbolic_slabs(2, "dia")]
)
def test_an_unknown_format_is_refused_and_the_known_ones_are_named(make):
    with pytest.raises(InputError, match=r"'dia'; known: .*bsr.*csr"):
        make(box(3))


class RecordingMaterial:
    """Uniform, and notes which layers it was asked for."""

    def __init__(self):
        self.layers = []

    def layer(self, index, shape):
        self.layers.append(index)
        return np.ones(shape)


@pytest.mark.parametrize("format_name", FORMATS)
def test_slabs_are_made_one_at_a_time_from_the_layers_they_touch(format_name):
    material = RecordingMaterial()
    problem = box(3, nodes=(9, 4, 3), material=material)
    bounds = problem.mesh.cut(12)

    slabs = problem.subdivisions(12, format_name)

    assert material.layers == []  # nothing is made before it is asked for
    for start, stop in itertools.pairwise(bounds):
        material.layers.clear()
        next(slabs)
        planes = range(start // 12, (stop - 1) // 12 + 1)
        touched = {layer for plane in planes for layer in (plane - 1, plane) if 0 <= layer < 8}
        assert sorted(material.layers) == sorted(touched)


def test_the_slabs_of_a_sweep_never_take_more_memory_than_two_of_them():
    """One is being made while the consumer's variable still holds the last."""
    problem = box(3, nodes=(33, 17, 17), material=UniformMaterial())
    largest = max(outline.nbytes for outline in problem.symbolic_slabs(16))
    for _slab in problem.subdivisions(1):  # compile
        pass

    tracemalloc.start()
    for _slab in problem.subdivisions(16):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 2.2 * largest  # the offsets' 64-bit cousins and the material's layers are the rest


@pytest.mark.parametrize("dof", DOFS)
@pytest.mark.parametrize("format_name", FORMATS)
class TestClamping:
    def test_it_keeps_the_diagonal_and_everything_that_touches_no_clamped_node(self, dof, format_name):
        clamped = box(dof).matrix(format_name).to_csr().toarray()
        free = box(dof, clamped=False).matrix(format_name).to_csr().toarray()
        held = np.arange(3 * 5 * dof)
        rest = np.arange(held.size, len(free))

        assert np.array_equal(np.diag(clamped), np.diag(free))
        assert np.array_equal(clamped[np.ix_(rest, rest)], free[np.ix_(rest, rest)])
        off_diagonal = clamped - np.diag(np.diag(clamped))
        assert not off_diagonal[held].any()
        assert not off_diagonal[:, held].any()
        # What has become zero was not zero before.
        assert free[np.ix_(held, rest)].any()

    def test_it_leaves_the_pattern_alone(self, dof, format_name):
        clamped, free = box(dof).matrix(format_name), box(dof, clamped=False).matrix(format_name)

        assert clamped.nnz == free.nnz
        assert np.array_equal(clamped.row_offsets, free.row_offsets)
        assert np.array_equal(clamped.column_indices, free.column_indices)

    def test_no_conversion_drops_its_stored_zeros(self, dof, format_name):
        A = box(dof).matrix(format_name)
        scalars = A.to_csr()
        blocks = BsrMatrix.from_csr(scalars, block_size=dof).to_bsr()

        converted = {
            "to_csr": scalars,
            "CsrMatrix.from_csr": CsrMatrix.from_csr(scalars).to_csr(),
            "BsrMatrix.from_csr": BsrMatrix.from_csr(scalars, block_size=dof).to_csr(),
            "BsrMatrix.from_bsr": BsrMatrix.from_bsr(blocks).to_csr(),
            "SciPy and back": scalars.tobsr((dof, dof)).tocsr(),
            "SciPy's tocsr": blocks.tocsr(),
        }

        assert (scalars.data == 0).sum() >= 3 * 5 * dof * (dof - 1)  # of the clamped diagonal blocks alone
        reference = scalars.toarray()
        for name, B in converted.items():
            B.sort_indices()
            assert B.nnz == A.nnz, name
            assert np.array_equal(B.indptr, scalars.indptr), name
            assert np.array_equal(B.indices, scalars.indices), name
            assert np.array_equal(B.toarray(), reference), name

    @pytest.mark.parametrize("material", [LOGNORMAL, TwoPhaseMaterial(contrast=1e3)], ids=repr)
    def test_it_makes_the_matrix_positive_definite(self, dof, format_name, material):
        clamped = box(dof, nodes=(4, 3, 3), material=material).matrix(format_name).to_csr().toarray()
        free = box(dof, nodes=(4, 3, 3), material=material, clamped=False).matrix(format_name).to_csr().toarray()

        smallest, largest = np.linalg.eigvalsh(clamped)[[0, -1]]

        resolved = len(clamped) * 2 * UNIT * largest  # what eigvalsh can tell from zero
        assert smallest > 100 * resolved
        assert abs(np.linalg.eigvalsh(free)[0]) < 10 * resolved


def linear_field(problem: Cantilever, gradient, constant) -> tuple[np.ndarray, np.ndarray]:
    """Return nodal values of a linear field, and the sum of the magnitudes of its terms.

    Micropolar nodes turn with the body, ``phi = curl u / 2``: the strain is then constant and symmetric, so that neither
    forces nor moments are out of balance.
    """
    r, dof = problem.mesh.coordinates(), problem.dof
    gradient, constant = gradient[:, : min(dof, 3)], constant[: min(dof, 3)]
    values, magnitude = r @ gradient + constant, abs(r) @ abs(gradient) + abs(constant)
    if dof == 6:
        curl = np.array(
            [
                gradient[1, 2] - gradient[2, 1],
                gradient[2, 0] - gradient[0, 2],
                gradient[0, 1] - gradient[1, 0],
            ]
        )
        rotation = np.broadcast_to(curl / 2, values.shape)
        values, magnitude = np.hstack([values, rotation]), np.hstack([magnitude, abs(rotation)])
    return values.ravel(), magnitude.ravel()


# Both formats hold the same numbers, so the physics of one is that of the other.
@pytest.mark.parametrize("law", LAWS, ids=repr)
class TestLinearFields:
    @pytest.mark.parametrize(("nodes", "lengths"), EXACT_GRIDS, ids=str)
    def test_they_leave_interior_nodes_in_balance(self, law, nodes, lengths):
        problem = Cantilever(nodes, law.dof, lengths, element=law, clamped=False)
        A, interior = problem.matrix(), on_interior_nodes(problem)
        generator = np.random.default_rng(11)

        for _ in range(10):
            gradient, constant = generator.integers(-8, 9, (3, 3)) * 1.0, generator.integers(-8, 9, 3) * 1.0
            v, _ = linear_field(problem, gradient, constant)
            out_of_balance = abs(A @ v)
            assert (out_of_balance <= NULL_MULTIPLE * UNIT * A.apply_absolute(abs(v)))[interior].all()
            # The faces carry the tractions of a strained body, so the bound is not met by everything.
            assert (out_of_balance > 1e6 * UNIT * A.apply_absolute(abs(v)))[~interior].any()

    @pytest.mark.parametrize(("nodes", "lengths"), ROUNDED_GRIDS, ids=str)
    def test_they_do_so_on_grids_that_round_them(self, law, nodes, lengths):
        problem = Cantilever(nodes, law.dof, lengths, element=law, clamped=False)
        A, interior = problem.matrix(), on_interior_nodes(problem)
        generator = np.random.default_rng(12)

        for _ in range(10):
            v, magnitude = linear_field(problem, generator.standard_normal((3, 3)), generator.standard_normal(3))
            assert (abs(A @ v) <= ROUNDED_FIELD_MULTIPLE * UNIT * A.apply_absolute(magnitude))[interior].all()


@pytest.mark.parametrize("law", LAWS, ids=repr)
@pytest.mark.parametrize("material", [UniformMaterial(), LOGNORMAL, TwoPhaseMaterial()], ids=repr)
@pytest.mark.parametrize(("nodes", "lengths"), EXACT_GRIDS + ROUNDED_GRIDS, ids=str)
def test_rigid_motions_of_a_free_body_need_no_force(law, material, nodes, lengths):
    problem = Cantilever(nodes, law.dof, lengths, material, law, clamped=False)
    A = problem.matrix()

    modes = problem.rigid_body_modes()

    assert modes.shape == (problem.unknowns, {1: 1, 3: 6, 6: 6}[law.dof])
    for v in np.ascontiguousarray(modes.T):
        assert (abs(A @ v) <= NULL_MULTIPLE * UNIT * A.apply_absolute(abs(v))).all()


def test_a_micropolar_rotation_against_the_body_is_resisted_in_the_interior():
    """The patch test can fail: nodes that turn the wrong way leave moments of 4 kappa a volume out of balance."""
    problem = Cantilever((5, 5, 5), dof=6, clamped=False)
    v = np.ascontiguousarray(problem.rigid_body_modes()[:, 3]).reshape(-1, 6)
    v[:, 3:] *= -1

    moments = (problem.matrix() @ v.ravel()).reshape(-1, 6)[on_interior_nodes(problem).reshape(-1, 6)[:, 0], 3]

    np.testing.assert_allclose(moments, -4 * problem.law.kappa * np.prod(problem.mesh.spacing), rtol=1e-12)
