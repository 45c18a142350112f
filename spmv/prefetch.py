"""A hint to the processor inside CPU kernels: fetch this memory, it is needed soon."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

__all__ = ["prefetch"]

_READ, _KEEP_IN_ALL_CACHES, _DATA = 0, 3, 1


def _emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
    address = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
    number = ir.IntType(32)
    shape = ir.FunctionType(ir.VoidType(), [address.type, number, number, number])
    function = builder.module.declare_intrinsic("llvm.prefetch", [address.type], shape)
    builder.call(function, [address, number(_READ), number(_KEEP_IN_ALL_CACHES), number(_DATA)])
    return context.get_dummy_value()


def _prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Begin to load the cache line of ``array[index]``, for a one-dimensional array; the index may lie behind its end.

    Processors foresee reads that move through memory in order. A kernel that reads several streams by turns, such as the
    scalars of interleaved blocks, waits for most of its lines unless it asks for them itself.
    """
    return types.void(array, types.intp), _emit


#: ``prefetch(array, index)``, in kernels only.
prefetch: Any = intrinsic(_prefetch)
