"""Compiles the CUDA sources at run time."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from enum import IntEnum
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from penstock.spmv.compilation.watch import compiling
from penstock.spmv.device import Array, device_of

__all__ = [
    "NOMINAL_WARPS",
    "compile_function",
    "cuda_function",
    "cuda_source",
    "launch",
    "multiprocessors",
    "shared_limit",
    "type_names",
]

#: Warps that an H200 runs at once, for choices that must not depend on the machine.
NOMINAL_WARPS = 8448

#: What ``cupy.RawModule.get_function`` returns: a call with grid, block and arguments.
KernelFunction = Callable[..., None]

_TYPE_NAMES = {np.dtype(np.float64): "double", np.dtype(np.float32): "float", np.dtype(np.int32): "int"}
_TYPE_NAMES[np.dtype(np.int64)] = "long long"


def type_names(*arrays: Array) -> str:
    """Return the C++ element types of arrays as template arguments, for example ``"double, double, int"``."""
    return ", ".join(_TYPE_NAMES[np.dtype(array.dtype)] for array in arrays)


# A kernel file names the Python enums that it shares, so that both sides cannot differ.
_PYTHON_ENUM = re.compile(r"#pragma python_enum\(([\w.]+)\.(\w+)\)")


def _enum_in_cpp(named: re.Match[str]) -> str:
    enum: type[IntEnum] = getattr(importlib.import_module(named[1]), named[2])
    members = ", ".join(f"{member.name} = {int(member)}" for member in enum)
    return f"enum {enum.__name__} {{ {members} }};"


@functools.cache
def cuda_source(file_name: str) -> str:
    """Return the source of a kernel file, preceded by common.cuh; ``#line`` directives keep compiler messages exact.

    ``#pragma python_enum(module.Name)`` is replaced by the C++ enum with the members of the Python one.

    ``file_name`` is a file of ``penstock.spmv.kernels``, or the absolute path of another one.
    """
    folder = resources.files("penstock.spmv.kernels")
    files = {"common.cuh": folder / "common.cuh", file_name: folder / file_name}
    if Path(file_name).is_absolute():
        files[file_name] = Path(file_name)
    sources = [f'#line 1 "{name}"\n{file.read_text(encoding="utf-8")}' for name, file in files.items()]
    return _PYTHON_ENUM.sub(_enum_in_cpp, "\n".join(sources))


def compile_function(file_name: str, expression: str) -> KernelFunction:
    """Compile one instantiation for CuPy's current device; CuPy caches the binary on disk."""
    import cupy

    module = cupy.RawModule(code=cuda_source(file_name), options=("--std=c++17",), name_expressions=[expression])
    with compiling():
        function: KernelFunction = module.get_function(expression)
    return function


@functools.cache
def cuda_function(file_name: str, expression: str) -> KernelFunction:
    """Return the compiled instantiation of a kernel template, for example ``csr_spmv<double, double, int, 8>``.

    CuPy's functions load themselves on whichever device is current when they are called.
    """
    return compile_function(file_name, expression)


def launch(function: KernelFunction, threads: int, block: int, arguments: tuple[Any, ...]) -> None:
    """Launch a kernel with at least ``threads`` threads in blocks of ``block``; without threads do nothing."""
    if threads:
        function((-(-threads // block),), (block,), arguments)


def multiprocessors(array: Array) -> int:
    """Return the number of multiprocessors of the GPU that holds an array."""
    device = device_of(array)
    if device.kind == "cpu":  # kernels that tests run on the host: one block after another
        return 1
    return int(device.xp.cuda.Device(device.index).attributes["MultiProcessorCount"])


def shared_limit(array: Array) -> int:
    """Return the most bytes of dynamic shared memory that a block may have on the GPU that holds an array."""
    device = device_of(array)
    if device.kind == "cpu":
        return 227 << 10  # of an H200
    attributes = device.xp.cuda.Device(device.index).attributes
    return (
        int(attributes.get("MaxSharedMemoryPerBlockOptin") or attributes["MaxSharedMemoryPerBlock"]) - 1024
    )  # some are static
