"""Multigrid: aggregates cover the graph, cycles are symmetric, and iterations hardly grow with the mesh."""

import numpy as np
import pytest
import scipy.sparse
from kernel_targets import TARGETS, gpu_count

from penstock.fem import Cantilever
from penstock.solvers import Multigrid, block_cg, block_jacobi, cg, multigrid, preconditioner_spec
from penstock.solvers.amg.aggregates import device_aggregates
from penstock.spmv import BsrMatrix, InputError, as_operator
from penstock.spmv.products.block_rows import BlockRows, as_csr


def beam_of(n, dof=3):
    return Cantilever(nodes=(n, n, n), dof=dof)


def made(beam, **options):
    """The preconditioner of a beam; rotations and displacements from its nodes."""
    A = beam.matrix("bsr" if beam.dof > 1 else "csr")
    return A, multigrid(A, coordinates=beam.mesh.coordinates(), **options)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shuffled", [False, True])
def test_aggregates_are_connected_and_cover_the_nodes_that_take_part(target, shuffled):
    A = abs(beam_of(7, dof=1).matrix("csr").to_csr())
    if shuffled:
        order = np.random.default_rng(1).permutation(A.shape[0])
        A = A[order][:, order]
    A.sort_indices()
    active = np.asarray(A.sum(axis=1)).ravel() > A.diagonal() * (1 + 1e-12)
    with target.running():
        arrays = (A.indptr.astype(np.int64), A.indices.astype(np.int32), active)
        found = device_aggregates(*(target.put(array) for array in arrays), target.device_kind)
        of_node = target.get(found.of_node)

    assert of_node.min() >= 0
    assert np.array_equal(np.unique(of_node[active]), np.arange(found.count))
    assert 8 <= active.sum() / found.count <= 60
    for number in range(found.count):
        inside = np.flatnonzero((of_node == number) & active)
        part = A[inside][:, inside]
        assert scipy.sparse.csgraph.connected_components(part)[0] == 1


@pytest.mark.parametrize("smoother", ["chebyshev", "gauss_seidel"])
@pytest.mark.parametrize("cycle", ["V", "W"])
@pytest.mark.parametrize("dof", [1, 3, 6])
def test_a_cycle_is_symmetric_and_iterations_are_few(smoother, cycle, dof):
    beam = beam_of(10, dof)
    A, M = made(beam, smoother=smoother, cycle=cycle)
    b = beam.load()
    x, y = np.random.default_rng(2).normal(size=(2, A.shape[0]))

    result = cg(A, b, M=M, rtol=1e-10)

    assert result.converged
    assert result.iterations < 25
    assert abs(x @ (M @ y) - y @ (M @ x)) <= 1e-10 * abs(x @ (M @ x))
    assert x @ (M @ x) > 0
    assert np.allclose(result.x, cg(A, b, M=block_jacobi(A, dof), rtol=1e-10).x, atol=1e-7 * abs(result.x).max())


def test_the_interval_of_the_smoother_holds_an_eigenvalue_that_stands_alone():
    """Beyond its interval a smoother diverges, and the cycle is not positive definite."""
    side, signs, coupling = 28, np.array([1.0, -1.0, 1.0, -1.0, 1.0]), 0.33
    line = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(side, side))
    grid = scipy.sparse.kronsum(scipy.sparse.kronsum(line, line), line)
    alone = (1 - coupling) * np.eye(5) + coupling * np.outer(signs, signs)
    A = as_operator(scipy.sparse.csr_array(scipy.sparse.block_diag([grid, alone])))

    assert multigrid(A).levels[0].smoother.high >= 1 + 4 * coupling  # that of the grid alone is below 2


def test_iterations_hardly_grow_with_the_mesh():
    counts = []
    for n in (8, 14, 20):
        beam = beam_of(n)
        A, M = made(beam)
        counts.append(cg(A, beam.load(), M=M, rtol=1e-8).iterations)
        assert M.operator_complexity < 1.5
    assert len(M.levels) >= 2
    assert counts[-1] <= counts[0] + 4
    assert counts[-1] <= 14


def test_blocks_of_vectors_scaling_and_other_formats():
    beam = beam_of(8)
    A, M = made(beam)
    B = np.random.default_rng(3).normal(size=(beam.unknowns, 5))

    assert np.allclose((M @ B)[:, 3], M @ B[:, 3].copy(), rtol=0, atol=1e-12 * abs(M @ B).max())
    assert np.allclose(M.apply(B, 2.0 * B, alpha=0.5, beta=3.0), 0.5 * (M @ B) + 6.0 * B)
    assert np.allclose(M.apply(B, alpha=2.0), 2.0 * (M @ B))
    assert block_cg(A, B, M=M, rtol=1e-8).converged
    modes = beam.rigid_body_modes()
    other = multigrid(beam.matrix("sliced_bsr"), modes, block_size=3)
    assert np.allclose(other @ B[:, 0].copy(), multigrid(A, modes) @ B[:, 0].copy(), rtol=1e-9)
    as_scalars = multigrid(beam.matrix("csr"), modes)
    assert cg(A, beam.load(), M=as_scalars, rtol=1e-8).iterations < 40


def test_small_matrices_are_inverted_and_graphs_that_cannot_be_coarsened_are_smoothed():
    small = beam_of(4)
    A, M = made(small)
    assert not M.levels
    assert M.operator_complexity == 1.0
    assert cg(A, small.load(), M=M, rtol=1e-8).iterations <= 2
    diagonal = scipy.sparse.diags_array(np.linspace(1, 2, 1000)).tocsr()
    alone = multigrid(diagonal)
    assert cg(diagonal, np.ones(1000), M=alone, rtol=1e-8).converged


def test_blocks_become_rows_of_numbers():
    rng = np.random.default_rng(4)
    offsets, columns = np.array([0, 2, 2, 5]), np.array([0, 2, 0, 1, 3], dtype=np.int32)
    rows = BlockRows(0, offsets, columns, rng.normal(size=(5, 3, 2)))

    found = as_csr(rows, 4).to_csr()

    expected = scipy.sparse.bsr_array((rows.blocks, columns, offsets), shape=(9, 8)).tocsr()
    assert np.array_equal(found.toarray(), expected.toarray())
    assert np.array_equal(found.indices, expected.indices)


@pytest.mark.parametrize("cycle", ["V", "W"])
def test_a_hierarchy_of_pyamg(cycle):
    pyamg = pytest.importorskip("pyamg")
    beam = beam_of(10)
    A, b = beam.matrix("bsr"), beam.load()
    matrix = A.to_bsr()
    bsr = scipy.sparse.bsr_matrix((matrix.data, matrix.indices, matrix.indptr), shape=matrix.shape)
    hierarchy = pyamg.smoothed_aggregation_solver(bsr, B=beam.rigid_body_modes(), symmetry="hermitian")

    M = Multigrid.from_pyamg(hierarchy, cycle=cycle)
    found = cg(A, b, M=M, rtol=1e-8)

    assert len(M.levels) == len(hierarchy.levels) - 1
    assert found.converged
    assert found.iterations <= cg(A, b, M=hierarchy.aspreconditioner(), rtol=1e-8).iterations + 5
    with pytest.raises(InputError, match="not a hierarchy of pyamg"):
        Multigrid.from_pyamg(A)


def test_the_specification_builds_it():
    beam = beam_of(9)
    A = beam.matrix("bsr")
    spec = preconditioner_spec("multigrid", cycle="W", degree=5).with_block_size(3)
    spec = spec.with_nodes(beam.mesh.coordinates, beam.mesh.node_counts)

    M = spec.build(A)

    assert M.cycle == "W"
    assert cg(A, beam.load(), M=M, rtol=1e-8).iterations < 15
    assert spec.workspace_nbytes(A.shape[0], 1) > A.nbytes
    turned = spec.with_nodes(None, ()).in_order(lambda x: x[::-1])
    assert turned.near_null_space is None
    modes = preconditioner_spec("multigrid", near_null_space=np.arange(4.0)).in_order(lambda x: x[::-1]).near_null_space
    assert modes.tolist() == [3.0, 2.0, 1.0, 0.0]


def test_refusals():
    A = beam_of(4).matrix("bsr")
    with pytest.raises(InputError, match="smoother must be"):
        multigrid(A, smoother="jacobi")
    with pytest.raises(InputError, match="cycle must be"):
        multigrid(A, cycle="F")
    with pytest.raises(InputError, match="degree must be odd"):
        multigrid(A, degree=2)
    with pytest.raises(InputError, match="held in memory"):
        multigrid(np.eye(3))
    with pytest.raises(InputError, match="square"):
        multigrid(scipy.sparse.csr_array(np.ones((2, 3))))
    with pytest.raises(InputError, match="float64"):
        multigrid(scipy.sparse.csr_array(np.eye(3, dtype=np.float32)))
    with pytest.raises(InputError, match="not positive definite"):
        multigrid(-scipy.sparse.eye_array(5, format="csr"))
    with pytest.raises(InputError, match="near_null_space must be finite"):
        multigrid(A, np.full(A.shape[0], np.nan))
    assert multigrid(scipy.sparse.csr_array((0, 0))).shape == (0, 0)
    assert multigrid(A, degree="auto").shape == A.shape
    with pytest.raises(InputError, match="coordinates must be of shape"):
        multigrid(A, coordinates=np.ones((3, 3)))
    with pytest.raises(InputError, match="near_null_space must be of shape"):
        multigrid(A, np.ones((3, 3)))
    for size in (0, 9, -1, 2.0, True, "3"):
        with pytest.raises(InputError, match=f"block_size must be a whole number, 1 to 8, not {size!r}"):
            multigrid(A, block_size=size)
    with pytest.raises(InputError, match="coordinates must be real numbers, not complex128"):
        multigrid(A, coordinates=np.ones((A.shape[0] // 3, 3)) + 1j)
    with pytest.raises(InputError, match="near_null_space must be real numbers, not complex128"):
        multigrid(A, np.ones(A.shape[0]) + 1j)


@pytest.mark.gpu
@pytest.mark.skipif(gpu_count() == 0, reason="no CUDA device")
@pytest.mark.parametrize("dof", [1, 3, 6])
@pytest.mark.parametrize("smoother", ["chebyshev", "gauss_seidel"])
def test_on_a_gpu(dof, smoother):
    beam = beam_of(16, dof)
    A = beam.matrix("bsr" if dof > 1 else "csr").to_device("cuda")
    b = A.device.asarray(beam.load())

    M = multigrid(A, coordinates=beam.mesh.coordinates(), smoother=smoother)
    result = cg(A, b, M=M, rtol=1e-8)

    assert result.converged
    assert result.iterations < 20
    again = multigrid(A, coordinates=beam.mesh.coordinates(), smoother=smoother)
    assert bool((again @ b == M @ b).all())


@pytest.mark.parametrize("scale", [1e-45, 1.0, 1e40])
def test_levels_are_stored_in_float32_where_their_numbers_fit(scale):
    beam = Cantilever(nodes=(17, 5, 5), dof=3)
    A, b = scale * beam.matrix().to_csr(), beam.load()
    matrix = BsrMatrix.from_csr(A, block_size=3)
    M = multigrid(matrix, coordinates=beam.mesh.coordinates())
    assert {level.A.values_dtype for level in M.levels} == {np.dtype(np.float32 if scale == 1 else np.float64)}
    assert all(not np.shares_memory(level.A.values, matrix.values) for level in M.levels)
    result = cg(matrix, b, M=M, rtol=1e-10)
    assert result.converged
    assert result.iterations < 20


def test_rows_that_float32_cannot_hold_keep_the_level_in_float64():
    line = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(40, 40))
    scale = scipy.sparse.diags_array(10.0 ** np.random.default_rng(0).uniform(-24, 0, 1600))
    A = (scale @ scipy.sparse.kronsum(line, line) @ scale).tocsr()
    assert multigrid(A).levels[0].A.values_dtype == np.float64
