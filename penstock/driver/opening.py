"""A system opened where it computes: the matrix resident or streamed, its preconditioner, and the solve."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from penstock.driver.exact_matrix import ExactMatrix
from penstock.driver.inputs import GivenMatrix
from penstock.driver.null_space import KnownModes, NullSpace
from penstock.driver.open_system import HeldStore, OpenSystem
from penstock.driver.placement import place_index, place_matrix
from penstock.driver.progress import Reporter
from penstock.driver.request import Placement, Request
from penstock.driver.resident import Resident
from penstock.host.scratch import scratch_folder
from penstock.spmv import CPU, BudgetError, CsrMatrix, Operator, SparseMatrix, format_nbytes
from penstock.spmv.formats.partition import row_slabs
from penstock.spmv.formats.pattern import Pattern
from penstock.streaming import (
    FileStore,
    HostStore,
    LinkRates,
    MatrixIndex,
    MemoryBudget,
    Ring,
    Store,
    StreamedMatrix,
    index_of,
    reach_of,
    reach_of_store,
)
from penstock.streaming.measurement.first_sweeps import plan_again
from penstock.streaming.measurement.rates import WORTH_MEASURING_NBYTES, correct_rates, machine_rates
from penstock.streaming.stores.whole import read_whole

# Host memory, in sizes of a store, that reading it as a whole and putting it into another order needs.
_REWRITE = 5


@contextmanager
def open_system(
    given: GivenMatrix,
    request: Request,
    *,
    folder: str | Path | None = None,
    reporter: Reporter | None = None,
    announce: Callable[[Placement], object] | None = None,
    updatable: bool = False,
) -> Iterator[OpenSystem]:
    """Decide how a matrix is stored and used, and open it where it computes.

    ``announce(placement)`` is called before memory for the matrix is taken. ``updatable`` remembers the pattern of the matrix,
    so that its values can be replaced.
    """
    reporter = reporter or Reporter()
    null_space = None if request.null_space is None else NullSpace.given(request.null_space, given.rows)
    with ExitStack() as resources:
        opener = _Opener(request, None if folder is None else Path(folder), reporter, announce, resources, updatable)
        with request.device.current():
            system = opener.open(given.with_wide_vectors(), narrow=given.is_narrow, null_space=null_space)
        del given, opener  # the matrix may be large, and have been converted
        yield system


@dataclass
class _Opener:
    request: Request
    folder: Path | None
    reporter: Reporter
    announce: Callable[[Placement], object] | None
    resources: ExitStack
    updatable: bool
    held: HeldStore = field(default_factory=HeldStore)

    def open(self, given: GivenMatrix, *, narrow: bool, null_space: NullSpace | None) -> OpenSystem:
        system = self._opened_system(given)
        system.narrow = narrow
        if null_space is not None:
            null_space.check(system.A, None if system.order is None else system.order.forward)
            system.null_space = null_space
        return system

    def _opened_system(self, given: GivenMatrix) -> OpenSystem:
        if isinstance(given.matrix, StreamedMatrix) or given.kind == "operator":
            return OpenSystem(cast(Operator, given.matrix), self.request, None, self.reporter)
        if given.kind == "store":
            return self._open_store(cast(Store, given.matrix))
        if given.kind == "csr":
            return self._open_csr(given)
        return self._open_format(cast(SparseMatrix, given.matrix))

    def _open_csr(self, given: GivenMatrix) -> OpenSystem:
        of_caller = given.matrix.values
        with self.reporter.stage("move"):
            matrix = given.moved(self.request.device, self.request.memory)
        with self.reporter.stage("look"):
            matrix = given.checked(matrix)
        placement = self._place(matrix)
        exact = ExactMatrix.of(given.matrix, placement.difference)
        pattern = unreachable = None
        with self.reporter.stage("look"):
            if self.updatable:
                pattern = Pattern.of(matrix)
            if self.request.null_space is None:
                known = KnownModes(self.request.options, matrix.shape[0], self.request.block_size)
                unreachable = NullSpace.found(matrix, known)
        del matrix, given  # whose structure may be large
        system = self._open_placed(placement)
        system.exact, system.unreachable, system.pattern = exact, unreachable, pattern
        system.borrowed = system.uses(of_caller)
        return system

    def _place(self, matrix: CsrMatrix) -> Placement:
        with self.reporter.stage("plan"):
            return place_matrix(matrix, self.request, rates=self._rates, reporter=self.reporter)

    def _open_placed(self, placement: Placement) -> OpenSystem:
        self._announce(placement)
        whole = placement.matrix
        assert whole is not None, "a matrix in memory is converted"
        plan = placement.plan
        if isinstance(plan, Resident) or not plan.slots:
            with self.reporter.stage("move"):
                on_device = whole.to_device(self.request.device)
            return self._opened(on_device, placement if on_device is whole else replace(placement, matrix=None))
        count = len(plan.index.subdivisions)
        if self.request.device.kind == "cuda":
            with self.reporter.stage("copy"):  # to page-locked memory
                store = HostStore.from_matrix(whole.to_device(CPU), count)
            return self._streamed(store, placement)
        return self._streamed(self._written(whole.to_device(CPU), placement), placement)

    def _open_format(self, matrix: SparseMatrix) -> OpenSystem:
        """Keep the format that the caller has chosen."""
        host = matrix.to_device(CPU)

        def index_for(count: int) -> MatrixIndex:
            return index_of(row_slabs(host, count), host.shape)

        def reach_for(index: MatrixIndex) -> int:
            slabs = row_slabs(host, len(index.subdivisions))
            return reach_of(index.row_starts, [slab.column_range() for slab in slabs])

        index = index_for(1 + matrix.nbytes // (1 << 31))
        placement = place_index(index, self.request, reach_for=reach_for, rates=self._rates, index_for=index_for)
        system = self._open_placed(replace(placement, matrix=matrix))
        if self.updatable:
            system.pattern = Pattern.of(CsrMatrix.from_csr(matrix.to_csr(), check=False))
        system.borrowed = system.uses(matrix.values)
        return system

    def _open_store(self, store: Store) -> OpenSystem:
        with self.reporter.stage("survey"):
            try:
                placement = place_index(
                    store.index, self.request, reach_for=lambda index: reach_of_store(store), rates=self._rates
                )
            except BudgetError as error:
                error.add_note("'penstock store STORE ANOTHER --slab SIZE' cuts a store into smaller subdivisions")
                raise
        powers = placement.stream_plan.powers_per_sweep
        wanted = max(max(spec.products_per_iteration(streamed=True)) for spec in self.request.specs(1, streamed=True))
        if placement.stream_plan.slots and powers < wanted and _REWRITE * store.index.nbytes < CPU.free_nbytes():
            with self.reporter.stage("read"):
                whole = CsrMatrix.from_csr(read_whole(store), strategy="auto", check=False)
            reordered = self._place(whole)
            if reordered.order is not None:  # worth it: another copy of the matrix is made in that order
                system = self._open_placed(reordered)
                system.exact = ExactMatrix.of(whole, reordered.difference)
                return system
        self._announce(placement)
        fits = store.index.nbytes < CPU.free_nbytes() // 2
        on_disk = not hasattr(store, "segments")
        if self.request.device.kind == "cuda" and placement.stream_plan.slots and on_disk and fits:
            with self.reporter.stage("read"):
                store = HostStore.from_store(store)
                self.held.replace(store)
        return self._streamed(store, placement)

    def _streamed(self, store: Store, placement: Placement) -> OpenSystem:
        if hasattr(store, "__enter__") and placement.matrix is not None:
            self.held.replace(store)
        # After the streamed matrix, and before a temporary folder is removed: not all systems remove open files.
        self.resources.callback(self.held.close)
        budget = MemoryBudget(placement.stream_plan.budget_nbytes)
        with self.reporter.stage("open"):
            matrix = StreamedMatrix(store, budget, device=self.request.device, plan=placement.stream_plan)
        if len(placement.choices) > 1 and placement.stream_plan.rates is not None:
            with self.reporter.stage("try"):
                again = plan_again(matrix, [workload for _, workload in placement.choices], Ring())
            if again is not None:
                matrix.close()
                if placement.matrix is not None:  # a caller's store may lie on another disk
                    correct_rates(self.request.device, self._streams_from, again.rates)
                placement = placement.replanned(again.plan, again.text)
                self._announce(placement)
                with self.reporter.stage("open"):
                    matrix = StreamedMatrix(store, budget, device=self.request.device, plan=again.plan)
        return self._opened(self.resources.enter_context(matrix), placement)

    def _written(self, whole: SparseMatrix, placement: Placement) -> FileStore:
        """Write a matrix to disk, for a CPU to stream from; removed at the end."""
        total, count = placement.stream_plan.index.nbytes, len(placement.stream_plan.index.subdivisions)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
        place = self.resources.enter_context(scratch_folder("penstock-", self.folder))
        with self.reporter.stage("write") as stage:
            return FileStore.create(
                place / "matrix",
                row_slabs(whole, count),
                shape=whole.shape,
                label=self.request.name,
                progress=lambda written: stage.advance(written / total, f"{format_nbytes(written)} written"),
            )

    def _announce(self, placement: Placement) -> None:
        """Hand on what was decided, and refuse a plan for which the device has no room."""
        if self.announce is not None:
            self.announce(placement)
        placement.check_room(self.request.device)

    def _rates(self, nbytes: int) -> LinkRates | None:
        if nbytes < WORTH_MEASURING_NBYTES:
            return None
        return machine_rates(self.request.device, self._streams_from)

    @property
    def _streams_from(self) -> Path:
        return self.folder or Path(tempfile.gettempdir())

    def _opened(self, A: Operator, placement: Placement) -> OpenSystem:
        return OpenSystem(A, self.request, placement, self.reporter, held=self.held)
