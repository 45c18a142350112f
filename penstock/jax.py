"""``penstock.jax.solve``: solutions of sparse systems through which JAX differentiates, under ``jax.jit`` too.

>>> import jax, jax.numpy as jnp, penstock.jax
>>> from jax.experimental.sparse import BCSR
>>> line = BCSR.fromdense(jnp.array([[2.0, -1.0, 0.0], [-1.0, 2.0, -1.0], [0.0, -1.0, 2.0]]))
>>> jax.grad(lambda b: penstock.jax.solve(line, b, device="cpu").sum())(jnp.ones(3)).round(4).tolist()
[1.5, 2.0, 1.5]
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from penstock.driver.foreign import check_sparse_of_jax, is_sparse_of_jax
from penstock.driver.gradients import SECOND_DERIVATIVE, DifferentiableSystem, system_for, values_gradient
from penstock.driver.prepared import PreparedSystem
from penstock.spmv import InputError

__all__ = ["solve"]

_Arrays = tuple[Any, ...]
_SetUp = Callable[[], DifferentiableSystem | None]


def solve(A: Any, b: Any, *, rtol: float = 1e-8, maxiter: int | None = None, **options: Any) -> jax.Array:
    """Return the solution x of ``A x = b``, whose gradients are solves with the same matrix.

    Vectors pass through the memory of the host. Under ``jit`` and ``vmap``, errors arrive inside one of JAX, and a matrix that is
    not prepared is set up once for the solve and once for its gradient.

    Parameters
    ----------
    A : BCSR or BCOO matrix, PreparedSystem, or any matrix of :func:`penstock.solve`
        Symmetric positive definite. The values of a BCSR or BCOO matrix get gradients, those of others do not. The gradient is
        symmetric as A is: ``-(lambda_i x_j + lambda_j x_i) / 2`` for the entry (i, j), summed over the columns, where
        ``A lambda`` is the gradient of x.
    b : array, (n,) or (n, k), of float64 or float32
    rtol : float
        Tolerance of the solve, and of that for the gradient.
    maxiter : int, optional
        Of each solve.
    **options
        Those of :func:`penstock.prepare`, for a matrix that is not prepared.

    Returns
    -------
    array
        Of the shape and type of b.

    Raises
    ------
    NotConvergedError
        If the solve, or that for the gradient, does not converge.
    InputError
        If an argument is not usable, if a second derivative is asked for, or if the prepared system was updated between the
        solve and its gradient.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, penstock.jax
    >>> from jax.experimental.sparse import BCOO
    >>> places = jnp.array([[0, 0], [1, 1]])
    >>> def loss(stiffness):
    ...     A = BCOO((stiffness, places), shape=(2, 2))
    ...     return penstock.jax.solve(A, jnp.ones(2), device="cpu").sum()
    >>> jax.grad(loss)(jnp.array([2.0, 4.0])).round(4).tolist()
    [-0.25, -0.0625]
    """
    b = jnp.asarray(b)
    if b.dtype not in (jnp.float64, jnp.float32) or b.ndim not in (1, 2):
        raise InputError(
            f"b must be of float64 or float32 and of shape (n,) or (n, k), not {b.dtype} of shape {b.shape}"
        )
    arrays: _Arrays = ()
    if is_sparse_of_jax(A):
        check_sparse_of_jax(A)
        arrays = (A.data, A.indices, *([A.indptr] if hasattr(A, "indptr") else []))
        source = _Source(None, tuple(A.shape), rtol, maxiter, options)
    elif _traced(A):
        raise InputError(
            "A is a dense array that JAX traces; give a BCSR or BCOO matrix, whose values pass gradients on"
        )
    else:
        system = system_for(A, b.shape[1] if b.ndim == 2 else 1, options)
        source = _Source(system, system.shape, rtol, maxiter)
    x: jax.Array = _solve(source, arrays, b)
    return x


@dataclass(frozen=True, eq=False)
class _Source:
    """A prepared system, or how one is made of the arrays of a sparse matrix; its methods run on the host."""

    system: PreparedSystem | None
    shape: tuple[int, int]
    rtol: float
    maxiter: int | None
    options: dict[str, Any] = field(default_factory=dict)

    def set_up(self, arrays: _Arrays, b: Any) -> DifferentiableSystem:
        system = self.system
        if system is None:
            values, rows, columns, stored = _entries(arrays, self.shape[0])
            entries = (values[stored], (rows[stored], columns[stored]))
            A = scipy.sparse.csr_array(entries, shape=self.shape)  # sums entries that are given several times
            system = system_for(A, b.shape[1] if b.ndim == 2 else 1, self.options)
        return DifferentiableSystem(system, self.rtol, self.maxiter)

    def forward(self, system: _SetUp, arrays: _Arrays, b: Any) -> _Arrays:
        """Return x, and the version of the values that it was solved for."""
        b = np.asarray(b)
        known = system() or self.set_up(arrays, b)
        version = known.system.version
        return known.solve(b).astype(b.dtype, copy=False), np.int32(version)

    def backward(self, system: _SetUp, arrays: _Arrays, x: Any, version: Any, gradient: Any) -> _Arrays:
        """Return the gradients of b, and of the values if there are any."""
        x, gradient = np.asarray(x), np.asarray(gradient)
        known = system() or self.set_up(arrays, x)
        adjoint = known.adjoint(gradient, int(version)).astype(x.dtype, copy=False)
        if not arrays:
            return (adjoint,)
        values, rows, columns, stored = _entries(arrays, self.shape[0])
        of_values = np.zeros_like(values)
        of_values[stored] = values_gradient(rows[stored], columns[stored], adjoint, x)
        return adjoint, of_values


def _entries(arrays: _Arrays, n: int) -> _Arrays:
    """Return values, rows and columns of the entries, and which of them are of the matrix: others fill the arrays up."""
    values, indices, *offsets = map(np.asarray, arrays)
    if not offsets:
        rows, columns = indices.T
        return values, rows, columns, (rows < n) & (columns < n)
    rows = np.full(len(values), n)
    rows[: offsets[0][-1]] = np.repeat(np.arange(n), np.diff(offsets[0]))
    return values, rows, indices, rows < n


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class _Kept:
    """What the backward pass of a solve outside ``jit`` finds set up."""

    system: DifferentiableSystem | None


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _on_host(function: Callable[..., _Arrays], results: _Arrays, *arrays: Any) -> _Arrays:
    """Call a function on the host, at once or, where JAX traces, when the traced program runs."""
    if _traced(arrays):
        called: _Arrays = jax.pure_callback(function, results, *arrays, vmap_method="sequential")
        return called
    return tuple(jnp.asarray(result) for result in function(*arrays))


@_on_host.defjvp
def _refuse_second_derivative(*_: Any) -> Any:
    raise InputError(SECOND_DERIVATIVE)


def _traced(arrays: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree_util.tree_leaves(arrays))


def _like(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _solve(source: _Source, arrays: _Arrays, b: jax.Array) -> Any:
    return _forward(source, arrays, b)[0]


def _forward(source: _Source, arrays: _Arrays, b: jax.Array) -> tuple[Any, Any]:
    kept = None if _traced((arrays, b)) else source.set_up(arrays, b)
    results = (_like(b), jax.ShapeDtypeStruct((), jnp.int32))
    x, version = _on_host(partial(source.forward, lambda: kept), results, arrays, b)
    return x, (_Kept(kept), arrays, x, version)


def _backward(source: _Source, residuals: tuple[Any, ...], gradient: jax.Array) -> tuple[Any, Any]:
    kept, arrays, x, version = residuals
    # JAX may remember a function that it calls later: it must not keep the system alive.
    system = weakref.ref(kept.system) if kept.system is not None else _nothing
    results = (_like(x), *map(_like, arrays[:1]))
    adjoint, *of_values = _on_host(partial(source.backward, system), results, arrays, x, version, gradient)
    return (*of_values, *[None] * len(arrays[1:])), adjoint


def _nothing() -> None:
    """Stand for a system that is not set up yet."""


_solve.defvjp(_forward, _backward)
