"""The interfaces of matrix stores."""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np

from penstock.streaming.stores.matrix_index import MatrixIndex, Part


@runtime_checkable
class Store(Protocol):
    """A matrix cut into subdivisions and kept outside the memory of the computing device.

    ``penstock.streaming.testing.StoreContract`` tests an implementation.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.streaming import HostStore, Store
    >>> store = HostStore.create(Cantilever(nodes=4, dof=3).subdivisions(4))
    >>> isinstance(store, Store), store.index.shape
    (True, (192, 192))
    """

    @property
    def index(self) -> MatrixIndex:
        """The description of the matrix and its subdivisions."""

    def read_into(self, number: int, buffer: np.ndarray[Any, Any], part: Part = "whole") -> None:
        """Read a part of subdivision ``number`` into a page-aligned byte buffer that is at least as long as the part.

        Padding between arrays need not be written. May be called from any thread, by one thread at a time.
        """


@runtime_checkable
class PageLockable(Protocol):
    """A store in host memory: once its memory is page-locked, a GPU can copy from it directly.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.streaming import HostStore, PageLockable
    >>> store = HostStore.create(Cantilever(nodes=4).subdivisions(4))
    >>> isinstance(store, PageLockable), [offset for offset, piece in store.segments(0)]
    (True, [0])
    """

    def segments(self, number: int, part: Part = "whole") -> list[tuple[int, np.ndarray[Any, Any]]]:
        """Return views of the bytes of a part of subdivision ``number``, each with its offset in the part."""

    def page_lock(self) -> None:
        """Page-lock the memory; does nothing if it is locked already.

        Raises
        ------
        DeviceError
            If the system refuses.
        """


@runtime_checkable
class PlaneStore(Protocol):
    """A store of two planes.

    Examples
    --------
    >>> import tempfile
    >>> from penstock.fem import Cantilever
    >>> from penstock.streaming import FileStore
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with FileStore.create(f"{folder}/A", Cantilever(nodes=4, dof=3).subdivisions(2), planes=True) as store:
    ...         has_planes(store)
    True
    """

    @property
    def index(self) -> MatrixIndex:
        """The description of the matrix in float64."""

    @property
    def planes(self) -> bool:
        """Whether it has them."""

    def read_into(self, number: int, buffer: np.ndarray[Any, Any], part: Part = "whole") -> None:
        """Read as any store; values are completed."""

    def read_high(self, number: int, buffer: np.ndarray[Any, Any]) -> None:
        """Read the high words of the values of a subdivision into a page-aligned buffer of ``plane_nbytes`` bytes or more."""

    def read_low(self, number: int, buffer: np.ndarray[Any, Any]) -> None:
        """Read the low words likewise."""

    def corrections(self) -> np.ndarray[Any, Any] | None:
        """Return the corrections of the image in float32, if its format has some."""


def has_planes(store: object) -> TypeGuard[PlaneStore]:
    """Return whether a store has two planes."""
    return isinstance(store, PlaneStore) and store.planes
