"""A system in files, solved and reported: any symmetric positive definite matrix, resident or streamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from penstock.driver.inputs import GivenMatrix, GivenVectors, as_given_matrix
from penstock.driver.open_system import AnyResult, OpenSystem
from penstock.driver.opening import plan_system
from penstock.driver.progress import Reporter
from penstock.driver.request import Placement, Request
from penstock.experiments.reporting.atomic import write_json
from penstock.experiments.reporting.checkpoint import Checkpoint, SolverState
from penstock.experiments.reporting.folder import ResultsFolder
from penstock.experiments.reporting.outcome import RunOutcome
from penstock.experiments.reporting.solve_report import columns_of
from penstock.experiments.run import Run
from penstock.experiments.systems.solve_request import (
    SolveRequest,
    decided_precision,
    decided_spec,
    lasting_settings,
    read_request,
    settings_of,
)
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
from penstock.solvers import SolveResult, StopReason
from penstock.spmv import InputError, Operator, SweptOperator, parse_nbytes


def resume_solve(directory: str | Path, *, maxiter: int | None = None, reporter: Reporter | None = None) -> RunOutcome:
    """Resume a solve that was stopped or killed, or did not converge; without a checkpoint, begin anew.

    ``maxiter`` counts from the first start. Raises an InputError if the solve has converged, or its files or its system were
    altered.
    """
    folder = ResultsFolder(Path(directory))
    with folder.resumed():
        request, settings = read_request(folder)
        resume = folder.checkpoint.exists()
        if folder.result.exists() and not resume:
            if not folder.read_json(folder.result).get("converged"):  # right-hand sides in several blocks
                raise InputError(
                    f"{folder.path} has no checkpoint; solve anew, from where it was with --guess {folder.solution}"
                )
            raise InputError(f"the solve in {folder.path} is finished; see penstock show")
        if maxiter is not None:
            request = replace(request, maxiter=maxiter)
        request.check()
        if not resume:
            write_json(folder.solve, settings_of(request))
        run = SystemRun(request, folder, reporter or Reporter(), settings if resume else None)
        return run.run(resume=resume)


def solve_file(request: SolveRequest, directory: str | Path, *, reporter: Reporter | None = None) -> RunOutcome:
    """Solve a system in files and leave a results folder in ``directory``, which must not exist or be empty.

    SIGINT or SIGTERM stops between two iterations: the folder then holds the last iterates. After an error, no folder is left.
    """
    request.check()
    folder = ResultsFolder(Path(directory))
    with folder.made("choose another --output"):
        try:
            write_json(folder.solve, settings_of(request))
            return SystemRun(request, folder, reporter or Reporter()).run(resume=False)
        except BaseException as error:
            folder.remove_unless_saved(error)
            raise


def plan_file(request: SolveRequest, directory: str | Path, *, reporter: Reporter | None = None) -> str:
    """Return the plan of a solve in words, without solving; errors are those of :func:`solve_file`.

    The solve would stream from the disk of the directory, which need not exist.
    """
    request.check()
    near = next(place for place in (Path(directory) / "any").absolute().parents if place.is_dir())
    return SystemRun(request, ResultsFolder(near), reporter or Reporter()).plan()


class SystemRun(Run):
    """A run of a system in files, whose solution is written at once; ``settings`` are those of a run that is resumed."""

    reports_stopped: ClassVar[bool] = True
    advice: ClassVar[str] = (
        "solve anew, from where it was with --guess; decisions depend on the memory that is free, too"
    )

    def __init__(
        self, request: SolveRequest, folder: ResultsFolder, reporter: Reporter, settings: dict[str, Any] | None = None
    ) -> None:
        super().__init__(folder, reporter)
        spec, precision = (None, None) if settings is None else (decided_spec(settings), decided_precision(settings))
        self.precision = precision or request.precision
        self.request, self.spec, self.settings_file = request, spec, folder.solve
        self.rtol, self.maxiter = request.rtol, request.maxiter
        self.right_hand_sides: np.ndarray[Any, Any] | None = None
        self.columns, self.right_side = 1, ""
        self.chosen: Sequence[int] = (0,)

    def plan(self) -> str:
        """Read and plan, and return the plan in words."""
        return self._in_words(plan_system(*self._asked(), folder=self.folder.path, reporter=self.reporter))

    def _in_words(self, placement: Placement) -> str:
        return f"{placement.explain()}\n{'right side':<11} {self.right_side}"

    def _write_plan(self, placement: Placement) -> None:
        self.folder.write_plan(self._in_words(placement), self.reporter)

    def _settings(self, placement: Placement) -> dict[str, Any]:
        return settings_of(self.request, placement)

    def _lasting(self, settings: dict[str, Any]) -> dict[str, Any]:
        return lasting_settings(settings)

    def _asked(self) -> tuple[GivenMatrix, Request]:
        with self.reporter.part("read"):
            self.right_side = self._read_right_hand_sides()  # before the matrix, which may take longer
        settings = self.request
        with self.reporter.stage("read") as stage:
            matrix = as_given_matrix(settings.matrix, settings.device)
            stage.advance(1.0)
        if settings.format != "auto" and matrix.kind == "store":
            raise InputError(
                f"{matrix.name} is stored in a format; convert it with: penstock store {settings.matrix} ANOTHER --format "
                f"{settings.format}"
            )
        with self.reporter.part("read"):
            modes = self._modes()
        options = modes if settings.degree is None else {**modes, "degree": settings.degree}
        request = Request(
            matrix.find_device(settings.device),
            self.columns,
            None if settings.memory is None else parse_nbytes(settings.memory),
            replace(self.spec, **modes) if self.spec else settings.preconditioner,
            max(1, matrix.rows // len(modes["coordinates"])) if "coordinates" in modes else "auto",
            options={} if self.spec else options,
            name=matrix.name,
            format=None if settings.format == "auto" else settings.format,
            null_space=self._null_space(),
            method=settings.method,
            precision=self.precision,
            verify=settings.verify,
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

    def _right_hand_sides(self, system: OpenSystem) -> GivenVectors:
        A, n = system.matrix, system.A.shape[0]
        if self.right_hand_sides is not None:
            return GivenVectors(self.right_hand_sides if self.columns > 1 else self.right_hand_sides[:, 0], "B")
        if self.columns > 1:
            check_fits_memory(2 * 8 * n * self.columns, f"{self.columns} right-hand sides and their solutions")
            return GivenVectors(np.random.default_rng(0).standard_normal((n, self.columns)), "B")
        product = A.device.to_host(A.apply(A.device.xp.ones(n, dtype=A.dtype)))
        return GivenVectors(product if system.order is None else system.order.back(product), "B")

    def _posed(self, system: OpenSystem) -> tuple[GivenVectors, GivenVectors | None]:
        with self.reporter.part("loads"):
            b = self._right_hand_sides(system)
        if self.request.guess is None or self.spec is not None:
            return b, None
        return b, GivenVectors(read_guess(self.request.guess, (system.A.shape[0], self.columns)), "the guess")

    def _traffic(self, A: Operator, state: SolverState) -> tuple[int, int]:
        if isinstance(A, SweptOperator) or state is None:
            return super()._traffic(A, state)
        return state.iteration - self.before.sweeps, 0  # in memory, a product an iteration

    def _keep(self, result: AnyResult, spent: Checkpoint) -> None:
        if not result.converged and spent.state is not None:
            self._save(spent)
        write_solution(self.folder.solution, np.asarray(result.x))

    def _report(self, system: OpenSystem, result: AnyResult, spent: Checkpoint) -> None:
        if not isinstance(system.matrix, SweptOperator):  # all products, not those of iterations only
            spent = replace(spent, sweeps=self.before.sweeps + result.sweeps)
        super()._report(system, result, spent)

    def _facts(self, system: OpenSystem, result: AnyResult, spent: Checkpoint) -> dict[str, Any]:
        placement, columns, seconds = system.decided, columns_of(result), self.seconds
        known = self.right_hand_sides is None and self.columns == 1
        return {
            "matrix": matrix_name(self.request.matrix),
            "nonzeros": placement.nonzeros,
            "preconditioner": placement.spec.name,
            "message": _message(columns, self.chosen),
            "largest_error": float(np.abs(np.asarray(result.x) - 1).max()) if known else None,
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
                "compile": seconds["compile"],
                "open": seconds["open"],
                "solve": spent.seconds - self.before.seconds,
                "total": seconds["total"],
            },
        }


def _message(columns: tuple[SolveResult, ...], chosen: Sequence[int]) -> str:
    """Return why a solve stopped; of many right-hand sides, those with the same reason together."""
    if len(columns) == 1:
        return columns[0].message
    groups: dict[StopReason, list[int]] = {}
    for number, column in zip(chosen, columns, strict=True):
        groups.setdefault(column.reason, []).append(number)
    return "\n".join(f"columns {column_ranges(numbers)}: {reason.value}" for reason, numbers in groups.items())
