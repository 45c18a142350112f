"""What every registered format promises, on the CPU, under the CUDA emulator and on a GPU."""

import numpy as np
import pytest
import scipy.sparse
from kernel_targets import TARGETS
from tolerances import product_bound

from penstock.spmv import InputError, format_named, format_names, registered_kernels
from penstock.spmv.kernel_table import find_kernel, has_kernel

# What from_csr is called with, for formats that have parameters worth varying.
PARAMETERS = {
    "bsr": [{"block_size": size} for size in (1, 2, 3, 6, 8)],
    "csr": [{"strategy": name} for name in ("scalar", "vector", "shared", "balanced")],
    "ell": [{}, {"lanes": 4}, {"warps": 1 << 20}],
    "hyb": [{"partition": name} for name in ("hybrid33", "hybridlimit33", "minstorage")],
    "sell": [
        {},
        {"chunk_height": 4, "sorting_scope": 16},
        {"chunk_height": 32, "sorting_scope": 64, "lanes": 4},
        {"chunk_height": 1, "sorting_scope": 1},
    ],
    "sliced_bsr": [{"block_size": 1, "sorting_scope": 32}, *({"block_size": size} for size in (2, 3, 6))],
    "symmetric_bsr": [{"block_size": size} for size in (1, 2, 3, 6)],
}
FORMATS = [
    pytest.param(name, keywords, id="-".join([name, *map(str, keywords.values())]))
    for name in format_names()
    for keywords in PARAMETERS.get(name, [{}])
]
# Parts of a row are added to out one by one, on a GPU by atomics: the order, and with it the last digits, may vary.
ADDING = ("coo", "ell", "hyb", "symmetric_bsr")
PRECISIONS = [
    pytest.param(np.float64, np.float64, id="f64"),
    pytest.param(np.float32, np.float64, id="f32-stored"),
    pytest.param(np.float32, np.float32, id="f32"),
]


def awkward_patterns(size: int) -> dict[str, scipy.sparse.csr_array]:
    """Return matrices of blocks of ``size``: shapes and row lengths just over a warp and a thread block, and empty ones."""
    generator = np.random.default_rng(size)

    def random(rows: int, columns: int, density: float) -> scipy.sparse.csr_array:
        return scipy.sparse.random_array((rows, columns), density=density, rng=generator, format="csr")

    full_row = random(35, 40, 0.05).tolil()
    full_row[17] = 1.0
    empty_rows = random(33, 33, 0.2).tolil()
    empty_rows[[0, 5, 32]] = 0.0
    return {
        "1x1": scipy.sparse.csr_array([[2.5]]),
        "no entries": scipy.sparse.csr_array((3, 4)),
        "empty rows": empty_rows.tocsr(),
        "one full row": full_row.tocsr(),
        "wide": random(7, 261, 0.3),
        "tall": random(259, 5, 0.4),
        "just over a block": random(257, 257, 0.03),
    }


def build(name: str, keywords: dict, pattern, values_dtype, dtype):
    """Fill a pattern of blocks with random values; return the matrix and the CSR matrix it stands for."""
    size = keywords.get("block_size", 1)
    generator = np.random.default_rng(7)
    A = scipy.sparse.kron(pattern, np.ones((size, size)), format="csr")
    A.sort_indices()
    A.data = generator.uniform(-1, 1, A.nnz).astype(values_dtype).astype(dtype)
    if name == "symmetric_bsr":
        A = (A + A.T).tocsr()
        A.sort_indices()
        A.data = A.data.astype(values_dtype).astype(dtype)
    matrix = format_named(name).from_csr(A, **keywords, values_dtype=values_dtype)
    return matrix, A.astype(np.float64)


def patterns_for(name: str, size: int) -> dict[str, scipy.sparse.csr_array]:
    """Return the awkward patterns that a format can hold."""
    patterns = awkward_patterns(size)
    square = name == "symmetric_bsr"
    return {label: A for label, A in patterns.items() if A.shape[0] == A.shape[1] or not square}


def test_every_format_has_both_products_on_both_kinds_of_device():
    products = {(f, o, d) for f in format_names() for o in ("spmv", "spmm") for d in ("cpu", "cuda")}

    assert not products - set(registered_kernels())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("values_dtype", "dtype"), PRECISIONS)
@pytest.mark.parametrize(("name", "keywords"), FORMATS)
def test_products_agree_with_the_reference_within_the_rounding_bound(name, keywords, values_dtype, dtype, target):
    generator = np.random.default_rng(3)
    with target.running():
        for label, pattern in patterns_for(name, keywords.get("block_size", 1)).items():
            matrix, A = build(name, keywords, pattern, values_dtype, dtype)
            slab = [matrix.rows(0, matrix.shape[0])] if "row_offsets" in matrix.arrays() else []  # int32 offsets
            for offsets in [matrix, *slab]:
                for columns in (None, 1, 3, 8):
                    for alpha, beta in ((1.0, 0.0), (-0.5, 2.0)):
                        shape = () if columns is None else (columns,)
                        x = generator.uniform(-1, 1, (A.shape[1], *shape)).astype(dtype)
                        out = generator.uniform(-1, 1, (A.shape[0], *shape)).astype(dtype)
                        expected = alpha * (A @ x.astype(np.float64)) + beta * out.astype(np.float64)
                        bound = product_bound(abs(A), x, out, alpha, beta, dtype, additions=name in ADDING)
                        result = target.put(out.copy() if beta else np.full_like(out, np.nan))

                        operation = "spmv" if columns is None else "spmm"
                        kernel = find_kernel(name, operation, target.device_kind)
                        kernel(target.put_matrix(offsets), target.put(x), result, alpha, beta)

                        error = np.abs(target.get(result) - expected)
                        assert (error <= bound).all(), (label, columns, alpha, beta, float((error / bound).max()))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("name", "keywords"), FORMATS)
@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_nan_and_inf_in_x_reach_exactly_the_rows_that_read_them(name, keywords, special, target):
    pattern = awkward_patterns(1)["empty rows"]
    matrix, A = build(name, keywords, pattern, np.float64, np.float64)
    x = np.ones(A.shape[1])
    x[A.shape[1] // 2] = special
    touched = np.diff(A[:, [A.shape[1] // 2]].tocsr().indptr) > 0
    out = target.put(np.empty(A.shape[0]))

    with target.running():
        find_kernel(name, "spmv", target.device_kind)(target.put_matrix(matrix), target.put(x), out, 1.0, 0.0)

    assert touched.any()
    np.testing.assert_array_equal(~np.isfinite(target.get(out)), touched)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("name", "keywords"), FORMATS)
def test_row_slabs_give_the_same_bits_as_the_whole_matrix(name, keywords, target):
    if name in ADDING or keywords.get("strategy") == "balanced":
        pytest.skip("rows are completed in an order that depends on the cut, or on chance")
    pattern = awkward_patterns(2)["just over a block"]
    matrix, A = build(name, keywords, pattern, np.float64, np.float64)
    step = max(55, matrix.row_granularity) // matrix.row_granularity * matrix.row_granularity
    x = np.random.default_rng(1).uniform(-1, 1, A.shape[1])
    whole, parts = target.put(np.empty(A.shape[0])), target.put(np.empty(A.shape[0]))

    with target.running():
        kernel = find_kernel(name, "spmv", target.device_kind)
        kernel(target.put_matrix(matrix), target.put(x), whole, 1.0, 0.0)
        for start in range(0, A.shape[0], step):
            stop = min(start + step, A.shape[0])
            part = target.put(np.empty(stop - start))
            kernel(target.put_matrix(matrix.rows(start, stop)), target.put(x), part, 1.0, 0.0)
            parts[start:stop] = part

    np.testing.assert_array_equal(target.get(whole), target.get(parts))


@pytest.mark.parametrize(("name", "keywords"), FORMATS)
def test_row_slabs_add_up_to_the_product_of_the_whole_matrix(name, keywords):
    matrix, A = build(name, keywords, awkward_patterns(2)["just over a block"], np.float64, np.float64)
    x = np.random.default_rng(1).uniform(-1, 1, A.shape[1])
    out = np.zeros(A.shape[0])

    for start, slab in matrix.slabs(nbytes=A.data.nbytes // 3):
        slab.apply_slab(start, x, out, 0.5, 0.0)

    assert (np.abs(out - 0.5 * (A @ x)) <= product_bound(abs(A), x, out, 0.5, 0.0, np.float64)).all()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("name", "keywords"), FORMATS)
@pytest.mark.parametrize("wanted", [1, 4, 6])
def test_diagonal_blocks_are_those_of_the_dense_matrix(name, keywords, wanted, target):
    emulated = target.name.startswith("emulated")
    if emulated and not has_kernel(name, "diagonal_blocks", "cuda"):
        pytest.skip("this format has no kernel of its own for them")
    pattern = scipy.sparse.random_array((24, 24), density=0.3, rng=np.random.default_rng(5), format="csr")
    matrix, A = build(name, keywords, pattern, np.float64, np.float64)
    rows = A.shape[0]
    dense = A.toarray().reshape(rows // wanted, wanted, rows // wanted, wanted)
    expected = dense[np.arange(rows // wanted), :, np.arange(rows // wanted), :]
    blocks = target.put(np.zeros((rows // wanted, wanted, wanted)))

    half = rows // 2 // matrix.row_granularity * matrix.row_granularity
    with target.running():
        for start, stop in ((0, half), (half, rows)):
            slab = target.put_matrix(matrix.rows(start, stop))
            if emulated:
                find_kernel(name, "diagonal_blocks", "cuda")(slab, start, blocks)
            else:
                slab.add_diagonal_blocks(start, blocks)

    np.testing.assert_array_equal(target.get(blocks), expected)


@pytest.mark.parametrize(("name", "keywords"), FORMATS)
def test_conversion_keeps_every_stored_entry_and_stored_zeros(name, keywords):
    A = build(name, keywords, awkward_patterns(1)["just over a block"], np.float64, np.float64)[1]
    A.data[np.abs(A.data) < 0.2] = 0.0  # not by place: half of a symmetric matrix must stay symmetric

    back = format_named(name).from_csr(A, **keywords).to_csr()
    back.sort_indices()

    assert back.nnz == A.nnz
    np.testing.assert_array_equal(back.indices, A.indices)
    np.testing.assert_array_equal(back.data, A.data)


@pytest.mark.parametrize(("name", "keywords"), FORMATS)
def test_arrays_and_parameters_rebuild_the_matrix(name, keywords):
    matrix, _ = build(name, keywords, awkward_patterns(1)["empty rows"], np.float64, np.float64)

    twin = format_named(name).from_arrays(matrix.shape, matrix.dtype, matrix.arrays(), matrix.parameters())

    assert twin.nbytes == matrix.nbytes == sum(array.nbytes for array in matrix.arrays().values())
    assert twin.nnz == matrix.nnz
    assert (twin.to_csr() != matrix.to_csr()).nnz == 0


@pytest.mark.parametrize(("name", "keywords"), FORMATS)
def test_absolute_product_is_that_of_the_absolute_values(name, keywords):
    matrix, A = build(name, keywords, awkward_patterns(1)["just over a block"], np.float64, np.float64)
    x = np.random.default_rng(2).uniform(-1, 1, A.shape[1])

    result = matrix.apply_absolute(x)

    np.testing.assert_allclose(result, abs(A) @ x, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("name", "keywords"), FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_refused(name, keywords, bad):
    A = build(name, keywords, awkward_patterns(1)["empty rows"], np.float64, np.float64)[1]
    A.data[3] = bad

    with pytest.raises(InputError, match="NaN and Inf cannot be solved with"):
        format_named(name).from_csr(A, **keywords)


def test_offsets_past_2_to_the_31_are_kept_and_narrowed_in_a_slab():
    """Built from offsets alone: a slab near entry 2**33 of a matrix whose other entries do not exist."""
    base = 2**33
    values = np.arange(1.0, 7.0)

    class FarAway(np.ndarray):
        """An array whose first entry has number ``base``."""

        def __getitem__(self, key):
            assert isinstance(key, slice)
            return np.asarray(self)[key.start - base : key.stop - base]

    whole = format_named("csr").from_arrays(
        (2, 6),
        np.float64,
        {
            "row_offsets": np.array([base, base + 2, base + 6], dtype=np.int64),
            "column_indices": np.arange(6, dtype=np.int32).view(FarAway),
            "values": values.view(FarAway),
        },
        {},
    )

    slab = whole.rows(1, 2)

    assert slab.row_offsets.dtype == np.int32
    np.testing.assert_array_equal(slab @ np.ones(6), [3.0 + 4.0 + 5.0 + 6.0])


def test_a_slab_of_more_than_2_to_the_31_entries_is_refused():
    offsets = np.array([0, 2**31], dtype=np.int64)
    empty = np.empty(0)
    whole = format_named("csr").from_arrays(
        (1, 5), np.float64, {"row_offsets": offsets, "column_indices": empty, "values": empty}, {}
    )

    with pytest.raises(InputError, match="cut finer"):
        whole.rows(0, 1)


@pytest.mark.parametrize("target", [target for target in TARGETS if target.id != "cpu"])
@pytest.mark.parametrize(("values_dtype", "dtype"), PRECISIONS)
@pytest.mark.parametrize(("name", "keywords"), [("sell", {}), ("sliced_bsr", {"block_size": 3})])
def test_every_number_of_columns_from_1_to_64_is_composed_of_kernels(name, keywords, values_dtype, dtype, target):
    matrix, A = build(name, keywords, awkward_patterns(1)["just over a block"], values_dtype, dtype)
    generator = np.random.default_rng(4)
    with target.running():
        kernel = find_kernel(name, "spmm", "cuda")
        for columns in (1, 2, 4, 6, 7, 12, 16, 32, 44, 64):
            x = generator.uniform(-1, 1, (A.shape[1], columns)).astype(dtype)
            out = generator.uniform(-1, 1, (A.shape[0], columns)).astype(dtype)
            bound = product_bound(abs(A), x, out, 2.0, -1.0, dtype)
            result = target.put(out.copy())

            kernel(target.put_matrix(matrix), target.put(x), result, 2.0, -1.0)

            expected = 2.0 * (A @ x.astype(np.float64)) - out.astype(np.float64)
            assert (np.abs(target.get(result) - expected) <= bound).all(), columns
