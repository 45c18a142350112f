"""hiprtc without a GPU: compiles the CUDA C++ of the kernels to machine code for a named AMD architecture."""

import ctypes

from runtime_compiler import compile_with


class HiprtcUnavailableError(RuntimeError):
    """No hiprtc library is installed."""


def load_hiprtc() -> ctypes.CDLL:
    """Load the library that Debian's package ``libamdhip64-5`` brings."""
    try:
        return ctypes.CDLL("libamdhip64.so.5")
    except OSError as error:
        raise HiprtcUnavailableError("apt-get install libamdhip64-5 libhiprtc-builtins5") from error


def compile_for(architecture: str, source: str, expressions: list[str]) -> int:
    """Compile all instantiations and return the size of the binary; raise RuntimeError with the log on an error."""
    return compile_with(load_hiprtc(), "hiprtc", "GetCodeSize", architecture, source, expressions)
