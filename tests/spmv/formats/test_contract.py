"""What every registered format promises, on the CPU, under the CUDA emulator and on a GPU."""

import numpy as np
import pytest
import scipy.sparse
from format_contract import PRECISIONS, awkward_patterns, build, check_products, check_special_values
from kernel_targets import TARGETS, converting
from tolerances import product_bound

from penstock.spmv import InputError, format_named, format_names, registered_kernels
from penstock.spmv.compilation.table import find_kernel, has_kernel

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


def test_every_format_has_both_products_on_both_kinds_of_device():
    products = {(f, o, d) for f in format_names() for o in ("spmv", "spmm") for d in ("cpu", "cuda")}

    assert not products - set(registered_kernels())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("values_dtype", "dtype"), PRECISIONS)
@pytest.mark.parametrize(("name", "keywords"), FORMATS)
def test_products_agree_with_the_reference_within_the_rounding_bound(name, keywords, values_dtype, dtype, target):
    check_products(name, keywords, values_dtype, dtype, target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("name", "keywords"), FORMATS)
@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_nan_and_inf_in_x_reach_exactly_the_rows_that_read_them(name, keywords, special, target):
    check_special_values(name, keywords, special, target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("name", "keywords"), FORMATS)
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (0.7, 0.3)])
def test_row_slabs_give_the_same_bits_as_the_whole_matrix(name, keywords, alpha, beta, target):
    if format_named(name).traits.adds or keywords.get("strategy") == "balanced":
        pytest.skip("rows are completed in an order that depends on the cut, or on chance")
    pattern = awkward_patterns(2)["just over a block"]
    matrix, A = build(name, keywords, pattern, np.float64, np.float64)
    step = max(55, matrix.row_granularity) // matrix.row_granularity * matrix.row_granularity
    rng = np.random.default_rng(1)
    x, before = rng.uniform(-1, 1, A.shape[1]), rng.uniform(-1, 1, A.shape[0])
    whole, parts = target.put(before.copy()), target.put(np.empty(A.shape[0]))

    with target.running():
        kernel = find_kernel(name, "spmv", target.device_kind)
        kernel(target.put_matrix(matrix), target.put(x), whole, alpha, beta)
        for start in range(0, A.shape[0], step):
            stop = min(start + step, A.shape[0])
            part = target.put(before[start:stop].copy())
            kernel(target.put_matrix(matrix.rows(start, stop)), target.put(x), part, alpha, beta)
            parts[start:stop] = part

    np.testing.assert_array_equal(target.get(whole), target.get(parts))


@pytest.mark.parametrize(("name", "keywords"), FORMATS)
def test_rows_that_another_kernel_completes_have_the_same_bits(name, keywords):
    """On a CPU, where a slab's last rows have a kernel of their own: some show how ``alpha t + beta y`` was rounded."""
    if name in ("coo", "hyb", "symmetric_bsr"):
        pytest.skip("rows are completed in an order that depends on the cut")
    rng = np.random.default_rng(1)
    pattern = scipy.sparse.random_array((210, 210), density=0.05, rng=rng, format="csr")
    matrix, A = build(name, keywords, pattern, np.float64, np.float64)
    if matrix.row_granularity > A.shape[0] // 4:
        pytest.skip("this format is not cut so finely")
    for columns in ((), (2,), (5,)):
        x, before = rng.uniform(-1, 1, (A.shape[1], *columns)), rng.uniform(-1, 1, (A.shape[0], *columns))
        whole = matrix.apply(x, before.copy(), alpha=0.7, beta=0.3)
        for height in (7, 25, 37, 90):
            step = max(1, height // matrix.row_granularity) * matrix.row_granularity
            for start in range(0, A.shape[0], step):
                part = before[start : start + step].copy()
                matrix.rows(start, min(start + step, A.shape[0])).apply(x, part, alpha=0.7, beta=0.3)
                np.testing.assert_array_equal(part, whole[start : start + step])


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


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("values_dtype", [np.float64, np.float32])
def test_absolute_products_of_half_a_matrix_need_no_copy_on_a_gpu(target, size, values_dtype):
    pattern = awkward_patterns(1)["just over a block"]
    matrix, _ = build("symmetric_bsr", {"block_size": size}, pattern, values_dtype, np.float64)
    x = np.random.default_rng(2).uniform(-1, 1, matrix.shape[1])
    expected, matrix = abs(matrix.to_csr()) @ x, target.put_matrix(matrix)
    out = target.put(np.zeros_like(expected))

    with converting(target):
        matrix.add_absolute(0, target.put(x), out)

    np.testing.assert_allclose(target.get(out), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("name", "keywords"), FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_refused(name, keywords, bad):
    A = build(name, keywords, awkward_patterns(1)["empty rows"], np.float64, np.float64)[1]
    A.data[3] = bad

    with pytest.raises(InputError, match="all entries must be finite"):
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
