"""Solves with a matrix that is too large for memory, by iterations with an image of it that is held there in fewer digits.

The image ``A~`` has the pattern of A and rounded values, of float32 or of 16 bits. All iterations, and the set-up of the
preconditioner, use the image alone; A is read for residuals, a product each. This is a flexible conjugate gradient method on A
whose preconditioner is the solve with the image::

    z  = A~^-1 r                                        iterations with the image, until it can give no more
    q  = A z                                            one pass over A
    x += V c,  r -= W c    with  V^T W c = V^T r        V = [last step, z], W = A V

so that the error of x is least, in the norm of A, over the last step and z (flexible CG: Notay 2000; solves in fewer digits as
the preconditioner: Buttari, Dongarra, Kurzak, Luszczek and Tomov 2008). Each pass reduces the error by about the largest
eigenvalue of ``A^-1 (A~ - A)``.

The last step needs no pass. With a matrix E of bounds, ``|A~ - A| <= E`` entry by entry, which the image knows, ::

    ||b - A (x + z)|| <= ||r - A~ z|| + || E |z| ||

bounds the residual, and as r is small, so is the bound. It counts as the true residual where it meets the tolerance, with an
allowance for the rounding in r.

A product may use the float32 numbers of A alone, where these are to be had with fewer bytes: q is then off by at most
``2^-24 |A| |z|``, which is added to the bound. Where that is not small, A itself is used, and r and W are renewed in that pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from penstock.solvers.columns import ColumnSpace, Numbers, least_error
from penstock.solvers.problem import FLOOR_FACTOR, LinearProblem
from penstock.solvers.result import BREAKDOWNS, BlockSolveResult, IterationRecord, SolveResult, StopReason
from penstock.solvers.states import SavedState, StateLayout, SystemMark, check_state, histories_of
from penstock.spmv import Array, InputError, SparseMatrix, SweptOperator, VectorSpace
from penstock.spmv.communicator import communicator_of
from penstock.spmv.formats.symmetric_image import SymmetricImageMatrix

Result = TypeVar("Result")
#: ``solve(A, b, x0, M=, rtol=, atol=, maxiter=, monitor=, state=)``, as :class:`MethodChoice` has it.
SolveMethod = Callable[..., SolveResult | BlockSolveResult]

# Later solves end at this share of the factor of the last pass, within these limits, and aim at this share of the tolerance.
_SHARE, _LEAST, _MOST, _AIM = 0.2, 1e-9, 0.3, 0.25
# A pass is slow if the residual is left above this share of the one before: after two, it may have come to the floor of rounding.
_SLOW, _DOUBTFUL = 0.2, 2
# The image is given up after this many passes without halving the residual. The first pass may increase the residual, because it
# minimises the error in the norm of A. Without an image, systems with slow passes have taken hundreds of sweeps.
_HALVED, _PATIENCE = 0.5, 3
# Rounding units of images.
_UNITS = {np.dtype(np.float32): 2.0**-24, np.dtype(np.int16): 2.0**-16}
# The first solve ends at this residual, in these units; a smaller one for int16 saves passes, which cost more than iterations.
_FIRST = {np.dtype(np.float32): 100.0, np.dtype(np.int16): 50.0}
# Products with A in float32 may add an error to a residual of this share of the tolerance, or of the residual that is expected.
_LOST_OF_TOLERANCE, _LOST_OF_EXPECTED = 0.5, 2e-3
# A pass is expected to gain as much as the one before it, and the first one this.
_FIRST_GAIN = 1e-3
# Rounding in a residual that is updated, in units of that in ``|A||x|``.
_DRIFT = 2.0
_UNIT = float(np.finfo(np.float64).eps) / 2
#: Reasons of a solve with an image that is not positive definite, and of one that has come as far as it could.
_UNFIT = (*BREAKDOWNS, StopReason.NOT_FINITE, StopReason.INCONSISTENT)
_GAVE_ALL = (StopReason.CONVERGED, StopReason.ROUNDING_FLOOR, StopReason.STAGNATED)


class ImageUnfitError(Exception):
    """An image does not stand for its matrix; ``x`` is the iterate so far, if there is one, after ``iterations``."""

    def __init__(self, why: str, x: Array | None = None, iterations: int = 0) -> None:
        super().__init__(why)
        self.x, self.iterations = x, iterations


def tried_with_image(action: Callable[[], Result]) -> tuple[Result | None, ImageUnfitError | None]:
    """Return what an action returns, or why an image was unfit, with nothing of what the action has held."""
    try:
        return action(), None
    except ImageUnfitError as error:
        return None, ImageUnfitError(str(error), error.x, error.iterations)


def bound_of_difference(image: Any, z: Array) -> Array:
    """Return a vector that bounds ``|(A - image) z|`` entry by entry, for the rows of this rank."""
    if isinstance(image, SymmetricImageMatrix):
        return image.bound(z)
    if isinstance(image, SparseMatrix):
        unit = _UNITS[np.dtype(image.values_dtype)]
        return unit / (1 - unit) * image.apply_absolute(abs(z))
    return bound_of_difference(image.square, z)  # what couples ranks is exact


def image_workspace_nbytes(n: int, columns: int) -> int:
    """Return the bytes of the vectors of :func:`solve_by_image`, beside those of the solves with the image."""
    return 7 * 8 * n * columns


def solve_by_image(
    solve: SolveMethod,
    A: SweptOperator,
    image: Any,
    b: Array,
    x0: Array | None = None,
    *,
    M: Any = None,
    rtol: float = 1e-8,
    atol: float = 0.0,
    maxiter: int | None = None,
    monitor: Callable[[IterationRecord], object] | None = None,
    state: Any = None,
    verify: str = "bound",
) -> SolveResult | BlockSolveResult:
    """Solve ``A x = b`` with a streamed matrix, by solves with its image.

    Parameters
    ----------
    solve : callable
        The method for the image, such as :func:`cg`.
    A : SweptOperator
        Symmetric positive definite.
    image : SparseMatrix or DistributedImage
        A in fewer digits, on the same device, see :func:`penstock.solvers.image_of`; of ranks that share A, their image.
    b : array, (n,) or (n, columns), on that device
    x0, M, rtol, atol, maxiter, monitor, state
        As for :func:`cg`. M is a preconditioner of the image, maxiter limits the iterations of all solves with the image
        together, and a state is that of the first of these solves, or of an iterate that they have refined.
    verify : {"bound", "norm"}
        Whether a bound of the residual is enough at the end, or a last pass over A computes it.

    Returns
    -------
    SolveResult or BlockSolveResult
        ``sweeps`` and ``bytes_streamed`` are those of A. ``true_residual`` is computed from A, or is the bound above.

    Raises
    ------
    ImageUnfitError
        If solves with the image break down, or do not halve the residual in three passes, and not for rounding.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import block_jacobi, cg, image_of, solve_by_image
    >>> from penstock.streaming import HostStore, StreamedMatrix
    >>> beam = Cantilever(nodes=(17, 5, 5), dof=3)
    >>> matrix, b = beam.matrix("symmetric_bsr"), beam.load()
    >>> image = image_of(matrix, "float32")
    >>> with StreamedMatrix(HostStore.from_matrix(matrix, 8), matrix.nbytes // 2) as A:
    ...     result = solve_by_image(cg, A, image, b, M=block_jacobi(image, 3), rtol=1e-9)
    >>> result.converged, result.sweeps < 5 < result.iterations
    (True, True)
    """
    if np.dtype(image.values_dtype) not in _UNITS or image.shape != A.shape:
        raise InputError(f"the image must be of float32 or int16 and of shape {A.shape}, not {image!r}")
    with A.device.current():
        return _Refinement(solve, A, image, b, M, rtol, atol, maxiter, monitor, verify == "bound").run(x0, state)


@dataclass
class _Refinement:
    """Solutions and residuals of one solve; arrays of numbers have one for each right-hand side."""

    solve: SolveMethod
    A: SweptOperator
    image: Any
    b: Array
    M: Any
    rtol: float
    atol: float
    maxiter: int | None
    monitor: Callable[[IterationRecord], object] | None
    bounds_settle: bool
    iterations: int = field(default=0, init=False)
    state: Any = field(default=None, init=False)  # of the first solve
    halted: bool = field(default=False, init=False)  # by the monitor

    def __post_init__(self) -> None:
        self.began, self.before = time.perf_counter(), (self.A.sweeps, self.A.bytes_streamed)
        self.space, self.vectors = ColumnSpace(self.b, communicator_of(self.A)), VectorSpace.of(self.A)
        self.unit = _UNITS[np.dtype(self.image.values_dtype)]
        self.b_norms = b_norms = self.space.norms(self.b)
        self.scales = np.where(b_norms > 0, b_norms, 1.0)
        self.tolerances = np.maximum(self.rtol * b_norms, self.atol)
        self.ends: list[StopReason | None] = [None] * len(b_norms)
        self.norms, self.slow = self.scales.copy(), np.zeros(len(b_norms), int)
        self.gains = np.full_like(b_norms, _FIRST_GAIN)
        self.halved, self.passes_since = np.full_like(b_norms, np.inf), np.zeros(len(b_norms), int)
        self.last: tuple[Array, Array] | None = None  # the last step, and A times it
        self.may_round = self.bounds_settle and self.A.can_round
        # Bounds of the errors of the latter and of r, of products with A in float32, and of (A - A~) z where it is known.
        self.error_of_last, self.error_of_r = np.zeros_like(b_norms), np.zeros_like(b_norms)
        self.differences: Numbers | None = None
        self.bounded: set[int] = set()  # right-hand sides of whose residuals bounds are known

    def run(self, x0: Array | None, state: Any) -> SolveResult | BlockSolveResult:
        """Solve."""
        self.x, self.r = self.A.device.xp.zeros_like(self.b), self.b.copy()
        if getattr(state, "refined", False):
            self._take_up(state)
        elif not self._begin(x0, state):
            return self._result()
        while self._running():
            if (early := self._limit()) is None:
                z = self._correction()
                if self._settles(z):
                    break
                if (early := self._limit()) is not None:
                    self.halved[:] = np.inf  # a correction that is not finished says nothing of the image
                self._step(z, *self._product(z))
            if early is not None:
                self.ends = [end or early for end in self.ends]
                break
        return self._result()

    def _begin(self, x0: Array | None, state: Any) -> bool:
        """Solve with the image and make the first step; return whether the image has given all that it can."""
        first = self._first(x0, state)
        self.columns, self.state = list(first.columns), first.state
        product, lost = self._product(first.x)
        if all(column.reason in _GAVE_ALL for column in self.columns):
            self._step(first.x, product, lost)
            return True
        self.x, self.r, self.error_of_r = first.x, self.r - product, lost
        self.norms = self.space.norms(self.r)
        # That the image has given all that it can for a right-hand side does not mean that it is solved.
        why = next(column.reason for column in self.columns if column.reason not in _GAVE_ALL)
        self.ends = [why if column.reason in _GAVE_ALL else column.reason for column in self.columns]
        return False

    def _take_up(self, state: Any) -> None:
        """Go on from the iterate that another solve left; one pass over A, and the first step is lost."""
        A = self.A
        check_state(state, SavedState, StateLayout(self.b.shape, A.dtype, A.device))
        if state.system is not None:
            state.system.check_same(SystemMark.of(self.b_norms, self.M), _UNIT)
        self.x[...] = A.device.asarray(state.x)
        self.state, self.iterations = state, state.iteration
        self._compute()
        nothing: dict[str, Any] = {"sweeps": 0, "bytes_streamed": 0, "timings": {}}
        self.columns = [
            SolveResult.of(self.x, StopReason.STAGNATED, norms, norms[-1], None, **nothing)
            for norms in histories_of(state)
        ]
        self._test(self.scales)
        self._arrive()
        self.gains = np.full_like(self.norms, _SLOW)

    @property
    def _has_refined(self) -> bool:
        """Whether x has been moved by what A says."""
        return self.last is not None or bool(getattr(self.state, "refined", False))

    def _goes_on_from(self) -> Any:
        """Return the state from which a later solve goes on: that of the first solve, or, once x has been refined, of x."""
        if not self._has_refined:
            return self.state
        iteration, histories = self.reached
        most = max(map(len, histories))
        histories = [norms + [norms[-1]] * (most - len(norms)) for norms in histories]
        norms = histories[0] if self.b.ndim == 1 else histories
        return replace(self.state, x=self.x, refined=True, iteration=iteration, residual_norms=norms)

    def _arrive(self) -> None:
        """Note the iterations that have led to x, and the residuals of every right-hand side."""
        self.reached = self.iterations, [column.residual_norms for column in self.columns]

    def _limit(self) -> StopReason | None:
        """Return why the solve ends early, if it does."""
        if self.halted:
            return StopReason.STOPPED
        return StopReason.MAXITER if self.maxiter is not None and self.iterations >= self.maxiter else None

    def _first(self, x0: Array | None, state: Any) -> SolveResult | BlockSolveResult:
        """Solve with the image as far as it goes."""

        def watch(record: IterationRecord) -> bool:
            self.halted = self.monitor is not None and bool(self.monitor(record))
            return self.halted

        rtol = max(_FIRST[np.dtype(self.image.values_dtype)] * self.unit, _AIM * self.rtol)
        limits: dict[str, Any] = {"rtol": rtol, "atol": _AIM * self.atol, "maxiter": self.maxiter, "monitor": watch}
        first = self.solve(self.image, self.b, x0, M=self.M, state=state, **limits)
        self._take_note(first)
        return first

    def _take_note(self, result: SolveResult | BlockSolveResult) -> None:
        """Count the iterations of a solve with the image, and refuse an image that breaks it down."""
        self.iterations += result.iterations
        self.halted = communicator_of(self.A).largest(float(self.halted)) > 0  # ranks halt together
        unfit = next((column.reason for column in result.columns if column.reason in _UNFIT), None)
        if unfit is not None:
            raise self._unfit(f"a solve with it ended as {unfit.name.lower().replace('_', ' ')}")

    def _unfit(self, why: str) -> ImageUnfitError:
        return ImageUnfitError(why, self.x if self._has_refined else None, self.iterations)

    def _running(self) -> list[int]:
        """Return the right-hand sides that are not solved yet."""
        return [column for column, end in enumerate(self.ends) if end is None]

    def _product(self, z: Array) -> tuple[Array, Numbers]:
        """Return A times z, and bounds of the errors if it is that of A in float32, of which fewer bytes are read.

        That is enough where what is lost is small beside the residual to be expected and the tolerance. Where it is not, what
        was lost before is made up for in the same pass over A.
        """
        A, lost, running = self.A, np.zeros_like(self.error_of_r), self._running()
        if (replayed := A.replayed_vectors(z)) is not None:
            replayed[0][...] = z
        z, product = replayed or (z, A.device.xp.empty_like(z))
        if not self.may_round:
            return A.apply(z, product), lost
        for column in running:
            of_z, known = self._column(z, column), self.differences
            difference = self._difference(of_z) if known is None else known[column]
            lost[column] = _UNITS[np.dtype(np.float32)] * (self._absolute_product(of_z) + difference)
        allowed = np.maximum(_LOST_OF_TOLERANCE * self.tolerances, _LOST_OF_EXPECTED * self.gains * self.norms)
        if (self.error_of_r + lost <= allowed)[running].all():
            return A.apply_rounded(z, product), lost
        self._multiply_all((z, product, 1.0, 0.0))
        return product, np.zeros_like(lost)

    def _multiply_all(self, *products: tuple[Array, Array, float, float], renews: bool = False) -> None:
        """Compute products with A itself in one pass, and with them r and what products in float32 left inexact."""
        if inexact := (self.error_of_r + self.error_of_last).any() and self.last is not None:
            products += ((*self.last, 1.0, 0.0),)
        if renews or inexact:
            self.r[...] = self.b
            products += ((self.x, self.r, -1.0, 1.0),)
        self.A.apply_all(*products)
        if renews or inexact:
            self.error_of_r, self.error_of_last = np.zeros_like(self.norms), np.zeros_like(self.norms)
            self._measure()

    def _step(self, z: Array, product: Array, lost: Numbers) -> None:
        """Move x to where its error is least over the last step and z, of which ``product`` is A times z but for what is lost."""
        pairs = [(z, product), (z, self.r)]
        if self.last is not None:
            step, image = self.last
            pairs += [(step, image), (step, product), (step, self.r)]
        zz, zr, *others = self.space.dots(*pairs)
        if not np.isfinite(zz).all() or (zz < 0).any():
            raise self._unfit("its correction is no direction of descent")
        of_z, of_last = least_error(zz, zr, *others)
        if self.last is None:
            self.last, self.error_of_last = (z.copy(), product.copy()), lost
            of_last, of_z = of_z, np.zeros_like(of_z)
        step, image = self.last
        self.space.combine(of_z, z, of_last, step)
        self.space.combine(of_z, product, of_last, image)
        self.x += step
        self.r -= image
        self.error_of_last = abs(of_z) * lost + abs(of_last) * self.error_of_last
        self.error_of_r += self.error_of_last
        before = self.norms.copy()
        self._measure()
        self._test(before)
        self._arrive()

    def _compute(self) -> None:
        """Compute the residuals from A, b and x."""
        self._multiply_all(renews=True)

    def _measure(self) -> None:
        """Compute the norms of the residuals of right-hand sides that are not solved yet."""
        running = self._running()
        self.norms[running] = self.space.norms(self.r)[running]

    def _test(self, before: Numbers) -> None:
        """End right-hand sides whose residuals meet their tolerances, and those at the floor of rounding."""
        running = self._running()
        near = [column for column in running if self.norms[column] <= self.tolerances[column]]
        bounds = {column: self._with_drift(column, self.norms[column]) for column in near}
        if any(bound > self.tolerances[column] for column, bound in bounds.items()):  # because of rounding alone
            self._compute()
        elif self.bounds_settle:
            self.norms[near] = list(bounds.values())
            self.bounded.update(near)
        for column in near:
            if self.norms[column] <= self.tolerances[column]:
                self.ends[column] = StopReason.CONVERGED
        # Of residuals that are computed anew where updates alone had made them small.
        self.gains = np.divide(self.norms, before, out=np.zeros_like(before), where=before > 0)
        self.slow = np.where(self.gains > _SLOW, self.slow + 1, 0)
        has_halved = self.norms <= _HALVED * self.halved
        self.halved = np.where(has_halved, self.norms, self.halved)
        self.passes_since = np.where(has_halved, 0, self.passes_since + 1)
        stuck = self.passes_since >= _PATIENCE
        doubtful = [column for column in self._running() if self.slow[column] == _DOUBTFUL or stuck[column]]
        if not doubtful:
            return
        self._compute()
        for column in doubtful:
            if self.norms[column] <= FLOOR_FACTOR * self._rounding(self._column(self.x, column)):
                self.ends[column] = StopReason.ROUNDING_FLOOR
            elif stuck[column]:
                raise self._unfit(f"{_PATIENCE} passes did not halve the residual")

    def _with_drift(self, column: int, norm: float) -> float:
        """Return a bound of the true residual from one that was updated: what rounding may have added to it."""
        return float(norm + self.error_of_r[column] + _DRIFT * self._rounding(self._column(self.x, column)))

    def _rounding(self, x: Array) -> float:
        """Return the rounding in ``A x``, about."""
        return _UNIT * self._absolute_product(x)

    def _absolute_product(self, x: Array) -> float:
        """Return ``|| |A~| |x| ||``."""
        return self.vectors.norm(self.image.apply_absolute(abs(x)))

    def _difference(self, z: Array) -> float:
        """Return a bound of ``|| (A - A~) z ||``."""
        return self.vectors.norm(bound_of_difference(self.image, z))

    def _column(self, vectors: Array, column: int) -> Array:
        return self.A.device.xp.ascontiguousarray(LinearProblem.column(vectors, column))

    def _correction(self) -> Array:
        """Return a solution with the image for the residuals."""
        running = self._running()
        left = None if self.maxiter is None else self.maxiter - self.iterations
        for column in range(len(self.ends)):
            if column not in running:
                LinearProblem.column(self.r, column)[...] = 0
        share = np.clip(_SHARE * self.gains[running], _LEAST, _MOST)
        rtol = float(np.maximum(share, _AIM * self.tolerances[running] / self.norms[running]).min())
        limits: dict[str, Any] = {"rtol": rtol, "atol": 0.0, "maxiter": left, "monitor": self._watch_correction}
        result = self.solve(self.image, self.r, None, M=self.M, **limits)
        if self.error_of_r.any() and any(column.reason in _UNFIT for column in result.columns):
            # Rounding may take residuals out of the range of a singular matrix.
            self.may_round, self.iterations = False, self.iterations + result.iterations
            self._compute()
            return self._correction()
        self.rests = np.array([column.true_residual for column in result.columns]) * self.norms
        for column in running:
            scale = float(self.norms[column] / self.scales[column])
            self.columns[column] = self.columns[column].continued(result.columns[column], scale)
        self._take_note(result)
        return result.x

    def _watch_correction(self, record: IterationRecord) -> bool:
        """Ask the caller's monitor; a solve that goes on from what it is shown makes this correction anew."""
        if self.monitor is None:
            return False
        scale = float((self.norms / self.scales)[self._running()].max())
        seconds, moved = time.perf_counter() - self.began, self.A.bytes_streamed - self.before[1]
        of_both = self.iterations + record.iteration, scale * record.residual_norm
        self.halted = bool(self.monitor(IterationRecord(*of_both, seconds, moved, self._goes_on_from())))
        return self.halted

    def _settles(self, z: Array) -> bool:
        """Add corrections with which bounds of the residuals meet the tolerances; return whether none is left."""
        if not self.bounds_settle:
            return False
        self.differences = np.zeros_like(self.norms)
        for column in self._running():
            of_z = self._column(z, column)
            self.differences[column] = self._difference(of_z)
            bound = self._with_drift(column, self.rests[column] + self.differences[column])
            if bound <= self.tolerances[column]:
                LinearProblem.column(self.x, column)[...] += of_z
                self.norms[column], self.ends[column] = bound, StopReason.CONVERGED
                self.bounded.add(column)
                LinearProblem.column(z, column)[...] = 0
        return not self._running()

    def _result(self) -> SolveResult | BlockSolveResult:
        """Return the result, with the sweeps over A."""
        self._arrive()
        moved = self.A.bytes_streamed - self.before[1]
        spent: dict[str, Any] = {"sweeps": self.A.sweeps - self.before[0], "bytes_streamed": moved}
        state, columns, seconds = self._goes_on_from(), [], {"total": time.perf_counter() - self.began}
        for number, (column, end) in enumerate(zip(self.columns, self.ends, strict=True)):
            counted = number in self.bounded  # the norm is a bound, in which the error of r is counted
            norm = float(self.norms[number] + (0.0 if counted else self.error_of_r[number]))
            reason = StopReason.CONVERGED if norm <= self.tolerances[number] else end or column.reason
            norms, residual = column.residual_norms, norm / float(self.scales[number])
            x = LinearProblem.column(self.x, number)
            cost = {**spent, "timings": {**column.timings, **seconds}, "state": state}
            cost["bounded"] = counted or bool(self.error_of_r[number] > 0)
            columns.append(SolveResult.of(x, reason, norms, residual, column.rounding_floor, **cost))
        if self.b.ndim == 1:
            return columns[0]
        return BlockSolveResult(
            self.x, tuple(columns), self.iterations, timings=columns[0].timings, state=state, **spent
        )
