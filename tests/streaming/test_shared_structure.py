"""A matrix that is streamed beside its image shares offsets and column indices with it: only its values move."""

import numpy as np
import pytest
import scipy.sparse
from kernel_targets import DEVICES

from penstock import prepare
from penstock.fem import Cantilever, LognormalMaterial
from penstock.spmv import BudgetError, Device, InputError
from penstock.spmv.formats.partition import row_slabs
from penstock.streaming import HostPlaneStore, HostStore, Ring, StreamedMatrix, plan_stream
from penstock.streaming.image import can_be_joined, image_and_matrix, image_of_store, structures_of
from penstock.streaming.stores.base import has_planes
from penstock.streaming.stores.buffers import aligned_buffer
from penstock.streaming.testing import CountingStore

BEAM = Cantilever(nodes=(24, 5, 5), dof=3, material=LognormalMaterial(sigma=1.0, seed=3))
FORMATS = ["csr", "bsr", "sliced_bsr", "symmetric_bsr"]


def beside_image(store, device):
    """The matrix of a store with the structure of its image, and the image."""
    values = store.index.sizes["values"]
    plan = plan_stream(store.index, 2 * max(values) + values[0], ring=Ring(slots=2, shared_structure=True))
    return image_and_matrix(store, np.float32, plan, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [HostStore, HostPlaneStore])
@pytest.mark.parametrize("name", FORMATS)
def test_products_have_the_same_bits_and_move_values_only(device, kind, name):
    device, matrix = Device(device), BEAM.matrix(name)
    store = kind.create(row_slabs(matrix, 7))
    x = device.asarray(np.random.default_rng(0).standard_normal(BEAM.unknowns))
    assert can_be_joined(store.index)
    with StreamedMatrix(store, store.index.nbytes // 2, ring=Ring(slots=2), device=device) as whole:
        expected = [device.to_host(whole @ x) for _ in range(5)]

    _, A = beside_image(store, device)
    with A:
        before, made = A.sweeps, A.bytes_streamed  # by the image, unless it has read one of two planes
        assert before == (0 if has_planes(store) else 1)
        products = [device.to_host(A @ x) for _ in range(3)]
        transfers = [number for sweep in range(3) for number in A.plan.schedule.transfers(before + sweep)]
        moved = sum(store.index.sizes["values"][number] for number in transfers)
        share = 0.5 if has_planes(store) else 1.0  # the image has one of the planes
        assert len(A.plan.resident) == 1
        assert A.plan.structure_nbytes == 0
        assert A.bytes_streamed - made == pytest.approx(share * moved, abs=4096 * len(transfers))
        A.reopen(A.store)
        products.append(device.to_host(A @ x))
        expected = expected[before : before + 4]

    if device.kind == "cuda" and name == "symmetric_bsr":  # whose products add up in the order of arrival
        np.testing.assert_allclose(products, expected, rtol=1e-12, atol=1e-12 * abs(expected[0]).max())
    else:
        np.testing.assert_array_equal(products, expected)


def test_everything_is_read_once():
    store = HostStore.create(row_slabs(BEAM.matrix("symmetric_bsr"), 7))
    counting = CountingStore(store)
    for shares in (0.5, 0.9, 2.0):  # of the matrix; with all of it in memory nothing is streamed
        counting.nbytes = 0
        plan = plan_stream(store.index, int(shares * store.index.nbytes), ring=Ring(shared_structure=True))
        _, A = image_and_matrix(counting, np.float32, plan, Device("cpu"))
        A.close()
        assert counting.nbytes <= 1.05 * store.index.nbytes


def test_column_indices_are_those_of_the_image_itself():
    store = HostStore.create(row_slabs(BEAM.matrix("symmetric_bsr"), 7))
    image = image_of_store(store, np.float32, Device("cpu"))
    structures = structures_of(image.arrays(), store.index)

    assert len(structures) == 7
    for number, structure in enumerate(structures):
        buffer = aligned_buffer(store.index.sizes["structure"][number])
        store.read_into(number, buffer, "structure")
        stored = store.index.arrays(number, buffer, "structure")
        assert np.shares_memory(structure["column_indices"], image.column_indices)
        assert structure.keys() == stored.keys()
        for array_name, array in structure.items():
            np.testing.assert_array_equal(array, stored[array_name])
            assert array.dtype == stored[array_name].dtype


def test_a_plan_that_shares_a_structure_needs_it():
    store = HostStore.create(row_slabs(BEAM.matrix("bsr"), 7))
    plan = plan_stream(store.index, store.index.nbytes // 2, ring=Ring(shared_structure=True))
    assert "structure   that of the image: only values move" in plan.explain()
    assert plan.resident_nbytes + plan.streamed_nbytes == store.index.part_nbytes("values")

    other = image_of_store(HostStore.create(row_slabs(BEAM.matrix("bsr"), 6)), np.float32, Device("cpu"))
    structures = structures_of(other.arrays(), store.index)
    for wrong in (None, structures[:-1], structures[::-1]):
        with pytest.raises(InputError, match="structures="):
            StreamedMatrix(store, plan.storage_nbytes, plan=plan, structures=wrong)
    with pytest.raises(InputError, match=r"Ring\(shared_structure=True\)"):
        StreamedMatrix(store, store.index.nbytes // 2, structures=structures)
    with pytest.raises(InputError, match="not both"):
        Ring(shared_structure=True, resident_structure=True)


def test_where_the_values_fit_nothing_is_streamed():
    store, values = HostStore.create(row_slabs(BEAM.matrix("bsr"), 7)), BEAM.matrix("bsr").values.nbytes
    plan = plan_stream(store.index, store.index.part_nbytes("values"), ring=Ring(shared_structure=True))
    assert (plan.slots, len(plan.resident)) == (0, 7)
    assert values <= plan.storage_nbytes < store.index.nbytes
    with pytest.raises(
        BudgetError, match=str(store.index.part_nbytes("values"))
    ):  # for one byte less with as many slots
        plan_stream(store.index, plan.storage_nbytes - 1, ring=Ring(slots=7, shared_structure=True))
    _, A = image_and_matrix(store, np.float32, plan, Device("cpu"))
    with A:
        np.testing.assert_array_equal(A @ BEAM.load(), BEAM.matrix("bsr") @ BEAM.load())
        assert A.bytes_streamed == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["float32", "int16"])
def test_a_prepared_system_shares_it_and_takes_new_values(device, precision):
    of_materials = [
        Cantilever(nodes=(24, 5, 5), dof=3, material=LognormalMaterial(1.0, seed=seed)) for seed in (3, 4, 5)
    ]
    matrices, b = [scipy.sparse.csr_array(beam.matrix("csr").to_csr()) for beam in of_materials], BEAM.load()
    memory = int(0.8 * BEAM.matrix("symmetric_bsr").nbytes)
    with prepare(
        matrices[0], memory=memory, precision=precision, device=device, coordinates=BEAM.mesh.coordinates()
    ) as system:
        assert system.matrix.plan.part == "values"
        for number, A in enumerate(matrices):
            if number:
                system.update(A)
            x = system.solve(b, rtol=1e-8).x
            assert np.linalg.norm(b - A @ x) <= 1e-8 * np.linalg.norm(b)
        assert system.nbytes <= memory


@pytest.mark.parametrize("precision", ["float32", "int16"])
def test_an_update_that_cannot_be_read_leaves_the_image(precision, monkeypatch):
    """The old matrix takes its high words from the image, if that is of float32."""
    slabs = [Cantilever(nodes=(24, 5, 5), dof=3, material=LognormalMaterial(1.0, seed=seed)) for seed in (3, 4)]
    old, new = (HostPlaneStore.create(beam.subdivisions(7, "symmetric_bsr")) for beam in slabs)
    b, read_high = BEAM.load(), new.read_high

    def failing(number, buffer):
        if number == 4:
            raise InputError("this subdivision cannot be read")
        read_high(number, buffer)

    monkeypatch.setattr(new, "read_high", failing)
    options = {"precision": precision, "device": "cpu", "coordinates": BEAM.mesh.coordinates()}
    with prepare(old, memory=old.index.nbytes, **options) as system:
        with pytest.raises(InputError, match="cannot be read"):
            system.update(new)
        x = system.solve(b, rtol=1e-8).x
        assert np.linalg.norm(b - BEAM.matrix("csr").to_csr() @ x) <= 1e-8 * np.linalg.norm(b)
