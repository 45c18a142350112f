"""Sparse formats, one file each. Importing this package registers them and their kernels."""

from penstock.spmv.formats.base import SparseMatrix, format_named, format_names
from penstock.spmv.formats.bsr import BsrMatrix
from penstock.spmv.formats.coo import CooMatrix
from penstock.spmv.formats.csr import CsrMatrix
from penstock.spmv.formats.ell import EllMatrix
from penstock.spmv.formats.hyb import HybMatrix
from penstock.spmv.formats.sell import SellMatrix
from penstock.spmv.formats.sliced_bsr import SlicedBsrMatrix
from penstock.spmv.formats.sliced_ell import SlicedEllMatrix
from penstock.spmv.formats.symmetric_bsr import SymmetricBsrMatrix

__all__ = [
    "BsrMatrix",
    "CooMatrix",
    "CsrMatrix",
    "EllMatrix",
    "HybMatrix",
    "SellMatrix",
    "SlicedBsrMatrix",
    "SlicedEllMatrix",
    "SparseMatrix",
    "SymmetricBsrMatrix",
    "format_named",
    "format_names",
]
