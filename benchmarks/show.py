"""Print benchmark files as tables, or compare two: python benchmarks/show.py FILE.json [OTHER.json]."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table


def main(paths: list[str]) -> None:
    """Print the records of one file, beside those of the same name in a second one if it is given."""
    files = [json.loads(Path(path).read_text(encoding="utf-8")) for path in paths]
    first, others = files[0], files[1:]
    table = Table(title=f"{Path(paths[0]).stem}, {first['date']}, commit {first['commit'][:10]}")
    for column in ("name", "ms", "spread", "floor ms", "times floor", "peers"):
        table.add_column(column)
    for path in paths[1:]:
        table.add_column(f"{Path(path).stem} ms")
        table.add_column("ratio")
    for entry in first["records"]:
        ms, floor = entry["seconds"] * 1e3, entry["floor_seconds"] * 1e3
        peers = ", ".join(f"{name} {seconds * 1e3:.4g}" for name, seconds in entry["peers"].items())
        spread = " to ".join(f"{seconds * 1e3:.4g}" for seconds in entry["spread"])
        row = [entry["name"], f"{ms:.4g}", spread, f"{floor:.4g}", f"{ms / floor:.3f}" if floor else "", peers]
        for other in others:
            twin = next((e for e in other["records"] if e["name"] == entry["name"]), None)
            row += [f"{twin['seconds'] * 1e3:.4g}", f"{twin['seconds'] / entry['seconds']:.3f}"] if twin else ["", ""]
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)
    console.print("limits: " + ", ".join(f"{name} {value:.4g}" for name, value in first["limits"].items()))


if __name__ == "__main__":
    main(sys.argv[1:])
