"""The request for a solve: a system in files, and how to solve it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.experiments.systems.system_files import parse_columns, parse_count
from penstock.solvers import method_named, preconditioner_spec
from penstock.spmv import Device, InputError, format_named, parse_nbytes


@dataclass(frozen=True)
class SolveRequest:
    """What to solve, and how.

    Parameters
    ----------
    matrix : str
        What :func:`read_matrix` takes, or the folder of a :class:`FileStore`.
    right_hand_sides : path, optional
        What :func:`read_right_hand_sides` takes. Without it, A times ones is solved for.
    columns : str, optional
        Which columns of the file, such as ``0,2-4``; without a file, how many right-hand sides to make up.
    preconditioner : str
        As for :func:`penstock.solve`.
    degree : int, optional
        With ``chebyshev``: products with A in an iteration, odd; by default the plan chooses.
    rtol : float
    maxiter : int, optional
    device : str
    memory : int or str, optional
        For matrix storage on the device that computes; by default what is free there.
    guess : path, optional
        ``.npy`` of the shape of the solution, from which to start.
    format : str
        Registered name of the storage format, or ``auto``.
    coordinates, near_null_space : path, optional
        ``.npy`` of the coordinates of the nodes, or of the near-null space, as :func:`penstock.solve` takes them.
    null_space : str, optional
        ``constants``, or the path of the ``.npy`` of the vectors that A maps to zero.
    method : str
        As for :func:`penstock.solve`.
    """

    matrix: str
    right_hand_sides: Path | None = None
    columns: str | None = None
    preconditioner: str = "auto"
    degree: int | None = None
    rtol: float = 1e-8
    maxiter: int | None = None
    device: str = "auto"
    memory: int | str | None = None
    guess: Path | None = None
    format: str = "auto"
    coordinates: Path | None = None
    near_null_space: Path | None = None
    null_space: str | None = None
    method: str = "auto"

    def check(self) -> None:
        """Refuse, before a file is read, what no file could make right."""
        if self.preconditioner != "auto":
            spec = preconditioner_spec(self.preconditioner, degree=self.degree)
            if (self.coordinates or self.near_null_space) and not spec.uses_near_null_space:
                raise InputError(
                    f"--precond {self.preconditioner} has no use for --coordinates and --near-null-space; leave them out, or "
                    "choose auto, smoothed_aggregation or multigrid"
                )
        elif self.degree is not None:
            raise InputError("--degree is an option of a preconditioner; choose --precond chebyshev")
        if self.coordinates is not None and self.near_null_space is not None:
            raise InputError("the motions that --coordinates gives are a --near-null-space; give one or the other")
        if not 0 <= self.rtol < 1:
            raise InputError(f"--rtol is a share of the right-hand side, 0 or more and less than 1, not {self.rtol}")
        if self.columns is not None:
            (parse_count if self.right_hand_sides is None else parse_columns)(self.columns)
        if self.memory is not None:
            parse_nbytes(self.memory)
        if self.device != "auto":
            Device.parse(self.device)
        method_named(self.method)
        if self.format != "auto":
            format_named(self.format)
