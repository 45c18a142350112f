"""hiprtc without a GPU: compiles the CUDA C++ of the kernels to machine code for a named AMD architecture."""

import ctypes


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
    hiprtc = load_hiprtc()
    program = ctypes.c_void_p()
    assert hiprtc.hiprtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None) == 0
    try:
        for expression in expressions:
            assert hiprtc.hiprtcAddNameExpression(program, expression.encode()) == 0
        options = (ctypes.c_char_p * 2)(f"--gpu-architecture={architecture}".encode(), b"--std=c++17")
        if hiprtc.hiprtcCompileProgram(program, len(options), options) != 0:
            size = ctypes.c_size_t()
            hiprtc.hiprtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            hiprtc.hiprtcGetProgramLog(program, log)
            raise RuntimeError(log.value.decode())
        size = ctypes.c_size_t()
        assert hiprtc.hiprtcGetCodeSize(program, ctypes.byref(size)) == 0
        return size.value
    finally:
        hiprtc.hiprtcDestroyProgram(ctypes.byref(program))
