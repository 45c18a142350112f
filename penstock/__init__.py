"""Iterative solution of sparse symmetric positive definite systems, whether or not the matrix fits in device memory.

The subpackages are ``penstock.spmv`` (apply a matrix), ``penstock.streaming`` (a matrix larger than the device),
``penstock.solvers``, ``penstock.fem`` (model problems) and ``penstock.experiments`` (runs described in YAML).
Importing ``penstock`` itself loads none of them.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
