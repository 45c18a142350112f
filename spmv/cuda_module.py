"""Compilation of the CUDA sources at run time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import resources

import numpy as np

from penstock.spmv.device import Array

__all__ = ["compile_function", "cuda_function", "cuda_source", "type_names"]

#: What ``cupy.RawModule.get_function`` returns: a call with grid, block and arguments.
KernelFunction = Callable[..., None]

_TYPE_NAMES = {np.dtype(np.float64): "double", np.dtype(np.float32): "float", np.dtype(np.int32): "int"}
_TYPE_NAMES[np.dtype(np.int64)] = "long long"


def type_names(*arrays: Array) -> str:
    """Return the C++ element types of arrays as template arguments, such as ``"double, double, int"``."""
    return ", ".join(_TYPE_NAMES[np.dtype(array.dtype)] for array in arrays)


@functools.cache
def cuda_source(file_name: str) -> str:
    """Return a kernel file behind the shared vocabulary; ``#line`` directives keep compiler messages exact."""
    folder = resources.files("penstock.spmv.kernels")
    parts = (f'#line 1 "{name}"\n{(folder / name).read_text()}' for name in ("common.cuh", file_name))
    return "\n".join(parts)


def compile_function(file_name: str, expression: str) -> KernelFunction:
    """Compile one instantiation for CuPy's current device; CuPy keeps the binary in its own cache on disk."""
    import cupy

    module = cupy.RawModule(code=cuda_source(file_name), options=("--std=c++17",), name_expressions=[expression])
    function: KernelFunction = module.get_function(expression)
    return function


@functools.cache
def cuda_function(file_name: str, expression: str) -> KernelFunction:
    """Return the compiled instantiation of a kernel template, such as ``csr_spmv<double, double, int, 8>``.

    CuPy's functions load themselves on whichever device is current when they are called.
    """
    return compile_function(file_name, expression)
