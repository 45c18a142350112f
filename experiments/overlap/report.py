"""Runs the communication-hiding study in a folder, point by point, and reports its gains."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from penstock.driver.progress import Reporter, Stage
from penstock.experiments.overlap.configuration import OverlapStudy, read_overlap_study
from penstock.experiments.overlap.figures import draw_rates, draw_timelines
from penstock.experiments.overlap.measurement import CaseMeasurement
from penstock.experiments.overlap.study import OverlapPoint, check_study, study_points
from penstock.experiments.reporting.atomic import write_json, write_text
from penstock.experiments.reporting.environment import check_same_machine, describe_environment
from penstock.experiments.reporting.study import Record, Study, StudyFolder
from penstock.spmv import Device
from penstock.streaming import Timeline
from penstock.streaming.measurement.rates import machine_rates

_COLUMNS = (
    "matrix", "dof", "format", "protocol", "device", "subdivisions", "repeats", "columns", "overlap", "seconds",
    "transfer_seconds", "compute_seconds", "floor_seconds", "times_floor", "predicted_seconds", "gflops",
    "transfer_gflops", "compute_gflops", "serial_gflops", "gain", "hidden", "link_fraction", "memory_fraction",
    "result_copy_seconds", "change_vectors_seconds", "products_checked", "worst_error",
)  # fmt: skip

# Statements of the paper for (dof, nodes): gain in per cent, GFLOP/s with overlap, subdivisions.
_PAPER: dict[tuple[int, int], tuple[str, str]] = {
    (3, 128): ("just above 40 %", "about 33"),
    (6, 128): ("65.7 % at 61 subdivisions", "53.07"),
}
_TITLES = [
    "matrix", "products", "cut", "GFLOP/s", "gain", "hidden", "on", "off", "planned cut", "slower by", "serial",
]  # fmt: skip
_LEGEND = """
Each row is the fastest point of a matrix with overlap.

- *products*: with every subdivision, while it is in memory; *cut*: number of subdivisions
- *GFLOP/s*: with overlap; *serial*: the same product in memory by one thread
- *gain*: how much more GFLOP/s overlap gives than the same sweep without it
- *hidden*: share of the shorter of transfer and computation that passes behind the longer one, 0 to 100 %
- *on*: seconds with overlap over their bound, the longer of transfer alone and computation alone
- *off*: seconds without overlap over the sum of transfer alone and computation alone
- *planned cut*: the one with the shortest predicted time; *slower by*: how much longer it took than the best"""
_PAPER_SERIAL = {1: 1.08, 3: 2.67, 6: 3.20}  # at 128^3 nodes


class OverlapFolder(StudyFolder):
    """The folder of a study: records, figures, timelines and the table of gains."""

    records_name: ClassVar[str] = "overlap.json"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.table = path / "overlap.csv"
        self.gains = path / "gains.md"
        self.timelines = path / "timelines"

    def draw(self) -> list[Path]:
        """Draw all figures and return their paths."""
        result, drawn = self.read(), []
        for (matrix, repeats, columns), records in _comparable(result["records"]).items():
            name = f"{matrix}-r{repeats}" + (f"-k{columns}" if columns > 1 else "")
            drawn.append(self.path / f"{name}.png")
            draw_rates(drawn[-1], records, result["limits"]["read_GBps"])
            best = min((r for r in records if r["overlap"] == "on"), key=lambda r: r["seconds"])
            stored = self._timeline_of(best["name"])
            if stored.exists():
                spans = self.read_json(stored)
                drawn.append(self.path / f"{name}-timeline.png")
                title = f"{matrix}, {best['subdivisions']} subdivisions, {repeats} products, {best['device']}"
                draw_timelines(drawn[-1], Timeline.from_json(spans["off"]), Timeline.from_json(spans["on"]), title)
        return drawn

    def _timeline_of(self, name: str) -> Path:
        return self.timelines / f"{name.removeprefix('overlap/').replace('/on/', '-').replace('/', '-')}.json"

    def write_timelines(self, name: str, timelines: dict[str, Timeline]) -> None:
        """Write the timelines of a point, overlap off and on, as spans and as Chrome traces."""
        path = self._timeline_of(name)
        self.timelines.mkdir(exist_ok=True)
        write_json(path, {kind: timeline.to_json() for kind, timeline in timelines.items()})
        for kind, timeline in timelines.items():
            write_text(path.with_name(f"{path.stem}-{kind}.trace.json"), timeline.to_chrome_trace())

    def write_table(self, records: list[Record]) -> None:
        """Write the most important values of all records as CSV."""
        table = io.StringIO()
        writer = csv.DictWriter(table, _COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        write_text(self.table, table.getvalue())


class OverlapRun(Study[OverlapPoint, OverlapFolder]):
    """Measures the points of a study; the points of one matrix share it and follow each other."""

    def __init__(self, study: OverlapStudy, folder: OverlapFolder, reporter: Reporter | None = None) -> None:
        super().__init__(folder, reporter)
        self.study = study
        self._header: Record = {}
        self._remaining: list[OverlapPoint] = []
        self._case: CaseMeasurement | None = None
        self._stage = Stage()

    def points(self) -> list[OverlapPoint]:
        """Return all combinations of the study's parameters."""
        return study_points(self.study)

    def is_done(self, point: OverlapPoint) -> bool:
        """Return whether there is a record of a point with overlap, which is written last."""
        return any(record["name"] == point.name("on") for record in self.records)

    def header(self) -> Record:
        """Return the machine and its limits."""
        return self._header

    def load(self) -> list[Record]:
        """Return the records of earlier runs on the same machine."""
        result = self.folder.read()
        check_same_machine(result, self.folder.path)
        self._header = describe_environment()
        return list(result["records"])

    def prepare(self, missing: Sequence[OverlapPoint]) -> None:
        """Measure the rates of the machine."""
        self._remaining = list(missing)
        with self.reporter.stage("measure") as stage:
            self.rates = machine_rates(Device.parse(self.study.device), self._matrix_folder, fresh=True)
            stage.advance(1.0, f"link {self.rates.link / 1e9:.3g} GB/s, memory {self.rates.memory / 1e9:.4g} GB/s")
        self._header["limits"] = {"read_GBps": self.rates.memory / 1e9, "link_GBps": self.rates.link / 1e9}

    @property
    def _matrix_folder(self) -> Path:
        return self.study.folder or self.folder.path

    def measure(self, point: OverlapPoint) -> list[Record]:
        """Measure a point, and write its timelines."""
        if self._case is None or self._case.case != point.case:
            self._case = None
            self.resources.close()
            self._stage = self.resources.enter_context(self.reporter.stage(point.case.name))
            self._case = CaseMeasurement(self.study, point.case, self.rates, self._matrix_folder, self._stage)
        same = [other for other in self._remaining if other.case == point.case]
        self._stage.advance(
            same.index(point) / len(same), f"{point.subdivisions} subdivisions, {point.repeats} products"
        )
        records, timelines = self._case.measure(point)
        self.folder.write_timelines(point.name("on"), timelines)
        self._stage.advance((same.index(point) + 1) / len(same))
        return records

    def save(self) -> None:
        """Write the table and then the records, which decide what is done."""
        self.folder.write_table(self.records)
        super().save()

    def report(self) -> None:
        """Write the table of gains and draw the figures."""
        write_text(self.folder.gains, gains_table(self.records))
        with self.reporter.stage("draw") as stage:
            self.folder.draw()
            stage.advance(1.0)


def run_overlap_study(
    study: OverlapStudy | None, directory: str | Path, *, reporter: Reporter | None = None
) -> tuple[OverlapFolder, bool]:
    """Measure the points of a study that are missing, and draw the figures; None resumes the study in the folder.

    Returns the folder, and whether all points are measured: False if the study was stopped on request. After an error, points
    measured before are still in the folder.
    """
    folder = OverlapFolder(Path(directory))
    resumed = study is None
    if study is None:
        study = read_overlap_study(folder.configuration)
    check_study(study)
    if not resumed and study.folder is not None:  # it may be resumed from another working directory
        study = study.model_copy(update={"folder": study.folder.resolve()})
    with folder.resumed() if resumed else folder.made():
        if not resumed:
            folder.write_configuration(study.model_dump(mode="json", exclude_unset=True))
        return folder, OverlapRun(study, folder, reporter).run()


def gains_table(records: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the best point of each matrix, with the statements of the paper.

    A legend below the table says what its columns are.
    """
    lines, stated = [f"| {' | '.join(_TITLES)} |", "|---" * len(_TITLES) + "|"], []
    off = {record["name"].replace("/off/", "/on/"): record for record in records if record["overlap"] == "off"}
    on = [record for record in records if record["overlap"] == "on"]
    for (matrix, repeats, columns), group in _comparable(on).items():
        best = min(group, key=lambda record: record["seconds"])
        planned = min(group, key=lambda record: record["predicted_seconds"])
        products = str(repeats) + (f" of {columns} vectors" if columns > 1 else "")
        stated += _of_the_paper(best)
        cells = (
            matrix,
            products,
            str(best["subdivisions"]),
            f"{best['gflops']:.4g}",
            f"{100 * best['gain']:.1f} %",
            f"{100 * min(max(best['hidden'], 0), 1):.1f} %",  # records of old versions may hold other shares
            f"{best['times_floor']:.3f}",
            f"{off[best['name']]['times_floor']:.3f}",
            str(planned["subdivisions"]),
            f"{100 * (planned['seconds'] / best['seconds'] - 1):.1f} %",
            f"{best['serial_gflops']:.3g}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, _LEGEND, *stated]) + "\n"


def _of_the_paper(record: dict[str, Any]) -> list[str]:
    """Return what the paper states for a point as a paragraph, if it states anything."""
    comparable = record["protocol"] == "paper" and (record["repeats"], record["columns"]) == (50, 1)
    cube = record["nodes"] if comparable and isinstance(record["nodes"], int) else 0
    statements = []
    if (record["dof"], cube) in _PAPER:
        gain, rate = _PAPER[record["dof"], cube]
        statements += [f"a gain of {gain}", f"{rate} GFLOP/s"]
    if cube == 128:
        statements.append(f"serial {_PAPER_SERIAL[record['dof']]:.2f} GFLOP/s")
    return ["", f"The paper states for {record['matrix']}: {', '.join(statements)}."] if statements else []


def _comparable(records: list[dict[str, Any]]) -> dict[tuple[str, int, int], list[dict[str, Any]]]:
    """Return records by matrix, repeats and columns: those that may be compared with each other."""
    groups: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["matrix"], record["repeats"], record["columns"]), []).append(record)
    return groups
