"""What a user would take instead of penstock, each by its manual: algebraic multigrid of PyAMG, PETSc and hypre, and CHOLMOD.

This module and what it imports know nothing of penstock: a peer may be installed for another Python.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse
from amg_peers import Array, petsc_cg, petsc_solver, scipy_cg
from scipy.sparse.linalg import LinearOperator

__all__ = ["DIRECT", "PEERS", "Peer", "Problem"]

#: Peers that do not iterate, whose times are compared apart.
DIRECT = ("cholmod",)
_MOST_ITERATIONS = 20_000


@dataclass(frozen=True)
class Problem:
    """A system as peers know it.

    Parameters
    ----------
    A : csr_matrix
    b : array, (n,)
    slow_modes, kernel : array, (n, k), or None
        The near-null space, if it is known, and the null space, if there is one.
    size : int
        Unknowns a node.
    dimensions : int
    rtol : float
    """

    A: Any
    b: Array
    slow_modes: Array | None
    kernel: Array | None
    size: int
    dimensions: int
    rtol: float


@dataclass(frozen=True)
class Peer:
    """A solver.

    Parameters
    ----------
    module : str
        What has to be imported.
    solve : callable
        Returns x and iterations of a :class:`Problem`.
    singular : bool
        Whether its interface takes a singular matrix.
    """

    module: str
    solve: Callable[[Problem], tuple[Array, int]]
    singular: bool = True


def _pyamg(problem: Problem) -> tuple[Array, int]:
    """CG with smoothed aggregation of PyAMG as it is, and its near-null space.

    The null space of a singular system is taken out of what goes into its cycles and comes out: they amplify it.
    """
    import pyamg

    A = problem.A.tobsr((problem.size,) * 2) if problem.size > 1 else problem.A
    modes = problem.slow_modes if problem.slow_modes is not None else problem.kernel
    levels = pyamg.smoothed_aggregation_solver(scipy.sparse.bsr_matrix(A), B=modes, symmetry="hermitian")
    M = levels.aspreconditioner()
    if problem.kernel is not None:
        Q, cycle = np.linalg.qr(problem.kernel)[0], M
        M = LinearOperator(M.shape, lambda r: _without(Q, cycle.matvec(_without(Q, r))), dtype=np.float64)
    return scipy_cg(problem.A, problem.b, M, problem.rtol, _MOST_ITERATIONS)


def _without(Q: Array, x: Array) -> Array:
    """Return a vector without its part in the span of orthonormal columns."""
    return x - Q @ (Q.T @ x)


def _gamg(problem: Problem) -> tuple[Array, int]:
    """CG with PETSc's own algebraic multigrid, blocks and near-null space given."""
    return _by_petsc(problem, "gamg", {})


def _boomeramg(problem: Problem) -> tuple[Array, int]:
    """CG with hypre's BoomerAMG through PETSc, one function for each unknown of a node.

    Strong couplings are from 0.25 in a plane and from 0.5 in space, as hypre's manual advises.
    """
    threshold = 0.25 if problem.dimensions == 2 else 0.5
    return _by_petsc(problem, "hypre", {"pc_hypre_type": "boomeramg", "pc_hypre_boomeramg_strong_threshold": threshold})


def _by_petsc(problem: Problem, name: str, options: dict[str, Any]) -> tuple[Array, int]:
    from petsc4py import PETSc

    table = PETSc.Options()
    for option, value in options.items():
        table[option] = value
    modes = problem.slow_modes
    solver = petsc_solver(PETSc, problem.A, problem.size, name, modes, problem.kernel)
    solver.setTolerances(rtol=problem.rtol, max_it=_MOST_ITERATIONS)
    return petsc_cg(PETSc, solver, problem.b)


def _cholmod(problem: Problem) -> tuple[Array, int]:
    """A Cholesky factorisation by CHOLMOD in the order that it chooses."""
    from sksparse.cholmod import cholesky

    return np.asarray(cholesky(scipy.sparse.csc_matrix(problem.A))(problem.b)), 0


PEERS = {
    "pyamg": Peer("pyamg", _pyamg),
    "gamg": Peer("petsc4py.PETSc", _gamg),
    "boomeramg": Peer("petsc4py.PETSc", _boomeramg),
    "cholmod": Peer("sksparse.cholmod", _cholmod, singular=False),
}
