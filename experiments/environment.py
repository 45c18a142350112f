"""What machine and which versions a result came from. Names no user, host or path."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from penstock import __version__
from penstock.spmv import Device, DeviceError, format_nbytes
from penstock.spmv.device import cuda_device_count

__all__ = ["describe_environment"]

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


def _machine() -> dict[str, Any]:
    machine: dict[str, Any] = {
        "system": platform.system(),
        "architecture": platform.machine(),
        "processor": _processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        machine["memory"] = format_nbytes(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    machine["gpus"] = _gpus()
    return machine


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
