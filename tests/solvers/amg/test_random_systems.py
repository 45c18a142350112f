"""504 random systems: what has converged has in long double, and no more sweeps than a Chebyshev polynomial but for a few."""

import numpy as np
import pytest
import scipy.sparse
from random_systems import KINDS, residual

import penstock
from penstock.solvers import cg, chebyshev, smoothed_aggregation
from penstock.spmv import CsrMatrix, format_named

CASES = [pytest.param(kind, seed, id=f"{kind.__name__}-{seed}") for kind in KINDS for seed in range(84)]


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_it_converges_to_the_true_residual_in_few_sweeps(kind, seed):
    rng = np.random.default_rng(seed)
    S, size = kind(rng)
    S = scipy.sparse.csr_array(S)
    S.sort_indices()
    name = rng.choice(["csr", "bsr", "symmetric_bsr"])
    A = CsrMatrix.from_csr(S)
    if name != "csr":
        A = format_named(str(name)).from_csr(A, block_size=size)
    b = S @ rng.standard_normal(S.shape[0])

    found = cg(A, b, M=smoothed_aggregation(A, block_size=size), rtol=1e-8)

    alone = cg(A, b, M=chebyshev(A, 13, block_size=size), rtol=1e-8)
    assert found.converged or not alone.converged
    if found.converged:
        assert residual(S, b, found.x) <= 1.001e-8
    solved = penstock.solve(S, b, device="cpu")
    assert residual(S, b, solved.x) <= 1.001e-8 if solved.converged else not alone.converged
    assert found.iterations <= 1.3 * alone.iterations + 3
