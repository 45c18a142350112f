"""Check the arguments of a kernel against its parameters, and place arrays between guard zones."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda_emulator.errors import EmulationError

GUARD_NBYTES = 64
GUARD_BYTE = 0xE7
ALLOCATION_ALIGNMENT = 256  # where CUDA's allocations start: at multiples of this, in bytes

KIND_NAMES = {
    "f": "a floating-point number",
    "i": "an integer",
    "u": "an unsigned integer",
    "b": "a bool",
    "V": "a struct",
}


def check_arguments(kernel_name: str, parameters: Sequence[str], arguments: Sequence[object]) -> None:
    """Raise an error unless the arguments fit the kernel's parameters.

    A GPU would take the bytes as they come. Here sizes must agree, and floating-point numbers and integers are not
    mistaken for each other; signed and unsigned integers are. Arrays of single bytes, of structs and of complex
    numbers fit every pointer, and every array fits a pointer to void, to a single byte or to a struct.

    Parameters
    ----------
    kernel_name
        For the message.
    parameters
        A code for each parameter: ``f8`` for double, ``i4`` for int, ``V16`` for a struct of 16 bytes; a pointer has
        an asterisk in front.
    arguments
        Arrays, or None for a null pointer, where the kernel takes pointers; NumPy scalars where it takes values.

    Raises
    ------
    TypeError
        If there are too few or too many arguments, or one of the wrong type.
    ValueError
        If an array is not C-contiguous.
    """
    if len(parameters) != len(arguments):
        raise TypeError(f"{kernel_name} takes {len(parameters)} arguments, got {len(arguments)}")
    for index, (code, argument) in enumerate(zip(parameters, arguments, strict=True)):
        where = f"argument {index} of {kernel_name}"
        if isinstance(argument, (int, float, complex)) and not isinstance(argument, np.generic):
            raise TypeError(
                f"{where}: a Python {type(argument).__name__} does not say how many bytes the kernel takes; "
                f"expected {_parameter_in_words(code)}, so pass a NumPy array or scalar of that type"
            )
        if isinstance(argument, np.ndarray):
            _check_layout(where, argument)
        if not (_fits_pointer(code[1:], argument) if code.startswith("*") else _fits_value(code, argument)):
            raise TypeError(f"{where}: expected {_parameter_in_words(code)}, got {_argument_in_words(argument)}")


def _check_layout(where: str, array: NDArray[Any]) -> None:
    if array.dtype.hasobject:
        raise TypeError(f"{where}: a kernel cannot use an array of Python objects")
    if not array.flags.c_contiguous:
        raise ValueError(
            f"{where}: expected a C-contiguous array, got shape {array.shape} with strides {array.strides} bytes; "
            f"pass numpy.ascontiguousarray of it"
        )


def _fits_pointer(pointee: str, argument: object) -> bool:
    if argument is None:
        return True
    if not isinstance(argument, np.ndarray):
        return False
    raw_bytes = argument.dtype.itemsize == 1 or argument.dtype.kind in "Vc" or pointee in ("i1", "u1")
    return raw_bytes or pointee[0] in "V*" or _same_number(pointee, argument.dtype)


def _fits_value(code: str, argument: object) -> bool:
    if not isinstance(argument, np.generic):
        return False
    return argument.dtype.itemsize == int(code[1:]) if code[0] == "V" else _same_number(code, argument.dtype)


def _same_number(code: str, dtype: np.dtype[Any]) -> bool:
    return dtype.itemsize == int(code[1:]) and (dtype.kind == "f") == (code[0] == "f") and dtype.kind in "fiub"


def _parameter_in_words(code: str) -> str:
    if code.startswith("*"):
        return f"a pointer to {_parameter_in_words(code[1:])}"
    return "void" if code == "V0" else f"{KIND_NAMES[code[0]]} of {code[1:]} bytes"


def _argument_in_words(argument: object) -> str:
    if isinstance(argument, np.ndarray):
        return f"an array of {argument.dtype}"
    if isinstance(argument, np.generic):
        return f"a scalar of {argument.dtype}"
    return f"{type(argument).__name__}"


@dataclass
class _GuardedCopy:
    """A copy, between guard zones, of the memory of one array or of several that overlap."""

    start: int  # addresses of the original
    stop: int
    members: list[int]  # indices of the arguments
    buffer: NDArray[np.uint8]  # the guard zones and, between them, the copy
    offset: int  # of the copy in the buffer

    @property
    def content(self) -> NDArray[np.uint8]:
        return self.buffer[self.offset : self.offset + self.stop - self.start]


class PlacedArguments:
    """The arguments of one launch, in memory that only the kernel sees until `copy_back`.

    Every array is copied between two guard zones of at least 64 bytes. Arrays that overlap are copied as one, so that
    they still overlap. A copy has the alignment that the array would have on a GPU, where allocations are aligned to
    256 bytes and a view starts somewhere inside one.

    Parameters
    ----------
    kernel_name
        For messages.
    arguments
        As `check_arguments` accepts them. Only `copy_back` writes to the arrays.
    """

    def __init__(self, kernel_name: str, arguments: Sequence[object]) -> None:
        self._kernel_name = kernel_name
        self._arrays = {index: array for index, array in enumerate(arguments) if isinstance(array, np.ndarray)}
        self._copies = self._make_copies()
        values: dict[int, NDArray[Any]] = {}
        for index, argument in enumerate(arguments):
            if index not in self._arrays:
                values[index] = np.asarray(np.uint64(0) if argument is None else argument)
        for copy in self._copies:
            for index in copy.members:
                address = copy.content.ctypes.data + _address(self._arrays[index]) - copy.start
                values[index] = np.asarray(np.uint64(address))
        self._values = [values[index] for index in range(len(arguments))]

    def value_addresses(self) -> "ctypes.Array[ctypes.c_void_p]":
        """Return the address at which the value of each argument lies; valid as long as this object lives."""
        return (ctypes.c_void_p * len(self._values))(*(value.ctypes.data for value in self._values))

    def check_writes(self) -> None:
        """Raise `EmulationError` if the kernel wrote into a guard zone or into a read-only array."""
        for copy in self._copies:
            before = np.flatnonzero(copy.buffer[: copy.offset] != GUARD_BYTE)
            behind = np.flatnonzero(copy.buffer[copy.offset + copy.content.size :] != GUARD_BYTE)
            if before.size:
                first = min(copy.members, key=lambda index: _address(self._arrays[index]))
                self._complain(first, f"was written {copy.offset - before[-1]} bytes before its start")
            if behind.size:
                last = max(copy.members, key=lambda index: _end_address(self._arrays[index]))
                self._complain(last, f"was written {behind[0]} bytes behind its end")
            if not any(self._arrays[index].flags.writeable for index in copy.members):
                for index in copy.members:
                    if not np.array_equal(_bytes(self._arrays[index]), self._copied_bytes(copy, index)):
                        self._complain(index, "is read-only, but was written")

    def copy_back(self) -> None:
        """Give the caller's arrays, except read-only ones, what the kernel left in the copies."""
        for copy in self._copies:
            for index in copy.members:
                if self._arrays[index].flags.writeable:
                    _bytes(self._arrays[index])[:] = self._copied_bytes(copy, index)

    def _make_copies(self) -> list[_GuardedCopy]:
        groups: list[tuple[int, int, list[int]]] = []
        for index in sorted(self._arrays, key=lambda index: _address(self._arrays[index])):
            start, stop = _address(self._arrays[index]), _end_address(self._arrays[index])
            if groups and start < groups[-1][1]:
                first, last, members = groups.pop()
                groups.append((first, max(last, stop), [*members, index]))
            else:
                groups.append((start, stop, [index]))
        copies = []
        for start, stop, members in groups:
            place_in_allocation = start - _address(_owner(self._arrays[members[0]]))
            buffer = np.full(ALLOCATION_ALIGNMENT + 2 * GUARD_NBYTES + stop - start, GUARD_BYTE, dtype=np.uint8)
            offset = GUARD_NBYTES
            offset += (place_in_allocation - buffer.ctypes.data - offset) % ALLOCATION_ALIGNMENT
            copy = _GuardedCopy(start, stop, members, buffer, offset)
            for index in members:
                self._copied_bytes(copy, index)[:] = _bytes(self._arrays[index])
            copies.append(copy)
        return copies

    def _copied_bytes(self, copy: _GuardedCopy, index: int) -> NDArray[np.uint8]:
        array = self._arrays[index]
        return copy.content[_address(array) - copy.start : _end_address(array) - copy.start]

    def _complain(self, index: int, what: str) -> None:
        array = self._arrays[index]
        raise EmulationError(
            f"argument {index} of {self._kernel_name}, an array of {array.dtype} of shape {array.shape}, {what}"
        )


def _address(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)


def _end_address(array: NDArray[Any]) -> int:
    return _address(array) + array.nbytes


def _bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


def _owner(array: NDArray[Any]) -> NDArray[Any]:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
