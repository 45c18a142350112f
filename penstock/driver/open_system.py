"""A system that is open where it computes: its preconditioner, the solve, and what makes its claims those of the caller's A."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np

from penstock.driver.exact_matrix import residuals_of, settled
from penstock.driver.inputs import GivenVectors, column_norms
from penstock.driver.matrix_checks import check_diagonal
from penstock.driver.null_space import NullSpace, inconsistent_result
from penstock.driver.progress import Reporter, solve_progress
from penstock.driver.request import Placement, Request
from penstock.solvers import (
    BlockSolveResult,
    IterationRecord,
    PreconditionerSpec,
    SmoothedAggregation,
    SolveResult,
    block_cg_workspace_nbytes,
    solve_many,
)
from penstock.solvers.checks import check_finite, check_maxiter, check_tolerances
from penstock.solvers.image_solve import ImageUnfitError, solve_by_image
from penstock.spmv import (
    CPU,
    Array,
    BudgetError,
    CsrMatrix,
    InputError,
    Operator,
    SparseMatrix,
    SweptOperator,
    device_of,
    format_nbytes,
)
from penstock.spmv.communicator import communicator_of
from penstock.spmv.formats.pattern import Pattern
from penstock.spmv.formats.symmetric_image import has_image
from penstock.spmv.reordered import Reordered
from penstock.spmv.unchecked import UncheckedEntries
from penstock.streaming import LevelOrder, StreamedMatrix
from penstock.streaming.stores.planes import CompletedStore, JoinedStore

AnyResult = SolveResult | BlockSolveResult

#: What numbers of float32 can mean: half the distance of 1 to the next one.
_SINGLE_ROUNDING = 2.0**-24
# What building a preconditioner raises that does not suit the matrix, or for which there is too little memory.
_NOT_MADE = (InputError, BudgetError, MemoryError)


class HeldStore:
    """The store that was made for a system, if there is one: closed with it, or when another one takes its place."""

    def __init__(self) -> None:
        self._store: Any = None

    def replace(self, store: Any) -> None:
        """Close the store so far and hold another one, or none."""
        before, self._store = self._store, store
        if before is not None and before is not store:
            before.close()

    def close(self) -> None:
        """Close the store."""
        self.replace(None)


@dataclass
class OpenSystem:
    """A matrix that is ready to be applied, or an image of one that is streamed."""

    A: Operator
    request: Request
    placement: Placement | None  # None for an operator of the caller, which is applied as it is
    reporter: Reporter
    null_space: NullSpace | None = None  # the caller's; removed from b and x
    unreachable: NullSpace | None = None  # a right-hand side with a component in it has no solution
    exact: CsrMatrix | UncheckedEntries | None = (
        None  # the caller's matrix, if the stored one equals it but for rounding
    )
    difference: float = 0.0  # bound of the norm of the difference between the two
    narrow: bool = False  # whether the caller's matrix is of float32
    pattern: Pattern | None = None  # of the caller's matrix, for updates of its values
    borrowed: bool = False  # whether the values are used where the caller has them
    held: HeldStore = field(default_factory=HeldStore)  # the store that was made for it
    streamed: SweptOperator | None = None  # the matrix, if A is an image of it
    of_store: bool = False  # whether that was opened from a store of the caller
    source: Any = None  # what made the matrix, if it was made where it is used
    look: Any = None  # at how long a factorisation takes, for all solves
    _M: Operator | None = None
    _spec: PreconditionerSpec | None = None
    _remarks: list[str] = field(default_factory=list)

    @property
    def decided(self) -> Placement:
        """What was decided for a matrix that is placed."""
        assert self.placement is not None, "an operator of the caller is applied as it is"
        return self.placement

    @property
    def matrix(self) -> Operator:
        """The matrix itself, not an image of it."""
        return self.A if self.streamed is None else self.streamed

    def in_callers_order(self, of: Operator) -> Operator:
        """Return an operator of this system for vectors in the caller's order of the unknowns."""
        order = self.order
        return of if order is None else Reordered(of, order.forward(np.arange(of.shape[0])))

    @property
    def order(self) -> LevelOrder | None:
        """The order of the rows, if it is not the caller's."""
        return None if self.placement is None else self.placement.order

    def iterate_of_caller(self, x: Array | None) -> Array | None:
        """Return an iterate of this system, if there is one, in the caller's order of the unknowns."""
        return x if x is None or self.order is None else self.order.back(CPU.asarray(x))

    @property
    def stored(self) -> SparseMatrix | None:
        """The matrix as it is stored in memory; None where it is on disk or an operator."""
        if isinstance(self.A, SparseMatrix):
            return self.A
        return None if self.placement is None else self.placement.matrix

    def keep(self, matrix: SparseMatrix) -> None:
        """Take note of the matrix that is stored now."""
        assert self.placement is not None, "an operator is not stored"
        self.placement = replace(self.placement, matrix=matrix)

    def uses(self, values: Array) -> bool:
        """Return whether the stored matrix shares memory with an array of values."""
        store = getattr(self.streamed, "store", None)
        for stored in (self.stored, getattr(store, "source", None)):
            if stored is not None and stored.device == device_of(values):
                xp = stored.device.xp
                if any(bool(xp.may_share_memory(array, values)) for array in stored.arrays().values()):
                    return True
        return False

    def remember(self, title: str, fact: str) -> None:
        """Add a fact to what was decided."""
        self.placement = replace(self.decided, facts=(*self.decided.facts, (title, fact)))

    def explain(self) -> list[str]:
        """Return what was decided, one line a fact."""
        if self.placement is None:
            rows = self.A.shape[0]
            lines = [
                f"{'matrix':<11} {rows:,} x {rows:,}, {type(self.A).__name__}, applied as it is on {self.A.device}"
            ]
        else:
            lines = [self.placement.explain(), f"{'device':<11} {self.A.device}"]
        store = getattr(self.streamed, "store", None)
        if isinstance(store, CompletedStore):
            lines.append(
                f"{'planes':<11} residuals read the low words of the values, which complete those of the image"
            )
        elif isinstance(store, JoinedStore) and self.request.verify == "bound":
            lines.append(
                f"{'planes':<11} residuals read the values in float32 where these are enough, which halves the bytes"
            )
        return [*lines, *self._remarks]

    def preconditioner(self) -> Operator | None:
        """Return the preconditioner, which is built at the first call."""
        if self._spec is None:
            with self.reporter.stage("prepare"), self.A.device.current():
                try:
                    self._M = self._built()
                except _NOT_MADE as error:
                    self._blame_image(error)
                    raise
        return self._M

    @property
    def must_rebuild(self) -> bool:
        """Whether the preconditioner cannot be kept when the values of the matrix change."""
        return self._spec is not None and self._spec.follows_values

    def rebuild_preconditioner(self) -> None:
        """Make the preconditioner again, for values of the matrix that have changed, from what depends on the pattern only."""
        if self._spec is None:
            self.preconditioner()
            return
        with self.reporter.stage("prepare"), self.A.device.current():
            try:
                self._M = self._spec.rebuild(self._M, self.A)
            except _NOT_MADE:
                try:
                    self._M = self._build(self._spec)
                except _NOT_MADE as error:
                    self._blame_image(error)
                    raise

    def _blame_image(self, error: BaseException) -> None:
        """Raise an ImageUnfitError if there is an image: no preconditioner can be made of it."""
        if self.streamed is not None:
            raise ImageUnfitError(f"no preconditioner can be made of it: {error}") from error

    def check_image(self) -> None:
        """Raise an ImageUnfitError if the values of an image have left the range of float32."""
        A: Any = self.A
        if self.streamed is not None:
            ranks = communicator_of(A)
            with ranks.together(), A.device.current():
                leaves = not has_image(A.diagonal_blocks(1), A.device)
            if ranks.largest(float(leaves)):
                raise ImageUnfitError("values leave the range of float32")

    def use_instead(self, spec: PreconditionerSpec, why: str) -> str:
        """Make another preconditioner, and use it; keep this one and return why if it cannot be made."""
        n, decided = self.A.shape[0], self.decided
        wanted = spec.workspace_nbytes(n, decided.together, self.A.dtype) + decided.plan.storage_nbytes
        free = self.A.device.free_nbytes()
        if wanted > free:
            return f"its set-up needs {format_nbytes(wanted)}, and {format_nbytes(free)} are free"
        with self.reporter.stage("prepare"), self.A.device.current():
            try:
                spec_in_order = self._in_order(spec)
                M = spec_in_order.build(self.A)
            except (InputError, BudgetError, MemoryError) as error:
                return str(error) or type(error).__name__
        self._decide(spec, why, instead_of=decided.spec)
        self._M, self._spec = M, spec_in_order
        return ""

    def _in_order(self, spec: PreconditionerSpec) -> PreconditionerSpec:
        """Return a specification for the order of the rows in which the matrix is stored."""
        order = self.decided.order
        return spec if order is None else spec.in_order(order.forward)

    def settle_on(self, spec: PreconditionerSpec, why: str) -> None:
        """Use this preconditioner, and no other until values change; it is made when it is needed, if it is not in use."""
        if spec != self.decided.spec:
            self._M = self._spec = None
        self._decide(spec, why, instead_of=None, is_settled=True)

    def unsettle(self) -> None:
        """Let another preconditioner be tried again: the values of the matrix are others now."""
        self.placement = replace(self.decided, is_settled=False)

    def _decide(self, spec: PreconditionerSpec, why: str, **more: Any) -> None:
        reasons = {**self.decided.reasons, spec.name: why}
        self.placement = replace(self.decided, spec=spec, reasons=reasons, **more)

    def _built(self) -> Operator | None:
        if self.placement is None:
            return self._built_of_operator()
        spec = self.placement.spec
        unseen = isinstance(self.A, StreamedMatrix) and not self.placement.is_definite
        if spec.name == "none" and unseen and self.request.chosen_method.definite:
            check_diagonal(self.A)
        return self._build(self._in_order(spec))

    def _build(self, spec: PreconditionerSpec) -> Operator | None:
        """Return a preconditioner, or what takes its place if it cannot be made and the caller did not ask for it."""
        try:
            M = spec.build(self.A)
        except _NOT_MADE as error:
            other = self.request.alternative(spec)
            if other is None:
                raise
            self._decide(other, f"{spec.name} cannot be made: {error}", instead_of=None)
            return self._build(self._in_order(other))
        self._spec = spec
        if isinstance(M, SmoothedAggregation) and M.level.jumps:
            known = self.decided.reasons.get(spec.name, "")
            self._decide(self.decided.spec, f"{known}; its aggregates follow strong couplings, as the stiffness jumps")
        return M

    def _built_of_operator(self) -> Operator | None:
        """Return what a caller asks for, or Jacobi where the operator knows its diagonal."""
        block_size = self.request.node_size()
        [self._spec] = self.request.specs(block_size, streamed=False)
        try:
            return self._spec.build(self.A)
        except InputError:
            if self.request.is_auto and not hasattr(self.A, "diagonal_blocks"):
                return None
            raise

    def solve(
        self,
        b: GivenVectors,
        x0: GivenVectors | None = None,
        *,
        rtol: float,
        atol: float = 0.0,
        maxiter: int | None = None,
        monitor: Callable[[IterationRecord], object] | None = None,
        state: Any = None,
        direction: int = 1,
    ) -> AnyResult:
        """Solve for the right-hand sides; x comes back where b lives, in its shape.

        A state is that of an earlier solve of the same right-hand sides, all together, with the same placement; a streamed matrix
        then goes on in that direction.
        """
        b.check_rows(self.A.shape[0])
        check_tolerances(rtol, atol)
        check_maxiter(maxiter)
        if x0 is not None:
            check_finite(x0.name, x0.array, device_of(x0.array))
        narrow, rtol = self._is_narrow(b), self.meant_rtol(b, rtol)
        with self.A.device.current():
            shares = self._unreachable_shares(b, rtol, atol)
            posed = self._posed(b, shares)
            if (shares > 0).all():
                return self._returned(None, posed, [], posed.as_block(), shares)
            M = self.preconditioner()
            if state is not None and isinstance(self.A, SweptOperator):
                self.A.turn_to(direction)
            with self.reporter.stage("solve") as stage:
                blocks = 1 if self.placement is None else -(-b.columns // self.placement.together)
                bar = _SolveBar(stage.advance, rtol, blocks, monitor)
                limits: dict[str, Any] = {"maxiter": maxiter, "M": M}
                result = self._solve(posed, x0, rtol=rtol, atol=atol, monitor=bar.watch, state=state, **limits)
                columns, x = list(result.columns), posed.back(result.x, self.order)
                if (claimed := self._claimed) is not None:
                    spent = [result.iterations]

                    def correct(residuals: Array, aim: float) -> tuple[Array, list[SolveResult]]:
                        of = GivenVectors(residuals if residuals.shape[1] > 1 else residuals[:, 0], "b")
                        if maxiter is not None:
                            limits["maxiter"] = max(0, limits["maxiter"] - spent[-1])
                        further = self._solve(
                            of, None, rtol=aim, atol=0.0, monitor=bar.watch_correction, state=None, **limits
                        )
                        spent.append(further.iterations)
                        return of.back(further.x, self.order), list(further.columns)

                    of_all = (columns, posed.as_block(), x, rtol, atol)
                    columns, x = settled(claimed, self.difference, *of_all, correct)
            if self.null_space is not None:
                columns, x = self._shortest(posed, columns, x, rtol, atol)
            if narrow:
                columns, x = self._narrowed(posed, columns, x, rtol)
            return self._returned(result, b, columns, x, shares)

    @property
    def _claimed(self) -> SparseMatrix | UncheckedEntries | None:
        """The matrix with which claims are settled: the caller's, or the one in the host's memory; None if neither is at hand."""
        A = self.matrix
        in_memory = (
            isinstance(A, SparseMatrix) and A.device.kind == "cpu" and A.dtype == np.float64 and self.order is None
        )
        return cast(SparseMatrix, A) if self.exact is None and in_memory else self.exact

    def meant_rtol(self, b: GivenVectors, rtol: float) -> float:
        """Return the relative tolerance of a solve: not below what numbers of float32 can mean, if A and b consist of them."""
        return max(rtol, _SINGLE_ROUNDING) if self._is_narrow(b) else rtol

    def _is_narrow(self, b: GivenVectors) -> bool:
        return self.narrow and b.is_narrow and self.A.dtype == np.float64

    def _unreachable_shares(self, b: GivenVectors, rtol: float, atol: float) -> np.ndarray[Any, Any]:
        """Return the share of each right-hand side that no x reaches; 0 where it is within the tolerance."""
        if self.unreachable is None:
            return np.zeros(b.columns)
        shares, norms = self.unreachable.shares(b.array), b.norms()
        allowed = np.maximum(rtol, np.where(norms > 0, atol / np.maximum(norms, 1e-300), np.inf))
        return np.where(shares > allowed, shares, 0.0)

    def _posed(self, b: GivenVectors, shares: np.ndarray[Any, Any]) -> GivenVectors:
        """Return the right-hand sides to solve for: without the null space, and zero where there is no solution."""
        array = b.array
        if self.null_space is not None:
            check_finite(b.name, array, device_of(array))
            removed = float(self.null_space.shares(array).max())
            self._remarks = [f"{'null space':<11} removed from b, which it makes up to {removed:.2g} of, and from x"]
            array = self.null_space.without(array)
        if shares.any():
            array = array * 1.0
            array.reshape(len(array), -1)[:, shares > 0] = 0
        return replace(b, array=array)

    def _solve(self, b: GivenVectors, x0: GivenVectors | None, *, state: Any, **options: Any) -> AnyResult:
        """Solve with the stored matrix, in its order; columns that do not fit together one block after another."""
        A, device, order, solve = self.A, self.A.device, self.order, self.request.chosen_method.solve
        if self.streamed is not None:
            solve = partial(solve_by_image, solve, self.streamed, verify=self.request.verify)
        one_block = self.request.one_block
        if b.columns == 1 and not one_block:
            guess = None if x0 is None else x0.column(device, A.dtype, order)
            return solve(A, b.column(device, A.dtype, order), guess, state=state, **options)
        if state is not None or one_block:
            return solve(A, device.asarray(b.block(A.dtype, order)), state=state, **options)
        memory = None
        if self.placement is not None:  # of a system prepared for one vector, a block of one
            memory = max(self.placement.solver_nbytes, block_cg_workspace_nbytes(A.shape[0], 1, A.dtype))
        guess = None if x0 is None else x0.block(A.dtype, order)
        return solve_many(A, b.block(A.dtype, order), guess, memory=memory, solver=solve, **options)

    def _shortest(
        self, b: GivenVectors, columns: list[SolveResult], x: Array, rtol: float, atol: float
    ) -> tuple[list[SolveResult], Array]:
        """Return solutions without the null space, and results with their residuals.

        A solution that would then miss the tolerance, as A maps the caller's vectors to zero only nearly, stays as it is.
        """
        assert self.null_space is not None
        shorter, results, scales = self.null_space.without(x), [], b.norms()
        for number, column in enumerate(columns):
            norm, scale = self._residual(b, shorter, number), float(scales[number])
            if column.converged and not norm * (scale or 1.0) <= max(rtol * scale, atol):
                shorter[:, number] = x[:, number]
                results.append(column)
            else:
                results.append(replace(column, true_residual=norm))
        return results, shorter

    def _residual(self, b: GivenVectors, x: Array, number: int) -> float:
        """Return ``||b - A x|| / ||b||`` of a column, with the matrix that claims are about if it is at hand."""
        [of_b, of_x] = (GivenVectors(block[:, number], "b") for block in (b.as_block(), x))
        scale, claimed = float(of_b.norms()[0] or 1.0), self._claimed
        if claimed is not None:
            residuals = residuals_of(claimed, of_b.as_block(), of_x.as_block())
            return float(column_norms(residuals)[0]) / scale
        device, A = self.A.device, self.matrix
        residual = of_b.column(device, A.dtype, self.order).copy()
        A.apply(of_x.column(device, A.dtype, self.order), residual, alpha=-1.0, beta=1.0)
        return float(device.xp.linalg.norm(residual)) / scale

    def _narrowed(
        self, b: GivenVectors, columns: list[SolveResult], x: Array, rtol: float
    ) -> tuple[list[SolveResult], Array]:
        """Return solutions rounded to float32, and results with their residuals."""
        with np.errstate(over="ignore"):
            rounded, results = x.astype(np.float32), []
        if not device_of(x).xp.isfinite(rounded).all():
            self._remarks.append(f"{'precision':<11} x is returned in float64: it leaves the range of float32")
            return columns, x
        x = rounded
        for number, column in enumerate(columns):
            norm = self._residual(b, x, number)
            message = f"{column.message}; x is returned in float32, whose rounding leaves a residual of {norm:.3g}"
            results.append(replace(column, true_residual=norm, message=message))
        self._remarks.append(
            f"{'precision':<11} A and b are float32: solved in float64 to {rtol:.2g}, what they can mean; x is rounded to float32"
        )
        return results, x

    def _returned(
        self,
        result: AnyResult | None,
        b: GivenVectors,
        columns: list[SolveResult],
        x: Array,
        shares: np.ndarray[Any, Any],
    ) -> AnyResult:
        failed = [inconsistent_result(x[:, 0], float(share)) for share in shares]
        if result is None:
            columns = failed
            block = BlockSolveResult(x, tuple(failed), 0, 0, 0, {"total": 0.0})
            result = failed[0] if b.columns == 1 else block
        columns = [failed[k] if shares[k] > 0 else column for k, column in enumerate(columns)]
        returned: AnyResult = b.returned(result, columns, x)
        return returned


class _SolveBar:
    """The share of a solve that is done; of several blocks, of all of them together."""

    def __init__(
        self,
        advance: Callable[[float, str], object],
        rtol: float,
        blocks: int,
        monitor: Callable[[IterationRecord], object] | None,
    ) -> None:
        self._advance, self._rtol, self._blocks, self._monitor = advance, rtol, blocks, monitor
        self._block, self._seen = 0, IterationRecord(0, 1.0, 0.0, 0)

    def watch(self, record: IterationRecord) -> bool:
        """Take note of a look at the residual; return whether the caller's monitor stops the solve."""
        if record.iteration <= self._seen.iteration:
            self._block += 1
        self._seen = record
        done, detail = solve_progress(record, self._rtol)
        if self._blocks > 1:
            done = (self._block + done) / self._blocks
            detail = f"block {self._block + 1} of {self._blocks}, {detail}"
        self._advance(done, detail)
        return self._monitor is not None and bool(self._monitor(record))

    def watch_correction(self, record: IterationRecord) -> bool:
        """Ask the caller's monitor in a correction: it sees the solve that is corrected, from whose state to resume."""
        known = self._seen.state is not None  # not if the solve had converged before it was resumed
        return known and self._monitor is not None and bool(self._monitor(self._seen))
