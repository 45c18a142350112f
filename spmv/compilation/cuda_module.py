"""Compiles the CUDA sources at run time."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import numpy as np

from penstock.spmv.compilation.cupy_kernels import compile_cupy_kernel
from penstock.spmv.compilation.watch import compiling
from penstock.spmv.device import Array, Device, device_of

#: Warps that an H200 runs at once, for choices that must not depend on the machine.
NOMINAL_WARPS = 8448

#: What ``cupy.RawModule.get_function`` returns: a call with grid, block and arguments.
KernelFunction = Callable[..., None]

_TYPE_NAMES = {np.dtype(np.float64): "double", np.dtype(np.float32): "float", np.dtype(np.int32): "int"}
_TYPE_NAMES |= {np.dtype(np.int64): "long long", np.dtype(np.int16): "short"}


_SOURCES: dict[str, CudaSource] = {}


def known_sources() -> dict[str, CudaSource]:
    """Return the sources of all modules that have been imported, by file name."""
    return _SOURCES


def type_names(*arrays: Array) -> str:
    """Return the C++ element types of arrays as template arguments, for example ``"double, double, int"``."""
    return ", ".join([_TYPE_NAMES[array.dtype] for array in arrays])


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
    before : str
        C++ of a user that the kernels call, written before the file, too.

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
    before: str = ""

    def __post_init__(self) -> None:
        if not self.before:
            _SOURCES[self.file_name] = self

    def __str__(self) -> str:
        return self.file_name

    def text(self) -> str:
        """Return common.cuh, the enums and the file as one text; ``#line`` directives keep compiler messages exact."""
        return _text(self)

    def function(self, expression: str) -> KernelFunction:
        """Return the compiled instantiation of a kernel template, for example ``csr_spmv<double, double, int, 8>``.

        CuPy's functions load themselves on whichever device is current when they are called.
        """
        return compile_function(self, expression)


@functools.cache
def _text(source: CudaSource) -> str:
    common = resources.files("penstock.spmv.kernels") / "common.cuh"
    file = (source.folder if isinstance(source.folder, Path) else resources.files(source.folder)) / source.file_name
    # Names without their folders: the text is the key of CuPy's cache, and equal wherever the library is installed.
    return "\n".join([_numbered(common), *map(_in_cpp, source.enums), *filter(None, [source.before]), _numbered(file)])


def _numbered(file: Traversable) -> str:
    return f'#line 1 "{file.name}"\n{file.read_text(encoding="utf-8")}'


def _in_cpp(enum: type[IntEnum]) -> str:
    members = ", ".join(f"{member.name} = {int(member)}" for member in enum)
    return f"enum {enum.__name__} {{ {members} }};"


_Key = tuple[CudaSource, str]
# The line that ends the parameters of a template, if there are any, and the name of a kernel.
_KERNEL = re.compile(r"^(.*>\n)?__global__ void (?:__launch_bounds__\(.*?\) )?(\w+)\(", re.MULTILINE)
_ready: dict[_Key, KernelFunction] = {}
_functions: dict[_Key, Future[KernelFunction]] = {}  # also those that are being compiled
_functions_lock = threading.Lock()
_calls: set[str] = set()  # of CuPy, whose kernels are compiled or about to be


def compile_function(source: CudaSource, expression: str) -> KernelFunction:
    """Compile one instantiation, once in a process, or wait for the thread that compiles it; CuPy caches the binary on disk."""
    ready = _ready.get((source, expression))
    if ready is not None:
        return ready
    future, claimed = _claimed(source, expression)
    with compiling():
        if claimed:
            _compile_into(claimed, source)
        function = _ready[source, expression] = future.result()
    return function


def compile_together(wanted: list[_Key], calls: Sequence[str], threads: int, device: Device) -> None:
    """Begin to compile instantiations for a GPU in the background, and CuPy's kernels of ``calls``; NVRTC lets other threads run.

    CuPy's are first: who needs one does not wait for the thread that compiles it, but compiles it too.
    """
    with _functions_lock:
        missing = [(source, expression) for source, expression in wanted if (source, expression) not in _functions]
        tasks = [partial(compile_cupy_kernel, call) for call in calls if call not in _calls]
        _calls.update(calls)
    tasks += [partial(_compile_unclaimed, source, expression) for source, expression in missing]
    if not tasks:
        return

    def run(task: Callable[[], None]) -> None:
        with device.current():
            task()

    executor = ThreadPoolExecutor(threads, thread_name_prefix="penstock-compile")
    for task in tasks:
        executor.submit(run, task)
    executor.shutdown(wait=False)


def _compile_unclaimed(source: CudaSource, expression: str) -> None:
    _, claimed = _claimed(source, expression)
    if claimed:
        _compile_into(claimed, source)


def compiled_functions() -> list[_Key]:
    """Return the instantiations that this process has compiled or loaded."""
    return list(_functions)


def _compiled_with(source: CudaSource, expression: str) -> tuple[str, ...]:
    """Return what is compiled in one program: an instantiation of a template, or all kernels of a file that are none.

    NVRTC takes longer to begin and to read the text than to compile a short kernel.
    """
    plain = _plain_kernels(source)
    return plain if expression in plain else (expression,)


@functools.cache
def _plain_kernels(source: CudaSource) -> tuple[str, ...]:
    """Return the kernels of a file that are no templates."""
    return tuple(sorted(name for template, name in _KERNEL.findall(source.text()) if not template))


def _claimed(source: CudaSource, expression: str) -> tuple[Future[KernelFunction], dict[str, Future[KernelFunction]]]:
    """Return where an instantiation will be, and what the caller has to compile, in one program, and where to put it."""
    with _functions_lock:
        known = _functions.get((source, expression))
        if known is not None:
            return known, {}
        claimed: dict[str, Future[KernelFunction]] = {name: Future() for name in _compiled_with(source, expression)}
        _functions.update({(source, name): future for name, future in claimed.items()})
        return claimed[expression], claimed


def _compile_into(claimed: dict[str, Future[KernelFunction]], source: CudaSource) -> None:
    import cupy

    try:
        module = cupy.RawModule(code=source.text(), options=("--std=c++17",), name_expressions=list(claimed))
        functions = [module.get_function(name) for name in claimed]
    except BaseException as error:
        with _functions_lock:  # the next call tries again
            for name in claimed:
                del _functions[source, name]
        for future in claimed.values():
            future.set_exception(error)
        return
    for future, function in zip(claimed.values(), functions, strict=True):
        future.set_result(function)


def launch(function: KernelFunction, threads: int, block: int, arguments: tuple[Any, ...]) -> None:
    """Launch a kernel with at least ``threads`` threads in blocks of ``block``; without threads do nothing."""
    if threads:
        function((-(-threads // block),), (block,), arguments)


def multiprocessors(array: Array) -> int:
    """Return the number of multiprocessors of the GPU that holds an array."""
    device = device_of(array)
    if device.kind == "cpu":  # kernels that tests run on the host: one block after another
        return 1
    return int(_attributes(device.index)["MultiProcessorCount"])


@functools.cache
def _attributes(number: int) -> dict[str, Any]:
    """Return the attributes of a GPU, each of which CuPy asks the driver for, every time."""
    import cupy

    attributes: dict[str, Any] = cupy.cuda.Device(number).attributes
    return attributes


def shared_limit(array: Array) -> int:
    """Return the most bytes of dynamic shared memory that a block may have on the GPU that holds an array."""
    device = device_of(array)
    if device.kind == "cpu":
        return 227 << 10  # of an H200
    attributes = _attributes(device.index)
    return (
        int(attributes.get("MaxSharedMemoryPerBlockOptin") or attributes["MaxSharedMemoryPerBlock"]) - 1024
    )  # some are static
