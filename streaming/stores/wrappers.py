"""Wraps a store to slow it down, to make reads fail, or to count reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.streaming.stores.base import Store
from penstock.streaming.stores.matrix_index import MatrixIndex, Part


class StoreWrapper:
    """A store that forwards all calls to another store; the base class of the other wrappers.

    Parameters
    ----------
    store : Store
        The caller closes it.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.streaming import HostStore
    >>> from penstock.streaming.testing import StoreWrapper
    >>> class LoudStore(StoreWrapper):
    ...     def read_into(self, number, buffer, part="whole"):
    ...         print(f"subdivision {number}")
    ...         super().read_into(number, buffer, part)
    >>> store = LoudStore(HostStore.create(Cantilever(nodes=4, dof=3).subdivisions(2)))
    >>> HostStore.from_store(store).index.shape
    subdivision 0
    subdivision 1
    (192, 192)
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    @property
    def index(self) -> MatrixIndex:
        """The index of the wrapped store."""
        return self.store.index

    def read_into(self, number: int, buffer: np.ndarray[Any, Any], part: Part = "whole") -> None:
        """Read from the wrapped store."""
        self.store.read_into(number, buffer, part)


class SlowStore(StoreWrapper):
    """Limits the read rate, to imitate a slower disk.

    Parameters
    ----------
    store : Store
    bytes_per_second : float
        Infinite by default.
    latency : float
        Seconds added to every read.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.streaming import HostStore, StreamedMatrix
    >>> from penstock.streaming.testing import SlowStore
    >>> beam = Cantilever(nodes=4, dof=3)
    >>> store = SlowStore(HostStore.create(beam.subdivisions(4)), bytes_per_second=100e6)
    >>> with StreamedMatrix(store, "64 KiB") as A:
    ...     (A @ beam.load()).shape
    (192,)
    """

    def __init__(self, store: Store, bytes_per_second: float = float("inf"), latency: float = 0.0) -> None:
        super().__init__(store)
        self.bytes_per_second = bytes_per_second
        self.latency = latency

    def read_into(self, number: int, buffer: np.ndarray[Any, Any], part: Part = "whole") -> None:
        """Read from the wrapped store, then wait until the time for the read has passed."""
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
        ``before(read, number)``, with the number of reads so far and the number of the subdivision.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.spmv import StoreError
    >>> from penstock.streaming import HostStore, StreamedMatrix
    >>> from penstock.streaming.testing import FaultyStore
    >>> beam = Cantilever(nodes=4, dof=3)
    >>> def fail(read, number):
    ...     if number == 2:
    ...         raise StoreError("bad sector")
    >>> with StreamedMatrix(FaultyStore(HostStore.create(beam.subdivisions(4)), fail), "64 KiB") as A:
    ...     try:
    ...         y = A @ beam.load()
    ...     except StoreError as error:
    ...         print(error, error.__notes__)
    bad sector ['while reading subdivision 2 (rows 96 to 143) of a FaultyStore']
    """

    def __init__(self, store: Store, before: Callable[[int, int], None]) -> None:
        super().__init__(store)
        self.before = before
        self.reads = 0

    def read_into(self, number: int, buffer: np.ndarray[Any, Any], part: Part = "whole") -> None:
        """Call the function, then read from the wrapped store."""
        self.reads += 1
        self.before(self.reads - 1, number)
        super().read_into(number, buffer, part)


class CountingStore(StoreWrapper):
    """Counts bytes and lists the subdivisions read, in order, in ``numbers``.

    Parameters
    ----------
    store : Store
        The caller closes it.

    Attributes
    ----------
    numbers : list of int
        Subdivisions in the order of their reads.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.streaming import HostStore, StreamedMatrix
    >>> from penstock.streaming.testing import CountingStore
    >>> beam = Cantilever(nodes=4, dof=3)
    >>> store = CountingStore(HostStore.create(beam.subdivisions(4)))
    >>> with StreamedMatrix(store, "64 KiB") as A:
    ...     y = A @ beam.load()
    >>> store.numbers[:4]
    [0, 1, 2, 3]
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.numbers: list[int] = []
        self.nbytes = 0

    def read_into(self, number: int, buffer: np.ndarray[Any, Any], part: Part = "whole") -> None:
        """Read from the wrapped store and count the read."""
        super().read_into(number, buffer, part)
        self.numbers.append(number)
        self.nbytes += self.index.subdivisions[number].part_nbytes(part)
