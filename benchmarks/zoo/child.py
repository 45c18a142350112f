"""What the processes share that solve a system each: the cap on CPU time, the clock, and what they leave behind.

A process leaves ``outcome.json`` and ``x.npy`` in the folder of its system. One that was ended by the cap leaves neither.
"""

from __future__ import annotations

import json
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["cap_cpu", "leave", "timed"]

#: A first call of fewer CPU seconds is made again, so that what is done once in a process, such as touching memory, is left out;
#: brief ones several times, until that took some seconds in all.
_BRIEF, _ENOUGH, _MOST_CALLS = 10.0, 2.0, 5


def cap_cpu(seconds: float) -> None:
    """Let the operating system end this process once it has used a number of further CPU seconds."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + seconds) + 1, hard))


def timed(action: Callable[[], Any], cap: float) -> tuple[Any, dict[str, Any]]:
    """Return the result of a call, and CPU seconds (``samples``) and seconds (``wall_seconds``, of the last one) of its calls."""
    samples: list[float] = []
    while True:
        cap_cpu(cap)
        cpu, began = time.process_time(), time.perf_counter()
        result = action()
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        samples.append(cpu)
        if samples[0] > _BRIEF or (len(samples) > 1 and sum(samples[1:]) > _ENOUGH) or len(samples) > _MOST_CALLS:
            return result, {"samples": samples[1:] or samples, "wall_seconds": wall}


def leave(folder: Path, x: Any, outcome: dict[str, Any]) -> None:
    """Write what was found."""
    if "samples" in outcome:
        outcome["cpu_seconds"] = statistics.median(outcome["samples"])
    if x is not None:
        np.save(folder / "x.npy", x)
    (folder / "outcome.json").write_text(json.dumps(outcome), encoding="utf-8")
