"""Whether constants count as slow modes of a matrix, by all of its rows or by some."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
from kernel_targets import DEVICES

from penstock.driver import slow_modes
from penstock.fem import Cantilever, LognormalMaterial
from penstock.spmv import CsrMatrix


def elasticity(shift: float) -> scipy.sparse.csr_array:
    A = Cantilever(nodes=(14, 9, 8), dof=3, material=LognormalMaterial(sigma=0.5)).matrix("csr").to_csr()
    return scipy.sparse.csr_array(A + shift * A.diagonal().mean() * scipy.sparse.eye_array(A.shape[0]))


def line(shifted: np.ndarray) -> scipy.sparse.csr_array:
    """Return a Laplacian on a line with a reaction in some of the rows."""
    A = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(len(shifted),) * 2)
    return scipy.sparse.csr_array(A + scipy.sparse.diags_array(shifted.astype(float)))


def laminate(layers: list[int]) -> scipy.sparse.csr_array:
    """Return three layers of nodes, of which some react; the number of a node begins with its place in the plane."""
    layer = scipy.sparse.csgraph.laplacian(scipy.sparse.diags_array([1.0, 1.0], offsets=[-1, 1], shape=(60, 60)))
    plane = scipy.sparse.kronsum(layer, layer)
    across = scipy.sparse.csgraph.laplacian(scipy.sparse.diags_array([1.0, 1.0], offsets=[-1, 1], shape=(3, 3)))
    reacting = np.tile(np.isin(np.arange(3), layers), 3600).astype(float)
    return scipy.sparse.csr_array(scipy.sparse.kronsum(across, plane) + scipy.sparse.diags_array(reacting))


SPREAD = np.modf(np.arange(4000) * (np.sqrt(5) - 1) / 2)[0]
# A matrix, the unknowns of a node, and whether constants are slow.
CASES = {
    "elasticity": (elasticity(0.0), 3, True),
    "a constant of all unknowns": (elasticity(0.0), 1, True),
    "shifted, as a time step": (elasticity(0.1), 3, False),
    "reaction in few rows": (line(SPREAD < 0.3), 1, True),
    "reaction in half of the rows": (line(SPREAD < 0.5), 1, False),
    "one of three layers reacts": (laminate([0]), 1, True),
    "two of three layers react": (laminate([1, 2]), 1, False),
}


@pytest.mark.parametrize("step", [1, 2, 3, 5, 6.4])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device", DEVICES)
def test_some_rows_tell_whether_constants_are_slow(device, case, step, monkeypatch):
    """Also where the steps between them are those between the unknowns of nodes, or between nodes of a layer."""
    A, block_size, slow = CASES[case]
    monkeypatch.setattr(slow_modes, "_SAMPLE", int(A.shape[0] / step))

    assert slow_modes.constants_are_slow(CsrMatrix.from_csr(A).to_device(device), block_size) is slow


@pytest.mark.parametrize("step", [1, 7])
@pytest.mark.parametrize(("wide", "banded"), [(0.05, True), (0.2, False)])
def test_some_rows_tell_whether_most_have_all_entries_near_the_diagonal(wide, banded, step, monkeypatch):
    monkeypatch.setattr(slow_modes, "_SAMPLE", 4000 // step)
    far = np.flatnonzero(wide > SPREAD)
    links = scipy.sparse.csr_array((np.full(len(far), -1e-3), (far, (far + 2000) % 4000)), shape=(4000, 4000))
    A = scipy.sparse.csr_array(line(np.zeros(4000)) + links)
    A.sort_indices()

    assert slow_modes.has_band(CsrMatrix.from_csr(A)) is banded
