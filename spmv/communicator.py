"""Collective operations of the ranks that share a system. A single process needs none, and they cost nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np

from penstock.spmv.device import Array

Numbers = np.ndarray[Any, Any]


class Communicator(Protocol):
    """Ranks, each of which has some rows of every vector.

    All methods are collective: every rank calls them, in the same order. What they return is the same, to the last bit, on all
    ranks, so that ranks that decide by it decide alike. An operator on the rows of one rank has its communicator as an attribute
    of this name; solvers find it there.
    """

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    @property
    def host_ranks(self) -> int:
        """How many of them are on the host of this rank."""

    def total(self, numbers: Numbers) -> Numbers:
        """Return the sums over ranks of float64 numbers."""

    def before(self, number: int) -> int:
        """Return the sum over the ranks before this one."""

    def largest(self, number: float) -> float:
        """Return the largest of the ranks' numbers; NaN if one of them is."""

    def of_first(self, number: float) -> float:
        """Return the number of rank 0."""

    def of_all(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, in their order."""

    def exchange_objects(self, to_each: Sequence[Any]) -> list[Any]:
        """Send an object to each rank and return those that came from each."""

    def add_up(self, partials: Array, sums: Array) -> None:
        """Make each row of ``sums`` add up to that of all ranks' ``partials``; arrays are on the device of the vectors."""

    def together(self) -> AbstractContextManager[Any]:
        """Return a context whose errors become errors of all ranks, with the number of the rank in the message."""

    def check_same(self, **settings: object) -> None:
        """Raise an InputError on all ranks if they give different values."""


class Alone:
    """The communicator of one process that has all rows."""

    rank, size, host_ranks = 0, 1, 1

    def total(self, numbers: Numbers) -> Numbers:
        """Return the numbers."""
        return numbers

    def before(self, number: int) -> int:
        """Return 0."""
        return 0

    def largest(self, number: float) -> float:
        """Return the number."""
        return number

    def of_first(self, number: float) -> float:
        """Return the number."""
        return number

    def of_all(self, value: Any) -> list[Any]:
        """Return the object of this rank."""
        return [value]

    def exchange_objects(self, to_each: Sequence[Any]) -> list[Any]:
        """Return what this rank sends itself."""
        return list(to_each)

    def add_up(self, partials: Array, sums: Array) -> None:
        """Do nothing: the two are the same memory."""

    def together(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return nullcontext()

    def check_same(self, **settings: object) -> None:
        """Do nothing."""


ALONE = Alone()


def communicator_of(operator: object) -> Communicator:
    """Return the communicator of an operator; :data:`ALONE` if it has none."""
    communicator: Communicator = getattr(operator, "communicator", ALONE)
    return communicator


def sharing_memory(operator: Any) -> int:
    """Return how many ranks take from the memory that this one sees as free: on a CPU all of its host, each GPU is of one."""
    return communicator_of(operator).host_ranks if operator.device.kind == "cpu" else 1
