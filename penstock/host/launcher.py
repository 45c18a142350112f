"""Finds out whether a launcher, such as mpiexec, started several copies of this process."""

from __future__ import annotations

import os

# How many processes a launcher started: Open MPI; MPICH and Intel MPI; Slurm, for steps that srun starts.
_COUNTS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
# Which of them this one is.
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def launched_copies() -> int:
    """Return the number of processes that a launcher started together with this one; 1 without a launcher."""
    return max(1, _largest(_COUNTS))


def launched_rank() -> int:
    """Return the number of this process among those; 0 without a launcher."""
    return _largest(_RANKS) if launched_copies() > 1 else 0


def _largest(names: tuple[str, ...]) -> int:
    values = (os.environ.get(name, "") for name in names)
    return max((int(value) for value in values if value.isdigit()), default=0)
