"""Triangular solves are those of dense matrices, in every order and schedule, on every kind of device."""

import numpy as np
import pytest
import scipy.sparse
from kernel_targets import TARGETS, gpu_count

from penstock.solvers import TriangularSolve
from penstock.solvers.triangular import dataflow_schedule, triangular_solve
from penstock.solvers.triangular.block_entries import block_entries
from penstock.solvers.triangular.level_schedule import LevelLaunches, LevelSchedule
from penstock.solvers.triangular.levels import count_waits, find_levels
from penstock.solvers.triangular.schedules import SCHEDULES, make_schedule
from penstock.solvers.triangular.triangular_solve import triangle
from penstock.spmv import BsrMatrix, CsrMatrix, InputError
from penstock.spmv.compilation import cuda_module

EPS = np.finfo(np.float64).eps
GPU_TARGETS = [target for target in TARGETS if target.id != "cpu"]
WAYS = [
    ("natural", "dataflow"),
    ("levels", "dataflow"),
    ("levels", "levels"),
    ("natural", "columns"),
    ("levels", "columns"),
]


def random_blocks(pattern, size, seed):
    """A block matrix with the pattern of a dense matrix of booleans; its diagonal blocks dominate."""
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(pattern.sum(axis=1))])
    rows, columns = np.nonzero(pattern)
    blocks = rng.uniform(-1, 1, (len(rows), size, size))
    blocks[rows == columns] += 4 * np.eye(size) * (1 + rng.random((np.count_nonzero(rows == columns), 1, 1)))
    n = len(pattern) * size
    if size == 1:
        return scipy.sparse.csr_array((blocks.reshape(-1), columns, offsets), shape=(n, n))
    return scipy.sparse.bsr_array((blocks, columns, offsets), shape=(n, n))


def patterns():
    """Lower triangles by name, as dense matrices of booleans."""
    rng = np.random.default_rng(5)
    found = {"none": np.zeros((0, 0), dtype=bool)}
    for n in (1, 31, 32, 33, 97):
        found[f"random-{n}"] = np.tril(rng.random((n, n)) < 4 / n) | np.eye(n, dtype=bool)
    found["diagonal"] = np.eye(40, dtype=bool)
    found["chain"] = np.eye(70, dtype=bool) | np.eye(70, k=-1, dtype=bool)
    full_row, full_column = np.eye(90, dtype=bool), np.eye(90, dtype=bool)
    full_row[-1], full_column[:, 0] = True, True
    dense = np.tril(np.ones((45, 45), dtype=bool))
    return found | {"full-row": full_row, "full-column": full_column, "dense": dense}


def solved_on(target, matrix, b, order, schedule, *, upper=False, alpha=1.0, beta=0.0, out=None, unit_diagonal=False):
    """A solve by the kernels of a target, as a host array."""
    kind = target.device_kind
    with target.running():
        entries = block_entries(target.put_matrix(matrix))
        _, _, rows = triangle(entries, upper, order, unit_diagonal=unit_diagonal, kind=kind)
        out = target.put(np.full_like(b, np.nan) if out is None else out.copy())
        chosen = make_schedule(rows, "auto", kind) if kind == "cpu" else SCHEDULES[schedule](rows)
        chosen.solve(target.put(b), out, alpha, beta, 1.0, False)
        return target.get(out)


def assert_solves(found, dense, b, size=1):
    """Componentwise, as for every order of the sums (Higham 2002, section 8.1); blocks are multiplied by inverses."""
    dense, b = dense.astype(np.float64), b.astype(np.float64)
    expected = np.linalg.solve(dense, b) if len(dense) else b
    inverse = abs(np.linalg.inv(dense)) if len(dense) else dense
    bound = 8 * size**2 * (len(dense) + 2) * EPS * inverse @ (abs(dense) @ abs(expected))
    assert (abs(found - expected) <= bound).all()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("order", "schedule"), WAYS)
@pytest.mark.parametrize("name", patterns())
def test_solves_are_those_of_dense_matrices(target, order, schedule, name):
    L = random_blocks(patterns()[name], 1, seed=1)
    b = np.random.default_rng(2).normal(size=L.shape[0])

    for matrix, upper in ((L, False), (L.T.tocsr(), True)):
        found = solved_on(target, CsrMatrix.from_csr(matrix), b, order, schedule, upper=upper)
        assert_solves(found, matrix.toarray(), b)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("order", "schedule"), WAYS[:3])
@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("name", ["random-33", "chain", "dense"])
def test_blocks_are_inverted_whole(target, order, schedule, size, name):
    L = random_blocks(patterns()[name], size, seed=3)
    b = np.random.default_rng(4).normal(size=L.shape[0])

    found = solved_on(target, BsrMatrix.from_bsr(L), b, order, schedule)

    assert_solves(found, L.toarray(), b, size)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("order", "schedule"), WAYS[:3])
@pytest.mark.parametrize(("size", "columns"), [(1, 2), (1, 5), (3, 8), (2, 32)])
def test_blocks_of_vectors_are_solved_column_by_column(target, order, schedule, size, columns):
    L = random_blocks(patterns()["random-33"], size, seed=5)
    matrix = CsrMatrix.from_csr(L) if size == 1 else BsrMatrix.from_bsr(L)
    b = np.random.default_rng(6).normal(size=(L.shape[0], columns))

    found = solved_on(target, matrix, b, order, schedule)

    assert_solves(found, L.toarray(), b, size)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("order", "schedule"), WAYS)
def test_alpha_and_beta(target, order, schedule):
    L = random_blocks(patterns()["random-97"], 1, seed=7)
    b, before = np.random.default_rng(8).normal(size=(2, L.shape[0]))
    expected = 0.5 * np.linalg.solve(L.toarray(), b) - 2.0 * before

    found = solved_on(target, CsrMatrix.from_csr(L), b, order, schedule, alpha=0.5, beta=-2.0, out=before)

    assert np.allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("order", "schedule"), WAYS)
def test_values_of_float32(target, order, schedule):
    """The stored values are rounded; vectors and sums are those of the type of the operator."""
    L = random_blocks(patterns()["random-97"], 1, seed=9)
    for dtype in (np.float64, np.float32):
        matrix = CsrMatrix.from_csr(L.astype(dtype), values_dtype=np.float32)
        b = np.random.default_rng(10).normal(size=L.shape[0]).astype(dtype)

        found = solved_on(target, matrix, b, order, schedule)

        expected = np.linalg.solve(L.astype(np.float32).toarray().astype(np.float64), b.astype(np.float64))
        assert found.dtype == dtype
        assert np.allclose(found, expected, rtol=0, atol=1e-13 if dtype == np.float64 else 1e-6)


@pytest.mark.parametrize("target", TARGETS)
def test_a_unit_diagonal_is_not_read(target):
    L = random_blocks(patterns()["random-97"], 1, seed=11)
    ones = scipy.sparse.tril(L, -1) * 0.1 + scipy.sparse.eye_array(L.shape[0])
    strict = (scipy.sparse.tril(L, -1) * 0.1).tocsr()
    b = np.random.default_rng(12).normal(size=L.shape[0])

    for given in (strict, (strict + 7 * scipy.sparse.eye_array(L.shape[0])).tocsr()):
        found = solved_on(target, CsrMatrix.from_csr(given), b, "levels", "dataflow", unit_diagonal=True)
        assert_solves(found, ones.toarray(), b)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("order", "schedule"), WAYS[:3])
def test_a_nan_spoils_what_depends_on_it_and_ends_no_solve(target, order, schedule):
    L = random_blocks(patterns()["chain"], 1, seed=13)
    for nan in (
        np.nan,
        np.array([-1], dtype=np.int64).view(np.float64)[0],
    ):  # the second looks like a word not yet there
        b = np.ones(L.shape[0])
        b[30] = nan

        found = solved_on(target, CsrMatrix.from_csr(L), b, order, schedule)

        assert np.isfinite(found[:30]).all()
        assert np.isnan(found[30:]).all()


@pytest.mark.parametrize("target", [target for target in GPU_TARGETS if target.id != "gpu"])
@pytest.mark.parametrize(("order", "schedule"), WAYS[:3])
def test_no_bit_depends_on_the_order_in_which_threads_run(target, order, schedule, monkeypatch):
    L = random_blocks(patterns()["random-97"], 3, seed=15)
    b = np.random.default_rng(16).normal(size=L.shape[0])
    found = []
    for seed in (0, 1, 2, 3):
        with target.running():
            compiled = cuda_module.compile_function

            def seeded(source, name, compiled=compiled, seed=seed):
                function = compiled(source, name)
                return lambda grid, block, arguments: function(grid, block, arguments, seed=seed)

            with monkeypatch.context() as patch:
                patch.setattr(cuda_module, "compile_function", seeded)
                _, _, rows = triangle(block_entries(BsrMatrix.from_bsr(L)), False, order, kind="cuda")
                out = np.empty_like(b)
                SCHEDULES[schedule](rows).solve(b, out, 1.0, 0.0, 1.0, False)
                found.append(out)
    assert all(np.array_equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("target", GPU_TARGETS)
def test_lanes_that_wait_in_vain_give_up(target, monkeypatch):
    """Rows that wait for themselves: what nobody computes is NaN, and the launch ends."""
    monkeypatch.setattr(dataflow_schedule, "POLLS", 2000)
    L = CsrMatrix.from_csr(random_blocks(patterns()["random-97"], 1, seed=17))
    with target.running():
        _, _, rows = triangle(block_entries(target.put_matrix(L)), False, "natural", kind="cuda")
        places = target.get(rows.places).copy()
        last = int(target.get(rows.offsets)[-2])
        places[last:] = 96
        rows.places[...] = target.put(places)
        out = target.put(np.zeros(97))
        SCHEDULES["dataflow"](rows).solve(target.put(np.ones(97)), out, 1.0, 0.0, 1.0, False)
        found = target.get(out)
    assert len(places) > last
    assert np.isnan(found[96])
    assert np.isfinite(found[:96]).all()


def test_levels_are_the_longest_chains():
    pattern = patterns()["random-97"]
    depth = np.zeros(97, dtype=int)
    for row in range(97):
        needed = np.flatnonzero(pattern[row, :row])
        depth[row] = depth[needed].max(initial=-1) + 1

    solve = TriangularSolve(random_blocks(pattern, 1, seed=1), order="levels")

    assert solve.levels == depth.max() + 1
    assert np.array_equal(solve.rows.rows, np.argsort(depth, kind="stable"))
    assert np.array_equal(np.diff(solve.rows.levels), np.bincount(depth))


@pytest.mark.parametrize("target", GPU_TARGETS)
@pytest.mark.parametrize("name", ["random-97", "chain", "full-row", "full-column", "dense"])
def test_a_gpu_finds_the_same_levels(target, name):
    pattern = patterns()[name]
    expected = TriangularSolve(random_blocks(pattern, 1, seed=1), order="levels").rows
    with target.running():
        entries = block_entries(target.put_matrix(CsrMatrix.from_csr(random_blocks(pattern, 1, seed=1))))
        _, _, rows = triangle(entries, False, "levels", kind="cuda")
    for own, other in ((rows.rows, expected.rows), (rows.offsets, expected.offsets), (rows.places, expected.places)):
        assert np.array_equal(target.get(own), other)
    assert np.array_equal(rows.levels, expected.levels)


def test_narrow_levels_that_follow_each_other_are_one_launch():
    pattern = np.eye(3000, dtype=bool)
    pattern[2500:, 0] = True
    pattern[2999, 2998] = pattern[2998, 2997] = True

    rows = TriangularSolve(random_blocks(pattern, 1, seed=1), order="levels").rows
    launches = LevelLaunches(rows)

    assert np.diff(rows.levels).tolist() == [2500, 498, 1, 1]
    assert launches.steps(1) == [(0, 1), (1, 4)]
    assert launches.steps(8) == [(0, 1), (1, 2), (2, 4)]
    assert LevelLaunches(rows, descending=True).steps(8) == [(2, 4), (1, 2), (0, 1)]
    assert LevelSchedule(rows).capturable


@pytest.mark.parametrize(
    ("pattern", "order"),
    [
        (np.eye(640, dtype=bool) | np.eye(640, k=-320, dtype=bool), "natural"),  # rows wait for rows that are far
        (np.eye(640, dtype=bool) | np.eye(640, k=-1, dtype=bool), "natural"),  # one chain
        (np.kron(np.eye(160, dtype=bool), np.tril(np.ones((4, 4), dtype=bool))), "levels"),
    ],
)
def test_auto_orders_by_levels_where_neighbours_wait_and_levels_are_wide(pattern, order, monkeypatch):
    entries = block_entries(CsrMatrix.from_csr(random_blocks(pattern, 1, seed=1)))
    waits = count_waits(entries, None, False, "cpu")
    monkeypatch.setattr(triangular_solve, "find_levels", lambda *given: find_levels(*given[:-1], "cpu"))

    assert triangular_solve.choose_order(entries, False, waits, "auto", "cuda")[0] == order


def test_values_are_replaced_without_another_analysis():
    L, other = (random_blocks(patterns()["random-97"], 1, seed=seed) for seed in (18, 19))
    b = np.random.default_rng(20).normal(size=97)
    for order in ("natural", "levels"):
        solve = TriangularSolve(L, order=order).with_values(other)
        assert_solves(solve @ b, other.toarray(), b)
    with pytest.raises(InputError, match="another pattern"):
        TriangularSolve(L).with_values(random_blocks(patterns()["dense"], 1, seed=1))
    with pytest.raises(InputError, match="another pattern"):
        TriangularSolve(L).with_values(L.T.tocsr())  # of as many entries


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_blocks_of_any_size_and_their_unit_diagonal(size):
    """Sizes without kernels are solved by single entries, and so is a unit triangle."""
    n = 4 * size
    ones = np.tril(np.random.default_rng(24).uniform(-1, 1, (n, n)), -1) + np.eye(n)
    blocks = scipy.sparse.bsr_array(scipy.sparse.csr_array(ones), blocksize=(size, size))
    b = np.random.default_rng(25).normal(size=n)

    for unit_diagonal in (False, True):
        assert np.allclose(TriangularSolve(blocks, unit_diagonal=unit_diagonal) @ b, np.linalg.solve(ones, b))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("row", "column", "value", "message"),
    [
        (
            3,
            7,
            1.0,
            "row 3 has an entry right of the diagonal, so the matrix is not lower triangular; pass lower=False",
        ),
        (5, 5, None, "row 5 has no diagonal entry, .*unit_diagonal=True"),
        (6, 6, 0.0, "the diagonal entry at row 6 is singular"),
        (4, 2, np.nan, "row 4 of the matrix holds a value that is not finite"),
    ],
)
def test_bad_input_is_refused_by_its_row(target, row, column, value, message):
    rows, columns = (
        np.concatenate(pair) for pair in ((np.arange(10), np.arange(1, 10)), (np.arange(10), np.arange(9)))
    )
    kept = (rows != row) | (columns != column)
    rows, columns, values = rows[kept], columns[kept], np.ones(np.count_nonzero(kept))
    if value is not None:
        rows, columns, values = np.append(rows, row), np.append(columns, column), np.append(values, value)
    A = scipy.sparse.csr_array((values, (rows, columns)), shape=(10, 10))
    A.sort_indices()
    matrix = CsrMatrix.from_csr(A, check=False)
    with target.running(), pytest.raises(InputError, match=message):
        triangle(block_entries(target.put_matrix(matrix)), False, "auto", kind=target.device_kind)


def test_a_mirrored_triangle_is_told_the_right_side():
    with pytest.raises(
        InputError, match="left of the diagonal, so the matrix is not upper triangular; pass lower=True"
    ):
        TriangularSolve(scipy.sparse.csr_array(np.array([[1.0, 0.0], [2.0, 3.0]])), lower=False)


def test_other_refusals():
    square = scipy.sparse.eye_array(4, format="csr")
    with pytest.raises(InputError, match="order must be"):
        TriangularSolve(square, order="random")
    with pytest.raises(InputError, match="square"):
        TriangularSolve(scipy.sparse.csr_array(np.ones((2, 3))))
    with pytest.raises(InputError, match="held in memory"):
        TriangularSolve(np.eye(3))
    with pytest.raises(InputError, match="schedule"):
        TriangularSolve(square, schedule="sideways")
    with pytest.raises(InputError, match="not blocks"):
        SCHEDULES["columns"](TriangularSolve(random_blocks(patterns()["chain"], 2, seed=1)).rows)
    with pytest.raises(InputError, match="order of their levels"):
        SCHEDULES["levels"](TriangularSolve(square, order="natural").rows)


def test_it_is_an_operator():
    L = random_blocks(patterns()["random-97"], 3, seed=21)
    solve = TriangularSolve(L)
    b = np.random.default_rng(22).normal(size=(L.shape[0], 2))

    assert solve.shape == L.shape
    assert np.array_equal(solve @ b[:, 0].copy(), (solve @ b)[:, 0])
    with pytest.raises(InputError, match="overlap"):
        solve.apply(b, out=b)


@pytest.mark.gpu
@pytest.mark.skipif(gpu_count() == 0, reason="no CUDA device")
def test_two_hundred_solves_beside_other_work_are_equal_in_every_bit():
    import cupy

    from penstock.spmv import Device

    rng = np.random.default_rng(23)
    n = 40**3
    rows = np.repeat(np.arange(n), 4)
    columns = np.maximum(rows - np.tile([0, 1, 40, 1600], n), 0)
    A = scipy.sparse.csr_array((rng.uniform(0.1, 1.0, 4 * n), (rows, columns)), shape=(n, n))
    A.sum_duplicates()
    A = (A + 8 * scipy.sparse.eye_array(n)).tocsr()
    device = Device("cuda")
    matrix, b = CsrMatrix.from_csr(A).to_device(device), cupy.asarray(rng.normal(size=n))
    load, stream = cupy.ones((4096, 4096)), cupy.cuda.Stream(non_blocking=True)
    for order in ("natural", "levels"):
        solve = TriangularSolve(matrix, order=order, schedule="dataflow")
        first = solve @ b
        for _ in range(200):
            with stream:
                load @ load
            assert bool((solve @ b == first).all())
    stream.synchronize()
