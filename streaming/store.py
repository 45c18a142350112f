"""What a store of a matrix promises."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np

from penstock.streaming.layout import MatrixIndex, Part

__all__ = ["PageLockable", "Store"]


@runtime_checkable
class Store(Protocol):
    """A matrix cut into subdivisions, somewhere outside the memory that computes."""

    @property
    def index(self) -> MatrixIndex:
        """Its description."""

    def read_into(self, number: int, buffer: np.ndarray[Any, Any], part: Part = "whole") -> None:
        """Fill a page-aligned byte buffer, of at least the length of the part, with a part of subdivision ``number``.

        May be called from a thread of its own, by one thread at a time.
        """


@runtime_checkable
class PageLockable(Protocol):
    """A store whose pieces lie in host memory, from which a GPU can copy by itself once it is page-locked."""

    def segments(self, number: int, part: Part = "whole") -> list[tuple[int, np.ndarray[Any, Any]]]:
        """Return the bytes of a part of subdivision ``number`` without copying: where in the part, and what goes there."""

    def page_lock(self) -> None:
        """Lock the pages; does nothing if they are locked.

        Raises
        ------
        DeviceError
            If the system refuses.
        """
