"""``penstock.torch.solve`` and ``eigsh``: solutions of sparse systems, and eigenvalues, through which Torch differentiates.

>>> import penstock.torch, torch
>>> line = torch.tensor([[2.0, -1.0, 0.0], [-1.0, 2.0, -1.0], [0.0, -1.0, 2.0]], dtype=torch.float64).to_sparse_csr()
>>> b = torch.ones(3, dtype=torch.float64, requires_grad=True)
>>> penstock.torch.solve(line, b, device="cpu").sum().backward()
>>> b.grad
tensor([1.5000, 2.0000, 1.5000], dtype=torch.float64)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from penstock.driver.foreign import like
from penstock.driver.gradients import (
    SECOND_DERIVATIVE,
    DifferentiableSystem,
    accurate_modes,
    checked_gradient,
    eigenvalues_gradient,
    system_for,
    values_gradient,
)
from penstock.spmv import InputError
from penstock.spmv.foreign import as_array

__all__ = ["eigsh", "solve"]


def solve(A: Any, b: Any, *, rtol: float = 1e-8, maxiter: int | None = None, **options: Any) -> torch.Tensor:
    """Return the solution x of ``A x = b``, whose gradients are solves with the same matrix.

    Parameters
    ----------
    A : sparse tensor (CSR or COO), PreparedSystem, or any matrix of :func:`penstock.solve`
        Symmetric positive definite. The values of a sparse tensor get gradients, those of others do not. The gradient is
        symmetric as A is: ``-(lambda_i x_j + lambda_j x_i) / 2`` for the entry (i, j), summed over the columns, where
        ``A lambda`` is the gradient of x.
    b : tensor, (n,) or (n, k), of float64 or float32
    rtol : float
        Tolerance of the solve, and of that for the gradient.
    maxiter : int, optional
        Of each solve.
    **options
        Those of :func:`penstock.prepare`, for a matrix that is not prepared.

    Returns
    -------
    tensor
        Of the shape, type and device of b.

    Raises
    ------
    NotConvergedError
        If the solve, or that for the gradient, does not converge.
    InputError
        If an argument is not usable; in the backward pass, if a second derivative is asked for, or if the prepared system was
        updated after the solve.

    Examples
    --------
    >>> import penstock.torch, torch
    >>> stiffness = torch.tensor([2.0, 4.0], dtype=torch.float64, requires_grad=True)
    >>> A = torch.sparse_coo_tensor([[0, 1], [0, 1]], stiffness)
    >>> penstock.torch.solve(A, torch.ones(2, dtype=torch.float64), device="cpu").sum().backward()
    >>> stiffness.grad
    tensor([-0.2500, -0.0625], dtype=torch.float64)
    """
    if not isinstance(b, torch.Tensor) or b.dtype not in (torch.float64, torch.float32):
        raise InputError(f"b must be a tensor of float64 or float32, not {getattr(b, 'dtype', type(b).__name__)}")
    A = _checked(A, "A")
    system = system_for(_detached(A), b.shape[1] if b.ndim == 2 else 1, options)
    x: torch.Tensor = _Solve.apply(DifferentiableSystem(system, rtol, maxiter), *_entries(A), b)
    return x


def eigsh(K: Any, k: int = 10, M: Any = None, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k lowest eigenvalues of ``K x = lambda M x``, which Torch differentiates, and their vectors.

    Parameters
    ----------
    K : sparse tensor (CSR or COO), PreparedSystem, or any matrix of :func:`penstock.eigsh`
        The values of a sparse tensor get gradients: ``x_i x_j`` for the entry (i, j), which is symmetric as K is.
    k : int
    M : None, tensor (n,), sparse tensor, or any mass of :func:`penstock.eigsh`
        The values of a tensor get gradients: ``-lambda x_i x_j``.
    **options
        Those of :func:`penstock.eigsh`, or of :meth:`PreparedSystem.eigsh`. Gradients are accurate to about ``tol`` over the
        relative distance to the next eigenvalue.

    Returns
    -------
    values : tensor, (k,), of float64
    vectors : tensor, (n, k), of float64
        M-orthonormal, on the device that computes. They pass no gradients on.

    Raises
    ------
    NotConvergedError
        If the modes are not accurate.
    InputError
        If an argument is not usable; in the backward pass, if equal eigenvalues have different gradients or do not all belong to
        the k lowest ones, or if a second derivative is asked for.

    Examples
    --------
    >>> import penstock.torch, torch
    >>> stiffness = torch.tensor([2.0, 4.0], dtype=torch.float64, requires_grad=True)
    >>> masses = torch.tensor([1.0, 0.5], dtype=torch.float64, requires_grad=True)
    >>> K = torch.sparse_coo_tensor([[0, 1], [0, 1]], stiffness)
    >>> values, _ = penstock.torch.eigsh(K, 2, masses, device="cpu")
    >>> values[1].backward()
    >>> values.detach(), stiffness.grad, masses.grad
    (tensor([2., 8.], dtype=torch.float64), tensor([0., 2.], dtype=torch.float64), tensor([  0., -16.], dtype=torch.float64))
    """
    K, M = _checked(K, "K"), _checked(M, "M", diagonal=True)
    values, vectors = _Eigsh.apply((_detached(K), k, _detached(M), options), *_entries(K), *_entries(M))
    return values, vectors


def _checked(A: Any, name: str, *, diagonal: bool = False) -> Any:
    """Return a matrix whose entries are in a definite order, if it is a tensor; refuse one that cannot pass gradients on."""
    if not isinstance(A, torch.Tensor) or (diagonal and A.layout == torch.strided and A.ndim == 1):
        return A
    if A.requires_grad and A.layout not in (torch.sparse_coo, torch.sparse_csr):
        raise InputError(
            f"{name} requires gradients and has the layout {A.layout}; give {name}.to_sparse_csr(), which passes them on"
        )
    return A.coalesce() if A.layout == torch.sparse_coo else A


def _detached(A: Any) -> Any:
    return A.detach() if isinstance(A, torch.Tensor) else A


def _entries(A: Any) -> tuple[Any, Any, Any]:
    """Return rows, columns and values of the entries of a sparse tensor, or of a diagonal; of other matrices none."""
    layout = getattr(A, "layout", None)
    if layout == torch.strided and A.ndim == 1:
        places = torch.arange(len(A), device=A.device)
        return places, places, A
    if layout == torch.sparse_coo:
        return *A.indices(), A.values()
    if layout == torch.sparse_csr:
        return torch.repeat_interleave(A.crow_indices().diff()), A.col_indices(), A.values()
    return None, None, None


class _Solve(torch.autograd.Function):
    """The solve as an operation that Torch differentiates."""

    @staticmethod
    def forward(
        ctx: Any, system: DifferentiableSystem, rows: Any, columns: Any, values: torch.Tensor | None, b: torch.Tensor
    ) -> torch.Tensor:
        ctx.system, ctx.version = system, system.system.version
        x: torch.Tensor = system.solve(b).to(b.dtype)
        # Values are saved for Torch to notice if they are changed in place: the system may use them where they are.
        ctx.save_for_backward(rows, columns, values, x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # refused now: Torch drops what is recorded beyond the values of a sparse tensor
            raise InputError(f"create_graph=True: {SECOND_DERIVATIVE}")
        rows, columns, values, x = ctx.saved_tensors
        adjoint = ctx.system.adjoint(gradient.contiguous(), ctx.version)
        of_values = None
        if ctx.needs_input_grad[3]:
            arrays = (as_array(tensor.to(x.device)) for tensor in (rows, columns, adjoint, x))
            of_values = like(values, values_gradient(*arrays)).to(values)
        return None, None, None, of_values, adjoint


class _Eigsh(torch.autograd.Function):
    """The search for modes as an operation that Torch differentiates."""

    @staticmethod
    def forward(
        ctx: Any, search: Any, *entries: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:  # rows, columns and values of K and M
        K, k, M, options = search
        modes = accurate_modes(K, k, M, options)
        vectors = torch.from_dlpack(modes.vectors)
        values = torch.tensor(np.ascontiguousarray(modes.values), device=vectors.device)
        ctx.zeros, ctx.next_value = modes.zeros, np.nan if modes.next_value is None else modes.next_value
        ctx.mark_non_differentiable(vectors)
        ctx.save_for_backward(*entries, values, vectors)
        return values, vectors

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # as for a solve
            raise InputError(f"create_graph=True: {SECOND_DERIVATIVE}")
        *entries, values, vectors = ctx.saved_tensors
        of_values = checked_gradient(values.cpu().numpy(), ctx.zeros, ctx.next_value, gradient.cpu().numpy())
        weights = torch.tensor(of_values, device=values.device)
        results: list[torch.Tensor | None] = [None]
        for number, of_each in ((0, weights), (3, -weights * values)):
            rows, columns, of_matrix = entries[number : number + 3]
            results += [None, None, None]
            if ctx.needs_input_grad[number + 3]:
                arrays = (as_array(tensor.to(vectors.device)) for tensor in (rows, columns, vectors, of_each))
                results[-1] = like(of_matrix, eigenvalues_gradient(*arrays)).to(of_matrix)
        return tuple(results)
