"""Solve symmetric positive definite systems."""

from penstock.solvers.block_conjugate_gradients import BlockCgState, block_cg, block_cg_workspace_nbytes
from penstock.solvers.chebyshev import Chebyshev, chebyshev
from penstock.solvers.conjugate_gradients import CgState, cg, cg_workspace_nbytes
from penstock.solvers.preconditioners import DiagonalBlocks, as_preconditioner, block_jacobi, jacobi
from penstock.solvers.result import BlockSolveResult, IterationRecord, SolveResult, StopReason
from penstock.solvers.solve_many import choose_block_size, solve_many

__all__ = [
    "BlockCgState",
    "BlockSolveResult",
    "CgState",
    "Chebyshev",
    "DiagonalBlocks",
    "IterationRecord",
    "SolveResult",
    "StopReason",
    "as_preconditioner",
    "block_cg",
    "block_cg_workspace_nbytes",
    "block_jacobi",
    "cg",
    "cg_workspace_nbytes",
    "chebyshev",
    "choose_block_size",
    "jacobi",
    "solve_many",
]
