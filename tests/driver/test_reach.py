"""The reach that a plan knows is that of the subdivisions: products that rely on a smaller one would be wrong."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse

import penstock
from penstock.experiments import Experiment, plan_experiment
from penstock.fem import Cantilever
from penstock.streaming import HostStore, StreamedMatrix, reach_of


def measured(A):
    plan = replace(A.plan, reach=None)
    with StreamedMatrix(A.store, A.plan.budget_nbytes, plan=plan) as other:
        return other.reach


def elements(nodes):
    beam = Cantilever(nodes=nodes, dof=3)
    mesh = beam.mesh
    return penstock.ElementMatrix(mesh.coordinates(), mesh.connectivity(), fixed=np.arange(3 * nodes[1] * nodes[2]))


def scattered(n=4000):
    """Bands of random width."""
    rng = np.random.default_rng(0)
    rows = np.repeat(np.arange(n), 4)
    columns = np.clip(rows + rng.integers(-40, 41, 4 * n), 0, n - 1)
    A = scipy.sparse.coo_array((-np.ones(4 * n), (rows, columns)), shape=(n, n)).tocsr()
    A = A + A.T
    return scipy.sparse.csr_array(A + scipy.sparse.diags_array(1.0 - np.asarray(A.sum(axis=1)).ravel()))


MATRICES = {
    "csr": lambda: Cantilever(nodes=(33, 7, 6), dof=3).matrix("csr").to_csr(),
    "scattered": scattered,
    "bsr": lambda: Cantilever(nodes=(33, 7, 6), dof=3).matrix("bsr"),
    "symmetric_bsr": lambda: Cantilever(nodes=(33, 7, 6), dof=3).matrix("symmetric_bsr"),
    "store": lambda: HostStore.create(Cantilever(nodes=(33, 7, 6), dof=3).subdivisions(40, "bsr")),
    "elements": lambda: elements((33, 7, 6)),
}


@pytest.mark.parametrize("name", MATRICES)
def test_plans_know_how_far_subdivisions_reach(name):
    A = MATRICES[name]()
    nbytes = A.index.nbytes if name == "store" else 2_000_000 if name == "elements" else None
    nbytes = nbytes or (12 * A.nnz if hasattr(A, "indptr") else A.nbytes)
    with penstock.prepare(
        A, device="cpu", memory=nbytes // 3, preconditioner="chebyshev", precision="float64"
    ) as system:
        assert system.matrix.plan.slots
        assert system.matrix.plan.reach is not None
        assert system.matrix.plan.reach >= measured(system.matrix)


@pytest.mark.parametrize("subdivisions", ["auto", 9, 33, 40])
@pytest.mark.parametrize("dof", [1, 3])
def test_plans_of_experiments_know_it_too(dof, subdivisions):
    memory = {"budget": "150 KiB" if dof == 1 else "900 KiB"}
    if subdivisions != "auto":
        memory["subdivisions"] = subdivisions
    experiment = Experiment(
        model={"nodes": [33, 7, 6], "dof": dof}, memory=memory, solver={"preconditioner": "smoothed_aggregation"}
    )
    plan = plan_experiment(experiment)
    A = experiment.cantilever().matrix(plan.index.format_name)
    slabs = [A.rows(start, stop) for start, stop in itertools.pairwise(plan.index.row_bounds)]

    assert plan.slots
    assert plan.reach is not None
    assert plan.reach >= reach_of(plan.index.row_starts, [slab.column_range() for slab in slabs])
