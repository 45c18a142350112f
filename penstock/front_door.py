"""``penstock.solve``: one call for any symmetric positive definite matrix, resident or streamed.

A matrix larger than its memory is streamed: to a GPU from the caller's arrays, page-locked in place, or from converted ones; on a
CPU from a store on disk. The preconditioner ``"auto"`` is a coarse level where the near-null space is given, or where the matrix
is large or streamed and nearly maps constants to zero; else it is Jacobi, by blocks where the matrix has them, or, streamed, a
Chebyshev polynomial where the plan expects it to be faster. A matrix that is symmetric to rounding, as every assembled one is,
may be stored by its upper half; ``explain()`` says so.

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

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from penstock.argument_checks import checked_options
from penstock.given import GivenMatrix, GivenVectors, as_given_matrix
from penstock.progress import Reporter, RichReporter
from penstock.request import Request
from penstock.solvers import IterationRecord, PreconditionerSpec
from penstock.spmv import CPU, Device, DeviceError, parse_nbytes
from penstock.spmv.compilation.watch import compile_seconds, seconds_without_compiling
from penstock.spmv.device import cuda_device_count
from penstock.system import AnyResult, open_system

__all__ = ["find_device", "solve"]

# Seconds of compilation from which on a result tells of them.
_TOLD_SECONDS = 0.1


def solve(
    A: Any,
    b: Any,
    *,
    device: str = "auto",
    memory: int | str | None = None,
    rtol: float = 1e-8,
    atol: float = 0.0,
    maxiter: int | None = None,
    preconditioner: str | PreconditionerSpec = "auto",
    block_size: int | Literal["auto"] = "auto",
    near_null_space: Any = None,
    coordinates: Any = None,
    x0: Any = None,
    monitor: Callable[[IterationRecord], object] | None = None,
    progress: bool = False,
    folder: str | Path | None = None,
) -> AnyResult:
    """Solve ``A x = b`` for a symmetric positive definite A, whether or not it fits the memory of the device.

    Raises :class:`~penstock.spmv.InputError`, :class:`~penstock.spmv.BudgetError` or :class:`~penstock.spmv.DeviceError`.

    Parameters
    ----------
    A : SciPy, CuPy, penstock or Torch matrix, store, path of a matrix file or of a store, or operator
        Symmetric to rounding. Entries may be unsorted or given several times: they are summed in a copy.
    b : NumPy, CuPy, pandas, Torch or JAX array of real numbers, (n,), (n, 1) or (n, k)
    device : str
        ``"cpu"``, ``"cuda"``, ``"cuda:1"``, or ``"auto"``: the GPU if there is one, else the CPU.
    memory : int or str, such as "6 GiB", optional
        For the matrix on the device; by default what is free, less a tenth and the vectors.
    rtol, atol : float
        Converged means ``||b - A x|| <= max(rtol ||b||, atol)`` for each column, computed from A, b and x.
    maxiter : int, 10 n iterations by default
    preconditioner : str or PreconditionerSpec
        ``"auto"``, a registered name, or a choice with options of its own, ``ChebyshevSpec(degree=9)``.
    block_size : int or "auto"
        Rows of the dense blocks of A, such as the unknowns of a node; ``"auto"`` finds them.
    near_null_space : array, (n, k), optional
        Vectors that A nearly maps to zero; refused if the preconditioner has no use for them.
    coordinates : array, (nodes, 2) or (nodes, 3), optional
        Of the nodes of a body, whose rigid motions are then that near-null space.
    x0 : array of the shape of b, optional
    monitor : callable, optional
        ``monitor(record)`` at every look at the residual; stops the solve if it returns True.
    progress : bool, to show progress on the terminal or in the notebook
    folder : str or path, optional
        For the store of a matrix that does not fit a CPU; by default the temporary folder.

    Returns
    -------
    SolveResult, or BlockSolveResult for k > 1 columns
        ``x`` lives where b does, in its shape; ``explain()`` tells what was decided, why, and at what cost.

    Examples
    --------
    >>> import numpy as np, penstock, scipy.sparse
    >>> A = scipy.sparse.diags_array([-1.0, 4.0, -1.0], offsets=[-1, 0, 1], shape=(5, 5))
    >>> result = penstock.solve(A, A @ np.arange(1.0, 6.0), device="cpu")
    >>> result.converged, result.x.round(6).tolist()
    (True, [1.0, 2.0, 3.0, 4.0, 5.0])
    """
    options = checked_options(device, preconditioner, block_size, folder, near_null_space, coordinates)
    vectors, reporter = GivenVectors.of(b, "b"), RichReporter.on_terminal() if progress else Reporter()
    given, room = as_given_matrix(A), None if memory is None else parse_nbytes(memory)
    place, size = find_device(device, given), _block_size(block_size, vectors, coordinates)
    request = Request(place, vectors.columns, room, preconditioner, size, options, given.name)
    return _solve(given, request, vectors, x0, folder, reporter, rtol=rtol, atol=atol, maxiter=maxiter, monitor=monitor)


def _block_size(given: int | Literal["auto"], vectors: GivenVectors, coordinates: Any) -> int | Literal["auto"]:
    """Return the unknowns a node, if coordinates tell them; those that do not fit are refused later."""
    if given != "auto" or coordinates is None:
        return given
    return max(1, len(vectors.array) // max(1, len(coordinates)))


def _solve(
    given: GivenMatrix,
    request: Request,
    vectors: GivenVectors,
    x0: Any,
    folder: str | Path | None,
    reporter: Reporter,
    **limits: Any,
) -> AnyResult:
    began, compiled = seconds_without_compiling(), compile_seconds()
    guess = None if x0 is None else GivenVectors.of(x0, "x0").like(vectors)
    with open_system(given.promoted(vectors.dtype), request, folder=folder, reporter=reporter) as system:
        opened = seconds_without_compiling()
        result = system.solve(vectors, guess, **limits)
        cost = f"opened in {opened - began:.3g} s, solved in {seconds_without_compiling() - opened:.3g} s"
        if (seconds := compile_seconds() - compiled) >= _TOLD_SECONDS:
            cost += f", {seconds:.3g} s more for compiling kernels, once on a machine"
        return replace(result, decisions="\n".join([*system.explain(), f"{'time':<11} {cost}"]))


def find_device(name: str, given: GivenMatrix) -> Device:
    """Return the device of a name; ``auto`` is where the matrix lives on a GPU, else the first GPU, else the CPU."""
    if name != "auto":
        return Device.parse(name)
    if given.device is not None and given.device.kind == "cuda":
        return given.device
    with contextlib.suppress(DeviceError):
        if cuda_device_count():
            return Device("cuda")
    return CPU
