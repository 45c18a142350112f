"""A system in files, solved and reported: any symmetric positive definite matrix, resident or streamed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.driver.inputs import GivenMatrix, GivenVectors, as_given_matrix
from penstock.driver.open_system import OpenSystem
from penstock.driver.opening import open_system
from penstock.driver.progress import Reporter
from penstock.driver.request import Placement, Request
from penstock.experiments.reporting.atomic import write_json
from penstock.experiments.reporting.checkpoint import Checkpoint
from penstock.experiments.reporting.environment import describe_environment
from penstock.experiments.reporting.folder import ResultsFolder
from penstock.experiments.reporting.interrupts import stop_requests
from penstock.experiments.reporting.outcome import RunOutcome
from penstock.experiments.reporting.solve_report import columns_of, describe_solve, reason_of, record_sweep
from penstock.experiments.systems.resumption import Checkpoints, decided_spec, read_request, write_request
from penstock.experiments.systems.solve_request import SolveRequest
from penstock.experiments.systems.system_files import (
    column_ranges,
    parse_columns,
    parse_count,
    read_guess,
    read_node_array,
    read_right_hand_sides,
    write_solution,
)
from penstock.files.arrays import check_fits_memory
from penstock.files.registry import matrix_name
from penstock.solvers import BlockSolveResult, IterationRecord, PreconditionerSpec, SolveResult, StopReason
from penstock.spmv import InputError, Operator, parse_nbytes
from penstock.spmv.compilation.watch import compile_seconds, seconds_without_compiling
from penstock.streaming import StreamedMatrix, StreamPlan


def resume_solve(directory: str | Path, *, maxiter: int | None = None, reporter: Reporter | None = None) -> RunOutcome:
    """Resume a solve that was stopped or killed, or did not converge; without a checkpoint, begin anew.

    ``maxiter`` counts from the first start. Raises an InputError if the solve has converged, or its files or its system were
    altered.
    """
    folder = ResultsFolder(Path(directory))
    with folder.resumed():
        request, settings = read_request(folder)
        if folder.result.exists() and not folder.checkpoint.exists():
            if not folder.read_json(folder.result).get("converged"):  # right-hand sides in several blocks
                raise InputError(
                    f"{folder.path} has no checkpoint; solve anew, from where it was with --guess {folder.solution}"
                )
            raise InputError(f"the solve in {folder.path} is finished; see penstock show")
        if maxiter is not None:
            request = replace(request, maxiter=maxiter)
        request.check()
        run = _Run(request, folder, reporter or Reporter())
        if folder.checkpoint.exists():
            run.spec = decided_spec(settings)
        return run.run()


def solve_file(request: SolveRequest, directory: str | Path, *, reporter: Reporter | None = None) -> RunOutcome:
    """Solve a system in files and leave a results folder in ``directory``, which must not exist or be empty.

    SIGINT or SIGTERM stops between two iterations: the folder then holds the last iterates. After an error, no folder is left.
    """
    request.check()
    folder = ResultsFolder(Path(directory))
    with folder.made("choose another --output"):
        try:
            return _Run(request, folder, reporter or Reporter()).run()
        except BaseException as error:
            if folder.checkpoint.exists():
                error.add_note(f"the work so far is saved; resume with: penstock solve --resume {folder.path}")
            elif folder.solution.exists():
                error.add_note(f"the solution is saved in {folder.solution}")
            else:
                folder.remove()
            raise


def plan_file(request: SolveRequest, directory: str | Path, *, reporter: Reporter | None = None) -> str:
    """Return the plan of a solve in words, without solving; errors are those of :func:`solve_file`.

    The solve would stream from the disk of the directory, which need not exist.
    """
    request.check()
    near = next(place for place in (Path(directory) / "any").absolute().parents if place.is_dir())
    return _Run(request, ResultsFolder(near), reporter or Reporter()).plan()


class _Planned(Exception):
    """Ends the opening of a system when only its plan is needed; the message is the plan."""


class _Run:
    """One solve: the request, where it writes, and when it began."""

    def __init__(self, request: SolveRequest, folder: ResultsFolder, reporter: Reporter) -> None:
        self.request, self.folder, self.reporter = request, folder, reporter
        self.began, self.compiled, self.opening = time.perf_counter(), compile_seconds(), seconds_without_compiling()
        self.right_hand_sides: np.ndarray[Any, Any] | None = None
        self.columns = 1
        self.chosen: Sequence[int] = (0,)
        #: The preconditioner of the solve that is resumed, and what was spent on it before.
        self.spec: PreconditionerSpec | None = None
        self.before = Checkpoint(None)

    def run(self) -> RunOutcome:
        """Read, plan, build, solve and report."""
        right_side = self._read_right_hand_sides()  # before the matrix, which may take longer
        if self.spec is None:
            write_request(self.folder, self.request)
        matrix, request = self._opened()

        def announce(placement: Placement) -> None:
            self.folder.write_plan(f"{placement.explain()}\n{'right side':<11} {right_side}", self.reporter)

        with open_system(matrix, request, folder=self.folder.path, reporter=self.reporter, announce=announce) as system:
            opened = seconds_without_compiling()
            result = self._solve(system)
            # Also before reporting: an interrupt or an error from here on must not cost the solution.
            write_solution(self.folder.solution, np.asarray(result.x))
            if result.converged:
                self.folder.checkpoint.unlink(missing_ok=True)
            self._report(system, result, opened, seconds_without_compiling() - opened)
        return RunOutcome(self.folder, reason_of(result))

    def plan(self) -> str:
        """Read and plan, and return the plan in words."""
        right_side = self._read_right_hand_sides()
        matrix, request = self._opened()

        def stop(placement: Placement) -> None:
            placement.check_room(request.device)
            raise _Planned(f"{placement.explain()}\n{'right side':<11} {right_side}")

        try:
            with open_system(matrix, request, folder=self.folder.path, reporter=self.reporter, announce=stop):
                raise AssertionError("a matrix in a file or a store is placed")
        except _Planned as planned:
            return str(planned)

    def _opened(self) -> tuple[GivenMatrix, Request]:
        """Open the matrix, and return it with the request for its solve."""
        settings = self.request
        with self.reporter.stage("read") as stage:
            matrix = as_given_matrix(settings.matrix)
            stage.advance(1.0)
        if settings.format != "auto" and matrix.kind == "store":
            raise InputError(
                f"{matrix.name} is stored in a format; convert it with: penstock store {settings.matrix} ANOTHER --format "
                f"{settings.format}"
            )
        modes = self._modes()
        options = modes if settings.degree is None else {**modes, "degree": settings.degree}
        rows = (matrix.matrix.index if matrix.kind == "store" else matrix.matrix).shape[0]
        request = Request(
            matrix.find_device(settings.device),
            self.columns,
            None if settings.memory is None else parse_nbytes(settings.memory),
            replace(self.spec, **modes) if self.spec else settings.preconditioner,
            max(1, rows // len(modes["coordinates"])) if "coordinates" in modes else "auto",
            options={} if self.spec else options,
            name=matrix.name,
            format=None if settings.format == "auto" else settings.format,
            null_space=self._null_space(),
            method=settings.method,
        )
        return matrix, request

    def _null_space(self) -> Any:
        named = self.request.null_space
        if named is None or named == "constants":
            return named
        return read_node_array(Path(named), "the vectors of --null-space")

    def _modes(self) -> dict[str, Any]:
        """Read the near-null space, if any, as options of a preconditioner."""
        paths = {"coordinates": self.request.coordinates, "near_null_space": self.request.near_null_space}
        purposes = {"coordinates": "coordinates of nodes", "near_null_space": "vectors of a near-null space"}
        return {name: read_node_array(path, purposes[name]) for name, path in paths.items() if path is not None}

    def _read_right_hand_sides(self) -> str:
        """Read the right-hand sides, and return in words what is solved for."""
        file, columns = self.request.right_hand_sides, self.request.columns
        if file is not None:
            chosen = None if columns is None else parse_columns(columns)
            self.right_hand_sides = read_right_hand_sides(file, chosen)
            self.columns = self.right_hand_sides.shape[1]
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
        if self.right_hand_sides is not None:
            return GivenVectors(self.right_hand_sides if self.columns > 1 else self.right_hand_sides[:, 0], "B")
        if self.columns > 1:
            check_fits_memory(2 * 8 * n * self.columns, f"{self.columns} right-hand sides and their solutions")
            return GivenVectors(np.random.default_rng(0).standard_normal((n, self.columns)), "B")
        # The product is in the order of the stored matrix; _solve reorders A times ones to that of the file.
        return GivenVectors(A.device.to_host(A.apply(A.device.xp.ones(n, dtype=A.dtype))), "B")

    def _solve(self, system: OpenSystem) -> SolveResult | BlockSolveResult:
        settings, n = self.request, system.A.shape[0]
        b = self._right_hand_sides(system.A)
        order = None if system.placement is None else system.placement.order
        if self.right_hand_sides is None and self.columns == 1 and order is not None:
            b = GivenVectors(order.back(b.array), "B")
        guess = None
        if settings.guess is not None and self.spec is None:
            guess = GivenVectors(read_guess(settings.guess, (n, self.columns)), "the guess")
        placement = system.placement
        assert placement is not None, "a matrix in a file or a store is placed"
        checkpoints = Checkpoints(self.folder, settings, system, self.reporter)
        state, direction = checkpoints.resumed(n, system.A.device) if self.spec is not None else (None, 1)
        keeps = self.columns <= placement.together  # several blocks leave their solution instead of a checkpoint
        with stop_requests(self.reporter) as stop:

            def monitor(record: IterationRecord) -> bool:
                if keeps:
                    checkpoints.note(record)
                return stop.is_set()

            go_on: dict[str, Any] = {"state": state, "direction": direction}
            result = system.solve(b, guess, rtol=settings.rtol, maxiter=settings.maxiter, monitor=monitor, **go_on)
        if not result.converged and keeps and result.state is not None:
            checkpoints.write(result.state)
        self.before = checkpoints.before
        return result

    def _report(
        self, system: OpenSystem, result: SolveResult | BlockSolveResult, opened: float, seconds: float
    ) -> None:
        """Write everything that a solve leaves besides the solution."""
        folder, A, placement, x = self.folder, system.A, system.placement, np.asarray(result.x)
        assert placement is not None, "a matrix in a file or a store is placed"
        plan = placement.plan if isinstance(placement.plan, StreamPlan) else placement.plan.as_stream_plan()
        streamed = A if isinstance(A, StreamedMatrix) else None
        # What was spent on the solve, not on the sweep that is recorded below.
        sweeps, moved = (streamed.sweeps, streamed.bytes_streamed) if streamed else (result.sweeps, 0)
        limited = bool(plan.slots) or self.request.memory is not None
        summary = describe_solve(
            A,
            plan,
            result,
            rtol=self.request.rtol,
            sweeps=self.before.sweeps + sweeps,
            bytes_streamed=self.before.bytes_streamed + moved,
            seconds=self.before.seconds + seconds,
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
            "largest_error": float(np.abs(x - 1).max())
            if self.right_hand_sides is None and self.columns == 1
            else None,
            "right_hand_sides": [
                {
                    "column": number,
                    "reason": column.reason.name.lower(),
                    "iterations": column.iterations,
                    "true_residual": column.true_residual,
                }
                for number, column in zip(self.chosen, columns, strict=True)
            ],
            "seconds": {
                "compile": compile_seconds() - self.compiled,
                "open": opened - self.opening,
                "solve": seconds,
                "total": time.perf_counter() - self.began,
            },
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
