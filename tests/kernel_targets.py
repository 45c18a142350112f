"""Where a kernel can be run by a test: the CPU, the CUDA emulator in warps of 32 or 64, a real GPU."""

import functools
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_emulator import EmulatedModule, EmulatorUnavailableError
from kernel_instances import EMULATED

from penstock.spmv import Device, DeviceError, SparseMatrix
from penstock.spmv.compilation import cuda_module
from penstock.spmv.compilation.cuda_module import CudaSource
from penstock.spmv.device import cuda_device_count
from penstock.spmv.products.block_products import BLOCK_PRODUCT_KERNELS


def gpu_count() -> int:
    try:
        return cuda_device_count()
    except DeviceError:
        return 0


# Tests launch these so little that optimising them takes longer than it saves.
_BRIEF = {BLOCK_PRODUCT_KERNELS}


@functools.cache
def _emulated(source: CudaSource, warp_size: int, expression: str | None = None) -> EmulatedModule:
    """One module a file, with every instantiation that tests need, so that the compiler runs once."""
    expressions = [expression] if expression else EMULATED[source]
    # Indices are checked in warps of 32 only: checks double the time of compilation, and lanes index alike in both.
    options = ["-O0"] if source in _BRIEF else []
    return EmulatedModule(source.text(), expressions, warp_size=warp_size, options=options, sanitize=warp_size == 32)


def emulated_function(source: CudaSource, warp_size: int, expression: str):
    """Return an emulated kernel; one that is not listed, or of a source outside the library, is compiled on its own."""
    module = _emulated(source, warp_size, *([] if expression in EMULATED.get(source, ()) else [expression]))
    return module.get_function(expression)


class Target:
    """Runs CUDA or CPU kernels of the table on arrays that the test holds as NumPy arrays."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def device_kind(self) -> str:
        return "cpu" if self.name == "cpu" else "cuda"

    @property
    def xp(self):
        return Device("cuda").xp if self.name == "gpu" else np

    def put(self, array):
        return Device("cuda").asarray(array) if self.name == "gpu" else array

    def put_matrix(self, matrix):
        return matrix.to_device("cuda") if self.name == "gpu" else matrix

    def get(self, array) -> np.ndarray:
        return array.get() if hasattr(array, "get") else array

    @contextmanager
    def running(self):
        """Send CUDA launches to the emulator inside the block."""
        if not self.name.startswith("emulated"):
            yield
            return
        warp_size = int(self.name.removeprefix("emulated-"))
        with pytest.MonkeyPatch.context() as patch:
            compile_ = cuda_module.compile_function
            patch.setattr(
                cuda_module, "compile_function", lambda source, name: emulated_function(source, warp_size, name)
            )
            try:
                yield
            except EmulatorUnavailableError as error:
                pytest.skip(str(error))
        assert cuda_module.compile_function is compile_


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(gpu_count() == 0, reason="no CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
TARGETS = [
    pytest.param(Target("cpu"), id="cpu"),
    pytest.param(Target("emulated-32"), id="emulated-warp32"),
    pytest.param(Target("emulated-64"), id="emulated-warp64"),
    pytest.param(Target("gpu"), id="gpu", marks=ON_GPU),
]


@contextmanager
def converting(target):
    """Make matrices in NumPy arrays pass for CUDA ones while the emulator runs."""
    with target.running(), pytest.MonkeyPatch.context() as patch:
        if target.name.startswith("emulated"):
            patch.setattr(SparseMatrix, "device", SimpleNamespace(kind="cuda", xp=np, current=nullcontext))
        yield
