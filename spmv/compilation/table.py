"""The table of kernels, keyed by format, operation and kind of device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.spmv.errors import InputError
from penstock.spmv.registry import Registry

Kernel = Callable[..., Any]

#: All kernels by ``(format, operation, kind of device)``.
KERNELS: Registry[tuple[str, str, str], Kernel] = Registry("kernel")


def register_kernel(format_name: str, operation: str, device_kind: str) -> Callable[[Kernel], Kernel]:
    """Enter the decorated function into the table.

    Parameters
    ----------
    format_name : str
        Name of the format, such as ``"csr"``.
    operation : str
        ``"spmv"`` and ``"spmm"`` take ``(matrix, x, out, alpha, beta)``. ``"diagonal_blocks"`` takes ``(matrix, first_row,
        blocks)`` and fills the zeroed ``blocks``, of shape ``(rows / size, size, size)``. A format needs ``"spmv"`` only;
        without the others slower general code is used.
    device_kind : {"cpu", "cuda"}
        Where it runs.

    Raises
    ------
    InputError
        If there is such a kernel already.

    Examples
    --------
    >>> from penstock.spmv import SparseMatrix, register_kernel, registered_kernels
    >>> @register_kernel("mine", "spmv", "cpu")
    ... def multiply(matrix, x, out, alpha, beta):
    ...     out[...] = alpha * (matrix.values * x) + (beta * out if beta else 0)
    >>> ("mine", "spmv", "cpu") in registered_kernels()
    True
    """

    def enter(function: Kernel) -> Kernel:
        KERNELS.add((format_name, operation, device_kind), function)
        return function

    return enter


def find_kernel(format_name: str, operation: str, device_kind: str) -> Kernel:
    """Return the kernel for a format, an operation and a kind of device, or raise an InputError that lists those there are."""
    key = (format_name, operation, device_kind)
    if key not in KERNELS:
        known = ["/".join(key) for key in KERNELS.keys() if key[0] == format_name]  # noqa: SIM118 - a method of ours
        raise InputError(f"no kernel for {'/'.join(key)}; registered for this format: {', '.join(known) or 'none'}")
    return KERNELS[key]


def has_kernel(format_name: str, operation: str, device_kind: str) -> bool:
    """Return whether a kernel is registered."""
    return (format_name, operation, device_kind) in KERNELS


def registered_kernels() -> list[tuple[str, str, str]]:
    """Return all keys of the table, sorted.

    Returns
    -------
    list of (str, str, str)
        Format, operation and kind of device.

    Examples
    --------
    >>> from penstock.spmv import registered_kernels
    >>> [key for key in registered_kernels() if key[:2] == ("sell", "spmv")]
    [('sell', 'spmv', 'cpu'), ('sell', 'spmv', 'cuda')]
    """
    return KERNELS.keys()
