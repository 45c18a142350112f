"""A system in files, solved and reported: any symmetric positive definite matrix, resident or streamed."""

from __future__ import annotations

import contextlib
import functools
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np

from penstock.experiments.environment import describe_environment
from penstock.experiments.interrupts import stop_requests
from penstock.experiments.preconditioning import PreconditionerKind
from penstock.experiments.progress import Reporter, Stage, solve_progress
from penstock.experiments.results import ResultsFolder, write_json
from penstock.experiments.single_run import RunOutcome
from penstock.experiments.solve_report import columns_of, describe_solve, reason_of, record_sweep
from penstock.experiments.system_files import (
    column_ranges,
    matrix_name,
    parse_columns,
    parse_count,
    read_guess,
    read_right_hand_sides,
    write_solution,
)
from penstock.experiments.system_matrix import OpenSystem, SystemOpener
from penstock.solvers import (
    BlockSolveResult,
    IterationRecord,
    SolveResult,
    StopReason,
    cg,
    choose_block_size,
    jacobi,
    solve_many,
)
from penstock.solvers.chebyshev import check_products
from penstock.spmv import Device, InputError, Operator, parse_nbytes
from penstock.streaming import StreamedMatrix

__all__ = ["PRECONDITIONERS", "SolveRequest", "solve_file"]

PRECONDITIONERS = ("auto", *get_args(PreconditionerKind))


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
    preconditioner : {"auto", "none", "jacobi", "block_jacobi", "chebyshev"}
        ``auto`` is ``block_jacobi`` for a matrix of dense blocks, else ``jacobi``.
    products : int, optional
        With ``chebyshev``: products with A an iteration, odd; by default the plan chooses.
    rtol : float
    maxiter : int, optional
    device : str
    memory : int or str, optional
        For matrix storage on the device that computes. By default all of a CPU's, or what is free on a GPU.
    guess : path, optional
        ``.npy`` of the shape of the solution, from which to start.
    """

    matrix: str
    right_hand_sides: Path | None = None
    columns: str | None = None
    preconditioner: str = "auto"
    products: int | None = None
    rtol: float = 1e-8
    maxiter: int | None = None
    device: str = "cpu"
    memory: int | str | None = None
    guess: Path | None = None

    def check(self) -> None:
        """Refuse, before a file is read, what no file could make right."""
        if self.preconditioner not in PRECONDITIONERS:
            raise InputError(f"unknown preconditioner {self.preconditioner!r}; known: {', '.join(PRECONDITIONERS)}")
        if self.products is not None:
            if self.preconditioner != "chebyshev":
                raise InputError("--products belongs to --precond chebyshev; leave it out, or choose that")
            check_products(self.products)
        if not 0 <= self.rtol < 1:
            raise InputError(f"--rtol is a share of the right-hand side, 0 or more and less than 1, not {self.rtol}")
        if self.columns is not None:
            (parse_count if self.right_hand_sides is None else parse_columns)(self.columns)
        if self.memory is not None:
            parse_nbytes(self.memory)
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
    folder.make("choose another --output")
    try:
        return _Run(request, folder, reporter or Reporter()).run()
    except BaseException as error:
        if folder.solution.exists():
            shutil.rmtree(folder.matrix, ignore_errors=True)
            error.add_note(f"the solution is kept in {folder.solution}")
        else:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise


class _Run:
    """One solve: what was asked for, where it writes, and when it began."""

    def __init__(self, request: SolveRequest, folder: ResultsFolder, reporter: Reporter) -> None:
        self.request, self.folder, self.reporter = request, folder, reporter
        self.device = Device.parse(request.device)
        self.began = time.perf_counter()
        self.given: np.ndarray[Any, Any] | None = None
        self.columns = 1
        self.chosen: Sequence[int] = (0,)

    def run(self) -> RunOutcome:
        """Read, plan, build, solve and report."""
        request = self.request
        right_side = self._read_right_hand_sides()  # before the matrix, which may take longer
        with contextlib.ExitStack() as resources:
            resources.enter_context(self.device.current())
            system = SystemOpener(
                request.matrix,
                self.columns,
                None if self.given is None else len(self.given),
                cast(Any, request.preconditioner),  # checked before
                request.products or "auto",
                self.device,
                None if request.memory is None else parse_nbytes(request.memory),
                self.folder,
                self.reporter,
                resources,
                [f"right side  {right_side}"],
            ).open()
            opened = time.perf_counter()
            result, x = self._solve(system)
            # Also before reporting: an interrupt or an error from here on must not cost the solution.
            write_solution(self.folder.solution, x)
            self._report(system, result, x, opened, time.perf_counter() - opened)
        shutil.rmtree(self.folder.matrix, ignore_errors=True)
        return RunOutcome(self.folder, reason_of(result))

    def _read_right_hand_sides(self) -> str:
        """Read what is given, and return in words what is solved for."""
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

    def _solve(self, system: OpenSystem) -> tuple[SolveResult | BlockSolveResult, np.ndarray[Any, Any]]:
        A, request, n, order = system.A, self.request, system.A.shape[0], system.order

        def in_order(vectors: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            return vectors if order is None else order.forward(vectors)

        guess = None
        if request.guess is not None:
            guess = in_order(read_guess(request.guess, (n, self.columns)).astype(A.dtype))
        with self.reporter.stage("prepare"):
            options: dict[str, Any] = {
                "rtol": request.rtol,
                "maxiter": request.maxiter,
                "M": self._preconditioner(system),
            }
        blocks = 1
        solve: Callable[..., SolveResult | BlockSolveResult]
        if self.columns == 1:
            b = (
                A.apply(self.device.xp.ones(n, dtype=A.dtype))
                if self.given is None
                else self._moved(A, in_order(self.given))
            )
            x0 = None if guess is None else self._moved(A, guess)
            solve = functools.partial(cg, A, b, x0, **options)
        else:
            given = self.given
            B = in_order(np.random.default_rng(0).standard_normal((n, self.columns)) if given is None else given)
            # The preconditioner's part of what was set aside is taken already.
            memory = system.solver_nbytes
            solve = functools.partial(solve_many, A, np.asarray(B, dtype=A.dtype), guess, memory=memory, **options)
            blocks = -(-self.columns // choose_block_size(A, self.columns, memory))
        with stop_requests(self.reporter) as stop, self.reporter.stage("solve") as stage:
            progress = _Progress(stage, request.rtol, blocks)

            def monitor(record: IterationRecord) -> bool:
                progress.tell(record)
                return stop.is_set()

            result = solve(monitor=monitor)
        x = self.device.to_host(result.x)
        return result, x if order is None else order.back(x)

    def _moved(self, A: Operator, column: np.ndarray[Any, Any]) -> Any:
        return self.device.asarray(column[:, 0], dtype=A.dtype)

    def _preconditioner(self, system: OpenSystem) -> Operator | None:
        if system.preconditioning.kind == "none" and isinstance(system.A, StreamedMatrix):
            jacobi(system.A)  # only for its check of the diagonal, at the cost of one sweep: a store may hold anything
        return system.preconditioning.build(system.A)

    def _report(
        self,
        system: OpenSystem,
        result: SolveResult | BlockSolveResult,
        x: np.ndarray[Any, Any],
        opened: float,
        seconds: float,
    ) -> None:
        """Write everything that a solve leaves besides the solution."""
        folder, A, plan = self.folder, system.A, system.plan
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
            together = x if x.ndim == 1 else np.ascontiguousarray(x[:, : system.together])
            record_sweep(folder, streamed, self.device.asarray(together))
        summary |= {
            "matrix": matrix_name(self.request.matrix),
            "nonzeros": system.nonzeros,
            "preconditioner": system.preconditioning.kind,
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


class _Progress:
    """Tells how far a solve has come; of several blocks, all of them together."""

    def __init__(self, stage: Stage, rtol: float, blocks: int) -> None:
        self.stage, self.rtol, self.blocks = stage, rtol, blocks
        self.block, self.last = 0, 0

    def tell(self, record: IterationRecord) -> None:
        """Take note of a look at the residual."""
        if record.iteration <= self.last:
            self.block += 1
        self.last = record.iteration
        done, detail = solve_progress(record, self.rtol)
        if self.blocks > 1:
            done, detail = (self.block + done) / self.blocks, f"block {self.block + 1} of {self.blocks}, {detail}"
        self.stage.advance(done, detail)


def _message(columns: tuple[SolveResult, ...], chosen: Sequence[int]) -> str:
    """Return why a solve stopped; of many right-hand sides, those with the same reason together."""
    if len(columns) == 1:
        return columns[0].message
    groups: dict[StopReason, list[int]] = {}
    for number, column in zip(chosen, columns, strict=True):
        groups.setdefault(column.reason, []).append(number)
    return "\n".join(f"columns {column_ranges(numbers)}: {reason.value}" for reason, numbers in groups.items())
