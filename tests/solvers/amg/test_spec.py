"""What a plan is told of a coarse level, and what it chooses."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.fem import Cantilever, LognormalMaterial
from penstock.solvers import cg, preconditioner_spec
from penstock.solvers.amg.grid_points import GridPoints
from penstock.spmv import InputError
from penstock.streaming import LinkRates, Workload, index_of, plan_stream

BEAM = Cantilever(nodes=(20, 20, 20), dof=3, material=LognormalMaterial(sigma=0.5, seed=1))


def spec(**options):
    return preconditioner_spec("smoothed_aggregation", block_size=3, **options)


def test_a_plan_may_choose_smaller_aggregates_with_fewer_products():
    chosen = [spec().with_products(products) for products in spec().products_per_iteration(streamed=True)]

    assert spec().products_per_iteration(streamed=True) == (6, 8, 12, 14)
    assert [(s.degree, s.aggregate_nodes) for s in chosen] == [(3, 64), (5, 64), (7, 125), (9, 125)]
    assert spec().products_per_iteration(streamed=False) == (14,)


@pytest.mark.parametrize(
    ("options", "products"), [({"degree": 11}, 16), ({"aggregate_nodes": 27}, 12), ({"degree": 9}, 14)]
)
def test_what_is_given_is_not_changed(options, products):
    given = spec(**options)

    assert given.products_per_iteration(streamed=True) == given.products_per_iteration(streamed=False) == (products,)
    decided = given.with_products(products)
    assert decided.products_per_iteration(streamed=True) == (products,)
    assert given.with_products(1) == given


@pytest.mark.parametrize("products", [6, 8, 12, 14])
def test_the_expected_iterations_are_about_right(products):
    A, b, mesh = BEAM.matrix("bsr"), BEAM.load(), BEAM.mesh
    M = spec(coordinates=mesh.coordinates, aggregates=mesh.node_counts).with_products(products).build(A)

    expected = spec().iterations(products)

    assert 0.6 * expected <= cg(A, b, M=M, rtol=1e-8).iterations <= 1.3 * expected


def test_the_memory_of_the_coarse_matrix_is_that_of_real_ones():
    """In a larger mesh nearly all aggregates have 26 neighbours."""
    A, mesh = BEAM.matrix("bsr"), BEAM.mesh
    for products in (8, 14):
        chosen = spec(coordinates=mesh.coordinates, aggregates=mesh.node_counts).with_products(products)
        level = chosen.build(A).level

        told = dict(chosen.parts(A.shape[0], 1))[f"levels above aggregates of {chosen.aggregate_nodes} nodes"]

        assert level.A.nbytes <= told
        of_complete_rows = 27 * 6 * 6 * 8 * level.T.aggregates.count
        assert of_complete_rows <= told <= 2 * of_complete_rows
        assert level.T.nbytes <= 1.2 * dict(chosen.parts(A.shape[0], 1))["the transfer"]


def test_coordinates_on_a_gpu_need_less_memory_than_modes():
    n = 10**9
    from_coordinates, from_modes = (
        spec(**given).workspace_nbytes(n, 1, streamed_to_gpu=True)
        for given in ({"coordinates": np.zeros((1, 3))}, {"near_null_space": np.zeros((1, 6))})
    )
    of_node = 24 + 2 * 4 + 3  # coordinates, two lists of numbers, and a byte for each unknown
    assert from_modes - from_coordinates == pytest.approx(6 * 8 * n - of_node * n / 3)


def test_a_plan_tells_what_the_preconditioner_holds():
    index = index_of([BEAM.matrix("bsr")], BEAM.matrix("bsr").shape)
    chosen = spec()
    parts = chosen.parts(index.shape[0], 1, streamed_to_gpu=True)
    plan = plan_stream(index, index.nbytes, Workload(workspace_nbytes=10**9, parts=parts))

    told = next(line for line in plan.explain().splitlines() if line.startswith("vectors"))
    for part in ("for the transfer", "for levels above aggregates of 125 nodes", "for the set-up"):
        assert part in told


def test_another_order_of_the_unknowns_reorders_coordinates_and_modes():
    order = np.array([3, 4, 5, 0, 1, 2])
    points, modes = np.array([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]), np.arange(12.0).reshape(6, 2)

    moved = spec(coordinates=points, near_null_space=modes).in_order(lambda vectors: vectors[order])

    assert np.array_equal(moved.coordinates, points[::-1])
    assert np.array_equal(moved.near_null_space, modes[order])
    with pytest.raises(InputError, match="leave out aggregates"):
        spec(aggregates=(1, 2)).in_order(lambda vectors: vectors)


def test_blocks_of_vectors_are_slower_with_half_of_a_matrix():
    """Measured on an H200 with 32 vectors: half of a matrix takes 13 times a product with one, sliced BSR 2.7 times."""
    gpu = LinkRates(55e9, 4e12, side_by_side=4)
    beam = Cantilever(nodes=(64, 64, 64), dof=3)
    indices = {
        name: index_of(beam.symbolic_slabs(4, name), (beam.unknowns,) * 2) for name in ("symmetric_bsr", "sliced_bsr")
    }

    def seconds(name, columns, rates):
        workload = Workload(columns, degree=14)
        return plan_stream(indices[name], indices[name].nbytes, workload, rates=rates).estimate().compute

    for columns, faster in ((1, "symmetric_bsr"), (32, "sliced_bsr")):
        times = {name: seconds(name, columns, gpu) for name in indices}
        assert min(times, key=times.get) == faster
    cpu = LinkRates(2e9, 2e10)
    assert seconds("symmetric_bsr", 32, cpu) < seconds("sliced_bsr", 32, cpu)


def test_a_plan_counts_what_is_held():
    n = 3 * 10**6
    of_mesh = spec(aggregate_nodes=343).with_nodes(GridPoints([np.arange(100.0)] * 3), (100, 100, 100))
    with_points = spec(aggregate_nodes=343, coordinates=np.zeros((10**6, 3)))

    on_gpu = {"streamed_to_gpu": True}
    vectors = of_mesh.workspace_nbytes(n, 1, **on_gpu)
    lean = replace(of_mesh, keep_vectors=False)

    assert with_points.workspace_nbytes(n, 1, **on_gpu) - vectors == 24 * 10**6
    assert dict(with_points.parts(n, 1, **on_gpu))["the transfer"] == (24 + 8 + 3) * 10**6
    window = 60 * 8 * n  # what the set-up of a small system takes is more than the solve
    assert vectors == lean.workspace_nbytes(n, 1, **on_gpu) >= window
    assert of_mesh.workspace_nbytes(n, 40, **on_gpu) - lean.workspace_nbytes(n, 40, **on_gpu) == 40 * 8 * n
    with pytest.raises(InputError, match="keep_vectors must be true or false"):
        spec(keep_vectors="no")


def test_vectors_are_kept_as_the_specification_says():
    A, mesh = BEAM.matrix("bsr"), BEAM.mesh
    for keeps in (True, False):
        chosen = spec(keep_vectors=keeps).with_nodes(GridPoints(mesh.axes()), mesh.node_counts)
        M = chosen.build(A)

        assert M.keeps_vectors == chosen.rebuild(M, A).keeps_vectors == keeps
    assert np.array_equal(np.asarray(GridPoints(mesh.axes())), mesh.coordinates())
