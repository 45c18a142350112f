"""``penstock.prepare``: a system that is set up once, solved for any number of right-hand sides, and given new values.

>>> import penstock
>>> from penstock.fem import Cantilever
>>> beam = Cantilever(nodes=(9, 3, 3), dof=3)
>>> A = beam.matrix().to_csr()
>>> with penstock.prepare(A, device="cpu") as system:
...     first = system.solve(beam.load())
...     second = system.solve(-beam.load(), x0=first.x)
...     system.update(2.0 * A)
...     half = system.solve(beam.load())
>>> bool(abs(half.x - first.x / 2).max() < 1e-6 * abs(first.x).max())
True
"""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

import numpy as np

from penstock.driver.argument_checks import (
    OnFailure,
    checked_failure,
    checked_options,
    checked_precision,
    unknowns_of_a_node,
)
from penstock.driver.eigsh import eigsh_of_system
from penstock.driver.foreign import as_matrix
from penstock.driver.inputs import GivenVectors, as_given_matrix
from penstock.driver.inverse import Inverse
from penstock.driver.made_matrix import with_coordinates
from penstock.driver.open_system import AnyResult, OpenSystem
from penstock.driver.opening import open_system
from penstock.driver.progress import CallClock, Reporter, RichReporter, time_facts
from penstock.driver.request import Request, Resident
from penstock.driver.slow_convergence import go_on_as_advised, solve_as_advised
from penstock.driver.update import update_values
from penstock.solvers import IterationRecord, PreconditionerSpec, StopReason, method_named
from penstock.solvers.amg.modes import check_shape_of_modes
from penstock.solvers.checks import check_maxiter, check_tolerances
from penstock.solvers.eigen.result import Modes
from penstock.solvers.image_solve import ImageUnfitError, tried_with_image
from penstock.solvers.result import iterations_a_digit, with_note
from penstock.spmv import (
    BudgetError,
    Device,
    InputError,
    NotConvergedWarning,
    Operator,
    format_nbytes,
    parse_nbytes,
)
from penstock.spmv.compilation.watch import seconds_without_compiling
from penstock.spmv.foreign import is_foreign
from penstock.streaming import StreamPlan

# A preconditioner of earlier values is made again when a solve needs this many times the iterations for a digit; a few iterations
# more are no sign of it.
_RISEN, _FEW = 1.5, 8
# Solves for which a system is prepared, about: what saves time in each of them may take longer once.
_SOLVES = 10

Refresh = Literal["auto", "values", "keep"]


def prepare(
    A: Any,
    *,
    columns: int = 1,
    device: str = "auto",
    memory: int | str | None = None,
    preconditioner: Any = "auto",
    block_size: int | Literal["auto"] = "auto",
    near_null_space: Any = None,
    coordinates: Any = None,
    null_space: Any = None,
    method: str = "auto",
    precision: str = "auto",
    verify: str = "bound",
    folder: str | Path | None = None,
    progress: bool = False,
) -> PreparedSystem:
    """Set up a symmetric system once, positive definite unless the method is another, to solve for many right-hand sides.

    The matrix is converted or opened for streaming, and its preconditioner is made; errors are those of :func:`penstock.solve`.

    Parameters
    ----------
    A : matrix
        As for :func:`penstock.solve`.
    device, memory, block_size, near_null_space, coordinates, null_space, method, precision, verify, folder : optional
        As for :func:`penstock.solve`.
    columns : int
        Right-hand sides that are usually solved together, for which the memory is planned. More of them are solved in blocks.
    preconditioner : str, PreconditionerSpec, operator, matrix or function
    progress : bool, to show the progress of the set-up

    Returns
    -------
    PreparedSystem
        A context manager; without ``with``, what it holds is released with the object.

    Examples
    --------
    >>> import numpy as np, penstock, scipy.sparse
    >>> A = scipy.sparse.diags_array([-1.0, 4.0, -1.0], offsets=[-1, 0, 1], shape=(5, 5))
    >>> system = penstock.prepare(A, device="cpu")
    >>> [system.solve(A @ np.full(5, k)).x.round(6).tolist()[0] for k in (1.0, 2.0)]
    [1.0, 2.0]
    """
    if isinstance(columns, bool) or not isinstance(columns, Integral) or columns < 1:
        raise InputError(f"columns must be a whole number, 1 or more, not {columns!r}")
    options = checked_options(device, preconditioner, block_size, folder, near_null_space, coordinates)
    reporter = RichReporter.on_terminal() if progress else Reporter()
    choices: dict[str, Any] = {"device": device, "memory": memory, "preconditioner": preconditioner, "options": options}
    choices |= {"block_size": block_size, "null_space": null_space, "method": method, "precision": precision}
    choices |= {"verify": verify, "folder": folder}
    system = PreparedSystem(A, int(columns), reporter, updatable=True, **choices)
    system.set_up()
    return system


class PreparedSystem:
    """A matrix that is ready to be solved with; made by :func:`prepare`.

    It keeps the format or the opened store, the plan, the preconditioner and their memory until it is closed. One thread at a
    time solves; others wait.

    Attributes
    ----------
    timings : dict
        Seconds of opening the matrix (``"open"``), of making the preconditioner (``"set up"``) and of the last ``"update"``.
    version : int
        Number of updates so far: two solves at the same version are of the same values.

    Examples
    --------
    >>> import numpy as np, penstock, scipy.sparse
    >>> A = scipy.sparse.diags_array([-1.0, 4.0, -1.0], offsets=[-1, 0, 1], shape=(5, 5))
    >>> with penstock.prepare(A, device="cpu") as system:
    ...     system.shape, (system.inverse @ (A @ np.ones(5))).round(6).tolist()
    ((5, 5), [1.0, 1.0, 1.0, 1.0, 1.0])
    """

    def __init__(
        self,
        A: Any,
        columns: int,
        reporter: Reporter,
        *,
        updatable: bool,
        device: str,
        memory: int | str | None,
        preconditioner: Any,
        options: dict[str, Any],
        block_size: int | Literal["auto"],
        null_space: Any,
        method: str,
        precision: str,
        verify: str,
        folder: str | Path | None,
    ) -> None:
        self._clock = CallClock(reporter)
        self._resources = ExitStack()
        self._close = weakref.finalize(self, self._resources.close)
        self._lock, self._solver_thread = threading.Lock(), 0
        with self._clock.running():
            method_named(method)
            checked_precision(precision, verify)
            if is_foreign(preconditioner):
                preconditioner = as_matrix(preconditioner)
            with self._clock.part("read"):
                given, room = as_given_matrix(A, device), None if memory is None else parse_nbytes(memory)
            if given.kind == "elements":
                options = with_coordinates(given.matrix, preconditioner, method, options)
            own = preconditioner.block_size if isinstance(preconditioner, PreconditionerSpec) else 1
            if block_size == "auto" and own != 1:
                block_size = own
            block_size = unknowns_of_a_node(given.rows, block_size, options.get("coordinates"))
            if (modes := options.get("near_null_space")) is not None:
                check_shape_of_modes(np.shape(modes), given.rows)
            chosen: dict[str, Any] = {"null_space": null_space, "method": method}
            chosen |= {"precision": precision, "verify": verify, "solves": _SOLVES if updatable else 1}
            place = given.find_device(device)
            request = Request(place, columns, room, preconditioner, block_size, options, given.name, **chosen)
            self._open = partial(open_system, folder=folder, reporter=self._clock, updatable=updatable)
            self._given: Any = given
            self._system: OpenSystem
            _, unfit = tried_with_image(lambda: self._enter(request))
            if unfit is not None:
                self._open_without_image(request, unfit)
            if self._system.streamed is None:
                self._given = None  # it is kept where an image may turn out not to stand for it
        self.version, self._mixed, self._stale, self._refresh = 0, False, False, "auto"
        self._iterations_a_digit: float | None = None
        self._opened_seconds: float | None = self._clock.seconds
        self.timings: dict[str, float] = {"open": self._opened_seconds}

    def _enter(self, request: Request) -> None:
        self._system = self._resources.enter_context(self._open(self._given, request))

    def set_up(self) -> None:
        """Make the preconditioner, which the first solve would make otherwise."""
        with self._alone():
            began = seconds_without_compiling()
            _, unfit = tried_with_image(self._system.preconditioner)
            if unfit is not None:
                self._open_without_image(self._system.request, unfit)
            self._system.preconditioner()
            self.timings["set up"] = seconds_without_compiling() - began
            self._opened_seconds = self.timings["open"] + self.timings["set up"]

    def solve(
        self,
        b: Any,
        x0: Any = None,
        *,
        rtol: float = 1e-8,
        atol: float = 0.0,
        maxiter: int | None = None,
        monitor: Callable[[IterationRecord], object] | None = None,
        progress: bool = False,
        on_failure: OnFailure = "warn",
    ) -> AnyResult:
        """Solve ``A x = b``; parameters, errors and result are those of :func:`penstock.solve`.

        More right-hand sides than the system was prepared for are solved one block after another.
        """
        checked_failure(on_failure)
        check_tolerances(rtol, atol)
        check_maxiter(maxiter)
        vectors = GivenVectors.of(b, "b")
        guess = None if x0 is None else GivenVectors.of(x0, "x0").like(vectors)
        limits: dict[str, Any] = {"rtol": rtol, "atol": atol, "maxiter": maxiter, "monitor": monitor}
        return self.solve_vectors(vectors, guess, limits, on_failure, RichReporter.on_terminal() if progress else None)

    def solve_vectors(
        self,
        b: GivenVectors,
        x0: GivenVectors | None,
        limits: dict[str, Any],
        on_failure: OnFailure,
        reporter: Reporter | None = None,
    ) -> AnyResult:
        """Solve for checked vectors; called by :meth:`solve` and by :func:`penstock.solve`, whose callers are warned."""
        if not (limits["monitor"] is None or callable(limits["monitor"])):
            raise InputError(f"monitor must be a function of an IterationRecord, not {limits['monitor']!r}")
        with self._alone(reporter):
            if self._mixed:
                raise InputError(
                    "an update was interrupted while it wrote values, so they are of two matrices; update again"
                )
            began = seconds_without_compiling()
            result, unfit = tried_with_image(lambda: self._solved(b, x0, limits))
            if unfit is not None:
                x, most = self._system.iterate_of_caller(unfit.x), limits["maxiter"]
                self._open_without_image(self._system.request, unfit)
                if x is not None and x.size == b.array.size:
                    x0 = GivenVectors(x, "x0")
                limits = {**limits, "maxiter": most and max(0, most - unfit.iterations)}
                result = self._solved(b, x0, limits)
            seconds = seconds_without_compiling() - began
        return self._judged(self._explained(cast(AnyResult, result), seconds), on_failure)

    def _open_without_image(self, request: Request, unfit: ImageUnfitError) -> None:
        """Open the matrix anew, streamed in every iteration, as its image does not stand for it."""
        self._resources.close()
        vars(self).pop("_system", None)  # whose memory the other one needs
        try:
            self._enter(replace(request, precision="float64"))
        except (InputError, BudgetError) as error:
            self._close()
            raise type(error)(f"an image in fewer digits was tried, but {unfit}; without one, {error}") from error
        self._given = None
        self._system.remember("precision", f"float64: an image in fewer digits was tried, but {unfit}")

    def _solved(self, b: GivenVectors, guess: GivenVectors | None, limits: dict[str, Any]) -> AnyResult:
        """Solve, and make another preconditioner where the iterations show that this one does not suit the matrix."""
        system, maxiter, usual = self._system, limits["maxiter"], self._iterations_a_digit
        if not self._stale or usual is None:  # without a solve, the choice is as open as before an update
            of_earlier = system.preconditioner() if self._stale else None
            result = solve_as_advised(system, b, guess, limits)
            self._stale = self._stale and system.preconditioner() is of_earlier
        elif self._refresh == "keep" or not 0 < limits["rtol"] < 1:
            result = system.solve(b, guess, **limits)
        else:
            most = math.ceil(_RISEN * usual * -math.log10(limits["rtol"])) + _FEW
            result = system.solve(b, guess, **{**limits, "maxiter": most if maxiter is None else min(most, maxiter)})
            reasons = {column.reason for column in result.columns}
            may_go_on = maxiter is None or result.iterations < maxiter
            if not result.converged and may_go_on and not reasons & {StopReason.STOPPED, StopReason.INCONSISTENT}:
                system.rebuild_preconditioner()
                self._stale = False
                return go_on_as_advised(system, result, b, limits)
        if not self._stale and result.converged:
            self._iterations_a_digit = iterations_a_digit(result)
        return result

    def update(self, A: Any, preconditioner: Refresh = "auto") -> None:
        """Replace the values of the matrix by those of another one with the same pattern.

        Nothing else is set up again: format or store, plan and memory stay. Values in memory are overwritten; those that are
        used where the caller has them are from now on used in the new arrays. A store on disk is written anew beside the old
        one, whose place it takes at the end: an interrupt leaves the old or the new. All checks come first.

        Parameters
        ----------
        A : matrix
            Of the kind that was prepared, in memory or a file. A system that was prepared from a store takes another store with
            the same cut and pattern, or a matrix in memory, whose values are written into it (a HostPlaneStore keeps its own).
        preconditioner : {"auto", "values", "keep"}
            ``"values"`` makes it again for the new values, from what depends on the pattern only: aggregates and tentative
            prolongator stay. ``"keep"`` leaves it as it is, a fixed operator: solutions are as accurate, and need more
            iterations the more the values change. ``"auto"`` keeps it until a solve needs half as many iterations again for
            the same digits, then makes it again. Polynomials and coarse levels of a sweep, which use A, always are.

        Raises
        ------
        InputError
            If the pattern differs, or the new matrix cannot be symmetric positive definite; the old values are still there. Or if
            new values leave the range of an image, and nothing else has room; the system is then closed.
        """
        if preconditioner not in ("auto", "values", "keep"):
            raise InputError(f"preconditioner must be 'auto', 'values' or 'keep', not {preconditioner!r}")
        given = as_given_matrix(A)
        with self._alone():
            began, system = seconds_without_compiling(), self._system
            with system.reporter.stage("update"):
                update_values(system, given, partial(self._write, preconditioner))
                if self._given is not None:
                    self._given = given
            _, unfit = tried_with_image(lambda: self._follow(preconditioner))
            if unfit is not None:
                self._open_without_image(system.request, unfit)
                self._follow("values")
            self.timings["update"] = seconds_without_compiling() - began

    def _follow(self, preconditioner: Refresh) -> None:
        """Check the image of new values, and make the preconditioner again if that is asked for or there is no other way."""
        system = self._system
        system.check_image()
        system.unsettle()
        # Without an earlier solve there is nothing to compare iterations with.
        unjudged = preconditioner == "auto" and self._iterations_a_digit is None
        if preconditioner == "values" or system.must_rebuild or unjudged:
            try:
                system.rebuild_preconditioner()
            except InputError as error:
                raise InputError(
                    f"the new values are in use, but their preconditioner cannot be made: {error}"
                ) from error
            self._stale, self._iterations_a_digit = False, None

    @contextmanager
    def _write(self, refresh: Refresh) -> Iterator[None]:
        """Count an update, and remember while values are written that they are of two matrices."""
        before, self._mixed = (self.version, self._refresh, self._stale), True
        self.version, self._refresh, self._stale = self.version + 1, refresh, True
        try:
            yield
        except InputError:  # refused, and the old values are back
            (self.version, self._refresh, self._stale), self._mixed = before, False
            raise
        self._mixed = False

    @contextmanager
    def _alone(self, reporter: Reporter | None = None) -> Iterator[None]:
        """Let one thread at a time work with the system."""
        if self._is_mine:
            raise InputError("this prepared system is in use: a monitor cannot call it; prepare another one")
        with self._lock:
            if not self._close.alive:
                raise InputError("this prepared system is closed; prepare the matrix again")
            self._solver_thread = threading.get_ident()
            try:
                with self._clock.running(reporter):
                    yield
            finally:
                self._solver_thread = 0

    @property
    def _is_mine(self) -> bool:
        """Whether the calling thread is at work with the system."""
        return self._lock.locked() and self._solver_thread == threading.get_ident()

    def _explained(self, result: AnyResult, seconds: float) -> AnyResult:
        """Add to a result what was decided and what it has cost."""
        cost = f"solved in {seconds:.3g} s"
        if self._opened_seconds is not None:
            cost = f"opened in {self._opened_seconds:.3g} s, {cost}"
            self._opened_seconds = None
        parts = self._clock.take()
        decisions = "\n".join([*self._system.explain(), *self._update_facts(), *time_facts(cost, parts)])
        if self._stale and not result.converged:
            note = "; the preconditioner is that of earlier values: update(A, preconditioner='values') makes it again"
            result = with_note(result, note)
        return replace(result, decisions=decisions, timings={**result.timings, **parts})

    def _update_facts(self) -> list[str]:
        if not self.version:
            return []
        times = "once" if self.version == 1 else f"{self.version} times"
        whose = "of earlier values" if self._stale else "of the values now"
        return [f"{'updates':<11} values replaced {times}, preconditioner {whose}"]

    @staticmethod
    def _judged(result: AnyResult, on_failure: str) -> AnyResult:
        """Warn of a result that has not converged, or raise an error; one that the caller's monitor stopped is intended."""
        stopped = any(column.reason is StopReason.STOPPED for column in result.columns)
        if result.converged or stopped or on_failure == "return":
            return result
        if on_failure == "raise":
            return result.check()
        warnings.warn(f"the solve did not converge: {result.message}", NotConvergedWarning, stacklevel=4)
        return result

    def eigsh(self, k: int = 10, M: Any = None, *, progress: bool = False, **options: Any) -> Modes:
        """Return the k lowest modes of ``K x = lambda M x`` for the matrix K; options are those of :func:`penstock.eigsh`."""
        with self._alone(RichReporter.on_terminal() if progress else None):
            return eigsh_of_system(self._system, self._clock, k, M, **options)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix."""
        return self._system.A.shape

    @property
    def device(self) -> Device:
        """What computes."""
        return self._system.A.device

    @property
    def matrix(self) -> Operator:
        """The matrix as an operator, in the caller's order of the unknowns; a product with a block is one pass."""
        return self._system.in_callers_order(self._system.matrix)

    @property
    def preconditioner(self) -> Operator | None:
        """The preconditioner as an operator, in the caller's order of the unknowns; None without one."""
        return None if (M := self._system.preconditioner()) is None else self._system.in_callers_order(M)

    @property
    def inverse(self) -> Inverse:
        """The inverse of the matrix as an operator, whose products are solves to 1e-8; ``inverse.to(rtol)`` is another."""
        return Inverse(self, 1e-8)

    @property
    def plan(self) -> StreamPlan | Resident | None:
        """How the matrix is streamed; None for an operator of the caller."""
        return None if (placement := self._system.placement) is None else placement.plan

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix on the device that computes, as planned: the whole matrix, or the memory that streams it."""
        if (placement := self._system.placement) is None:
            return 0
        beside = 0 if placement.image is None else placement.image.plan.storage_nbytes
        return int(placement.plan.storage_nbytes) + beside

    def explain(self) -> str:
        """Return what was decided and why, one fact a line."""
        return "\n".join([*self._system.explain(), *self._update_facts()])

    def close(self) -> None:
        """Release the memory, close the store and remove a temporary one, after the solve of another thread has ended."""
        if self._is_mine:  # in a monitor
            self._close()
            return
        with self._lock:
            self._close()

    def __enter__(self) -> PreparedSystem:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if not self._close.alive:
            return "<PreparedSystem, closed>"
        return f"<PreparedSystem of {self.shape[0]:,} unknowns on {self.device}, {format_nbytes(self.nbytes)}>"

    def __reduce__(self) -> NoReturn:
        """Refuse pickling and copies."""
        raise InputError(
            "a prepared system holds device memory, open files and threads, so it can be neither pickled nor copied; prepare the "
            "matrix in the process that solves"
        )
