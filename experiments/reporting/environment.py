"""Describes the machine and the library versions behind a result, without names of users, hosts or paths."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from penstock import __version__
from penstock.host.threads import usable_cores
from penstock.spmv import CPU, Device, DeviceError, InputError, PenstockError, format_nbytes
from penstock.spmv.device import cuda_device_count
from penstock.streaming.measurement.probes import measure_disk, measure_link, measure_memory
from penstock.streaming.measurement.rates import machine_rates

_LIBRARIES = ("numpy", "scipy", "numba", "cupy-cuda13x", "cupy-cuda12x", "h5py", "matplotlib")


def describe_environment() -> dict[str, Any]:
    """Return hardware and versions as plain JSON values."""
    versions = {"penstock": __version__, "python": platform.python_version()}
    for library in _LIBRARIES:
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"machine": _machine(), "versions": versions}


def check_same_machine(recorded: dict[str, Any], path: Path) -> None:
    """Refuse to resume records of another processor, number of cores or GPUs; without an environment nothing is checked."""
    machine = _machine() if "machine" in recorded else {}
    for part in ("processor", "cores", "gpus") if machine else ():
        if recorded["machine"].get(part) != machine[part]:
            raise InputError(f"{path} was begun on another machine ({part} differ); its records cannot be compared")


def why_no_gpu() -> str | None:
    """Return what keeps GPUs from being used, or None if there is one."""
    try:
        return None if cuda_device_count() else "no CUDA device is visible"
    except DeviceError as error:
        cause = str(error).removeprefix("a CUDA device was requested, but ")
        return cause.split(", or use")[0].split("; use")[0]


def _machine() -> dict[str, Any]:
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "processor": _processor_name(),
        "cores": usable_cores(),
        "memory": format_nbytes(psutil.virtual_memory().total),
        "gpus": _gpus(),
    }


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpus() -> list[dict[str, str]]:
    try:
        count = cuda_device_count()
    except DeviceError:
        return []
    runtime = Device("cuda").xp.cuda.runtime
    gpus = []
    for number in range(count):
        properties = runtime.getDeviceProperties(number)
        gpus.append({"name": properties["name"].decode(), "memory": format_nbytes(properties["totalGlobalMem"])})
    return gpus


def measure_machine(gpus: int) -> list[tuple[str, str]]:
    """Measure bandwidths of memory, of the disk with the current folder and of the links to the GPUs, as pairs of text."""

    def rate(measurement: Callable[[], float], device: Device = CPU) -> str:
        with device.current():
            return f"{measurement() / 1e9:.3g} GB/s"

    rows = [("host memory, read", rate(partial(measure_memory, CPU)))]
    try:
        disk, direct = measure_disk(Path.cwd())
        cache = "around the page cache" if direct else "through the page cache"
        rows.append(("disk here, read", f"{disk / 1e9:.3g} GB/s {cache}"))
    except (OSError, PenstockError) as error:
        rows.append(("disk here, read", f"not measured: {error}"))
    for number in range(gpus):
        device = Device("cuda", number)
        rows.append((f"{device} memory, read", rate(partial(measure_memory, device, 1 << 30), device)))
        rows.append((f"{device} link", rate(partial(measure_link, device), device)))
    return rows


def refresh_rates(gpus: int) -> list[tuple[str, str]]:
    """Measure the rates anew that plans use, for the disk with the current folder and the GPUs; return pairs of text."""
    rows = []
    for device in (CPU, *(Device("cuda", number) for number in range(gpus))):
        rates = machine_rates(device, Path.cwd(), fresh=True)
        rows.append((f"{device}, for plans", f"link {rates.link / 1e9:.3g} GB/s, memory {rates.memory / 1e9:.3g} GB/s"))
    return rows
