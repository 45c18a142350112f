"""Numbers of rows that stand for all rows."""

import numpy as np
import pytest

from penstock.spmv.formats.statistics import spread


@pytest.mark.parametrize("count", [0, 1, 5])
def test_few_are_all_taken(count):
    assert spread(count, 5).tolist() == list(range(count))


@pytest.mark.parametrize(("count", "most"), [(7, 5), (3000, 1000), (3002, 1000), (10**6 + 1, 999), (10**10, 1000)])
def test_each_of_equal_intervals_has_one(count, most):
    numbers = spread(count, most)

    assert (numbers >= np.floor(np.arange(most) * (count / most))).all()
    assert (numbers <= (np.arange(most) + 1) * (count / most)).all()
    assert numbers.max() < count


@pytest.mark.parametrize("period", [2, 3, 5, 6, 64])
@pytest.mark.parametrize("count", [64 * 3000, 64 * 3000 + 2])
def test_they_fall_into_step_with_no_period(count, period):
    """Such as the unknowns of a node, or the layers of a mesh, also where there are as many intervals."""
    shares = np.bincount(spread(count, count // period) % period, minlength=period) / (count // period)

    assert np.allclose(shares, 1 / period, atol=0.01)
