"""A run whose system is shared out among ranks: each assembles its own rows, and the first one writes and reports."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from penstock.distributed import (
    DistributedImage,
    DistributedMatrix,
    DistributedStreamedMatrix,
    MpiCommunicator,
    NcclCommunicator,
    RowPartition,
)
from penstock.driver.open_system import AnyResult, OpenSystem
from penstock.driver.opening import WithImage
from penstock.driver.progress import Reporter
from penstock.driver.request import Placement, Request
from penstock.experiments.cantilever.configuration import Experiment, read_experiment
from penstock.experiments.cantilever.loads import right_hand_sides
from penstock.experiments.cantilever.matrix_storage import (
    place_experiment,
    place_with_image,
    plan_experiment,
    resident_format,
)
from penstock.experiments.cantilever.ranked_storage import couplings_of_rank, open_rank_store, planes_of
from penstock.experiments.cantilever.single_run import SingleRun, resolved
from penstock.experiments.reporting.checkpoint import Checkpoint, SolverState, read_checkpoint
from penstock.experiments.reporting.folder import ResultsFolder
from penstock.experiments.reporting.outcome import RunOutcome
from penstock.host.folders import scratch_folder
from penstock.solvers import CoarseBlockCgState, CoarseCgState
from penstock.solvers.preconditioner_spec import PreconditionerSpec
from penstock.spmv import Array, InputError, Operator
from penstock.streaming import LinkRates, StreamedMatrix
from penstock.streaming.image import image_and_matrix

_PASSED_NBYTES = 256 << 20  # of the solution, from a rank to the first one at once


def runs_on_ranks(directory: Path) -> bool:
    """Return whether a results folder is of a run on ranks."""
    configuration = ResultsFolder(directory).configuration
    return configuration.exists() and read_experiment(configuration).parallel is not None


def run_on_ranks(experiment: Experiment, folder: ResultsFolder, reporter: Reporter, *, resume: bool) -> RunOutcome:
    """Run an experiment on all ranks, or resume it; only the first rank writes and reports. Collective."""
    kind = NcclCommunicator if experiment.memory.device.startswith("cuda") else MpiCommunicator
    with kind() as ranks, contextlib.ExitStack() as resources:
        if ranks.rank:
            scratch = resources.enter_context(scratch_folder("penstock-"))
            own, reporter = ResultsFolder(scratch / "rank"), Reporter()
        else:
            own = folder
        with ranks.together():
            begins = not folder.checkpoint.exists()
            if own is folder and resume:
                resources.enter_context(own.resumed())
                if begins:
                    own.remove(but=own.configuration)  # what a run left that was killed while it planned or assembled
            else:
                resources.enter_context(own.made())
                own.write_configuration(resolved(experiment))
        try:
            return RankedRun(experiment, own, reporter, ranks, folder.checkpoint).run(resume=not begins)
        except BaseException as error:
            if own is folder and begins:
                folder.remove_unless_saved(error)
            raise


class RankedRun(SingleRun):
    """One rank's part of a run; only the first rank's folder remains. All ranks resume from the same checkpoint."""

    def __init__(
        self,
        experiment: Experiment,
        folder: ResultsFolder,
        reporter: Reporter,
        ranks: MpiCommunicator,
        checkpoint: Path,
    ) -> None:
        super().__init__(experiment, folder, reporter)
        self.communicator, self.rank_count, self._checkpoint = ranks, ranks.size, checkpoint
        self.draws = self.draws and not ranks.rank
        if isinstance(ranks, NcclCommunicator):
            self.device = ranks.device
        beam = self.cantilever
        plane = beam.unknowns // beam.mesh.node_counts[0]
        self.partition = RowPartition.even(beam.unknowns, ranks.size, multiple=plane)
        self.own = self.partition.of(ranks.rank)

    def place(self, request: Request) -> Placement:
        """Plan on the first rank, for the most planes that a rank has; others follow when it has compiled the kernels."""
        self._leave_image(request)
        with self.reporter.part("plan"):
            return self._placed(request)

    def _placed(self, request: Request) -> Placement:
        """Return the decisions that all ranks make together."""
        planes = [planes_of(self.experiment, self.partition.of(rank)) for rank in range(self.rank_count)]
        counts = [part.stop - part.start for part in planes]
        streams, rates = self.experiment.memory.budget is not None, None
        with self.communicator.together():
            if streams and min(counts) < 2:
                raise InputError(
                    f"{self.rank_count} ranks are too many for {sum(counts)} planes of nodes; to stream, each needs two"
                )
            if not self.communicator.rank:
                rates = (
                    self._decide_for_ranks(max(counts), min(counts), request) if streams else self._decide_for(request)
                )
        self.experiment, rates = self.communicator.of_all((self.experiment, rates))[0]
        request = dataclasses.replace(request, precision=self.experiment.memory.precision)
        with self.communicator.together():
            own = self.experiment.of_planes(counts[self.communicator.rank]) if streams else self.experiment
            placement = place_with_image(own, request)
            placement = placement or place_experiment(self.experiment, request, plan_experiment(own, rates))
        return dataclasses.replace(placement, spec=self._preconditioner(), room_nbytes=self._room_nbytes(placement))

    def _decide_for_ranks(self, most: int, fewest: int, request: Request) -> LinkRates | None:
        """Plan for the most planes that a rank has, in no more subdivisions than those with the fewest can be cut into."""
        asked = self.experiment
        rates = self._decide_for(request, asked.of_planes(most))
        decided = self.experiment.memory
        limit = asked.of_planes(fewest).cantilever().largest_cut(decided.format)
        if asked.memory.subdivisions is None and decided.subdivisions is not None and decided.subdivisions > limit:
            self.experiment = asked.changed(memory={"format": decided.format, "subdivisions": limit})
            rates = self._decide_for(request, self.experiment.of_planes(most))
        return rates

    def _decide_for(self, request: Request, of_rank: Experiment | None = None) -> LinkRates | None:
        """Plan for the matrix, or the rows of a rank, write down the decisions, and return the rates that they rest on."""
        placement = place_with_image(of_rank or self.experiment, request)
        if placement is None:
            plan = self._planned(of_rank or self.experiment)
            placement = place_experiment(self.experiment, request, plan)
        self._settle(placement)
        return placement.plan_of_store.rates

    def _announce(self, placement: Placement) -> None:
        with self.communicator.together():  # all ranks refuse what one has no room for
            super()._announce(placement)
            placement.check_room(self.device)

    def _room_nbytes(self, placement: Placement) -> int:
        """Return the bytes for the rows of the ranks that share this device's memory."""
        nbytes = placement.plan.storage_nbytes + placement.plan.workspace_nbytes
        nbytes += 0 if placement.image is None else placement.image.plan.storage_nbytes
        sharing = self.communicator.host_ranks if self.device.kind == "cpu" else 1
        unknowns = self.cantilever.unknowns
        own, spec = self.own.stop - self.own.start, self.experiment.preconditioner
        each = spec.replicated_nbytes(unknowns)
        if self.experiment.memory.budget is not None:  # the plan is for the rows of this rank
            return sharing * (nbytes - spec.replicated_nbytes(own) + each)
        return int((nbytes - each) * min(unknowns, sharing * own) // unknowns + sharing * each)

    def _stored(self, placement: Placement, resources: contextlib.ExitStack) -> Operator | WithImage:
        """Build and open the square of this rank's rows, which is streamed; couplings and an image stay in memory."""
        # Rows of a rank may begin inside a plane of nodes: which subdivisions they couple is measured.
        plan = dataclasses.replace(placement.plan_of_store, reach=None)
        couplings = couplings_of_rank(self.experiment, self.partition, self.communicator, self.device)
        path = self._checkpoint.parent / f"{self.folder.matrix.name}-of-rank-{self.communicator.rank}"
        with self.communicator.together():
            store = open_rank_store(
                self.experiment,
                plan,
                self.own,
                self.device,
                path,
                self.reporter,
                resources,
                in_planes=placement.wants_planes,
            )
            if placement.image is None:
                with self.reporter.stage("open"):
                    square = StreamedMatrix(store, self._budget(), device=self.device, plan=plan)
            else:
                with self.reporter.stage("image"):
                    image, square = image_and_matrix(store, np.dtype(placement.precision), plan, self.device)
            resources.enter_context(square)
        A = DistributedStreamedMatrix(square, couplings, self.communicator)  # turns sweeps that made an image
        if placement.image is None:
            return A
        return WithImage(DistributedImage(image, A.couplings, self.communicator), A)

    def _traffic(self, A: Operator, state: SolverState) -> tuple[int, int]:
        """Return the sweeps of this rank, and the bytes that all ranks streamed. Collective."""
        sweeps, streamed = super()._traffic(A, state)
        return sweeps, sum(self.communicator.of_all(streamed))

    def _assembled(self) -> Operator:
        name, dtype = resident_format(self.experiment), np.dtype(self.experiment.memory.values)
        with self.communicator.together():
            rows = self.cantilever.rows(self.own.start, self.own.stop, values_dtype=dtype)
        return DistributedMatrix.from_rows(
            rows, self.partition, self.communicator, format=name, block_size=self.cantilever.dof, device=self.device
        )

    def _right_hand_sides(self) -> Array:
        return self.device.asarray(right_hand_sides(self.experiment, self.cantilever)[self.own].copy())

    def _preconditioner(self) -> PreconditionerSpec:
        """The preconditioner, with the planes of nodes of this rank."""
        mesh, size = self.cantilever.mesh, self.cantilever.dof
        planes = planes_of(self.experiment, self.own)
        counts = (planes.stop - planes.start, *mesh.node_counts[1:])
        return self.experiment.solver.spec(size).with_nodes(lambda: mesh.coordinates(planes), counts)

    def _read_checkpoint(self, unknowns: int) -> Checkpoint:
        """Read a checkpoint, which any number of ranks may have written, and take this rank's rows."""
        with self.communicator.together():
            whole = read_checkpoint(self._checkpoint, unknowns)
        if isinstance(whole.state, CoarseCgState | CoarseBlockCgState):
            # Other ranks have other aggregates.
            same = whole.ranks == self.rank_count
            whole = whole if same else dataclasses.replace(whole, state=whole.state.without_coarse_parts())
        if whole.ranks != self.rank_count:  # other ranks have larger or smaller squares, which are cut in another way
            self.experiment = self.experiment.changed(memory={"subdivisions": None, "slots": None})
        return self._with_vectors(whole, lambda rows: rows[self.own].copy())

    def _is_due(self, seconds: float) -> bool:
        """Return whether a checkpoint is due by the clock of the first rank."""
        return self.communicator.of_first(float(super()._is_due(seconds))) > 0

    def _save(self, checkpoint: Checkpoint, *, aside: bool = False) -> None:
        """Write the rows of all ranks. Collective."""
        whole = self._with_vectors(checkpoint, self.communicator.gathered)
        if self.communicator.rank == 0:
            super()._save(whole, aside=aside)

    def _with_vectors(self, checkpoint: Checkpoint, change: Any) -> Checkpoint:
        """Return a checkpoint with other vectors in its state."""
        state = checkpoint.state
        assert state is not None, "a checkpoint on disk has a state"
        changed = {name: change(vectors) for name, vectors in state.shared_vectors().items()}
        return dataclasses.replace(checkpoint, state=dataclasses.replace(state, **changed))

    def _report(self, system: OpenSystem, result: AnyResult, spent: Checkpoint) -> None:
        """Report on the first rank, to which the others pass their rows of the solution."""
        nbytes = system.decided.plan_of_store.index.nbytes  # of the whole matrix, unless each rank streams its square
        streams = self.experiment.memory.budget is not None
        self._all_nbytes = sum(self.communicator.of_all(nbytes)) if streams else nbytes
        [last] = self.partition.owners(np.array([self.partition.rows - 1]))
        own = super()._tips(result) if self.communicator.rank == last else []
        self._tips_of_last: list[float] = self.communicator.of_all(own)[last]
        if self.communicator.rank == 0:
            super()._report(system, result, spent)
        elif self.experiment.output.field:
            for _ in self._solution(result):
                pass

    def _facts(self, system: OpenSystem, result: AnyResult, spent: Checkpoint) -> dict[str, Any]:
        of_all = {"unknowns": self.cantilever.unknowns, "matrix_nbytes": self._all_nbytes}
        return super()._facts(system, result, spent) | of_all

    def _tips(self, result: AnyResult) -> list[float]:
        return self._tips_of_last

    def _solution(self, result: AnyResult) -> Iterable[Array]:
        plane = self.cantilever.unknowns // self.cantilever.mesh.node_counts[0]
        nbytes = plane * int(result.x.nbytes) // max(1, len(result.x))
        return self.communicator.passed_to_first(result.x, plane * max(1, _PASSED_NBYTES // max(1, nbytes)))
