"""Arguments of :func:`penstock.solve` of types that cannot be meant are refused before anything is made of them."""

from __future__ import annotations

import os
from numbers import Integral
from typing import Any, Literal

import numpy as np
import scipy.sparse

from penstock.solvers import PreconditionerSpec
from penstock.spmv import Device, InputError
from penstock.spmv.formats.limits import LARGEST_DENSE_BLOCK, check_unknowns_of_a_node

#: Of the values of a matrix that does not fit, as far as they are held in memory; with float64 all of them are streamed.
PRECISIONS = ("auto", "float64", "float32", "int16")

#: What happens if a solve, or a search for modes, does not converge.
OnFailure = Literal["return", "warn", "raise"]


def checked_options(
    device: Any,
    preconditioner: Any,
    block_size: Any,
    folder: Any,
    near_null_space: Any,
    coordinates: Any,
) -> dict[str, Any]:
    """Return the options of the preconditioner that are set; refuse arguments of a type that cannot be meant."""
    if not isinstance(device, str | Device):
        raise InputError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:<number>', not {_short(device)}")
    is_operator = callable(preconditioner) or hasattr(preconditioner, "shape")
    if not isinstance(preconditioner, str | PreconditionerSpec) and not is_operator:
        raise InputError(
            f"preconditioner must be 'auto', a registered name such as 'jacobi', a choice with options of its own such as "
            f"ChebyshevSpec(degree=9), or an operator, a matrix or a function that maps r to z, not {_short(preconditioner)}"
        )
    whole = isinstance(block_size, Integral) and not isinstance(block_size, bool)
    if block_size != "auto" if isinstance(block_size, str) else not (whole and block_size >= 1):
        raise InputError(f"block_size must be a whole number of rows, 1 or more, or 'auto', not {_short(block_size)}")
    if folder is not None and not isinstance(folder, str | os.PathLike):
        raise InputError(f"folder must be the path of a folder, not {_short(folder)}")
    _check_numbers("near_null_space", near_null_space, "(n,) or (n, k)", (1, 2))
    _check_numbers("coordinates", coordinates, "(nodes, 2) or (nodes, 3)", (2,))
    options = {"near_null_space": near_null_space, "coordinates": coordinates}
    if isinstance(preconditioner, PreconditionerSpec) and any(value is not None for value in options.values()):
        raise InputError(
            "coordinates and near_null_space are options of the preconditioner's specification; give them there"
        )
    return {
        name: value.to_numpy() if hasattr(value, "to_numpy") else value  # of pandas
        for name, value in options.items()
        if value is not None
    }


def unknowns_of_a_node(rows: int, block_size: int | Literal["auto"], coordinates: Any) -> int | Literal["auto"]:
    """Return the unknowns of a node of a matrix, those that the coordinates imply if the caller does not say.

    Raises
    ------
    InputError
        If the rows are not a multiple of them.
    """
    if block_size != "auto":
        check_unknowns_of_a_node(block_size)
        if rows % block_size:
            raise InputError(f"block_size must divide the rows of the matrix: {rows} is not a multiple of {block_size}")
        return int(block_size)  # numbers of bytes that are computed from a NumPy int8 would overflow
    if coordinates is None or rows == len(coordinates) == 0:
        return block_size
    nodes = len(coordinates)
    if not nodes or rows % nodes or rows // nodes > LARGEST_DENSE_BLOCK:
        raise InputError(
            f"coordinates must have a row for each node, of 1 to {LARGEST_DENSE_BLOCK} unknowns: {nodes} rows do not fit a "
            f"matrix of {rows} rows"
        )
    return rows // nodes


def checked_failure(on_failure: Any) -> None:
    """Refuse what does not say how a failure is reported."""
    if not isinstance(on_failure, str) or on_failure not in ("return", "warn", "raise"):
        raise InputError(f"on_failure must be 'return', 'warn' or 'raise', not {_short(on_failure)}")


def checked_precision(precision: Any, verify: Any = "bound") -> None:
    """Refuse what is no precision in which a matrix can be held, and no way to end a solve with it."""
    if not isinstance(verify, str) or verify not in ("bound", "norm"):
        raise InputError(f"verify must be 'bound' or 'norm', not {_short(verify)}")
    if not isinstance(precision, str) or precision not in PRECISIONS:
        raise InputError(f"precision must be one of {', '.join(PRECISIONS)}, not {_short(precision)}")


def _check_numbers(name: str, value: Any, shapes: str, dimensions: tuple[int, ...]) -> None:
    """Refuse what is no array of real numbers; arrays of other libraries are left to the conversion."""
    if value is None:
        return
    expected = f"{name} must be an array of real numbers of shape {shapes}"
    try:
        array = value if hasattr(value, "dtype") else np.asarray(value)
    except ValueError as error:  # rows of different lengths
        raise InputError(f"{expected}: {error}") from None
    is_sparse = scipy.sparse.issparse(array)
    if is_sparse or getattr(array.dtype, "kind", "f") not in "fiub" or len(array.shape) not in dimensions:
        raise InputError(f"{expected}, not {_short(value)} of shape {tuple(array.shape)} and type {array.dtype}")


def _short(value: Any) -> str:
    return repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
