"""Conversion on a device gives the arrays of the CPU conversion, bit for bit, and refuses what the CPU refuses."""

import numpy as np
import pytest
import scipy.sparse
from kernel_targets import TARGETS, converting

from penstock.spmv import CsrMatrix, EllMatrix, InputError, SymmetricBsrMatrix, format_named
from penstock.spmv.formats.convert import chunk_offsets, chunks_of_blocks, chunks_of_slots
from penstock.spmv.formats.statistics import MatrixStatistics

DEVICE_TARGETS = [target for target in TARGETS if target.id != "cpu"]
SIZES = (1, 2, 3, 6)
CONVERSIONS = [
    ("coo", {}),
    ("ell", {"warps": 8448}),
    ("hyb", {"partition": "hybrid33"}),
    ("hyb", {"partition": "minstorage"}),
    ("sell", {"chunk_height": 1, "sorting_scope": 1}),
    ("sell", {"chunk_height": 4, "sorting_scope": 16}),
    ("sell", {"chunk_height": 8, "sorting_scope": "auto"}),
    ("sell", {"chunk_height": 32, "sorting_scope": 64}),
    ("sell", {"chunk_height": 64, "sorting_scope": 1}),
    ("sliced_ell", {}),
    *(("bsr", {"block_size": size}) for size in SIZES),
    *(("sliced_bsr", {"block_size": size, "sorting_scope": 1}) for size in SIZES),
    *(("sliced_bsr", {"block_size": size, "sorting_scope": 32}) for size in SIZES),
    ("sliced_bsr", {"block_size": 2, "sorting_scope": "auto"}),
    *(("symmetric_bsr", {"block_size": size}) for size in SIZES),
]


def partly_filled(symmetric: bool) -> dict[str, scipy.sparse.csr_array]:
    """Return matrices whose shape sizes 1, 2, 3 and 6 divide, and whose blocks hold some entries and lack others."""
    generator = np.random.default_rng(11)

    def random(rows, columns, density):
        return scipy.sparse.random_array((rows, columns), density=density, rng=generator, format="lil")

    empty_rows = random(210, 210, 0.03)
    empty_rows[:7] = 0
    empty_rows[30:101] = 0
    empty_rows[-6:] = 0
    full_row = random(72, 72, 0.02)
    full_row[40] = 1.5
    zeros = random(48, 48, 0.2).tocsr()
    zeros.data[::3] = 0.0
    corners = scipy.sparse.lil_array((42, 42))
    corners[0, 41], corners[41, 0], corners[13, 13] = 2.0, 2.0, -1.0
    matrices = {
        "empty rows": empty_rows,
        "one full row": full_row,
        "stored zeros": zeros,
        "corners": corners,
        "no entries": scipy.sparse.csr_array((12, 12)),
        "wide": random(12, 264, 0.2),
        "tall": random(264, 12, 0.2),
        "no rows": scipy.sparse.csr_array((0, 6)),
    }
    chosen = {}
    for label, A in matrices.items():
        if symmetric and A.shape[0] != A.shape[1]:
            continue
        A = (A + A.T).tocsr() if symmetric else A.tocsr()
        A.sort_indices()
        chosen[label] = A
    return chosen


def csr(A, offsets=np.int64, dtype=np.float64):
    matrix = CsrMatrix.from_csr(A.astype(dtype))
    return matrix if offsets == np.int64 else matrix.rows(0, A.shape[0])


def assert_same_bits(found, expected):
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("target", DEVICE_TARGETS)
@pytest.mark.parametrize(
    ("offsets", "values_dtype"), [(np.int64, np.float64), (np.int32, np.float32)], ids=["int64-f64", "int32-f32-stored"]
)
@pytest.mark.parametrize(("name", "keywords"), CONVERSIONS, ids=str)
def test_a_device_converts_to_the_arrays_of_the_cpu(name, keywords, offsets, values_dtype, target):
    for label, A in partly_filled(name == "symmetric_bsr").items():
        source = csr(A, offsets)
        assert source.row_offsets.dtype == offsets
        expected = format_named(name).from_csr(source, **keywords, values_dtype=values_dtype)

        with converting(target):
            found = format_named(name).from_csr(target.put_matrix(source), **keywords, values_dtype=values_dtype)

        assert found.parameters() == expected.parameters(), label
        assert found.dtype == expected.dtype == np.float64
        for key, array in expected.arrays().items():
            assert_same_bits(target.get(found.arrays()[key]), array)


@pytest.mark.parametrize(("name", "keywords"), CONVERSIONS, ids=str)
def test_partly_filled_blocks_hold_zeros_where_nothing_was_stored(name, keywords):
    for label, A in partly_filled(name == "symmetric_bsr").items():
        matrix = format_named(name).from_csr(A, **keywords)

        np.testing.assert_array_equal(matrix.to_csr().toarray(), A.toarray(), err_msg=label)
        matrix.check_shapes()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("upper", [False, True])
def test_blocks_are_counted_as_scipy_counts_them(size, upper, target):
    A = partly_filled(False)["empty rows"]
    blocks = A.tobsr((size, size))
    columns, rows = blocks.indices, np.repeat(np.arange(210 // size), np.diff(blocks.indptr))
    kept = columns >= rows if upper else np.ones(columns.size, dtype=bool)

    with converting(target):
        counts = MatrixStatistics.of(target.put_matrix(csr(A))).blocks(size, upper=bool(upper))

    np.testing.assert_array_equal(target.get(counts), np.bincount(rows[kept], minlength=210 // size))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("offsets", [np.int64, np.int32], ids=["int64", "int32"])
def test_values_are_narrowed_on_their_way(offsets, target):
    A = partly_filled(False)["empty rows"]
    none = np.empty(0, dtype=np.int32)
    slots, blocks = chunk_offsets(np.diff(A.indptr), 32), chunk_offsets(MatrixStatistics.of(csr(A)).blocks(3), 32)

    with converting(target):
        source, none = target.put_matrix(csr(A, offsets)), target.put(none)
        filled = [
            chunks_of_slots(source, none, target.put(slots), 32, np.float32)[1],
            chunks_of_blocks(source, 3, none, target.put(blocks), 32, np.float32)[1],
        ]

    for values in map(target.get, filled):
        assert values.dtype == np.float32
        np.testing.assert_array_equal(np.sort(values[values != 0]), np.sort(A.data.astype(np.float32)))


@pytest.mark.parametrize("target", TARGETS)
def test_entries_past_the_width_are_left_out(target):
    A = scipy.sparse.csr_array(np.arange(1.0, 13.0).reshape(3, 4))
    none = np.empty(0, dtype=np.int32)

    with converting(target):
        source, offsets = target.put_matrix(csr(A)), target.put(np.array([0, 6]))
        columns, values = chunks_of_slots(source, target.put(none), offsets, 3, np.float64)

    np.testing.assert_array_equal(target.get(columns), [0, 0, 0, 1, 1, 1])
    np.testing.assert_array_equal(target.get(values), [1, 5, 9, 2, 6, 10])


def test_ell_refuses_to_pad_a_large_matrix_to_one_full_row_and_names_both_sizes():
    A = scipy.sparse.eye_array(3000, format="lil")
    A[7] = 1.0
    A = A.tocsr()

    with pytest.raises(InputError, match=r"3000 entries: 103 MiB instead of 93\.75 KiB as CSR; use sell, hyb or csr"):
        EllMatrix.from_csr(A)
    assert EllMatrix.from_csr(A, growth=2000).width == 3000


def test_ell_takes_a_small_matrix_with_one_full_row():
    assert EllMatrix.from_csr(partly_filled(False)["one full row"]).width == 72


def symmetric():
    return partly_filled(True)["empty rows"].copy()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("offsets", [np.int64, np.int32], ids=["int64", "int32"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("fault", ["one value", "pattern", "both"])
def test_asymmetric_matrices_are_refused_with_the_number_of_entries_at_fault(fault, dtype, offsets, target):
    A = symmetric().tolil()
    rows, columns = A.nonzero()
    places = [(i, j) for i, j in zip(rows, columns, strict=True) if i > j]
    expected = 0
    if fault in ("one value", "both"):
        i, j = places[10]
        A[i, j] = dtype(A[i, j]) * dtype(1.001)
        expected += 2  # each differs from the other
    A = A.tocsr().astype(dtype)
    if fault in ("pattern", "both"):
        i, j = places[-3]
        A = A.tocoo()
        left = ~((A.coords[0] == i) & (A.coords[1] == j))
        A = scipy.sparse.csr_array((A.data[left], (A.coords[0][left], A.coords[1][left])), shape=A.shape)
        expected += 1
    A.sort_indices()

    with (
        converting(target),
        pytest.raises(
            InputError, match=f"^{expected} of {A.nnz} entries differ from their mirror image by more than rounding"
        ),
    ):
        SymmetricBsrMatrix.from_csr(target.put_matrix(csr(A, offsets, dtype)), block_size=3)


@pytest.mark.parametrize("target", TARGETS)
def test_a_stored_zero_needs_no_mirror_image(target):
    """It is a symmetric matrix all the same, though not of symmetric pattern."""
    A = scipy.sparse.csr_array(([1.0, 0.0, 1.0], ([0, 0, 1], [0, 1, 1])), shape=(2, 2))

    with converting(target):
        half = SymmetricBsrMatrix.from_csr(target.put_matrix(csr(A)), block_size=1)

        np.testing.assert_array_equal(half.to_csr().toarray(), A.toarray())
        assert not MatrixStatistics.of(csr(A)).symmetry.exact


@pytest.mark.parametrize("target", TARGETS)
def test_differences_of_rounding_are_accepted_and_the_upper_triangle_stands_for_both(target):
    A = scipy.sparse.csr_array([[2.0, -1.0], [-1.0, 2.0]])
    A[1, 0] = np.nextafter(-1.0, 0)

    with converting(target):
        half = SymmetricBsrMatrix.from_csr(target.put_matrix(csr(A)), block_size=1)

        np.testing.assert_array_equal(half.to_csr().toarray(), [[2.0, -1.0], [-1.0, 2.0]])


@pytest.mark.parametrize("target", TARGETS)
def test_unsymmetric_shapes_and_blocks_that_do_not_fit_are_refused_on_any_device(target):
    wide, square = csr(partly_filled(False)["wide"]), csr(scipy.sparse.csr_array((14, 14)))

    with converting(target):
        with pytest.raises(InputError, match="square, not 12 x 264"):
            SymmetricBsrMatrix.from_csr(target.put_matrix(wide), block_size=3)
        for name in ("bsr", "sliced_bsr", "symmetric_bsr"):
            with pytest.raises(InputError, match="must divide the 14 rows"):
                format_named(name).from_csr(target.put_matrix(square), block_size=3)
            for size in (0, 9):
                with pytest.raises(InputError, match="1 x 1 to 8 x 8"):
                    format_named(name).from_csr(target.put_matrix(square), block_size=size)


@pytest.mark.parametrize("target", TARGETS)
def test_an_asymmetric_matrix_passes_unchecked_by_its_upper_half(target):
    A = partly_filled(False)["stored zeros"]
    upper = scipy.sparse.triu(A, 1).toarray()
    expected = upper + upper.T + np.diag(A.diagonal())

    with converting(target):
        matrix = SymmetricBsrMatrix.from_csr(target.put_matrix(csr(A)), block_size=1, check=False)

    np.testing.assert_array_equal(matrix.to_device("cpu").to_csr().toarray(), expected)
