"""Coordinates of nodes whose unknowns do not follow each other are refused, with what puts them in order."""

import re

import numpy as np
import pytest
import scipy.sparse

import penstock
from penstock.fem import Cantilever
from penstock.spmv import InputError

CUBE = Cantilever(nodes=(17, 7, 7), dof=3)
NODES, N = CUBE.unknowns // 3, CUBE.unknowns
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

    advice = re.search(
        r"put it in order: (order = .*), result = (solve.*), ...\), (x = .*), (x.order. = .*)", str(refused.value)
    )
    names = {"np": np, "A": BY_COMPONENTS, "b": B, "solve": solve, "coordinates": POINTS}
    exec(advice[1], names)
    exec(f"result = {advice[2]}, coordinates=coordinates)", names)
    exec(f"{advice[3]}; {advice[4]}", names)
    assert np.linalg.norm(B - BY_COMPONENTS @ names["x"]) <= 1e-8 * np.linalg.norm(B)
    assert names["result"].iterations < 15


@pytest.mark.parametrize("nodes", [(7, 7, 7), (17, 7, 7)], ids=["by LAPACK", "by iterations"])
def test_modes_refuse_it_too(nodes):
    body = Cantilever(nodes=nodes, dof=3)
    order = np.arange(body.unknowns).reshape(-1, 3).T.ravel()
    K = body.matrix().to_csr()[order][:, order]

    with pytest.raises(InputError, match="is numbered by components"):
        penstock.eigsh(K, 2, device="cpu", coordinates=body.mesh.coordinates())


def test_coordinates_that_fit_are_not():
    assert solve(BY_NODES, B, coordinates=POINTS).converged
    line = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(30, 30))
    plane = scipy.sparse.csr_array(scipy.sparse.kronsum(line, line))
    x, y = np.divmod(np.arange(900), 30)
    assert solve(plane, np.ones(900), coordinates=np.stack([x, y], axis=1)).converged
    uncoupled = scipy.sparse.csr_array(scipy.sparse.kron(plane, np.eye(2)))  # whose blocks are sparse in any order
    assert solve(uncoupled, np.ones(1800), coordinates=np.stack([x, y], axis=1)).converged


def test_what_needs_no_places_of_nodes_takes_any_numbering():
    assert solve(BY_COMPONENTS, B).converged
