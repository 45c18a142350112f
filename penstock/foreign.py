"""Arrays of other libraries, such as Torch and JAX, in and out through DLPack, without a copy."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import scipy.sparse

from penstock.spmv import Array, InputError
from penstock.spmv.formats.limits import INT32_MAX

__all__ = ["as_array", "as_matrix", "is_foreign", "like"]

_CUDA = 2  # of DLPack's numbers of devices


def is_foreign(given: Any) -> bool:
    """Return whether something is an array of another library than NumPy and CuPy."""
    return hasattr(given, "__dlpack__") and not isinstance(given, np.ndarray) and not hasattr(given, "get")


def as_array(given: Any) -> Array:
    """Return an array of another library as one of NumPy, or of CuPy on a GPU, that shares its memory."""
    given = (
        given.detach() if hasattr(given, "detach") else given
    )  # a tensor of Torch may record what is computed with it
    kind, _ = given.__dlpack_device__()
    if int(kind) == _CUDA:
        import cupy

        return cupy.from_dlpack(given)
    return np.from_dlpack(given)


def as_matrix(given: Any) -> Any:
    """Return a matrix of another library, dense or a sparse CSR tensor of Torch, as one of NumPy, CuPy or SciPy."""
    if not str(getattr(given, "layout", "")).endswith("sparse_csr"):
        return as_array(given)
    given = given.detach()
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
