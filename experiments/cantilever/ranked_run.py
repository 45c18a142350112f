"""A run whose system is shared out among ranks: each assembles its own rows, and the first one writes and reports."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from penstock.distributed import DistributedMatrix, MpiCommunicator, NcclCommunicator, RowPartition
from penstock.experiments.cantilever.configuration import Experiment, read_experiment
from penstock.experiments.cantilever.loads import right_hand_sides
from penstock.experiments.cantilever.matrix_storage import resident_format
from penstock.experiments.cantilever.single_run import SingleRun, resolved
from penstock.experiments.reporting.checkpoint import Checkpoint, read_checkpoint, vectors_of
from penstock.experiments.reporting.folder import ResultsFolder
from penstock.experiments.reporting.outcome import RunOutcome
from penstock.experiments.reporting.progress import Reporter
from penstock.solvers import BlockSolveResult, CoarseBlockCgState, CoarseCgState, SolveResult
from penstock.solvers.preconditioner_spec import PreconditionerSpec
from penstock.spmv import CPU, Array, Operator
from penstock.streaming import StreamPlan

__all__ = ["RankedRun", "run_on_ranks", "runs_on_ranks"]


def runs_on_ranks(directory: Path) -> bool:
    """Return whether a results folder is of a run on ranks."""
    configuration = ResultsFolder(directory).configuration
    return configuration.exists() and read_experiment(configuration).parallel is not None


def run_on_ranks(experiment: Experiment, folder: ResultsFolder, reporter: Reporter, *, resume: bool) -> RunOutcome:
    """Run an experiment on all ranks, or resume it. Collective; without a launcher there is one rank.

    Parameters
    ----------
    experiment : Experiment
    folder : ResultsFolder
        Of the first rank; others write nothing.
    reporter : Reporter
        Of the first rank.
    resume : bool
    """
    kind = NcclCommunicator if experiment.memory.device.startswith("cuda") else MpiCommunicator
    with kind() as ranks, contextlib.ExitStack() as resources:
        if ranks.rank:
            scratch = Path(resources.enter_context(tempfile.TemporaryDirectory()))
            own, reporter = ResultsFolder(scratch / "rank"), Reporter()
        else:
            own = folder
        with ranks.together():
            if not resume or ranks.rank:
                own.make()
                own.write_configuration(resolved(experiment))
        try:
            return RankedRun(experiment, own, reporter, ranks, folder.checkpoint).run(resume=resume)
        except BaseException as error:
            if own is folder and not resume:
                folder.remove_unless_checkpointed(error)
            raise


class RankedRun(SingleRun):
    """The part of a rank in a run.

    Parameters
    ----------
    experiment : Experiment
    folder : ResultsFolder
        The results folder on the first rank, elsewhere one that is removed.
    reporter : Reporter
    ranks : MpiCommunicator
    checkpoint : path
        From which all ranks resume.
    """

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
        if isinstance(ranks, NcclCommunicator):
            self.device = ranks.device
        beam = self.cantilever
        plane = beam.unknowns // beam.mesh.node_counts[0]
        self.partition = RowPartition.even(beam.unknowns, ranks.size, multiple=plane)
        self.own = self.partition.of(ranks.rank)

    def _plan(self) -> StreamPlan:
        """Plan; other ranks follow when the first one has compiled the kernels."""
        if self.communicator.rank:
            self.communicator.barrier()
        plan = super()._plan()
        if not self.communicator.rank:
            self.communicator.barrier()
        return plan

    def _check_room(self, nbytes: int) -> None:
        """Check the room for the rows of the ranks that share this device's memory."""
        sharing, unknowns = (self.communicator.host_ranks if self.device.kind == "cpu" else 1), self.cantilever.unknowns
        rows = min(unknowns, sharing * (self.own.stop - self.own.start))
        each = self.experiment.preconditioner.replicated_nbytes(unknowns)
        with self.communicator.together():
            super()._check_room((nbytes - each) * rows // unknowns + sharing * each)

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
        _, *across = mesh.node_counts
        plane = size * math.prod(across)
        planes = slice(self.own.start // plane, self.own.stop // plane)
        counts = (planes.stop - planes.start, *across)
        return self.experiment.solver.spec(size).with_nodes(lambda: mesh.coordinates(planes), counts)

    def _read_checkpoint(self) -> Checkpoint:
        """Read a checkpoint, which any number of ranks may have written, and take this rank's rows."""
        with self.communicator.together():
            whole = read_checkpoint(self._checkpoint, self.cantilever.unknowns, CPU)
        if isinstance(whole.state, CoarseCgState | CoarseBlockCgState):
            # Other ranks have other aggregates.
            same = whole.ranks == self.rank_count
            state = whole.state.on(self.device) if same else whole.state.without_coarse_parts()
            whole = dataclasses.replace(whole, state=state)
        return self._with_vectors(whole, lambda rows: self.device.asarray(rows[self.own].copy()))

    def _is_due(self, seconds: float) -> bool:
        """Return what the first rank's clock says."""
        return self.communicator.of_first(float(super()._is_due(seconds))) > 0

    def _save(self, checkpoint: Checkpoint) -> None:
        """Write the rows of all ranks. Collective."""
        whole = self._with_vectors(checkpoint, self.communicator.gathered)
        if self.communicator.rank == 0:
            super()._save(whole)

    def _with_vectors(self, checkpoint: Checkpoint, change: Any) -> Checkpoint:
        """Return a checkpoint with other vectors in its state."""
        state = checkpoint.state
        assert state is not None, "a checkpoint on disk has a state"
        changed = {name: change(vectors) for name, vectors in vectors_of(state).items()}
        return dataclasses.replace(checkpoint, state=dataclasses.replace(state, **changed))

    def _report(
        self, A: Operator, plan: StreamPlan, result: SolveResult | BlockSolveResult, spent: Checkpoint, before: float
    ) -> None:
        """Report on the first rank, with the rows of all."""
        x = self.communicator.gathered(result.x)
        if self.communicator.rank == 0:
            super()._report(A, plan, dataclasses.replace(result, x=x), spent, before)
