"""Apply a sparse matrix to a vector or a block of vectors, on the CPU or a CUDA device."""

from penstock.spmv.compilation.table import register_kernel, registered_kernels
from penstock.spmv.conversion import FunctionOperator, as_operator
from penstock.spmv.device import CPU, Array, Device, device_of
from penstock.spmv.errors import (
    BudgetError,
    DeviceError,
    InputError,
    NotConvergedError,
    NotConvergedWarning,
    PenstockError,
    StoreError,
)
from penstock.spmv.formats import (
    BsrMatrix,
    CooMatrix,
    CsrMatrix,
    EllMatrix,
    HybMatrix,
    SellMatrix,
    SlicedBsrMatrix,
    SlicedEllMatrix,
    SparseMatrix,
    SymmetricBsrMatrix,
    format_named,
    format_names,
)
from penstock.spmv.formats.convert import length_permutation
from penstock.spmv.model.suggestion import Suggestion, suggest_format
from penstock.spmv.node_matrix import NodeMatrix
from penstock.spmv.operator import (
    HasAbsoluteProduct,
    HasDiagonalBlocks,
    Operator,
    SweptOperator,
    ValidatedOperator,
    as_vectors,
)
from penstock.spmv.sizes import format_nbytes, parse_nbytes
from penstock.spmv.vectors.space import VectorSpace

# Earlier names of SweptOperator.
CountsTraffic = SweptOperator
CountsWaiting = SweptOperator
PlansWorkspace = SweptOperator

__all__ = [
    "CPU",
    "Array",
    "BsrMatrix",
    "BudgetError",
    "CooMatrix",
    "CsrMatrix",
    "Device",
    "DeviceError",
    "EllMatrix",
    "FunctionOperator",
    "HasAbsoluteProduct",
    "HasDiagonalBlocks",
    "HybMatrix",
    "InputError",
    "NodeMatrix",
    "NotConvergedError",
    "NotConvergedWarning",
    "Operator",
    "PenstockError",
    "SellMatrix",
    "SlicedBsrMatrix",
    "SlicedEllMatrix",
    "SparseMatrix",
    "StoreError",
    "Suggestion",
    "SweptOperator",
    "SymmetricBsrMatrix",
    "ValidatedOperator",
    "VectorSpace",
    "as_operator",
    "as_vectors",
    "device_of",
    "format_named",
    "format_names",
    "format_nbytes",
    "length_permutation",
    "parse_nbytes",
    "register_kernel",
    "registered_kernels",
    "suggest_format",
]
