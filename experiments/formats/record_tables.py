"""Tables of benchmark records: times by matrix, format and peer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.experiments.formats.peers import PEER_LABELS
from penstock.spmv import format_names

Record = Mapping[str, Any]
Records = Sequence[Record]
Limits = Mapping[str, float]

#: Threads of a CUDA block if a record does not study their number.
DEFAULT_THREADS = 256
_VENDORS = ("cusparse_csr", "scipy_csr")


def is_default(record: Record) -> bool:
    """Return whether a record is of the default variant of its format."""
    return not record.get("variant") and record.get("threads") in (None, DEFAULT_THREADS)


def matrices_of(records: Records) -> dict[str, dict[str, Any]]:
    """Return the matrices by name, in the order of the records."""
    matrices: dict[str, dict[str, Any]] = {}
    for record in records:
        matrices.setdefault(record["matrix"]["name"], record["matrix"])
    return matrices


def peer_seconds(records: Records) -> dict[str, dict[str, float]]:
    """Return the shortest times of a product with one vector, by matrix and peer."""
    least: dict[str, dict[str, float]] = {}
    for record in records:
        if record["columns"] == 1:
            row = least.setdefault(record["matrix"]["name"], {})
            for peer, seconds in (record.get("peers") or {}).items():
                if seconds:
                    row[peer] = min(seconds, row.get(peer, seconds))
    return least


def format_seconds(records: Records, columns: int = 1) -> dict[str, dict[str, float]]:
    """Return the times of the default variants, by matrix and format."""
    seconds: dict[str, dict[str, float]] = {}
    for record in records:
        if record["columns"] == columns and is_default(record):
            seconds.setdefault(record["matrix"]["name"], {}).setdefault(record["format"], record["seconds"])
    return seconds


def all_seconds(records: Records) -> dict[str, dict[str, float]]:
    """Return the times with one vector, by matrix and format or peer, of all matrices with times of a format."""
    peers = peer_seconds(records)
    return {matrix: {**row, **peers[matrix]} for matrix, row in format_seconds(records).items()}


def competitors_in(table: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the formats and peers of a table: registered formats in the order of the registry, known peers, then others."""
    present = {competitor for row in table.values() for competitor in row}
    known = [name for name in (*format_names(), *PEER_LABELS) if name in present]
    return known + sorted(present - set(known))


def vendor_in(peers: Mapping[str, Mapping[str, float]]) -> str | None:
    """Return the peer that formats are compared with: the first of the vendors' that was measured."""
    return next((vendor for vendor in _VENDORS if any(vendor in row for row in peers.values())), None)


def gflops(nonzeros: float, seconds: float) -> float:
    """Return the GFLOP/s of a product with one vector."""
    return 2e-9 * nonzeros / seconds
