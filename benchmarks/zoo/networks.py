"""Graphs, images and statistics: Laplacians of networks, and precision matrices."""

from __future__ import annotations

import graphs
import numpy as np
import scipy.sparse
from scipy.spatial import Delaunay, cKDTree

from penstock.spmv import CPU
from zoo.laplacian import laplacian
from zoo.meshes import box, connected, gaussian_field
from zoo.system import Array, Generator, System, family


def _balanced(A: Array, rng: Generator) -> System:
    """Return a Laplacian whose constants are given, with sources and sinks in balance."""
    b = rng.standard_normal(A.shape[0])
    return System(A, b - b.mean(), null_space="constants", dimensions=2)


def _largest(lines: Array, n: int, *others: Array) -> tuple[int, Array, tuple[Array, ...]]:
    """Return the largest connected part of a graph, its nodes numbered anew."""
    there = connected(lines, n)
    used, numbers = np.unique(lines[there], return_inverse=True)
    return used.size, numbers.reshape(-1, 2), tuple(of[there] for of in others)


@family
def preferential_attachment(size: int, rng: Generator) -> System:
    """The Laplacian of a network in which old nodes have the most neighbours, thousands of them, as links of web pages.

    Barabasi and Albert, "Emergence of scaling in random networks" (Science 286, 1999).
    """
    A = graphs.power_law(CPU, size, degree=4, seed=int(rng.integers(1 << 30))).to_csr()
    return _balanced(scipy.sparse.csr_array(A) - scipy.sparse.eye_array(size), rng)


@family
def geometric_graph(size: int, rng: Generator) -> System:
    """The Laplacian of random points in space that are joined where they are near, weighted by the distance.

    As in semi-supervised learning: Zhu, Ghahramani and Lafferty, "Semi-supervised learning using Gaussian fields and harmonic
    functions" (ICML 2003). One point in a hundred has a label, which leaves it out of the unknowns.
    """
    points = rng.random((size, 3))
    lines = cKDTree(points).query_pairs((12 / size / 4.19) ** (1 / 3), output_type="ndarray")
    distances = np.linalg.norm(points[lines[:, 0]] - points[lines[:, 1]], axis=1)
    n, lines, (distances,) = _largest(lines, size, distances)
    A = laplacian(n, lines, np.exp(-((distances / distances.mean()) ** 2)))
    known = rng.random(n) < 0.01
    known[0] = True
    return System(A[~known][:, ~known], -A[~known][:, known] @ rng.choice([-1.0, 1.0], known.sum()))


@family
def road_network(size: int, rng: Generator) -> System:
    """The Laplacian of a road network: planar, most crossings of three roads, and long chains of points along them.

    Weights are inverse lengths. Its like are the road networks of DIMACS challenges on shortest paths and clustering.
    """
    crossings = rng.random((max(12, size // 6), 2))
    triangles = Delaunay(crossings).simplices
    lines = np.unique(np.sort(triangles[:, [[0, 1], [1, 2], [2, 0]]].reshape(-1, 2), axis=1), axis=0)
    lengths = np.linalg.norm(crossings[lines[:, 0]] - crossings[lines[:, 1]], axis=1)
    kept = (rng.random(len(lines)) < 0.55) & (lengths < 4 * np.median(lengths))
    n, lines, (lengths,) = _largest(lines[kept], len(crossings), lengths[kept])
    parts = 1 + rng.geometric(0.25, len(lines))  # of each road
    inner = parts - 1
    begins = n + np.cumsum(inner) - inner
    road = np.repeat(np.arange(len(lines)), parts)
    place = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    first = np.where(place == 0, lines[road, 0], begins[road] + place - 1)
    last = np.where(place == inner[road], lines[road, 1], begins[road] + place)
    weights = parts[road] / lengths[road]
    return _balanced(laplacian(n + int(inner.sum()), np.stack([first, last], axis=1), weights), rng)


@family
def small_world(size: int, rng: Generator) -> System:
    """A ring with random short cuts (Watts and Strogatz, Nature 393, 1998): no coarse grid of it is sparse."""
    own = np.arange(size)
    far = np.flatnonzero(rng.random(size) < 0.1)
    lines = [np.stack([own, (own + by) % size], axis=1) for by in (1, 2, 3)]
    lines.append(np.stack([far, rng.integers(size, size=far.size)], axis=1))
    joined = np.concatenate(lines)
    joined = joined[joined[:, 0] != joined[:, 1]]
    return _balanced(laplacian(size, joined, rng.uniform(0.5, 2.0, len(joined))), rng)


@family
def interior_point(size: int, rng: Generator) -> System:
    """Normal equations of a late interior-point step of a flow in a network: weights of the lines from 1e-5 to 1e5.

    Resende and Veiga, "An implementation of the dual affine scaling algorithm for minimum-cost flow on bipartite uncapacitated
    networks" (SIAM J. Optim. 3, 1993). One node is the reference and left out.
    """
    points = rng.random((size + 1, 2))
    lines = np.unique(np.sort(Delaunay(points).simplices[:, [[0, 1], [1, 2], [2, 0]]].reshape(-1, 2), axis=1), axis=0)
    A = laplacian(size + 1, lines, 10 ** rng.uniform(-5, 5, len(lines)))
    return System(A[1:][:, 1:], rng.standard_normal(size), dimensions=2)


@family
def segmentation(size: int, rng: Generator) -> System:
    """Segmentation of a noisy image by random walks from a few marked pixels, which are left out of the unknowns.

    Grady, "Random walks for image segmentation" (IEEE Trans. Pattern Anal. Mach. Intell. 28, 2006), beta 90.
    """
    side = max(12, round(size**0.5))
    image = (gaussian_field((side, side), side / 12, rng) > 0) + 0.15 * rng.standard_normal((side, side))
    image = (image - image.min()) / np.ptp(image)
    numbers = np.arange(side**2).reshape(side, side)
    lines = np.concatenate([
        np.stack([numbers[:-1].ravel(), numbers[1:].ravel()], axis=1),
        np.stack([numbers[:, :-1].ravel(), numbers[:, 1:].ravel()], axis=1),
    ])  # fmt: skip
    steps = image.ravel()[lines[:, 0]] - image.ravel()[lines[:, 1]]
    A = laplacian(side**2, lines, np.exp(-90 * steps**2) + 1e-6)
    marked = np.zeros(side**2, bool)
    marked[rng.choice(side**2, 12, replace=False)] = True
    return System(A[~marked][:, ~marked], -A[~marked][:, marked] @ (np.arange(12) % 2.0), dimensions=2)


@family
def optical_flow(size: int, rng: Generator) -> System:
    """The motion between two images, 2 unknowns a pixel: smoothness, and one equation where there is a gradient.

    Horn and Schunck, "Determining optical flow" (Artif. Intell. 17, 1981).
    """
    side = max(6, round((size / 2) ** 0.5))
    image = 50 * gaussian_field((side, side), max(1.0, side / 40), rng)
    gradient = np.stack(np.gradient(image), axis=-1).reshape(-1, 2)
    line = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(side, side)).tolil()
    line[0, 0] = line[-1, -1] = 1.0
    one = scipy.sparse.eye_array(side)
    smooth = scipy.sparse.kron(line, one) + scipy.sparse.kron(one, line)
    data = np.einsum("pi,pj->pij", gradient, gradient)
    own = np.arange(side**2)
    fidelity = scipy.sparse.bsr_array((data, own, np.arange(side**2 + 1)), shape=2 * (2 * side**2,))
    A = 15.0**2 * scipy.sparse.kron(smooth, scipy.sparse.eye_array(2)) + fidelity
    b = -(gradient * (gradient @ [0.7, -0.4])[:, None]).ravel()
    return System(A.tocsr(), b, block_size=2, dimensions=2)


@family
def matern_precision(size: int, rng: Generator) -> System:
    """The precision of a random field in spatial statistics, ``(kappa^2 C + G) C^-1 (kappa^2 C + G)``.

    Lindgren, Rue and Lindstrom, "An explicit link between Gaussian fields and Gaussian Markov random fields" (J. R. Stat. Soc. B
    73, 2011), on a square grid, with a range of a quarter of its side and observations of one node in twenty.
    """
    side = max(6, round(size**0.5))
    line = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(side, side)).tolil()
    line[0, 0] = line[-1, -1] = 1.0
    one = scipy.sparse.eye_array(side)
    G = scipy.sparse.kron(line, one) + scipy.sparse.kron(one, line)
    K = (8**0.5 / (side / 4)) ** 2 * scipy.sparse.eye_array(side**2) + G
    observed = np.where(rng.random(side**2) < 0.05, 10.0 * (4 / side) ** 2, 0.0)
    A = K @ K + scipy.sparse.diags_array(observed)
    return System(A.tocsr(), observed * rng.standard_normal(side**2), dimensions=2)


@family
def resistors(size: int, rng: Generator) -> System:
    """A random resistor network near percolation: two thirds of the bonds of a cubic lattice, of very unequal resistance.

    Kirkpatrick, "Percolation and conduction" (Rev. Mod. Phys. 45, 1973). The current enters and leaves at two electrodes.
    """
    shape = box(size)
    numbers, lines = np.arange(np.prod(shape)).reshape(shape), []
    for axis in range(3):
        pairs = np.moveaxis(numbers, axis, 0)
        lines.append(np.stack([pairs[:-1].ravel(), pairs[1:].ravel()], axis=1))
    bonds = np.concatenate(lines)
    bonds = bonds[rng.random(len(bonds)) < 0.4]
    n, bonds, _ = _largest(bonds, numbers.size)
    return _balanced(laplacian(n, bonds, np.exp(2 * rng.standard_normal(len(bonds)))), rng)
