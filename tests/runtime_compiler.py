"""The interface that NVRTC and hiprtc share, under names that differ in their prefix."""

import ctypes
from collections.abc import Sequence
from typing import Any


def compile_with(
    library: ctypes.CDLL,
    prefix: str,
    get_size: str,
    architecture: str,
    source: str,
    expressions: list[str],
    more_options: Sequence[str] = (),
) -> int:
    """Compile all instantiations and return the size of the binary; raise RuntimeError with the log on an error."""

    def call(name: str, *arguments: Any) -> int:
        return getattr(library, prefix + name)(*arguments)

    program = ctypes.c_void_p()
    assert call("CreateProgram", ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None) == 0
    try:
        for expression in expressions:
            assert call("AddNameExpression", program, expression.encode()) == 0
        words = [f"--gpu-architecture={architecture}", "--std=c++17", *more_options]
        options = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
        size = ctypes.c_size_t()
        if call("CompileProgram", program, len(options), options) != 0:
            call("GetProgramLogSize", program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            call("GetProgramLog", program, log)
            raise RuntimeError(log.value.decode())
        assert call(get_size, program, ctypes.byref(size)) == 0
        return size.value
    finally:
        call("DestroyProgram", ctypes.byref(program))
