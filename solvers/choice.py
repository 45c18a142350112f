"""The methods that a user chooses by name: what each needs to know of a matrix, its memory, and the call that solves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.solvers.block_cg import block_cg, block_cg_workspace_nbytes
from penstock.solvers.cg import cg, cg_workspace_nbytes
from penstock.solvers.result import BlockSolveResult, SolveResult
from penstock.spmv import Array, InputError
from penstock.spmv.registry import Registry


@dataclass(frozen=True)
class MethodChoice:
    """A method that is chosen by name.

    Parameters
    ----------
    label : str
        What plans call it.
    solve : callable
        ``solve(A, b, x0, M=, rtol=, atol=, maxiter=, monitor=, state=)`` for b of shape (n,) or (n, columns), up to 64 columns.
    workspace_nbytes : callable
        ``workspace_nbytes(n, columns, dtype)``: bytes of its vectors, without those of the preconditioner.
    definite : bool
        Whether the matrix must be positive definite.
    largest_block : int, optional
        The most vectors that it iterates together, if the blocks of right-hand sides do not limit it.
    iterates : str
        What plans call one of these vectors.

    Examples
    --------
    >>> from penstock.solvers import METHODS, MethodChoice
    >>> isinstance(METHODS["minres"], MethodChoice), METHODS["minres"].workspace_nbytes(1_000_000, 1, "float64")
    (True, 88000000)
    """

    label: str
    solve: Callable[..., SolveResult | BlockSolveResult]
    workspace_nbytes: Callable[[int, int, Any], int]
    definite: bool = True
    largest_block: int | None = None
    iterates: str = "right-hand side"

    def described(self, together: int) -> str:
        """Return what plans say of the method with a number of vectors."""
        vectors = f"blocks of {together} {self.iterates}s" if together > 1 else f"one {self.iterates}"
        return f"{self.label} for {vectors}"


#: All of them by name; packages add theirs in the entry point group ``penstock.methods``.
METHODS: Registry[str, MethodChoice] = Registry("method", "penstock.methods")


def method_named(name: str) -> MethodChoice:
    """Return the method of a name; ``auto`` is conjugate gradients.

    Parameters
    ----------
    name : str

    Raises
    ------
    InputError
        If no method has this name; the message lists the registered names.

    Examples
    --------
    >>> from penstock.solvers import method_named
    >>> method_named("auto").label, method_named("minres").definite
    ('conjugate gradients', False)
    """
    if not isinstance(name, str):
        raise InputError(f"method must be 'auto' or one of {', '.join(METHODS.keys())}, not {name!r}")
    return METHODS["cg" if name == "auto" else name]


def _solve_by_cg(A: Any, b: Array, x0: Array | None = None, **options: Any) -> SolveResult | BlockSolveResult:
    return (cg if b.ndim == 1 else block_cg)(A, b, x0, **options)


def _nbytes_of_cg(n: int, columns: int, dtype: Any = np.float64) -> int:
    return cg_workspace_nbytes(n, dtype) if columns == 1 else block_cg_workspace_nbytes(n, columns, dtype)


METHODS.add("cg", MethodChoice("conjugate gradients", _solve_by_cg, _nbytes_of_cg))
