"""Matrices of other libraries, such as Torch, and solutions as arrays of the library that the right-hand side is of."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import scipy.sparse

from penstock.spmv import Array, InputError
from penstock.spmv.foreign import as_array
from penstock.spmv.formats.limits import INT32_MAX

__all__ = ["as_matrix", "like"]


def as_matrix(given: Any) -> Any:
    """Return a matrix of another library, dense or a sparse tensor of Torch, as one of NumPy, CuPy or SciPy."""
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
    values, columns, offsets = (as_array(part()) for part in (given.values, given.col_indices, given.crow_indices))
    if isinstance(values, np.ndarray):
        return scipy.sparse.csr_array((values, columns, offsets), shape=tuple(given.shape))
    if values.size > INT32_MAX:
        raise InputError(f"{values.size} entries are more than CuPy's matrices number; give the matrix on the host")
    from cupyx.scipy.sparse import csr_matrix

    return csr_matrix((values, columns.astype(np.int32), offsets.astype(np.int32)), shape=tuple(given.shape))


def like(given: Any, array: Array) -> Any:
    """Return an array of NumPy or CuPy as one of the library that ``given`` is of, if that library can take it."""
    library = type(given).__module__.partition(".")[0]
    module = importlib.import_module("jax.dlpack" if library in ("jax", "jaxlib") else library)
    return module.from_dlpack(array) if hasattr(module, "from_dlpack") else array
