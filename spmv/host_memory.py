"""The host memory that this process may still allocate."""

from __future__ import annotations

from pathlib import Path

import psutil

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


def available_nbytes() -> int:
    """Return the bytes that this process may still allocate within the system's memory, its control groups and its limits."""
    return int(max(0, min(psutil.virtual_memory().available, _of_control_groups(), _of_address_space())))


def _of_control_groups() -> float:
    """What containers and job schedulers leave (version 2 of control groups, and version 1 inside a container)."""
    left = float("inf")
    for folder, limit, used, cache in (
        *((group, "memory.max", "memory.current", "file") for group in _groups()),
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
    ):
        try:
            most, taken = int((folder / limit).read_text()), int((folder / used).read_text())
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such group, or no limit
            continue
        left = min(left, most - taken + int(statistics.get(cache, 0)))
    return left


def _groups() -> list[Path]:
    """Return the folders of this process's group and of those that contain it."""
    root = Path("/sys/fs/cgroup")
    try:
        [own] = [line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")]
    except (OSError, ValueError):
        return [root]
    folder = root / own.strip().lstrip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]


def _of_address_space() -> float:
    if resource is None:
        return float("inf")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return float("inf")
    return limit - int(psutil.Process().memory_info().vms)
