"""Algebraic multigrid that a user would take on a CPU: PyAMG's, and PETSc's GAMG where petsc4py is installed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse
import scipy.sparse.linalg

Array = np.ndarray[Any, Any]

# What is given to PyAMG's `smoothed_aggregation_solver`; cycles with its own smoothing, and with polynomials.
_PYAMG_SMOOTHING = {
    "pyamg": {},
    "pyamg_chebyshev": {
        "presmoother": ("chebyshev", {"degree": 3, "iterations": 1}),
        "postsmoother": ("chebyshev", {"degree": 3, "iterations": 1}),
    },
}


@dataclass(frozen=True)
class AmgFigures:
    """What a solver needed.

    Parameters
    ----------
    name : str
    setup_seconds, seconds : float
        Of the preconditioner and of the solve.
    cpu_seconds : float
        Of both, summed over threads.
    iterations : int
    true_residual : float
    """

    name: str
    setup_seconds: float
    seconds: float
    cpu_seconds: float
    iterations: int
    true_residual: float


def amg_figures(A: Any, modes: Array, b: Array, size: int, rtol: float) -> Iterator[AmgFigures]:
    """Yield the figures of every such solver that is installed.

    Parameters
    ----------
    A : csr_array
    modes : array, (n, k)
        The near-null space.
    b : array, (n,)
    size : int
        Unknowns a node.
    rtol : float
    """
    try:
        import pyamg
    except ImportError:
        pass
    else:
        blocks = scipy.sparse.bsr_matrix(A.tobsr((size, size)))
        for name, smoothing in _PYAMG_SMOOTHING.items():

            def make(smoothing: dict[str, Any] = smoothing) -> Any:
                return pyamg.smoothed_aggregation_solver(blocks, B=modes, symmetry="hermitian", **smoothing)

            yield _figures(name, A, b, make, lambda ml: scipy_cg(A, b, ml.aspreconditioner(), rtol))
    try:
        from petsc4py import PETSc
    except ImportError:
        return

    def gamg() -> Any:
        solver = petsc_solver(PETSc, A, size, "gamg", modes)
        solver.setTolerances(rtol=rtol, max_it=5000)
        solver.setUp()
        return solver

    yield _figures("gamg", A, b, gamg, lambda solver: petsc_cg(PETSc, solver, b))


def _figures(
    name: str, A: Any, b: Array, make: Callable[[], Any], solve: Callable[[Any], tuple[Array, int]]
) -> AmgFigures:
    cpu, began = time.process_time(), time.perf_counter()
    solver = make()
    made = time.perf_counter()
    x, iterations = solve(solver)
    ended, cpu = time.perf_counter(), time.process_time() - cpu
    residual = float(np.linalg.norm(b - A @ x) / np.linalg.norm(b))
    print(
        f"  {name}: set-up {made - began:.2f} s, solve {ended - made:.2f} s, CPU {cpu:.2f} s, {iterations} iterations, "
        f"{residual:.1e}",
        flush=True,
    )
    return AmgFigures(name, made - began, ended - made, cpu, iterations, residual)


def scipy_cg(A: Any, b: Array, M: Any, rtol: float, maxiter: int = 5000) -> tuple[Array, int]:
    """Solve by SciPy's CG; return x and the iterations."""
    iterations = 0

    def count(_: Array) -> None:
        nonlocal iterations
        iterations += 1

    x, _ = scipy.sparse.linalg.cg(A, b, M=M, rtol=rtol, maxiter=maxiter, callback=count)
    return x, iterations


def petsc_solver(
    PETSc: Any, A: Any, size: int, preconditioner: str, modes: Array | None, kernel: Array | None = None
) -> Any:
    """Return PETSc's CG with one of its preconditioners.

    As its manual advises for elasticity: blocks, and the near-null space, where there is one. The null space of a singular matrix
    is taken out of residuals.
    """
    indices = (A.indptr.astype(PETSc.IntType), A.indices.astype(PETSc.IntType), A.data)
    matrix = PETSc.Mat().createAIJ(A.shape, bsize=size, csr=indices)
    matrix.setOption(PETSc.Mat.Option.SPD, kernel is None)
    if modes is not None:
        matrix.setNearNullSpace(_spanned(PETSc, modes, size))
    if kernel is not None:
        matrix.setNullSpace(_spanned(PETSc, kernel, size))
    solver = PETSc.KSP().create()
    solver.setOperators(matrix)
    solver.setType("cg")
    solver.getPC().setType(preconditioner)
    solver.setNormType(PETSc.KSP.NormType.UNPRECONDITIONED)
    solver.setFromOptions()
    return solver


def _spanned(PETSc: Any, modes: Array, size: int) -> Any:
    columns = np.linalg.qr(modes)[0].T
    return PETSc.NullSpace().create(
        vectors=[PETSc.Vec().createWithArray(np.ascontiguousarray(q), bsize=size) for q in columns]
    )


def petsc_cg(PETSc: Any, solver: Any, b: Array) -> tuple[Array, int]:
    """Solve by such a solver; return x and the iterations."""
    given, x = PETSc.Vec().createWithArray(b.copy()), PETSc.Vec().createWithArray(np.zeros_like(b))
    solver.solve(given, x)
    return x.getArray().copy(), int(solver.getIterationNumber())
