"""Motions without energy of the parts of a coarse level, and its products where diagonal entries were replaced."""

import numpy as np
import pytest
import scipy.sparse
from modes_reference import chain
from seven_point import seven_point

from penstock.solvers import smoothed_aggregation
from penstock.solvers.eigen.coarse_modes import coarse_mass
from penstock.solvers.eigen.free_motions import free_motions, parts_of
from penstock.solvers.eigen.mass import as_mass
from penstock.spmv import CPU, CsrMatrix

CHAINS, POINTS, ZERO = 3, 5, 1e-10


@pytest.fixture(scope="module")
def level():
    """The coarse level, and its mass, of a body that is held beside chains that nothing holds."""
    K = scipy.sparse.csr_array(scipy.sparse.block_diag([seven_point(12)] + CHAINS * [chain(POINTS)]))
    M = smoothed_aggregation(CsrMatrix.from_csr(K))
    return M.level, coarse_mass(M, as_mass(None, K.shape[0], 1, CPU))


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_each_part_that_nothing_holds_has_a_motion(level, most):
    level, mass = level
    found = free_motions(level, mass, ZERO, most, parts_of(level.A))
    assert found.shape[1] == min(most, CHAINS)
    np.testing.assert_allclose(found.T @ mass.apply(found), np.eye(found.shape[1]), atol=1e-12)
    assert np.abs(level.energy_product(found)).max() < 1e-12
    # They are zero on parts that are not theirs.
    assert not (np.abs(found) > 0).sum(axis=1).max() > 1


def test_products_leave_replaced_diagonal_entries_out(level):
    level, _ = level
    vectors = np.random.default_rng(0).standard_normal((level.A.shape[0], 2))
    products, of_stored = level.energy_product(vectors), level.A.apply(vectors)
    assert level.vanishing.sum() == CHAINS
    assert np.array_equal(products[~level.vanishing], of_stored[~level.vanishing])
    assert not products[level.vanishing].any()
    assert of_stored[level.vanishing].all()
