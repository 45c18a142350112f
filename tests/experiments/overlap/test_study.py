"""The communication-hiding study on the CPU: its files, its arithmetic, its check of every product, and going on."""

import csv
import itertools
import json
import math
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import yaml
from kernel_targets import gpu_count
from typer.testing import CliRunner

from penstock.commands.app import app, main
from penstock.driver import progress
from penstock.driver.progress import Reporter, Stage
from penstock.experiments.overlap import measurement as overlap_measurement
from penstock.experiments.overlap import report as overlap_report
from penstock.experiments.overlap.configuration import OverlapStudy
from penstock.experiments.overlap.measurement import CaseMeasurement
from penstock.experiments.overlap.report import OverlapFolder, run_overlap_study
from penstock.experiments.overlap.study import study_points
from penstock.spmv import BudgetError, InputError, PenstockError
from penstock.streaming import LinkRates, StreamedMatrix

RATES = LinkRates(link=1e9, memory=2e10)
STUDIES = {
    "paper": {
        "cases": [{"dof": 1, "nodes": 6}, {"dof": 3, "nodes": [6, 5, 7]}],
        "subdivisions": [2, 5],
        "repeats": 3,
        "samples": 2,
    },
    "engine": {
        "protocol": "engine",
        "cases": [{"dof": 3, "nodes": 6}],
        "subdivisions": [2, 4],
        "repeats": [1, 3],
        "columns": [1, 2],
        "format": "symmetric_bsr",
        "samples": 2,
    },
}
TINY = {"cases": [{"dof": 3, "nodes": 6}], "subdivisions": [2, 3], "repeats": 2, "samples": 1}


def study(**changes):
    return OverlapStudy.model_validate({**TINY, **changes})


@pytest.fixture(autouse=True)
def known_rates(monkeypatch):
    """Measuring takes longer than these studies; the command's own test measures."""
    monkeypatch.setattr(overlap_report, "machine_rates", lambda *arguments, **keywords: RATES)


@pytest.fixture(scope="module", params=STUDIES)
def done(request, tmp_path_factory):
    """A study, and the folder it left."""
    described = OverlapStudy.model_validate(STUDIES[request.param])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap_report, "machine_rates", lambda *arguments, **keywords: RATES)
        folder, ended = run_overlap_study(described, tmp_path_factory.mktemp(request.param) / "study")
        assert ended
        return described, folder


def measured(described, tmp_path):
    """Return the records of a study's first case."""
    records = []
    case = described.cases[0]
    points = [point for point in study_points(described) if point.case == case]
    measurement = CaseMeasurement(described, case, RATES, tmp_path, Stage())
    for point in points:
        new, _ = measurement.measure(point)
        records += new
    assert list(tmp_path.iterdir()) == []  # matrices are removed
    return records


def test_a_study_leaves_records_figures_timelines_and_a_table(done):
    described, folder = done
    groups = [
        f"{case.name}-r{repeats}" + (f"-k{columns}" if columns > 1 else "")
        for case, repeats, columns in itertools.product(described.cases, described.repeats, described.columns)
    ]
    points = [
        point.name("").removeprefix("overlap/").replace("//", "-").replace("/", "-")
        for point in study_points(described)
    ]

    assert {path.name for path in folder.path.iterdir()} == {
        "configuration.yaml", "overlap.json", "overlap.csv", "gains.md", "timelines",
        *(f"{group}.png" for group in groups), *(f"{group}-timeline.png" for group in groups),
    }  # fmt: skip
    ends = (".json", "-on.trace.json", "-off.trace.json")
    assert {path.name for path in folder.timelines.iterdir()} == {point + end for point in points for end in ends}
    rows = [line for line in folder.gains.read_text().splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(groups)
    trace = json.loads((folder.timelines / f"{points[0]}-on.trace.json").read_text())
    computed = [event for event in trace["traceEvents"] if event["name"].startswith("compute")]
    assert [event["args"]["subdivision"] for event in computed] == list(range(described.subdivisions[0]))


def test_every_point_has_two_records_under_names_that_stay(done):
    described, folder = done

    result = folder.read()

    expected = [point.name(kind) for point in study_points(described) for kind in ("off", "on")]
    assert [record["name"] for record in result["records"]] == expected
    assert result["limits"] == {"read_GBps": 20.0, "link_GBps": 1.0}
    with open(folder.table, newline="") as file:
        table = list(csv.DictReader(file))
    assert [set(row.values()) & {""} for row in table] == [set()] * len(expected)  # no column without a value
    assert [float(row["seconds"]) for row in table] == [record["seconds"] for record in result["records"]]


def test_every_product_is_checked_and_right(done):
    for record in done[1].read()["records"]:
        assert record["products_checked"] == record["repeats"] * record["columns"]
        assert 0 <= record["worst_error"] < 1


def test_rates_gains_and_floors_follow_from_the_seconds(done):
    described, folder = done
    nnz = {case.name: described.cantilever(case).nnz for case in described.cases}
    for off, on in zip(*[iter(folder.read()["records"])] * 2, strict=True):
        transfer, compute = on["transfer_seconds"], on["compute_seconds"]
        assert off["floor_seconds"] == transfer + compute
        assert on["floor_seconds"] == max(transfer, compute)
        assert {off["compute_alone"], on["compute_alone"]} == {"resident"}
        for record, other in ((off, on), (on, off)):
            # Of the whole matrix, whatever the format stores of it.
            flops = 2 * nnz[record["matrix"]] * record["repeats"] * record["columns"]
            for key, seconds in (("", record["seconds"]), ("transfer_", transfer), ("compute_", compute)):
                assert record[f"{key}gflops"] == pytest.approx(flops / seconds / 1e9)
            assert record["gain"] == pytest.approx(off["seconds"] / on["seconds"] - 1)
            saved = (transfer + compute - on["seconds"]) / min(transfer, compute)
            assert record["hidden"] == pytest.approx(min(max(saved, 0), 1))
            assert record["times_floor"] == pytest.approx(record["seconds"] / record["floor_seconds"])
            assert record["peers"] == {f"overlap_{other['overlap']}": other["seconds"]}
            assert record["spread"][0] <= record["seconds"] <= record["spread"][1]
            assert record["link_fraction"] == pytest.approx(record["bytes"] / record["seconds"] / RATES.link)
            read = record["repeats"] * record["matrix_bytes"] / record["seconds"]
            assert record["memory_fraction"] == pytest.approx(read / RATES.memory)
            assert record["serial_gflops"] > 0
        assert on["predicted_seconds"] < off["predicted_seconds"]


def test_the_paper_moves_values_only_and_the_engine_whole_slabs(done):
    described, folder = done
    for record in folder.read()["records"]:
        if described.protocol == "paper":
            assert 8 * record["nnz"] <= record["bytes"] < record["matrix_bytes"]
        else:
            assert record["bytes"] == record["matrix_bytes"]


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "symmetric_bsr", "cases": [{"dof": 1, "nodes": 12}]},
        {"format": "sliced_bsr", "values": "float32", "cases": [{"dof": 3, "nodes": 12}]},
    ],
    ids=["half of a symmetric matrix", "sliced_bsr in single precision"],
)
def test_other_formats_and_types_are_checked_as_well(changes, tmp_path):
    records = measured(study(**changes), tmp_path)

    assert {record["format"] for record in records} == {changes["format"]}
    assert max(record["worst_error"] for record in records) < 1


def test_the_vectors_of_a_sweep_all_differ(tmp_path, monkeypatch):
    seen, real = [], StreamedMatrix.apply_each
    monkeypatch.setattr(StreamedMatrix, "apply_each", lambda self, X, out: (seen.append(X.copy()), real(self, X, out)))

    measured(study(protocol="engine", subdivisions=2, repeats=3, columns=2), tmp_path)

    vectors = np.moveaxis(seen[0], 2, 1).reshape(6, -1)
    cosines = np.abs(vectors @ vectors.T) / np.outer(*[np.linalg.norm(vectors, axis=1)] * 2)
    assert (cosines[~np.eye(6, dtype=bool)] < 0.9999).all()
    assert all(np.array_equal(x, seen[0]) for x in seen)  # written anew, they are the same


def test_compute_alone_comes_from_spans_where_the_matrix_does_not_fit(tmp_path, monkeypatch):
    class NeverResident(StreamedMatrix):
        def __init__(self, *arguments, plan=None, **keywords):
            if plan is None:
                raise BudgetError("too large")
            super().__init__(*arguments, plan=plan, **keywords)

    monkeypatch.setattr(overlap_measurement, "StreamedMatrix", NeverResident)

    for record in measured(study(subdivisions=2), tmp_path):
        assert record["compute_alone"].startswith("spans")
        assert record["compute_seconds"] > 0


def spoil(monkeypatch, *, kind, change, after=0):
    """Let sweeps with overlap on or off change their products, from a given call on."""
    real, calls = StreamedMatrix.apply_each, itertools.count()

    def wrong(self, X, out):
        if not (self.plan.slots and self.plan.ring.overlap == (kind == "on")):
            return real(self, X, out)
        before = out.copy()
        real(self, X, out)
        if next(calls) >= after:
            change(out, before)
        return out

    monkeypatch.setattr(StreamedMatrix, "apply_each", wrong)


def one_entry(out, before):
    """A hundred-thousandth of a millionth: no reader of a solution would see it."""
    out[-1, 100] += 1e-11 * np.abs(out).max()


def one_product_left_out(out, before):
    out[1] = before[1]


@pytest.mark.parametrize("kind", ["off", "on"])
@pytest.mark.parametrize("change", [one_entry, one_product_left_out])
def test_a_wrong_product_is_measured_as_wrong(kind, change, tmp_path, monkeypatch):
    spoil(monkeypatch, kind=kind, change=change)
    try:
        found = {record["overlap"]: record["worst_error"] for record in measured(study(subdivisions=2), tmp_path)}
    except PenstockError:  # better still
        return

    assert found.pop(kind) > 1
    assert all(error < 1 for error in found.values())


@pytest.mark.parametrize("after", [0, 1], ids=["from the first sweep on", "after the sweep that is checked"])
def test_a_wrong_product_ends_the_study(after, tmp_path, monkeypatch):
    spoil(monkeypatch, kind="on", change=one_entry, after=after)

    with pytest.raises(PenstockError):
        run_overlap_study(study(), tmp_path / "study")


class Interrupting(Reporter):
    """Notes what is measured, and interrupts before one of it."""

    def __init__(self, interrupt_at=""):
        self.interrupt_at, self.details = interrupt_at, []

    @contextmanager
    def stage(self, title):
        reporter = self

        class Noting(Stage):
            def advance(self, done, detail=""):
                reporter.details.append(f"{title}: {detail}")
                if detail and detail == reporter.interrupt_at:
                    raise KeyboardInterrupt

        yield Noting()

    @property
    def points(self):
        return [detail for detail in self.details if "products" in detail]


TWO_CASES = {"cases": [{"dof": 1, "nodes": 6}, {"dof": 3, "nodes": 6}], "subdivisions": [2, 3]}


def test_a_study_interrupted_goes_on_with_what_is_missing(tmp_path):
    described = study(**TWO_CASES)
    with pytest.raises(KeyboardInterrupt):
        run_overlap_study(described, tmp_path / "study", reporter=Interrupting("3 subdivisions, 2 products"))
    folder = OverlapFolder(tmp_path / "study")
    kept = folder.read()["records"]
    assert [record["name"] for record in kept] == ["overlap/cube6-dof1/off/s2/r2", "overlap/cube6-dof1/on/s2/r2"]
    again = Interrupting()

    run_overlap_study(None, tmp_path / "study", reporter=again)

    assert again.points == [
        "cube6-dof1: 3 subdivisions, 2 products",
        "cube6-dof3: 2 subdivisions, 2 products",
        "cube6-dof3: 3 subdivisions, 2 products",
    ]
    records = folder.read()["records"]
    assert records[:2] == kept
    assert [record["name"] for record in records[1::2]] == [point.name("on") for point in study_points(described)]
    assert folder.gains.exists()


def test_a_finished_study_is_drawn_again_without_measuring(tmp_path):
    folder, _ = run_overlap_study(study(), tmp_path / "study")
    records = folder.read()
    (folder.path / "cube6-dof3-r2.png").unlink()
    again = Interrupting()

    run_overlap_study(None, folder.path, reporter=again)

    assert again.points == []
    assert folder.read() == records
    assert (folder.path / "cube6-dof3-r2.png").exists()


def test_a_study_of_a_beam_goes_on_as_well(tmp_path):
    run_overlap_study(study(cases=[{"dof": 3, "nodes": [6, 5, 7]}]), tmp_path / "study")

    run_overlap_study(None, tmp_path / "study")


def test_a_folder_in_use_is_refused_and_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")

    with pytest.raises(
        InputError, match="is not an empty folder; choose another --output, or resume there with --resume"
    ):
        run_overlap_study(study(), tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
    ],
)
def test_damaged_records_are_refused_with_advice(content, tmp_path):
    (tmp_path / "configuration.yaml").write_text(yaml.safe_dump(TINY))
    (tmp_path / "overlap.json").write_text(content)

    with pytest.raises(InputError, match=r"cannot read .*overlap\.json.*; start the study anew"):
        run_overlap_study(None, tmp_path)


@pytest.mark.parametrize(
    "changes", [{"subdivisions": [2, 2]}, {"cases": [{"dof": 3, "nodes": 6}, {"dof": 3, "nodes": [6, 6, 6]}]}]
)
def test_no_two_points_share_a_name(changes):
    try:
        names = [point.name("on") for point in study_points(study(**changes))]
    except ValueError:  # refusing them will do as well
        return

    assert len(set(names)) == len(names)


def test_a_cut_that_is_too_fine_is_refused_before_anything_is_measured(tmp_path):
    reporter = Interrupting()

    with pytest.raises(InputError, match="cannot cut"):
        run_overlap_study(study(subdivisions=[2, 400]), tmp_path / "study", reporter=reporter)

    assert reporter.points == []


def test_the_command_measures_a_study_and_prints_its_table(tmp_path):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))

    ran = subprocess.run(
        [sys.executable, "-m", "penstock", "overlap", "tiny.yaml"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip

    assert ran.returncode == 0, ran.stderr
    assert "Records, figures and timelines are in results/overlap-tiny" in ran.stdout
    assert "cube6-dof3" in ran.stdout.split("GFLOP/s")[1]
    result = json.loads((tmp_path / "results" / "overlap-tiny" / "overlap.json").read_text())
    assert len(result["records"]) == 4
    assert all(math.isfinite(result["limits"][key]) and result["limits"][key] > 0 for key in ("read_GBps", "link_GBps"))
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.yaml", "results"}


def test_the_command_says_how_to_go_on_after_an_interrupt(tmp_path, monkeypatch):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    command = ["overlap", str(tmp_path / "tiny.yaml"), "--output", str(tmp_path / "study")]
    with monkeypatch.context() as patch:
        patch.setattr(progress, "RichReporter", lambda *arguments: Interrupting("3 subdivisions, 2 products"))
        stopped = CliRunner().invoke(app, command)
    assert stopped.exit_code == 130
    assert f"resume with: penstock overlap --resume {tmp_path / 'study'}" in stopped.output

    resumed = CliRunner().invoke(app, ["overlap", "--resume", str(tmp_path / "study")])

    assert resumed.exit_code == 0, resumed.output
    assert len(OverlapFolder(tmp_path / "study").read()["records"]) == 4


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["nothing.yaml"], "cannot read nothing.yaml"),
        ([], "name a study FILE"),
        (["tiny.yaml", "--resume", "x"], "name a study FILE"),
        (["--resume", "x", "--output", "y"], "name a study FILE"),
        (["--resume", "nothing"], "cannot read nothing/configuration.yaml"),
        (["bad.yaml"], "did you mean 'repeats'"),
        pytest.param(
            ["cuda.yaml"], "cuda", marks=pytest.mark.skipif(gpu_count() > 0, reason="for machines without a GPU")
        ),
    ],
)
def test_a_mistake_ends_in_one_message_and_leaves_nothing(arguments, advice, tmp_path, monkeypatch, capsys):
    for name, more in (("tiny", {}), ("bad", {"repeat": 3}), ("cuda", {"device": "cuda"})):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({**TINY, **more}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["penstock", "overlap", *arguments])

    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == 2
    assert advice in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert {path.suffix for path in tmp_path.iterdir()} == {".yaml"}
