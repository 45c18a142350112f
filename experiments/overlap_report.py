"""Running the communication-hiding study into a folder, point by point, and what it says in the end."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import yaml

from penstock.experiments.environment import describe_environment
from penstock.experiments.overlap_configuration import OverlapStudy, read_overlap_study
from penstock.experiments.overlap_figures import draw_rates, draw_timelines
from penstock.experiments.overlap_study import OverlapPoint, check_study, measure_case, study_points
from penstock.experiments.progress import Reporter
from penstock.experiments.rates import machine_rates
from penstock.experiments.results import write_json, write_text
from penstock.spmv import Device, InputError
from penstock.streaming import Timeline

__all__ = ["OverlapFolder", "gains_table", "run_overlap_study"]

_COLUMNS = (
    "matrix", "dof", "format", "protocol", "device", "subdivisions", "repeats", "columns", "overlap", "seconds",
    "transfer_seconds", "compute_seconds", "floor_seconds", "times_floor", "predicted_seconds", "gflops",
    "transfer_gflops", "compute_gflops", "serial_gflops", "gain", "hidden", "link_fraction", "memory_fraction",
    "result_copy_seconds", "change_vectors_seconds", "products_checked", "worst_error",
)  # fmt: skip

# What the paper states in words, for (dof, nodes): gain in per cent, GFLOP/s with overlap, subdivisions.
_PAPER: dict[tuple[int, int], tuple[str, str]] = {
    (3, 128): ("just above 40 %", "about 33"),
    (6, 128): ("65.7 % at 61 subdivisions", "53.07"),
}
_PAPER_SERIAL = {1: 1.08, 3: 2.67, 6: 3.20}  # at 128^3 nodes


class OverlapFolder:
    """What a study leaves: records, figures, timelines and the table of gains."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.configuration = path / "configuration.yaml"
        self.results = path / "overlap.json"
        self.table = path / "overlap.csv"
        self.gains = path / "gains.md"
        self.timelines = path / "timelines"

    def records(self) -> dict[str, Any]:
        """Return what was measured so far."""
        try:
            result = json.loads(self.results.read_text(encoding="utf-8"))
            if not isinstance(result["records"], list):
                raise TypeError("its records are no list")
        except FileNotFoundError:
            return {"records": []}
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InputError(f"cannot read {self.results}: {error}; start the study anew") from error
        return result  # type: ignore[no-any-return]

    def draw(self) -> list[Path]:
        """Draw every figure and return the paths."""
        result, drawn = self.records(), []
        for (matrix, repeats, columns), records in _comparable(result["records"]).items():
            name = f"{matrix}-r{repeats}" + (f"-k{columns}" if columns > 1 else "")
            drawn.append(self.path / f"{name}.png")
            draw_rates(drawn[-1], records, result["limits"]["read_GBps"])
            best = min((r for r in records if r["overlap"] == "on"), key=lambda r: r["seconds"])
            stored = self._timeline_of(best["name"])
            if stored.exists():
                spans = json.loads(stored.read_text(encoding="utf-8"))
                drawn.append(self.path / f"{name}-timeline.png")
                title = f"{matrix}, {best['subdivisions']} subdivisions, {repeats} products, {best['device']}"
                draw_timelines(drawn[-1], Timeline.from_json(spans["off"]), Timeline.from_json(spans["on"]), title)
        return drawn

    def _timeline_of(self, name: str) -> Path:
        return self.timelines / f"{name.removeprefix('overlap/').replace('/on/', '-').replace('/', '-')}.json"

    def keep(self, result: dict[str, Any], timelines: dict[str, Timeline]) -> None:
        """Write all records so far, and the timelines of the newest point as spans and as a Chrome trace."""
        newest = self._timeline_of(result["records"][-1]["name"])
        self.timelines.mkdir(exist_ok=True)
        write_json(newest, {kind: timeline.to_json() for kind, timeline in timelines.items()})
        for kind, timeline in timelines.items():
            write_text(newest.with_name(f"{newest.stem}-{kind}.trace.json"), timeline.to_chrome_trace())
        table = io.StringIO()
        writer = csv.DictWriter(table, _COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(result["records"])
        write_text(self.table, table.getvalue())
        write_json(self.results, result)  # last: what it holds is done


def run_overlap_study(
    study: OverlapStudy | None, directory: str | Path, *, reporter: Reporter | None = None
) -> OverlapFolder:
    """Measure all points of a study, or those that are missing, and draw the figures.

    Parameters
    ----------
    study : OverlapStudy or None
        None goes on with the one in the folder.
    directory : path
        Results folder to make, or, without a study, to go on with.
    reporter : Reporter, optional

    Returns
    -------
    OverlapFolder

    Raises
    ------
    PenstockError
        If something is wrong with the study, the memory, the disk or the device. Points measured before stay.
    """
    folder, reporter = OverlapFolder(Path(directory)), reporter or Reporter()
    if study is None:
        study = read_overlap_study(folder.configuration)
        check_study(study)
    elif folder.path.exists() and any(folder.path.iterdir()):
        raise InputError(f"{folder.path} is not empty; choose another --output, or go on there with --resume")
    else:
        check_study(study)  # before a folder is made
        if study.folder is not None:  # going on may start from elsewhere
            study = study.model_copy(update={"folder": study.folder.resolve()})
        folder.path.mkdir(parents=True, exist_ok=True)
        write_text(
            folder.configuration, yaml.safe_dump(study.model_dump(mode="json", exclude_unset=True), sort_keys=False)
        )
    device, place = Device.parse(study.device), study.folder or folder.path
    result, environment = folder.records(), describe_environment()
    for part in ("processor", "cores", "gpus") if "machine" in result else ():
        if result["machine"].get(part) != environment["machine"][part]:
            raise InputError(
                f"{folder.path} was begun on another machine ({part} differ); its records cannot be compared"
            )
    done = {record["name"] for record in result["records"]}
    missing = [point for point in study_points(study) if point.name("on") not in done]
    if missing:
        with reporter.stage("measure") as stage:
            rates = machine_rates(device, place, fresh=True)
            stage.advance(1.0, f"link {rates.link / 1e9:.3g} GB/s, memory {rates.memory / 1e9:.4g} GB/s")
        limits = {"read_GBps": rates.memory / 1e9, "link_GBps": rates.link / 1e9}
        result = {**environment, "limits": limits, "records": result["records"]}

        def keep(records: list[dict[str, Any]], timelines: dict[str, Timeline]) -> None:
            result["records"] += records
            folder.keep(result, timelines)

        for case in dict.fromkeys(point.case for point in missing):
            points: list[OverlapPoint] = [point for point in missing if point.case == case]
            measure_case(study, case, points, rates, place, reporter, keep)
    write_text(folder.gains, gains_table(result["records"]))
    with reporter.stage("draw") as stage:
        folder.draw()
        stage.advance(1.0)
    return folder


def gains_table(records: list[dict[str, Any]]) -> str:
    """Return, as a Markdown table, the best of each matrix beside what the paper states in words.

    ``planned`` is the number of subdivisions whose predicted time is shortest, and how much longer its sweep took than the
    best one.
    """
    lines = [
        "| matrix | products | subdivisions | GFLOP/s on | gain | hidden | x max(T, C) | off: x (T + C) | planned | serial | "
        "paper: gain | paper: GFLOP/s | paper: serial |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    off = {record["name"].replace("/off/", "/on/"): record for record in records if record["overlap"] == "off"}
    on = [record for record in records if record["overlap"] == "on"]
    for (matrix, repeats, columns), chosen in _comparable(on).items():
        best = min(chosen, key=lambda record: record["seconds"])
        planned = min(chosen, key=lambda record: record["predicted_seconds"])
        comparable = best["protocol"] == "paper" and (best["repeats"], best["columns"]) == (50, 1)
        cube = best["nodes"] if comparable and isinstance(best["nodes"], int) else 0
        gain, rate = _PAPER.get((best["dof"], cube), ("not stated", "not stated"))
        serial = f"{_PAPER_SERIAL[best['dof']]:.2f}" if cube == 128 else "not stated"
        products = str(repeats) + (f" of {columns} vectors" if columns > 1 else "")
        lines.append(
            f"| {matrix} | {products} | {best['subdivisions']} | {best['gflops']:.4g} | {100 * best['gain']:.1f} % | "
            f"{100 * best['hidden']:.1f} % | {best['times_floor']:.3f} | {off[best['name']]['times_floor']:.3f} | "
            f"{planned['subdivisions']}: +{100 * (planned['seconds'] / best['seconds'] - 1):.1f} % | "
            f"{best['serial_gflops']:.3g} | {gain} | {rate} | {serial} |"
        )
    return "\n".join(lines) + "\n"


def _comparable(records: list[dict[str, Any]]) -> dict[tuple[str, int, int], list[dict[str, Any]]]:
    """Sort records by what they have in common: matrix, repeats and columns."""
    groups: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["matrix"], record["repeats"], record["columns"]), []).append(record)
    return groups
