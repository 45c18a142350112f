"""States of solves: how a checkpoint holds them as arrays, and the checks before one is resumed."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import numpy as np

from penstock.solvers.checks import check_finite
from penstock.solvers.result import StopReason
from penstock.spmv import CPU, Array, Device, InputError, Operator, SweptOperator


@dataclass(frozen=True)
class SystemMark:
    """Identifies the system of a state: ``||b||`` of every right-hand side, and the preconditioner's class or ``"none"``."""

    b_norms: tuple[float, ...]
    preconditioner: str

    def __post_init__(self) -> None:
        if not self.b_norms or not all(isinstance(norm, float) for norm in self.b_norms):
            raise InputError("a state has no norms of its right-hand sides; it is damaged")

    @classmethod
    def of(cls, b_norms: Any, M: Any) -> Self:
        """Return the mark of a system with a preconditioner, or with none."""
        return cls(tuple(b_norms.tolist()), "none" if M is None else type(M).__name__)

    def check_same(self, other: SystemMark, unit: float) -> None:
        """Refuse a mark of another system, but for rounding of sums in another order; the message says what differs."""
        if other.preconditioner != self.preconditioner:
            raise InputError(
                f"the state is of a solve with the preconditioner {self.preconditioner}, and this one has "
                f"{other.preconditioner}; give the same, or start from the iterate: x0=state.x"
            )
        one, two = (np.array(norms) for norms in (self.b_norms, other.b_norms))
        if one.shape != two.shape or not np.allclose(one, two, rtol=1e4 * unit, atol=0.0, equal_nan=True):
            raise InputError(
                f"the state is of a right-hand side of norm {_shown(one)}, and this one has {_shown(two)}; resume with the "
                "system that it came from"
            )


def _shown(norms: Any) -> str:
    return ", ".join(f"{norm:.9g}" for norm in norms.tolist()[:4]) + (", ..." if len(norms) > 4 else "")


@dataclass(kw_only=True)
class SavedState:
    """Base of states that checkpoints hold. A subclass is a dataclass that names those of its fields that are arrays.

    Its other fields are numbers, lists of numbers, and ``reasons``, a list of :class:`StopReason` or None. A field that is None
    is not written, and has its default when it is read.

    Parameters
    ----------
    system : SystemMark, optional
        What the state knows of its system.
    refined : bool, optional
        Whether x is an iterate of :func:`solve_by_image`, with which the other vectors of the state have nothing to do.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import CgState, cg
    >>> from penstock.spmv import CPU
    >>> beam = Cantilever(nodes=(5, 3, 3), dof=3)
    >>> arrays = cg(beam.matrix(), beam.load(), maxiter=10).state.to_arrays()
    >>> arrays["x"].shape, int(arrays["iteration"]), CgState.from_arrays(arrays, CPU).iteration
    ((135,), 10, 10)
    """

    #: Arrays on the device with a row for each unknown, which ranks share out.
    vectors: ClassVar[tuple[str, ...]] = ("x",)
    #: Other arrays on the device.
    device_arrays: ClassVar[tuple[str, ...]] = ()
    #: Arrays on the host.
    host_arrays: ClassVar[tuple[str, ...]] = ()

    system: SystemMark | None = None
    refined: bool | None = None

    def check(self, layout: StateLayout) -> None:
        """Raise an InputError if arrays or numbers do not fit the layout, or cannot be; the message names the first.

        Checks what every state has; a subclass checks its own fields, too.
        """
        state: Any = self
        layout.check("x", state.x)
        check_counts(iteration=state.iteration)
        if self.refined not in (None, True, False):
            raise InputError(f"refined of the state cannot be {self.refined!r}; it is damaged")
        histories = [state.residual_norms] if len(layout.shape) == 1 else state.residual_norms
        for norms in histories:
            check_history(norms)
        lengths = {len(histories), len(getattr(self, "reasons", histories))}
        if lengths != {math.prod(layout.shape[1:])}:
            raise InputError("the parts of the state do not fit each other; it is damaged")

    def to_arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return arrays on the host, by name, that hold all of the state."""
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        for of in fields(self):
            value = getattr(self, of.name)
            if isinstance(value, SystemMark):
                arrays |= {"b_norms": np.array(value.b_norms), "preconditioner": np.array(value.preconditioner)}
            elif of.name == "reasons":
                arrays[of.name] = np.array([reason.name if reason else "" for reason in value])
            elif value is not None:
                arrays[of.name] = CPU.asarray(value) if hasattr(value, "ndim") else np.array(value)
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray[Any, Any]], device: Device) -> Self:
        """Return the state that :meth:`to_arrays` wrote, with its arrays on a device; other names are left aside.

        What is read is checked by the state's ``check`` only, before a solve resumes from it.
        """
        values: dict[str, Any] = {}
        for of in fields(cls):
            if of.name == "system" and "b_norms" in arrays:
                values[of.name] = SystemMark(tuple(arrays["b_norms"].tolist()), str(arrays["preconditioner"]))
            elif of.name in arrays:
                values[of.name] = cls._read(of.name, arrays[of.name], device)
        return cls(**values)

    @classmethod
    def _read(cls, name: str, array: np.ndarray[Any, Any], device: Device) -> Any:
        if name in cls.vectors or name in cls.device_arrays:
            return device.asarray(array)
        if name in cls.host_arrays:
            return array
        if name == "reasons":
            return [StopReason[reason] if reason else None for reason in array.tolist()]
        return array.tolist()  # of a number, the number

    def on_device(self, device: Device, *, but: tuple[str, ...] = ()) -> Self:
        """Return a state whose arrays are on a device: this one if they are, else a copy, and this one stays as it is.

        ``but`` names arrays that may stay on the host.
        """
        names = [name for name in (*self.vectors, *self.device_arrays) if is_elsewhere(getattr(self, name), device)]
        if not names:
            return self
        moved = {name: device.asarray(getattr(self, name)) for name in names if name not in but}
        of_host = {of.name: getattr(self, of.name) for of in fields(self) if of.name not in names}
        return replace(self, **moved, **copy.deepcopy(of_host))

    def shared_vectors(self) -> dict[str, Array]:
        """Return the vectors that the state has, by name: what ranks share out."""
        return {name: getattr(self, name) for name in self.vectors if getattr(self, name) is not None}


@dataclass(frozen=True)
class StateLayout:
    """The vectors of a system, against which those of a state are checked: iterates are ``(n,)`` or ``(n, columns)``."""

    shape: tuple[int, ...]
    dtype: Any
    device: Device

    def check(self, name: str, vectors: Any, *, columns: bool = True) -> None:
        """Refuse an array of another shape or type, with NaN or Inf, or read-only; ``columns``: as many as iterates.

        Arrays may be on the host where the matrix is not.
        """
        shape, dtype = getattr(vectors, "shape", None), getattr(vectors, "dtype", None)
        fits = shape == self.shape if columns else shape is not None and (len(shape), shape[0]) == (2, self.shape[0])
        if not fits or dtype != self.dtype:
            expected = self.shape if columns else (self.shape[0], "columns")
            raise InputError(
                f"{name} of the state has shape {shape} and type {dtype}, but this system needs {expected} and {self.dtype}; "
                "resume with the system that it came from"
            )
        on_host = isinstance(vectors, np.ndarray)
        if not on_host and self.device.kind == "cpu":
            raise InputError(f"{name} of the state is on a GPU, and the matrix is not")
        if not getattr(vectors.flags, "writeable", True):
            raise InputError("the state is read-only, but a solve changes it in place; give a copy.deepcopy of it")
        check_finite(f"{name} of the state", vectors, CPU if on_host else self.device)


def histories_of(state: Any) -> list[list[float]]:
    """Return the residual norms of every right-hand side of a state, the same lists."""
    norms = state.residual_norms
    return norms if norms and isinstance(norms[0], list) else [norms]


def is_elsewhere(array: object, device: Device) -> bool:
    """Return whether an array is on the host, and the device is not."""
    return isinstance(array, np.ndarray) and device.kind != "cpu"


def check_numbers(
    numbers: Mapping[str, Any], *, positive: bool = False, finite: bool = True, least: float = 0.0
) -> None:
    """Refuse numbers that are not real or below ``least``, zero if ``positive``, infinity if ``finite``; name the first."""
    for name, value in numbers.items():
        right = isinstance(value, float | int | np.floating | np.integer) and not isinstance(value, bool)
        if not right or not value >= least or (positive and value == 0) or (finite and value == math.inf):
            raise InputError(f"{name} of the state cannot be {value!r}; it is damaged")


def check_counts(**counts: Any) -> None:
    """Raise an InputError if a count of a state is no whole number, or negative; the message names it."""
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InputError(f"{name} of the state cannot be {value!r}; it is damaged")


def check_history(norms: Any) -> None:
    """Raise an InputError unless residual norms are a list of numbers, at least one."""
    if not isinstance(norms, list) or not norms or not all(isinstance(norm, float) for norm in norms):
        raise InputError("residual_norms of the state are not a list of numbers; it is damaged")


def check_state(state: Any, kind: type, layout: StateLayout) -> None:
    """Refuse a state of another solver, or one whose arrays and numbers do not fit each other and the system."""
    if not isinstance(state, kind):
        raise InputError(f"state must be a {kind.__name__} of an earlier call, not a {type(state).__name__}")
    check = getattr(state, "check", None)
    if check is None:
        layout.check("x", state.x)  # type: ignore[attr-defined]
    else:
        check(layout)


def check_all(layout: StateLayout, state: Any, names: Iterable[str]) -> None:
    """Check arrays of a state, by name, that have a row for each unknown and a column for each right-hand side."""
    for name in names:
        layout.check(name, getattr(state, name))


@contextmanager
def direction_kept(A: Operator) -> Iterator[None]:
    """Let the next sweep of a streamed matrix go in the direction in which it would have gone without those made here.

    Half of a matrix adds in the order of the rows, and a resumed solve repeats the sweeps of the one before bit for bit.
    """
    swept = A if isinstance(A, SweptOperator) and A.alternates else None
    direction = 1 if swept is None else swept.direction
    yield
    if swept is not None:
        swept.turn_to(direction)
