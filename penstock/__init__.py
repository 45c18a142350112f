"""Iterative solution of sparse symmetric positive definite systems, whether or not the matrix fits in device memory.

``penstock.solve(A, b)`` solves a system, and ``penstock.multiply_store`` multiplies a matrix on disk by one in memory. The
subpackages are ``penstock.spmv`` (apply a matrix), ``penstock.streaming`` (a matrix larger than the device),
``penstock.solvers``, ``penstock.fem`` (model problems) and ``penstock.experiments`` (runs described in YAML). Importing
``penstock`` itself loads none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.forks import prepare_forks
from penstock.threads import prepare_threads

if TYPE_CHECKING:
    from penstock.front_door import solve
    from penstock.store_products import multiply_store

    #: The release, as a string.
    __version__: str

#: The version of a copy that is not installed, of which no tag is known.
_UNINSTALLED = "0.1.0.dev0"

prepare_threads()
prepare_forks()

__all__ = ["__version__", "multiply_store", "solve"]


def __getattr__(name: str) -> Any:
    """Load a function, or look the version up, when it is first asked for."""
    if name == "__version__":
        return _version()
    if name == "solve":
        from penstock.front_door import solve

        return solve
    if name == "multiply_store":
        from penstock.store_products import multiply_store

        return multiply_store
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _version() -> str:
    """Return the version that the installation recorded, which is made of the tag."""
    import importlib.metadata

    try:
        return importlib.metadata.version("penstock")
    except importlib.metadata.PackageNotFoundError:
        return _UNINSTALLED
