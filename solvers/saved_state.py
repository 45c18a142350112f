"""How the state of a solve is written as arrays, and read again: what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import numpy as np

from penstock.solvers.result import StopReason
from penstock.solvers.states import SystemMark
from penstock.spmv import CPU, Array, Device


@dataclass(kw_only=True)
class SavedState:
    """Base of states that checkpoints hold. A subclass is a dataclass that names those of its fields that are arrays.

    Its other fields are numbers, lists of numbers, and ``reasons``, a list of :class:`StopReason` or None. A field that is None
    is not written, and has its default when it is read.

    Parameters
    ----------
    system : SystemMark, optional
        What the state knows of its system.

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

    def shared_vectors(self) -> dict[str, Array]:
        """Return the vectors that the state has, by name: what ranks share out."""
        return {name: getattr(self, name) for name in self.vectors if getattr(self, name) is not None}
