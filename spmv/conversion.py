"""Converts matrices, arrays and SciPy operators to operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse

from penstock.spmv.device import CPU, Array, Device, device_of
from penstock.spmv.errors import InputError, advice_on_type
from penstock.spmv.foreign import as_array, is_foreign
from penstock.spmv.formats import BsrMatrix, CsrMatrix, SparseMatrix
from penstock.spmv.formats.survey import Defect
from penstock.spmv.formats.validation import in_csr
from penstock.spmv.operator import Operator, ValidatedOperator


class FunctionOperator(ValidatedOperator):
    """An operator defined by a function that maps a vector, or a block of vectors, to its image.

    Parameters
    ----------
    function : callable
        ``function(x) -> A @ x`` for ``x`` of shape ``(columns,)``; also for ``(columns, k)`` if ``blocks`` is true,
        otherwise blocks are passed column by column.
    shape : (int, int)
    dtype : dtype
        Type of the vectors.
    device : Device
        Device on which the function expects them.
    blocks : bool
        Whether the function accepts blocks.

    Examples
    --------
    >>> import numpy as np
    >>> from penstock.spmv import FunctionOperator
    >>> second_differences = FunctionOperator(lambda x: np.convolve(x, [-1, 2, -1], "same"), (4, 4), np.float64)
    >>> second_differences.apply(np.ones(4)).tolist()
    [1.0, 0.0, 0.0, 1.0]
    """

    def __init__(
        self,
        function: Callable[[Array], Array],
        shape: tuple[int, int],
        dtype: Any,
        device: Device = CPU,
        *,
        blocks: bool = False,
    ) -> None:
        self.function = function
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self.device = device
        self.blocks = blocks

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        if x.ndim == 1 or self.blocks:
            product = self._image(x)
        else:
            columns = [self._image(self.device.xp.ascontiguousarray(x[:, k])) for k in range(x.shape[1])]
            product = self.device.xp.stack(columns, axis=1)
        if beta == 0.0:
            out[...] = alpha * product
        else:
            out *= beta
            out += alpha * product

    def _image(self, x: Array) -> Array:
        """Return ``function(x)`` as an array of the device's own library, so that it can be added in place."""
        image, shape = self.function(x), (self.shape[0], *x.shape[1:])
        image = self.device.asarray(as_array(image)) if is_foreign(image) else image
        if getattr(image, "shape", None) != shape or image.dtype.kind not in "fiub":
            kind = f"{image.dtype} of shape {image.shape}" if hasattr(image, "dtype") else type(image).__name__
            raise InputError(f"the operator's function returned {kind} instead of real numbers of shape {shape}")
        return image


def as_operator_for(A: Any, vectors: Any) -> Operator:
    """Return an operator as :func:`as_operator`, in float64 if the caller's vectors are: narrower values stay as they are stored.

    A matrix of penstock keeps the type that it was made for.
    """
    operator = as_operator(A)
    wider = getattr(vectors, "dtype", np.dtype(np.float64)) == np.float64
    if not wider or (operator is A and not isinstance(A, FunctionOperator)) or operator.dtype == np.float64:
        return operator
    if isinstance(operator, FunctionOperator):
        return FunctionOperator(operator.function, operator.shape, np.float64, operator.device, blocks=operator.blocks)
    assert isinstance(operator, SparseMatrix), "what as_operator makes"
    return operator.from_arrays(operator.shape, np.float64, operator.arrays(), operator.parameters())


def as_operator(A: Any) -> Operator:
    """Return an operator for a matrix, an operator or a SciPy ``LinearOperator``.

    Parameters
    ----------
    A : object
        A penstock format or any operator (returned unchanged), a SciPy or CuPy sparse matrix or array, a dense NumPy or
        CuPy array, or a ``scipy.sparse.linalg.LinearOperator``. SciPy BSR with square blocks up to 8 becomes
        :class:`BsrMatrix`, other sparse matrices :class:`CsrMatrix`, sharing their arrays where types allow.

    Raises
    ------
    InputError
        If it is none of these, complex, or not a valid matrix.

    Examples
    --------
    >>> import scipy.sparse
    >>> from penstock.spmv import as_operator
    >>> (as_operator(scipy.sparse.eye_array(2, format="csr")) @ [1.0, 2.0]).tolist()
    [1.0, 2.0]
    """
    if isinstance(A, Operator):
        return A
    if scipy.sparse.issparse(A):
        if A.format == "bsr" and A.blocksize[0] == A.blocksize[1] <= 8:
            return BsrMatrix.from_bsr(A)
        return CsrMatrix.from_csr(in_csr(A, "the matrix"))
    if type(A).__module__.startswith("cupyx.scipy.sparse") and hasattr(A, "tocsr"):
        return _csr_from_cupy(in_csr(A, "the matrix"), A)
    if hasattr(A, "matvec") and hasattr(A, "shape"):
        dtype = np.dtype(getattr(A, "dtype", None) or np.float64)
        if dtype.kind not in "fiub":
            raise InputError(f"a linear operator of type {dtype} is not real; {advice_on_type(dtype.kind)}")
        dtype = dtype if dtype == np.float32 else np.dtype(np.float64)
        device = Device("cuda") if type(A).__module__.startswith("cupyx.") else CPU
        return FunctionOperator(lambda x: A @ x, tuple(A.shape), dtype, device, blocks=True)
    if isinstance(A, np.matrix):
        A = np.asarray(A)  # products of a matrix with a vector are matrices
    if hasattr(A, "ndim") and hasattr(A, "dtype") and A.ndim == 2:
        if A.dtype.kind not in "fiub":
            raise InputError(f"a dense matrix of type {A.dtype} is not real; {advice_on_type(A.dtype.kind)}")
        dtype = A.dtype if A.dtype == np.float32 else np.dtype(np.float64)
        return FunctionOperator(lambda x: A @ x, A.shape, dtype, device_of(A), blocks=True)
    if hasattr(A, "__matmul__") and len(getattr(A, "shape", ())) == 2:  # without a dtype: float64
        return FunctionOperator(lambda x: A @ x, tuple(A.shape), getattr(A, "dtype", np.float64))
    raise InputError(
        f"cannot use {type(A).__name__} as an operator; pass a penstock format, a scipy.sparse or cupyx.scipy.sparse "
        "matrix, a dense array, a LinearOperator, or an object with shape and @"
    )


def _csr_from_cupy(csr: Any, original: Any) -> CsrMatrix:
    """Wrap a CuPy CSR matrix without a copy after a look at its entries on the GPU; sort the rows of a copy if need be."""
    matrix = CsrMatrix.unchecked(csr)
    defects = matrix.survey().defects
    if defects == Defect.ORDER and matrix.device.kind == "cuda":
        csr = csr.copy() if csr is original else csr
        csr.has_canonical_format = False  # CuPy's cached flags may be wrong
        csr.sum_duplicates()
        matrix = CsrMatrix.unchecked(csr)
        defects = matrix.survey().defects
    if defects or matrix.device.kind == "cpu":
        return CsrMatrix.from_csr(csr.get()).to_device(Device("cuda"))  # usually raises an error that names the entry
    return CsrMatrix.from_csr(matrix, strategy="auto")
