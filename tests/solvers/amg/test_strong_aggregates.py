"""Where the stiffness jumps, aggregates follow strong couplings, and iterations stay few; smooth matrices are left alone."""

import numpy as np
import pytest
import scipy.sparse
from awkward_systems import diffusion, jumping
from kernel_targets import DEVICES

import penstock
from penstock.fem import Cantilever
from penstock.solvers import block_cg, cg, smoothed_aggregation
from penstock.solvers.amg import strong_aggregates
from penstock.solvers.amg.inner_iterations import InnerIterations
from penstock.spmv import CPU, BsrMatrix, CsrMatrix, Device, as_operator
from penstock.spmv.formats.partition import row_slabs
from penstock.streaming import HostStore, StreamedMatrix, Workload

SIDE = 30


def blocks_of_jumps(contrast=1e4, side=SIDE):
    """Finite volumes whose coefficient jumps between blocks of 6 cells a side, and the coefficient of every cell."""
    hard = np.random.default_rng(0).random((side // 6,) * 3) < 0.5
    k = np.kron(np.where(hard, contrast, 1.0), np.ones((6, 6, 6)))
    return diffusion(k), k.ravel()


A, K = blocks_of_jumps()
B = np.random.default_rng(1).normal(size=(A.shape[0], 3))


def test_no_aggregate_holds_both_sides_of_a_jump_and_iterations_are_few(monkeypatch):
    M = smoothed_aggregation(A)
    of_node = M.level.T.aggregates.of_node

    assert M.level.jumps
    for values in (np.minimum, np.maximum):
        extreme = np.full(M.level.T.aggregates.count, K[0] if values is np.maximum else K.max())
        values.at(extreme, of_node, K)
        assert np.array_equal(extreme[of_node], K)
    assert cg(A, B[:, 0], M=M, rtol=1e-8).iterations <= 9
    monkeypatch.setattr(strong_aggregates, "stiffness_jumps", lambda norms: False)
    assert cg(A, B[:, 0], M=smoothed_aggregation(A), rtol=1e-8).iterations >= 15


@pytest.mark.parametrize("device", DEVICES)
def test_a_streamed_matrix_gets_the_same_level_and_few_sweeps(device):
    stored = CsrMatrix.from_csr(A)
    here, there = smoothed_aggregation(stored), Device.parse(device)
    store = HostStore.create(row_slabs(stored, 24))
    with StreamedMatrix(store, stored.nbytes * 3 // 4, workload=Workload(degree=5), device=there) as matrix:
        M = smoothed_aggregation(matrix, degree=5)
        result = cg(matrix, there.asarray(B[:, 0]), M=M, rtol=1e-8)

    assert np.array_equal(here.level.T.aggregates.of_node, M.level.T.aggregates.of_node)
    assert result.converged
    assert result.iterations <= 14


def test_several_right_hand_sides_and_new_values():
    M = smoothed_aggregation(A)
    block = block_cg(as_operator(A), B, M=M, rtol=1e-8)
    assert block.converged
    assert block.iterations <= 9
    with penstock.prepare(
        A, near_null_space=np.ones(len(B)), preconditioner="smoothed_aggregation", device="cpu"
    ) as system:
        first = system.solve(B[:, 0])
        system.update(blocks_of_jumps(3e3)[0])
        second = system.solve(B[:, 0])
        inverse = system._system._M.level.inverse
    assert isinstance(inverse, InnerIterations)
    assert first.converged
    assert second.converged
    assert second.iterations <= 9
    assert "its aggregates follow strong couplings, as the stiffness jumps" in first.explain()


class StiffBlocks:
    """Blocks of four elements a side, of which a fifth is stiff."""

    def layer(self, index, shape):
        rng = np.random.default_rng(index // 4)
        hard = rng.random(tuple(-(-count // 4) for count in shape)) < 0.2
        return np.kron(np.where(hard, 1e4, 1.0), np.ones((4, 4)))[: shape[0], : shape[1]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["bsr", "symmetric_bsr"])
def test_elasticity_with_stiff_pieces(name, device):
    beam, there = Cantilever(nodes=17, dof=3, material=StiffBlocks()), Device.parse(device)
    matrix, b = beam.matrix(name).to_device(there), there.asarray(beam.load())
    with there.current():
        M = smoothed_aggregation(matrix, coordinates=beam.mesh.coordinates())
        result = cg(matrix, b, M=M, rtol=1e-8)

    assert M.level.jumps
    assert result.converged
    assert result.iterations < 40


@pytest.mark.parametrize("dof", [1, 3, 6])
def test_smooth_matrices_keep_their_aggregates(dof):
    beam = Cantilever(nodes=9, dof=dof)
    matrix = beam.matrix("bsr" if dof > 1 else "csr")
    assert not smoothed_aggregation(matrix, coordinates=None if dof == 1 else beam.mesh.coordinates()).level.jumps


@pytest.mark.parametrize("zeros", [False, True])
def test_other_diagonals_alone_are_no_jump(zeros):
    """Rows of unit diagonals among stiff ones, as of held nodes, couple with nothing: no coupling is weak."""
    beam = Cantilever(nodes=9, dof=3)
    matrix = beam.matrix("bsr").to_csr() * 1e9
    held = np.flatnonzero(np.random.default_rng(3).random(matrix.shape[0] // 3) < 0.1)
    held = (3 * held[:, None] + np.arange(3)).ravel()
    kept = np.ones(matrix.shape[0])
    kept[held] = 0.0
    row = np.repeat(np.arange(len(kept)), np.diff(matrix.indptr))
    matrix.data *= kept[row] * kept[matrix.indices]  # which keeps zeros
    matrix.data[(row == matrix.indices) & (kept[row] == 0.0)] = 1.0
    if not zeros:
        matrix.eliminate_zeros()
    M = smoothed_aggregation(
        BsrMatrix.from_csr(CsrMatrix.from_csr(matrix), block_size=3), coordinates=beam.mesh.coordinates()
    )
    assert not M.level.jumps


def test_a_diagonal_matrix_has_no_couplings_that_jump():
    diagonal = 10.0 ** np.random.default_rng(2).uniform(-4, 4, 500)
    assert not smoothed_aggregation(scipy.sparse.diags_array(diagonal).tocsr()).level.jumps


@pytest.mark.parametrize("free", [0, 10**12])
def test_a_coarse_matrix_that_would_be_too_large_is_not_made(monkeypatch, free):
    matrix = as_operator(jumping((12, 12, 12)))
    monkeypatch.setattr(type(CPU), "free_nbytes", lambda self: free)
    if free:
        monkeypatch.setattr(strong_aggregates, "_MOST_VECTORS", 0.1)
    norms = matrix.diagonal_blocks(1).ravel()
    assert strong_aggregates.stiffness_jumps(norms)
    assert strong_aggregates.strong_aggregates(matrix, norms, 1, 1, 125, 2) is None
