"""Systems shared by the tests of solvers."""

import numpy as np
import pytest
from block_solves import PRECONDITIONERS, right_hand_sides, staggered

from penstock.fem import Cantilever, LognormalMaterial


@pytest.fixture(autouse=True, scope="module")
def always_in_one_thread(one_thread):
    """These systems are small."""


@pytest.fixture(scope="session")
def beam():
    """A cantilever of random stiffness with 252 unknowns; plain CG needs about as many iterations."""
    return Cantilever(nodes=(7, 4, 3), dof=3, material=LognormalMaterial(sigma=1.0, seed=3))


@pytest.fixture(scope="session")
def A(beam):
    return beam.matrix()


@pytest.fixture(scope="session")
def b(beam):
    """The end load; read-only, so that a solver that writes to its right-hand side is found out."""
    load = beam.load()
    load.flags.writeable = False
    return load


@pytest.fixture(scope="session")
def spd():
    """``spd(n, condition, seed)`` is a dense symmetric matrix with eigenvalues from 1 / condition to 1."""

    def make(n, condition, seed=0):
        rng = np.random.default_rng(seed)
        q, _ = np.linalg.qr(rng.standard_normal((n, n)))
        matrix = q @ (np.geomspace(1 / condition, 1, n)[:, None] * q.T)
        return (matrix + matrix.T) / 2

    return make


@pytest.fixture(scope="module")
def dense(A):
    return A.to_csr().toarray()


@pytest.fixture(params=PRECONDITIONERS)
def preconditioner(request):
    """Makes one for a matrix."""
    return PRECONDITIONERS[request.param]


@pytest.fixture(scope="module")
def hard():
    """Five columns that leave the block one by one, of which one starts so far away that the search starts again."""
    B, atol = staggered()
    X0 = np.zeros_like(B)
    X0[:, 1] = 1e10 * right_hand_sides(252, 1, seed=1)[:, 0]
    return B, X0, atol
