"""``penstock.jax.solve`` and ``eigsh``: solutions and eigenvalues through which JAX differentiates, under ``jax.jit`` too.

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
from penstock.driver.gradients import (
    SECOND_DERIVATIVE,
    DifferentiableSystem,
    accurate_modes,
    checked_gradient,
    eigenvalues_gradient,
    system_for,
    values_gradient,
)
from penstock.driver.inputs import as_given_matrix
from penstock.driver.prepared import PreparedSystem
from penstock.spmv import InputError, device_of

__all__ = ["eigsh", "solve"]

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
    arrays = _arrays(A, "A")
    if arrays:
        source = _Source(None, tuple(A.shape), rtol, maxiter, options)
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
            A = _matrix(arrays, self.shape)
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


def _arrays(A: Any, name: str) -> _Arrays:
    """Return the arrays of a sparse matrix; of other matrices none."""
    if not is_sparse_of_jax(A):
        if _traced(A):
            raise InputError(
                f"{name} is a dense array that JAX traces; give a BCSR or BCOO matrix, whose values pass gradients on"
            )
        return ()
    check_sparse_of_jax(A)
    return (A.data, A.indices, *([A.indptr] if hasattr(A, "indptr") else []))


def _matrix(arrays: _Arrays, shape: tuple[int, int]) -> scipy.sparse.csr_array:
    values, rows, columns, stored = _entries(arrays, shape[0])
    entries = (values[stored], (rows[stored], columns[stored]))
    return scipy.sparse.csr_array(entries, shape=shape)  # sums entries that are given several times


def _entries(arrays: _Arrays, n: int) -> _Arrays:
    """Return values, rows and columns of the entries, and which of them are of the matrix: others fill the arrays up."""
    values, *places = map(np.asarray, arrays)
    if not places:  # a diagonal
        return values, np.arange(n), np.arange(n), np.ones(n, dtype=bool)
    indices, *offsets = places
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


def eigsh(K: Any, k: int = 10, M: Any = None, **options: Any) -> tuple[jax.Array, jax.Array]:
    """Return the k lowest eigenvalues of ``K x = lambda M x``, which JAX differentiates, and their vectors.

    Parameters
    ----------
    K : BCSR or BCOO matrix, PreparedSystem, or any matrix of :func:`penstock.eigsh`
        The values of a BCSR or BCOO matrix get gradients: ``x_i x_j`` for the entry (i, j), which is symmetric as K is.
    k : int
    M : None, JAX array (n,), BCSR or BCOO matrix, or any mass of :func:`penstock.eigsh`
        The values of JAX arrays get gradients: ``-lambda x_i x_j``.
    **options
        Those of :func:`penstock.eigsh`, or of :meth:`PreparedSystem.eigsh`. Gradients are accurate to about ``tol`` over the
        relative distance to the next eigenvalue.

    Returns
    -------
    values : array, (k,)
    vectors : array, (n, k)
        M-orthonormal. They pass no gradients on. Both are of float64 where JAX has it enabled.

    Raises
    ------
    NotConvergedError
        If the modes are not accurate.
    InputError
        If an argument is not usable; when gradients are computed, if equal eigenvalues have different ones or do not all belong
        to the k lowest, or if a second derivative is asked for.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, penstock.jax
    >>> from jax.experimental.sparse import BCOO
    >>> places = jnp.array([[0, 0], [1, 1]])
    >>> def second(stiffness, masses):
    ...     K = BCOO((stiffness, places), shape=(2, 2))
    ...     return penstock.jax.eigsh(K, 2, masses, device="cpu")[0][1]
    >>> gradients = jax.grad(second, argnums=(0, 1))(jnp.array([2.0, 4.0]), jnp.array([1.0, 0.5]))
    >>> [gradient.round(4).tolist() for gradient in gradients]
    [[0.0, 2.0], [0.0, -16.0]]
    """
    of_k = _arrays(K, "K")
    diagonal = isinstance(M, jax.Array) and M.ndim == 1
    of_m = (M,) if diagonal else _arrays(M, "M")
    n = K.shape[0] if hasattr(K, "shape") else as_given_matrix(K).rows
    search = _Search(None if of_k else K, int(n), k, None if of_m else M, options)
    values, vectors = _modes(search, of_k, of_m)
    return values, jax.lax.stop_gradient(vectors)


@dataclass(frozen=True, eq=False)
class _Search:
    """What is looked for: K and M, unless they are made of arrays of JAX; its methods run on the host."""

    K: Any
    n: int
    k: int
    M: Any
    options: dict[str, Any]

    def forward(self, of_k: _Arrays, of_m: _Arrays) -> _Arrays:
        """Return values and vectors, the next value or NaN, and how many values are zero."""
        shape = (self.n, self.n)
        K, M = _matrix(of_k, shape) if of_k else self.K, self.M
        if of_m:
            M = np.asarray(of_m[0]) if len(of_m) == 1 else _matrix(of_m, shape)
        modes = accurate_modes(K, self.k, M, self.options)
        following = np.nan if modes.next_value is None else modes.next_value
        found = (modes.values, device_of(modes.vectors).to_host(modes.vectors), following, modes.zeros)
        return tuple(np.asarray(one, like.dtype) for one, like in zip(found, self.results, strict=True))

    @property
    def results(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What :meth:`forward` returns."""
        of_float = jax.dtypes.canonicalize_dtype(np.float64)
        shapes = ((self.k,), of_float), ((self.n, self.k), of_float), ((), of_float), ((), jnp.int32)
        return tuple(jax.ShapeDtypeStruct(*one) for one in shapes)

    def backward(self, of_k: _Arrays, of_m: _Arrays, found: _Arrays, gradient: Any) -> _Arrays:
        """Return the gradients of the values of K and M, of those that are arrays of JAX."""
        values, X, following, zeros = map(np.asarray, found)
        weights = checked_gradient(values, int(zeros), float(following), np.asarray(gradient))
        gradients = []
        for arrays, of_each in ((of_k, weights), (of_m, -weights * values)):
            if arrays:
                entries, rows, columns, stored = _entries(arrays, self.n)
                of_entries = np.zeros_like(entries)
                of_entries[stored] = eigenvalues_gradient(rows[stored], columns[stored], X, of_each)
                gradients.append(of_entries)
        return tuple(gradients)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _modes(search: _Search, of_k: _Arrays, of_m: _Arrays) -> Any:
    return _find(search, of_k, of_m)[0]


def _find(search: _Search, of_k: _Arrays, of_m: _Arrays) -> tuple[Any, Any]:
    count = len(of_k)
    found = _on_host(lambda *arrays: search.forward(arrays[:count], arrays[count:]), search.results, *of_k, *of_m)
    return found[:2], (of_k, of_m, found)


def _pull_back(search: _Search, residuals: tuple[Any, ...], gradients: _Arrays) -> tuple[Any, Any]:
    of_k, of_m, found = residuals
    results = tuple(_like(arrays[0]) for arrays in (of_k, of_m) if arrays)
    if not results:
        return (), ()
    of_values = list(_on_host(search.backward, results, of_k, of_m, found, gradients[0]))

    def own(arrays: _Arrays) -> _Arrays:
        return (of_values.pop(0), *[None] * len(arrays[1:])) if arrays else ()

    return own(of_k), own(of_m)


_modes.defvjp(_find, _pull_back)
