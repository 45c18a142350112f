"""When the command that this process runs began: with the process, before Python had read a line of it."""

from __future__ import annotations

import os
import time
from pathlib import Path

#: A process that is older was something else before, such as a shell that ended in ``exec penstock``.
_OLDEST_SECONDS = 30.0
# When the command began, on the clock of time.perf_counter, until somebody has counted its start.
_began: float | None = None


def command_begins() -> None:
    """Note that this process is a command, which began with the process."""
    global _began
    _began = time.perf_counter() - _age()


def take_starting_seconds() -> float:
    """Return the seconds since the command began, which are counted once; 0 the next time, and where there is no command."""
    global _began
    began, _began = _began, None
    return 0.0 if began is None else time.perf_counter() - began


def _age() -> float:
    """Return the age of this process in seconds as Linux knows it, to a hundredth; 0 elsewhere."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (AttributeError, IndexError, OSError, ValueError):
        return 0.0
    return age if 0.0 <= age <= _OLDEST_SECONDS else 0.0
