"""Matrices of other libraries, such as Torch, and solutions as arrays of the library that the right-hand side is of."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np
import scipy.sparse

from penstock.spmv import Array, InputError
from penstock.spmv.foreign import as_array, is_foreign
from penstock.spmv.formats.limits import INT32_MAX


def refuse_gradients(value: Any, name: str, call: str = "solve(A, b)") -> None:
    """Refuse a tensor whose gradients Torch records, and what JAX traces: the plain call would lose them."""
    jax, torch = sys.modules.get("jax"), sys.modules.get("torch")
    if jax is not None and isinstance(value.data if is_sparse_of_jax(value) else value, jax.core.Tracer):
        raise InputError(f"{name} is traced by JAX, for gradients or jit; use penstock.jax.{call}")
    if torch is not None and getattr(value, "requires_grad", False) is True and torch.is_grad_enabled():
        raise InputError(
            f"{name} requires gradients, which this call would lose; use penstock.torch.{call}, or give {name}.detach() if they "
            "are not needed"
        )


def is_sparse_of_jax(value: Any) -> bool:
    """Return whether something is a BCSR or BCOO matrix of JAX."""
    kind = type(value)
    return kind.__module__.startswith("jax.experimental.sparse") and kind.__name__ in ("BCSR", "BCOO")


def check_sparse_of_jax(value: Any) -> None:
    """Refuse several matrices in one, and a matrix of blocks."""
    if value.ndim != 2 or value.n_batch or value.n_dense:
        raise InputError(
            f"a sparse array of shape {tuple(value.shape)} with {value.n_batch} batch and {value.n_dense} dense dimensions is no "
            "matrix; give one of numbers"
        )


def from_elsewhere(value: Any) -> Any:
    """Return a matrix of another library as :func:`as_matrix` does, and anything else as it is."""
    return as_matrix(value) if is_foreign(value) or is_sparse_of_jax(value) else value


def as_matrix(value: Any) -> Any:
    """Return a matrix of another library, dense or a sparse one of Torch or JAX, as one of NumPy, CuPy or SciPy."""
    if is_sparse_of_jax(value):
        return _from_jax(value)
    layout = str(getattr(value, "layout", "strided")).removeprefix("torch.")
    if not layout.startswith("sparse"):
        return as_array(value)
    if value.ndim != 2 or value.dense_dim():
        raise InputError(
            f"a sparse tensor of shape {tuple(value.shape)} with dense dimensions is no matrix; give one of numbers"
        )
    value = value.detach()
    if layout != "sparse_csr":  # coordinates, columns or blocks
        value = value.to_sparse_csr()
    return _in_csr(value.values(), value.col_indices(), value.crow_indices(), value.shape)


def _from_jax(value: Any) -> Any:
    check_sparse_of_jax(value)
    if type(value).__name__ == "BCOO":  # its entries may be in any order, duplicated, or padding
        value = type(value).sum_duplicates(value)
        value = importlib.import_module("jax.experimental.sparse").BCSR.from_bcoo(value)
    stored = int(value.indptr[-1])
    return _in_csr(value.data[:stored], value.indices[:stored], value.indptr, value.shape)


def _in_csr(values: Any, columns: Any, offsets: Any, shape: Any) -> Any:
    """Return a matrix of SciPy, or of CuPy on a GPU, that shares these arrays."""
    values, columns, offsets = (as_array(part) for part in (values, columns, offsets))
    if isinstance(values, np.ndarray):
        return scipy.sparse.csr_array((values, columns, offsets), shape=tuple(shape))
    if values.size > INT32_MAX:
        raise InputError(f"{values.size} entries are more than CuPy's matrices number; give the matrix on the host")
    from cupyx.scipy.sparse import csr_matrix

    return csr_matrix((values, columns.astype(np.int32), offsets.astype(np.int32)), shape=tuple(shape))


def like(value: Any, array: Array) -> Any:
    """Return an array of NumPy or CuPy as one of the library that ``value`` is of, if that library can take it."""
    library = type(value).__module__.partition(".")[0]
    module = importlib.import_module("jax.dlpack" if library in ("jax", "jaxlib") else library)
    return module.from_dlpack(array) if hasattr(module, "from_dlpack") else array
