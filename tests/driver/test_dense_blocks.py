"""The unknowns of a node are found in matrices of every format, where preconditioners have a use for them."""

import numpy as np
import pytest
import scipy.sparse

import penstock
from penstock.driver.placement import dense_block_size
from penstock.fem import Cantilever
from penstock.spmv import format_named

BEAM = Cantilever(nodes=(13, 7, 7), dof=3)
A, B = BEAM.matrix().to_csr(), BEAM.load()
SCALAR = ("coo", "ell", "hyb", "sell")


def stored(name):
    return format_named(name).from_csr(A)


@pytest.mark.parametrize("name", SCALAR)
def test_multigrid_by_name_knows_the_unknowns_of_a_node(name):
    blocks = penstock.solve(BEAM.matrix("bsr"), B, device="cpu", preconditioner="multigrid")
    result = penstock.solve(stored(name), B, device="cpu", preconditioner="multigrid")

    assert result.converged
    assert result.iterations == blocks.iterations < 20


@pytest.mark.parametrize("name", SCALAR)
def test_what_is_chosen_for_a_scalar_format_knows_them_too(name):
    assert "choice      block_jacobi" in penstock.prepare(stored(name), device="cpu").explain()
    assert penstock.solve(stored(name), B, device="cpu", preconditioner="block_jacobi").converged


def test_a_block_size_that_is_given_stays():
    given = penstock.prepare(stored("coo"), device="cpu", block_size=1)
    assert "choice      jacobi" in given.explain()


def test_a_scalar_format_that_is_streamed_is_cut_anywhere():
    result = penstock.solve(stored("coo"), B, device="cpu", memory="200 KiB")
    assert result.converged
    assert "preconditioner block" not in result.explain()


def test_a_large_matrix_is_recognised_by_rows_in_its_middle():
    rows = 60_000
    scalar = scipy.sparse.diags_array([-1.0, 4.0, -1.0], offsets=[-1, 0, 1], shape=(rows, rows))
    block = scipy.sparse.kron(scipy.sparse.eye_array(rows // 3), np.ones((3, 3)) + 3 * np.eye(3))
    for name in SCALAR:
        assert [dense_block_size(format_named(name).from_csr(M.tocsr())) for M in (scalar, block)] == [1, 3]
