"""The centre of points is found by every kind of device."""

import numpy as np
import pytest
from kernel_targets import TARGETS

from penstock.spmv.compilation.table import find_kernel


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("nodes", "dimensions"), [(1, 2), (40_001, 3), (300, 2)])
def test_points_are_moved_to_their_mean(target, nodes, dimensions):
    points = np.random.default_rng(nodes).uniform(-1, 3, (nodes, dimensions))

    with target.running():
        sums = find_kernel("points", "sum", target.device_kind)(target.put(points))
        found = find_kernel("points", "centre", target.device_kind)(target.put(points), np.array(sums) / nodes)

    np.testing.assert_allclose(sums, points.sum(axis=0), rtol=1e-12)
    np.testing.assert_allclose(target.get(found), points - points.mean(axis=0), atol=1e-14)
