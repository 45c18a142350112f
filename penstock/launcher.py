"""Finds out whether a launcher, such as mpiexec, started several copies of this process."""

from __future__ import annotations

import os

__all__ = ["launched_copies"]

# How many processes a launcher started: Open MPI; MPICH and Intel MPI; Slurm, for steps that srun starts.
_COUNTS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def launched_copies() -> int:
    """Return the number of processes that a launcher started together with this one; 1 without a launcher."""
    counts = (os.environ.get(name, "") for name in _COUNTS)
    return max([1, *(int(count) for count in counts if count.isdigit())])
