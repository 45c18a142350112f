"""Starts programs on several ranks of MPI."""

import os
import subprocess
import sys
from pathlib import Path

BINARIES = Path(sys.executable).parent


def launch(ranks, *command, timeout=250):
    """Run a command on some ranks, each with one thread."""
    launcher = BINARIES / "mpiexec"
    launched = [str(launcher) if launcher.exists() else "mpiexec", "-n", str(ranks), *map(str, command)]
    environment = {**os.environ, "NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(launched, capture_output=True, text=True, timeout=timeout, env=environment)
