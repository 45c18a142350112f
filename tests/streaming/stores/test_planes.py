"""Values in two planes are those of float64 to the bit, whichever way they are read, and halve the bytes of images."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import scipy.sparse
from kernel_targets import DEVICES, TARGETS, converting

from penstock import prepare, solve
from penstock.fem import Cantilever, LognormalMaterial
from penstock.files.to_store import store_files
from penstock.spmv import CPU, CsrMatrix, Device, InputError, StoreError
from penstock.spmv.formats.partition import row_slabs
from penstock.spmv.formats.symmetric_image import SymmetricImageMatrix
from penstock.streaming import FileStore, HostPlaneStore, HostStore, Ring, StoreBuilder, StreamedMatrix
from penstock.streaming.image import completed_by, image_of_store
from penstock.streaming.stores import planes as planes_module
from penstock.streaming.stores import store_files as files_of_stores
from penstock.streaming.stores.base import has_planes
from penstock.streaming.stores.buffers import PAGE_NBYTES, aligned_buffer
from penstock.streaming.stores.host_planes import CompletedInMemory, JoinedInMemory, joined
from penstock.streaming.stores.planes import (
    CompletedStore,
    HighWords,
    JoinedStore,
    NoPlanesError,
    join_in_place,
    join_on_device,
    split,
)
from penstock.streaming.stores.whole import read_whole

FORMATS = ["csr", "bsr", "symmetric_bsr"]
BEAM = Cantilever(nodes=(24, 5, 5), dof=3, material=LognormalMaterial(sigma=1.0, seed=3))
LOADS = np.random.default_rng(0).standard_normal((BEAM.unknowns, 2))


def planes_of(values):
    high, low = np.empty(values.size, np.float32), np.empty(values.size, np.int32)
    split(values, high, low)
    return high, low


def bytes_to_join(low):
    """Bytes of a subdivision's values, with the low words where they are read."""
    raw = aligned_buffer(-(-8 * low.size // PAGE_NBYTES) * PAGE_NBYTES)
    raw[:] = 0xA5
    first = raw.nbytes - -(-raw.nbytes // (2 * PAGE_NBYTES)) * PAGE_NBYTES
    raw[first : first + low.nbytes] = low.view(np.uint8)
    return raw


def stores_of(tmp_path, format_name, count=7, factor=1.0, where="disk"):
    """The same matrix as it is, and in two planes, on disk or in memory."""
    matrix = BEAM.matrix(format_name)
    arrays = {**matrix.arrays(), "values": factor * matrix.values}
    matrix = matrix.from_arrays(matrix.shape, matrix.dtype, arrays, matrix.parameters())
    if where == "memory":
        return [kind.create(row_slabs(matrix, count)) for kind in (HostStore, HostPlaneStore)]
    return [
        FileStore.create(tmp_path / f"{name}{factor}", row_slabs(matrix, count), planes=planes)
        for name, planes in (("plain", False), ("planes", True))
    ]


def numbers_in_range(count):
    rng = np.random.default_rng(count)
    values = (1.0 + rng.random(count)) * rng.choice([-1.0, 1.0], count) * 2.0 ** rng.integers(-120, 120, count)
    values[rng.integers(0, count, 1 + count // 10)] = 0.0
    return values


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 511, 512, 513, 1023, 4096, 5000, 9215, 100_000, 1_000_003])
def test_what_is_split_is_joined_to_the_bit(threads, count):
    values = numbers_in_range(count)
    high, low = planes_of(values)

    raw = bytes_to_join(low)
    join_in_place(high, raw, threads)

    assert raw[: values.nbytes].tobytes() == values.tobytes()
    assert not raw[values.nbytes :].any()


@pytest.mark.parametrize("target", [each for each in TARGETS if each.id != "cpu"])
@pytest.mark.parametrize("count", [1, 255, 256, 5000])
def test_a_kernel_joins_to_the_bit(target, count):
    values = np.concatenate([numbers_in_range(count), [-0.0, np.inf, -np.inf, np.finfo(np.float32).tiny]])
    high, low = planes_of(values)
    joined = target.put(np.full(values.size + 3, np.nan))

    with target.running():
        join_on_device(target.put(high), target.put(low), joined)

    assert target.get(joined)[: values.size].tobytes() == values.tobytes()
    assert target.get(joined)[values.size :].tobytes() == bytes(24)


@pytest.mark.parametrize("target", [each for each in TARGETS if each.id != "cpu"])
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("part", ["whole", "values", "structure"])
@pytest.mark.parametrize("way", ["low words", "both planes", "high words"])
def test_planes_in_memory_are_joined_where_they_arrive(target, format_name, part, way):
    plain, planes = stores_of(None, format_name, where="memory")
    image = image_of_store(planes, np.float32, CPU)
    of_both, rounded = JoinedInMemory(planes), JoinedStore(planes)
    rounded.rounded = True
    of_both.rounded = way == "high words"
    store = CompletedInMemory(planes, target.put_matrix(image)) if way == "low words" else of_both
    for number, subdivision in enumerate(store.index.subdivisions):
        expected = aligned_buffer(subdivision.part_nbytes(part))
        (rounded if way == "high words" else plain).read_into(number, expected, part)
        arrived = np.full_like(expected, 0xA5)
        for offset, piece in store.segments(number, part):
            arrived[offset : offset + piece.nbytes] = piece
        arrived = target.put(arrived)
        with converting(target):
            store.complete(number, arrived, part, target.put(np.empty(store.scratch_nbytes, np.uint8)))
        np.testing.assert_array_equal(target.get(arrived)[: expected.nbytes], expected)


def test_what_follows_a_rounded_sweep_is_exact_whatever_ends_it(monkeypatch):
    plain, planes = stores_of(None, "bsr", where="memory")
    x, A = LOADS[:, 0], read_whole(plain)
    exact, lost = A @ x, 2.0**-24 * (abs(A) @ abs(x)).max()
    with plain, planes, StreamedMatrix(joined(planes, CPU), int(0.8 * plain.index.nbytes)) as M:
        assert M.plan.resident
        with monkeypatch.context() as patch:
            patch.setattr(StreamedMatrix, "_rows", lambda self, number: 1 / 0 if number == 4 else range(0))
            with pytest.raises(ZeroDivisionError):
                M.apply_rounded(x)
        for ending in (lambda: None, lambda: M.reopen(M.store), lambda: M.apply_rounded(x)):
            assert abs(M.apply_rounded(x) - exact).max() > 1e-3 * lost
            ending()
            assert abs(M.apply(x) - exact).max() < 1e-3 * lost
            assert not M.store.rounded


def test_numbers_at_the_ends_of_the_range():
    largest, least = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
    values = np.array([0.0, -0.0, largest, -largest, least, -least, 1 + 2.0**-52, 2 - 2.0**-52, 1 + 2.0**-24, np.pi])
    values = np.concatenate([values, np.nextafter(values[values != 0], 0.0)[2:], [np.inf, -np.inf]])

    high, low = planes_of(values)

    raw = bytes_to_join(low)
    join_in_place(high, raw)
    assert raw[: values.nbytes].tobytes() == values.tobytes()
    for beyond in (1e-60, -1e200, 1.3 * 2.0**-140):
        with pytest.raises(NoPlanesError, match="beyond the range of float32"):
            planes_of(np.array([1.0, beyond]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("where", ["disk", "memory"])
def test_every_way_to_read_gives_the_same_products(tmp_path, device, format_name, where):
    device, (plain, planes) = Device(device), stores_of(tmp_path, format_name, where=where)
    x, products, moved = device.asarray(LOADS[:, 0].copy()), [], []
    with plain, planes:
        image = image_of_store(planes, np.float32, device)
        completed = completed_by(image, planes)
        assert isinstance(completed, CompletedStore)
        for store in (plain, planes, completed):
            with StreamedMatrix(store, plain.index.nbytes // 2, device=device) as A:
                for _ in range(3):  # slots keep subdivisions from one sweep to the next
                    y = A @ x
                products.append(device.to_host(y))
                moved.append(A.bytes_streamed)
    assert moved[0] == moved[1]
    assert 0.5 < moved[2] / moved[0] < 0.7
    for product in products[1:]:
        if format_name == "symmetric_bsr" and device.kind == "cuda":  # adds atomically
            np.testing.assert_allclose(product, products[0], rtol=1e-12, atol=1e-12 * abs(products[0]).max())
        else:
            assert product.tobytes() == products[0].tobytes()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("where", ["disk", "memory"])
@pytest.mark.parametrize("part", ["whole", "values"])
@pytest.mark.parametrize("held", [False, True])
def test_a_product_may_use_the_high_words_alone(tmp_path, device, format_name, where, part, held):
    device, (plain, planes) = Device(device), stores_of(tmp_path, format_name, where=where)
    x, A = LOADS[:, 0], read_whole(plain)
    exact, lost = A @ x, 2.0**-24 * (abs(A) @ abs(x))
    structure = plain.index.part_nbytes("structure")
    budget, ring = plain.index.nbytes // 2 + structure, Ring(resident_structure=part == "values")
    image = image_of_store(planes, np.float32, device) if held else None
    store = joined(planes, device) if image is None else completed_by(image, planes)
    with plain, planes, StreamedMatrix(store, budget, device=device, ring=ring) as M:
        assert M.can_round
        rounding, moved = 1e-14 * abs(exact).max(), []
        for rounds in (False, True, False, False, True, True, False):  # slots keep subdivisions
            before = M.bytes_streamed
            y = (M.apply_rounded if rounds else M.apply)(device.asarray(x))
            difference = abs(device.to_host(y) - exact)
            assert (difference <= rounds * lost + rounding).all()
            assert not rounds or difference.max() > 1e-3 * lost.max()
            moved.append(M.bytes_streamed - before)
        assert max(moved[1], moved[4], moved[5]) < 0.7 * moved[0]
        assert not held or (moved[1] == 0 and max(moved) < 0.7 * plain.index.nbytes)
        with StreamedMatrix(plain, budget, device=device) as other:
            assert not other.can_round
            with pytest.raises(InputError, match="no high words"):
                other.apply_rounded(device.asarray(x))


@pytest.mark.parametrize("device", [each for each in DEVICES if each != "cpu"])
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("way", ["plain", "low words", "both planes"])
def test_products_between_the_same_vectors_are_replayed_and_others_are_not(device, format_name, way):
    device, (plain, planes) = Device(device), stores_of(None, format_name, where="memory")
    image = image_of_store(planes, np.float32, device)
    store = {"plain": plain, "low words": completed_by(image, planes), "both planes": joined(planes, device)}[way]
    A, rng = read_whole(plain), np.random.default_rng(0)
    with plain, planes, StreamedMatrix(store, plain.index.nbytes // 2, device=device) as M:
        x, out = M.replayed_vectors(device.asarray(LOADS[:, 0]))
        assert M.replayed_vectors(out)[0] is x
        for number in range(8):
            of_host = rng.standard_normal(M.shape[0])
            x[...] = device.asarray(of_host)
            rounds = M.can_round and number in (3, 4, 6)
            (M.apply_rounded if rounds else M.apply)(x, out)
            difference = abs(device.to_host(out) - A @ of_host)
            most = rounds * 2.0**-24 * (abs(A) @ abs(of_host)) + 1e-13 * abs(A).sum(axis=1).max()
            assert (difference <= most).all()
        captured = len(M._sweeper.executor._graphs._sweeps)
        assert captured >= 2
        for _ in range(3):  # of other vectors each
            other = device.asarray(rng.standard_normal((M.shape[0], 2)))
            product = M @ other
            assert abs(device.to_host(product) - A @ device.to_host(other)).max() <= 1e-11 * abs(A).max()
            del other, product
            x = x.copy()
            assert abs(device.to_host(M @ x) - A @ of_host).max() <= 1e-11 * abs(A).max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [np.float32, np.int16])
@pytest.mark.parametrize("where", ["disk", "memory"])
def test_images_of_high_words_are_those_of_the_matrix(tmp_path, device, dtype, where):
    plain, planes = stores_of(tmp_path, "symmetric_bsr", where=where)
    with plain, planes:
        images = [image_of_store(store, dtype, Device(device)) for store in (plain, planes)]

    assert HighWords(planes).index.nbytes < 0.6 * plain.index.nbytes
    one, other = (image.to_device(CPU) for image in images)
    if dtype == np.float32:
        assert one.values.tobytes() == other.values.tobytes()
    scale = abs(one.to_csr()).max()
    # Values that 16 bits tie are rounded once more.
    assert abs(one.to_csr() - other.to_csr()).max() <= (1e-12 if dtype == np.float32 else 1e-4) * scale
    sums = [image.to_csr() @ np.ones(BEAM.unknowns) for image in (one, other)]
    assert abs(sums[0] - sums[1]).max() <= 1e-8 * scale


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["float32", "int16"])
@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("where", ["disk", "memory"])
def test_a_solve_reads_half_of_the_bytes(tmp_path, device, precision, columns, where):
    results, moved, b = [], [], LOADS[:, :columns] if columns > 1 else LOADS[:, 0]
    options = {"coordinates": BEAM.mesh.coordinates(), "precision": precision, "device": device}
    for store in stores_of(tmp_path, "symmetric_bsr", count=16, where=where):
        in_planes = has_planes(store)
        with store, prepare(store, memory=int(0.8 * store.index.nbytes), **options) as system:
            results.append(system.solve(b, rtol=1e-8))
            of_image = HighWords(store).index.nbytes if in_planes else store.index.part_nbytes("structure")
            moved.append(of_image + system.matrix.plan.resident_nbytes + system.matrix.bytes_streamed)
            assert ("low words" in system.explain()) == (has_planes(store) and precision == "float32")
            assert ("in float32 where" in system.explain()) == (has_planes(store) and precision == "int16")
            residual = np.linalg.norm(b - read_whole(store) @ results[-1].x, axis=0) / np.linalg.norm(b, axis=0)
            assert (residual <= 1e-8).all()
    of_plain, of_planes = results
    assert of_plain.iterations == of_planes.iterations
    assert of_planes.sweeps <= of_plain.sweeps  # products with the matrix in float32 may need none
    assert moved[1] < (0.65 if precision == "float32" else 1.0) * moved[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["float32", "int16"])
def test_new_values_come_from_another_store_in_memory_or_a_matrix(tmp_path, device, precision):
    stores = {
        factor: stores_of(tmp_path, "symmetric_bsr", count=16, factor=factor, where="memory") for factor in (1.0, 3.0)
    }
    A, b = read_whole(stores[1.0][0]), LOADS[:, 0]
    options = {"coordinates": BEAM.mesh.coordinates(), "precision": precision, "device": device}
    with prepare(stores[1.0][1], memory=int(0.8 * stores[1.0][0].index.nbytes), **options) as system:
        of_disk = stores_of(tmp_path, "symmetric_bsr", count=16, factor=7.0)[1]
        for store, factor in ((stores[3.0][1], 3.0), (stores[1.0][0], 1.0), (stores[3.0][1], 3.0), (of_disk, 7.0)):
            system.update(store)
            assert ("low words" in system.explain()) == (has_planes(store) and precision == "float32")
            assert ("in float32 where" in system.explain()) == (has_planes(store) and precision == "int16")
            x = system.solve(b).x
            assert np.linalg.norm(b - factor * (A @ x)) <= 1e-8 * np.linalg.norm(b)
        for factor in (2.0, 5.0):
            system.update(scipy.sparse.csr_array(factor * A))
            x = system.solve(b).x
            assert np.linalg.norm(b - factor * (A @ x)) <= 1e-8 * np.linalg.norm(b)
        of_disk.close()


@pytest.mark.parametrize("device", DEVICES)
def test_planes_in_memory_are_used_whatever_the_precision(device):
    plain, planes = stores_of(None, "symmetric_bsr", count=16, where="memory")
    A, b, nbytes = read_whole(plain), LOADS[:, 0], plain.index.nbytes
    for precision, memory in (("float64", nbytes // 2), ("int16", nbytes // 2), ("auto", None), ("auto", nbytes // 2)):
        options = {"coordinates": BEAM.mesh.coordinates(), "precision": precision, "device": device, "memory": memory}
        x = solve(planes, b, **options).x
        assert np.linalg.norm(b - A @ x) <= 1.01e-8 * np.linalg.norm(b)


def test_values_that_have_no_planes_are_refused_in_memory_too():
    matrix = BEAM.matrix("bsr", values_dtype=np.float32)
    with pytest.raises(NoPlanesError, match="values of float32 have no planes"):
        HostPlaneStore.create([matrix])
    with HostPlaneStore.create(BEAM.subdivisions(4)) as store:
        csr = CsrMatrix.from_csr(1e-60 * BEAM.matrix("csr").to_csr())
        assert isinstance(store.refilled(csr), HostStore)
        with pytest.raises(InputError, match="pattern"):
            store.refilled(CsrMatrix.from_csr(scipy.sparse.eye_array(BEAM.unknowns).tocsr()))


def test_new_values_come_from_another_store_or_matrix(tmp_path):
    stores = {factor: stores_of(tmp_path, "symmetric_bsr", count=16, factor=factor) for factor in (1.0, 3.0)}
    A, b = read_whole(stores[1.0][0]), LOADS[:, 0]
    options = {"coordinates": BEAM.mesh.coordinates(), "precision": "float32", "device": "cpu"}
    with prepare(stores[1.0][1], memory=int(0.8 * stores[1.0][0].index.nbytes), **options) as system:
        # From planes to planes, to a store without, and back.
        for store, factor in ((stores[3.0][1], 3.0), (stores[1.0][0], 1.0), (stores[3.0][1], 3.0)):
            system.update(store)
            assert ("low words" in system.explain()) == store.planes
            x = system.solve(b).x
            assert np.linalg.norm(b - factor * (A @ x)) <= 1e-8 * np.linalg.norm(b)
    # A matrix in memory whose planes are in a temporary folder.
    with prepare(A, memory=int(0.45 * 12 * A.nnz), block_size=3, folder=tmp_path, **options) as system:
        assert "low words" in system.explain()
        for factor in (2.0, 1e-45, 5.0):  # the second one has neither planes nor an image
            system.update(scipy.sparse.csr_array(factor * A))
            x = system.solve(b).x
            assert np.linalg.norm(b - factor * (A @ x)) <= 1e-8 * np.linalg.norm(b)


@pytest.mark.parametrize("place", ["high", "low", "corrections"])
def test_what_is_damaged_is_one_error(tmp_path, place):
    _, store = stores_of(tmp_path, "symmetric_bsr", count=2)
    store.close()
    first, path = store.index.subdivisions[0], store.path / "slabs.bin"
    content = bytearray(path.read_bytes())
    at = {"high": first.values_start + 64, "low": first.values_start + first.part_nbytes("values") - 9000}
    content[at.get(place, len(content) - PAGE_NBYTES)] ^= 1
    path.write_bytes(content)
    buffer = aligned_buffer(first.nbytes)

    with FileStore(store.path) as opened:
        reads = {
            "high": lambda: opened.read_high(0, buffer),
            "low": lambda: opened.read_low(0, buffer),
            "corrections": opened.corrections,
        }
        for name, read in reads.items():
            if name == place:
                with pytest.raises(StoreError, match=r"not match (its|their) checksum"):
                    read()
            else:
                read()


@pytest.mark.parametrize(
    "change",
    [
        {"penstock_store": 2},
        {"planes": None},
        {"planes": {"checksums": [[float("inf"), 1]], "corrections_nbytes": 0, "corrections_checksum": 0}},
        {"planes": {"checksums": [[1, 1], [1, 1]], "corrections_nbytes": 0, "corrections_checksum": 0}},
    ],
)
def test_an_index_that_contradicts_itself_is_one_error(tmp_path, change):
    _, store = stores_of(tmp_path, "symmetric_bsr", count=2)
    store.close()
    path = store.path / "index.json"
    content = json.loads(path.read_text()) | change
    version = content.pop("penstock_store")
    content.pop("checksum")
    checksum = files_of_stores._json_checksum(content)
    path.write_text(json.dumps({"penstock_store": version, "checksum": checksum, **content}))

    with pytest.raises(StoreError, match=r"damaged|instead of"):
        FileStore(store.path)


def test_several_threads_may_read_one_store(tmp_path):
    plain, planes = stores_of(tmp_path, "symmetric_bsr", count=16)
    with plain, planes:
        expected = [read(plain, number) for number in range(16)]

        def differs(seed):
            numbers = np.random.default_rng(seed).integers(0, 16, 150)
            return sum(read(planes, number).tobytes() != expected[number].tobytes() for number in numbers)

        with ThreadPoolExecutor(4) as threads:
            assert sum(threads.map(differs, range(8))) == 0


def read(store, number):
    buffer = aligned_buffer(store.index.subdivisions[number].nbytes)
    store.read_into(number, buffer)
    return buffer


@pytest.mark.parametrize("late", [False, True])
def test_what_has_no_planes_is_stored_without_where_they_are_not_asked_for(tmp_path, late, monkeypatch):
    A = scipy.sparse.csr_array(BEAM.matrix("csr").to_csr())
    A[0 if not late else -1, 0 if not late else -1] *= 1e-60
    scipy.sparse.save_npz(tmp_path / "A.npz", scipy.sparse.csr_matrix(A))
    options = {"format": "symmetric_bsr", "slab": "100 KiB"}
    with store_files([tmp_path / "A.npz"], tmp_path / "half", **options) as store:
        assert not store.planes
        assert len(store.index.subdivisions) > 2
        assert abs(read_whole(store) - A).max() == 0
    with pytest.raises(NoPlanesError, match="--no-planes"):
        store_files([tmp_path / "A.npz"], tmp_path / "never", planes=True, **options)
    single = scipy.sparse.csr_matrix(BEAM.matrix("csr").to_csr().astype(np.float32))
    scipy.sparse.save_npz(tmp_path / "single.npz", single)
    with store_files([tmp_path / "single.npz"], tmp_path / "single", **options) as store:
        assert not store.planes
    monkeypatch.setattr(planes_module, "available_nbytes", lambda: 100)
    with FileStore.create(tmp_path / "small", BEAM.subdivisions(3, "symmetric_bsr"), planes="auto") as store:
        assert not store.planes


def test_what_has_no_planes_is_refused_and_leaves_nothing(tmp_path):
    single = BEAM.matrix("csr", values_dtype=np.float32)
    with pytest.raises(InputError, match="values of float32 have no planes"):
        FileStore.create(tmp_path / "single", single, planes=True)
    with pytest.raises(NoPlanesError, match="store it without them"):
        FileStore.create(tmp_path / "tiny", scipy.sparse.csr_array([[1e-60, 1.0], [1.0, 3.0]]), planes=True)
    assert not list(tmp_path.iterdir())


def test_a_builder_and_files_make_planes(tmp_path):
    A = BEAM.matrix("csr").to_csr()
    scipy.sparse.save_npz(tmp_path / "A.npz", scipy.sparse.csr_matrix(A))
    with StoreBuilder(tmp_path / "built", A.shape, format="symmetric_bsr", block_size=3, planes=True) as builder:
        builder.add_matrix(A)
        built = builder.finish()
    half = store_files([tmp_path / "A.npz"], tmp_path / "half", format="symmetric_bsr")
    whole = store_files([tmp_path / "A.npz"], tmp_path / "whole")
    plain = store_files([tmp_path / "A.npz"], tmp_path / "without", format="symmetric_bsr", planes=False)

    assert [store.planes for store in (built, half, whole, plain)] == [True, True, False, False]
    for store in (built, half, whole, plain):
        with store:
            assert abs(read_whole(store) - A).max() == 0
    assert solve(tmp_path / "half", LOADS[:, 0], device="cpu").converged


def test_corrections_are_those_of_the_whole_matrix_however_they_are_computed(monkeypatch):
    matrix = BEAM.matrix("symmetric_bsr")
    with HostPlaneStore.create(row_slabs(matrix, 7)) as store:
        at_once = store.corrections()
    monkeypatch.setattr(planes_module, "_AT_ONCE", 9 * 32)  # numbers of 32 blocks
    with HostPlaneStore.create(row_slabs(matrix, 7)) as store:
        in_pieces = store.corrections()

    np.testing.assert_array_equal(in_pieces, at_once)
    expected = SymmetricImageMatrix.of(matrix, np.float32).corrections
    np.testing.assert_allclose(at_once, expected, rtol=0, atol=1e-5 * abs(expected).max())
