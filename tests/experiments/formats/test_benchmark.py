"""Products compared in one run: what is timed and how, what the records say, and the bench command that prints them."""

import contextlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time

import numpy as np
import pytest
import scipy.io
import scipy.sparse

from penstock.commands import app as cli
from penstock.experiments.formats import benchmark as product_benchmark
from penstock.experiments.formats import report as product_report
from penstock.experiments.formats.benchmark import Case, compare_products, default_cases, study_cases
from penstock.experiments.formats.report import BenchRequest, bench_products, disagreements
from penstock.files.registry import NamedMatrix
from penstock.spmv import CPU, CsrMatrix, InputError, format_named, format_names, suggest_format
from penstock.spmv.compilation.table import KERNELS, find_kernel
from penstock.spmv.formats.statistics import MatrixStatistics
from penstock.spmv.model import timing as product_timing
from penstock.spmv.model.timing import cache_nbytes, copies_wanted, time_in_turn

BANDWIDTH = 1e10
PLAIN = {"csr", "coo", "ell", "hyb", "sell", "sliced_ell"}
BLOCKED = {"bsr", "sliced_bsr"}
ROUNDING = 1e-14


def random_matrix(rows=60, columns=60, density=0.1, seed=3):
    generator = np.random.default_rng(seed)
    pattern = scipy.sparse.random_array((rows, columns), density=density, rng=generator, format="csr")
    pattern.data = generator.uniform(0.5, 1.0, pattern.nnz)
    return scipy.sparse.csr_array(pattern)


def blocked_matrix(size, block_rows=12, symmetric=False, seed=5):
    generator = np.random.default_rng(seed)
    pattern = scipy.sparse.eye_array(block_rows) + scipy.sparse.eye_array(block_rows, k=2)
    A = scipy.sparse.csr_array(scipy.sparse.kron(pattern, np.ones((size, size)), format="csr"))
    A.data = generator.uniform(0.5, 1.0, A.nnz)
    return scipy.sparse.csr_array(A + A.T) if symmetric else A


def everything_in(value):
    """Return all that a nested record holds at its leaves."""
    if isinstance(value, dict):
        return list(itertools.chain.from_iterable(map(everything_in, value.values())))
    if isinstance(value, list | tuple):
        return list(itertools.chain.from_iterable(map(everything_in, value)))
    return [value]


@pytest.fixture(autouse=True, scope="module")
def two_copies():
    """Keep small matrices from being copied hundreds of times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(product_benchmark, "copies_wanted", lambda nbytes, device: 2)
        yield


@contextlib.contextmanager
def replaced_kernel(format_name, operation, kernel):
    """Put another kernel into the table for a while."""
    key = (format_name, operation, "cpu")
    original = find_kernel(*key)
    KERNELS.remove(key)
    KERNELS.add(key, kernel)
    try:
        yield
    finally:
        KERNELS.remove(key)
        KERNELS.add(key, original)


@pytest.fixture
def at_once(monkeypatch):
    """Time nothing, where the times do not matter."""

    def pretend(actions, device, *, repeats):
        return {name: [1e-6] * repeats for name in actions}

    monkeypatch.setattr(product_benchmark, "time_in_turn", pretend)


def cases_of(A, block_size=None, **options):
    return default_cases(MatrixStatistics.of(CsrMatrix.from_csr(A)), block_size, **options)


def plain_cases():
    """Return the cases that suit any matrix."""
    return [Case(name) for name in format_names() if name in PLAIN]


def compare(A, cases=None, columns=(1,), **options):
    cases = plain_cases() if cases is None else cases
    return compare_products("matrix", A, cases, columns=columns, bandwidth=BANDWIDTH, repeats=3, **options)


# Which cases there are


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("block_size", [1, 3])
def test_blocked_formats_need_blocks_and_half_a_matrix_symmetry(block_size, symmetric):
    cases = cases_of(blocked_matrix(3, symmetric=symmetric), block_size)

    absent = (BLOCKED if block_size == 1 else set()) | (set() if symmetric else {"symmetric_bsr"})
    assert sorted(case.format_name for case in cases) == sorted(set(format_names()) - absent)
    expected = {name: {"block_size": block_size} for name in {*BLOCKED, "symmetric_bsr"}}
    for case in cases:
        assert case.parameters == expected.get(case.format_name, {})
        assert case.label == case.format_name


def test_half_a_matrix_can_be_left_out():
    cases = cases_of(blocked_matrix(3, symmetric=True), symmetric=False)

    assert {case.format_name for case in cases} == PLAIN | BLOCKED


@pytest.mark.parametrize(("device_kind", "kernels"), [("cpu", set()), ("cuda", {"csr", "ell"})])
def test_the_study_names_every_variant_once_and_all_can_be_made(device_kind, kernels):
    A = CsrMatrix.from_csr(random_matrix(300, 300))
    cases = plain_cases() + study_cases(300, device_kind)

    labels = [case.label for case in cases]
    assert len(set(labels)) == len(labels)
    assert {case.parameters.get("chunk_height", 4) for case in cases} == {4, 8, 16, 32, 64}
    assert {case.format_name for case in cases if case.variant} == {"hyb", "sell"} | kernels  # all else is one on a CPU
    for case in cases:
        assert format_named(case.format_name).from_csr(A, **case.parameters).nnz == A.nnz


def dense(rows, columns):
    return scipy.sparse.csr_array(np.ones((rows, columns)))


def with_removed(size, share):
    A = blocked_matrix(size, block_rows=30).tocoo()
    kept = np.arange(A.nnz) % round(1 / share) != 1
    return scipy.sparse.csr_array((A.data[kept], (A.row[kept], A.col[kept])), shape=A.shape)


@pytest.mark.parametrize(
    ("A", "expected"),
    [
        *((blocked_matrix(size), size) for size in range(2, 9)),
        (blocked_matrix(1), None),
        (dense(16, 16), 8),
        (dense(6, 9), 3),
        (dense(11, 11), None),
        (with_removed(3, 0.04), 3),
        (random_matrix(), None),
        (scipy.sparse.csr_array((12, 12)), None),
    ],
    ids=lambda value: f"{value.shape[0]}x{value.shape[1]}-{value.nnz}" if scipy.sparse.issparse(value) else None,
)
def test_the_block_size_is_the_largest_with_the_fewest_added_zeros(A, expected):
    sizes = {case.format_name: case.parameters["block_size"] for case in cases_of(A) if case.format_name in BLOCKED}

    assert sizes == (dict.fromkeys(BLOCKED, expected) if expected else {})


# Timing


def test_actions_are_timed_in_turn_and_all_their_variants_equally_often():
    log = []
    actions = {name: [lambda entry=(name, number): log.append(entry) for number in range(3)] for name in "abc"}

    samples = time_in_turn(actions, CPU, repeats=4, least=0)

    assert {name: len(values) for name, values in samples.items()} == {"a": 4, "b": 4, "c": 4}
    turns = [name for name, _ in itertools.groupby(name for name, _ in log)]
    assert turns == list("abc") * (len(turns) // 3)
    assert len(turns) // 3 >= 4 + 1  # at least one warm-up
    counts = {entry: log.count(entry) for entry in log}
    assert set(counts) == set(itertools.product("abc", range(3)))
    assert len(set(counts.values())) == 1


def test_samples_are_seconds_of_one_call_and_short_calls_are_repeated_until_the_clock_can_tell():
    calls = dict.fromkeys(("slow", "fast"), 0)

    def wait(name, seconds):
        calls[name] += 1
        time.sleep(seconds)

    actions = {"slow": [lambda: wait("slow", 4e-3)] * 2, "fast": [lambda: wait("fast", 2e-4)]}
    samples = time_in_turn(actions, CPU, repeats=3, least=4e-3)

    assert 4e-3 <= min(samples["slow"]) < 7e-3
    assert 2e-4 <= min(samples["fast"]) < 2e-3
    assert calls["slow"] == 2 * (2 + 3)
    assert calls["fast"] > 3 * 4


def test_copies_exceed_four_caches_unless_there_would_be_too_many(monkeypatch):
    monkeypatch.setattr(product_timing, "cache_nbytes", lambda device: 1000)

    assert [copies_wanted(nbytes, CPU) for nbytes in (1, 100, 3999, 4000, 10**9)] == [256, 40, 2, 1, 1]
    assert copies_wanted(0, CPU) == 256


def test_the_cache_is_that_of_the_machine():
    assert 2**18 <= cache_nbytes(CPU) <= 2**32


@pytest.mark.parametrize("columns", [1, 4])
def test_every_copy_of_matrix_and_vectors_is_read(columns, monkeypatch):
    operation = "spmv" if columns == 1 else "spmm"
    original, timed = find_kernel("csr", operation, "cpu"), product_benchmark.time_in_turn
    seen, seen_while_timed = set(), set()

    def spy(A, x, out, alpha, beta):
        seen.add((A.values.ctypes.data, A.column_indices.ctypes.data, x.ctypes.data))
        original(A, x, out, alpha, beta)

    def timed_alone(*arguments, **options):
        seen.clear()
        samples = timed(*arguments, **options)
        seen_while_timed.update(seen)
        return samples

    monkeypatch.setattr(product_benchmark, "copies_wanted", lambda nbytes, device: 5)
    monkeypatch.setattr(product_benchmark, "time_in_turn", timed_alone)
    with replaced_kernel("csr", operation, spy):
        (record,) = compare(random_matrix(), [Case("csr")], (columns,))

    assert record["copies"] == 5
    assert [len(set(addresses)) for addresses in zip(*seen_while_timed, strict=True)] == [5, 5, 5]


# Records


@pytest.fixture(scope="module")
def symmetric_blocks():
    return blocked_matrix(3, symmetric=True)


@pytest.fixture(scope="module")
def records(symmetric_blocks):
    return compare(symmetric_blocks, cases_of(symmetric_blocks, 3), (1, 4))


def test_every_format_has_a_record_for_each_number_of_vectors_that_json_can_hold(records):
    assert sorted((record["format"], record["columns"]) for record in records) == sorted(
        itertools.product(format_names(), (1, 4))
    )
    assert json.loads(json.dumps(records, allow_nan=False)) == records
    leaves = everything_in(records)
    assert all(math.isfinite(leaf) for leaf in leaves if not isinstance(leaf, str))
    assert len({record["name"] for record in records}) == len(records)
    names = [record["name"] for record in records if record["format"] == "csr"]
    assert names == ["spmv/csr/matrix", "spmm/csr/matrix/k4"]


def test_the_numbers_of_a_record_follow_from_each_other(records, symmetric_blocks):
    A = symmetric_blocks
    lengths = np.diff(A.indptr)
    for record in records:
        seconds, count = record["seconds"], record["columns"]
        assert record["gflops"] * 1e9 * seconds == pytest.approx(2 * A.nnz * count)
        assert len(record["samples"]) == 3
        assert seconds == statistics.median(record["samples"])
        assert record["spread"] == [min(record["samples"]), max(record["samples"])]
        assert record["bytes"] == record["matrix_bytes"] + 8 * count * sum(A.shape)
        assert record["floor_seconds"] == pytest.approx(record["bytes"] / BANDWIDTH)
        assert record["measured_over_predicted"] * record["predicted_seconds"] == pytest.approx(seconds)
        assert record["setup_products"] * seconds == pytest.approx(record["setup_seconds"])
        assert record["setup_seconds"] > 0
        assert (record["seed"], record["copies"]) == (0, 2)
        assert record["matrix"] == {
            "name": "matrix",
            "rows": A.shape[0],
            "columns": A.shape[1],
            "nonzeros": A.nnz,
            "mean_row": pytest.approx(lengths.mean()),
            "longest_row": lengths.max(),
            "variation": pytest.approx(lengths.std() / lengths.mean()),
        }
        assert 0 <= record["error"] < ROUNDING
    assert {record["matrix_bytes"] for record in records if record["format"] == "bsr"} == {
        format_named("bsr").from_csr(A, block_size=3).nbytes
    }


def test_peers_are_timed_in_the_same_run(records):
    for record in records:
        assert set(record["peers"]) - {"mkl_csr"} == {"scipy_csr"}
        assert all(1e-7 < seconds < 1 for seconds in record["peers"].values())
    for count in (1, 4):  # formats of one run share the peers' times
        assert len({json.dumps(record["peers"]) for record in records if record["columns"] == count}) == 1


def test_chunked_formats_say_how_full_their_chunks_are(symmetric_blocks, at_once):
    cases = [Case("csr"), Case("sell"), Case("sliced_ell")]
    for record in compare(symmetric_blocks, cases, (1, 4)):
        assert ("occupancy" in record) == ("alpha" in record) == (record["format"] != "csr" and record["columns"] == 1)
    rows = scipy.sparse.csr_array(np.tril(np.ones((32, 32))))  # one chunk, half of it padding
    (record,) = compare(rows, [Case("sell", {"chunk_height": 32, "sorting_scope": 1})])
    assert record["occupancy"] == pytest.approx(33 / 64)


def test_a_kernel_that_takes_longer_is_seen_to():
    original = find_kernel("coo", "spmv", "cpu")

    def slow(A, x, out, alpha, beta):
        original(A, x, out, alpha, beta)
        time.sleep(2e-2)

    with replaced_kernel("coo", "spmv", slow):
        seconds = {record["format"]: record["seconds"] for record in compare(random_matrix())}

    assert 2e-2 <= seconds.pop("coo") < 0.2
    seconds.pop("hyb")  # part of it is COO
    assert statistics.median(seconds.values()) < 2e-2


@pytest.mark.parametrize("format_name", ["csr", "coo", "ell"])
@pytest.mark.parametrize("columns", [1, 4])
def test_the_error_shows_a_kernel_that_is_wrong_in_one_row(columns, format_name, at_once):
    operation = "spmv" if columns == 1 else "spmm"
    original = find_kernel(format_name, operation, "cpu")

    def wrong(A, x, out, alpha, beta):
        original(A, x, out, alpha, beta)
        out[17] += 1e-6

    with replaced_kernel(format_name, operation, wrong):
        errors = {record["format"]: record["error"] for record in compare(random_matrix(), columns=(columns,))}

    assert 1e-8 < errors.pop(format_name) < 1e-4
    errors.pop("hyb")  # made of ELL and COO
    assert max(errors.values()) < ROUNDING


def test_values_in_less_precision_are_smaller_and_err_more(at_once):
    A = random_matrix()
    (double,), (single,) = (compare(A, [Case("csr")], values_dtype=dtype) for dtype in (None, np.float32))

    assert double["matrix_bytes"] - single["matrix_bytes"] == 4 * A.nnz
    assert double["error"] < ROUNDING < 1e-9 < single["error"] < 1e-6


def test_a_refused_format_is_left_out_and_the_others_are_not(at_once):
    rows = 3000
    A = scipy.sparse.eye_array(rows, format="lil")
    A[7] = np.random.default_rng(0).uniform(0.5, 1, rows)
    A = scipy.sparse.csr_array(A)
    with pytest.raises(InputError, match="ELL would pad"):
        format_named("ell").from_csr(A)

    found = {record["format"] for record in compare(A)}

    assert found == PLAIN - {"ell"}


def test_matrices_that_are_not_square_or_have_empty_rows_are_measured(at_once):
    for A in (random_matrix(70, 20), random_matrix(20, 70), random_matrix(90, 90, density=0.005), dense(1, 1)):
        found = compare(A, columns=(1, 3))
        assert len(found) == 2 * len(PLAIN)
        assert max(record["error"] for record in found) < ROUNDING


def test_cases_follow_from_the_matrix(monkeypatch, at_once, tmp_path):
    monkeypatch.setattr(product_report, "measure_memory", lambda device, nbytes: BANDWIDTH)
    for number, (A, block_size, expected) in enumerate(
        [
            (random_matrix(), None, PLAIN),
            (random_matrix(70, 20), None, PLAIN),
            (blocked_matrix(3), None, PLAIN | BLOCKED),
            (blocked_matrix(1, symmetric=True), None, PLAIN | {"symmetric_bsr"}),
            (blocked_matrix(4, symmetric=True), 2, PLAIN | BLOCKED | {"symmetric_bsr"}),  # a known size is used
        ]
    ):
        named = NamedMatrix("A", A, "A", block_size)
        folder, ended = bench_products([named], tmp_path / str(number), BenchRequest(repeats=1))
        assert ended
        result = folder.read()
        found = {record["format"]: record for record in result["records"]}
        assert set(found) & (PLAIN | BLOCKED | {"symmetric_bsr"}) == expected
        assert result["limits"]["read_GBps"] == BANDWIDTH / 1e9
        if "bsr" in found:
            assert found["sliced_bsr"]["parameters"]["block_size"] == (block_size or 3)


def measured(name, seconds, ranked, columns=1, variant=""):
    record = {"matrix": {"name": "A"}, "columns": columns, "format": name, "variant": variant, "seconds": seconds}
    return record | ({} if ranked is None else {"ranked_seconds": ranked})


def test_it_is_told_where_the_model_puts_a_slower_format_first(monkeypatch, at_once, tmp_path):
    first = [measured("csr", 2.0, 1.0), measured("ell", 1.6, 3.0), measured("coo", 0.1, 0.1, variant="sorted")]
    with_columns = [measured("csr", 1.05, 1.0, columns=8), measured("ell", 1.0, 3.0, columns=8)]
    assert disagreements([measured("csr", 2.0, None), measured("ell", 1.0, None)]) == []
    [told] = disagreements(first + with_columns)
    assert told.startswith(
        "A: ell was fastest here; csr, which the roofline model puts first, took 1.25 times as long."
    )

    monkeypatch.setattr(product_report, "measure_memory", lambda device, nbytes: BANDWIDTH)
    A = random_matrix()
    records = bench_products([NamedMatrix("A", A, "A")], tmp_path, BenchRequest(repeats=1))[0].read()["records"]
    best = min((record for record in records if not record["variant"]), key=lambda record: record["ranked_seconds"])
    assert best["format"] == suggest_format(A, device="cpu")[0].format_name


def test_a_second_run_in_the_same_folder_measures_only_what_is_missing(monkeypatch, at_once, tmp_path):
    monkeypatch.setattr(product_report, "measure_memory", lambda device, nbytes: BANDWIDTH)
    first, second = (NamedMatrix(name, random_matrix(seed=seed), name) for name, seed in (("a", 1), ("b", 2)))
    folder, _ = bench_products([first], tmp_path, BenchRequest(repeats=1))
    before = folder.read()["records"]

    bench_products([first, second], tmp_path, BenchRequest(repeats=1))

    records = folder.read()["records"]
    assert records[: len(before)] == before
    assert {record["matrix"]["name"] for record in records[len(before) :]} == {"b"}
    other = {**folder.read(), "device": "cuda:0"}
    folder.records.write_text(json.dumps(other))
    with pytest.raises(InputError, match="holds records of cuda:0"):
        bench_products([first], tmp_path)


def test_the_error_of_a_block_shows_a_small_row_that_is_wrong(at_once):
    A = random_matrix().tolil()
    A[17] *= 1e-8
    original = find_kernel("ell", "spmm", "cpu")

    def wrong(A, x, out, alpha, beta):
        original(A, x, out, alpha, beta)
        out[17] = 0

    with replaced_kernel("ell", "spmm", wrong):
        (record,) = compare(scipy.sparse.csr_array(A), [Case("ell")], (4,))
    assert record["error"] > 1e-3


def test_cases_of_one_label_are_told_apart_or_refused():
    cases = [Case("sell", {"chunk_height": height, "sorting_scope": 1}) for height in (4, 32)]
    try:
        first, second = compare(random_matrix(300, 300), cases)
    except InputError:
        return
    assert first["samples"] != second["samples"]


# The command


@pytest.fixture(scope="module")
def benched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    scipy.io.mmwrite(folder / "tridiagonal.mtx", blocked_matrix(1, block_rows=40, symmetric=True))
    scipy.sparse.save_npz(folder / "wide.npz", random_matrix(20, 50))
    command = [sys.executable, "-m", "penstock", "bench", "tridiagonal.mtx", "wide.npz", "--columns", "1,4"]
    one_thread = {**os.environ, "NUMBA_NUM_THREADS": "1"}
    ran = subprocess.run(
        [*command, "--repeats", "2"], cwd=folder, capture_output=True, text=True, timeout=120, env=one_thread
    )
    assert ran.returncode == 0, ran.stderr
    return folder, ran


def refuse_constant(word):
    raise AssertionError(f"{word} is no JSON")


def test_the_command_leaves_records_and_figures_where_it_says(benched):
    folder, ran = benched
    results = folder / "bench-results"
    written = json.loads((results / "bench.json").read_text(), parse_constant=refuse_constant)

    assert (written["device"], written["limits"]["read_GBps"] > 0.1) == ("cpu", True)
    assert written["machine"]
    expected = {("tridiagonal", name, count) for name in PLAIN | {"symmetric_bsr"} for count in (1, 4)}
    expected |= {("wide", name, count) for name in PLAIN for count in (1, 4)}
    records = written["records"]
    assert len(records) == len(expected)
    assert {(record["matrix"]["name"], record["format"], record["columns"]) for record in records} == expected
    assert all(len(record["samples"]) == 2 for record in records)
    figures = {path.stem for path in results.glob("*.png") if path.read_bytes()[:4] == b"\x89PNG"}
    assert {"gflops_by_nonzeros", "fraction_of_roofline", "setup_cost", "row_length_band"} <= figures
    assert f"Records and {len(figures)} figures are in bench-results" in ran.stdout


def test_the_table_names_matrices_formats_and_the_peer_the_fastest_first(benched):
    _, ran = benched
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in ran.stdout.splitlines() if "│" in line]

    assert {row[0] for row in rows} == {"tridiagonal", "wide"}
    for name, count in itertools.product(("tridiagonal", "wide"), ("1", "4")):
        group = [row for row in rows if row[:2] == [name, count]]
        assert {row[2] for row in group} >= PLAIN
        formats = [row for row in group if row[-1]]
        assert [row[2] for row in group if not row[-1] and row[2] != "mkl_csr"] == ["scipy_csr"]
        times = [float(row[3]) for row in formats]
        assert times == sorted(times)
    assert "memory bandwidth" in ran.stdout


def test_a_second_run_overwrites_nothing(benched, monkeypatch, capsys):
    folder, _ = benched
    before = (folder / "bench-results" / "bench.json").read_bytes()
    monkeypatch.chdir(folder)

    assert bench(monkeypatch, "wide.npz", "--repeats", "1") == 0
    assert "bench-results-2" in capsys.readouterr().out
    assert (folder / "bench-results" / "bench.json").read_bytes() == before
    assert (folder / "bench-results-2" / "bench.json").exists()


def bench(monkeypatch, *arguments):
    """Run the command in this process and return its exit status; any other exception is one that a user would see."""
    monkeypatch.setattr(product_report, "measure_memory", lambda device, nbytes: BANDWIDTH)
    monkeypatch.setattr(sys, "argv", ["penstock", "bench", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code or 0


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scipy.sparse.save_npz("good.npz", random_matrix())
    scipy.sparse.save_npz("complex.npz", scipy.sparse.csr_array(np.eye(3) * 1j))
    scipy.sparse.save_npz("nan.npz", scipy.sparse.csr_array(np.eye(3) * np.nan))
    (tmp_path / "damaged.mtx").write_text("%%MatrixMarket matrix coordinate real general\n2 2 2\n1 1 1.0\n")
    (tmp_path / "matrix.txt").write_text("1 2 3")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["nothing.mtx"], "nothing.mtx does not exist"),
        (["good.npz", "nothing.mtx"], "nothing.mtx does not exist"),
        (["complex.npz"], "only real numbers"),
        (["nan.npz"], "nan.npz holds nan"),
        (["damaged.mtx"], "damaged.mtx"),
        (["matrix.txt"], "expected one of: matrix in HDF5"),
        (["good.npz", "--columns", "0"], "whole numbers such as 1,8,32, not '0'"),
        (["good.npz", "--columns", "1,,8"], "not '1,,8'"),
        (["good.npz", "--columns=-1"], "not '-1'"),
        (["good.npz", "--columns", "2.5"], "not '2.5'"),
        (["good.npz", "--columns", ""], "not ''"),
        (["good.npz", "--repeats", "0"], "greater than or equal to 1"),
        (["good.npz", "--device", "gpu"], "unknown device 'gpu'"),
        (["nothing.mtx", "--device", "gpu"], "unknown device 'gpu'"),
        ([], "Missing argument"),
        pytest.param(
            ["good.npz", "--columns", "\u00b2"],
            "whole numbers",
        ),
    ],
)
def test_a_mistake_ends_in_one_message_before_anything_is_measured(arguments, advice, folder, monkeypatch, capsys):
    def measured(*arguments, **options):
        raise AssertionError("measured first")

    monkeypatch.setattr(product_report, "compare_products", measured)

    assert bench(monkeypatch, *arguments) == 2
    assert advice in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert not (folder / "bench-results").exists()


def test_spaces_between_numbers_of_vectors_are_taken(folder, monkeypatch):
    assert bench(monkeypatch, "good.npz", "--columns", "1, 3", "--repeats", "1", "--output", "deep/results") == 0
    written = json.loads((folder / "deep" / "results" / "bench.json").read_text())
    assert {record["columns"] for record in written["records"]} == {1, 3}


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(folder, monkeypatch):
    measured = []
    monkeypatch.setattr(product_report, "compare_products", lambda *arguments, **options: measured.append(1) or [])

    assert bench(monkeypatch, "good.npz", "--output", "matrix.txt") == 2
    assert not measured


@pytest.fixture
def interrupted(folder, monkeypatch, capsys):
    """Interrupt the second of two matrices."""

    def compare_or_stop(name, *arguments, **options):
        if name == "second":
            raise KeyboardInterrupt
        return compare_products(name, *arguments, **options)

    scipy.sparse.save_npz("second.npz", random_matrix())
    monkeypatch.setattr(product_report, "compare_products", compare_or_stop)
    code = bench(monkeypatch, "good.npz", "second.npz", "--repeats", "1", "--output", "results")
    return folder / "results", code, capsys.readouterr()


def test_an_interrupt_has_the_usual_exit_status_and_no_traceback(interrupted):
    _, code, printed = interrupted
    assert code == 130
    assert "interrupted" in printed.err
    assert "Traceback" not in printed.out + printed.err


def test_an_interrupt_keeps_the_records_so_far(interrupted):
    results, _, _ = interrupted
    written = json.loads((results / "bench.json").read_text())
    assert {record["matrix"]["name"] for record in written["records"]} == {"good"}


@pytest.mark.parametrize("shape", [(0, 0), (5, 5)])
def test_a_matrix_without_entries_is_measured_or_refused_with_a_message(shape, folder, monkeypatch):
    scipy.sparse.save_npz("empty.npz", scipy.sparse.csr_array(shape))
    assert bench(monkeypatch, "empty.npz", "--repeats", "1") in (0, 2)


def test_stored_zeros_leave_valid_json(folder, monkeypatch):
    zeros = scipy.sparse.csr_array((np.zeros(9), np.arange(9), np.arange(10)), shape=(9, 9))
    scipy.sparse.save_npz("zeros.npz", zeros)
    assert bench(monkeypatch, "zeros.npz", "--columns", "1,3", "--repeats", "1", "--output", "results") == 0
    json.loads((folder / "results" / "bench.json").read_text(), parse_constant=refuse_constant)
