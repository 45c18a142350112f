"""CSR on CUDA: the product is right with any number of lanes on a row."""

import dataclasses

import numpy as np
import pytest
import scipy.sparse
from kernel_targets import TARGETS
from tolerances import product_bound

from penstock.spmv import CsrMatrix
from penstock.spmv.compilation.table import find_kernel

GPU_TARGETS = [target for target in TARGETS if target.id != "cpu"]


@pytest.mark.parametrize("target", GPU_TARGETS)
@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("whole", [True, False], ids=["int64", "int32"])
def test_the_product_is_right_for_any_number_of_lanes(lanes, whole, target):
    A = scipy.sparse.random_array((131, 90), density=0.3, rng=np.random.default_rng(lanes), format="csr")
    matrix = dataclasses.replace(CsrMatrix.from_csr(A), lanes=lanes)
    matrix = matrix if whole else matrix.rows(0, 131)
    x = np.random.default_rng(1).uniform(-1, 1, 90)
    out = target.put(np.full(131, np.nan))

    with target.running():
        find_kernel("csr", "spmv", "cuda")(target.put_matrix(matrix), target.put(x), out, 1.0, 0.0)

    assert (np.abs(target.get(out) - A @ x) <= product_bound(abs(A), x, x, 1.0, 0.0, np.float64)).all()
    assert matrix.rows(0, 50).lanes == lanes, "slabs keep the lanes of the whole matrix"
