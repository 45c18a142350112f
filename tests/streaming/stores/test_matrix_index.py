"""A slab becomes bytes and comes back; what cannot be a slab or an index of slabs is refused."""

import json
import zlib

import numpy as np
import pytest
import scipy.sparse

from penstock.spmv import BsrMatrix, CsrMatrix, InputError, StoreError
from penstock.streaming import FileStore, HostStore, MatrixIndex, index_of
from penstock.streaming.stores.buffers import aligned_buffer
from penstock.streaming.stores.packing import IndexBuilder, as_slab, pack

# Alignments that the kernels, page-locking and unbuffered reads rely on.
ARRAY_ALIGNMENT = 256
PAGE = 4096
PARTS = ("structure", "values")

BOUNDS = [0, 6, 30, 96]
GARBAGE = 0xA5


@pytest.fixture(params=["csr", "bsr"])
def format_name(request):
    return request.param


@pytest.fixture(params=[np.float64, np.float32], ids=["float64", "float32"])
def values_dtype(request):
    return request.param


@pytest.fixture
def whole(irregular, format_name, values_dtype):
    matrix = irregular(96, 60)
    if format_name == "csr":
        return CsrMatrix.from_csr(matrix, values_dtype=values_dtype)
    return BsrMatrix.from_csr(matrix, block_size=3, values_dtype=values_dtype)


@pytest.fixture
def slabs(whole, cut):
    return list(cut(whole, BOUNDS))


@pytest.fixture
def index(slabs):
    return index_of(slabs)


def packed(slab, subdivision):
    buffer = aligned_buffer(subdivision.nbytes)
    buffer[:] = GARBAGE
    pack(slab, subdivision, buffer)
    return buffer


def test_a_packed_slab_comes_back_bit_for_bit(slabs, index):
    for number, slab in enumerate(slabs):
        view = index.view(number, packed(slab, index.subdivisions[number]))

        assert type(view) is type(slab)
        assert view.shape == slab.shape
        assert (view.dtype, view.values_dtype) == (slab.dtype, slab.values_dtype)
        assert list(view.arrays()) == list(slab.arrays())
        for name, array in slab.arrays().items():
            assert view.arrays()[name].dtype == array.dtype
            np.testing.assert_array_equal(view.arrays()[name], array)


def test_a_view_copies_nothing(slabs, index):
    buffer = packed(slabs[1], index.subdivisions[1])

    view = index.view(1, buffer)

    assert all(np.shares_memory(array, buffer) for array in view.arrays().values())


def test_a_view_works_in_a_buffer_longer_than_the_slab(slabs, index):
    longer = aligned_buffer(index.subdivisions[0].nbytes + PAGE)
    longer[: index.subdivisions[0].nbytes] = packed(slabs[0], index.subdivisions[0])

    np.testing.assert_array_equal(index.view(0, longer).values, slabs[0].values)


def test_bytes_between_arrays_are_zero_whatever_the_buffer_held(slabs, index):
    for slab, subdivision in zip(slabs, index.subdivisions, strict=True):
        gaps = np.ones(subdivision.nbytes, dtype=bool)
        for field in subdivision.fields:
            gaps[field.offset : field.offset + field.nbytes] = False

        assert gaps.any()
        assert not packed(slab, subdivision)[gaps].any()


def test_arrays_start_at_multiples_of_256_without_overlap_and_slabs_fill_whole_pages(index):
    for subdivision in index.subdivisions:
        free = 0
        for field in subdivision.fields:
            assert field.offset % ARRAY_ALIGNMENT == 0
            assert free <= field.offset
            free = field.offset + field.nbytes
        assert free <= subdivision.nbytes
        assert subdivision.nbytes % PAGE == 0
        assert subdivision.nbytes - free < PAGE


def test_the_structure_comes_first_and_the_values_start_at_a_page(index):
    for subdivision in index.subdivisions:
        parts = [field.part for field in subdivision.fields]
        assert parts == sorted(parts) == ["structure", "structure", "values"]
        values = subdivision.fields[-1]
        assert np.dtype(values.dtype).kind == "f"
        assert values.offset == subdivision.values_start == subdivision.bytes_of("values").start
        assert values.offset % PAGE == 0
        assert subdivision.bytes_of("structure") == slice(0, values.offset)
        assert subdivision.bytes_of("whole") == slice(0, subdivision.nbytes)
        assert subdivision.part_nbytes("structure") + subdivision.part_nbytes("values") == subdivision.nbytes
    assert index.part_nbytes("structure") + index.part_nbytes("values") == index.nbytes == index.part_nbytes("whole")


def test_a_view_of_two_buffers_equals_that_of_one(slabs, index):
    for number, (slab, subdivision) in enumerate(zip(slabs, index.subdivisions, strict=True)):
        whole = packed(slab, subdivision)
        structure, values = (whole[subdivision.bytes_of(part)].copy() for part in ("structure", "values"))

        view = index.view(number, values, index.arrays(number, structure, "structure"))

        for name, array in slab.arrays().items():
            np.testing.assert_array_equal(view.arrays()[name], array)
            assert np.shares_memory(view.arrays()[name], values if name == "values" else structure)


def test_each_part_has_a_checksum_of_its_own(slabs):
    builder = IndexBuilder()
    for slab in slabs:
        subdivision = builder.add(slab)
        builder.set_checksums(packed(slab, subdivision))

    for slab, subdivision in zip(slabs, builder.finish().subdivisions, strict=True):
        piece = packed(slab, subdivision)
        expected = [(subdivision.bytes_of(part), zlib.crc32(piece[subdivision.bytes_of(part)])) for part in PARTS]
        assert subdivision.checksums_of("whole") == expected
        assert [subdivision.checksums_of(part) for part in PARTS] == [expected[:1], expected[1:]]


def test_the_index_tells_rows_entries_and_bytes_of_the_matrix(whole, index):
    assert index.shape == whole.shape
    assert index.format_name == whole.name
    assert [(s.row_start, s.row_stop) for s in index.subdivisions] == [(0, 6), (6, 30), (30, 96)]
    assert index.nnz == whole.nnz
    assert (
        index.nbytes == sum(s.nbytes for s in index.subdivisions) >= whole.nbytes - whole.arrays()["row_offsets"].nbytes
    )


def test_every_slab_has_the_parameters_of_the_whole_matrix(irregular, cut):
    """Slabs of very different density must still be summed in one order."""
    dense_rows = scipy.sparse.csr_array(np.ones((20, 40)))
    matrix = scipy.sparse.vstack([dense_rows, irregular(100, 40)], format="csr")
    slabs = [as_slab(slab) for slab in cut(matrix, [0, 20, 60, 120])]
    assert len({slab.lanes for slab in slabs}) > 1, "the slabs alone would be tuned differently"

    index = index_of(slabs)

    lanes = {index.view(n, packed(slab, index.subdivisions[n])).lanes for n, slab in enumerate(slabs)}
    assert lanes == {CsrMatrix.from_csr(matrix).lanes}


def test_symbolic_slabs_have_the_index_that_the_assembled_slabs_have(beam, format_name, values_dtype):
    symbolic = index_of(beam.symbolic_slabs(7, format_name, values_dtype=values_dtype), beam.shape)

    assert symbolic == index_of(beam.subdivisions(7, format_name, values_dtype=values_dtype))


def test_an_index_survives_json(index):
    assert MatrixIndex.from_json(json.loads(json.dumps(index.to_json()))) == index


def test_a_subdivision_says_which_rows_it_holds(index):
    assert str(index.subdivisions[1]) == "rows 6 to 29"


def _set(*path, to):
    def edit(data):
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = to

    return edit


def _remove(*path):
    def edit(data):
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    return edit


def _swap_subdivisions(data):
    data["subdivisions"].reverse()


def _rows_run_back(data):
    """Start where the last one stopped, but beyond the matrix."""
    data["subdivisions"][1]["row_stop"] = data["subdivisions"][2]["row_start"] = 200


FIRST = ("subdivisions", 0)
FIELD = (*FIRST, "fields", 0)
DAMAGES = {
    "no shape": _remove("shape"),
    "shape of one number": _set("shape", to=[96]),
    "shape of words": _set("shape", to=["a", "b"]),
    "more rows than the slabs have": _set("shape", 0, to=97),
    "no columns": _set("shape", 1, to=-1),
    "no type": _remove("dtype"),
    "a type that does not exist": _set("dtype", to="float65"),
    "a type of vectors that no kernel has": _set("dtype", to="complex128"),
    "an unknown format": _set("format_name", to="ellpack"),
    "parameters that are a number": _set("parameters", to=5),
    "a parameter the format does not have": _set("parameters", to={"lanse": 8}),
    "no subdivisions": _remove("subdivisions"),
    "an empty list of subdivisions": _set("subdivisions", to=[]),
    "subdivisions that are a number": _set("subdivisions", to=3),
    "a subdivision that is a number": _set(*FIRST, to=3),
    "a subdivision missing": _remove(*FIRST),
    "subdivisions in another order": _swap_subdivisions,
    "subdivisions that leave the matrix and return": _rows_run_back,
    "a subdivision without length": _remove(*FIRST, "nbytes"),
    "a length that is a word": _set(*FIRST, "nbytes", to="many"),
    "a negative length": _set(*FIRST, "nbytes", to=-4096),
    "a length that is no whole page": _set(*FIRST, "nbytes", to=5000),
    "an unknown key": _set(*FIRST, "colour", to="red"),
    "fields that are missing": _remove(*FIRST, "fields"),
    "a field without offset": _remove(*FIELD, "offset"),
    "a negative offset": _set(*FIELD, "offset", to=-256),
    "an offset that is a word": _set(*FIELD, "offset", to="far"),
    "an array that leaves its slab": _set(*FIELD, "offset", to=1 << 40),
    "an array of unknown type": _set(*FIELD, "dtype", to="float65"),
    "an array of unknown name": _set(*FIELD, "name", to="values2"),
    "an array of words as shape": _set(*FIELD, "shape", to=["a"]),
    "an array of another length than the rows": _set(*FIELD, "shape", to=[3]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_refused(damage, irregular, cut):
    data = json.loads(json.dumps(index_of(map(as_slab, cut(irregular(96, 60), BOUNDS))).to_json()))
    assert MatrixIndex.from_json(data).shape == (96, 60), "undamaged it is accepted"

    DAMAGES[damage](data)

    with pytest.raises(StoreError, match="build the store again"):
        MatrixIndex.from_json(data)


@pytest.mark.parametrize("data", [None, 7, "index", [], [1, 2]])
def test_json_that_is_no_index_is_refused(data):
    with pytest.raises(StoreError, match="build the store again"):
        MatrixIndex.from_json(data)


class TestSlabsThatDoNotBelongTogether:
    def test_other_columns(self, irregular):
        with pytest.raises(InputError, match="slab 1 has 61 columns instead of 60"):
            index_of([as_slab(irregular(9, 60)), as_slab(irregular(9, 61))])

    @pytest.mark.parametrize("second", ["bsr", "another block size", "float32 values", "float32 vectors"])
    def test_other_format_block_size_or_type(self, irregular, second):
        matrix = irregular(12, 60)
        first, other = {
            "bsr": (CsrMatrix.from_csr(matrix), BsrMatrix.from_csr(matrix, block_size=3)),
            "another block size": [BsrMatrix.from_csr(matrix, block_size=size) for size in (3, 2)],
            "float32 values": (CsrMatrix.from_csr(matrix), CsrMatrix.from_csr(matrix, values_dtype=np.float32)),
            "float32 vectors": (CsrMatrix.from_csr(matrix), CsrMatrix.from_csr(matrix.astype(np.float32))),
        }[second]

        with pytest.raises(InputError, match=r"slab 1 .* must have one format, block size and type"):
            index_of([first, other])

    @pytest.mark.parametrize("shape", [(17, 60), (19, 60)])
    def test_rows_that_do_not_add_up_to_the_shape(self, irregular, shape):
        with pytest.raises(InputError, match=f"18 rows together, but the shape says {shape[0]}"):
            index_of([as_slab(irregular(9, 60)), as_slab(irregular(9, 60))], shape)

    def test_columns_that_are_not_those_of_the_shape(self, irregular):
        with pytest.raises(InputError, match="slab 0 has 60 columns instead of 18"):
            index_of([as_slab(irregular(18, 60))], (18, 18))

    def test_no_slab_at_all(self, tmp_path):
        with pytest.raises(InputError, match="a matrix needs at least one row"):
            index_of([])
        with pytest.raises(InputError, match="a matrix needs at least one row"):
            HostStore.create(iter(()))
        with pytest.raises(InputError, match="a matrix needs at least one row"):
            FileStore.create(tmp_path / "store", iter(()))
        assert list(tmp_path.iterdir()) == []


def _good():
    return scipy.sparse.csr_array(
        (np.arange(1.0, 7.0), np.array([0, 2, 4, 1, 0, 3]), np.array([0, 3, 4, 6])), shape=(3, 5)
    )


def _with(**arrays):
    """A CSR array with arrays put in after SciPy's own checks."""
    matrix = _good()
    for name, array in arrays.items():
        setattr(matrix, name, np.asarray(array))
    return matrix


def _bsr(indices):
    matrix = scipy.sparse.bsr_array((np.ones((2, 2, 2)), np.array([0, 1]), np.array([0, 2])), shape=(2, 6))
    matrix.indices = np.asarray(indices)
    return matrix


REFUSED_SLABS = {
    "CSC": (_good().tocsc, r"not CSC; call \.tocsr\(\)"),
    "COO": (_good().tocoo, r"not COO; call \.tocsr\(\)"),
    "dense": (_good().toarray, "must be a SciPy CSR or BSR matrix or a penstock format, not ndarray"),
    "unsorted, and a column too large": (lambda: _with(indices=[2, 0, 4, 1, 0, 9]), "row 2 holds column index 9"),
    "unsorted, and offsets too large": (
        lambda: _with(indices=[2, 0, 4, 1, 0, 3], indptr=[0, 3, 4, 60]),
        r"row 0 is not sorted at column 0; call A\.sort_indices\(\)",
    ),
    "column too large": (lambda: _with(indices=[0, 2, 4, 5, 0, 3]), "row 1 holds column index 5, outside 0 to 4"),
    "column negative": (lambda: _with(indices=[0, 2, 4, 1, -1, 3]), "row 2 holds column index -1, outside 0 to 4"),
    "offsets descend": (lambda: _with(indptr=[0, 3, 2, 6]), "row offsets descend .* at row 1"),
    "offsets too large": (lambda: _with(indptr=[0, 3, 4, 60]), "run past the 6 entries at row 2"),
    "NaN": (lambda: _with(data=[1, 2, np.nan, 4, 5, 6]), "holds nan in row 0, column 4; all entries must be finite"),
    "Inf": (lambda: _with(data=[1, 2, 3, np.inf, 5, 6]), "holds inf in row 1, column 1; all entries must be finite"),
    "complex": (lambda: _good().astype(complex), "type complex128; only real numbers are supported"),
    "BSR out of range": (lambda: _bsr([0, 3]), "row 0 holds column index 3, outside 0 to 2"),
    "BSR of flat blocks": (lambda: _good().tobsr((3, 1)), "blocks must be square, up to 8 x 8; these are 3 x 1"),
}


@pytest.mark.parametrize("kind", REFUSED_SLABS)
def test_what_cannot_be_a_slab_is_refused_with_cause_and_advice(kind):
    make, advice = REFUSED_SLABS[kind]

    with pytest.raises(InputError, match=advice):
        as_slab(make())


@pytest.mark.parametrize(
    "make",
    [
        lambda: _with(indices=[2, 0, 4, 1, 0, 3]),
        lambda: _with(indices=[0, 2, 2, 1, 0, 3]),
        lambda: _bsr([1, 0]),
        lambda: _bsr([1, 1]),
    ],
    ids=["unsorted", "duplicate", "BSR unsorted", "BSR duplicate"],
)
def test_rows_that_are_unsorted_or_hold_duplicates_are_sorted_and_summed_in_a_copy(make):
    given, before = make(), make()
    slab = as_slab(given)

    np.testing.assert_array_equal(slab.to_csr().toarray(), before.tocoo().toarray())
    np.testing.assert_array_equal(given.indices, before.indices)


def test_a_valid_scipy_slab_is_taken_with_narrow_offsets():
    slab = as_slab(_good())

    assert slab.row_offsets.dtype == np.int32
    np.testing.assert_array_equal(slab.to_csr().toarray(), _good().toarray())


def test_a_scipy_slab_of_integers_is_taken_as_float64():
    slab = as_slab(_good().astype(int))

    assert slab.values_dtype == slab.dtype == np.float64
    np.testing.assert_array_equal(slab.to_csr().toarray(), _good().toarray())


def test_a_resident_matrix_is_taken_as_a_slab_with_narrow_offsets():
    resident = CsrMatrix.from_csr(_good())
    assert resident.row_offsets.dtype == np.int64

    slab = as_slab(resident)

    assert slab.row_offsets.dtype == np.int32
    assert np.shares_memory(slab.values, resident.values)
