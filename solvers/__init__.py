"""Solve symmetric positive definite systems."""

from penstock.solvers.conjugate_gradients import CgState, cg, cg_workspace_nbytes
from penstock.solvers.preconditioners import DiagonalBlocks, as_preconditioner, block_jacobi, jacobi
from penstock.solvers.result import IterationRecord, SolveResult, StopReason

__all__ = [
    "CgState",
    "DiagonalBlocks",
    "IterationRecord",
    "SolveResult",
    "StopReason",
    "as_preconditioner",
    "block_jacobi",
    "cg",
    "cg_workspace_nbytes",
    "jacobi",
]
