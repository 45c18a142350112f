"""T is orthonormal and spans the near-null space; the coarse matrix is P^T A P; the preconditioner is symmetric and positive."""

from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse
from coarse_reference import block_inverse, smoothed_prolongator, tentative
from kernel_targets import TARGETS, gpu_count

from penstock.fem import Cantilever, LognormalMaterial
from penstock.solvers import cg, smoothed_aggregation
from penstock.solvers.amg import matrix_rows
from penstock.solvers.amg.galerkin import GalerkinWave, coarse_matrix
from penstock.solvers.amg.modes import rigid_body_modes
from penstock.solvers.amg.smoothed_aggregation import with_new_values
from penstock.spmv import CPU, CsrMatrix, Device, FunctionOperator, InputError, beside, format_named
from penstock.spmv.products.block_rows import BlockRows, replace_vanishing
from penstock.streaming import HostStore, StreamedMatrix

BEAM = {"nodes": (12, 6, 5)}


def beam_of(dof, **options):
    return Cantilever(**{**BEAM, "dof": dof, "material": LognormalMaterial(sigma=0.5, seed=1), **options})


def level_of(beam, name="bsr", **options):
    A = beam.matrix(name)
    return A, smoothed_aggregation(A, beam.rigid_body_modes(), aggregates=beam.mesh.node_counts, **options)


@pytest.mark.parametrize("dof", [1, 3, 6])
def test_the_basis_is_orthonormal_and_spans_the_modes(dof):
    beam = beam_of(dof)
    _, M = level_of(beam)

    T, level = tentative(M), M.level.T

    gram = T.T @ T
    present = ~level.missing
    assert np.allclose(gram[np.ix_(present, present)], np.eye(present.sum()), atol=1e-13)
    assert not T[:, level.missing].any()
    modes = beam.rigid_body_modes().copy()
    modes[: dof * 30] = 0.0  # the clamped face
    assert np.allclose(T @ level.candidates, modes, atol=1e-12 * abs(modes).max())


def test_restriction_is_the_transpose_for_vectors_and_blocks():
    rng = np.random.default_rng(3)
    _, M = level_of(beam_of(3))
    T = tentative(M)
    for shape in ((M.shape[0],), (M.shape[0], 4)):
        fine, out = rng.standard_normal(shape), np.empty((T.shape[1], *shape[1:]))
        M.level.T.restrict(fine, out)
        assert np.allclose(out, T.T @ fine, atol=1e-12)
        coarse, back = rng.standard_normal(out.shape), np.empty(shape)
        M.level.T.prolong(coarse, back)
        assert np.allclose(back, T @ coarse, atol=1e-12)


@pytest.mark.parametrize("aggregates", [np.arange(120), np.arange(120) // 2, np.minimum(np.arange(120) // 4, 22)])
def test_aggregates_of_few_nodes_have_fewer_modes(aggregates):
    """A node has three rigid motions, two nodes have five; the clamped ones have none."""
    beam = beam_of(3, nodes=(6, 5, 4))
    A = beam.matrix()
    M = smoothed_aggregation(A, beam.rigid_body_modes(), aggregates=aggregates)
    T, level = tentative(M), M.level.T

    expected = [np.linalg.matrix_rank(T[:, 6 * i : 6 * i + 6]) for i in range(level.aggregates.count)]

    assert (~level.missing).reshape(-1, 6).sum(axis=1).tolist() == expected
    dense = M.level.A.to_csr().toarray()
    assert np.linalg.eigvalsh(dense).min() > 0


@pytest.mark.parametrize("dof", [1, 3, 6])
@pytest.mark.parametrize("name", ["bsr", "csr", "sliced_bsr", "symmetric_bsr", "sell"])
def test_the_coarse_matrix_is_the_galerkin_product(name, dof):
    beam = beam_of(dof)
    A = format_named("sell").from_csr(beam.matrix("csr")) if name == "sell" else beam.matrix(name)
    M = smoothed_aggregation(A, beam.rigid_body_modes(), aggregates=beam.mesh.node_counts, block_size=dof)
    dense = beam.matrix().to_csr()
    P = smoothed_prolongator(dense, block_inverse(dense, dof), tentative(M), [step.a for step in M.smooth])

    expected = P.T @ (dense @ P)
    found, missing = M.level.A.to_csr().toarray(), M.level.T.missing
    assert (found.diagonal()[missing] > 0).all()
    expected[missing, missing] = found[missing, missing]

    assert np.allclose(found, expected, atol=1e-12 * abs(expected).max())


@pytest.mark.parametrize(("stored", "size"), [(2, 1), (1, 3), (2, 4), (4, 2), (6, 3), (3, 6)])
@pytest.mark.parametrize("name", ["symmetric_bsr", "bsr", "sliced_bsr"])
@pytest.mark.parametrize("streamed", [False, True])
def test_nodes_may_have_another_size_than_the_blocks_that_are_stored(name, stored, size, streamed):
    n = 768
    cuts = range(0, n + 1, n if name == "sliced_bsr" else 384)  # at multiples of the granularity of the format
    band = scipy.sparse.diags_array(
        [np.arange(n - k) % 7 - 3.0 for k in range(1, 8)], offsets=range(1, 8), shape=(n, n)
    )
    S = scipy.sparse.csr_array(band + band.T + 60.0 * scipy.sparse.eye_array(n))
    A = format_named(name).from_csr(CsrMatrix.from_csr(S), block_size=stored)

    def level(matrix):
        options = {"block_size": size, "aggregates": np.arange(n // size) // 8}
        return smoothed_aggregation(matrix, np.ones((n, 1)), **options).level.A

    expected = level(S)
    if streamed:
        with HostStore.from_matrix(A, cuts) as store, StreamedMatrix(store, 2 * store.index.nbytes) as resident:
            found = level(resident)
    else:
        found = level(A)

    assert np.allclose(found.to_csr().toarray(), expected.to_csr().toarray(), atol=1e-12)


def ring(n):
    return scipy.sparse.diags_array([-np.ones(n - 1), 2.1 * np.ones(n), -np.ones(n - 1)], offsets=[-1, 0, 1]) - (
        scipy.sparse.coo_array(([1.0, 1.0], ([0, n - 1], [n - 1, 0])), shape=(n, n))
    )


def arrow(n):
    A = scipy.sparse.diags_array([-np.ones(n - 1), 4.0 * np.ones(n), -np.ones(n - 1)], offsets=[-1, 0, 1]).tolil()
    A[n - 1, : n - 1 : 3] = A[: n - 1 : 3, n - 1] = -1 / n
    return A


def one_sided(n):
    """A chain with an entry that is zero to rounding and has no mirror image."""
    A = scipy.sparse.diags_array([-np.ones(n - 1), 2.1 * np.ones(n), -np.ones(n - 1)], offsets=[-1, 0, 1]).tolil()
    A[n - 1, 0] = -1e-18
    return A


@pytest.mark.parametrize("make", [ring, arrow, one_sided])
@pytest.mark.parametrize("smoothing", [1, 2])
def test_rows_may_couple_with_the_first_ones_after_those_between_are_gone(make, smoothing, monkeypatch):
    monkeypatch.setattr(matrix_rows, "_SLAB_NBYTES", {"cpu": 700})  # about 20 slabs
    n = 600
    S = scipy.sparse.csr_array(make(n))
    S.sort_indices()

    M = smoothed_aggregation(S, aggregates=np.arange(n) // 6, smoothing=smoothing)

    P = smoothed_prolongator(S, block_inverse(S, 1), tentative(M), [step.a for step in M.smooth])
    assert np.allclose(M.level.A.to_csr().toarray(), P.T @ (S @ P), atol=1e-13)


def test_an_operator_that_shows_no_entries_is_refused():
    A = FunctionOperator(lambda x: 2.0 * x, (30, 30), np.float64)

    with pytest.raises(InputError, match="made of the entries of a sparse matrix"):
        smoothed_aggregation(A)


def test_streamed_cuts_through_nodes_are_refused():
    A = CsrMatrix.from_csr(scipy.sparse.csr_array(ring(1200)))
    refused = pytest.raises(InputError, match="cut nodes of 3 unknowns")
    with HostStore.from_matrix(A, [0, 400, 800, 1200]) as store, StreamedMatrix(store, 2 * A.nbytes) as S, refused:
        smoothed_aggregation(S, block_size=3)


def test_a_graph_that_cannot_be_coarsened_ends_the_levels():
    """1000 separate pairs of nodes: aggregates couple with no other."""
    pair = np.array([[2.0, -1.0], [-1.0, 2.0]])
    A = scipy.sparse.csr_array(scipy.sparse.kron(scipy.sparse.eye_array(1000), pair))
    b = np.random.default_rng(0).standard_normal(2000)

    for aggregates in (None, np.arange(2000) // 2):
        M = smoothed_aggregation(A, aggregates=aggregates)
        assert cg(M.A, b, M=M, rtol=1e-10).converged


@pytest.mark.parametrize("name", ["bsr", "symmetric_bsr"])
@pytest.mark.parametrize("count", [3, 8])
def test_streamed_rows_make_the_same_coarse_matrix(name, count):
    beam = beam_of(3, nodes=(16, 6, 6))
    _, M = level_of(beam, name)
    steps, T = M.smooth, M.level.T
    store = HostStore.create(beam.subdivisions(count, name))
    with store, StreamedMatrix(store, 3 * max(store.index.sizes["whole"])) as streamed:
        found = coarse_matrix(streamed, M.diagonal, T, steps)
    replace_vanishing(found, np.where(T.missing, M.level.A.to_csr().diagonal(), 0.0), 1e-13)

    assert abs(found.to_csr() - M.level.A.to_csr()).max() < 1e-12 * abs(M.level.A.to_csr()).max()


class _Streams:
    """Stands in for the side stream, and holds one that stands in for the current one; notes what is asked of them."""

    def __init__(self):
        self.asked = []
        self.current = SimpleNamespace(record=lambda: "now", wait_event=lambda event: self.asked.append("lead"))

    def __enter__(self):
        self.asked.append("begin")

    def __exit__(self, *exception):
        self.asked.append("end")

    def record(self):
        return "side"

    def wait_event(self, event):
        self.asked.append("follow")


def test_patterns_found_aside_follow_what_made_their_factors_and_lead_what_reads_them(monkeypatch):
    A, M = level_of(beam_of(3, nodes=(10, 6, 5)), "bsr")
    T, streams = M.level.T, _Streams()
    monkeypatch.setattr(beside._own, "stream", lambda number: streams)
    monkeypatch.setattr(beside, "_current_stream", lambda: streams.current)
    monkeypatch.setattr(T, "device", SimpleNamespace(kind="cuda", xp=np, index=0))
    emulated = TARGETS[1].values[0]

    def transposed(rows, columns, pattern):  # as on a GPU
        blocks = np.ascontiguousarray(rows.blocks[pattern.order].swapaxes(1, 2))
        return BlockRows(0, pattern.offsets, pattern.columns, blocks, len(rows.offsets) - 1)

    monkeypatch.setattr(BlockRows, "transposed", transposed)
    wave = GalerkinWave(T, M.diagonal, [step.a for step in M.smooth], aside=True)
    with emulated.running():
        matrix_rows.visit_rows(A, 3, wave.add)
        found = wave.finish()

    # The rows of A and of T come from the current stream; what is made of them was found aside.
    assert streams.asked == ["follow", *["begin", "end", "lead"] * 5]
    assert not wave._kept
    replace_vanishing(found, np.where(T.missing, M.level.A.to_csr().diagonal(), 0.0), 1e-13)
    assert abs(found.to_csr() - M.level.A.to_csr()).max() < 1e-12 * abs(M.level.A.to_csr()).max()


def test_nothing_is_put_aside_where_rows_come_in_parts_or_on_a_cpu(monkeypatch):
    A, M = level_of(beam_of(3, nodes=(16, 6, 6)), "bsr")
    factors = [step.a for step in M.smooth]
    for device, cuts in ((CPU, [0, 16]), (SimpleNamespace(kind="cuda", xp=np, index=0), [0, 5, 16])):
        monkeypatch.setattr(M.level.T, "device", device)
        wave = GalerkinWave(M.level.T, M.diagonal, factors, aside=True)
        matrix_rows.visit_rows(A, 3, wave.add, [cut * 36 * 3 for cut in cuts])
        assert wave._side is None
        assert not wave._kept


@pytest.mark.parametrize("dof", [1, 3])
def test_the_preconditioner_is_symmetric_and_positive_definite(dof):
    A, M = level_of(beam_of(dof, nodes=(10, 6, 5)))

    dense = np.stack([M.apply(column) for column in np.eye(A.shape[0])])

    assert np.allclose(dense, dense.T, atol=1e-12 * abs(dense).max())
    root = np.linalg.cholesky(dense)  # only a positive definite matrix has one
    # Near the inverse: what it leaves of the condition number is what CG still has to do.
    values = np.linalg.eigvalsh(root.T @ A.to_csr().toarray() @ root)
    assert values.max() / values.min() < 30


@pytest.mark.parametrize(("dimensions", "size", "modes"), [(2, 2, 3), (2, 3, 3), (3, 3, 6), (3, 6, 6), (3, 1, 1)])
def test_rigid_motions_do_not_strain(dimensions, size, modes):
    rng = np.random.default_rng(1)
    points = rng.random((20, dimensions))

    found = rigid_body_modes(points, size).reshape(20, size, -1)

    assert found.shape[2] == modes
    assert np.linalg.matrix_rank(found.reshape(-1, modes)) == modes
    if size == 1:
        return
    shifts = found[:, :dimensions]
    for a, b in ((0, 1), (3, 17), (5, 9)):
        assert np.allclose(np.einsum("d,dm->m", points[a] - points[b], shifts[a] - shifts[b]), 0)


def test_they_are_those_of_the_elements():
    for dof in (3, 6):
        beam = beam_of(dof)
        both = np.hstack([rigid_body_modes(beam.mesh.coordinates(), dof), beam.rigid_body_modes()])
        assert np.linalg.matrix_rank(both) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"near_null_space": np.ones(7)}, "near_null_space must be of shape"),
        ({"near_null_space": np.full(1080, np.nan)}, "near_null_space must be finite"),
        ({"coordinates": np.zeros((7, 3))}, "coordinates must be of shape"),
        (
            {"coordinates": np.zeros((7, 3)), "near_null_space": np.ones(1080)},
            "coordinates must be of shape",
        ),
        ({"rounds": -1}, "rounds must be a whole number"),
        ({"rounds": 1.5}, "rounds must be a whole number"),
        ({"aggregates": (3, 3, 3)}, "does not have the 360 nodes"),
        ({"aggregates": np.zeros(3, int)}, "360 whole numbers"),
        ({"block_size": 7}, "does not consist of nodes of 7 unknowns"),
        ({"smoothing": 0}, "smoothing must be"),
        ({"degree": 4}, "degree must be odd"),
        ({"aggregate_nodes": 1}, "aggregate_nodes must be"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        smoothed_aggregation(beam_of(3).matrix(), **options)


@pytest.mark.gpu
@pytest.mark.skipif(gpu_count() == 0, reason="no CUDA device")
@pytest.mark.parametrize("dof", [1, 3, 6])
@pytest.mark.parametrize("name", ["bsr", "csr", "sliced_bsr", "symmetric_bsr", "regrouped"])
def test_on_a_gpu_the_levels_are_those_of_the_cpu(name, dof):
    """Up to the signs and rounding of the bases: the coarse matrices of boxes and of the graph, resident and streamed."""
    beam, device = beam_of(dof, nodes=(24, 9, 8)), Device("cuda")
    host = beam.matrix("bsr" if name == "regrouped" else name)
    if name == "regrouped":
        host = format_named("symmetric_bsr").from_csr(beam.matrix("csr"), block_size=2)
    modes = {"near_null_space": beam.rigid_body_modes(), "block_size": dof}
    for aggregates in (beam.mesh.node_counts, None):
        expected = smoothed_aggregation(host, **modes, aggregates=aggregates).level
        found = smoothed_aggregation(host.to_device(device), **modes, aggregates=aggregates).level
        both = [level.A.to_csr().toarray() for level in (expected, found)]
        assert np.allclose(*both, atol=1e-10 * abs(both[0]).max())
    if name in ("bsr", "symmetric_bsr"):
        store = HostStore.create(beam.subdivisions(8, name))
        with store, StreamedMatrix(store, 3 * max(store.index.sizes["whole"]), device=device) as streamed:
            level = smoothed_aggregation(streamed, **modes, aggregates=beam.mesh.node_counts).level
        boxes = smoothed_aggregation(host, **modes, aggregates=beam.mesh.node_counts).level
        assert np.allclose(level.A.to_csr().toarray(), boxes.A.to_csr().toarray(), atol=1e-10 * abs(both[0]).max())


@pytest.mark.parametrize(
    ("nodes", "lengths", "used"), [((257, 9, 9), (64.0, 2.0, 2.0), True), ((24, 24, 24), (1000.0, 1000.0, 1.0), False)]
)
def test_coarse_levels_multiply_by_fewer_digits_where_these_suffice(nodes, lengths, used, monkeypatch):
    """As on a GPU; of a flat body a copy in float32 is indefinite."""
    monkeypatch.setattr("penstock.solvers.amg.cycle_matrix._LOWERED_ON", ("cpu", "cuda"))
    monkeypatch.setattr("penstock.solvers.amg.cycle_matrix._WORTHWHILE_NBYTES", 0)
    body = Cantilever(nodes=nodes, dof=3, lengths=lengths, material=LognormalMaterial(sigma=0.5))
    A, points, b = body.matrix(), body.mesh.coordinates(), np.random.default_rng(0).standard_normal(body.unknowns)

    M = smoothed_aggregation(A, coordinates=points, aggregate_nodes=64)
    result = cg(A, b, M=M, rtol=1e-6, maxiter=40)

    assert M.level.A.values.dtype == np.float64
    assert M.level.inverse.A.values.dtype == (np.float32 if used else np.float64)
    assert result.converged == used
    again = with_new_values(M)
    assert again.level.inverse.A.values.dtype == M.level.inverse.A.values.dtype
