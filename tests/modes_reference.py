"""Systems with modes of interest, boxes and chains, and the lowest modes of any system by SciPy."""

import numpy as np
import scipy.linalg
import scipy.sparse
from scipy.sparse.linalg import eigsh

from penstock.fem import Cantilever


def reference(K, M, k, shift=0.0):
    """Return the lowest k eigenvalues by shift-invert; unknowns without mass are left out.

    Some more are looked for: of a multiple value at the end SciPy may miss a copy.
    """
    heavy = np.flatnonzero(M.diagonal() > 0)
    K, M = (A.tocsc()[heavy][:, heavy] for A in (K, M))
    more = k + 8
    if more > len(heavy) // 2:
        return scipy.linalg.eigh(K.toarray(), M.toarray(), eigvals_only=True)[:k]
    return np.sort(eigsh(K, more, M=M, sigma=shift, return_eigenvectors=False, tol=1e-13, ncv=3 * more))[:k]


def box(nodes, lengths=1.0, dof=3, k=10, lumped=False, **more):
    """Return K, M, coordinates and k of a box of bricks."""
    beam = Cantilever(nodes=nodes, dof=dof, lengths=lengths, **more)
    M = beam.mass(lumped=lumped)
    return beam.matrix().to_csr(), M, beam.mesh.coordinates(), k


def chain(points):
    """The matrix of a chain of points that nothing holds."""
    ends = np.full(points, 2.0)
    ends[[0, -1]] = 1.0
    return scipy.sparse.diags_array([-np.ones(points - 1), ends, -np.ones(points - 1)], offsets=[-1, 0, 1])
