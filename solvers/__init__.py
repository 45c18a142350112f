"""Solves symmetric positive definite systems: CG, block CG and preconditioners."""

from penstock.solvers.amg.method import CoarseBlockCgState, CoarseCgState
from penstock.solvers.amg.multigrid import Multigrid, multigrid
from penstock.solvers.amg.smoothed_aggregation import SmoothedAggregation, smoothed_aggregation
from penstock.solvers.amg.specs import MultigridSpec, SmoothedAggregationSpec
from penstock.solvers.block_cg import BlockCgState, block_cg, block_cg_workspace_nbytes
from penstock.solvers.cg import CgState, cg, cg_workspace_nbytes
from penstock.solvers.chebyshev import Chebyshev, chebyshev
from penstock.solvers.choice import METHODS, MethodChoice, method_named
from penstock.solvers.eigen.modes import ModesRecord, ModesState
from penstock.solvers.eigen.result import ModesReason
from penstock.solvers.factorisation import FactorisationSpec, SparseFactors
from penstock.solvers.image_solve import solve_by_image
from penstock.solvers.method import SOLVERS, Method
from penstock.solvers.minres import MinresState, minres, minres_workspace_nbytes
from penstock.solvers.own_preconditioner import OwnPreconditioner, as_preconditioner
from penstock.solvers.preconditioner_spec import PRECONDITIONERS, PreconditionerSpec, check_streams, preconditioner_spec
from penstock.solvers.preconditioners import DiagonalBlocks, absolute_jacobi, block_jacobi, jacobi
from penstock.solvers.problem import LinearProblem
from penstock.solvers.result import BlockSolveResult, IterationRecord, SolveResult, StopReason
from penstock.solvers.solve_many import choose_block_size, solve_many
from penstock.solvers.states import SavedState
from penstock.solvers.triangular.gauss_seidel import GaussSeidel, gauss_seidel
from penstock.solvers.triangular.incomplete_cholesky import IncompleteCholesky, incomplete_cholesky
from penstock.solvers.triangular.triangular_solve import TriangularSolve
from penstock.spmv.formats.symmetric_image import image_of
from penstock.spmv.products.multiply import (
    GalerkinPattern,
    ProductPattern,
    galerkin,
    galerkin_pattern,
    multiply,
    product_pattern,
    transpose,
)

__all__ = [
    "METHODS",
    "PRECONDITIONERS",
    "SOLVERS",
    "BlockCgState",
    "BlockSolveResult",
    "CgState",
    "Chebyshev",
    "CoarseBlockCgState",
    "CoarseCgState",
    "DiagonalBlocks",
    "FactorisationSpec",
    "GalerkinPattern",
    "GaussSeidel",
    "IncompleteCholesky",
    "IterationRecord",
    "LinearProblem",
    "Method",
    "MethodChoice",
    "MinresState",
    "ModesReason",
    "ModesRecord",
    "ModesState",
    "Multigrid",
    "MultigridSpec",
    "OwnPreconditioner",
    "PreconditionerSpec",
    "ProductPattern",
    "SavedState",
    "SmoothedAggregation",
    "SmoothedAggregationSpec",
    "SolveResult",
    "SparseFactors",
    "StopReason",
    "TriangularSolve",
    "absolute_jacobi",
    "as_preconditioner",
    "block_cg",
    "block_cg_workspace_nbytes",
    "block_jacobi",
    "cg",
    "cg_workspace_nbytes",
    "chebyshev",
    "check_streams",
    "choose_block_size",
    "galerkin",
    "galerkin_pattern",
    "gauss_seidel",
    "image_of",
    "incomplete_cholesky",
    "jacobi",
    "method_named",
    "minres",
    "minres_workspace_nbytes",
    "multigrid",
    "multiply",
    "preconditioner_spec",
    "product_pattern",
    "smoothed_aggregation",
    "solve_by_image",
    "solve_many",
    "transpose",
]
