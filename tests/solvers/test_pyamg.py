"""Preconditioners of another library: a hierarchy of pyamg."""

import numpy as np
import pytest
from kernel_targets import DEVICES

from penstock.fem import Cantilever
from penstock.solvers import block_cg, block_jacobi, cg

pyamg = pytest.importorskip("pyamg")


@pytest.fixture(scope="module")
def beam():
    return Cantilever(nodes=(17, 5, 5), dof=3)


@pytest.fixture(scope="module")
def multigrid(beam):
    matrix = beam.matrix().to_csr().tobsr((3, 3))
    return pyamg.smoothed_aggregation_solver(matrix, B=beam.rigid_body_modes(), symmetry="hermitian").aspreconditioner()


@pytest.mark.parametrize("device", DEVICES)
def test_a_hierarchy_takes_far_fewer_iterations_for_one_and_for_several(beam, multigrid, device):
    A, b = beam.matrix().to_device(device), beam.load()
    B = np.stack([b, beam.load("axial")], axis=1)
    b, B = A.device.asarray(b), A.device.asarray(B)

    alone = cg(A, b, M=multigrid, rtol=1e-8)
    block = block_cg(A, B, M=multigrid, rtol=1e-8)

    assert alone.converged
    assert block.converged
    assert max(alone.iterations, block.iterations) < cg(A, b, M=block_jacobi(A, 3), rtol=1e-8).iterations / 4
