"""Rows of a streamed matrix are put in the order that is found soonest and lets sweeps compute several products."""

from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse

from penstock import prepare, solve
from penstock.driver import open_system, placement, row_order
from penstock.driver.image_placement import Smallest
from penstock.driver.request import Request
from penstock.driver.row_order import BY_LEVELS, COUPLED, IN_LAYERS, in_best_order, levels_may_pay
from penstock.fem import Cantilever
from penstock.solvers import SmoothedAggregationSpec
from penstock.solvers.image_solve import ImageUnfitError
from penstock.spmv import CPU, CsrMatrix, InputError
from penstock.spmv.formats.statistics import MatrixStatistics

BEAM = Cantilever(nodes=(80, 4, 4), dof=3)
NODES = np.random.default_rng(0).permutation(BEAM.unknowns // 3)
ROWS = (3 * NODES[:, None] + np.arange(3)).ravel()
A = scipy.sparse.csr_array(scipy.sparse.csr_array(BEAM.matrix().to_csr())[ROWS][:, ROWS])
POINTS = BEAM.mesh.coordinates()[NODES]
B = np.random.default_rng(3).standard_normal((A.shape[0], 2))
GIVEN = {"device": "cpu", "memory": "500 KiB", "precision": "float64"}


def check(b, result):
    assert result.converged
    assert np.all(np.linalg.norm(b - A @ result.x, axis=0) <= 1e-8 * np.linalg.norm(b, axis=0))


@pytest.mark.parametrize("b", [B[:, 0], B])
def test_nodes_whose_places_are_known_are_put_in_layers(b):
    result = solve(A, b, coordinates=POINTS, **GIVEN)

    check(b, result)
    assert "order       in layers across the longest axis: a sweep computes" in result.explain()


@pytest.mark.parametrize("precision", ["float64", "auto"])
def test_a_float32_matrix_in_another_order_is_solved_in_float64(precision):
    narrow = A.astype(np.float32)
    narrow = (0.5 * (narrow + narrow.T)).astype(np.float32)
    result = solve(narrow, B[:, 0], coordinates=POINTS, rtol=1e-9, **{**GIVEN, "precision": precision})

    assert "order       in layers across the longest axis" in result.explain()
    assert result.x.dtype == np.float64
    b = B[:, 0]
    assert np.linalg.norm(b - narrow.astype(np.float64) @ result.x) <= 1e-9 * np.linalg.norm(b)


def test_coordinates_that_a_function_makes_are_put_in_order_too():
    spec = SmoothedAggregationSpec(block_size=3, coordinates=lambda: POINTS)
    result = solve(A, B[:, 0], preconditioner=spec, **GIVEN)

    check(B[:, 0], result)
    assert result.iterations < 20


def test_layers_that_do_not_help_give_way_to_levels():
    """The coordinates are those of other nodes."""
    result = solve(A, B[:, 0], coordinates=np.random.default_rng(1).permutation(POINTS), rtol=1e-6, **GIVEN)

    assert result.converged
    assert "order       by levels (reverse Cuthill-McKee): a sweep computes" in result.explain()


def test_an_order_by_levels_that_cannot_pay_is_not_sought(monkeypatch):
    monkeypatch.setattr(placement, "levels_may_pay", lambda plan, **given: False)
    result = solve(A, B[:, 0], preconditioner="chebyshev", **GIVEN)

    check(B[:, 0], result)
    assert "order       an order by levels is not sought: that would take longer than the sweeps" in result.explain()


def plan_of(seconds, iterations=10, rates="measured"):
    workload = SimpleNamespace(iterations=iterations, columns=1)
    return SimpleNamespace(rates=rates, workload=workload, estimated_solve_seconds=lambda: seconds)


def test_levels_pay_where_sweeps_take_longer():
    once, often = Request(CPU), Request(CPU, solves=10)
    nodes, entries = 1_000_000, 50_000_000
    cost = row_order._NODE_SECONDS * nodes + row_order._ENTRY_SECONDS * entries

    assert levels_may_pay(plan_of(cost), once, nodes, entries)
    assert not levels_may_pay(plan_of(0.5 * cost), once, nodes, entries)
    assert levels_may_pay(plan_of(0.5 * cost), often, nodes, entries)
    assert levels_may_pay(plan_of(0.5 * cost), Request(CPU, columns=5), nodes, entries)
    assert levels_may_pay(plan_of(0.0, rates=None), once, nodes, entries)
    assert levels_may_pay(plan_of(0.0, iterations=None), once, nodes, entries)


def test_a_prepared_system_expects_several_solves():
    with prepare(A, coordinates=POINTS, **GIVEN) as system:
        assert system._system.request.solves > 1
        check(B[:, 0], system.solve(B[:, 0]))


@pytest.mark.parametrize(
    ("points", "name"), [(None, "by levels (reverse Cuthill-McKee)"), (POINTS, "in layers across the longest axis")]
)
def test_rows_are_put_in_order_where_an_image_then_fits(points, name):
    """In random order chunks of rows of half of the matrix are padded so much that the image is too large."""
    with prepare(A, device="cpu", memory="490 KiB", coordinates=points) as system:
        for factor in (1.0, 2.0):
            system.update(factor * A)
            result = system.solve(factor * B)
            check(B, result)
        assert f"order       {name}: rows are padded less, so that an image fits" in system.explain()
        assert np.allclose(system.matrix @ B, 2.0 * A @ B)
    assert result.sweeps <= 20


def test_the_long_rows_of_hubs_are_not_padded():
    """A network in which most nodes join a few: chunks of 32 rows would be mostly padding, and too large to be cut."""
    rng, n = np.random.default_rng(5), 4000
    ends = np.stack([np.arange(1, n).repeat(3), (np.arange(1, n).repeat(3) * rng.random(3 * n - 3) ** 4).astype(int)])
    edges = scipy.sparse.coo_array((np.ones(3 * n - 3), ends), shape=(n, n)).tocsr()
    G = scipy.sparse.csr_array(edges + edges.T)
    L = scipy.sparse.csr_array(scipy.sparse.diags_array(G.sum(axis=1) + 1.0) - G)
    b = rng.standard_normal(n)

    result = solve(L, b, device="cpu", memory=L.data.nbytes // 3)

    assert result.converged
    assert "format      CSR, " in result.explain()
    assert np.linalg.norm(b - L @ result.x) <= 1e-8 * np.linalg.norm(b)


def planned(powers, reach=1):
    index = SimpleNamespace(subdivisions=range(8))
    plan = SimpleNamespace(
        powers_per_sweep=powers, planned_reach=reach, index=index, estimated_solve_seconds=lambda: 1.0 / powers
    )
    return SimpleNamespace(stream_plan=plan)


@pytest.mark.parametrize("known", [[], [("order", "in layers: as they were put before")]])
def test_what_is_said_is_of_the_order_that_is_used(known):
    """Levels that are not sought, or not better, do not deny layers that are used."""
    layers, coupled = planned(4), planned(1, reach=8)
    orders = {IN_LAYERS: lambda: layers, BY_LEVELS: lambda: coupled}

    def found(of, may_pay, facts):
        return in_best_order(planned(1), of, lambda order: order, lambda one: False, lambda plan: may_pay, facts)

    for may_pay in (True, False):
        chosen, [(_, said)] = found(orders, may_pay, known)
        assert chosen is layers
        assert said.startswith("in layers across the longest axis: a sweep computes 4 powers")
        _, [(_, said)] = found({BY_LEVELS: lambda: coupled}, may_pay, known)
        expected = COUPLED if may_pay else "an order by levels is not sought: that would take longer than the sweeps"
        assert said == (known[0][1] if known else expected)


def test_a_solve_goes_on_from_the_iterate_of_an_image_in_another_order(monkeypatch):
    by_image = open_system.solve_by_image

    def given_up(*arguments, **options):
        raise ImageUnfitError("it is given up here", by_image(*arguments, **options).x, 3)

    monkeypatch.setattr(open_system, "solve_by_image", given_up)
    result = solve(A, B[:, 0], device="cpu", memory="490 KiB", preconditioner="chebyshev")

    check(B[:, 0], result)
    assert "an image in fewer digits was tried, but it is given up here" in result.explain()
    assert result.iterations <= 1


def test_coordinates_that_are_not_finite_are_refused():
    points = POINTS.copy()
    points[7, 1] = np.nan
    with pytest.raises(InputError, match="coordinates"):
        solve(A, B[:, 0], coordinates=points, **GIVEN)


def test_csr_is_streamed_on_request():
    statistics = MatrixStatistics.of(CsrMatrix.from_csr(A))
    assert Smallest(statistics, Request(CPU, format="csr"), 3).suggestion.format_name == "csr"
    assert Smallest(statistics, Request(CPU), 3).suggestion.format_name == "symmetric_bsr"


@pytest.mark.gpu
def test_coordinates_may_be_on_the_gpu():
    cupy = pytest.importorskip("cupy")
    result = solve(A, B[:, 0], coordinates=cupy.asarray(POINTS), **{**GIVEN, "device": "cuda"})

    check(B[:, 0], result)
    assert "in layers across the longest axis" in result.explain()
