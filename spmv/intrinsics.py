"""Instructions that CPU kernels ask for by name: four numbers at a time, and prefetching.

Compilers do not see that the columns of neighbouring rows follow each other, nor that memory is read in an order which the
processor cannot foresee. In a kernel, four float64 stand in one variable::

    x0, x1, x2 = load_triples(x, 3 * k)
    store(total, p, multiply_add(load(a, p), x0, load(total, p)))

Arrays have one dimension and are contiguous. No index is checked. Numba's cache on disk notices only changes of the file that a
kernel stands in: after one here, change that as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import NumbaTypeError
from numba.extending import intrinsic, models, register_model

__all__ = [
    "WIDTH",
    "add_triples",
    "consecutive",
    "load",
    "load_triples",
    "multiply",
    "multiply_add",
    "prefetch",
    "store",
]

#: Numbers in one variable: those of a register with AVX2, of two on 64-bit ARM.
WIDTH = 4
_NUMBER, _FLOAT64 = ir.IntType(32), ir.DoubleType()
_VECTOR = ir.VectorType(_FLOAT64, WIDTH)
# Of llvm.prefetch: to read, into all caches, data.
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
    """Return WIDTH triples from ``array[index]`` on, component by component."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first = _address(context, builder, signature, arguments)
        u, v, w = (_loaded(builder, _after(builder, first, WIDTH * part)) for part in range(3))
        # u, v, w are x0 y0 z0 x1, y1 z1 x2 y2 and z2 x3 y3 z3.
        xs = _chosen(builder, _chosen(builder, u, v, 0, 3, 6, 6), w, 0, 1, 2, 5)
        ys = _chosen(builder, _chosen(builder, u, v, 1, 4, 7, 7), w, 0, 1, 2, 6)
        zs = _chosen(builder, _chosen(builder, u, v, 2, 5, 5, 5), w, 0, 1, 4, 7)
        return context.make_tuple(builder, _THREE_LANES, (xs, ys, zs))

    return _THREE_LANES(array, types.intp), emit


@_intrinsic
def add_triples(typing_context: Any, array: Any, index: Any, xs: Any, ys: Any, zs: Any) -> Any:
    """Add WIDTH triples, given component by component, to those from ``array[index]`` on."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first = _address(context, builder, signature, arguments)
        xs, ys, zs = arguments[2:]
        u = _chosen(builder, _chosen(builder, xs, ys, 0, 4, 1, 1), zs, 0, 1, 4, 2)
        v = _chosen(builder, _chosen(builder, ys, zs, 1, 5, 2, 2), xs, 0, 1, 6, 2)
        w = _chosen(builder, _chosen(builder, zs, xs, 2, 7, 3, 3), ys, 0, 1, 7, 2)
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
def consecutive(typing_context: Any, array: Any, index: Any) -> Any:
    """Return whether the WIDTH integers from ``array[index]`` on follow each other."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = _address(context, builder, signature, arguments)
        first, *others = (builder.load(_after(builder, address, lane)) for lane in range(WIDTH))
        found = ir.IntType(1)(1)
        for lane, other in enumerate(others, 1):
            found = builder.and_(found, builder.icmp_signed("==", other, builder.add(first, first.type(lane))))
        return found

    return types.boolean(array, types.intp), emit


@_intrinsic
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Begin to load the cache line of ``array[index]``, which may lie behind the end of the array."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = builder.bitcast(_address(context, builder, signature, arguments), ir.IntType(8).as_pointer())
        shape = ir.FunctionType(ir.VoidType(), [address.type, *(number.type for number in _PREFETCH)])
        builder.call(builder.module.declare_intrinsic("llvm.prefetch", [address.type], shape), [address, *_PREFETCH])
        return context.get_dummy_value()

    return types.void(array, types.intp), emit


def _address(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """Return where the element is of an array and an index, the first two arguments."""
    kind = signature.args[0]
    if kind.ndim != 1 or kind.layout != "C":
        raise NumbaTypeError(f"an intrinsic takes contiguous arrays of one dimension, not {kind}")
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


def _chosen(builder: Any, first: Any, second: Any, *lanes: int) -> Any:
    """Return lanes of two vectors, those of the second counted from WIDTH on."""
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_NUMBER, WIDTH), list(lanes)))
