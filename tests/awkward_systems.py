"""Matrices for which nodes alone are too small: flat elements, and coefficients that jump."""

import numpy as np
import scipy.sparse


def flat_hexahedra(nodes, ratio):
    """Trilinear finite elements of a Laplacian, of the height ``1 / ratio``, with the plane x = 0 held."""
    K, M = [], []
    for count, height in zip(nodes, (1.0, 1.0, 1 / ratio), strict=True):
        ends = np.ones(count)
        ends[[0, -1]] = 0.5
        K.append(
            scipy.sparse.diags_array([-np.ones(count - 1), 2 * ends, -np.ones(count - 1)], offsets=[-1, 0, 1]) / height
        )
        M.append(
            scipy.sparse.diags_array([np.ones(count - 1), 4 * ends, np.ones(count - 1)], offsets=[-1, 0, 1])
            * height
            / 6
        )
    parts = ((K[0], M[1], M[2]), (M[0], K[1], M[2]), (M[0], M[1], K[2]))
    A = sum(scipy.sparse.kron(scipy.sparse.kron(x, y), z) for x, y, z in parts).tocsr()
    free = np.arange(nodes[1] * nodes[2], A.shape[0])
    A = A[free][:, free].tocsr()
    A.sort_indices()
    return A


def jumping(nodes=(9, 9, 10), contrast=1e4, seed=0):
    """Seven-point finite volumes whose coefficients jump between cells at random; all around is held."""
    rng = np.random.default_rng(seed)
    k = np.where(rng.random(tuple(n + 2 for n in nodes)) < 0.5, 1.0, contrast)
    number = -np.ones(k.shape, dtype=int)
    number[1:-1, 1:-1, 1:-1] = np.arange(np.prod(nodes)).reshape(nodes)
    rows, columns, values = [], [], []
    for axis in range(3):
        low = tuple(slice(None, -1) if a == axis else slice(None) for a in range(3))
        high = tuple(slice(1, None) if a == axis else slice(None) for a in range(3))
        mean = (2 * k[low] * k[high] / (k[low] + k[high])).ravel()
        i, j = number[low].ravel(), number[high].ravel()
        for one, other in ((i, j), (j, i)):
            own = one >= 0
            rows.append(one[own]), columns.append(one[own]), values.append(mean[own])
            both = own & (other >= 0)
            rows.append(one[both]), columns.append(other[both]), values.append(-mean[both])
    n = int(np.prod(nodes))
    A = scipy.sparse.coo_array((np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape=(n, n))
    return A.tocsr()


def diffusion(coefficients, stretch=(1.0, 1.0, 1.0)):
    """Finite volumes with harmonic means of the coefficients between cells, and a value given beside the first layer."""
    shape, number = coefficients.shape, np.arange(coefficients.size).reshape(coefficients.shape)
    parts = []
    for axis, factor in enumerate(stretch):
        one, other = (np.moveaxis(coefficients, axis, 0)[part] for part in (slice(0, -1), slice(1, None)))
        i, j = (np.moveaxis(number, axis, 0)[part].ravel() for part in (slice(0, -1), slice(1, None)))
        parts.append((i, j, (factor * 2 * one * other / (one + other)).ravel()))
    i, j, flow = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    n = int(np.prod(shape))
    A = scipy.sparse.coo_array(
        (-np.tile(flow, 2), (np.concatenate([i, j]), np.concatenate([j, i]))), shape=(n, n)
    ).tocsr()
    diagonal = -A.sum(axis=1)
    diagonal[number[0].ravel()] += 2 * coefficients[0].ravel()
    return (A + scipy.sparse.diags_array(diagonal)).tocsr()
