"""Where a kernel can be run by a test: the CPU, the CUDA emulator in warps of 32 or 64, a real GPU."""

import functools
from contextlib import contextmanager

import numpy as np
import pytest
from cuda_emulator import EmulatedModule, EmulatorUnavailableError
from kernel_instances import EMULATED

from penstock.spmv import Device, DeviceError
from penstock.spmv.compilation import cuda_module
from penstock.spmv.device import cuda_device_count


def gpu_count() -> int:
    try:
        return cuda_device_count()
    except DeviceError:
        return 0


# Tests launch these so little that optimising them takes longer than it saves.
_BRIEF = {"block_products.cu"}


@functools.cache
def _emulated(file_name: str, warp_size: int, expression: str | None = None) -> EmulatedModule:
    """One module a file, with every instantiation that tests need, so that the compiler runs once."""
    expressions = [expression] if expression else EMULATED[file_name]
    # Indices are checked in warps of 32 only: checks double the time of compilation, and lanes index alike in both.
    source, options = cuda_module.cuda_source(file_name), ["-O0"] if file_name in _BRIEF else []
    return EmulatedModule(source, expressions, warp_size=warp_size, options=options, sanitize=warp_size == 32)


def emulated_function(file_name: str, warp_size: int, expression: str):
    """Return an emulated kernel; one that is not listed, or of a file outside the library, is compiled on its own."""
    module = _emulated(file_name, warp_size, *([] if expression in EMULATED.get(file_name, ()) else [expression]))
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
            patch.setattr(cuda_module, "compile_function", lambda file, name: emulated_function(file, warp_size, name))
            cuda_module.cuda_function.cache_clear()
            try:
                yield
            except EmulatorUnavailableError as error:
                pytest.skip(str(error))
            finally:
                cuda_module.cuda_function.cache_clear()
        assert cuda_module.compile_function is compile_


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(gpu_count() == 0, reason="no CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
TARGETS = [
    pytest.param(Target("cpu"), id="cpu"),
    pytest.param(Target("emulated-32"), id="emulated-warp32"),
    pytest.param(Target("emulated-64"), id="emulated-warp64"),
    pytest.param(Target("gpu"), id="gpu", marks=ON_GPU),
]
