"""What a user would multiply with instead: SciPy, MKL where it is installed, cuSPARSE through CuPy."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.spmv import Array, CsrMatrix, Device

__all__ = ["cusparse_products", "mkl_product", "scipy_product"]

Product = Callable[[], Any]


def scipy_product(A: CsrMatrix, x: Array) -> Product:
    """Return SciPy's CSR product; one thread."""
    matrix = A.to_csr()
    matrix.indptr = matrix.indptr.astype(np.int32 if A.nnz < 2**31 else np.int64)
    matrix.indices = matrix.indices.astype(matrix.indptr.dtype)
    return lambda: matrix @ x


def mkl_product(A: CsrMatrix, x: Array) -> Product | None:
    """Return MKL's CSR product through ``sparse_dot_mkl``, or None where that is not installed."""
    if importlib.util.find_spec("sparse_dot_mkl") is None:
        return None
    from sparse_dot_mkl import dot_product_mkl

    matrix = A.to_csr()
    matrix.indptr, matrix.indices = matrix.indptr.astype(np.int32), matrix.indices.astype(np.int32)
    return lambda: dot_product_mkl(matrix, x)


def cusparse_products(A: CsrMatrix, x: Array, out: Array) -> dict[str, Product]:
    """Return cuSPARSE's CSR products through CuPy: one for a vector, those by columns and by rows for a block."""
    device = A.device
    if A.nnz >= 2**31 or not available(device):
        return {}
    import cupyx.scipy.sparse
    from cupyx import cusparse

    arrays = (A.values, A.column_indices, A.row_offsets.astype(np.int32))
    matrix = cupyx.scipy.sparse.csr_matrix(arrays, shape=A.shape)
    if x.ndim == 1:
        return {"cusparse_csr": lambda: cusparse.spmv(matrix, x, y=out)}
    columns = device.xp.asfortranarray(x)
    target = device.xp.empty(out.shape, dtype=out.dtype, order="F")
    return {
        "cusparse_csr_by_columns": lambda: cusparse.spmm(matrix, columns, c=target, beta=0.0),
        "cusparse_csr_by_rows": lambda: cusparse.spmm(matrix, x.T, c=target, beta=0.0, transb=True),
    }


def available(device: Device) -> bool:
    """Tell whether this is a CUDA device, on which cuSPARSE runs."""
    return device.kind == "cuda"
