"""NVRTC without CuPy and without a GPU: compiles CUDA C++ to machine code for a named architecture."""

import ctypes
import importlib.util
from pathlib import Path


class NvrtcUnavailableError(RuntimeError):
    """No NVRTC library is installed."""


def load_nvrtc() -> ctypes.CDLL:
    """Load the library that the package ``nvidia-cuda-nvrtc`` brings."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec and spec.submodule_search_locations else ():
        for library in sorted(Path(folder).glob("**/libnvrtc.so.*")):
            return ctypes.CDLL(str(library))
    raise NvrtcUnavailableError("pip install nvidia-cuda-nvrtc")


def compile_for(architecture: str, source: str, expressions: list[str]) -> int:
    """Compile all instantiations and return the size of the binary; raise RuntimeError with the log on an error."""
    nvrtc = load_nvrtc()
    program = ctypes.c_void_p()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None) == 0
    try:
        for expression in expressions:
            assert nvrtc.nvrtcAddNameExpression(program, expression.encode()) == 0
        options = (ctypes.c_char_p * 2)(f"--gpu-architecture={architecture}".encode(), b"--std=c++17")
        if nvrtc.nvrtcCompileProgram(program, len(options), options) != 0:
            size = ctypes.c_size_t()
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(log.value.decode())
        size = ctypes.c_size_t()
        assert nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)) == 0
        return size.value
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
