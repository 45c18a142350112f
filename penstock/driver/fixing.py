"""Prescribed values: the system of the free unknowns, which stays symmetric, and the way back to all unknowns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse

from penstock.spmv import InputError
from penstock.spmv.errors import advice_on_type
from penstock.spmv.formats.validation import check_indices


@dataclass(frozen=True)
class FixedSystem:
    """The system of the free unknowns; ``A, b, restore = fix(...)`` works too.

    Parameters
    ----------
    A : scipy.sparse.csr_array, (free, free)
    b : float64 array, (free,) or (free, k)
    free : int array, (free,)
        Numbers of the free unknowns, ascending.
    fixed : int array, (fixed,)
        Numbers of the others.
    values : float64 array, (fixed,) or (fixed, k)
    """

    A: scipy.sparse.csr_array
    b: np.ndarray[Any, Any]
    free: np.ndarray[Any, Any]
    fixed: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any]

    def restore(self, x: Any) -> np.ndarray[Any, Any]:
        """Return all unknowns from the free ones: (n,) or (n, k)."""
        x = np.asarray(x)
        if x.shape != self.b.shape:
            raise InputError(f"x must have the shape of the reduced b, {self.b.shape}, not {x.shape}")
        whole = np.empty((len(self.free) + len(self.fixed), *x.shape[1:]), dtype=x.dtype)
        whole[self.free], whole[self.fixed] = x, self.values
        return whole

    def __iter__(self) -> Any:
        return iter((self.A, self.b, self.restore))


def fix(A: Any, b: Any, unknowns: Any, values: Any = 0.0) -> FixedSystem:
    """Return the system that remains when some unknowns have prescribed values, such as those at a boundary.

    ``A_ff x_f = b_f - A_fc values``. If A is symmetric, so is ``A_ff``; rows of fixed unknowns, whatever they hold, play no part.

    Parameters
    ----------
    A : SciPy sparse matrix or dense array, (n, n)
    b : array, (n,) or (n, k)
    unknowns : int array, (fixed,), or bool array, (n,)
        Which unknowns are fixed.
    values : float or array, (fixed,) or (fixed, k)
        Their values.

    Returns
    -------
    FixedSystem
        With the reduced ``A`` and ``b``, and ``restore(x)``, which puts the fixed values back.

    Raises
    ------
    InputError
        If shapes do not fit, or an unknown is named twice or does not exist.

    Examples
    --------
    >>> import numpy as np, penstock, scipy.sparse
    >>> A = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(5, 5))
    >>> reduced = penstock.fix(A, np.zeros(5), unknowns=[0, 4], values=[1.0, 5.0])
    >>> reduced.restore(penstock.solve(reduced.A, reduced.b, device="cpu").x).round(6).tolist()
    [1.0, 2.0, 3.0, 4.0, 5.0]
    """
    if not (scipy.sparse.issparse(A) or isinstance(A, np.ndarray)) or scipy.sparse.issparse(b):
        raise InputError(
            f"fix takes a SciPy matrix or a dense array and an array, not {type(A).__name__} and {type(b).__name__}"
        )
    if scipy.sparse.issparse(A):
        check_indices(A, "A")  # which SciPy would follow anywhere
    matrix, prescribed = scipy.sparse.csr_array(A), np.asarray(values)
    n, right = matrix.shape[0], np.asarray(b)
    for name, of in (("A", matrix), ("b", right), ("values", prescribed)):
        if of.dtype.kind not in "fiub":
            raise InputError(f"{name} has type {of.dtype}; {advice_on_type(of.dtype.kind)}")
    right, prescribed = right.astype(np.float64), prescribed.astype(np.float64)
    if matrix.shape != (n, n) or right.ndim not in (1, 2) or len(right) != n:
        raise InputError(
            f"A of shape {matrix.shape} and b of shape {right.shape} are no system; expected (n, n) and (n,) or (n, k)"
        )
    fixed = np.asarray(unknowns)
    fixed = np.flatnonzero(fixed) if fixed.dtype == np.bool_ and fixed.shape == (n,) else fixed.reshape(-1)
    if fixed.size and (
        fixed.dtype.kind not in "iu" or fixed.min() < 0 or fixed.max() >= n or len(np.unique(fixed)) < fixed.size
    ):
        raise InputError(f"unknowns must be different numbers of 0 to {n - 1}, or {n} truth values")
    fixed = fixed.astype(np.int64)
    try:
        prescribed = np.broadcast_to(
            prescribed[:, None] if prescribed.ndim == 1 and right.ndim == 2 else prescribed,
            (fixed.size, *right.shape[1:]),
        )
    except ValueError:
        raise InputError(
            f"values of shape {prescribed.shape} do not fit {fixed.size} unknowns and b of shape {right.shape}"
        ) from None
    free = np.setdiff1d(np.arange(n), fixed)
    rows = matrix[free]
    reduced = right[free] - rows[:, fixed] @ prescribed
    return FixedSystem(scipy.sparse.csr_array(rows[:, free]), reduced, free, fixed, prescribed)
