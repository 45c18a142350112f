"""Sparse formats, one file each. Importing this package registers them and their kernels."""

from penstock.spmv.formats.base import SparseFormat, format_named, format_names
from penstock.spmv.formats.bsr import BsrMatrix
from penstock.spmv.formats.csr import CsrMatrix

__all__ = ["BsrMatrix", "CsrMatrix", "SparseFormat", "format_named", "format_names"]
