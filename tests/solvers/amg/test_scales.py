"""Coarse levels of matrices whose rows have very different scales: penalties, parts that nothing holds, tiny numbers."""

import numpy as np
import pytest
import scipy.sparse
from seven_point import seven_point

from penstock.fem import Cantilever
from penstock.solvers import cg, multigrid, smoothed_aggregation
from penstock.spmv import CsrMatrix
from penstock.streaming import HostStore, StreamedMatrix


def iterations(make, csr, b, **options):
    A = CsrMatrix.from_csr(csr)
    result = cg(A, b, M=make(A, **options), rtol=1e-8, maxiter=200)
    assert result.converged
    return result.iterations


@pytest.mark.parametrize("make", [smoothed_aggregation, multigrid])
@pytest.mark.parametrize("penalty", [1e8, 1e11, 1e14, 1e30])
def test_rows_that_a_penalty_holds_cost_hardly_any_iterations(make, penalty):
    """Entries of the coarse matrix were zero compared to the penalty, and corrections of most of the body left out."""
    beam = Cantilever(nodes=(33, 9, 9), dof=3)
    csr = beam.matrix().to_csr()
    options = {"near_null_space": beam.rigid_body_modes(), "block_size": 3}
    held = np.zeros(csr.shape[0])
    held[-243:] = 1.0  # the free end, whose rows couple with those before
    assert abs(csr[-243:, :-243]).sum() > 0
    stiff = scipy.sparse.csr_array(csr + scipy.sparse.diags_array(held * penalty * csr.diagonal().max()))
    free = scipy.sparse.diags_array(1.0 - held)
    fixed = scipy.sparse.csr_array(free @ csr @ free + scipy.sparse.diags_array(held))

    assert iterations(make, stiff, 1.0 - held, **options) <= 3 + iterations(make, fixed, 1.0 - held, **options)


@pytest.mark.parametrize("penalty", [1e9, 1e10, 1e11, 1e12, 1e20])
def test_unknowns_held_here_and_there_are_not_taken_for_jumps_of_the_stiffness(penalty):
    beam = Cantilever(nodes=(9, 9, 9), dof=3)
    csr = beam.matrix().to_csr()
    held = np.random.default_rng(4).random(csr.shape[0]) < 0.05
    stiff = scipy.sparse.csr_array(csr + scipy.sparse.diags_array(held * penalty * csr.diagonal().max()))

    options = {"coordinates": beam.mesh.coordinates(), "block_size": 3}
    assert iterations(smoothed_aggregation, stiff, np.ones(csr.shape[0]), **options) <= 10


@pytest.mark.parametrize("penalty", [0.0, 1e8, 1e14, 1e20])
@pytest.mark.parametrize("grouped", ["lines", True])
def test_lines_and_groups_of_nodes_are_measured_past_a_penalty(grouped, penalty):
    side = 14
    line, identity = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(side,) * 2), np.eye(side)
    across = scipy.sparse.kron(line, identity) + scipy.sparse.kron(identity, line)
    csr = scipy.sparse.kron(across, identity) + 1000.0 * scipy.sparse.kron(np.eye(side**2), line)
    held = np.zeros(side**3)
    held[: side**2] = 2000.0 * penalty
    csr = scipy.sparse.csr_array(csr + scipy.sparse.diags_array(held))

    assert iterations(smoothed_aggregation, csr, np.where(held > 0, 0.0, 1.0), grouped=grouped) <= 8


@pytest.mark.parametrize("make", [smoothed_aggregation, multigrid])
@pytest.mark.parametrize("side", [2, 3, 5])
def test_a_closed_pocket_beside_a_large_part_is_left_to_the_smoother(make, side):
    """Its constant function has an energy of rounding, possibly a negative one; b is in the range of the matrix."""
    csr = scipy.sparse.csr_array(scipy.sparse.block_diag([seven_point(20), seven_point(side, held=False)]))
    b = csr @ np.random.default_rng(0).standard_normal(csr.shape[0])

    assert iterations(make, csr, b) < 12


@pytest.mark.parametrize("make", [smoothed_aggregation, multigrid])
@pytest.mark.parametrize("scale", [1e-60, 1e-20, 1e20, 1e60])
def test_the_scale_of_the_whole_does_not_matter(make, scale):
    beam = Cantilever(nodes=(33, 9, 9), dof=3)
    csr, b = beam.matrix().to_csr(), beam.load()
    options = {"near_null_space": beam.rigid_body_modes(), "block_size": 3}

    assert iterations(make, csr * scale, b, **options) == iterations(make, csr, b, **options)


def test_a_streamed_matrix_with_a_penalty_takes_no_more_iterations():
    csr = seven_point(14)
    held = np.zeros(csr.shape[0])
    held[:196] = 6e18
    stiff = scipy.sparse.csr_array(csr + scipy.sparse.diags_array(held))
    b = np.where(held > 0, 0.0, 1.0)
    store = HostStore.create([stiff[start : start + 686] for start in range(0, 2744, 686)])
    with store, StreamedMatrix(store, 3 * max(store.index.sizes["whole"])) as A:
        found = cg(A, b, M=smoothed_aggregation(A), rtol=1e-8, maxiter=200)

    assert found.converged
    assert found.iterations <= iterations(smoothed_aggregation, csr, b) + 1
