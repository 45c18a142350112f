"""penstock.eigsh: the lowest modes of bodies, against SciPy's shift-invert, and what it refuses."""

import warnings

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
from kernel_targets import gpu_count
from modes_reference import box, reference

import penstock
from penstock import InputError, NotConvergedError, NotConvergedWarning
from penstock.fem import BoxMesh, Cantilever, HeatConduction, LognormalMaterial, TwoPhaseMaterial
from penstock.solvers import ModesReason, SmoothedAggregationSpec
from penstock.streaming import FileStore, HostStore, Ring, StreamedMatrix, Workload


def tetrahedra(nodes, k=10, *, fixed=True, element=None, seed=0):
    """A box of five tetrahedra for each brick, with nodes that are moved a little and in random order."""
    mesh = BoxMesh(nodes=nodes)
    corners, rng = mesh.connectivity(), np.random.default_rng(seed)
    split = [[0, 1, 3, 4], [1, 2, 3, 6], [1, 4, 5, 6], [3, 4, 6, 7], [1, 3, 4, 6]]
    connectivity = np.concatenate([corners[:, four] for four in split])
    points = mesh.coordinates() + 0.1 * min(mesh.spacing) * rng.uniform(-1, 1, (mesh.node_count, 3))
    places = rng.permutation(mesh.node_count)
    shuffled = np.empty_like(points)
    shuffled[places] = points
    dof = 3 if element is None else 1
    held = places[: nodes[1] * nodes[2]]
    of_nodes = (dof * held[:, None] + np.arange(dof)).reshape(-1)
    body = penstock.ElementMatrix(shuffled, places[connectivity], element=element, fixed=of_nodes if fixed else None)
    return body.to_csr(), body.mass(), shuffled, k


def plate(nodes, k, thickness=0.03):
    """A plate that is held at all four sides."""
    K, M, X, _ = box(nodes, (1.0, 1.0, thickness), clamped=False)
    inside = np.all((X[:, :2] > 1e-9) & (X[:, :2] < 1 - 1e-9), axis=1)
    rows = np.flatnonzero(np.repeat(inside, 3))
    return K[rows][:, rows], M.to_csr()[rows][:, rows], X[inside], k


def path(n, k):
    K = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n)).tocsr()
    return K, scipy.sparse.eye_array(n, format="csr"), None, k


BODIES = {
    "beam": lambda: box((25, 6, 6), 5.0),
    "beam, lumped": lambda: box((25, 6, 6), 5.0, lumped=True),
    "beam, one mode": lambda: box((25, 6, 6), 5.0, k=1),
    "beam, 60 modes": lambda: box((25, 6, 6), 5.0, k=60),
    "slender beam": lambda: box((101, 4, 4), 30.0, k=6),
    "free beam": lambda: box((25, 6, 6), 5.0, clamped=False),
    "free beam, 30 modes": lambda: box((25, 6, 6), 5.0, clamped=False, k=30),
    "free beam, rigid modes only": lambda: box((25, 6, 6), 5.0, clamped=False, k=4),
    "free cube": lambda: box(12, clamped=False, k=20),
    "cube": lambda: box(12, k=12),
    "jumps": lambda: box((17, 9, 9), 2.0, material=TwoPhaseMaterial(contrast=1000.0, seed=1)),
    "lognormal": lambda: box((17, 9, 9), 2.0, material=LognormalMaterial(sigma=1.0, seed=2)),
    "micropolar": lambda: box((13, 6, 6), 3.0, dof=6),
    "free micropolar": lambda: box((13, 6, 6), 3.0, dof=6, clamped=False, k=9),
    "conduction": lambda: box(16, dof=1),
    "insulated": lambda: box((15, 14, 13), dof=1, clamped=False, k=7),
    "plate": lambda: plate((21, 21, 3), 8),
    "tetrahedra in random order": lambda: tetrahedra((13, 8, 8)),
    "free tetrahedra": lambda: tetrahedra((13, 8, 8), fixed=False, k=12),
    "conducting tetrahedra": lambda: tetrahedra((13, 12, 11), element=HeatConduction(), k=15),
    "small": lambda: box((5, 3, 3), k=20),
    "path": lambda: path(4000, 5),
}


@pytest.fixture(scope="module", autouse=True)
def always_in_one_thread(one_thread):
    """These systems are small."""


@pytest.mark.parametrize("name", BODIES)
def test_values_are_those_of_shift_invert(name):
    K, M, X, k = BODIES[name]()
    sparse_mass = M.to_csr() if hasattr(M, "to_csr") else M
    modes = penstock.eigsh(K, k, M, coordinates=X, device="cpu", tol=1e-6, on_failure="return")
    free = name.startswith(("free", "insulated"))
    exact = reference(K, sparse_mass, k, shift=-1e-4 if free else 0.0)
    assert modes.converged or modes.reason is ModesReason.ROUNDING_FLOOR
    zeros = {"insulated": 1}.get(name, min(k, 6)) if free else 0
    assert modes.zeros == zeros
    assert np.allclose(modes.values[zeros:], exact[zeros:], rtol=1e-8)
    assert np.all(abs(modes.values[:zeros]) < 1e-9 * (modes.values[-1] if k > zeros else 1.0))
    X = modes.vectors
    assert np.allclose(X.T @ (sparse_mass @ X), np.eye(k), atol=1e-8)
    residuals = np.linalg.norm(K @ X - (sparse_mass @ X) * modes.values, axis=0)
    scale = np.where(np.arange(k) < zeros, 1.0, modes.values) * np.linalg.norm(sparse_mass @ X, axis=0)
    assert np.all(residuals <= (1.01e-6 if modes.converged else 1e-4) * scale)
    assert np.all(abs(modes.values[zeros:] - exact[zeros:]) <= modes.errors[zeros:] + 1e-8 * exact[zeros:])


@pytest.mark.parametrize("memory", ["600 KiB", "350 KiB"])
def test_a_streamed_problem_gives_what_memory_gives(memory, tmp_path):
    K, M, X, k = BODIES["beam"]()
    resident = penstock.eigsh(K, k, M, coordinates=X, device="cpu")
    streamed = penstock.eigsh(K, k, M, coordinates=X, device="cpu", memory=memory, folder=tmp_path)
    assert streamed.converged
    assert streamed.bytes_streamed > 0
    assert np.allclose(streamed.values, resident.values, rtol=1e-9)
    assert "streamed" in streamed.explain()
    assert not list(tmp_path.iterdir())


def test_an_iteration_is_one_pass_where_the_ring_has_room():
    beam = Cantilever(nodes=(97, 5, 5), dof=3, lengths=19.4)
    store = HostStore.create(beam.subdivisions(48, "symmetric_bsr"))
    with StreamedMatrix(store, "1600 KiB", ring=Ring(slots=15), workload=Workload(12, degree=14)) as K:
        assert K.powers_per_sweep() >= 14
        modes = penstock.eigsh(K, 6, beam.mass(), coordinates=beam.mesh.coordinates(), block_size=3)
        assert modes.sweeps == K.sweeps
    setup = 7  # diagonal blocks, bound of the eigenvalues, and both coarse matrices
    assert modes.converged
    assert modes.sweeps <= modes.iterations + setup
    assert np.allclose(modes.values, reference(beam.matrix().to_csr(), beam.mass().to_csr(), 6), rtol=1e-8)


def test_a_very_slender_beam_ends_at_the_rounding_floor():
    beam = Cantilever(nodes=(401, 5, 5), dof=3, lengths=100.0)
    modes = penstock.eigsh(
        beam.matrix(), 6, beam.mass(), coordinates=beam.mesh.coordinates(), device="cpu", on_failure="return"
    )
    assert modes.reason.name in ("CONVERGED", "ROUNDING_FLOOR")
    assert modes.residuals.max() < 1e-4
    # Frequencies of bending are as those of Bernoulli: 22.034 / 3.516 squared.
    assert modes.values[2] / modes.values[0] == pytest.approx((22.0345 / 3.51602) ** 2, rel=1e-2)


def test_residuals_of_a_free_body_in_float32_end_at_the_rounding_of_its_entries():
    """They go on neither to the last iteration nor until the vectors are lost."""
    K, M, X, k = box((25, 17, 2), (3.0, 2.0, 0.2), clamped=False, k=10)
    modes = penstock.eigsh(K.astype(np.float32), k, M, coordinates=X, device="cpu", on_failure="return")
    assert modes.iterations < 100
    assert np.abs(modes.vectors.T @ (M.to_csr() @ modes.vectors) - np.eye(k)).max() < 1e-6
    np.testing.assert_allclose(modes.values[6:], reference(K, M.to_csr(), k, -1e-3)[6:], rtol=1e-3)


def test_a_free_body_in_float32():
    beam = Cantilever(nodes=(17, 6, 6), dof=3, lengths=3.0, clamped=False)
    K, M, X = beam.matrix().to_csr(), beam.mass().to_csr(), beam.mesh.coordinates()
    modes = penstock.eigsh(K.astype(np.float32), 9, M, coordinates=X, device="cpu")
    assert modes.zeros == 6
    assert np.allclose(modes.values[6:], reference(K, M, 9)[6:], rtol=1e-4)


def test_a_star_whose_coarse_level_is_a_constant():
    n = 1500
    rows, ones = np.arange(1, n), np.ones(n - 1)
    links = scipy.sparse.coo_array((ones, (rows, np.zeros(n - 1, dtype=int))), shape=(n, n))
    links = links + links.T
    K = (scipy.sparse.diags_array(np.asarray(links.sum(axis=1)).ravel()) - links).tocsr()
    modes = penstock.eigsh(K, 3, device="cpu")
    assert modes.zeros == 1
    assert np.allclose(modes.values, [0.0, 1.0, 1.0], atol=1e-9)
    assert modes.cuts_cluster


def test_a_plan_names_vectors_and_why_there_is_a_coarse_level():
    beam = Cantilever(nodes=(17, 6, 6), dof=3, lengths=3.0)
    text = penstock.eigsh(beam.matrix(), 2, beam.mass(), coordinates=beam.mesh.coordinates(), device="cpu").explain()
    assert "block LOBPCG for blocks of 8 vectors, preconditioner smoothed_aggregation of degree 9" in text
    assert "smoothed_aggregation: modes need a coarse level\n" in text


@pytest.mark.parametrize("contrast", [1.0, 1000.0])
@pytest.mark.parametrize("with_mass", [True, False])
def test_where_stiffness_jumps_more_vectors_iterate(contrast, with_mass):
    body = Cantilever(9, material=TwoPhaseMaterial(contrast=contrast, fraction=0.5))
    K, M, X = body.matrix().to_csr(), body.mass() if with_mass else None, body.mesh.coordinates()
    text = penstock.eigsh(K, 2, M, coordinates=X, device="cpu", tol=1e-4).explain()
    assert ("stiffness jumps between nodes" in text) == (contrast > 1)
    assert ("blocks of 16 vectors, preconditioner smoothed_aggregation of degree 13" in text) == (contrast > 1)


def test_jumps_of_a_thousand_take_thirty_passes():
    body = Cantilever(16, material=TwoPhaseMaterial(contrast=1000.0, fraction=0.5))
    K, X = body.matrix().to_csr(), body.mesh.coordinates()
    modes = penstock.eigsh(K, 10, body.mass(), coordinates=X, device="cpu", tol=1e-6)
    assert modes.converged
    assert modes.iterations + 6 <= 30  # with the passes of a set-up


def test_rows_in_another_order_are_put_back(tmp_path):
    K, M, X, k = BODIES["tetrahedra in random order"]()
    modes = penstock.eigsh(K, k, M, coordinates=X, device="cpu", memory="2 MiB", folder=tmp_path)
    residuals = np.linalg.norm(K @ modes.vectors - (M.to_csr() @ modes.vectors) * modes.values, axis=0)
    assert np.all(residuals <= 1e-5 * modes.values * np.linalg.norm(M.to_csr() @ modes.vectors, axis=0))
    assert np.allclose(modes.values, reference(K, M.to_csr(), k), rtol=1e-8)


@pytest.mark.parametrize("kind", ["format", "store", "elements"])
def test_other_kinds_of_matrices(kind, tmp_path):
    beam = Cantilever(nodes=(17, 6, 6), dof=3, lengths=3.0)
    exact = reference(beam.matrix().to_csr(), beam.mass().to_csr(), 5)
    K, M = beam.matrix("symmetric_bsr"), beam.mass()
    if kind == "store":
        K = FileStore.create(tmp_path / "K", beam.subdivisions(17, "symmetric_bsr"))
    elif kind == "elements":
        K = penstock.ElementMatrix(beam.mesh.coordinates(), beam.mesh.connectivity(), fixed=np.arange(3 * 36))
        M = K.mass()
    X = None if kind == "elements" else beam.mesh.coordinates()
    modes = penstock.eigsh(K, 5, M, coordinates=X, device="cpu")
    assert np.allclose(modes.values, exact, rtol=1e-8)


def test_a_prepared_system_finds_modes_of_its_present_values():
    beam = Cantilever(nodes=(17, 6, 6), dof=3, lengths=3.0)
    K, M = beam.matrix().to_csr(), beam.mass()
    exact = reference(K, M.to_csr(), 5)
    with penstock.prepare(K, coordinates=beam.mesh.coordinates(), device="cpu") as system:
        assert np.allclose(system.eigsh(5, M).values, exact, rtol=1e-8)
        system.solve(beam.load())
        system.update(4.0 * K)
        modes = system.eigsh(5, M, tol=1e-5)
        with pytest.raises(InputError, match="large a part"):
            system.eigsh(600, M)
    assert np.allclose(modes.values, 4 * exact, rtol=1e-7)


def test_modes_that_are_missed_are_found(monkeypatch):
    from penstock.solvers.eigen.modes import _Search

    K, M, X, k = BODIES["beam"]()
    probe = _Search._probe

    def without_the_first(self, state, done):
        found, kept = state.locked, np.arange(1, len(state.locked.values))
        arrays = {name: getattr(found, name)[:, kept] for name in ("vectors", "of_mass", "below_k", "below_m")}
        grams = {name: getattr(found, name)[np.ix_(kept, kept)] for name in ("gram_k", "gram_m")}
        numbers = {name: getattr(found, name)[kept] for name in ("values", "residuals", "errors")}
        state.locked = type(found)(
            **{name: np.ascontiguousarray(of) for name, of in arrays.items()}, **grams, **numbers
        )
        return probe(self, state, done)

    monkeypatch.setattr(_Search, "_probe", without_the_first)
    modes = penstock.eigsh(K, k, M, coordinates=X, device="cpu")
    assert modes.missed == 1
    assert "missed" in modes.explain()
    assert np.allclose(modes.values, reference(K, M.to_csr(), k), rtol=1e-8)


def test_a_cut_cluster_is_reported():
    K, M, X, _ = BODIES["beam"]()  # bending modes in pairs
    assert penstock.eigsh(K, 1, M, coordinates=X, device="cpu").cuts_cluster
    whole = penstock.eigsh(K, 2, M, coordinates=X, device="cpu")
    assert not whole.cuts_cluster
    assert "cluster" not in whole.explain()


def test_blocks_for_which_there_is_room_find_all_modes(monkeypatch):
    from penstock.driver import modes_search as module

    K, M, X, _ = BODIES["beam"]()
    exact = reference(K, M.to_csr(), 30)
    monkeypatch.setattr(module, "_LARGEST_BLOCK", 16)
    modes = penstock.eigsh(K, 30, M, coordinates=X, device="cpu")
    assert modes.converged
    assert "vectors at a time" in modes.explain()
    assert np.allclose(modes.values, exact, rtol=1e-8)


def test_effective_masses_of_all_modes_add_up_to_the_mass():
    beam = Cantilever(nodes=(5, 3, 3), dof=3)
    M = beam.mass(3.0)
    modes = penstock.eigsh(beam.matrix(), 108, M, device="cpu")  # all that move
    total = np.array([modes.effective_mass(axis).sum() for axis in "xyz"])
    assert np.allclose(total, np.diag(modes.masses))
    assert np.allclose(modes.participation("x"), modes.participation([2.0, 0.0, 0.0]))
    assert np.allclose(modes.participation("x"), modes.vectors.T @ (M @ np.tile([1.0, 0.0, 0.0], 45)))
    with pytest.raises(InputError, match="direction"):
        modes.participation("w")
    with pytest.raises(InputError, match="direction"):
        modes.participation([0.0, 0.0, 0.0])
    with pytest.raises(InputError, match="displacements"):
        penstock.eigsh(path(50, 2)[0], 2, device="cpu").participation("x")


def test_frequencies_of_a_beam_are_those_of_timoshenko():
    """Bending, torsion and tension of a beam of steel, in Hz."""
    from penstock.fem import LinearElasticity

    young, density, length, side = 210e9, 7850.0, 1.0, 0.1
    beam = Cantilever(nodes=(81, 9, 9), lengths=(length, side, side), element=LinearElasticity(young, 0.0))
    modes = penstock.eigsh(beam.matrix(), 6, beam.mass(density), coordinates=beam.mesh.coordinates(), device="cpu")
    tension = np.sqrt(young / density) / (4 * length)
    bending = 3.516 / (2 * np.pi * length**2) * np.sqrt(young * side**2 / 12 / density)
    found = modes.frequencies
    axial = int(np.argmax(modes.participation("x") ** 2))
    assert found[axial] == pytest.approx(tension, rel=0.01)
    assert found[0] == pytest.approx(bending, rel=0.03)  # of Euler and Bernoulli, which is a little stiffer
    assert found[0] < bending


def test_monitors_see_passes_and_may_stop():
    K, M, X, k = BODIES["beam"]()
    seen = []
    modes = penstock.eigsh(
        K, k, M, coordinates=X, device="cpu", monitor=lambda record: seen.append(record) or len(seen) == 3
    )
    assert modes.reason is ModesReason.STOPPED
    assert [record.iteration for record in seen] == [0, 1, 2]
    assert seen[0].residuals.max() > seen[-1].residuals.max()


def test_too_few_iterations_are_reported():
    K, M, X, k = BODIES["beam"]()
    with pytest.warns(NotConvergedWarning, match="maxiter"):
        modes = penstock.eigsh(K, k, M, coordinates=X, device="cpu", maxiter=2)
    assert not modes.converged
    with pytest.raises(NotConvergedError, match="maxiter"):
        modes.check()
    with pytest.raises(NotConvergedError, match="maxiter"):
        penstock.eigsh(K, k, M, coordinates=X, device="cpu", maxiter=2, on_failure="raise")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        penstock.eigsh(K, k, M, coordinates=X, device="cpu", maxiter=2, on_failure="return")


def test_unknowns_without_mass_are_refused_unless_they_are_fixed():
    K, M, X, _ = BODIES["beam"]()
    light = M.to_csr().tolil()
    light[500, :] = light[:, 500] = 0.0
    for size in (slice(None), slice(600)):  # by iterations, and by LAPACK
        some_k, some_m = K[size][:, size], light.tocsr()[size][:, size]
        points = X if size == slice(None) else None
        with pytest.raises(InputError, match="no mass for"):
            penstock.eigsh(some_k, 3, some_m, coordinates=points, device="cpu")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"k": 0}, "k must be"),
        ({"k": 2.5}, "k must be"),
        ({"k": 10**6}, "k must be at most"),
        ({"tol": 0.0}, "tol must be"),
        ({"tol": 2}, "tol must be"),
        ({"which": "LM"}, "smallest"),
        ({"maxiter": 0}, "maxiter"),
        ({"monitor": 3}, "monitor"),
        ({"M": np.ones(7)}, "M has shape"),
        ({"M": "lumped"}, "sparse matrix"),
        ({"preconditioner": "jacobi"}, "coarse level"),
        ({"coordinates": np.ones((7, 3))}, "coordinates"),
        ({"on_failure": "ignore"}, "on_failure"),
        ({"device": 3}, "device"),
    ],
)
def test_what_cannot_be_meant_is_refused(change, match):
    K, M, X, k = BODIES["beam"]()
    arguments = {"k": k, "M": M, "coordinates": X, "device": "cpu"} | change
    with pytest.raises(InputError, match=match):
        penstock.eigsh(K, **arguments)


def test_an_indefinite_matrix_is_refused():
    K = scipy.sparse.diags_array([1.0, -2.0, 3.0], format="csr")
    with pytest.raises(InputError, match="positive"):
        penstock.eigsh(K, 2, device="cpu")


def test_a_specification_of_the_coarse_level_is_used():
    K, M, X, k = BODIES["beam"]()
    spec = SmoothedAggregationSpec(block_size=3, degree=5, aggregate_nodes=27, coordinates=X)
    modes = penstock.eigsh(K, k, M, preconditioner=spec, device="cpu")
    assert modes.converged
    assert "degree 5" in modes.explain()
    with pytest.raises(InputError, match="specification"):
        penstock.eigsh(K, k, M, preconditioner=spec, coordinates=X, device="cpu")


def test_results_are_the_same_to_the_bit_when_repeated():
    K, M, X, k = BODIES["beam"]()
    one, other = (penstock.eigsh(K, k, M, coordinates=X, device="cpu") for _ in range(2))
    assert np.array_equal(one.values, other.values)
    assert np.array_equal(one.vectors, other.vectors)
    assert (one.vectors.max(axis=0) >= -one.vectors.min(axis=0)).all()


@pytest.mark.gpu
@pytest.mark.skipif(not gpu_count(), reason="no CUDA device")
@pytest.mark.parametrize(
    "name", ["beam", "free beam", "micropolar", "conduction", "jumps", "tetrahedra in random order"]
)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_gpu_finds_the_same_modes(name, streamed):
    K, M, X, k = BODIES[name]()
    exact = reference(K, M.to_csr(), k, shift=-1e-4 if name.startswith("free") else 0.0)
    memory = K.nnz * 3 if streamed else None  # bytes: about a third of the upper half
    modes = penstock.eigsh(K, k, M, coordinates=X, device="cuda", memory=memory)
    assert modes.converged
    assert bool(modes.bytes_streamed) == streamed
    zeros = 6 if name.startswith("free") else 0
    assert modes.zeros == zeros
    assert np.allclose(modes.values[zeros:], exact[zeros:], rtol=1e-8)
    vectors = modes.vectors.get() if hasattr(modes.vectors, "get") else modes.vectors
    assert np.allclose(vectors.T @ (M.to_csr() @ vectors), np.eye(k), atol=1e-8)
