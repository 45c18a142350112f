"""Coordinates of nodes whose unknowns do not follow each other are refused, with what puts them in order."""

import re

import numpy as np
import pytest
import scipy.sparse

import penstock
from penstock.fem import Cantilever
from penstock.spmv import InputError

CUBE = Cantilever(nodes=(17, 7, 7), dof=3)
N = CUBE.unknowns
BY_NODES = CUBE.matrix().to_csr()
POINTS = CUBE.mesh.coordinates()
B = np.random.default_rng(5).standard_normal(N)
COMPONENTS = np.arange(N).reshape(-1, 3).T.ravel()
BY_COMPONENTS = BY_NODES[COMPONENTS][:, COMPONENTS]


def solve(A, b, **options):
    return penstock.solve(A, b, rtol=1e-8, device="cpu", **options)


@pytest.mark.parametrize("memory", [None, "500 KiB"])
def test_numbering_by_components_is_refused_with_what_puts_it_in_order(memory):
    with pytest.raises(InputError, match="A is numbered by components, all unknowns of one direction first") as refused:
        solve(BY_COMPONENTS, B, coordinates=POINTS, memory=memory)

    order = eval(re.search(r"order = (np\.arange.*ravel\(\)),", str(refused.value))[1])
    result = solve(BY_COMPONENTS[order][:, order], B[order], coordinates=POINTS, memory=memory)
    x = np.empty_like(result.x)
    x[order] = result.x
    assert np.linalg.norm(B - BY_COMPONENTS @ x) <= 1e-8 * np.linalg.norm(B)
    assert result.iterations < 15


@pytest.mark.parametrize("nodes", [(7, 7, 7), (17, 7, 7)], ids=["by LAPACK", "by iterations"])
def test_modes_refuse_it_too(nodes):
    body = Cantilever(nodes=nodes, dof=3)
    order = np.arange(body.unknowns).reshape(-1, 3).T.ravel()
    K = body.matrix().to_csr()[order][:, order]

    with pytest.raises(InputError, match="is numbered by components"):
        penstock.eigsh(K, 2, device="cpu", coordinates=body.mesh.coordinates())


def laplacian(n):
    return scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n))


def grid_points(*counts):
    return np.stack(np.meshgrid(*map(np.arange, counts), indexing="ij"), axis=-1).reshape(-1, len(counts))


PLANE = scipy.sparse.csr_array(scipy.sparse.kronsum(laplacian(30), laplacian(30)))
MASS = scipy.sparse.diags_array([1.0, 4.0, 1.0], offsets=[-1, 0, 1], shape=(600, 600))
STRIP = scipy.sparse.kron(laplacian(2), MASS) + scipy.sparse.kron(2.0 * scipy.sparse.eye_array(2), laplacian(600))
FITTING = {
    "by nodes": (BY_NODES, POINTS),
    "scalars": (PLANE, grid_points(30, 30)),
    "uncoupled directions": (scipy.sparse.kron(PLANE, np.eye(2)), grid_points(30, 30)),
    "uncoupled directions of two layers": (scipy.sparse.kron(STRIP, np.eye(2)), grid_points(2, 600)),
    "an uncoupled dense matrix": (np.kron(np.eye(600) * 600 + 1.0, np.eye(2)), grid_points(600, 1)),
}


@pytest.mark.parametrize("system", FITTING)
def test_coordinates_that_fit_are_taken(system):
    A, points = FITTING[system]
    A = scipy.sparse.csr_array(A)
    A.eliminate_zeros()
    with penstock.prepare(A, device="cpu", coordinates=points) as prepared:
        assert prepared.solve(np.ones(A.shape[0])).converged


@pytest.mark.parametrize("points", [61, 7, 2, 1])
def test_coordinates_of_another_length_are_refused_for_that(points):
    A = scipy.sparse.csr_array(60.0 * np.eye(60) + 1.0)

    with pytest.raises(InputError, match="coordinates must have a row for each node, of 1 to 8 unknowns"):
        penstock.eigsh(A, 2, device="cpu", coordinates=np.zeros((points, 3)))


def test_what_needs_no_places_of_nodes_takes_any_numbering():
    assert solve(BY_COMPONENTS, B).converged
