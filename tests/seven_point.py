"""The seven-point matrix of a cube of points."""

import scipy.sparse


def seven_point(side, *, held=True):
    """Return the matrix of ``side`` points in each direction; all around it the points are held, or nothing holds it."""
    line = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(side, side)).tolil()
    if not held:
        line[0, 0] = line[-1, -1] = 1.0
    one = scipy.sparse.eye_array(side)
    parts = ((line, one, one), (one, line, one), (one, one, line))
    return scipy.sparse.csr_array(sum(scipy.sparse.kron(scipy.sparse.kron(x, y), z) for x, y, z in parts))
