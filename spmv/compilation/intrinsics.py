"""Intrinsics for CPU kernels: vectors of four float64, prefetching, and a sum of products with one rounding.

Compilers cannot see that the columns of neighbouring rows are consecutive, nor that the processor cannot predict the order
in which memory is read. In a kernel, one variable holds four float64::

    x0, x1, x2 = load_triples(x, 3 * k)
    store(total, p, multiply_add(load(a, p), x0, load(total, p)))

Arrays must be one-dimensional and contiguous; no index is checked. Numba's cache on disk notices only changes of the file
that contains a kernel: after a change here, change that file as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import NumbaTypeError
from numba.extending import intrinsic, models, register_model

#: Numbers in one variable: one register with AVX2, two on 64-bit ARM.
WIDTH = 4
_NUMBER, _FLOAT64 = ir.IntType(32), ir.DoubleType()
_VECTOR = ir.VectorType(_FLOAT64, WIDTH)
# Arguments of llvm.prefetch: for reading, into all cache levels, data.
_PREFETCH = (_NUMBER(0), _NUMBER(3), _NUMBER(1))
_intrinsic: Callable[[Callable[..., Any]], Any] = intrinsic


class _Lanes(types.Type):
    """The type of WIDTH numbers in one variable."""

    def __init__(self) -> None:
        super().__init__("Lanes")


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR)


_LANES = _Lanes()
_THREE_LANES = types.UniTuple(_LANES, 3)


@_intrinsic
def load(typing_context: Any, array: Any, index: Any) -> Any:
    """Return ``array[index : index + WIDTH]``, in float64."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _loaded(builder, _address(context, builder, signature, arguments))

    return _LANES(array, types.intp), emit


@_intrinsic
def store(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    """Set ``array[index : index + WIDTH]``, rounded to its type."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _store(builder, _address(context, builder, signature, arguments), arguments[2])
        return context.get_dummy_value()

    return types.void(array, types.intp, _LANES), emit


@_intrinsic
def load_triples(typing_context: Any, array: Any, index: Any) -> Any:
    """Return the WIDTH triples that begin at ``array[index]``, as one vector per component."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first = _address(context, builder, signature, arguments)
        u, v, w = (_loaded(builder, _after(builder, first, WIDTH * part)) for part in range(3))
        # u, v, w are x0 y0 z0 x1, y1 z1 x2 y2 and z2 x3 y3 z3.
        xs = _shuffled(builder, _shuffled(builder, u, v, 0, 3, 6, 6), w, 0, 1, 2, 5)
        ys = _shuffled(builder, _shuffled(builder, u, v, 1, 4, 7, 7), w, 0, 1, 2, 6)
        zs = _shuffled(builder, _shuffled(builder, u, v, 2, 5, 5, 5), w, 0, 1, 4, 7)
        return context.make_tuple(builder, _THREE_LANES, (xs, ys, zs))

    return _THREE_LANES(array, types.intp), emit


@_intrinsic
def add_triples(typing_context: Any, array: Any, index: Any, xs: Any, ys: Any, zs: Any) -> Any:
    """Add WIDTH triples, one vector per component, to those that begin at ``array[index]``."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first = _address(context, builder, signature, arguments)
        xs, ys, zs = arguments[2:]
        u = _shuffled(builder, _shuffled(builder, xs, ys, 0, 4, 1, 1), zs, 0, 1, 4, 2)
        v = _shuffled(builder, _shuffled(builder, ys, zs, 1, 5, 2, 2), xs, 0, 1, 6, 2)
        w = _shuffled(builder, _shuffled(builder, zs, xs, 2, 7, 3, 3), ys, 0, 1, 7, 2)
        for part, added in enumerate((u, v, w)):
            place = _after(builder, first, WIDTH * part)
            _store(builder, place, builder.fadd(_loaded(builder, place), added))
        return context.get_dummy_value()

    return types.void(array, types.intp, _LANES, _LANES, _LANES), emit


@_intrinsic
def multiply(typing_context: Any, a: Any, b: Any) -> Any:
    """Return ``a * b``."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fmul(*arguments)

    return _LANES(_LANES, _LANES), emit


@_intrinsic
def multiply_add(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """Return ``a * b + c``, rounded once where the processor can."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        shape = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        function = cgutils.get_or_insert_function(builder.module, shape, f"llvm.fmuladd.v{WIDTH}f64")
        return builder.call(function, arguments)

    return _LANES(_LANES, _LANES, _LANES), emit


@_intrinsic
def fused(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """Return ``a * b + c``, three float64, rounded once on every processor.

    Of ``alpha * total + beta * before`` the compiler may fuse either product with the sum, and chooses differently from kernel
    to kernel. Rows that one kernel completes in the whole matrix and another one in a slab get the same bits by this.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        shape = ir.FunctionType(_FLOAT64, [_FLOAT64] * 3)
        return builder.call(cgutils.get_or_insert_function(builder.module, shape, "llvm.fma.f64"), arguments)

    return types.float64(types.float64, types.float64, types.float64), emit


@_intrinsic
def consecutive(typing_context: Any, array: Any, index: Any) -> Any:
    """Return whether the WIDTH integers that begin at ``array[index]`` are consecutive."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = _address(context, builder, signature, arguments)
        first, *others = (builder.load(_after(builder, address, lane)) for lane in range(WIDTH))
        consecutive_so_far = ir.IntType(1)(1)
        for lane, other in enumerate(others, 1):
            follows = builder.icmp_signed("==", other, builder.add(first, first.type(lane)))
            consecutive_so_far = builder.and_(consecutive_so_far, follows)
        return consecutive_so_far

    return types.boolean(array, types.intp), emit


@_intrinsic
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Prefetch the cache line of ``array[index]``; the index may lie past the end of the array."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = builder.bitcast(_address(context, builder, signature, arguments), ir.IntType(8).as_pointer())
        shape = ir.FunctionType(ir.VoidType(), [address.type, *(number.type for number in _PREFETCH)])
        builder.call(builder.module.declare_intrinsic("llvm.prefetch", [address.type], shape), [address, *_PREFETCH])
        return context.get_dummy_value()

    return types.void(array, types.intp), emit


def _address(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """Return the address of an element from the first two arguments, an array and an index."""
    kind = signature.args[0]
    if kind.ndim != 1 or kind.layout != "C":
        raise NumbaTypeError(f"an intrinsic needs contiguous arrays of one dimension, not {kind}")
    return builder.gep(context.make_array(kind)(context, builder, arguments[0]).data, [arguments[1]])


def _after(builder: Any, address: Any, count: int) -> Any:
    return builder.gep(address, [ir.IntType(64)(count)])


def _loaded(builder: Any, address: Any) -> Any:
    scalar = address.type.pointee
    vector = ir.VectorType(scalar, WIDTH)
    value = builder.load(builder.bitcast(address, vector.as_pointer()), align=_nbytes(scalar))
    return value if scalar == _FLOAT64 else builder.fpext(value, _VECTOR)


def _store(builder: Any, address: Any, value: Any) -> None:
    scalar = address.type.pointee
    vector = ir.VectorType(scalar, WIDTH)
    rounded = value if scalar == _FLOAT64 else builder.fptrunc(value, vector)
    builder.store(rounded, builder.bitcast(address, vector.as_pointer()), align=_nbytes(scalar))


def _nbytes(scalar: Any) -> int:
    return 8 if scalar == _FLOAT64 else 4


def _shuffled(builder: Any, first: Any, second: Any, *lanes: int) -> Any:
    """Return the selected lanes of two vectors; lanes of the second are numbered from WIDTH on."""
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_NUMBER, WIDTH), list(lanes)))
