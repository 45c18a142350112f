"""Matrices of other libraries, such as Torch, and solutions as arrays of the library that the right-hand side is of."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np
import scipy.sparse

from penstock.spmv import Array, InputError
from penstock.spmv.foreign import as_array
from penstock.spmv.formats.limits import INT32_MAX

__all__ = ["as_matrix", "check_sparse_of_jax", "is_sparse_of_jax", "like", "refuse_gradients"]


def refuse_gradients(given: Any, name: str) -> None:
    """Refuse a tensor whose gradients Torch records, and what JAX traces: a plain solve would lose them."""
    jax, torch = sys.modules.get("jax"), sys.modules.get("torch")
    if jax is not None and isinstance(given.data if is_sparse_of_jax(given) else given, jax.core.Tracer):
        raise InputError(f"{name} is traced by JAX, for gradients or jit; use penstock.jax.solve(A, b)")
    if torch is not None and getattr(given, "requires_grad", False) is True and torch.is_grad_enabled():
        raise InputError(
            f"{name} requires gradients, which this solve would lose; use penstock.torch.solve(A, b), or give {name}.detach() "
            "if they are not needed"
        )


def is_sparse_of_jax(given: Any) -> bool:
    """Return whether something is a BCSR or BCOO matrix of JAX."""
    kind = type(given)
    return kind.__module__.startswith("jax.experimental.sparse") and kind.__name__ in ("BCSR", "BCOO")


def check_sparse_of_jax(given: Any) -> None:
    """Refuse several matrices in one, and a matrix of blocks."""
    if given.ndim != 2 or given.n_batch or given.n_dense:
        raise InputError(
            f"a sparse array of shape {tuple(given.shape)} with {given.n_batch} batch and {given.n_dense} dense dimensions is no "
            "matrix; give one of numbers"
        )


def as_matrix(given: Any) -> Any:
    """Return a matrix of another library, dense or a sparse one of Torch or JAX, as one of NumPy, CuPy or SciPy."""
    if is_sparse_of_jax(given):
        return _from_jax(given)
    layout = str(getattr(given, "layout", "strided")).removeprefix("torch.")
    if not layout.startswith("sparse"):
        return as_array(given)
    if given.ndim != 2 or given.dense_dim():
        raise InputError(
            f"a sparse tensor of shape {tuple(given.shape)} with dense dimensions is no matrix; give one of numbers"
        )
    given = given.detach()
    if layout != "sparse_csr":  # coordinates, columns or blocks
        given = given.to_sparse_csr()
    return _in_csr(given.values(), given.col_indices(), given.crow_indices(), given.shape)


def _from_jax(given: Any) -> Any:
    check_sparse_of_jax(given)
    if type(given).__name__ == "BCOO":  # its entries may be in any order, given several times, or filled up
        given = type(given).sum_duplicates(given)
        given = importlib.import_module("jax.experimental.sparse").BCSR.from_bcoo(given)
    stored = int(given.indptr[-1])
    return _in_csr(given.data[:stored], given.indices[:stored], given.indptr, given.shape)


def _in_csr(values: Any, columns: Any, offsets: Any, shape: Any) -> Any:
    """Return a matrix of SciPy, or of CuPy on a GPU, that shares these arrays."""
    values, columns, offsets = (as_array(part) for part in (values, columns, offsets))
    if isinstance(values, np.ndarray):
        return scipy.sparse.csr_array((values, columns, offsets), shape=tuple(shape))
    if values.size > INT32_MAX:
        raise InputError(f"{values.size} entries are more than CuPy's matrices number; give the matrix on the host")
    from cupyx.scipy.sparse import csr_matrix

    return csr_matrix((values, columns.astype(np.int32), offsets.astype(np.int32)), shape=tuple(shape))


def like(given: Any, array: Array) -> Any:
    """Return an array of NumPy or CuPy as one of the library that ``given`` is of, if that library can take it."""
    library = type(given).__module__.partition(".")[0]
    module = importlib.import_module("jax.dlpack" if library in ("jax", "jaxlib") else library)
    return module.from_dlpack(array) if hasattr(module, "from_dlpack") else array
