"""Products of other libraries for comparison: SciPy, MKL if it is installed, cuSPARSE through CuPy."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.spmv import Array, CsrMatrix

Product = Callable[[], Any]

#: Names of peers in pictures, in the order in which they are shown.
PEER_LABELS = {"cusparse_csr": "cuSPARSE CSR", "scipy_csr": "SciPy CSR", "mkl_csr": "MKL CSR"}


def scipy_product(A: CsrMatrix, x: Array) -> Product:
    """Return SciPy's CSR product, which uses one thread."""
    matrix = A.to_csr()
    matrix.indptr = matrix.indptr.astype(np.int32 if A.nnz < 2**31 else np.int64)
    matrix.indices = matrix.indices.astype(matrix.indptr.dtype)
    return lambda: matrix @ x


def mkl_product(A: CsrMatrix, x: Array) -> Product | None:
    """Return MKL's CSR product through ``sparse_dot_mkl``, or None if that is not installed."""
    if importlib.util.find_spec("sparse_dot_mkl") is None:
        return None
    from sparse_dot_mkl import dot_product_mkl

    matrix = A.to_csr()
    matrix.indptr, matrix.indices = matrix.indptr.astype(np.int32), matrix.indices.astype(np.int32)
    return lambda: dot_product_mkl(matrix, x)


def cusparse_products(A: CsrMatrix, x: Array, out: Array) -> dict[str, Product]:
    """Return cuSPARSE's CSR products: one for a vector; for a block of vectors, one by columns and two by rows."""
    device = A.device
    if A.nnz >= 2**31 or device.kind != "cuda":
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
        "cusparse_csr_by_rows": _product_by_rows(matrix, x, out, 0),
        "cusparse_csr_by_rows_alg2": _product_by_rows(matrix, x, out, 6),
    }


def _product_by_rows(matrix: Any, x: Array, out: Array, algorithm: int) -> Product:
    """Return cuSPARSE's product with a row-major block, which CuPy's own function does not offer.

    Algorithm 0 is the library's default; 6 is CUSPARSE_SPMM_CSR_ALG2, which its manual recommends for this layout.
    """
    import cupy
    from cupy_backends.cuda.libs import cusparse as library
    from cupyx.cusparse import SpMatDescriptor

    handle = cupy.cuda.device.get_cusparse_handle()
    kind = {8: 1, 4: 0}[x.dtype.itemsize]  # CUDA_R_64F, CUDA_R_32F
    plain, by_rows = library.CUSPARSE_OPERATION_NON_TRANSPOSE, library.CUSPARSE_ORDER_ROW
    descriptors = [library.createDnMat(*v.shape, v.shape[1], v.data.ptr, kind, by_rows) for v in (x, out)]
    alpha, beta = np.array(1.0, x.dtype), np.array(0.0, x.dtype)
    A = SpMatDescriptor.create(matrix)
    common = (handle, plain, plain, alpha.ctypes.data, A.desc, descriptors[0], beta.ctypes.data, descriptors[1], kind)
    buffer = cupy.empty(max(library.spMM_bufferSize(*common, algorithm), 1), dtype=np.int8)

    def product() -> None:
        _ = A, matrix, x, out, alpha, beta  # the library holds their addresses only
        library.spMM(*common, algorithm, buffer.data.ptr)

    return product
