"""Small symmetric positive definite systems of several kinds, and residuals in long double."""

import numpy as np
import scipy.sparse


def random_graph(rng, low, high, weights=None):
    n = int(rng.integers(low, high))
    pattern = scipy.sparse.random_array((n, n), density=6 / n, rng=rng, data_sampler=weights)
    return pattern + pattern.T


def laplacian_of(graph):
    return scipy.sparse.diags_array(graph.sum(axis=1)) - graph


def graph_laplacian(rng):
    A = laplacian_of(random_graph(rng, 20, 400))
    return A + rng.choice([1e-6, 1e-3, 1.0]) * scipy.sparse.eye_array(A.shape[0]), 1


def singular(rng):
    """Constants are in the kernel; the right-hand side is orthogonal to them."""
    side = int(rng.integers(5, 20))
    line = laplacian_of(scipy.sparse.diags_array([np.ones(side - 1)] * 2, offsets=[-1, 1]))
    one = scipy.sparse.eye_array(side)
    return scipy.sparse.kron(line, one) + 10.0 ** rng.uniform(-2, 0) * scipy.sparse.kron(one, line), 1


def anisotropic(rng):
    side = int(rng.integers(5, 20))
    line = scipy.sparse.diags_array([-np.ones(side - 1), 2 * np.ones(side), -np.ones(side - 1)], offsets=[-1, 0, 1])
    one, other = scipy.sparse.eye_array(side), 10.0 ** rng.uniform(-4, 0)
    return scipy.sparse.kron(line, one) + other * scipy.sparse.kron(one, line), 1


def badly_scaled(rng):
    A, _ = anisotropic(rng)
    scale = scipy.sparse.diags_array(10.0 ** rng.uniform(-3, 3, A.shape[0]))
    return scale @ A @ scale, 1


def jumps(rng):
    """Diffusion with conductivities of 1 and 1000 at random."""
    graph = random_graph(rng, 50, 400, weights=lambda size: rng.choice([1.0, 1000.0], size))
    return laplacian_of(graph) + 1e-3 * scipy.sparse.eye_array(graph.shape[0]), 1


def blocks(rng):
    """One to six unknowns a node, coupled by random positive definite blocks on every edge."""
    size = int(rng.integers(1, 7))
    graph = scipy.sparse.triu(random_graph(rng, 20, 120), 1).tocoo()
    n, (i, j) = graph.shape[0], graph.coords
    half = rng.standard_normal((graph.nnz, size, size))
    stiffness = graph.data[:, None, None] * (half @ half.swapaxes(1, 2) + 0.1 * np.eye(size))
    rows, columns = np.concatenate([i, j, i, j]), np.concatenate([i, j, j, i])
    values = np.concatenate([stiffness, stiffness, -stiffness, -stiffness])
    places = np.arange(size)
    of_rows = (rows[:, None, None] * size + places[:, None] + 0 * places).reshape(-1)
    of_columns = (columns[:, None, None] * size + 0 * places[:, None] + places).reshape(-1)
    A = scipy.sparse.coo_array((values.reshape(-1), (of_rows, of_columns)), shape=(n * size, n * size))
    return A + 1e-3 * scipy.sparse.eye_array(n * size), size


KINDS = (graph_laplacian, singular, anisotropic, badly_scaled, jumps, blocks)


def residual(S, b, x):
    """Relative to b, in long double."""
    S, r = scipy.sparse.coo_array(S), b.astype(np.longdouble)
    np.subtract.at(r, S.coords[0], S.data.astype(np.longdouble) * x.astype(np.longdouble)[S.coords[1]])
    return float(np.sqrt(r @ r)) / np.linalg.norm(b)
