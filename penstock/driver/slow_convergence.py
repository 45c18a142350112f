"""Where the choice is left open, Jacobi begins; if it promises to be slow, a sparse factorisation or multigrid goes on.

Where multigrid promises to be slow in its turn, and the factor of the matrix has few entries, a factorisation ends the solve.

Nothing but iterations shows what a matrix is like, and the first ones are not lost: others go on from their iterate. So a
solve for which the choice was left open begins with Jacobi; where that is soon seen to be slow, it costs these iterations more.

A coarse level of a sweep begins with D of nodes alone. Where that is slow, multigrid goes on if the matrix is in memory. If it is
streamed, the same level goes on with aggregates that follow the pattern in place of the coordinates, which may bridge gaps, and
then with groups of nodes. In memory multigrid is used at once where the set-up finds that the stiffness jumps.

Multigrid may break down where Jacobi does not: the coarse matrices of a singular one are singular but for rounding. Then Jacobi
goes on, and has the last word; or the coarse level of a sweep, where multigrid was chosen at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from penstock.driver.going_on import go_on
from penstock.driver.inputs import GivenVectors
from penstock.driver.open_system import AnyResult, OpenSystem
from penstock.driver.predicted import (
    FASTER,
    WORTH_A_LOOK,
    FactorisationLook,
    grouped_iterations,
    look_seconds,
    multigrid_iteration_seconds,
    multigrid_iterations,
)
from penstock.driver.request import Placement
from penstock.solvers import (
    IterationRecord,
    Multigrid,
    PreconditionerSpec,
    SmoothedAggregation,
    SmoothedAggregationSpec,
    StopReason,
    preconditioner_spec,
)
from penstock.solvers.factorisation import FactorisationSpec
from penstock.solvers.problem import has_diverged
from penstock.solvers.states import histories_of
from penstock.spmv import CPU, Operator, SparseMatrix, SweptOperator
from penstock.streaming import StreamPlan

# Iterations with Jacobi, with a coarse level of nodes, and with multigrid, before the convergence is judged; each look after them
# judges it anew. With Jacobi it is judged from half of them on, where it must promise this many times more than is worth while.
_TRIED, _TRIED_NODES, _TRIED_MULTIGRID = 50, 25, 15
_FAR_MORE = 5
# A factorisation replaces multigrid if it is predicted to take less time than this number of iterations, and much less than those
# that are left.
_LONGEST_FACTORISATION = 1500
# Multigrid gains about a digit in two iterations: with fewer iterations left than this, its set-up gains too little. Those with a
# factorisation are refinements, of which a few suffice.
_FEWEST_LEFT, _REFINEMENTS = 10, 3
# Iterations with a coarse level of nodes beyond which multigrid is worth its set-up, and groups may be.
_WORTH_OTHERS = 100
# Iterations that multigrid has in any case, and iterations with Jacobi that take the time of one with it, about.
_FAIR_TRY, _COST = 200, 20
# Reasons that an ill-suited preconditioner may have caused.
_DOUBTFUL = (
    StopReason.NOT_FINITE,
    StopReason.NOT_POSITIVE_DEFINITE,
    StopReason.PRECONDITIONER_NOT_POSITIVE_DEFINITE,
    StopReason.PRECONDITIONER_NOT_SYMMETRIC,
    StopReason.STAGNATED,
)
# Rounding unit of the vectors of every solve here.
_UNIT = float(np.finfo(np.float64).eps) / 2


class _Change(NamedTuple):
    """What may take the place of the preconditioner with which a solve begins."""

    before: str  # the name of the present preconditioner in messages
    tried: int  # iterations before the first judgement
    worth: int  # more expected iterations than this make the change worth while
    # Takes the seconds of the iterations that are left, and returns the new specification, or None if it would take longer, and a
    # remark for messages.
    other: Callable[[float], tuple[PreconditionerSpec | None, str]]
    # Whether residuals may stand still at first, as with Jacobi until the slowest mode is found.
    stands_still: bool = False
    # Returns whether a factorisation would take much less than this many seconds; then the solve stops below ``worth``, too.
    sooner: Callable[[float], bool] | None = None


def solve_as_advised(
    system: OpenSystem, b: GivenVectors, guess: GivenVectors | None, limits: dict[str, Any]
) -> AnyResult:
    """Solve, and change the preconditioner as the iterations advise, if the choice was left open."""
    _prefer_multigrid_for_jumps(system)
    if change := _instead_of_jacobi(system) or _instead_of_nodes(system):
        return _changed_if_slow(system, change, b, guess, limits)
    return _factorised_if_slow(system, b, limits, lambda watched: system.solve(b, guess, **watched))


def go_on_as_advised(system: OpenSystem, result: AnyResult, b: GivenVectors, limits: dict[str, Any]) -> AnyResult:
    """Go on from a result that has not converged with the preconditioner that is used now."""
    return _factorised_if_slow(system, b, limits, partial(go_on, system, result, b))


def _instead_of_jacobi(system: OpenSystem) -> _Change | None:
    """Return what may take the place of Jacobi: in memory, if nothing was known by which to choose."""
    placement, request = system.placement, system.request
    if placement is None or not request.is_auto or request.options or not request.chosen_method.definite:
        return None
    jacobi, plan = placement.spec, placement.plan
    if placement.is_settled or plan.slots or jacobi.name not in ("jacobi", "block_jacobi"):
        return None
    worth = multigrid_iterations(plan.storage_nbytes, jacobi.block_size, system.A.device.kind)
    other, sooner = partial(_faster_than_jacobi, system), partial(_factorisation_pays, system)
    return _Change(jacobi.name, _TRIED, worth, other, stands_still=True, sooner=sooner)


def _look_of(system: OpenSystem) -> FactorisationLook | None:
    """Return the look at a factorisation that all solves of a system share."""
    A = system.A
    if system.look is None and isinstance(A, SparseMatrix) and A.device.kind == "cpu":
        system.look = FactorisationLook(A, system.decided.spec.block_size)
    return system.look  # type: ignore[no-any-return]


def _factorisation_pays(system: OpenSystem, left_seconds: float) -> bool:
    return (look := _look_of(system)) is not None and look.pays(left_seconds)


def _instead_of_nodes(system: OpenSystem, *, by_pattern: bool = True) -> _Change | None:
    """Return what may take the place of a coarse level of nodes: multigrid in memory, and where the matrix is streamed other
    aggregates, unless not ``by_pattern``, or groups."""
    placement, request = system.placement, system.request
    if placement is None or not request.is_auto or placement.is_settled:
        return None
    spec, plan, A = placement.spec, placement.plan, system.A
    if not isinstance(spec, SmoothedAggregationSpec) or spec.grouped is True:
        return None
    if spec.aggregates is not None and not isinstance(spec.aggregates, str):
        return None
    if spec.grouped and _is_grouped(system.preconditioner()):  # it has lines
        return None
    if isinstance(plan, StreamPlan) and plan.slots:
        if not isinstance(A, SweptOperator) or A.row_bounds is None:
            return None
        if by_pattern and _follows_coordinates(system, spec):
            other, remark = replace(spec, aggregates="pattern", grouped=False), ", so aggregates follow the pattern"
            return _Change("aggregates by coordinates", _TRIED_NODES, _WORTH_OTHERS, lambda left: (other, remark))
        if system.decided.spec is not spec:  # it could not be made
            return None
        worth = max(_WORTH_OTHERS, grouped_iterations(A.shape[0], placement.nonzeros, plan, A.device.kind))
        groups = replace(spec, aggregates=None, grouped=True)
        return _Change("nodes alone", _TRIED_NODES, worth, lambda left: (groups, ", so they are grouped"))
    multigrid = request.multigrid(spec.block_size) if isinstance(A, SparseMatrix) else None
    if multigrid is None:
        return None
    return _Change(spec.name, _TRIED_NODES, _WORTH_OTHERS, lambda left: (multigrid, ""))


def _follows_coordinates(system: OpenSystem, spec: SmoothedAggregationSpec) -> bool:
    """Return whether aggregates are made of coordinates, and neither of the pattern nor of strong couplings."""
    if spec.coordinates is None or spec.near_null_space is not None or spec.aggregates is not None:
        return False
    # The pattern of the nodes is gathered on the host, with a copy.
    if 8 * system.decided.nonzeros // spec.block_size**2 > CPU.free_nbytes():
        return False
    M = system.preconditioner()
    return isinstance(M, SmoothedAggregation) and not M.level.jumps


def _prefer_multigrid_for_jumps(system: OpenSystem) -> None:
    """Use multigrid at once for a matrix in memory whose stiffness jumps, where other coarse levels take more iterations."""
    change = _instead_of_nodes(system)
    if change is None or not isinstance(system.A, SparseMatrix):
        return
    M = system.preconditioner()
    if isinstance(M, SmoothedAggregation) and M.level.jumps:
        spec = system.decided.spec
        other, _ = change.other(math.inf)
        assert other is not None
        if refused := system.use_instead(other, "the stiffness jumps between nodes"):
            system.settle_on(spec, f"multigrid cannot be made: {refused}")


def _may_factorise(system: OpenSystem) -> bool:
    """Return whether a factorisation may take the place of multigrid: in the memory of the host, if the choice was left open."""
    placement = system.placement
    if placement is None or not system.request.is_auto or placement.is_settled or placement.spec.name != "multigrid":
        return False
    return isinstance(system.A, SparseMatrix) and system.A.device.kind == "cpu"


def _factorised_if_slow(
    system: OpenSystem, b: GivenVectors, limits: dict[str, Any], run: Callable[[dict[str, Any]], AnyResult]
) -> AnyResult:
    """Solve by ``run(limits)``, and go on with a factorisation if multigrid promises to take longer than that."""
    if not _may_factorise(system):
        return _with_last_word(system, b, limits, run)
    multigrid, A, M = system.decided.spec, system.stored, system.preconditioner()
    assert A is not None
    if not isinstance(M, Multigrid):  # which did not suit this matrix
        return _with_last_word(system, b, limits, run)
    iteration = multigrid_iteration_seconds(M)

    @cache
    def found() -> tuple[FactorisationSpec, float] | None:
        look = system.look
        if look is None or look.block_size != multigrid.block_size:
            look = FactorisationLook(A, multigrid.block_size)
        return look.within(_LONGEST_FACTORISATION * iteration)  # type: ignore[no-any-return]

    watch = FactorisationWatch(
        iteration,
        look_seconds(A, multigrid.block_size),
        lambda: math.inf if (one := found()) is None else one[1],
        system.meant_rtol(b, limits["rtol"]),
        limits["atol"],
        limits["maxiter"],
        limits["monitor"],
    )
    result = _with_last_word(system, b, {**limits, "monitor": watch}, run)
    if not watch.expected or result.converged:
        return result
    instead = found()
    assert instead is not None
    promised = "hardly converged" if watch.expected == math.inf else f"promised {watch.expected:.0f} iterations"
    refused = system.use_instead(
        instead[0], f"multigrid {promised}, the factorisation is predicted to take {instead[1]:.2g} s"
    )
    if refused:
        system.settle_on(multigrid, f"it {promised}, but the factorisation cannot be made: {refused}")
    return _with_last_word(system, b, limits, partial(go_on, system, result, b))


def _changed_if_slow(
    system: OpenSystem, change: _Change, b: GivenVectors, guess: GivenVectors | None, limits: dict[str, Any]
) -> AnyResult:
    """Solve with the preconditioner as it is, and go on with another one, if that promises to need many iterations."""
    following: _Change | None = change
    run: Callable[[dict[str, Any]], AnyResult] = lambda watched: system.solve(b, guess, **watched)  # noqa: E731
    rtol = system.meant_rtol(b, limits["rtol"])
    while following is not None:
        change, spec = following, system.decided.spec
        of_solve = (rtol, limits["atol"], limits["maxiter"], limits["monitor"])
        watch = ConvergenceWatch(change.worth, change.tried, *of_solve, change.stands_still, change.sooner)
        result = run({**limits, "monitor": watch})
        if not watch.expected or result.converged:
            return result
        following, run = None, partial(go_on, system, result, b)
        if system.decided.spec is spec:  # else it could not be made, and another one has been in use
            made = _make_change(system, change, watch, result.iterations)
            following = _instead_of_nodes(system, by_pattern=made)
    return go_on_as_advised(system, result, b, limits)


def _make_change(system: OpenSystem, change: _Change, watch: ConvergenceWatch, iterations: int) -> bool:
    """Use another preconditioner, and return whether it could be made; else settle on the present one, or try groups next."""
    spec = system.decided.spec
    expected = f"more than {change.worth}" if watch.expected > change.worth else f"{watch.expected:.0f}"
    promised = f"promised {expected} iterations after the first {iterations}"
    other, added = change.other(watch.left_seconds)
    if other is None:
        system.settle_on(spec, f"it {promised}{added}")
        return False
    refused = system.use_instead(other, f"{change.before} {promised}{added}")
    of_nodes = isinstance(other, SmoothedAggregationSpec) and not other.grouped
    if refused and not of_nodes:
        system.settle_on(spec, f"it {promised}, but {other.description} cannot be made: {refused}")
    elif isinstance(other, SmoothedAggregationSpec) and other.grouped and not _is_grouped(system.preconditioner()):
        system.settle_on(spec, f"it {promised}, but its nodes cannot be grouped here")
    return not refused


def _is_grouped(M: Operator | None) -> bool:
    """Return whether a coarse level has groups or lines of nodes; without memory for them, and around hubs, it has none."""
    return isinstance(M, SmoothedAggregation) and M.level.groups is not None


def _faster_than_jacobi(system: OpenSystem, left_seconds: float) -> tuple[PreconditionerSpec | None, str]:
    """Return a factorisation if it takes less time than multigrid, else multigrid, and what is to be said of it.

    Return None if the coarse matrices of multigrid promise to be so dense that the iterations that are left take less time.
    """
    if (look := _look_of(system)) is not None:
        found = look.found()
        is_slow = look.dense_seconds > left_seconds  # multigrid
        if found is not None and found[1] <= (left_seconds if is_slow else look.multigrid_seconds):
            return found[0], f", the factorisation is predicted to take {found[1]:.2g} s"
        if is_slow:
            remark = f", but multigrid is predicted to need {look.dense_seconds:.2g} s for its coarse matrices, which are dense"
            return None, remark
    return preconditioner_spec("multigrid", block_size=system.decided.spec.block_size), ""


def _with_last_word(
    system: OpenSystem, b: GivenVectors, limits: dict[str, Any], run: Callable[[dict[str, Any]], AnyResult]
) -> AnyResult:
    """Solve by ``run(limits)``; what took the place of another preconditioner gives way to it if it does not end well.

    So does what was chosen at once, to a preconditioner that is positive definite in any case; but slow it may be.
    """
    placement = system.placement
    before = None if placement is None else placement.instead_of or _more_robust(system, placement)
    if placement is None or before is None:
        return run(limits)
    most = 10 * system.A.shape[0] if limits["maxiter"] is None else limits["maxiter"]
    fair = math.inf if placement.instead_of is None else max(_FAIR_TRY, most // _COST)
    watch = FairTry(fair, system.meant_rtol(b, limits["rtol"]), limits["atol"], limits["monitor"])
    result = run({**limits, "monitor": watch})
    reasons = {column.reason for column in result.columns}
    how = watch.failed or next((of.name.lower().replace("_", " ") for of in _DOUBTFUL if of in reasons), "")
    on_request = StopReason.STOPPED in reasons and not watch.failed
    if result.converged or on_request or not how:
        return result
    again = "again, " if placement.instead_of else ""
    other = system.decided.spec
    called = other.description if other.name == before.name else other.name
    why = f"{again}as {called} in its place did not end well ({how})"
    if placement.instead_of is None and system.use_instead(before, why):
        return result  # the other one cannot be made
    system.settle_on(before, why)
    return go_on(system, result, b, limits)


def _more_robust(system: OpenSystem, placement: Placement) -> PreconditionerSpec | None:
    """Return what takes the place of a factorisation, or of multigrid in memory, that was chosen at once and breaks down."""
    request, spec = system.request, placement.spec
    if spec.name == "factorisation":
        return request.alternative(spec)
    if not request.is_auto or placement.is_settled or spec.name != "multigrid":
        return None
    return next((one for one in request.specs(spec.block_size, streamed=False) if one.name != spec.name), None)


@dataclass
class ConvergenceWatch:
    """A monitor that stops a solve which promises to take more than some iterations to its tolerance, if enough are left.

    The expected number of iterations is extrapolated from the mean rate of convergence. With ``stands_still`` it is also
    extrapolated from the rate of the last half of the iterations, and the smaller number counts; if it is several times
    ``worth``, half of the iterations before the first judgement suffice. It also stops where ``sooner`` says that a factorisation
    takes much less time than the iterations that are left.
    """

    worth: int
    tried: int  # iterations before the first judgement
    rtol: float
    atol: float
    maxiter: int | None
    monitor: Callable[[IterationRecord], object] | None
    stands_still: bool = False
    sooner: Callable[[float], bool] | None = None
    expected: float = field(default=0.0, init=False)  # iterations, once it has stopped the solve
    left_seconds: float = field(default=0.0, init=False)  # of those that are left, as the last look expected
    began: float = field(default_factory=time.thread_time, init=False)  # processor time: others may use the cores, too

    def __call__(self, record: IterationRecord) -> bool:
        """Ask the caller's monitor, and judge the convergence so far."""
        if self.monitor is not None and self.monitor(record):
            return True
        iterations = record.state.iteration  # of this solve, which may go on from another one
        enough_left = self.maxiter is None or record.iteration + _FEWEST_LEFT <= self.maxiter
        if not enough_left:
            return False
        if self.stands_still and self.tried // 2 <= iterations < self.tried:
            expected = min(_expected_by_rates(record, self.rtol, self.atol))
            if _FAR_MORE * self.worth < expected < math.inf:  # a residual that still grows promises nothing
                self.expected, self.left_seconds = expected, self._seconds_after(iterations, expected)
        elif iterations >= self.tried:
            mean, recent = _expected_by_rates(record, self.rtol, self.atol)
            expected = min(mean, recent) if self.stands_still else mean
            self.left_seconds = self._seconds_after(iterations, expected)
            slow = expected > 2 * iterations
            if slow and (expected > self.worth or (self.sooner is not None and self.sooner(self.left_seconds))):
                self.expected = expected
            elif iterations >= self.worth and recent > iterations + self.worth:
                self.expected = recent  # as much again must not be spent on a residual that hardly falls any more
        return self.expected > 0

    def _seconds_after(self, iterations: int, expected: float) -> float:
        """Return the seconds of the iterations that are expected to be left."""
        return max(0.0, expected - iterations) * (time.thread_time() - self.began) / iterations


@dataclass
class FactorisationWatch:
    """A monitor that stops a solve with multigrid which promises to take longer than a factorisation.

    What is promised is the less of two numbers, by the mean rate and by the rate of the last half of the iterations.

    Parameters
    ----------
    iteration_seconds : float
        Of an iteration with multigrid, as predicted.
    look_seconds : float
        Of counting the entries of the factor.
    factorisation_seconds : callable
        Returns the predicted time of the factorisation, infinite if it is too long; called only where the count is worth its
        time.
    """

    iteration_seconds: float
    look_seconds: float
    factorisation_seconds: Callable[[], float]
    rtol: float
    atol: float
    maxiter: int | None
    monitor: Callable[[IterationRecord], object] | None
    expected: float = field(default=0.0, init=False)  # iterations, once it has stopped the solve

    def __call__(self, record: IterationRecord) -> bool:
        """Ask the caller's monitor, and judge the convergence so far."""
        if self.monitor is not None and self.monitor(record):
            return True
        iterations = record.state.iteration  # of this solve, which may go on from another one
        enough_left = self.maxiter is None or record.iteration + _REFINEMENTS <= self.maxiter
        if iterations < _TRIED_MULTIGRID or not enough_left:
            return False
        expected = min(_expected_by_rates(record, self.rtol, self.atol))
        left = (expected - iterations) * self.iteration_seconds
        worth_a_look = expected > 2 * iterations and left > WORTH_A_LOOK * self.look_seconds
        if worth_a_look and left > FASTER * self.factorisation_seconds():
            self.expected = expected
        return self.expected > 0


@dataclass
class FairTry:
    """A monitor that stops a solve which diverges, or which is not half done after some iterations."""

    most: float  # iterations before it is half done
    rtol: float
    atol: float
    monitor: Callable[[IterationRecord], object] | None
    failed: str = field(default="", init=False)  # how, once it has stopped the solve

    def __call__(self, record: IterationRecord) -> bool:
        """Ask the caller's monitor, and judge the solve so far."""
        if self.monitor is not None and self.monitor(record):
            return True
        iterations = record.state.iteration
        if any(has_diverged(last, first, _UNIT) for first, last, _ in _running_norms(record)):
            self.failed = "the residual grew"
        elif iterations >= self.most and _expected_iterations(record, self.rtol, self.atol) > 2 * iterations:
            self.failed = f"slow after {iterations} iterations"
        return bool(self.failed)


def _expected_by_rates(record: IterationRecord, rtol: float, atol: float) -> tuple[float, float]:
    """Return the expected iterations by the mean rate so far, and by that of the last half of the iterations."""
    return _expected_iterations(record, rtol, atol), _expected_iterations(record, rtol, atol, recently=True)


def _expected_iterations(record: IterationRecord, rtol: float, atol: float, *, recently: bool = False) -> float:
    """Return how many iterations the slowest right-hand side takes to its tolerance, at the mean rate of those so far.

    ``recently``: at the rate of the last half of them.
    """
    most, share = 0.0, 0.5 if recently else 0.0
    iterations = (1.0 - share) * record.state.iteration
    for first, last, b_norm in _running_norms(record, share):
        if not (0 < last < math.inf and first > 0 and b_norm > 0):
            return 0.0
        # A residual below the rounding unit of b carries no information: solvers test the true one there.
        tolerance = max(rtol, atol / b_norm, _UNIT)
        if last <= tolerance:  # and is about to be tested
            continue
        reached = math.log(first / last)
        left = iterations * math.log(last / tolerance) / reached if reached > 0 else math.inf
        most = max(most, record.state.iteration + left)
    return most


def _running_norms(record: IterationRecord, share: float = 0.0) -> list[tuple[float, float, float]]:
    """Return of each right-hand side that is still being solved a residual and the last, relative to b, and its norm.

    The former one is the first, or that after a ``share`` of the iterations.
    """
    state = record.state
    histories = histories_of(state)
    reasons = getattr(state, "reasons", [None] * len(histories))
    of_columns = zip(histories, reasons, state.system.b_norms, strict=True)
    return [
        (norms[int(share * len(norms))], norms[-1], b_norm) for norms, reason, b_norm in of_columns if reason is None
    ]
