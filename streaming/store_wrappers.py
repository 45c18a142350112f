"""Stores around another store: slower than it, failing now and then, or counting what is read."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.streaming.layout import MatrixIndex, Part
from penstock.streaming.store import Store

__all__ = ["CountingStore", "FaultyStore", "SlowStore", "StoreWrapper"]


class StoreWrapper:
    """A store that hands everything on to another one; the base of those that do something besides.

    Parameters
    ----------
    store : Store
        Stays the caller's to close.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    @property
    def index(self) -> MatrixIndex:
        """That of the store inside."""
        return self.store.index

    def read_into(self, number: int, buffer: np.ndarray[Any, Any], part: Part = "whole") -> None:
        """Read from the store inside."""
        self.store.read_into(number, buffer, part)


class SlowStore(StoreWrapper):
    """Reads at most at a given rate, as a slower disk would.

    Parameters
    ----------
    store : Store
    bytes_per_second : float
        Infinite by default.
    latency : float
        Seconds that every read takes besides.
    """

    def __init__(self, store: Store, bytes_per_second: float = float("inf"), latency: float = 0.0) -> None:
        super().__init__(store)
        self.bytes_per_second = bytes_per_second
        self.latency = latency

    def read_into(self, number: int, buffer: np.ndarray[Any, Any], part: Part = "whole") -> None:
        """Read from the store inside, then wait until the time is up."""
        began = time.perf_counter()
        super().read_into(number, buffer, part)
        seconds = self.latency + self.index.subdivisions[number].part_nbytes(part) / self.bytes_per_second
        time.sleep(max(0.0, began + seconds - time.perf_counter()))


class FaultyStore(StoreWrapper):
    """Calls a function before every read, which may raise or wait.

    Parameters
    ----------
    store : Store
    before : callable
        ``before(read, number)``, with the number of the read, counted from 0, and that of the subdivision.
    """

    def __init__(self, store: Store, before: Callable[[int, int], None]) -> None:
        super().__init__(store)
        self.before = before
        self.reads = 0

    def read_into(self, number: int, buffer: np.ndarray[Any, Any], part: Part = "whole") -> None:
        """Call the function, then read from the store inside."""
        self.reads += 1
        self.before(self.reads - 1, number)
        super().read_into(number, buffer, part)


class CountingStore(StoreWrapper):
    """Counts reads and bytes, and keeps the order of the reads in ``numbers``."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.numbers: list[int] = []
        self.nbytes = 0

    def read_into(self, number: int, buffer: np.ndarray[Any, Any], part: Part = "whole") -> None:
        """Read from the store inside and count."""
        super().read_into(number, buffer, part)
        self.numbers.append(number)
        self.nbytes += self.index.subdivisions[number].part_nbytes(part)
