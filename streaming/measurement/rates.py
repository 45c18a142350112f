"""Caches the measured rates of this machine for a week."""

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

import platformdirs

from penstock.host.threads import usable_cores
from penstock.spmv import Device
from penstock.streaming import LinkRates
from penstock.streaming.measurement.probes import (
    cores_are_busy,
    measure_disk,
    measure_link,
    measure_memory,
    measure_scattering,
    measure_starts,
)
from penstock.streaming.planning.estimate import LANES

#: The first version that measured rates as this one does: rates cached by older versions are not used.
_MEASURED_SINCE = "0.1.0"
_EXPIRY_SECONDS, _EXPIRY_SECONDS_IF_BUSY = 7 * 24 * 3600.0, 600.0


def rates_file() -> Path:
    """Return the file of measured rates: ``rates.json`` in the user's cache folder for penstock."""
    return platformdirs.user_cache_path("penstock", appauthor=False) / "rates.json"


#: For smaller matrices measuring costs more than it saves.
WORTH_MEASURING_NBYTES = 256 << 20


def machine_rates(device: Device, directory: Path, *, fresh: bool = False) -> LinkRates:
    """Return the rates at which a matrix is transferred to a device, on a CPU from the disk of a directory, and read there.

    Unless ``fresh``, cached rates are used if they are at most a week old, or ten minutes if other processes kept the cores
    busy while they were measured.
    """
    key = _key_of(device, directory)
    if not fresh and (cached := _valid_rates(_read().get(key))) is not None:
        return cached
    busy = cores_are_busy()
    with device.current():
        link = measure_disk(directory)[0] if device.kind == "cpu" else measure_link(device)
        memory = measure_memory(device, _probe_nbytes(device))
        starts = measure_starts(device, directory)
        scattering = measure_scattering(device, memory)
        side_by_side = 1.0 if device.kind == "cpu" else LANES
        rates = LinkRates(link, memory, *starts, scattering=scattering, side_by_side=side_by_side)
    if device.kind == "cuda":  # return the probes' memory, which budgets need
        device.xp.get_default_memory_pool().free_all_blocks()
    _keep(key, rates, busy=busy or cores_are_busy())
    return rates


def correct_rates(device: Device, directory: Path, rates: LinkRates) -> None:
    """Use the rates learned in a solve instead of the measured ones, for ten minutes."""
    _keep(_key_of(device, directory), rates, busy=True)


def _keep(key: str, rates: LinkRates, *, busy: bool) -> None:
    cache = _read() | {key: {"time": time.time(), "busy": busy, "rates": asdict(rates)}}
    with contextlib.suppress(OSError):  # without a writable cache folder, the rates are measured again next time
        path = rates_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(cache, indent=1), encoding="utf-8")
        temporary.replace(path)


def _probe_nbytes(device: Device) -> int:
    """Return the bytes to read for a memory rate: on a GPU far more than its cache, so that the start does not matter."""
    if device.kind == "cpu":
        return 128 << 20
    free, _ = device.xp.cuda.runtime.memGetInfo()
    return int(min(4 << 30, free // 4))


def _key_of(device: Device, directory: Path) -> str:
    return f"{_MEASURED_SINCE} {platform.node()} {_name_of(device, directory)}"


def _name_of(device: Device, directory: Path) -> str:
    """Return the name of what the rates belong to: a GPU model, or a number of cores and a file system."""
    if device.kind == "cuda":
        return str(device.xp.cuda.runtime.getDeviceProperties(device.index)["name"].decode())
    existing = next(folder for folder in (directory.absolute(), *directory.absolute().parents) if folder.exists())
    return f"cpu, {usable_cores()} cores, file system {existing.stat().st_dev}"


def _valid_rates(entry: Any) -> LinkRates | None:
    """Return the rates of a cache entry, or None if it is damaged or too old."""
    try:
        rates = {name: float(value) for name, value in entry["rates"].items()}
        complete = rates.keys() == {field.name for field in fields(LinkRates)}
        positive = complete and min(rates["link"], rates["memory"]) > 0
        valid = positive and all(0 <= rate < math.inf for rate in rates.values())
        expiry = _EXPIRY_SECONDS_IF_BUSY if entry.get("busy") else _EXPIRY_SECONDS
        if valid and 0 <= time.time() - entry["time"] < expiry:
            return LinkRates(**rates)
    except (AttributeError, KeyError, TypeError, ValueError):
        pass
    return None


def _read() -> dict[str, Any]:
    try:
        cache = json.loads(rates_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return cache if isinstance(cache, dict) else {}
