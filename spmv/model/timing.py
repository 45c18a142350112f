"""Measures times of short actions on a CPU or a GPU, under the same conditions for all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from penstock.spmv.compilation.chunk_size import last_level_cache_nbytes
from penstock.spmv.device import CPU, Device

Action = Callable[[], Any]
Result = TypeVar("Result")

_SPIN = r"""
extern "C" __global__ void spin(const long long cycles)
{
    const long long began = clock64();
    while (clock64() - began < cycles) {}
}
"""
_WARM_UPS = 2
_LONGEST_SPIN = 200_000_000


def cache_nbytes(device: Device) -> int:
    """Return the bytes of the last-level cache."""
    if device.kind == "cpu":
        return last_level_cache_nbytes()
    return int(device.xp.cuda.Device(device.index).attributes["L2CacheSize"])


def copies_wanted(nbytes: int, device: Device) -> int:
    """Return how many copies of a product's data exceed four times the cache, so that products read from memory."""
    return max(1, min(256, -(-4 * cache_nbytes(device) // max(nbytes, 1))))


def memory_for_copies(device: Device) -> int:
    """Return the most bytes for copies that are timed together: a quarter of the host's free memory, half of a GPU's."""
    if device.kind == "cuda":
        free, _ = device.xp.cuda.Device(device.index).mem_info
        return int(free) // 2
    return CPU.free_nbytes() // 4


def time_in_turn(
    actions: Mapping[str, Sequence[Action]], device: Device, *, repeats: int, least: float = 2e-3
) -> dict[str, list[float]]:
    """Time actions in turn, so that drifts of the machine affect all equally; return the seconds per call of every sample.

    A sample cycles through the callables of an action, which do the same work on different data; on a CPU, whose clock is
    coarse, it takes at least ``least`` seconds. On a GPU the time between two events on the stream is measured. A spinning
    kernel keeps the GPU busy until the host has issued a whole sample, so the GPU never waits for launches, and only the
    kernels are timed.
    """
    samples: dict[str, list[float]] = {name: [] for name in actions}
    calls = {name: max(len(variants), 1) for name, variants in actions.items()}
    measure = _cpu_sample if device.kind == "cpu" else _GpuClock(device)
    for repeat in range(_WARM_UPS + repeats):
        for name, variants in actions.items():
            seconds = measure(variants, calls[name])
            if repeat < _WARM_UPS:
                rounds = max(1, round(least / max(seconds * len(variants), 1e-9)))
                calls[name] = len(variants) * min(rounds, 1 if device.kind == "cuda" and len(variants) > 3 else 200)
            else:
                samples[name].append(seconds)
    return samples


def time_by_host_clock(
    actions: Mapping[str, Action], device: Device, *, repeats: int, warmups: int = 2
) -> dict[str, list[float]]:
    """Time long actions in turn, each from its call to the end of all work it queued; return the seconds of every sample."""
    samples: dict[str, list[float]] = {name: [] for name in actions}
    for repeat in range(repeats + warmups):
        for name, action in actions.items():
            seconds, _ = time_once(action, device)
            if repeat >= warmups:
                samples[name].append(seconds)
    return samples


def time_once(action: Callable[[], Result], device: Device) -> tuple[float, Result]:
    """Return the seconds of one call, to the end of all work it queued on the device, and its result."""
    device.synchronize()
    began = time.perf_counter()
    result = action()
    device.synchronize()
    return time.perf_counter() - began, result


def _cpu_sample(variants: Sequence[Action], calls: int) -> float:
    began = time.perf_counter()
    for call in range(calls):
        variants[call % len(variants)]()
    return (time.perf_counter() - began) / calls


class _GpuClock:
    def __init__(self, device: Device) -> None:
        self._cupy = device.xp
        self._spin = device.xp.RawKernel(_SPIN, "spin")
        self._host_seconds = 1e-3
        self._cycles_per_second = device.xp.cuda.Device(device.index).attributes["ClockRate"] * 1e3

    def __call__(self, variants: Sequence[Action], calls: int) -> float:
        start, stop = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        cycles = min(int(1.5 * self._host_seconds * self._cycles_per_second), _LONGEST_SPIN)
        self._spin((1,), (1,), (cycles,))
        began = time.perf_counter()
        start.record()
        for call in range(calls):
            variants[call % len(variants)]()
        stop.record()
        self._host_seconds = time.perf_counter() - began
        stop.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(start, stop)) / 1e3 / calls
