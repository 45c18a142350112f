"""``penstock.torch.solve``: solutions of sparse systems through which Torch differentiates.

>>> import penstock.torch, torch
>>> line = torch.tensor([[2.0, -1.0, 0.0], [-1.0, 2.0, -1.0], [0.0, -1.0, 2.0]], dtype=torch.float64).to_sparse_csr()
>>> b = torch.ones(3, dtype=torch.float64, requires_grad=True)
>>> penstock.torch.solve(line, b, device="cpu").sum().backward()
>>> b.grad
tensor([1.5000, 2.0000, 1.5000], dtype=torch.float64)
"""

from __future__ import annotations

from typing import Any

import torch

from penstock.driver.foreign import like
from penstock.driver.gradients import SECOND_DERIVATIVE, DifferentiableSystem, system_for, values_gradient
from penstock.spmv import InputError
from penstock.spmv.foreign import as_array

__all__ = ["solve"]


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
    is_tensor = isinstance(A, torch.Tensor)
    if is_tensor and A.requires_grad and A.layout not in (torch.sparse_coo, torch.sparse_csr):
        raise InputError(
            f"A requires gradients and has the layout {A.layout}; give A.to_sparse_csr(), which passes them on"
        )
    if is_tensor and A.layout == torch.sparse_coo:
        A = A.coalesce()
    system = system_for(A.detach() if is_tensor else A, b.shape[1] if b.ndim == 2 else 1, options)
    x: torch.Tensor = _Solve.apply(DifferentiableSystem(system, rtol, maxiter), *_entries(A), b)
    return x


def _entries(A: Any) -> tuple[Any, Any, Any]:
    """Return rows, columns and values of the entries of a sparse tensor; of other matrices none."""
    layout = getattr(A, "layout", None)
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
