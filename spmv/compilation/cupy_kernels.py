"""Kernels that CuPy makes of its own functions, and libraries that these load: made ready by calls for one number."""

from __future__ import annotations

import contextlib
import operator
from typing import Any

#: Stands for CuPy where kernels are listed by source file.
CUPY = "CuPy"
#: Calls for which CuPy compiles no kernel, but loads Thrust, which takes 40 ms.
LOADING = ("argsort(int32)",)

_SCALARS = {"int": 1, "uint": 1, "float": 1.0}
# Called as operators: the first comparison by one looks for functions in all of CuPy, which takes 20 to 300 ms.
_OPERATORS = {
    "less": operator.lt,
    "less_equal": operator.le,
    "equal": operator.eq,
    "not_equal": operator.ne,
    "greater": operator.gt,
    "greater_equal": operator.ge,
}


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
        (_OPERATORS.get(name) or getattr(cupy, name))(*arguments)
