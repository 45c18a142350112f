"""Iterative solution of sparse symmetric positive definite systems, whether or not the matrix fits in device memory.

``penstock.solve(A, b)`` solves a system, ``penstock.prepare(A)`` sets one up for many solves, ``penstock.eigsh(K, M=M)``
finds the lowest modes of a body, and ``penstock.multiply_store``
multiplies a matrix on disk by one in memory. ``penstock.torch.solve`` and ``penstock.jax.solve`` pass gradients on. Every error
that the package explains is a ``penstock.PenstockError``. The subpackages are ``penstock.spmv`` (apply a matrix),
``penstock.streaming`` (a matrix larger than the device), ``penstock.solvers``, ``penstock.fem`` (model problems) and
``penstock.experiments`` (runs described in YAML). Importing ``penstock`` itself loads none of them.
"""

from __future__ import annotations

import typing as _typing

from penstock.host.forks import prepare_forks as _prepare_forks
from penstock.host.threads import prepare_threads as _prepare_threads

if _typing.TYPE_CHECKING:
    from penstock.driver.eigsh import eigsh
    from penstock.driver.fixing import fix
    from penstock.driver.prepared import PreparedSystem, prepare
    from penstock.driver.solve import solve
    from penstock.fem.element_matrix import ElementMatrix
    from penstock.fem.own_element import OwnElement
    from penstock.solvers.eigen.result import Modes
    from penstock.spmv.errors import (
        BudgetError,
        DeviceError,
        InputError,
        NotConvergedError,
        NotConvergedWarning,
        PenstockError,
        StoreError,
    )
    from penstock.streaming.store_products import multiply_store

    #: The release, as a string.
    __version__: str

#: Where the public names are defined that are loaded when they are first asked for.
_HOMES = {
    "BudgetError": "penstock.spmv.errors",
    "DeviceError": "penstock.spmv.errors",
    "ElementMatrix": "penstock.fem.element_matrix",
    "OwnElement": "penstock.fem.own_element",
    "InputError": "penstock.spmv.errors",
    "Modes": "penstock.solvers.eigen.result",
    "NotConvergedError": "penstock.spmv.errors",
    "NotConvergedWarning": "penstock.spmv.errors",
    "PenstockError": "penstock.spmv.errors",
    "PreparedSystem": "penstock.driver.prepared",
    "StoreError": "penstock.spmv.errors",
    "eigsh": "penstock.driver.eigsh",
    "fix": "penstock.driver.fixing",
    "multiply_store": "penstock.streaming.store_products",
    "prepare": "penstock.driver.prepared",
    "solve": "penstock.driver.solve",
}
#: The version of a copy that is not installed, of which no tag is known.
_UNINSTALLED = "0.1.0.dev0"

_prepare_threads()
_prepare_forks()

__all__ = [
    "BudgetError",
    "DeviceError",
    "ElementMatrix",
    "InputError",
    "Modes",
    "NotConvergedError",
    "NotConvergedWarning",
    "OwnElement",
    "PenstockError",
    "PreparedSystem",
    "StoreError",
    "__version__",
    "eigsh",
    "fix",
    "multiply_store",
    "prepare",
    "solve",
]


def __getattr__(name: str) -> _typing.Any:
    """Load a public name, or look the version up, when it is first asked for."""
    if name == "__version__":
        return _version()
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in ("jax", "torch"):  # each needs the library of its name
        import importlib

        return importlib.import_module(f"penstock.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, also those that are not loaded yet, and nothing else."""
    return sorted(__all__)


def _version() -> str:
    """Return the version that the installation recorded, which is made of the tag."""
    import importlib.metadata

    try:
        return importlib.metadata.version("penstock")
    except importlib.metadata.PackageNotFoundError:
        return _UNINSTALLED
