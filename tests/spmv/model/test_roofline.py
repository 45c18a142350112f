"""The roofline model against numbers worked out by hand and matrices built; the formats that are suggested for a matrix."""

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse

from penstock.fem import Cantilever
from penstock.spmv import CsrMatrix, Device, InputError, SparseMatrix, format_named, format_names
from penstock.spmv.formats.statistics import MatrixStatistics
from penstock.spmv.model.roofline import (
    chunk_occupancy,
    inferred_alpha,
    predicted_seconds,
)
from penstock.spmv.model.suggestion import Suggestion, suggest_format

GPU = Device("cuda")  # named only: a ranking needs no device
BLOCKS = {"bsr", "sliced_bsr", "symmetric_bsr"}

# What from_csr is called with, for formats that have parameters that change their size.
PARAMETERS = {
    "bsr": [{"block_size": size} for size in (1, 2, 3, 6)],
    "csr": [{}, {"strategy": "balanced"}],
    "ell": [{}, {"lanes": 4}],
    "hyb": [{"partition": name} for name in ("hybrid33", "hybrid100", "hybridlimit33", "minstorage")],
    "sell": [
        {},
        {"chunk_height": 4, "sorting_scope": 16},
        {"chunk_height": 8, "sorting_scope": 1},
        {"chunk_height": 1, "sorting_scope": 1},
    ],
    "sliced_bsr": [{"block_size": 2}, {"block_size": 3, "sorting_scope": 64}, {"block_size": 6, "sorting_scope": 1}],
    "sliced_ell": [{}, {"slice_height": 64}],
    "symmetric_bsr": [{"block_size": size} for size in (1, 2, 3)],
}
FORMATS = [(name, keywords) for name in format_names() for keywords in PARAMETERS.get(name, [{}])]


def csr(A):
    A = A.tocsr()
    A.sort_indices()
    return A


def random(rows, columns, density, seed=0):
    return scipy.sparse.random_array((rows, columns), density=density, rng=np.random.default_rng(seed), format="lil")


def beam():
    return Cantilever(nodes=(9, 5, 5), dof=3).matrix().to_csr()


def uneven():
    """A symmetric matrix with empty rows and longer rows among short ones."""
    A = random(210, 210, 0.02)
    A[:, ::16] = random(210, 14, 0.3, seed=1)
    A[60:90] = 0
    A[:, 60:90] = 0
    return csr(A + A.T)


def with_full_row(rows=1500):
    A = random(rows, rows, 6 / rows)
    A[7] = 1.0
    return csr(A)


def test_occupancy_counts_the_padding_of_every_chunk():
    assert chunk_occupancy(np.array([4, 2, 1, 1, 3]), 2) == 11 / (8 + 2 + 6)
    assert chunk_occupancy(np.array([4, 2, 1, 1, 3]), 2, 4) == 11 / (8 + 2 + 6)
    assert chunk_occupancy(np.array([1, 4, 3, 2]), 2, 4) == 10 / (8 + 4)
    assert chunk_occupancy(np.zeros(5, dtype=np.int64), 4) == 1.0
    assert chunk_occupancy(np.zeros(0, dtype=np.int64), 4) == 1.0


@pytest.mark.parametrize("alpha", [0.0, 0.04, 0.7, 3.0])
@pytest.mark.parametrize(("occupancy", "reads_out"), [(1.0, False), (0.6, True)])
def test_alpha_is_inferred_from_the_bytes_that_a_product_moves(alpha, occupancy, reads_out):
    nnz, mean = 27_000, 27.0
    volume = nnz * (12 / occupancy + 8 * alpha + (16 if reads_out else 8) / mean)

    assert inferred_alpha(volume, nnz, mean, occupancy=occupancy, reads_out=reads_out) == pytest.approx(
        alpha, abs=1e-12
    )


def test_a_product_of_a_built_matrix_moves_its_entries_and_vectors():
    A = scipy.sparse.eye_array(500, format="csr") + scipy.sparse.eye_array(500, k=1, format="csr")
    matrix = CsrMatrix.from_csr(csr(A))

    predicted = 12 * matrix.nnz + 2 * 8 * 500

    assert matrix.product_nbytes() == predicted + 8 * 501  # the model leaves row offsets out


@pytest.mark.parametrize("values_dtype", [np.float64, np.float32], ids=["f64", "f32-stored"])
@pytest.mark.parametrize("make", [beam, uneven])
@pytest.mark.parametrize(("name", "keywords"), FORMATS, ids=str)
def test_bytes_are_foreseen_exactly_and_seconds_with_them(name, keywords, make, values_dtype):
    A = make()[:210, :210]
    cls, statistics = format_named(name), MatrixStatistics.of(A, values_dtype=values_dtype)
    if cls.predicted_nbytes.__func__ is SparseMatrix.predicted_nbytes.__func__:
        pytest.skip("this format does not foresee its size")

    matrix = cls.from_csr(A, **keywords, values_dtype=values_dtype)

    assert cls.predicted_nbytes(statistics, **keywords) == matrix.nbytes
    for columns in (1, 4):
        seconds = predicted_seconds(cls, 2e9, columns, statistics=statistics, **keywords)
        assert seconds == predicted_seconds(matrix, 2e9, columns)
        assert seconds == pytest.approx((matrix.nbytes + columns * 2 * 210 * 8) / 2e9)


def test_vectors_of_float32_are_half_as_long():
    A = uneven().astype(np.float32)
    statistics, matrix = MatrixStatistics.of(A), CsrMatrix.from_csr(A)

    assert predicted_seconds(CsrMatrix, 1.0, statistics=statistics) == predicted_seconds(matrix, 1.0)
    assert predicted_seconds(matrix, 1.0) == A.nnz * 8 + 8 * 211 + 2 * 210 * 4


def test_a_size_past_2_to_the_33_is_foreseen_without_overflow():
    lengths = np.full(64, 2**31 - 1)
    statistics = SimpleNamespace(shape=(64, 2**31 - 1), lengths=lengths, nnz=int(lengths.sum()), values_itemsize=8)
    statistics.longest = 2**31 - 1

    for name in ("csr", "sell", "sliced_ell", "ell"):
        nbytes = format_named(name).predicted_nbytes(statistics)
        assert 0 <= nbytes - 64 * (2**31 - 1) * 12 <= 8 * 65


def test_a_statistics_holds_the_statistics_of_the_rows():
    A = csr(scipy.sparse.csr_array([[1.0, 2, 0, 4], [0, 0, 0, 0], [5, 0, 0, 0], [0, 0, 7, 8]]))
    statistics = MatrixStatistics.of(A)

    assert (statistics.shape, statistics.nnz, statistics.longest) == ((4, 4), 6, 3)
    assert statistics.mean == 1.5
    assert statistics.variation == pytest.approx(np.std([3, 0, 1, 2]) / 1.5)
    assert statistics.blocks(2).tolist() == [2, 2]
    assert statistics.blocks(2, upper=True).tolist() == [2, 1]
    assert statistics.blocks(2) is statistics.blocks(2)
    empty = MatrixStatistics.of(scipy.sparse.csr_array((3, 3)))
    assert (empty.nnz, empty.longest, empty.variation) == (0, 0, 0.0)


def test_statistics_are_freed_with_their_last_reference():
    statistics = MatrixStatistics.of(uneven())
    statistics.blocks(2)
    values = weakref.ref(statistics.values)

    del statistics
    gc.collect()

    assert values() is None


@pytest.mark.parametrize("device", ["cpu", GPU], ids=str)
def test_blocks_are_suggested_for_finite_elements(device):
    ranking = suggest_format(beam(), device=device)

    assert ranking[0].format_name in BLOCKS
    assert ranking[0].parameters == {"block_size": 3}
    if device == GPU:
        assert {suggestion.format_name for suggestion in ranking[:3]} == BLOCKS
    seconds = [suggestion.predicted_seconds for suggestion in ranking]
    assert seconds == sorted(seconds)
    assert all(suggestion.measured_seconds is None for suggestion in ranking)


@pytest.mark.parametrize("device", ["cpu", GPU], ids=str)
def test_half_of_a_matrix_is_offered_only_for_symmetric_ones(device):
    symmetric = beam()
    asymmetric = symmetric.copy()
    largest = np.argmax(np.where(asymmetric.tocoo().coords[0] == asymmetric.indices, 0, asymmetric.data))
    asymmetric.data[largest] *= 1 + 1e-9
    rounded = symmetric.copy()
    rounded.data[largest] = np.nextafter(rounded.data[largest], np.inf)

    def offers(A, **keywords):
        names = [suggestion.format_name for suggestion in suggest_format(A, device=device, **keywords)]
        return "symmetric_bsr" in names

    assert offers(symmetric)
    assert not offers(symmetric, symmetric=False)
    assert not offers(asymmetric)
    assert offers(rounded)
    assert not offers(csr(random(12, 24, 0.3)))
    assert offers(uneven())


@pytest.mark.parametrize("device", ["cpu", GPU], ids=str)
def test_padded_formats_come_last_for_a_matrix_with_one_full_row(device):
    names = [suggestion.format_name for suggestion in suggest_format(with_full_row(), device=device)]

    assert names[-2:] == ["sliced_ell", "ell"]
    assert names[0] == "csr"
    assert set(names[1:3]) == {"hyb", "coo"}


def test_formats_that_refuse_the_matrix_do_not_keep_others_from_being_measured():
    ranking = suggest_format(with_full_row(), measure=99)

    assert ranking[0].measured_seconds is not None


def test_measured_suggestions_are_ranked_by_their_times_before_the_others():
    ranking = suggest_format(beam(), measure=2, columns=2)
    predicted = suggest_format(beam(), columns=2)

    times = [suggestion.measured_seconds for suggestion in ranking]
    assert 0 < times[0] <= times[1]
    assert set(times[2:]) == {None}
    assert ranking[2:] == predicted[2:]
    assert {str(s).split(", measured")[0] for s in ranking[:2]} == set(map(str, predicted[:2]))
    assert "measured" in str(ranking[0])


def test_a_measurement_leaves_the_matrix_alone():
    A = beam()
    before = A.copy()

    suggest_format(A, measure=1)

    assert (before != A).nnz == 0
    np.testing.assert_array_equal(A.indices, before.indices)


def test_a_suggestion_builds_the_matrix_it_names():
    A = beam()

    for suggestion in suggest_format(A):
        matrix = suggestion.build(A)
        assert matrix.name == suggestion.format_name
        assert matrix.nbytes == suggestion.nbytes
        np.testing.assert_allclose(matrix @ np.ones(A.shape[1]), A @ np.ones(A.shape[1]), rtol=1e-12, atol=1e-12)


def test_bandwidth_scales_all_predictions_and_changes_no_order():
    slow, fast = (suggest_format(uneven(), bandwidth=rate) for rate in (1e9, 4e9))

    assert [(s.format_name, s.parameters) for s in slow] == [(s.format_name, s.parameters) for s in fast]
    for one, other in zip(slow, fast, strict=True):
        assert one.predicted_seconds == pytest.approx(4 * other.predicted_seconds)


def test_uneven_rows_count_against_formats_that_wait_for_the_longest_on_a_gpu():
    def place(A, name):
        return [suggestion.format_name for suggestion in suggest_format(A, device=GPU)].index(name)

    A = with_full_row()
    balanced, vector = (CsrMatrix.from_csr(A, strategy=name) for name in ("balanced", "vector"))

    assert place(balanced, "csr") == 0
    assert place(vector, "csr") > max(place(vector, "coo"), place(vector, "hyb"))


def test_a_suggestion_reads_like_a_call():
    suggestion = Suggestion("bsr", {"block_size": 3}, nbytes=2048, predicted_seconds=0.002, measured_seconds=0.001)

    assert str(suggestion) == "bsr(block_size=3): 2 KiB, predicted 2 ms, measured 1 ms"


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_there_is_no_suggestion_for_a_matrix_without_rows_or_columns(shape):
    with pytest.raises(InputError, match="leave nothing to multiply"):
        suggest_format(scipy.sparse.csr_array(shape))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [({"columns": 0}, "0 vectors"), ({"columns": -1}, "-1 vectors"), ({"device": "tpu"}, "unknown device 'tpu'")],
    ids=str,
)
def test_bad_wishes_are_refused(keywords, message):
    with pytest.raises(InputError, match=message):
        suggest_format(beam(), **keywords)


@pytest.mark.parametrize("keywords", [{"bandwidth": -1.0}, {"measure": -1}], ids=str)
def test_negative_numbers_are_refused(keywords):
    with pytest.raises(InputError):
        suggest_format(uneven(), **keywords)


def test_an_unsorted_matrix_gets_the_suggestions_of_a_sorted_one():
    A = scipy.sparse.csr_array(([1.0, 1.0], [1, 0], [0, 2]), shape=(1, 2))

    assert [str(one) for one in suggest_format(A)] == [str(one) for one in suggest_format(A.sorted_indices())]


def test_a_matrix_without_entries_has_suggestions_too():
    ranking = suggest_format(scipy.sparse.csr_array((30, 30)), measure=1)

    assert ranking[0].build(scipy.sparse.csr_array((30, 30))).nnz == 0
