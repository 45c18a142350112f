"""A matrix of which nothing is stored gives what a stored one gives, on the CPU and on a GPU."""

import numpy as np
import pytest
from kernel_targets import DEVICES

from penstock.fem import Cantilever, LognormalMaterial
from penstock.solvers import cg, preconditioner_spec
from penstock.spmv import CPU, Device
from penstock.streaming import HostStore, MadeStore, Ring, StreamedMatrix, Workload, index_of, plan_stream
from penstock.streaming.stores.buffers import aligned_buffer
from penstock.streaming.stores.whole import read_whole

FORMATS = ("csr", "bsr", "sliced_bsr", "symmetric_bsr")


def beam(dof=3):
    return Cantilever((24, 6, 8), dof, material=LognormalMaterial(1.0, 4))


def stores(body, format_name, device, count=24):
    index = index_of(body.symbolic_slabs(count, format_name), body.shape)
    return MadeStore(index, body.row_maker(format_name, device)), HostStore.create(
        body.subdivisions(count, format_name)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("dof", [1, 3, 6])
@pytest.mark.parametrize("resident_structure", [False, True])
def test_products_are_those_of_the_stored_matrix(device, format_name, dof, resident_structure):
    body, device = beam(dof), Device(device)
    made, stored = stores(body, format_name, device)
    x = device.asarray(np.random.default_rng(1).standard_normal(body.unknowns))
    ring = Ring(slots=3, resident_structure=resident_structure)

    with (
        StreamedMatrix(made, made.index.nbytes // 2, ring=ring, device=device) as A,
        StreamedMatrix(stored, made.index.nbytes // 2, ring=ring, device=device) as B,
    ):
        assert A.plan.slots == 3
        assert A.plan.ring.on_arrival
        assert not A.staged
        for _ in range(4):  # sweeps in both directions, of which a GPU captures some
            first, second = device.to_host(A @ x), device.to_host(B @ x)
            if format_name == "symmetric_bsr" and device.kind == "cuda":  # adds atomically
                np.testing.assert_allclose(first, second, rtol=1e-12, atol=1e-12 * abs(second).max())
            else:
                assert first.tobytes() == second.tobytes()
        assert A.bytes_streamed == 0 < B.bytes_streamed
        assert A.sweeps == B.sweeps == 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("overlap", [True, False])
def test_a_coarse_level_is_made_and_used_in_the_same_sweeps(device, overlap):
    body, device = beam(), Device(device)
    made, stored = stores(body, "symmetric_bsr", device)
    b = device.asarray(body.load())
    results = []
    for store in (made, stored):
        ring = Ring(overlap=overlap, on_arrival=store is made)
        plan = plan_stream(store.index, store.index.nbytes // 2, Workload(degree=5), ring)
        with StreamedMatrix(store, store.index.nbytes, plan=plan, device=device) as A:
            spec = preconditioner_spec("smoothed_aggregation", block_size=3, coordinates=body.mesh.coordinates())
            results.append(cg(A, b, M=spec.with_products(5).build(A), rtol=1e-10))

    assert results[0].converged
    assert results[0].true_residual <= 1e-10
    assert abs(results[0].iterations - results[1].iterations) <= (1 if device.kind == "cuda" else 0)
    assert results[0].sweeps == results[1].sweeps or device.kind == "cuda"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format_name", FORMATS)
def test_the_host_reads_the_bytes_of_a_stored_matrix(device, format_name):
    body = beam()
    made, stored = stores(body, format_name, Device(device), count=3)

    for number, subdivision in enumerate(made.index.subdivisions):
        for part in ("whole", "structure", "values"):
            buffers = [aligned_buffer(subdivision.nbytes) for _ in range(2)]
            for store, buffer in zip((made, stored), buffers, strict=True):
                store.read_into(number, buffer, part)
            views = [made.index.arrays(number, buffer, part) for buffer in buffers]
            assert all(views[0][name].tobytes() == views[1][name].tobytes() for name in views[1])
    assert abs(read_whole(made) - body.matrix("csr").to_csr()).max() == 0


def test_a_plan_says_that_nothing_moves():
    body = beam()
    made, _ = stores(body, "symmetric_bsr", CPU)

    with StreamedMatrix(made, made.index.nbytes // 2) as A:
        text = A.plan.explain()

    assert "made        " in text
    assert "streamed" not in text
    assert A.plan.streamed_nbytes == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("values_dtype", [np.float64, np.float32])
def test_a_whole_matrix_is_assembled_on_its_device(device, format_name, values_dtype):
    body, device = beam(), Device(device)

    A, expected = (body.matrix(format_name, values_dtype=values_dtype, device=where) for where in (device, CPU))

    assert A.device == device
    assert A.parameters() == expected.parameters()
    for name, array in expected.arrays().items():
        assert device.to_host(A.arrays()[name]).tobytes() == array.tobytes()
