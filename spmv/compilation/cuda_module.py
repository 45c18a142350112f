"""Compiles the CUDA sources at run time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import numpy as np

from penstock.spmv.compilation.watch import compiling
from penstock.spmv.device import Array, device_of

#: Warps that an H200 runs at once, for choices that must not depend on the machine.
NOMINAL_WARPS = 8448

#: What ``cupy.RawModule.get_function`` returns: a call with grid, block and arguments.
KernelFunction = Callable[..., None]

_TYPE_NAMES = {np.dtype(np.float64): "double", np.dtype(np.float32): "float", np.dtype(np.int32): "int"}
_TYPE_NAMES[np.dtype(np.int64)] = "long long"


def type_names(*arrays: Array) -> str:
    """Return the C++ element types of arrays as template arguments, for example ``"double, double, int"``."""
    return ", ".join(_TYPE_NAMES[np.dtype(array.dtype)] for array in arrays)


@dataclass(frozen=True)
class CudaSource:
    """A file of CUDA C++ kernels; the module that launches them declares it once.

    Parameters
    ----------
    folder : str or Path
        The package that holds the file, such as ``"penstock.spmv.kernels"``, or a folder.
    file_name : str
        Unique among the files of the library.
    enums : tuple of types
        Python enums that the kernels use. They are written in C++ before the file, so that both sides cannot differ.

    Examples
    --------
    >>> from penstock.spmv.compilation.cuda_module import CudaSource
    >>> kernels = CudaSource("penstock.spmv.kernels", "coo.cu")
    >>> kernels.text().startswith('#line 1 "common.cuh"')
    True
    """

    folder: str | Path
    file_name: str
    enums: tuple[type[IntEnum], ...] = ()

    def __str__(self) -> str:
        return self.file_name

    def text(self) -> str:
        """Return common.cuh, the enums and the file as one text; ``#line`` directives keep compiler messages exact."""
        common = resources.files("penstock.spmv.kernels") / "common.cuh"
        file = (self.folder if isinstance(self.folder, Path) else resources.files(self.folder)) / self.file_name
        # Names without their folders: the text is the key of CuPy's cache, and equal wherever the library is installed.
        return "\n".join([_numbered(common), *map(_in_cpp, self.enums), _numbered(file)])

    def function(self, expression: str) -> KernelFunction:
        """Return the compiled instantiation of a kernel template, for example ``csr_spmv<double, double, int, 8>``.

        CuPy's functions load themselves on whichever device is current when they are called.
        """
        return compile_function(self, expression)


def _numbered(file: Traversable) -> str:
    return f'#line 1 "{file.name}"\n{file.read_text(encoding="utf-8")}'


def _in_cpp(enum: type[IntEnum]) -> str:
    members = ", ".join(f"{member.name} = {int(member)}" for member in enum)
    return f"enum {enum.__name__} {{ {members} }};"


@functools.cache
def compile_function(source: CudaSource, expression: str) -> KernelFunction:
    """Compile one instantiation, once in a process; CuPy caches the binary on disk."""
    import cupy

    module = cupy.RawModule(code=source.text(), options=("--std=c++17",), name_expressions=[expression])
    with compiling():
        function: KernelFunction = module.get_function(expression)
    return function


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
