"""Many products of a recurrence in one sweep have the bits of products one after the other."""

import numpy as np
import pytest
import scipy.sparse
from kernel_targets import DEVICES

from penstock.fem import Cantilever, LognormalMaterial
from penstock.solvers import chebyshev
from penstock.spmv import CsrMatrix, VectorSpace, as_operator, format_named
from penstock.spmv.vectors.recurrence import Recurrence, RecurrenceStep
from penstock.streaming import (
    FileStore,
    HostStore,
    LinkRates,
    Ring,
    StreamedMatrix,
    Workload,
    plan_stream,
    reach_of_store,
)
from penstock.streaming.execution.cuda import CudaExecutor

FORMATS = ("coo", "csr", "ell", "sliced_ell", "sell", "hyb", "bsr", "sliced_bsr")
PLANES = 7  # of the beam


def planes(beam, name="bsr", parts=1):
    """A subdivision for every plane of nodes, which couples with its neighbours only, or several."""
    A, rows = beam.matrix(name), beam.unknowns // PLANES // parts
    return [A.rows(start, start + rows) for start in range(0, beam.unknowns, rows)]


@pytest.fixture(scope="module")
def long_beam():
    """3,900 rows, which even formats that cut at coarse places take in a few pieces."""
    return CsrMatrix.from_csr(Cantilever(nodes=(65, 5, 4), dof=3).matrix("csr").to_csr())


@pytest.fixture(scope="module")
def thick_beam():
    """A plane holds two chunks of 32 nodes."""
    return Cantilever(nodes=(PLANES, 8, 8), dof=3, material=LognormalMaterial(sigma=1.0, seed=3))


def steps(count):
    rng = np.random.default_rng(1)
    factors = [(*rng.uniform(-1, 1, 2), float(rng.uniform(-1, 1)) if j else 0.0) for j in range(count)]
    # Every third step lacks D, every fifth f.
    return [RecurrenceStep(*of, scaled=bool((j + 1) % 3), driven=bool((j + 1) % 5)) for j, of in enumerate(factors)]


def recurrence(A, count, columns=None):
    """The same numbers each time; what must not be read is NaN."""
    rng, shape = np.random.default_rng(2), (A.shape[0],) if columns is None else (A.shape[0], columns)
    v, f, diagonal = (A.device.asarray(rng.standard_normal(of)) for of in (shape, shape, A.shape[:1]))
    before, image = (A.device.xp.full_like(v, np.nan) for _ in range(2))
    return Recurrence(steps(count), v, before, f, diagonal, image, VectorSpace(A.device))


def expected(A, count, columns=None):
    reference = recurrence(A, count, columns)
    reference.run_whole(A, range(count))
    return [A.device.to_host(vector) for vector in reference.vectors(count)]


def taken(A, count, columns=None):
    of = recurrence(A, count, columns)
    last = of.run(A)
    assert last is of.vectors(count)[0]
    return [A.device.to_host(vector) for vector in of.vectors(count)]


def slots_nbytes(store, slots):
    return slots * max(s.nbytes for s in store.index.subdivisions)


def captured_sweeps(A):
    """The parts of each sweep that a GPU replays; there are none on a CPU."""
    executor = A._sweeper.executor
    return list(executor._graphs._sweeps.values()) if isinstance(executor, CudaExecutor) else []


def through_ring(store, slots, device="cpu", **options):
    """Open a store with a budget for a ring of so many slots and nothing else."""
    return StreamedMatrix(store, slots_nbytes(store, slots), device=device, ring=Ring(slots=slots, **options))


def test_a_resident_matrix_takes_the_steps_of_the_definition(beam):
    A = beam.matrix("csr")
    of = recurrence(A, 6)
    dense, (v, f, d) = A.to_csr().toarray(), (np.asarray(x).copy() for x in (of.v, of.f, of.diagonal))
    before = np.zeros_like(v)
    for step in of.steps:
        change = (f if step.driven else 0.0) - dense @ v
        v, before = step.a * (d if step.scaled else 1.0) * change + step.b * v + step.c * before, v

    np.testing.assert_allclose(of.run(A), v, rtol=1e-10, atol=1e-10 * np.abs(v).max())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("slots", [2, 3, 5])
def test_streamed_it_has_the_same_bits(long_beam, name, slots, device):
    whole = format_named(name).from_csr(long_beam)
    store, resident = HostStore.from_matrix(whole, 3 if name == "sliced_bsr" else 5), whole.to_device(device)
    by_chance = device == "cuda" and format_named(name).traits.adds
    with store, through_ring(store, slots, device=device) as A:
        for count in (1, 2, 7, 4):
            for one, other in zip(taken(A, count), expected(resident, count), strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=1e-12 * np.abs(other).max() if by_chance else 0)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("sweep_order", ["alternate", "cyclic", "restart"])
@pytest.mark.parametrize("kind", [HostStore, FileStore])
@pytest.mark.parametrize("columns", [None, 3])
def test_from_any_store_by_any_plan(beam, overlap, sweep_order, kind, columns, tmp_path):
    slabs = planes(beam)
    store = HostStore.create(slabs) if kind is HostStore else FileStore.create(tmp_path / "store", slabs)
    resident = beam.matrix("bsr")
    with store, through_ring(store, 4, overlap=overlap, sweeps=sweep_order) as A:
        for count in (5, 6):
            for one, other in zip(taken(A, count, columns), expected(resident, count, columns), strict=True):
                np.testing.assert_array_equal(one, other)
            x = np.random.default_rng(0).standard_normal(A.shape[0])
            np.testing.assert_array_equal(A @ x, resident @ x)  # an ordinary product between them


@pytest.mark.parametrize(("slots", "overlap", "powers"), [(2, True, 1), (2, False, 2), (3, True, 2), (6, True, 5)])
def test_a_sweep_computes_as_many_powers_as_the_ring_has_room_for(beam, slots, overlap, powers):
    store = HostStore.create(planes(beam))
    with through_ring(store, slots, overlap=overlap) as A:
        assert A.powers_per_sweep() == powers
        before, moved = A.sweeps, A.bytes_streamed
        taken(A, 10)

        assert A.sweeps - before == -(-10 // powers)
        assert A.bytes_streamed - moved <= (A.sweeps - before) * store.index.nbytes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sweep_order", ["alternate", "cyclic", "restart"])
@pytest.mark.parametrize("name", ["bsr", "symmetric_bsr"])
@pytest.mark.parametrize("link", [1e6, 1e12])
def test_the_same_again_in_the_same_memory_has_the_same_bits(thick_beam, link, name, sweep_order, device):
    """From the second time on in each direction, a GPU replays a CUDA graph, in parts if the link is thought to be slow."""
    store, count = HostStore.create(planes(thick_beam, name)), 6
    budget, rates = slots_nbytes(store, 4) + store.index.nbytes // 4, LinkRates(link, 1e12)
    plan = plan_stream(store.index, budget, ring=Ring(slots=4, sweeps=sweep_order), rates=rates)
    with store, StreamedMatrix(store, budget, device=device, plan=plan) as A:
        of, x = recurrence(A, count), A.device.asarray(np.random.default_rng(0).standard_normal(A.shape[0]))
        start, found, product = of.v.copy(), [], expected(thick_beam.matrix(name).to_device(device), count)[0]
        for time in range(7):
            of.v[...], of.before[...] = start, np.nan
            found.append(A.device.to_host(of.run(A)).copy())
            if time == 3:
                A @ x  # turns the next sweep, and is not captured
        for one in found:
            exact = name == "bsr"
            np.testing.assert_allclose(one, product, rtol=0, atol=0 if exact else 1e-12 * np.abs(product).max())
        captured = device == "cuda" and sweep_order != "cyclic"
        parts = 1 if link == 1e12 else {"alternate": 3, "restart": 2}.get(sweep_order)
        assert {len(sweep) for sweep in captured_sweeps(A)} == ({parts} if captured else set())


@pytest.mark.parametrize("device", DEVICES)
def test_a_polynomial_of_any_vectors_is_captured_once_in_each_direction(beam, device):
    store, resident = HostStore.create(planes(beam)), chebyshev(beam.matrix("bsr"), 5, high=3.0)
    with store, through_ring(store, 6, device=device) as A:
        M, kept = chebyshev(A, 5, high=3.0), []
        for seed in range(6):
            r = np.random.default_rng(seed).standard_normal(A.shape[0])
            own = A.device.asarray(r)
            z, w = A.device.xp.empty_like(own), A.device.xp.empty_like(own)
            M.apply_with_product(own, z, w)
            kept.append((own, z, w))  # so that the next vectors are elsewhere
            expected_z, expected_w = np.empty_like(r), np.empty_like(r)
            resident.apply_with_product(r, expected_z, expected_w)
            np.testing.assert_array_equal(A.device.to_host(own), r)
            rounding = 1e-13 if device == "cuda" else 0
            np.testing.assert_allclose(A.device.to_host(z), expected_z, rtol=0, atol=rounding * abs(expected_z).max())
            np.testing.assert_allclose(A.device.to_host(w), expected_w, rtol=0, atol=rounding * abs(expected_w).max())
        assert len(captured_sweeps(A)) == (2 if device == "cuda" else 0)


def test_part_of_the_matrix_may_be_resident(beam):
    store = HostStore.create(planes(beam))
    budget = slots_nbytes(store, 3) + store.index.nbytes // 3
    with StreamedMatrix(store, budget, ring=Ring(slots=3)) as A:
        assert A.plan.resident
        for one, other in zip(taken(A, 6), expected(beam.matrix("bsr"), 6), strict=True):
            np.testing.assert_array_equal(one, other)


def test_subdivisions_thinner_than_the_couplings_reach_further(beam):
    """Half planes couple with two subdivisions to either side, or three."""
    store = HostStore.create(beam.subdivisions(2 * PLANES, "bsr"))
    with through_ring(store, 9) as A:
        assert A.reach in (2, 3)
        assert A.powers_per_sweep() == 7 // A.reach + 1 > 2
        for one, other in zip(taken(A, 7), expected(beam.matrix("bsr"), 7), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("known", [True, False])
def test_a_sweep_measures_the_reach_that_a_plan_does_not_know(beam, known):
    store = HostStore.create(beam.subdivisions(2 * PLANES, "bsr"))
    budget, more = slots_nbytes(store, 9), {"workload": Workload(degree=7), "ring": Ring(slots=9)}
    plan = plan_stream(store.index, budget, **more, reach=reach_of_store(store) if known else None)
    with StreamedMatrix(store, budget, plan=plan) as A:
        assert A.reach in (2, 3)
        assert A.sweeps == (0 if known else 1)
        for one, other in zip(taken(A, 7), expected(beam.matrix("bsr"), 7), strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_matrix_that_couples_everything_takes_one_product_a_sweep(beam):
    shuffled = np.random.default_rng(0).permutation(beam.unknowns)
    matrix = scipy.sparse.csr_array(beam.matrix("csr").to_csr())[shuffled][:, shuffled].tocsr()
    matrix.sort_indices()
    store = HostStore.create([matrix[start : start + 60] for start in range(0, beam.unknowns, 60)])
    with through_ring(store, 4) as A:
        assert A.powers_per_sweep() == 1
        for one, other in zip(taken(A, 4), expected(as_operator(matrix), 4), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("sweep_order", ["alternate", "cyclic", "restart"])
@pytest.mark.parametrize("columns", [None, 3])
@pytest.mark.parametrize("device", DEVICES)
def test_of_a_matrix_of_which_half_is_stored_it_agrees_to_rounding_in_both_directions(
    thick_beam, overlap, sweep_order, columns, device
):
    store, whole = HostStore.create(planes(thick_beam, "symmetric_bsr")), thick_beam.matrix("bsr").to_device(device)
    with store, through_ring(store, 4, overlap=overlap, sweeps=sweep_order, device=device) as A:
        assert A.powers_per_sweep() == (3 if overlap else 4)
        for count in (3, 5, 8, 1):
            for one, other in zip(taken(A, count, columns), expected(whole, count, columns), strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=1e-12 * np.abs(other).max())


def test_halves_that_reach_further_and_parts_that_stay_agree_as_well(thick_beam):
    store, whole = HostStore.create(planes(thick_beam, "symmetric_bsr", parts=2)), thick_beam.matrix("bsr")
    budget = slots_nbytes(store, 8) + store.index.nbytes // 4
    with StreamedMatrix(store, budget, ring=Ring(slots=8)) as A:
        assert A.plan.resident
        assert A.reach > 1
        assert A.powers_per_sweep() > 2
        for count in (5, 8, 7):
            for one, other in zip(taken(A, count), expected(whole, count), strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=1e-12 * np.abs(other).max())


def test_all_steps_of_a_matrix_that_fits_are_taken(beam):
    store = HostStore.create(planes(beam))
    with StreamedMatrix(store, store.index.nbytes) as A:
        assert not A.plan.slots
        for one, other in zip(taken(A, 5), expected(beam.matrix("bsr"), 5), strict=True):
            np.testing.assert_array_equal(one, other)
        assert A.bytes_streamed == 0


def test_a_polynomial_of_several_products_sweeps_once(beam):
    store = HostStore.create(planes(beam))
    with through_ring(store, 6) as A:
        M, r = chebyshev(A, 5), np.random.default_rng(0).standard_normal(A.shape[0])
        A.powers_per_sweep()
        before = A.sweeps

        z = M @ r

        assert A.sweeps - before == 1
        np.testing.assert_array_equal(z, chebyshev(beam.matrix("bsr"), 5) @ r)


def test_an_error_in_the_middle_of_a_wave_says_where_and_leaves_the_matrix_usable(beam):
    store = HostStore.create(planes(beam))
    with through_ring(store, 4) as A:
        A.powers_per_sweep()
        broken = recurrence(A, 4)
        broken.image = None
        with pytest.raises(TypeError) as caught:
            broken.run(A)
        assert "while computing with" in "".join(caught.value.__notes__)

        for one, other in zip(taken(A, 4), expected(beam.matrix("bsr"), 4), strict=True):
            np.testing.assert_array_equal(one, other)


def hooked(A):
    """A recurrence whose steps add a vector, form a residual and keep copies."""
    plain = recurrence(A, 6)
    xp, n = A.device.xp, A.shape[0]
    chosen = list(plain.steps)
    chosen[1] = RecurrenceStep(0.3, 1.0, 0.0, driven=False, adds=True)
    chosen[2] = RecurrenceStep(0.7, 0.0, 0.0, forms_residual=True, keeps=0)
    chosen[4] = RecurrenceStep(0.2, 1.0, -0.5, keeps=1)
    plain.steps, plain.added = chosen, A.device.asarray(np.random.default_rng(4).standard_normal(n))
    plain.kept = ((xp.full(n, np.nan), None), (xp.full(n, np.nan), xp.full(n, np.nan)))
    return plain


def outcome(A, found):
    arrays = [*found.vectors(6), found.f, found.kept[0][0], *found.kept[1]]
    return [A.device.to_host(array) for array in arrays]


@pytest.mark.parametrize("device", DEVICES)
def test_a_vector_is_added_the_residual_formed_and_copies_kept(thick_beam, device):
    A = thick_beam.matrix().to_device(device)
    dense, found = A.to_csr(), hooked(A)
    v, f, added = (A.device.to_host(array).copy() for array in (found.v, found.f, found.added))
    D = A.device.to_host(found.diagonal)

    found.run_whole(A, range(6))

    x, before, kept = v, None, []
    for step in found.steps:
        image = dense @ x
        kept += [(x, image)] if step.keeps is not None else []
        rhs = f if step.driven else 0.0
        new = step.a * (D if step.scaled else 1.0) * (rhs - image) + step.b * x
        new = new + step.c * before if step.c else new
        f = f - image if step.forms_residual else f
        x, before = new + added if step.adds else new, x
    expected_arrays = [x, before, f, kept[0][0], *kept[1]]
    for given, wanted in zip(outcome(A, found), expected_arrays, strict=True):
        assert np.allclose(given, wanted, rtol=1e-10, atol=1e-10 * abs(wanted).max())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slots", [7, 4, 2])
@pytest.mark.parametrize("name", ["bsr", "symmetric_bsr"])
def test_streamed_these_steps_have_the_same_bits(thick_beam, name, slots, device):
    """Half of the matrix adds in another order; repeated, a GPU replays what it has captured."""
    A = thick_beam.matrix(name).to_device(device)
    reference = hooked(A)
    reference.run_whole(A, range(6))
    store = HostStore.create(thick_beam.subdivisions(PLANES, name))
    with (
        store,
        StreamedMatrix(
            store, slots * max(store.index.sizes["whole"]), device=device, ring=Ring(slots=slots)
        ) as streamed,
    ):
        found = hooked(streamed)
        start, f = found.v.copy(), found.f.copy()
        for _ in range(4):
            found.v[...], found.f[...] = start, f
            found.run(streamed)

            for given, wanted in zip(outcome(streamed, found), outcome(A, reference), strict=True):
                if name == "bsr":
                    assert np.array_equal(given, wanted)
                else:
                    assert np.allclose(given, wanted, rtol=1e-9, atol=1e-9 * abs(wanted).max())
