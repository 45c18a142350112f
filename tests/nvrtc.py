"""NVRTC without CuPy and without a GPU: compiles CUDA C++ to machine code for a named architecture."""

import ctypes
import importlib.util
from pathlib import Path

from runtime_compiler import compile_with


class NvrtcUnavailableError(RuntimeError):
    """No NVRTC library is installed."""


def load_nvrtc() -> ctypes.CDLL:
    """Load the library that the package ``nvidia-cuda-nvrtc`` brings."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec and spec.submodule_search_locations else ():
        for library in sorted(Path(folder).glob("**/libnvrtc.so.*")):
            return ctypes.CDLL(str(library))
    raise NvrtcUnavailableError("pip install nvidia-cuda-nvrtc")


def compile_for(architecture: str, source: str, expressions: list[str], *, optimised: bool = False) -> int:
    """Compile all instantiations and return the size of the code; raise RuntimeError with the log on an error.

    For an architecture such as ``sm_90`` that is machine code; for a virtual one, ``compute_90``, PTX, in less time. All errors
    of a source are found without optimising it, in a tenth of the time or less.
    """
    size = "GetPTXSize" if architecture.startswith("compute") else "GetCUBINSize"
    options = [] if optimised else ["--Ofast-compile=max"]
    return compile_with(load_nvrtc(), "nvrtc", size, architecture, source, expressions, options)
