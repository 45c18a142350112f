"""A system opened where it computes: the matrix resident or streamed, its preconditioner, and the solve."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from penstock.driver.inputs import GivenMatrix
from penstock.driver.made_matrix import MadeMatrixSource
from penstock.driver.null_space import KnownModes, NullSpace
from penstock.driver.open_system import HeldStore, OpenSystem
from penstock.driver.placement import dense_block_size, place_index, place_matrix
from penstock.driver.progress import Reporter, Stage
from penstock.driver.request import ImagePlacement, Placement, Request, Resident
from penstock.host.folders import scratch_folder
from penstock.spmv import CPU, BudgetError, CsrMatrix, Device, Operator, SparseMatrix, SweptOperator, format_nbytes
from penstock.spmv.compilation.usual_kernels import OPENING, begin_compilation, case_name
from penstock.spmv.formats.partition import row_slabs
from penstock.spmv.formats.pattern import Pattern
from penstock.spmv.formats.statistics import MatrixStatistics
from penstock.spmv.formats.symmetric_bsr import SymmetricBsrMatrix
from penstock.spmv.formats.symmetric_image import image_of
from penstock.spmv.formats.upper_half import UpperHalf
from penstock.streaming import (
    FileStore,
    HostStore,
    LinkRates,
    MadeStore,
    MatrixIndex,
    MemoryBudget,
    Ring,
    Store,
    StreamedMatrix,
    StreamPlan,
    index_of,
    reach_of,
    reach_of_store,
)
from penstock.streaming.image import image_and_matrix
from penstock.streaming.measurement.first_sweeps import plan_again
from penstock.streaming.measurement.rates import WORTH_MEASURING_NBYTES, correct_rates, machine_rates
from penstock.streaming.stores.host_planes import copy_in_memory, is_in_memory
from penstock.streaming.stores.whole import read_whole

# Host memory, in sizes of a store, that reading it as a whole and putting it into another order needs.
_REWRITE = 5

#: Yields what is decided before memory for it is taken, and again where the first sweeps change it; returns the system.
_Opening = Generator[Placement, None, OpenSystem]


class WithImage(NamedTuple):
    """An image in memory, of one process or of ranks, and the matrix that is streamed for residuals."""

    image: Operator
    matrix: SweptOperator


class MatrixSource(Protocol):
    """A matrix that does not exist yet: it is planned, and made where it is used."""

    def place(self, request: Request) -> Placement:
        """Decide how the matrix is used."""

    def make(self, placement: Placement, resources: ExitStack) -> Operator | Store | WithImage:
        """Return the matrix on its device, or a store from which it is streamed, or both an image and the matrix."""


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
        if given.kind == "csr" and request.device.kind == "cuda":
            begin_compilation(OPENING, request.device)
        opener = _Opener(request, None if folder is None else Path(folder), reporter, resources, updatable)
        opening = opener.open(given.with_wide_vectors(), narrow=given.is_narrow, null_space=null_space)
        with request.device.current():
            system = _opened(opening, announce, request)
        del given, opener, opening  # the matrix may be large, and have been converted
        yield system


def _opened(opening: _Opening, announce: Callable[[Placement], object] | None, request: Request) -> OpenSystem:
    """Hand on what is decided, and refuse a plan for which the device has no room."""
    while True:
        try:
            placement = next(opening)
        except StopIteration as end:
            return cast(OpenSystem, end.value)
        if announce is not None:
            announce(placement)
        placement.check_room(request.device)
        if request.device.kind == "cuda":
            spec, of_image = placement.spec, placement.precision
            streamed = placement.plan.slots > 0
            case = case_name(spec.name, spec.block_size, placement.together, streamed=streamed, precision=of_image)
            begin_compilation(case, request.device)


def plan_system(
    given: GivenMatrix, request: Request, *, folder: str | Path | None = None, reporter: Reporter | None = None
) -> Placement:
    """Decide what :func:`open_system` would, and open nothing; refuse a plan for which the device has no room."""
    with ExitStack() as resources, request.device.current():
        opener = _Opener(request, None if folder is None else Path(folder), reporter or Reporter(), resources, False)
        placement = next(opener.open(given.with_wide_vectors(), narrow=False, null_space=None))
        placement.check_room(request.device)
    return placement


def nearest(store: Store, device: Device, reporter: Reporter, *, planes: bool = False) -> Store:
    """Return a copy in host memory of a store that a GPU would stream from disk, unless it would fill most of that memory.

    With ``planes``, it keeps those of the store, for an image in fewer digits.
    """
    near = device.kind == "cpu" or isinstance(store, MadeStore) or is_in_memory(store, planes=planes)
    if near or store.index.nbytes >= CPU.free_nbytes() // 2:
        return store
    with reporter.stage("read"):
        return copy_in_memory(store, planes=planes)


def write_store(
    path: Path, slabs: Iterable[SparseMatrix], index: MatrixIndex, label: str, stage: Stage, *, planes: bool = False
) -> FileStore:
    """Write a matrix that is planned like ``index`` to disk, with ``planes`` in two planes if its values have some."""

    def progress(written: int) -> None:
        stage.advance(written / index.nbytes, f"{format_nbytes(written)} written")

    return FileStore.create(
        path, slabs, shape=index.shape, label=label, planes="auto" if planes else False, progress=progress
    )


@dataclass
class _Opener:
    request: Request
    folder: Path | None
    reporter: Reporter
    resources: ExitStack
    updatable: bool
    held: HeldStore = field(default_factory=HeldStore)

    def open(self, given: GivenMatrix, *, narrow: bool, null_space: NullSpace | None) -> _Opening:
        system = yield from self._open(given)
        system.narrow = narrow
        if null_space is not None:
            null_space.check(system.matrix, None if system.order is None else system.order.forward)
            system.null_space = null_space
        return system

    def _open(self, given: GivenMatrix) -> _Opening:
        if isinstance(given.matrix, StreamedMatrix) or given.kind == "operator":
            return OpenSystem(cast(Operator, given.matrix), self.request, None, self.reporter)
        if given.kind == "source":
            return (yield from self._open_source(cast(MatrixSource, given.matrix)))
        if given.kind == "elements":
            return (yield from self._open_source(MadeMatrixSource(given.matrix, self.reporter)))
        if given.kind == "store":
            return (yield from self._open_store(cast(Store, given.matrix)))
        if given.kind == "csr":
            return (yield from self._open_csr(given))
        return (yield from self._open_format(cast(SparseMatrix, given.matrix)))

    def _open_source(self, source: MatrixSource) -> _Opening:
        placement = source.place(self.request)
        yield placement
        made = source.make(placement, self.resources)
        if isinstance(made, WithImage):
            system = self._with_streamed(made, placement)
        elif placement.image is not None:
            system = self._with_image(placement, placement.image, cast(Store, made))
        elif hasattr(made, "apply"):
            system = self._system(cast(Operator, made), placement)
        else:
            system = yield from self._streamed(made, placement)
        system.source = source
        return system

    def _open_csr(self, given: GivenMatrix) -> _Opening:
        of_caller, report = given.matrix.values, self.reporter
        pattern = unreachable = None
        with report.stage("convert"):
            with report.part("move"):
                matrix = given.moved(self.request.device, self.request.memory)
            with report.part("look"):
                half = self.request.format in (None, SymmetricBsrMatrix.name)
                statistics = given.checked(matrix, self.request.device, UpperHalf if half else None)
            matrix = statistics.matrix
            placement = self._place(statistics)
            with report.part("look"):
                if self.updatable:
                    pattern = Pattern.of(matrix)
                if self.request.null_space is None:
                    known = KnownModes(self.request.options, matrix.shape[0], self.request.block_size)
                    unreachable = NullSpace.found(matrix, known)
        streams = placement.plan.slots > 0 or placement.image is not None
        difference = placement.difference
        exact = given.for_claims(matrix, difference, self.request.device, streams=streams)
        del statistics
        del matrix, given  # whose structure may be large
        system = yield from self._open_placed(placement)
        system.exact, system.difference = exact, difference
        system.unreachable, system.pattern = unreachable, pattern
        system.borrowed = system.uses(of_caller)
        return system

    def _place(self, statistics: MatrixStatistics) -> Placement:
        with self.reporter.part("plan"):
            return place_matrix(statistics, self.request, rates=self._rates, reporter=self.reporter)

    def _open_placed(self, placement: Placement) -> _Opening:
        yield placement
        if placement.image is not None:
            return self._with_image(placement, placement.image)
        whole = placement.matrix
        assert whole is not None, "a matrix in memory is converted"
        plan = placement.plan
        if isinstance(plan, Resident) or not plan.slots:
            with self.reporter.part("move"):
                on_device = whole.to_device(self.request.device)
            return self._system(on_device, placement if on_device is whole else replace(placement, matrix=None))
        return (yield from self._streamed(self._store_of(whole.to_device(CPU), placement.stream_plan), placement))

    def _store_of(self, whole: SparseMatrix, plan: StreamPlan, *, planes: bool = False) -> Store:
        """Return a store from which a matrix on the host is streamed: that memory, page-locked, for a GPU, else a file.

        With ``planes``, values in the file are stored in two planes if they can be.
        """
        if self.request.device.kind == "cuda":
            with self.reporter.stage("copy"):  # to page-locked memory
                return HostStore.from_matrix(whole, plan.index.row_bounds)
        return self._written(whole, plan, planes=planes)

    def _with_image(
        self, placement: Placement, image: ImagePlacement, store: Store | None = None, *, of_caller: bool = False
    ) -> OpenSystem:
        """Open a matrix, and an image of it in memory; ``store`` holds the matrix, if it is not in memory."""
        whole, device = image.matrix, self.request.device
        if store is None:
            assert whole is not None, "a matrix in memory is converted"
            store = self._store_of(whole, image.plan, planes=placement.wants_planes)
        precision, A = np.dtype(placement.precision), None
        store = self._near(store, image.plan, of_caller=of_caller, planes=True)
        with self.reporter.stage("image"):
            if whole is not None and device.kind == "cpu":  # a GPU rounds what arrives faster than a host
                A = image_of(whole, precision)
            A, streamed = image_and_matrix(store, precision, image.plan, device, A)
            self.resources.enter_context(streamed)
        made = WithImage(A, streamed)
        return self._with_streamed(made, replace(placement, image=replace(image, matrix=None)), of_caller)

    def _with_streamed(self, made: WithImage, placement: Placement, of_caller: bool = False) -> OpenSystem:
        system = self._system(made.image, placement)
        system.streamed, system.of_store = made.matrix, of_caller
        system.check_image()
        return system

    def _open_format(self, matrix: SparseMatrix) -> _Opening:
        """Keep the format that the caller has chosen."""
        host = matrix.to_device(CPU)
        together = self.request.node_size()

        def index_for(count: int) -> MatrixIndex:
            return index_of(row_slabs(host, count, together), host.shape)

        def reach_for(index: MatrixIndex) -> int:
            slabs = row_slabs(host, len(index.subdivisions), together)
            return reach_of(index.row_starts, [slab.column_range() for slab in slabs])

        index = index_for(1 + matrix.nbytes // (1 << 31))
        cut: dict[str, Any] = {"reach_for": reach_for, "index_for": index_for, "entries": True}
        dense_blocks = partial(dense_block_size, host)
        placement = place_index(index, self.request, rates=self._rates, dense_blocks=dense_blocks, **cut)
        if placement.image is not None:
            placement = replace(placement, image=replace(placement.image, matrix=host))
        else:
            placement = replace(placement, matrix=matrix)
        system = yield from self._open_placed(placement)
        if self.updatable:
            system.pattern = Pattern.of(CsrMatrix.from_csr(matrix.to_csr(), check=False))
        system.borrowed = system.uses(matrix.values)
        return system

    def _open_store(self, store: Store) -> _Opening:
        with self.reporter.stage("survey"):
            try:
                placement = place_index(
                    store.index, self.request, reach_for=lambda index: reach_of_store(store), rates=self._rates
                )
            except BudgetError as error:
                error.add_note("'penstock store STORE ANOTHER --slab SIZE' cuts a store into smaller subdivisions")
                raise
        if placement.image is not None:
            yield placement
            return self._with_image(placement, placement.image, store, of_caller=True)
        powers = placement.stream_plan.powers_per_sweep
        wanted = max(max(spec.products_per_iteration(streamed=True)) for spec in self.request.specs(1, streamed=True))
        if placement.stream_plan.slots and powers < wanted and _REWRITE * store.index.nbytes < CPU.free_nbytes():
            with self.reporter.stage("read"):
                whole = CsrMatrix.from_csr(read_whole(store), strategy="auto", check=False)
            reordered = self._place(MatrixStatistics.of(whole))
            if reordered.order is not None:  # worth it: another copy of the matrix is made in that order
                system = yield from self._open_placed(reordered)
                system.exact, system.difference = (whole if reordered.difference else None), reordered.difference
                return system
        yield placement
        return (yield from self._streamed(store, placement, of_caller=True))

    def _streamed(self, store: Store, placement: Placement, *, of_caller: bool = False) -> _Opening:
        store = self._near(store, placement.stream_plan, of_caller=of_caller)
        budget = MemoryBudget(placement.stream_plan.budget_nbytes)
        with self.reporter.stage("open"):
            matrix = StreamedMatrix(store, budget, device=self.request.device, plan=placement.stream_plan)
        if placement.choices and placement.stream_plan.rates is not None:
            with self.reporter.stage("try"):
                again = plan_again(matrix, [workload for _, workload in placement.choices], placement.ring or Ring())
            if again is not None:
                matrix.close()
                if not (of_caller or isinstance(store, MadeStore)):  # a caller's store may lie on another disk
                    correct_rates(self.request.device, self._streams_from, again.rates)
                placement = placement.replanned(again.plan, again.text)
                yield placement
                with self.reporter.stage("open"):
                    matrix = StreamedMatrix(store, budget, device=self.request.device, plan=again.plan)
        return self._system(self.resources.enter_context(matrix), placement)

    def _near(self, store: Store, plan: StreamPlan, *, of_caller: bool, planes: bool = False) -> Store:
        """Return a store as near as it can be, and close what is not the caller's in the end."""
        # After the streamed matrix, and before a temporary folder is removed: not all systems remove open files.
        self.resources.callback(self.held.close)
        if hasattr(store, "__enter__") and not of_caller:
            self.held.replace(store)
        near = nearest(store, self.request.device, self.reporter, planes=planes) if plan.slots else store
        if near is not store:
            self.held.replace(near)
        return near

    def _written(self, whole: SparseMatrix, plan: StreamPlan, *, planes: bool = False) -> FileStore:
        """Write a matrix to disk, for a CPU to stream from; removed at the end."""
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
        path = self.resources.enter_context(scratch_folder("penstock-", self.folder)) / "matrix"
        with self.reporter.stage("write") as stage:
            slabs = itertools.starmap(whole.rows, itertools.pairwise(plan.index.row_bounds))
            return write_store(path, slabs, plan.index, self.request.name, stage, planes=planes)

    def _rates(self, nbytes: int) -> LinkRates | None:
        return None if nbytes < WORTH_MEASURING_NBYTES else machine_rates(self.request.device, self._streams_from)

    @property
    def _streams_from(self) -> Path:
        return self.folder or Path(tempfile.gettempdir())

    def _system(self, A: Operator, placement: Placement) -> OpenSystem:
        return OpenSystem(A, self.request, placement, self.reporter, held=self.held)
