"""Matrices by name: every kind of file and generated matrix, and what a damaged file leads to."""

import bz2
import gzip
import importlib
import io

import numpy as np
import pytest
import scipy.io
import scipy.sparse

from penstock.fem import Cantilever, LognormalMaterial
from penstock.files.reader import READERS, Reader
from penstock.files.registry import matrix_name, read_matrix, read_vectors, reader_of
from penstock.spmv import CsrMatrix, InputError

GENERAL = np.array([[0.0, -1.5, 0, 2], [3.25, 0, 1e-300, 0], [0, 0, 0, 0.1]])
SYMMETRIC = np.array([[4.0, -1, 0], [-1, 4.5, 1 / 3], [0, 1 / 3, 0]])
SKEW = np.array([[0.0, -1, 2.5], [1, 0, -7], [-2.5, 7, 0]])
COMPRESS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress}


def market_text(matrix, **options) -> bytes:
    buffer = io.BytesIO()
    scipy.io.mmwrite(buffer, matrix, **options)
    return buffer.getvalue()


@pytest.fixture
def read(tmp_path):
    """Write bytes or text to a file and read it."""

    def write_and_read(content, file_name="matrix.mtx"):
        path = tmp_path / file_name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_matrix(path)

    return write_and_read


def market(declaration: str, body: str) -> str:
    return f"%%MatrixMarket matrix {declaration}\n% a comment\n{body}"


def assert_canonical(matrix):
    assert isinstance(matrix, scipy.sparse.csr_array)
    assert matrix.dtype == np.float64
    recomputed = scipy.sparse.csr_array((matrix.data, matrix.indices, matrix.indptr), shape=matrix.shape)
    assert recomputed.has_canonical_format  # checked entry by entry, unlike a flag that was set
    CsrMatrix.from_csr(matrix)


@pytest.mark.parametrize("sparse", [True, False], ids=["coordinate", "array"])
@pytest.mark.parametrize("field", ["real", "integer"])
@pytest.mark.parametrize(
    ("symmetry", "expected"), [("general", GENERAL), ("symmetric", SYMMETRIC), ("skew-symmetric", SKEW)]
)
def test_what_scipy_writes_comes_back(symmetry, expected, field, sparse, read):
    expected = expected if field == "real" else np.trunc(expected).astype(np.int64)
    given = scipy.sparse.coo_array(expected) if sparse else expected
    text = market_text(given, symmetry=symmetry, field=field)
    assert text.split()[2:5] == [b"coordinate" if sparse else b"array", field.encode(), symmetry.encode()]

    matrix = read(text).matrix

    assert_canonical(matrix)
    assert np.array_equal(matrix.toarray(), expected)
    assert matrix.nnz == np.count_nonzero(expected)


@pytest.mark.parametrize(
    ("declaration", "body", "expected"),
    [
        ("coordinate real general", "2 3 3\n2 3 -1.5e+2\n1 2 +.25\n1 1 5E-1\n", [[0.5, 0.25, 0], [0, 0, -150]]),
        ("coordinate real symmetric", "2 2 2\n1 1 3\n2 1 5\n", [[3, 5], [5, 0]]),
        ("coordinate real symmetric", "2 2 2\n1 1 3\n1 2 5\n", [[3, 5], [5, 0]]),  # upper triangle
        ("coordinate real skew-symmetric", "2 2 1\n2 1 5\n", [[0, -5], [5, 0]]),
        ("coordinate integer general", "2 2 1\n2 1 -7\n", [[0, 0], [-7, 0]]),
        ("coordinate integer symmetric", "2 2 1\n2 1 -7\n", [[0, -7], [-7, 0]]),
        ("coordinate integer skew-symmetric", "2 2 1\n2 1 -7\n", [[0, 7], [-7, 0]]),
        ("coordinate pattern general", "2 3 2\n1 3\n2 1\n", [[0, 0, 1], [1, 0, 0]]),
        ("coordinate pattern symmetric", "2 2 2\n1 1\n2 1\n", [[1, 1], [1, 0]]),
        ("coordinate pattern skew-symmetric", "2 2 1\n2 1\n", [[0, -1], [1, 0]]),
        ("array real general", "2 3\n1\n2\n3\n4\n5\n0\n", [[1, 3, 5], [2, 4, 0]]),
        ("array real symmetric", "2 2\n1\n2\n4\n", [[1, 2], [2, 4]]),
        ("array integer skew-symmetric", "2 2\n2\n", [[0, -2], [2, 0]]),
        ("COORDINATE Real General", "1 1 1\r\n1 1 2\r\n\r\n", [[2]]),
        ("coordinate real general", "\n% more\n2 2 2\n\n1 1 2\n2 2 3", [[2, 0], [0, 3]]),  # blank lines, no line end
        ("coordinate real general", "2 3 0\n", [[0, 0, 0], [0, 0, 0]]),
    ],
)
def test_text_written_by_hand(declaration, body, expected, read):
    matrix = read(market(declaration, body)).matrix

    assert_canonical(matrix)
    assert np.array_equal(matrix.toarray(), expected)


def test_columns_ascend_duplicates_are_summed_and_zeros_kept(read):
    text = market("coordinate real general", "2 4 6\n2 4 1\n1 3 2\n2 4 0.5\n2 1 0\n1 1 9\n2 2 8\n")

    matrix = read(text).matrix

    assert matrix.indptr.tolist() == [0, 2, 5]
    assert matrix.indices.tolist() == [0, 2, 0, 1, 3]
    assert matrix.data.tolist() == [9, 2, 0, 8, 1.5]


def test_duplicate_integers_are_summed_without_overflow(read):
    text = market("coordinate integer general", "1 1 2\n1 1 9000000000000000000\n1 1 9000000000000000000\n")

    assert read(text).matrix.toarray() == [[1.8e19]]


def test_duplicates_of_a_pattern_count_each(read):
    assert read(market("coordinate pattern general", "1 2 3\n1 2\n1 2\n1 1\n")).matrix.data.tolist() == [1, 2]


def test_columns_beyond_32_bits(read):
    matrix = read(market("coordinate real general", "2 3000000000 2\n2 3000000000 4\n1 1 2\n")).matrix

    assert matrix.shape == (2, 3_000_000_000)
    assert matrix.indices.dtype == np.int64
    assert matrix.indices.tolist() == [0, 2_999_999_999]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_files_of_many_reads(suffix, read):
    given = scipy.sparse.random_array((500, 700), density=0.1, rng=np.random.default_rng(3))
    text = market_text(given)
    assert len(text) > 500_000

    named = read(COMPRESS[suffix](text), f"some.name.mtx{suffix}")

    assert_canonical(named.matrix)
    assert named.name == "some.name"
    assert named.block_size is None
    assert abs(named.matrix - given).max() == 0


def test_name_and_source_as_given(tmp_path):
    path = tmp_path / "UPPER.MTX.GZ"
    path.write_bytes(gzip.compress(market_text(GENERAL)))

    for source in (path, str(path)):
        named = read_matrix(source)
        assert (named.name, named.source) == ("UPPER", str(path))


@pytest.mark.parametrize("suffix", [".gz", ".bz2"])
def test_a_damaged_archive_is_named_with_the_cause(suffix, read):
    whole = COMPRESS[suffix](
        market_text(scipy.sparse.random_array((200, 200), density=0.1, rng=np.random.default_rng(3)))
    )
    middle = len(whole) // 2
    damaged = {
        "end": whole[:middle],
        "Invalid data stream|CRC|while decompressing|holds":  # garbage may be noticed as such first
        whole[:middle] + b"\xff\x00" * 20 + whole[middle + 40 :],
        "Invalid data stream|CRC|Not a gzipped": b"%%MatrixMarket matrix coordinate real general\n",
        "does not start|end-of-stream": b"",
    }

    for cause, content in damaged.items():
        with pytest.raises(InputError, match=rf"damaged\.mtx\{suffix}.*({cause})"):
            read(content, f"damaged.mtx{suffix}")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", r"does not start as a Matrix Market file"),
        ("\x00\x01\x02" * 1000, r"does not start as"),
        ("1 1 3\n", r"with '1 1 3'"),
        ("%%MatrixMarket vector coordinate real general\n2 1\n2 3\n", r"does not start as"),
        (market("coordinate real general", ""), r"line of sizes is ''"),
        (market("coordinate real general", "2 2\n1 1 3\n"), r"line of sizes is '2 2'"),
        (market("coordinate real general", "-2 2 1\n1 1 3\n"), r"line of sizes is '-2 2 1'"),
        (market("coordinate real general", "2 2 3\n1 1 3\n"), r"Truncated"),
        (market("coordinate real general", "2 2 1\n1 1 3\n2 2 3\n"), r"too long"),
        (market("coordinate real general", "2 2 1\n3 1 3\n"), r"Row index out of bounds"),
        (market("coordinate real general", "2 2 1\n1 0 3\n"), r"Column index out of bounds"),
        (market("coordinate real general", "2 2 9999999999999\n1 1 3\n"), r"more than a file of its size can hold"),
        (market("coordinate real general", "2 2 99999999999999999999\n1 1 3\n"), r"line of sizes is '2 2 9999"),
        (market("coordinate real general", "2 2 1\n1 1 three\n"), r"the character 'h'"),
        (market("coordinate real general", "2 2 1\n1 1 1.5D+03\n"), r"'D' among its numbers.*Fortran"),
        (
            market("coordinate real general", "2 2 1\n1 1 1.5-100\n"),
            r"'1\.5-100', which is no .* so: 1\.5e-100",
        ),
        (market("coordinate real general", "2 2 1\n1 1 +-2\n"), r"'\+-2', which is no number"),
        (market("coordinate real general", "2 2 1\n1 1 3 4\n"), r"4 numbers instead of 3"),
        (market("coordinate pattern general", "2 2 1\n1 1 3\n"), r"3 numbers instead of 2"),
        (market("array real general", "1 2\n3 4\n5 6\n"), r"4 numbers instead of 2"),
        (market("coordinate integer general", "2 2 1\n1 1 1.5\n"), r"'\.' among its numbers; expected whole numbers"),
        (market("coordinate integer general", "1 1 1\n1 1 99999999999999999999\n"), r"out of range"),
        (market("coordinate real general", "2 2 1\n1 1 nan\n"), r"holds nan in row 0, column 0"),
        (market("array real general", "1 1\n-inf\n"), r"holds -inf"),
        (market("coordinate real symmetric", "2 3 1\n2 1 3\n"), r"declared symmetric, but 2 x 3"),
        (market("array real skew-symmetric", "2 3\n3\n"), r"declared skew-symmetric, but 2 x 3"),
        (market("coordinate real symmetric", "2 2 2\n2 1 3\n1 2 3\n"), r"both sides of the diagonal"),
        (market("coordinate real skew-symmetric", "2 2 2\n2 1 3\n2 2 1\n"), r"skew-symmetric but has a diagonal"),
        (market("array pattern general", "2 2\n"), r"may not be pattern"),
        (market("coordinate quaternion general", "1 1 1\n1 1 3\n"), r"expected one of pattern, integer, real"),
        (market("coordinate real triangular", "1 1 1\n1 1 3\n"), r"and one of general, symmetric, skew-symmetric"),
        (market("coordinate complex general", "1 1 1\n1 1 3 0\n"), r"complex general; only real matrices"),
        (market("coordinate complex hermitian", "1 1 1\n1 1 3 0\n"), r"complex hermitian; only real matrices"),
        (market("array complex symmetric", "1 1\n3 0\n"), r"complex symmetric; only real matrices"),
    ],
)
def test_a_damaged_text_is_named_with_the_cause(text, cause, read):
    with pytest.raises(InputError, match=rf"damaged\.mtx.*{cause}"):
        read(text, "damaged.mtx")


@pytest.mark.parametrize("container", ["array", "matrix"])
@pytest.mark.parametrize("layout", ["csr", "csc", "coo", "bsr", "dia"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int8, np.bool_])
def test_every_npz_of_scipy(layout, container, dtype, tmp_path):
    expected = np.array([[0, 3, 0, 1], [1, 0, 0, 0], [0, 0, 2, 7], [0, 5, 0, 0]]).astype(dtype)
    path = tmp_path / "saved.v2.npz"
    scipy.sparse.save_npz(path, getattr(scipy.sparse, f"{layout}_{container}")(expected))

    named = read_matrix(path)

    assert_canonical(named.matrix)
    assert np.array_equal(named.matrix.toarray(), expected.astype(np.float64))
    assert (named.name, named.block_size) == ("saved.v2", None)


@pytest.mark.parametrize("dtype", [np.int8, np.float64])
def test_an_npz_is_sorted_and_summed(dtype, tmp_path):
    path = tmp_path / "unsorted.npz"
    arrays = (np.array([100, 2, 100, 0], dtype), np.array([2, 1, 2, 0]), np.array([0, 4, 4]))
    scipy.sparse.save_npz(path, scipy.sparse.csr_array(arrays, shape=(2, 3)))

    matrix = read_matrix(path).matrix

    assert matrix.indices.tolist() == [0, 1, 2]
    assert matrix.data.tolist() == [0, 2, 200]


def write_npz(path, **arrays):
    np.savez(path, **arrays)
    return path.read_bytes()


def test_a_damaged_npz_is_named_with_the_cause(tmp_path, read):
    valid = {
        "format": np.array(b"csr"),
        "shape": np.array([2, 2]),
        "data": np.ones(2),
        "indices": np.array([0, 1]),
        "indptr": np.array([0, 1, 2]),
        "_is_array": np.array(True),
    }
    scratch = tmp_path / "scratch.npz"
    whole = write_npz(scratch, **valid)
    flipped = bytearray(whole)
    flipped[whole.index(np.ones(2).tobytes())] ^= 1
    plain = io.BytesIO()
    np.save(plain, np.eye(2))
    assert read(whole, "valid.npz").matrix.toarray().tolist() == [[1, 0], [0, 1]]

    damaged = [
        (b"", "no whole zip archive"),
        (whole[: len(whole) // 2], "no whole zip archive"),
        (bytes(flipped), "CRC"),
        (plain.getvalue(), "no whole zip archive"),
        (write_npz(scratch, numbers=np.eye(2)), "does not contain a sparse"),
        (write_npz(scratch, **valid | {"format": np.array(b"xyz")}), "Unknown format"),
        (write_npz(scratch, **{key: array for key, array in valid.items() if key != "indptr"}), "indptr"),
        (write_npz(scratch, **valid | {"indices": np.array([0, 2])}), "a column index is 2, outside 0 to 1"),
        (write_npz(scratch, **valid | {"indptr": np.array([0, 2, 1])}), "offsets descend"),
        (write_npz(scratch, **valid | {"data": np.array([1, 1j])}), "only real numbers"),
        (write_npz(scratch, **valid | {"data": np.array([1, np.inf])}), "holds inf"),
    ]

    for content, cause in damaged:
        with pytest.raises(InputError, match=rf"damaged\.npz.*{cause}"):
            read(content, "damaged.npz")


def test_an_npz_of_one_dimension_is_refused(tmp_path):
    path = tmp_path / "vector.npz"
    scipy.sparse.save_npz(path, scipy.sparse.coo_array(np.array([1.0, 0, 2])))

    # SciPy 1.15 writes such a file but cannot read it, and is then cited.
    with pytest.raises(
        InputError, match=r"vector\.npz.*(1 dimension; expected a matrix|expected 1; expected an undamaged)"
    ):
        read_matrix(path)


@pytest.mark.parametrize(
    ("name", "nodes", "dof"),
    [
        ("cube5-dof1", 5, 1),
        ("cube6-dof3", 6, 3),
        ("cube3-dof6", 3, 6),
        ("beam7x3x4-dof3", (7, 3, 4), 3),
        ("beam2x5x3-dof1", (2, 5, 3), 1),
    ],
)
def test_a_generated_matrix_is_that_of_the_library(name, nodes, dof):
    expected = Cantilever(nodes, dof=dof, material=LognormalMaterial(0.5, 1)).matrix().to_csr()

    named = read_matrix(name)

    assert_canonical(named.matrix)
    assert (named.name, named.source, named.block_size) == (name, name, dof)
    assert named.matrix.shape == expected.shape
    for array in ("indptr", "indices", "data"):
        assert np.array_equal(getattr(named.matrix, array), getattr(expected, array)), array
        assert getattr(named.matrix, array).dtype == (np.float64 if array == "data" else np.int32)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("cube8-dof2", r"dof must be 1 .* not 2"),
        ("cube1-dof3", r"at least 2"),
        ("beam4x1x4-dof1", r"at least 2"),
        ("cube99999999999-dof1", r"unknowns, more than 2147483647; ask for fewer nodes"),
    ],
)
def test_a_generated_matrix_that_cannot_be(name, advice):
    with pytest.raises(InputError, match=advice):
        read_matrix(name)


@pytest.mark.parametrize(
    "name", ["", "cube8", "cube8-dof3x", "acube8-dof3", "beam8x8-dof3", "cube٣-dof3", "a.mtx.xz", "mtx"]
)
def test_a_name_that_means_nothing_leads_to_what_is_accepted(name):
    with pytest.raises(InputError, match=r"\.mtx, \.mtx\.gz or \.mtx\.bz2.*\.npz.*cube32-dof3.*beam33x9x9-dof1"):
        read_matrix(name)


@pytest.mark.parametrize("suffix", [".mtx", ".mtx.gz", ".mtx.bz2", ".npz"])
def test_a_missing_file_and_a_folder_are_named(suffix, tmp_path):
    path = tmp_path / f"nowhere{suffix}"
    with pytest.raises(InputError, match=rf"{path} does not exist"):
        read_matrix(path)

    path.mkdir()
    with pytest.raises(InputError, match=rf"{path} is not a file"):
        read_matrix(path)


def test_a_name_is_without_the_suffix_of_any_reader():
    assert [matrix_name(f"folder/K{suffix}") for suffix in (".mtx.gz", ".petsc", ".MAT", ".zarr", ".txt")] == [
        *"KKKK",
        "K.txt",
    ]


def test_a_file_without_vectors_is_no_right_hand_side(tmp_path):
    scipy.sparse.save_npz(tmp_path / "A.npz", scipy.sparse.eye_array(3))
    told = r"cannot tell what right-hand sides .*A\.npz' holds; expected one of: Matrix Market .*numpy\.save \(\.npy\); .*PETSc"
    with pytest.raises(InputError, match=told):
        read_vectors(tmp_path / "A.npz")
    np.save(tmp_path / "b.npy", np.ones(3) * 1j)
    with pytest.raises(InputError, match="right-hand sides are real"):
        read_vectors(tmp_path / "b.npy")


@pytest.fixture
def own_reader():
    """Register a reader for the length of a test."""
    names = []

    def register(**options):
        READERS.add("own", Reader("Own", "file of one's own", **options))
        names.append("own")

    yield register
    for name in names:
        READERS.remove(name)


def test_the_longest_suffix_decides(own_reader, tmp_path):
    own_reader(suffixes=(".gz", ".xyz"), matrix=scipy.sparse.load_npz)
    for name, program in {"A.mtx.gz": "Matrix Market", "A.npz.gz": "Own", "A.XYZ": "Own"}.items():
        (tmp_path / name).touch()
        assert reader_of(tmp_path / name).program == program


def out_of_range():
    matrix = scipy.sparse.coo_array((np.ones(1), ([0], [0])), shape=(2, 2))
    matrix.coords = (np.array([5]), np.array([0]))
    return matrix


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (out_of_range, "a row index"),
        (lambda: scipy.sparse.eye_array(2) * np.nan, "nan"),
        (lambda: [][0], "list index out of range; expected an undamaged file of one's own"),
        (
            lambda: importlib.import_module("no_such_module"),
            "no_such_module, which is not installed: pip install 'xyz'",
        ),
    ],
)
def test_what_a_reader_returns_is_checked_and_what_it_raises_is_named(own_reader, tmp_path, returned, told):
    (tmp_path / "A.xyz").touch()
    own_reader(suffixes=(".xyz",), matrix=lambda _path: returned(), requirement="xyz")
    with pytest.raises(InputError, match=rf"A\.xyz.*{told}"):
        read_matrix(tmp_path / "A.xyz")
