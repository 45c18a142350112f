"""The table of kernels, keyed by format, operation and kind of device."""

from __future__ import annotations

from collections.abc import Callable

from penstock.spmv.errors import InputError

__all__ = ["find_kernel", "has_kernel", "register_kernel", "registered_kernels"]

Kernel = Callable[..., None]
_KERNELS: dict[tuple[str, str, str], Kernel] = {}


def register_kernel(format_name: str, operation: str, device_kind: str) -> Callable[[Kernel], Kernel]:
    """Enter the decorated function into the table.

    Parameters
    ----------
    format_name : str
        Name of the format, such as ``"csr"``.
    operation : str
        ``"spmv"`` and ``"spmm"`` take ``(matrix, x, out, alpha, beta)``. A format may do without ``"spmm"`` and without
        ``"diagonal_blocks"``, which takes ``(matrix, first_row, blocks)`` and fills the zeroed ``blocks``, of shape
        ``(rows / size, size, size)``: general ways then take their place.
    device_kind : {"cpu", "cuda"}
        Where it runs.
    """

    def enter(function: Kernel) -> Kernel:
        _KERNELS[format_name, operation, device_kind] = function
        return function

    return enter


def find_kernel(format_name: str, operation: str, device_kind: str) -> Kernel:
    """Return the kernel for a format, an operation and a kind of device.

    Raises
    ------
    InputError
        If there is none; the message lists what there is for that format.
    """
    try:
        return _KERNELS[format_name, operation, device_kind]
    except KeyError:
        known = [f"{name}/{what}/{kind}" for name, what, kind in sorted(_KERNELS) if name == format_name]
        raise InputError(
            f"no kernel for {format_name}/{operation}/{device_kind}; registered for this format: {', '.join(known) or 'none'}"
        ) from None


def has_kernel(format_name: str, operation: str, device_kind: str) -> bool:
    """Tell whether a kernel is registered."""
    return (format_name, operation, device_kind) in _KERNELS


def registered_kernels() -> list[tuple[str, str, str]]:
    """Return all keys of the table, sorted."""
    return sorted(_KERNELS)
