"""What a caller of a solve asks for, and what was decided: plain data between the front door and placement."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from penstock.solvers import (
    MethodChoice,
    OwnPreconditioner,
    PreconditionerSpec,
    check_streams,
    method_named,
    preconditioner_spec,
)
from penstock.solvers.factorisation import FactorisationSpec
from penstock.spmv import BudgetError, Device, InputError, SparseMatrix, format_named, format_nbytes
from penstock.spmv.model.suggestion import Suggestion
from penstock.streaming import LevelOrder, MatrixIndex, Ring, StreamPlan, Subdivision, Workload, plan_stream
from penstock.streaming.execution.budget import check_room

# Share of the free memory that matrix and vectors leave to others.
_LEFT_FREE = 0.1


@dataclass(frozen=True)
class Request:
    """What a caller asks for."""

    device: Device
    columns: int = 1  # right-hand sides
    memory: int | None = (
        None  # bytes for matrix storage on the device; None: what is free, less a reserve and the vectors
    )
    preconditioner: Any = "auto"  # a registered name, a spec, or an operator, matrix or function
    block_size: int | Literal["auto"] = "auto"
    options: dict[str, Any] = field(default_factory=dict)  # of the preconditioner, such as degree
    name: str = "A"  # of the matrix in messages
    constants_are_slow: bool = False  # a coarse level made of constants is expected to win
    has_lines: bool = False  # lines of nodes across flat elements, which a coarse level then solves as one
    format: str | None = None  # registered name of the storage format; None: the best one
    null_space: Any = None  # what A maps to zero, removed from b and x: "constants" or an array
    method: str | MethodChoice = "auto"  # registered name, or what is not solved for right-hand sides
    one_block: bool = False  # right-hand sides are solved as one block, even a single one
    resident: bool = False  # the matrix is known to stay in memory
    verify: str = "bound"  # what ends a solve with an image: a bound of the residual, or its norm
    precision: str = "float64"  # of the values that are held of a matrix that does not fit; else it may have an image
    why: str = "as requested"  # of a given preconditioner, in plans
    solves: int = 1  # for which a system is opened, about

    @property
    def chosen_method(self) -> MethodChoice:
        """The method that solves."""
        return self.method if isinstance(self.method, MethodChoice) else method_named(self.method)

    def node_size(self, otherwise: int = 1) -> int:
        """Return the unknowns of a node that the caller gives, or what stands for them where that is left open."""
        return otherwise if self.block_size == "auto" else int(self.block_size)

    def format_fact(self, chosen: Suggestion, exact: bool, why: str) -> tuple[str, str]:
        """Return what to say of a format for a matrix that is symmetric, ``exact`` or but for rounding, and why it is used."""
        half = ""
        if format_named(chosen.format_name).traits.half and not exact:
            half = "; the upper triangle stands for both, the reported residual is that of the original A"
        return "format", f"{chosen.label}: {why if self.format is None else 'as requested'}{half}"

    def specs(self, block_size: int, *, streamed: bool) -> list[PreconditionerSpec]:
        """Return the preconditioners between which the plan chooses.

        ``auto`` is smoothed aggregation where the near-null space or the nodes are known, or constants are slow modes. Otherwise
        it is Jacobi, by blocks where the matrix has them; where it is streamed, a Chebyshev polynomial as well, whose products
        share sweeps.
        """
        if isinstance(self.preconditioner, PreconditionerSpec):
            return [self.preconditioner.with_block_size(block_size)]
        if not isinstance(self.preconditioner, str):
            return [OwnPreconditioner(block_size=block_size, M=self.preconditioner)]
        lines: dict[str, Any] = {"grouped": "lines"} if self.has_lines else {}
        if self.preconditioner != "auto":
            spec = preconditioner_spec(self.preconditioner, block_size=block_size, **lines, **self.options)
            if spec.needs_blocks and block_size == 1:
                raise InputError("the matrix does not consist of dense blocks; choose jacobi or chebyshev")
            return [spec]
        if not self.chosen_method.definite:
            return [preconditioner_spec("absolute_jacobi", block_size=block_size, **self.options)]
        if self.options.keys() & {"near_null_space", "coordinates"} or self.constants_are_slow:
            return [preconditioner_spec("smoothed_aggregation", block_size=block_size, **lines, **self.options)]
        names = ["jacobi" if block_size == 1 else "block_jacobi", *(["chebyshev"] if streamed else [])]
        return [preconditioner_spec(name, block_size=block_size, **self.options) for name in names]

    def specs_in_memory(self, block_size: int) -> list[PreconditionerSpec]:
        """Return the preconditioners of a matrix whose entries are at hand: the first for which there is room is used.

        ``auto`` is multigrid where :meth:`specs` says smoothed aggregation. Products cost the same in both, multigrid needs
        fewer, and its aggregates follow the entries. On a GPU blocks of several unknowns are left to smoothed aggregation, which
        reads half of a symmetric matrix there; multigrid takes its place where iterations show that it is slow.
        """
        specs = self.specs(block_size, streamed=False)
        replaceable = self.is_auto and specs[0].uses_near_null_space
        if replaceable and (self.device.kind == "cpu" or block_size == 1) and (other := self.multigrid(block_size)):
            return [other, *specs]
        return specs

    def specs_held(self, block_size: int, *, entries: bool) -> list[PreconditionerSpec]:
        """Return the preconditioners of a matrix that is held whole in a given format.

        ``entries`` says that its entries are at hand: a CPU then begins with multigrid.
        """
        if entries and self.device.kind == "cpu":
            return self.specs_in_memory(block_size)
        return self.specs(block_size, streamed=False)[:1]

    def multigrid(self, block_size: int) -> PreconditionerSpec | None:
        """Return multigrid with what is known of the nodes; None if the caller's options are for another preconditioner."""
        if self.options.keys() <= {"near_null_space", "coordinates"}:
            return preconditioner_spec("multigrid", block_size=block_size, **self.options)
        return None

    def specs_that_stream(self, block_size: int) -> list[PreconditionerSpec]:
        """Return the preconditioners of a matrix that is streamed, or refuse one that needs its entries."""
        specs = self.specs(block_size, streamed=True)
        for spec in specs:
            check_streams(spec)
        return specs

    def reason(self, spec: PreconditionerSpec, choices: list[PreconditionerSpec]) -> str:
        """Return why a preconditioner is used, which is one of the choices that :meth:`specs` returned."""
        if not self.is_auto:
            return self.why
        if isinstance(spec, FactorisationSpec):
            return "its factor has so few entries that it takes less time than multigrid"
        if spec.uses_near_null_space:
            sources = {"coordinates": "the coordinates of the nodes are", "near_null_space": "its near-null space is"}
            known = next((f"{words} given" for name, words in sources.items() if name in self.options), None)
            lines = " with lines of nodes across flat elements" if self.has_lines else ""
            return f"a coarse level{lines}, because {known or 'A nearly maps constants to zero'}"
        if not self.chosen_method.definite:
            return "for matrices that need not be positive definite"
        others = [other.name for other in choices if other.name != spec.name]
        faster = f"predicted to be faster here than {' and '.join(others)}; " if others else ""
        return f"{faster}a coarse level would need coordinates= or near_null_space="

    def alternative(self, spec: PreconditionerSpec) -> PreconditionerSpec | None:
        """Return what takes the place of a preconditioner that cannot be made; None if the caller chose it, or gave its input."""
        if not self.is_auto:
            return None
        if isinstance(spec, FactorisationSpec):
            return preconditioner_spec("multigrid", block_size=spec.block_size, **self.options)
        if self.options or not spec.uses_near_null_space:
            return None
        [other, *_] = self.specs(spec.block_size, streamed=False)
        return None if other.name == spec.name else other

    @property
    def is_auto(self) -> bool:
        """Whether the choice of a preconditioner is left open."""
        return isinstance(self.preconditioner, str) and self.preconditioner == "auto"


@dataclass(frozen=True)
class Resident:
    """A matrix that is held in memory as a whole: the plan beside that of a streamed one, a StreamPlan.

    ``nonzeros`` are those of the caller's matrix; ``budget_nbytes`` is the caller's limit, or None; ``parts`` are what the
    preconditioner holds besides vectors, with its bytes. A ``precision`` other than float64 is that of an image of the matrix.
    """

    shape: tuple[int, int]
    nonzeros: int
    format_name: str
    storage_nbytes: int
    budget_nbytes: int | None
    workspace_nbytes: int
    parts: tuple[tuple[str, int], ...] = ()
    precision: str = "float64"

    #: Nothing is streamed.
    slots = 0

    @classmethod
    def of(
        cls, matrix: SparseMatrix, nonzeros: int, budget: int | None, workspace: int, parts: tuple[Any, ...]
    ) -> Resident:
        """Return the plan of a converted matrix."""
        return cls(matrix.shape, nonzeros, matrix.name, matrix.nbytes, budget, workspace, parts)

    def as_stream_plan(self) -> StreamPlan:
        """Return the plan of a stream of one piece that is resident, for reports that compare runs."""
        piece = Subdivision(0, self.shape[0], self.nonzeros, (), self.storage_nbytes)
        index = MatrixIndex(self.shape, "float64", self.format_name, {}, (piece,))
        workload = Workload(workspace_nbytes=self.workspace_nbytes, parts=self.parts)
        return plan_stream(index, self.budget_nbytes or self.storage_nbytes, workload)

    def explain(self) -> str:
        """Return a description, one fact per line."""
        size = format_nbytes(self.storage_nbytes)
        allowed = "" if self.budget_nbytes is None else f", which may take {format_nbytes(self.budget_nbytes)}"
        parts = ", ".join(f"{format_nbytes(nbytes)} for {name}" for name, nbytes in self.parts)
        held = f"the matrix{allowed}: it is held as a whole, nothing is streamed"
        if self.precision != "float64":
            held = f"an image of the matrix in {self.precision}, with which all iterations are made"
            held += "" if self.budget_nbytes is None else f"; {format_nbytes(self.budget_nbytes)} are allowed"
        return "\n".join(
            [
                f"matrix      {self.shape[0]:,} x {self.shape[1]:,}, {self.nonzeros:,} entries, {self.format_name}, {size}",
                f"memory      {size} for {held}",
                f"vectors     {format_nbytes(self.workspace_nbytes)} beside it{f', with {parts}' if parts else ''}",
            ]
        )


@dataclass(frozen=True)
class ImagePlacement:
    """What is decided of a matrix of which an image in fewer digits is held in memory."""

    plan: StreamPlan  # of single products, for residuals
    matrix: SparseMatrix | None = None  # on the host, unless the plan is for a store


@dataclass(frozen=True)
class Placement:
    """What was decided."""

    plan: StreamPlan | Resident  # a StreamPlan streams nothing if the matrix of a store fits
    spec: PreconditionerSpec
    together: int  # right-hand sides that are solved together
    solver_nbytes: int  # of their vectors, without those of the preconditioner
    nonzeros: int
    facts: tuple[tuple[str, str], ...]  # what a user should know besides the plan: a title and a sentence each
    matrix: SparseMatrix | None = None  # converted, unless the plan is for a store
    order: LevelOrder | None = None  # of the rows, if it is not the caller's
    choices: tuple[tuple[PreconditionerSpec, Workload], ...] = ()  # from which the first sweeps may choose again
    ring: Ring | None = None  # what is prescribed for them
    difference: float = 0.0  # bound of ||stored matrix - A||, where A is symmetric to rounding only
    reasons: dict[str, str] = field(default_factory=dict)  # why each preconditioner would be used, by name
    method: str = "conjugate gradients for one right-hand side"
    is_definite: bool = False  # known to be; otherwise the diagonal of a matrix that nothing else looks at is checked
    room_nbytes: int | None = None  # that the device must have, if not for the plan alone
    instead_of: PreconditionerSpec | None = None  # whose place the preconditioner took when iterations were slow
    is_settled: bool = False  # another preconditioner has been tried in vain
    image: ImagePlacement | None = None  # if ``matrix`` and ``plan`` are of an image

    @property
    def precision(self) -> str:
        """Of the values with which iterations are made."""
        return self.plan.precision if isinstance(self.plan, Resident) else "float64"

    @property
    def wants_planes(self) -> bool:
        """Whether a store on disk is written in two planes, the first of which holds the values of the image."""
        return self.image is not None and self.precision == "float32"

    @property
    def plan_of_matrix(self) -> StreamPlan | Resident:
        """The plan of the matrix itself, if ``plan`` is that of an image."""
        return self.plan if self.image is None else self.image.plan

    @property
    def plan_of_store(self) -> StreamPlan:
        """The plan of the store from which the matrix is streamed, be it for iterations or for residuals only."""
        return self.stream_plan if self.image is None else self.image.plan

    @property
    def stream_plan(self) -> StreamPlan:
        """The plan of a matrix that is streamed, or of a store that is kept in memory."""
        assert isinstance(self.plan, StreamPlan), "a resident matrix is not streamed"
        return self.plan

    def replanned(self, plan: StreamPlan, why: str) -> Placement:
        """Return this placement with another plan for one of the choices."""
        spec = next(spec for spec, workload in self.choices if workload == plan.workload)
        return replace(self, plan=plan, spec=spec, facts=(*self.facts, ("rates", why)))

    def check_room(self, device: Device) -> None:
        """Refuse a plan for which the device has no room, with a BudgetError."""
        of_plan = self.plan.storage_nbytes + self.plan.workspace_nbytes
        of_plan += 0 if self.image is None else self.image.plan.storage_nbytes
        check_room(device, of_plan if self.room_nbytes is None else self.room_nbytes, "matrix storage and vectors")

    def explain(self) -> str:
        """Return the plan and the facts in words, one line each."""
        solver = f"{self.method}, preconditioner {self.spec.description}"
        why = self.reasons.get(self.spec.name, "because no coarse level suits this matrix")
        facts = [*self.facts, ("solver", solver), ("choice", f"{self.spec.name}: {why}")]
        return "\n".join([self.plan.explain(), *(f"{title:<11} {text}" for title, text in facts)])


@dataclass(frozen=True)
class Vectors:
    """How many right-hand sides are solved together, and the bytes of the solver's vectors and of what else lies beside A."""

    together: int
    solver_nbytes: int
    n: int
    dtype: Any
    beside: tuple[tuple[str, int], ...] = ()

    @classmethod
    def fitting(cls, request: Request, n: int, dtype: Any, most: int) -> Vectors:
        """Solve as many together as fit half of the free memory, ``most`` at most, in blocks of about equal size."""
        most = request.chosen_method.largest_block or most
        if request.columns == 1:
            return cls(1, request.chosen_method.workspace_nbytes(n, 1, dtype), n, dtype)
        each = request.chosen_method.workspace_nbytes(n, 2, dtype) // 2
        fit = max(1, request.device.free_nbytes() // 2 // each)
        blocks = -(-request.columns // min(request.columns, most, fit))
        together = -(-request.columns // blocks)
        return cls(together, together * each, n, dtype)

    def nbytes(self, request: Request, spec: PreconditionerSpec) -> int:
        """Return the bytes of all vectors, with those of the preconditioner; on a GPU the matrix may turn out to be streamed."""
        to_gpu = self._may_stream_to_gpu(request)
        of_spec: int = spec.workspace_nbytes(self.n, self.together, self.dtype, streamed_to_gpu=to_gpu)
        return self.solver_nbytes + of_spec + sum(nbytes for _, nbytes in self.beside)

    def workload(self, request: Request, spec: PreconditionerSpec, degree: int) -> Workload:
        """Return what a plan must know of the solver."""
        spec, iterations = spec.with_products(degree), spec.iterations(degree)
        nbytes = self.nbytes(request, spec)
        parts = spec.parts(self.n, self.together, self.dtype, streamed_to_gpu=self._may_stream_to_gpu(request))
        parts = (*parts, *self.beside)
        return Workload(
            self.together,
            degree=degree,
            workspace_nbytes=nbytes,
            parts=parts,
            iterations=iterations,
            solves=request.solves,
        )

    def choices(
        self, request: Request, specs: Iterable[PreconditionerSpec]
    ) -> tuple[tuple[PreconditionerSpec, Workload], ...]:
        """Return every preconditioner with each number of products an iteration between which a plan may choose."""
        return tuple(
            (spec.with_products(degree), self.workload(request, spec, degree))
            for spec in specs
            for degree in spec.products_per_iteration(streamed=True)
        )

    @staticmethod
    def _may_stream_to_gpu(request: Request) -> bool:
        return request.device.kind == "cuda" and not request.resident


def room_for_matrix(request: Request, vectors_nbytes: int) -> int:
    """Return the bytes for matrix storage."""
    if request.memory is not None:
        return request.memory
    room: int = int((1 - _LEFT_FREE) * request.device.free_nbytes()) - vectors_nbytes
    if room <= 0:
        raise BudgetError(
            f"the vectors need {format_nbytes(vectors_nbytes)}, which leaves nothing of the free memory of {request.device} to "
            "the matrix; free memory, or use another device"
        )
    return room
