"""Benchmark records: one JSON file a benchmark and machine, with the machine's description and its measured limits."""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

from penstock.experiments.reporting.environment import describe_environment

RESULTS = Path(__file__).parent / "results"


def current_commit() -> str:
    """Return the commit that is measured, marked if the tree, results apart, differs from it."""
    folder = Path(__file__).parent
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True
        ).stdout
        status = subprocess.run(
            ["git", "status", "--porcelain", "--", ":/", ":!/benchmarks/results"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.strip() + ("+changes" if status.stdout.strip() else "")


def record(
    name: str, samples: list[float], *, floor: float, nbytes: int, peers: dict[str, float], **more: Any
) -> dict[str, Any]:
    """Return one record: the median, the spread, the floor that the limits set, and what a user would compare with."""
    return {
        "name": name,
        "seconds": statistics.median(samples),
        "spread": [min(samples), max(samples)],
        "floor_seconds": floor,
        "bytes": nbytes,
        "peers": peers,
        **more,
    }


def printed(entry: dict[str, Any], what: str) -> dict[str, Any]:
    """Print what a record measured in a line, and return it."""
    peers = ", ".join(f"{name} {1e3 * seconds:.4g}" for name, seconds in entry["peers"].items())
    print(
        f"{entry['name']}: {what} {1e3 * entry['seconds']:.4g} ms, floor {1e3 * entry['floor_seconds']:.4g} ms; {peers}",
        flush=True,
    )
    return entry


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine", help="name of the machine in the JSON's file name, such as h200 or cpu2")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the JSON")
    parser.add_argument("--commit", default=None, help="commit that is measured, where git cannot tell")
    return parser


def write(
    benchmark: str, arguments: argparse.Namespace, limits: dict[str, float], records: list[dict[str, Any]]
) -> None:
    """Write ``<benchmark>-<machine>.json``."""
    data = {
        **describe_environment(),
        "commit": arguments.commit or current_commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "limits": limits,
        "records": records,
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / f"{benchmark}-{arguments.machine}.json"
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")
