"""``penstock.solve``: one call for any symmetric positive definite matrix, resident or streamed.

A matrix larger than its memory is streamed: to a GPU from the caller's arrays, page-locked in place, or from converted ones; on a
CPU from a store on disk. The preconditioner ``"auto"`` is a coarse level where the near-null space is given, or where the matrix
is large or streamed and nearly maps constants to zero; else it is Jacobi, by blocks where the matrix has them, or, streamed, a
Chebyshev polynomial where the plan expects it to be faster. A matrix that is symmetric to rounding, as every assembled one is,
may be stored by its upper half; ``explain()`` says so.

Up to 5,000 unknowns on a CPU, of which the caller decides nothing but tolerances, are not iterated: LAPACK factorises A, and no
kernel is compiled.

Errors: :class:`InputError` if A is not square, not symmetric to rounding, or has a diagonal entry that is not positive, or if an
option or a vector does not fit; :class:`BudgetError` if the memory holds neither the matrix nor two slots of it, or not the
vectors; :class:`DeviceError` if the device is not there.

>>> import penstock
>>> from penstock.fem import Cantilever
>>> beam = Cantilever(nodes=(9, 3, 3), dof=3)
>>> result = penstock.solve(beam.matrix().to_csr(), beam.load(), device="cpu")
>>> result.converged, result.x.shape
(True, (243,))
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from penstock.driver.argument_checks import OnFailure, checked_failure, checked_options, checked_precision
from penstock.driver.direct import solve_directly
from penstock.driver.inputs import GivenVectors
from penstock.driver.open_system import AnyResult
from penstock.driver.prepared import PreparedSystem
from penstock.driver.progress import Reporter, RichReporter
from penstock.solvers import IterationRecord
from penstock.solvers.checks import check_maxiter, check_tolerances


def solve(
    A: Any,
    b: Any,
    *,
    device: str = "auto",
    memory: int | str | None = None,
    rtol: float = 1e-8,
    atol: float = 0.0,
    maxiter: int | None = None,
    preconditioner: Any = "auto",
    block_size: int | Literal["auto"] = "auto",
    near_null_space: Any = None,
    coordinates: Any = None,
    null_space: Any = None,
    method: str = "auto",
    precision: str = "auto",
    verify: str = "bound",
    x0: Any = None,
    monitor: Callable[[IterationRecord], object] | None = None,
    progress: bool = False,
    folder: str | Path | None = None,
    on_failure: OnFailure = "warn",
) -> AnyResult:
    """Solve ``A x = b`` for a symmetric positive definite A, whether or not it fits the memory of the device.

    Raises :class:`~penstock.spmv.InputError`, :class:`~penstock.spmv.BudgetError` or :class:`~penstock.spmv.DeviceError`.

    Parameters
    ----------
    A : SciPy, CuPy, penstock, Torch or JAX matrix, store, path of a matrix file or of a store, or operator
        Symmetric to rounding. Entries may be unsorted or given several times: they are summed in a copy.
    b : NumPy, CuPy, pandas, Torch or JAX array of real numbers, (n,), (n, 1) or (n, k)
    device : str
        ``"cpu"``, ``"cuda"``, ``"cuda:1"``, or ``"auto"``: the GPU if there is one, else the CPU.
    memory : int or str, such as "6 GiB", optional
        For the matrix on the device; by default what is free, less a tenth and the vectors.
    rtol, atol : float
        Converged means ``||b - A x|| <= max(rtol ||b||, atol)`` for each column, computed from A, b and x.
    maxiter : int, 10 n iterations by default
    preconditioner : str, PreconditionerSpec, operator, matrix or function
        ``"auto"``, a registered name, a choice with options of its own, ``ChebyshevSpec(degree=9)``, or what approximates the
        inverse of A, symmetric positive definite.
    block_size : int or "auto"
        Rows of the dense blocks of A, such as the unknowns of a node; ``"auto"`` finds them.
    near_null_space : array, (n, k), optional
        Vectors that A nearly maps to zero; refused if the preconditioner has no use for them.
    coordinates : array, (nodes, 2) or (nodes, 3), optional
        Of the nodes of a body, whose rigid motions are then that near-null space. The unknowns of a node follow each other in A.
    null_space : "constants" or array, (n,) or (n, k), optional
        What a singular A maps to zero: removed from b, so that there is a solution, and from x, which makes it the shortest one.
    method : str
        ``"cg"``, which ``"auto"`` is, or ``"minres"`` for a symmetric A that need not be positive definite.
    precision : {"auto", "float32", "int16", "float64"}
        Of the values held in memory of a matrix that does not fit. With ``"float32"`` or ``"int16"``, of which ``"auto"``
        takes the first that fits, iterations use these alone, and A itself is read one to seven times in a solve to 1e-8; with
        ``"float64"`` it is streamed in every iteration. Solutions and residuals are of float64 in any case.
    verify : {"bound", "norm"}
        What ends such a solve: a bound of the residual, with an allowance for rounding, or a residual for which A is read once
        more.
    x0 : array of the shape of b, optional
    monitor : callable, optional
        ``monitor(record)`` at every look at the residual; stops the solve if it returns True.
    progress : bool, to show progress on the terminal or in the notebook
    folder : str or path, optional
        For the store of a matrix that does not fit a CPU; by default the temporary folder.
    on_failure : {"warn", "return", "raise"}
        What happens if a right-hand side does not converge: the result is returned with a
        :class:`~penstock.spmv.NotConvergedWarning`, or silently, or a :class:`~penstock.spmv.NotConvergedError` is raised.

    Returns
    -------
    SolveResult, or BlockSolveResult for k > 1 columns
        ``x`` lives where b does, in its shape; ``explain()`` says what was decided, why, and at what cost. If A and b are of
        float32, so is x: the solve itself is in float64, to 6e-8 at best, and ``converged`` speaks of it; ``true_residual`` is
        that of the rounded x, which may be larger.

    See Also
    --------
    prepare : Set the system up once, for many right-hand sides and for new values.

    Examples
    --------
    >>> import numpy as np, penstock, scipy.sparse
    >>> A = scipy.sparse.diags_array([-1.0, 4.0, -1.0], offsets=[-1, 0, 1], shape=(5, 5))
    >>> result = penstock.solve(A, A @ np.arange(1.0, 6.0), device="cpu")
    >>> result.converged, result.x.round(6).tolist()
    (True, [1.0, 2.0, 3.0, 4.0, 5.0])
    """
    vectors = GivenVectors.of(b, "b")
    checked_failure(on_failure)
    check_tolerances(rtol, atol)
    check_maxiter(maxiter)
    options = checked_options(device, preconditioner, block_size, folder, near_null_space, coordinates)
    reporter = RichReporter.on_terminal() if progress else Reporter()
    choices: dict[str, Any] = {"device": device, "memory": memory, "preconditioner": preconditioner, "options": options}
    choices |= {"block_size": block_size, "null_space": null_space, "method": method, "precision": precision}
    choices |= {"verify": verify, "folder": folder}
    guess = None if x0 is None else GivenVectors.of(x0, "x0").like(vectors)
    limits: dict[str, Any] = {"rtol": rtol, "atol": atol, "maxiter": maxiter, "monitor": monitor}
    checked_precision(precision, verify)
    unset = all(value is None for value in (memory, maxiter, null_space, x0, monitor, folder))
    if unset and all(
        isinstance(name, str) and name == "auto" for name in (preconditioner, block_size, method, precision)
    ):
        answer = solve_directly(A, vectors, options, device=device, rtol=rtol, atol=atol, reporter=reporter)
        if answer is not None:
            return answer
    with PreparedSystem(A, vectors.columns, reporter, updatable=False, **choices) as system:
        return system.solve_vectors(vectors, guess, limits, on_failure)
