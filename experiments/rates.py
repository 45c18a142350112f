"""Rates of this machine, measured once and kept for a while."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from penstock import __version__
from penstock.experiments.bandwidth import (
    measure_disk,
    measure_link,
    measure_memory,
    measure_scattering,
    measure_starts,
)
from penstock.spmv import Device
from penstock.streaming import LinkRates
from penstock.streaming.cuda_executor import LANES

__all__ = ["WORTH_MEASURING_NBYTES", "machine_rates", "rates_file"]

_EXPIRY_SECONDS = 7 * 24 * 3600.0


def rates_file() -> Path:
    """Return where rates are kept: ``penstock/rates.json`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "rates.json"


#: Of a smaller matrix a measurement would take longer than what it tells about.
WORTH_MEASURING_NBYTES = 64 << 20


def machine_rates(device: Device, directory: Path, *, fresh: bool = False) -> LinkRates:
    """Return the rates at which a matrix comes to a device and is read there.

    Parameters
    ----------
    device : Device
    directory : path
        On the disk that a CPU streams from.
    fresh : bool
        Measure again, whatever was kept. Otherwise what is at most a week old is believed.
    """
    key = f"{__version__} {platform.node()} {_name_of(device, directory)}"
    kept = _read()
    if not fresh and (believed := _believed(kept.get(key))) is not None:
        return believed
    with device.current():
        link = measure_disk(directory)[0] if device.kind == "cpu" else measure_link(device)
        memory = measure_memory(device, _probe_nbytes(device))
        starts = measure_starts(device, directory)
        scattering = measure_scattering(device, memory)
        side_by_side = 1.0 if device.kind == "cpu" else LANES
        rates = LinkRates(link, memory, *starts, scattering=scattering, side_by_side=side_by_side)
    if device.kind == "cuda":  # what the probes took must not be missing from a budget
        device.xp.get_default_memory_pool().free_all_blocks()
    kept[key] = {"time": time.time(), "rates": asdict(rates)}
    with contextlib.suppress(OSError):  # a home that cannot be written to costs a measurement, no more
        path = rates_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(kept, indent=1), encoding="utf-8")
        temporary.replace(path)
    return rates


def _probe_nbytes(device: Device) -> int:
    """Return how much to read for a rate of memory: on a GPU far more than its cache, and than what a start costs."""
    if device.kind == "cpu":
        return 256 << 20
    free, _ = device.xp.cuda.runtime.memGetInfo()
    return int(min(4 << 30, free // 4))


def _name_of(device: Device, directory: Path) -> str:
    """Return what the rates belong to: a model of GPU, or a number of cores and a file system."""
    if device.kind == "cuda":
        return str(device.xp.cuda.runtime.getDeviceProperties(device.index)["name"].decode())
    existing = next(folder for folder in (directory.absolute(), *directory.absolute().parents) if folder.exists())
    return f"cpu, {os.cpu_count()} cores, file system {existing.stat().st_dev}"


def _believed(entry: Any) -> LinkRates | None:
    """Return the rates of an entry that is whole and not too old."""
    try:
        rates = {name: float(value) for name, value in entry["rates"].items()}
        whole = rates.keys() == {field.name for field in fields(LinkRates)}
        sound = (
            whole and min(rates["link"], rates["memory"]) > 0 and all(0 <= rate < math.inf for rate in rates.values())
        )
        if sound and 0 <= time.time() - entry["time"] < _EXPIRY_SECONDS:
            return LinkRates(**rates)
    except (AttributeError, KeyError, TypeError, ValueError):
        pass
    return None


def _read() -> dict[str, Any]:
    try:
        kept = json.loads(rates_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}
