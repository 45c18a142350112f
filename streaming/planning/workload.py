"""Describes what is computed with a matrix and how the ring of slots is run."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.spmv import InputError
from penstock.streaming.planning.schedule import SweepOrder, check_sweep_order


@dataclass(frozen=True)
class Workload:
    """What is computed with the matrix.

    Parameters
    ----------
    columns : int
        Vectors per product.
    repeats : int
        Products with each subdivision per sweep, each with different vectors.
    degree : int
        Consecutive powers of the matrix, for a polynomial of this degree. One sweep computes several of them if subdivisions
        couple with few others.
    workspace_nbytes : int
        Bytes of the solver's vectors, which the budget does not include.
    parts : tuple of (str, int)
        The part of these bytes for the preconditioner: names and bytes, for the text of a plan.
    iterations : float, optional
        Expected iterations of the solver, to compare plans of different degrees; by default those without a polynomial, reduced
        as by a Chebyshev polynomial of this degree.
    solves : int
        Expected number of solves, which share the cost of what the host does once, before sweeps are replayed.

    Raises
    ------
    InputError
        If ``columns``, ``repeats``, ``degree`` or ``solves`` is not a whole number of at least 1.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.streaming import Workload, index_of, plan_stream
    >>> index = index_of(Cantilever(nodes=64, dof=3).symbolic_slabs(64))
    >>> plan_stream(index, "64 MiB", Workload(degree=9)).powers_per_sweep
    7
    """

    columns: int = 1
    repeats: int = 1
    degree: int = 1
    workspace_nbytes: int = 0
    parts: tuple[tuple[str, int], ...] = ()
    iterations: float | None = None
    solves: int = 1

    def __post_init__(self) -> None:
        _check_counts(columns=self.columns, repeats=self.repeats, degree=self.degree, solves=self.solves)


@dataclass(frozen=True)
class Ring:
    """How the ring of slots is run.

    Parameters
    ----------
    slots : int, optional
        Number of slots, at least 2. By default 3 if they use at most half of the budget, else 2; for a degree above 1, enough
        for all powers in one sweep if the budget allows.
    overlap : bool
        Transfer during computations. False is for comparison: the same memory without communication hiding.
    sweeps : {"alternate", "cyclic", "restart"}
        How successive sweeps are connected; see :class:`Schedule`.
    resident_structure : bool
        Keep offsets and column indices of all subdivisions, and stream values only.
    shared_structure : bool
        Another matrix on the device, such as an image, has the offsets and column indices: they take no memory, and only values
        are streamed.
    on_arrival : bool
        Subdivisions are made in the slots, as those of a :class:`MadeStore` are, instead of being transferred.
    moved_share : float
        With ``on_arrival``: bytes that move over the link for each byte that is made; 0 if the device holds what it is made from.
        A streamed matrix takes it from its store.

    Raises
    ------
    InputError
        If ``slots`` is less than 2, ``sweeps`` is not one of these values, ``moved_share`` is negative, or ``moved_share`` is
        given without ``on_arrival``, or both kinds of structure are.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.streaming import Ring, index_of, plan_stream
    >>> index = index_of(Cantilever(nodes=16, dof=3).symbolic_slabs(16))
    >>> plan = plan_stream(index, "2 MiB", ring=Ring(slots=4, sweeps="cyclic"))
    >>> plan.slots, len(plan.resident)
    (4, 0)
    """

    slots: int | None = None
    overlap: bool = True
    sweeps: SweepOrder = "alternate"
    resident_structure: bool = False
    shared_structure: bool = False
    on_arrival: bool = False
    moved_share: float = 0.0

    @property
    def moves_nothing(self) -> bool:
        """Whether subdivisions are made from what the device holds, so that nothing moves over the link."""
        return self.on_arrival and not self.moved_share

    def __post_init__(self) -> None:
        check_sweep_order(self.sweeps)
        if self.resident_structure and self.shared_structure:
            raise InputError("a structure is resident_structure or shared_structure, not both")
        if self.slots is not None and (self.slots < 2 or self.slots % 1):
            raise InputError(f"slots must be at least 2 and a whole number; got slots={self.slots}")
        if not 0 <= self.moved_share < float("inf") or (self.moved_share and not self.on_arrival):
            raise InputError(f"moved_share is 0 or more, with on_arrival=True; got moved_share={self.moved_share}")


def _check_counts(**counts: int) -> None:
    """Raise an InputError if a number is not a positive whole number."""
    wrong = [f"{name}={count}" for name, count in counts.items() if count < 1 or count % 1]
    if wrong:
        raise InputError(f"{', '.join(counts)} must be whole numbers, at least 1; got {', '.join(wrong)}")
