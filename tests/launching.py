"""Starts programs on several ranks of MPI."""

import os
import subprocess
import sys
from pathlib import Path

BINARIES = Path(sys.executable).parent


def launch(ranks, *command, timeout=290):
    """Run a command on some ranks, each with one thread."""
    launcher = BINARIES / "mpiexec"
    launched = [str(launcher) if launcher.exists() else "mpiexec", "-n", str(ranks), *map(str, command)]
    threads = dict.fromkeys(("NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    # Ranks share cores: one that waits lets the others compute instead of asking for messages all the time (of MPICH).
    patience = {"MPIR_CVAR_CH4_PROGRESS_THROTTLE": "1", "MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT": "100"}
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, **threads, **patience, "PYTHONPATH": path}
    return subprocess.run(launched, capture_output=True, text=True, timeout=timeout, env=environment)
