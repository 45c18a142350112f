"""Where the rows of a rank live when they are streamed: its square in a store of its own, its couplings in memory."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from penstock.distributed import Coupling, MpiCommunicator, RowPartition, columns_within, split_rows
from penstock.driver.progress import Reporter
from penstock.experiments.cantilever.configuration import Experiment
from penstock.experiments.cantilever.matrix_storage import fill_disk, fill_memory
from penstock.fem.assembly import CHUNKED_FORMATS, chunked_slab
from penstock.spmv import BsrMatrix, Device, SparseMatrix
from penstock.spmv.products.block_rows import csr_of
from penstock.streaming import MadeStore, Store, StreamPlan


def planes_of(experiment: Experiment, rows: slice) -> slice:
    """Return the planes of nodes that some rows belong to."""
    _, *across = experiment.cantilever().mesh.node_counts
    plane = experiment.model.dof * math.prod(across)
    return slice(rows.start // plane, rows.stop // plane)


def couplings_of_rank(
    experiment: Experiment, partition: RowPartition, communicator: MpiCommunicator, device: Device
) -> list[Coupling]:
    """Return a rank's couplings with its neighbours, in which only its first and its last plane have entries. Collective."""
    cantilever, dtype = experiment.cantilever(), np.dtype(experiment.memory.values)
    own, size = partition.of(communicator.rank), experiment.model.dof
    plane = size * math.prod(cantilever.mesh.node_counts[1:])
    with communicator.together():
        ends = [(own.start, own.start + plane), (own.stop - plane, own.stop)]
        if own.stop - own.start <= 2 * plane:
            ends = [(own.start, own.stop)]
        parts = [cantilever.rows(start, stop, values_dtype=dtype) for start, stop in ends]
        edges = _with_rows_between(parts, own.stop - own.start)
    _, couplings = split_rows(edges, partition, communicator, block_size=size)
    return [coupling.to_device(device) for coupling in couplings]


def _with_rows_between(parts: list[Any], rows: int) -> SparseMatrix:
    """Return the first and the last rows of a slab as a whole slab, whose other rows are empty."""
    first, last = parts[0], parts[-1]
    if len(parts) == 1:
        return first  # type: ignore[no-any-return]
    size = first.row_granularity
    between = rows // size - len(first.row_offsets) - len(last.row_offsets) + 2
    offsets = [first.row_offsets, np.full(between, first.row_offsets[-1]), first.row_offsets[-1] + last.row_offsets[1:]]
    arrays = {
        "row_offsets": np.concatenate(offsets),
        **{name: np.concatenate([part.arrays()[name] for part in parts]) for name in ("column_indices", "values")},
    }
    return BsrMatrix.from_arrays((rows, first.shape[1]), first.dtype, arrays, first.parameters())


def open_rank_store(
    experiment: Experiment,
    plan: StreamPlan,
    own: slice,
    device: Device,
    path: Path,
    reporter: Reporter,
    resources: ExitStack,
    *,
    in_planes: bool = False,
) -> Store:
    """Build a rank's square, subdivision by subdivision: in host memory for a GPU, at ``path`` on disk for a CPU.

    With ``in_planes``, values on disk are stored in two planes. Of a square that is assembled on arrival only the elements are
    kept, on the device.
    """
    if experiment.on_arrival:
        with reporter.stage("assemble"):
            planes = planes_of(experiment, own)
            return MadeStore(
                plan.index, experiment.cantilever().row_maker(plan.index.format_name, device, planes=planes)
            )
    slabs = _slabs(experiment, plan, own)
    if device.kind == "cuda":
        return resources.enter_context(fill_memory(slabs, plan.index, reporter))
    shutil.rmtree(path, ignore_errors=True)  # of a run that other ranks began
    resources.callback(shutil.rmtree, path, ignore_errors=True)
    return resources.enter_context(fill_disk(path, slabs, plan.index, "", reporter, planes=in_planes))


def _slabs(experiment: Experiment, plan: StreamPlan, own: slice) -> Iterator[SparseMatrix]:
    """Assemble the subdivisions of a rank's square, one after another."""
    cantilever, dtype, name = experiment.cantilever(), np.dtype(experiment.memory.values), plan.index.format_name
    for part in plan.index.subdivisions:
        start, stop = own.start + part.row_start, own.start + part.row_stop
        rows = cantilever.rows(start, stop, "csr" if name == "csr" else "bsr", values_dtype=dtype)
        square = columns_within(rows, own)  # type: ignore[arg-type]
        if name in CHUNKED_FORMATS:
            yield chunked_slab(csr_of(square), name, part.row_start, cantilever.dof)
        else:
            arrays = {**square.arrays(), "row_offsets": square.row_offsets.astype(np.int32)}  # as a plan expects
            yield type(square).from_arrays(square.shape, square.dtype, arrays, plan.index.parameters)
