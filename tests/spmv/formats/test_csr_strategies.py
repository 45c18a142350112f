"""How CSR divides its work on CUDA: rules of choice, shared memory instead of shuffles, equal shares of rows and entries."""

import contextlib
import functools

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_targets import TARGETS
from tolerances import product_bound

from penstock.spmv import CsrMatrix, InputError
from penstock.spmv.compilation import cuda_module
from penstock.spmv.compilation.table import find_kernel
from penstock.spmv.formats import csr, csr_strategy
from penstock.spmv.formats.csr_strategy import CsrStrategy, choose_lanes, choose_strategy

DEVICE_TARGETS = [target for target in TARGETS if target.id != "cpu"]
TILE = 2048


def with_lengths(lengths, seed=0):
    """Return a CSR matrix whose rows have these lengths, with random values, beginning in turn at each column."""
    lengths = np.asarray(lengths, dtype=np.int64)
    columns = max(int(lengths.max(initial=0)), 7) + 5
    starts = (np.arange(lengths.size) * 3 % (columns - lengths)).astype(np.int64)
    indices = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    values = np.random.default_rng(seed).uniform(-1, 1, int(lengths.sum()))
    indices = np.concatenate([*indices, np.empty(0, dtype=np.int64)])
    return scipy.sparse.csr_array((values, indices, offsets), shape=(lengths.size, columns))


CASES = {
    "one row of over 40 tiles": [3, 41 * TILE + 17, 0, 5],
    "two rows of many tiles": [1, 5 * TILE, 0, 0, 3 * TILE, 2],
    "only long rows": [3 * TILE + 1] * 4,
    "many empty rows": [*([0] * 5000), 3, *([0] * 5000), 70, *([0] * 100)],
    "ends of rows end tiles": [TILE - 1] * 3,
    "entries end tiles, ends of rows begin them": [TILE, TILE - 2, TILE - 1, 5],
    "a row begins with a tile": [TILE - 1, TILE + 3, 2 * TILE, 0],
    "an empty row between tiles": [TILE - 1, 0, TILE - 2, 0, 0, 9],
    "no entries": [0] * 5,
    "no entries in many tiles": [0] * (2 * TILE + 1),
    "no rows": [],
    "one row": [5000],
    "one short row": [4],
    "one entry": [1],
    "a column": [1, 0] * 2500,
    "last rows empty": [10] * 300 + [0] * 3000,
    "short and long rows in turn": [48, 49, 0, 700, 1] * 12,
    "all as long as a thread sums": [48] * 130,
    "just longer than a thread sums": [49] * 130,
}


@contextlib.contextmanager
def seeded(target, seed):
    """Run the emulator's threads and blocks in an order drawn from a seed."""
    with target.running(), pytest.MonkeyPatch.context() as patch:
        if target.name.startswith("emulated"):
            compile_ = cuda_module.compile_function
            patch.setattr(
                cuda_module, "compile_function", lambda *names: functools.partial(compile_(*names), seed=seed)
            )
        yield


def product(target, matrix, x, out, alpha=1.0, beta=0.0, seed=0):
    result = target.put(out.copy())
    with seeded(target, seed):
        find_kernel("csr", "spmv", "cuda")(target.put_matrix(matrix), target.put(x), result, alpha, beta)
    return target.get(result)


@pytest.mark.parametrize(
    ("thresholds", "entries", "longest", "balanced"),
    [
        ("ginkgo_nvidia", 1_000_000, 1024, False),
        ("ginkgo_nvidia", 1_000_001, 3, True),
        ("ginkgo_nvidia", 5000, 1025, True),
        ("ginkgo_amd", 100_000_000, 768, False),
        ("ginkgo_amd", 100_000_001, 3, True),
        ("ginkgo_amd", 5000, 769, True),
        ("h200", 10**12, 64, False),
        ("h200", 1000, 65, True),
        ("h200", 20_000, 160, False),  # eight times the mean of 20
        ("h200", 20_000, 161, True),
    ],
)
def test_a_large_or_uneven_matrix_is_balanced_by_algorithm_3(thresholds, entries, longest, balanced):
    expected = CsrStrategy.BALANCED if balanced else CsrStrategy.VECTOR

    assert choose_strategy(entries, 1000, longest, thresholds) == expected


def test_an_empty_matrix_is_not_balanced_and_unknown_thresholds_are_refused():
    assert choose_strategy(0, 0, 0) == CsrStrategy.VECTOR
    with pytest.raises(InputError, match="known: ginkgo_nvidia, ginkgo_amd, h200"):
        choose_strategy(1, 1, 1, "v100")


def test_a_matrix_takes_the_strategy_of_its_thresholds():
    A = with_lengths([800, *([400] * 3)])

    strategies = {name: CsrMatrix.from_csr(A, thresholds=name).strategy for name in csr_strategy.THRESHOLDS}

    assert strategies == {"ginkgo_nvidia": 0, "ginkgo_amd": 2, "h200": 0}
    assert CsrMatrix.from_csr(with_lengths([900, *([2] * 50)])).strategy == CsrStrategy.BALANCED


@pytest.mark.parametrize(
    ("mean", "longest", "expected"),
    [
        (0.0, 0, (1, 1, 1)),
        (2.9, 40, (1, 2, 32)),
        (6.0, 7, (2, 4, 4)),
        (27.0, 27, (8, 16, 16)),
        (47.9, 63, (8, 32, 32)),
        (48.0, 64, (16, 32, 32)),
        (95.0, 95, (16, 32, 32)),
        (5000.0, 9000, (32, 32, 32)),
    ],
)
def test_lanes_follow_a_third_of_the_mean_row_the_mean_or_the_longest(mean, longest, expected):
    assert tuple(choose_lanes(mean, longest, rule) for rule in ("auto", "mean", "longest")) == expected


def test_a_matrix_takes_the_lanes_of_its_rule_and_a_scalar_kernel_one():
    A = with_lengths([6] * 40 + [80])

    assert [CsrMatrix.from_csr(A, lanes=rule).lanes for rule in ("auto", "mean", "longest", 16)] == [2, 4, 32, 16]
    scalar = CsrMatrix.from_csr(A, strategy="scalar", lanes=8)
    assert (scalar.lanes, scalar.strategy) == (1, CsrStrategy.VECTOR)
    kept = CsrMatrix.from_csr(CsrMatrix.from_csr(A, strategy="shared", lanes=4))
    assert (kept.lanes, kept.strategy) == (4, CsrStrategy.SHARED)


@pytest.mark.parametrize(
    "keywords", [{"lanes": 3}, {"lanes": 64}, {"lanes": 0}, {"lanes": "most"}, {"strategy": "merge"}], ids=str
)
def test_unknown_lanes_and_strategies_are_refused(keywords):
    with pytest.raises(InputError, match=r"lanes must be|strategy must be"):
        CsrMatrix.from_csr(with_lengths([1, 2]), **keywords)


@pytest.mark.parametrize("target", DEVICE_TARGETS)
@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16, 32])
def test_shared_memory_gives_the_bits_of_shuffles(lanes, target):
    A = with_lengths(np.random.default_rng(lanes).integers(0, 90, 75))
    x, out = np.random.default_rng(1).uniform(-1, 1, (2, A.shape[1]))
    out = out[:75].copy()

    vector, shared = (
        product(target, CsrMatrix.from_csr(A, strategy=name, lanes=lanes), x, out, 0.5, -2.0)
        for name in ("vector", "shared")
    )

    np.testing.assert_array_equal(vector, shared)


@pytest.mark.parametrize("target", DEVICE_TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_balanced_products_are_right_and_the_same_in_any_order_of_threads(case, target):
    A = with_lengths(CASES[case])
    matrix = CsrMatrix.from_csr(A, strategy="balanced")
    generator = np.random.default_rng(4)
    x, out = generator.uniform(-1, 1, A.shape[1]), generator.uniform(-1, 1, A.shape[0])

    first, again, shuffled = (product(target, matrix, x, out, -0.5, 2.0, seed) for seed in (0, 0, 3))

    bound = product_bound(abs(A), x, out, -0.5, 2.0, np.float64)
    assert (np.abs(first - (-0.5 * (A @ x) + 2.0 * out)) <= bound).all()
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first, shuffled)
    without = product(target, matrix, x, np.full_like(out, np.nan), 3.0, seed=5)
    assert (np.abs(without - 3.0 * (A @ x)) <= product_bound(abs(A), x, out, 3.0, 0.0, np.float64)).all()


@pytest.mark.parametrize("target", DEVICE_TARGETS)
@pytest.mark.parametrize("case", ["one row of over 40 tiles", "many empty rows", "short and long rows in turn"])
def test_slabs_of_a_balanced_matrix_find_tiles_of_their_own(case, target):
    A = with_lengths(CASES[case])
    matrix = CsrMatrix.from_csr(A, strategy="balanced")
    x, out = np.random.default_rng(4).uniform(-1, 1, A.shape[1]), np.empty(A.shape[0])
    third = A.shape[0] // 3

    for start, stop in ((0, third), (third, third), (third, third + 1), (third + 1, A.shape[0])):
        slab = matrix.rows(start, stop)
        assert slab.strategy == CsrStrategy.BALANCED
        assert slab.row_offsets.dtype == np.int32
        out[start:stop] = product(target, slab, x, out[start:stop])

    assert (np.abs(out - A @ x) <= product_bound(abs(A), x, out, 1.0, 0.0, np.float64)).all()


def slow_merge(lengths, tile):
    """Walk all entries and ends of rows, one step each; return rows ended before each tile, and tiles of cut rows."""
    steps = [(row, kind) for row, length in enumerate(lengths) for kind in ["entry"] * length + ["end"]]
    tiles = [steps[begin : begin + tile] for begin in range(0, len(steps), tile)]
    ended, cut = [0], []
    for number, part in enumerate(tiles):
        ended.append(ended[-1] + sum(kind == "end" for _, kind in part))
        row, kind = part[-1]
        begun_before = number > 0 and tiles[number - 1][-1] == (row, "entry")
        whole_tile_of_it = part[0][0] == row
        if kind == "entry" and not (begun_before and whole_tile_of_it):
            cut.append(number)
    return ended, cut


def assert_tiles(lengths, tile):
    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    entries = int(offsets[-1])
    arrays = {"row_offsets": offsets, "column_indices": np.zeros(entries, np.int32), "values": np.zeros(entries)}
    whole = CsrMatrix.from_arrays((len(lengths), 1), np.float64, arrays, {})
    for matrix in (whole, whole.rows(0, len(lengths))):
        ended, cut = matrix.tiles
        assert (ended.dtype, cut.dtype) == (np.int64, np.int64)
        assert (ended.tolist(), cut.tolist()) == slow_merge(lengths, tile)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 30), max_size=40), st.sampled_from([1, 2, 8, 16]))
def test_tiles_are_those_of_a_slow_merge_for_small_tiles(lengths, tile):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csr, "_TILE", tile)
        assert_tiles(lengths, tile)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([0, 0, 1, 5, 100, 2045, 2046, 2047, 2048, 2049, 4095, 6000]), max_size=12))
def test_tiles_are_those_of_a_slow_merge(lengths):
    assert_tiles(lengths, TILE)


def test_tiles_are_found_once():
    matrix = CsrMatrix.from_csr(with_lengths([5, 4]), strategy="balanced")

    assert matrix.tiles is matrix.tiles
