"""Kernels that CuPy makes of its own functions: compiled by calling these for one number."""

from __future__ import annotations

import contextlib
from typing import Any

#: Stands for CuPy where kernels are listed by source file.
CUPY = "CuPy"

_SCALARS = {"int": 1, "uint": 1, "float": 1.0}


def compile_cupy_kernel(call: str) -> None:
    """Let CuPy compile the kernel of a function, such as ``"multiply(float64, float)"``, for arrays without gaps.

    The arguments are types of arrays, or those of Python's numbers. ``copy(int64, int32)`` converts into the second type. What
    CuPy cannot compile so is left to the call that needs it.
    """
    with contextlib.suppress(Exception):
        evaluate(call)


def evaluate(call: str) -> None:
    """Call a function of CuPy for one number of each type."""
    import cupy

    name, _, listed = call.rstrip(")").partition("(")
    types = listed.split(", ")
    arguments: list[Any] = [_SCALARS[kind] if kind in _SCALARS else cupy.empty(1, kind) for kind in types]
    if name == "copy":
        cupy._core.elementwise_copy(*arguments)
    elif name == "fill":
        arguments[0].fill(1)
    elif name == "arange":
        cupy.arange(1, dtype=types[0])
    else:
        getattr(cupy, name)(*arguments)
