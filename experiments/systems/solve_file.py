"""A system in files, solved and reported: any symmetric positive definite matrix, resident or streamed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.array_files import check_fits_memory
from penstock.experiments.reporting.environment import describe_environment
from penstock.experiments.reporting.folder import ResultsFolder, write_json
from penstock.experiments.reporting.interrupts import stop_requests
from penstock.experiments.reporting.outcome import RunOutcome
from penstock.experiments.reporting.solve_report import columns_of, describe_solve, reason_of, record_sweep
from penstock.experiments.systems.system_files import (
    column_ranges,
    matrix_name,
    parse_columns,
    parse_count,
    read_guess,
    read_right_hand_sides,
    write_solution,
)
from penstock.front_door import find_device
from penstock.given import GivenVectors, as_given_matrix
from penstock.progress import Reporter
from penstock.request import Placement, Request
from penstock.solvers import BlockSolveResult, SolveResult, StopReason, preconditioner_spec
from penstock.spmv import Device, InputError, Operator, parse_nbytes
from penstock.streaming import StreamedMatrix
from penstock.system import OpenSystem, open_system

__all__ = ["SolveRequest", "solve_file"]


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

    def check(self) -> None:
        """Refuse, before a file is read, what no file could make right."""
        if self.preconditioner != "auto":
            preconditioner_spec(self.preconditioner, degree=self.degree)
        elif self.degree is not None:
            raise InputError("--degree is an option of a preconditioner; choose --precond chebyshev")
        if not 0 <= self.rtol < 1:
            raise InputError(f"--rtol is a share of the right-hand side, 0 or more and less than 1, not {self.rtol}")
        if self.columns is not None:
            (parse_count if self.right_hand_sides is None else parse_columns)(self.columns)
        if self.memory is not None:
            parse_nbytes(self.memory)
        if self.device != "auto":
            Device.parse(self.device)


def solve_file(request: SolveRequest, directory: str | Path, *, reporter: Reporter | None = None) -> RunOutcome:
    """Solve a system in files and leave a results folder.

    Parameters
    ----------
    request : SolveRequest
    directory : path
        Results folder to make; it must not exist or be empty.
    reporter : Reporter, optional
        Told how it goes.

    Returns
    -------
    RunOutcome
        Also if SIGINT or SIGTERM stopped it between two iterations: the folder then holds the last iterates.

    Raises
    ------
    PenstockError
        If something is wrong with the options, the files, the matrix, the memory or the device; no folder is left then.
    """
    request.check()
    folder = ResultsFolder(Path(directory))
    with folder.made("choose another --output"):
        try:
            return _Run(request, folder, reporter or Reporter()).run()
        except BaseException as error:
            if folder.solution.exists():
                error.add_note(f"the solution is kept in {folder.solution}")
            else:
                folder.remove()
            raise


class _Run:
    """One solve: what was asked for, where it writes, and when it began."""

    def __init__(self, request: SolveRequest, folder: ResultsFolder, reporter: Reporter) -> None:
        self.request, self.folder, self.reporter = request, folder, reporter
        self.began = time.perf_counter()
        self.given: np.ndarray[Any, Any] | None = None
        self.columns = 1
        self.chosen: Sequence[int] = (0,)

    def run(self) -> RunOutcome:
        """Read, plan, build, solve and report."""
        asked, right_side = self.request, self._read_right_hand_sides()  # before the matrix, which may take longer
        with self.reporter.stage("read") as stage:
            matrix = as_given_matrix(asked.matrix)
            stage.advance(1.0)
        options = {} if asked.degree is None else {"degree": asked.degree}
        request = Request(
            find_device(asked.device, matrix),
            self.columns,
            None if asked.memory is None else parse_nbytes(asked.memory),
            asked.preconditioner,
            options=options,
            name=matrix.name,
        )

        def announce(placement: Placement) -> None:
            self.folder.write_plan(f"{placement.explain()}\n{'right side':<11} {right_side}", self.reporter)

        with open_system(matrix, request, folder=self.folder.path, reporter=self.reporter, announce=announce) as system:
            opened = time.perf_counter()
            result = self._solve(system)
            # Also before reporting: an interrupt or an error from here on must not cost the solution.
            write_solution(self.folder.solution, np.asarray(result.x))
            self._report(system, result, opened, time.perf_counter() - opened)
        return RunOutcome(self.folder, reason_of(result))

    def _read_right_hand_sides(self) -> str:
        """Read the right-hand sides, and return in words what is solved for."""
        file, columns = self.request.right_hand_sides, self.request.columns
        if file is not None:
            chosen = None if columns is None else parse_columns(columns)
            self.given = read_right_hand_sides(file, chosen)
            self.columns = self.given.shape[1]
            self.chosen = range(self.columns) if chosen is None else chosen
            which = "" if chosen is None else f"columns {column_ranges(chosen)} of "
            return f"{which}{file.name}, {self.columns} in all"
        self.columns = 1 if columns is None else parse_count(columns)
        self.chosen = range(self.columns)
        if self.columns == 1:
            return "A times ones, so that the solution is known: all ones"
        return f"{self.columns} columns of standard normal numbers, seed 0"

    def _right_hand_sides(self, A: Operator) -> GivenVectors:
        n = A.shape[0]
        if self.given is not None:
            return GivenVectors(self.given if self.columns > 1 else self.given[:, 0], "B")
        if self.columns > 1:
            check_fits_memory(2 * 8 * n * self.columns, f"{self.columns} right-hand sides and their solutions")
            return GivenVectors(np.random.default_rng(0).standard_normal((n, self.columns)), "B")
        # Of ones in any order the product is in the order of the matrix; A times ones is asked for in the file's.
        return GivenVectors(A.device.to_host(A.apply(A.device.xp.ones(n, dtype=A.dtype))), "B")

    def _solve(self, system: OpenSystem) -> SolveResult | BlockSolveResult:
        asked, n = self.request, system.A.shape[0]
        b = self._right_hand_sides(system.A)
        order = None if system.placement is None else system.placement.order
        if self.given is None and self.columns == 1 and order is not None:
            b = GivenVectors(order.back(b.array), "B")
        guess = None
        if asked.guess is not None:
            guess = GivenVectors(read_guess(asked.guess, (n, self.columns)), "the guess")
        with stop_requests(self.reporter) as stop:
            return system.solve(b, guess, rtol=asked.rtol, maxiter=asked.maxiter, monitor=lambda record: stop.is_set())

    def _report(
        self, system: OpenSystem, result: SolveResult | BlockSolveResult, opened: float, seconds: float
    ) -> None:
        """Write everything that a solve leaves besides the solution."""
        folder, A, placement, x = self.folder, system.A, system.placement, np.asarray(result.x)
        assert placement is not None, "a matrix in a file or a store is placed"
        plan = placement.plan
        streamed = A if isinstance(A, StreamedMatrix) else None
        # What was spent on the solve, not on the sweep that is recorded below.
        sweeps, moved = (streamed.sweeps, streamed.bytes_streamed) if streamed else (result.sweeps, 0)
        limited = bool(plan.slots) or self.request.memory is not None
        summary = describe_solve(
            A,
            plan,
            result,
            rtol=self.request.rtol,
            sweeps=sweeps,
            bytes_streamed=moved,
            seconds=seconds,
            budget_nbytes=plan.budget_nbytes if limited else None,
        )
        columns = columns_of(result)
        if streamed is not None and plan.slots and reason_of(result) is not StopReason.STOPPED:
            together = x if x.ndim == 1 else np.ascontiguousarray(x[:, : placement.together])
            record_sweep(folder, streamed, A.device.asarray(together, dtype=A.dtype))
        summary |= {
            "matrix": matrix_name(self.request.matrix),
            "nonzeros": placement.nonzeros,
            "preconditioner": placement.spec.name,
            "message": _message(columns, self.chosen),
            "largest_error": float(np.abs(x - 1).max()) if self.given is None and self.columns == 1 else None,
            "right_hand_sides": [
                {
                    "column": number,
                    "reason": column.reason.name.lower(),
                    "iterations": column.iterations,
                    "true_residual": column.true_residual,
                }
                for number, column in zip(self.chosen, columns, strict=True)
            ],
            "seconds": {"open": opened - self.began, "solve": seconds, "total": time.perf_counter() - self.began},
        }
        write_json(folder.environment, describe_environment())
        folder.write_residuals([column.residual_norms for column in columns])
        write_json(folder.result, summary)  # last of the data: a folder with a result is a whole one
        with self.reporter.stage("draw") as stage:
            folder.draw(None)
            stage.advance(1.0)
        self.reporter.text("Result", folder.summary())


def _message(columns: tuple[SolveResult, ...], chosen: Sequence[int]) -> str:
    """Return why a solve stopped; of many right-hand sides, those with the same reason together."""
    if len(columns) == 1:
        return columns[0].message
    groups: dict[StopReason, list[int]] = {}
    for number, column in zip(chosen, columns, strict=True):
        groups.setdefault(column.reason, []).append(number)
    return "\n".join(f"columns {column_ranges(numbers)}: {reason.value}" for reason, numbers in groups.items())
