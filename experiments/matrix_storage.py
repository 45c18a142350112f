"""Where the matrix of an experiment lives, and how it is planned to go through its memory budget."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from penstock.experiments.configuration import Experiment
from penstock.experiments.progress import Reporter
from penstock.experiments.rates import WORTH_MEASURING_NBYTES, machine_rates
from penstock.solvers import block_cg_workspace_nbytes, cg_workspace_nbytes
from penstock.spmv import CPU, BudgetError, Device, InputError, StoreError, format_nbytes
from penstock.spmv.formats.base import INT32_MAX
from penstock.streaming import (
    CUTS,
    FileStore,
    HostStore,
    LinkRates,
    MatrixIndex,
    Store,
    StreamPlan,
    index_of,
    plan_stream,
    plan_subdivisions,
    reach_of,
)

__all__ = ["measure_rates", "open_store", "plan_experiment", "resident_format", "workspace_nbytes"]

# In the order in which they are preferred when their sweeps take equally long.
_STREAMED_FORMATS = ("bsr", "sliced_bsr", "symmetric_bsr")


def plan_experiment(experiment: Experiment, rates: LinkRates | None = None) -> StreamPlan:
    """Plan an experiment without allocating anything of its size.

    Parameters
    ----------
    experiment : Experiment
    rates : LinkRates, optional
        Of this machine; without them plans are compared at typical ones, and tell no times.

    Raises
    ------
    BudgetError
        If the budget is too small; the message gives the smallest that would do.
    """
    cantilever, memory = experiment.cantilever(), experiment.memory

    @functools.cache
    def index_for(format_name: str, count: int) -> MatrixIndex:
        slabs = cantilever.outlines(count, format_name, values_dtype=np.dtype(memory.values))
        return index_of(slabs, cantilever.shape)

    return experiment.preconditioning.planned(lambda products: _plan(experiment, index_for, rates, products))


def _plan(
    experiment: Experiment, index_for: Callable[[str, int], MatrixIndex], rates: LinkRates | None, products: int
) -> StreamPlan:
    cantilever, memory = experiment.cantilever(), experiment.memory
    mesh, dof = cantilever.mesh, cantilever.dof

    def reach_for(index: MatrixIndex) -> int:
        slabs = [(part.row_start // dof, -(-part.row_stop // dof)) for part in index.subdivisions]
        # The pattern is symmetric: what couples to the left couples to the right as well.
        return reach_of(
            index.row_starts, [range(dof * nodes[0], dof * (mesh.last_neighbour(*nodes) + 1)) for nodes in slabs]
        )

    options: dict[str, Any] = {
        "workspace_nbytes": workspace_nbytes(experiment, cantilever.unknowns),
        "columns": experiment.columns,
        "products": products,
        "rates": rates,
    }
    if memory.budget is None:
        index = index_for(resident_format(experiment), 1 + cantilever.nnz // INT32_MAX)
        return plan_stream(index, index.nbytes, **options)
    options |= {"slots": memory.slots, "overlap": memory.overlap}
    if memory.store is not None and memory.store.exists():
        with FileStore(memory.store) as store:
            _check_store(store, experiment)
            return plan_stream(store.index, memory.budget, reach=reach_for(store.index), **options)
    plans, refused = [], None
    cuts: list[tuple[int, ...]] = [CUTS] if memory.subdivisions is None else [(memory.subdivisions,)]
    if memory.subdivisions is None and products > 1:
        # First of whole planes: where a format can be cut there, subdivisions couple with their neighbours only.
        planes = cantilever.mesh.node_counts[0]
        cuts.insert(0, tuple(count for count in range(1, planes + 1) if planes % count == 0))
    for format_name in _STREAMED_FORMATS if memory.format == "auto" else (memory.format,):
        for counts in cuts:
            try:
                limit = cantilever.largest_cut(format_name)
                if memory.subdivisions is not None and memory.subdivisions > limit:
                    raise InputError(
                        f"{format_name} can be cut into {limit} subdivisions at most, not {memory.subdivisions}"
                    )
                options |= {"limit": limit, "reach_for": reach_for, "counts": counts}
                plans.append(plan_subdivisions(partial(index_for, format_name), memory.budget, **options))
                break
            except (BudgetError, InputError) as error:  # another cut or format may need less
                refused = error
    if not plans:
        assert refused is not None
        raise refused
    return min(plans, key=StreamPlan.compared_seconds)


def workspace_nbytes(experiment: Experiment, unknowns: int) -> int:
    """Return the bytes of all vectors of an experiment's solve, those of the preconditioner included."""
    kind, columns = experiment.solver.preconditioner, experiment.columns
    vector = np.dtype(np.float64).itemsize * unknowns
    recorded = experiment.memory.budget is not None and Device.parse(experiment.memory.device).kind == "cuda"
    held = experiment.preconditioning.vectors(columns, recorded=recorded) * vector
    if not experiment.is_block:
        return cg_workspace_nbytes(unknowns) + held
    return block_cg_workspace_nbytes(unknowns, columns, preconditioned=kind in ("block_jacobi", "chebyshev")) + held


def resident_format(experiment: Experiment) -> str:
    """Return the format of a matrix that stays in the memory that computes."""
    return "bsr" if experiment.memory.format == "auto" else experiment.memory.format


def _store_label(experiment: Experiment) -> str:
    """Return what determines every entry of the stored matrix."""
    memory = experiment.memory
    return f"{experiment.model!r} {experiment.material!r} {memory.values}"


def _check_store(store: FileStore, experiment: Experiment) -> None:
    """Refuse a store that holds another matrix, or another cut than the experiment asks for."""
    if store.label != _store_label(experiment):
        raise InputError(f"the store {store.path} holds another matrix ({store.label}); name another memory.store")
    found, asked = store.index.format_name, experiment.memory.format
    if asked not in ("auto", found):
        raise InputError(f"the store {store.path} holds a {found} matrix instead of {asked}; name another memory.store")
    count, wanted = len(store.index.subdivisions), experiment.memory.subdivisions
    if wanted is not None and wanted != count:
        raise InputError(
            f"the store {store.path} has {count} subdivisions instead of {wanted}; name another memory.store"
        )


def measure_rates(experiment: Experiment, device: Device, directory: Path) -> LinkRates | None:
    """Return the rates of link and memory, so that a plan can tell the time of a sweep; None for what takes no time.

    Parameters
    ----------
    experiment : Experiment
    device : Device
    directory : path
        Where a store on disk would be.
    """
    nbytes = experiment.cantilever().nnz * np.dtype(experiment.memory.values).itemsize
    if experiment.memory.budget is None or nbytes < WORTH_MEASURING_NBYTES:
        return None
    store = experiment.memory.store
    return machine_rates(device, directory if store is None else _existing(store.parent))


@contextlib.contextmanager
def open_store(
    experiment: Experiment, plan: StreamPlan, device: Device, path: Path, reporter: Reporter
) -> Iterator[Store]:
    """Build the matrix where it is streamed from, or open it: on disk for the CPU, in host memory for a GPU.

    Parameters
    ----------
    experiment : Experiment
    plan : StreamPlan
        Says how it is cut.
    device : Device
        What will compute.
    path : path
        Place on disk, if ``memory.store`` names none.
    reporter : Reporter
    """
    memory, cantilever = experiment.memory, experiment.cantilever()
    count, total = len(plan.index.subdivisions), plan.index.nbytes
    slabs = cantilever.subdivisions(count, plan.index.format_name, values_dtype=np.dtype(memory.values))
    with contextlib.ExitStack() as resources:
        if device.kind == "cuda" and memory.store is None:
            with reporter.stage("assemble") as stage:

                def counted() -> Iterator[Any]:
                    for number, slab in enumerate(slabs):
                        stage.advance(number / count)
                        yield slab

                host_store = HostStore.create(counted(), cantilever.shape)
            yield resources.enter_context(host_store)
            return
        path = memory.store or path
        if not path.exists():
            _check_free_space(path, total)
            with reporter.stage("assemble") as stage:
                FileStore.create(
                    path,
                    slabs,
                    shape=cantilever.shape,
                    label=_store_label(experiment),
                    progress=lambda written: stage.advance(written / total, f"{format_nbytes(written)} written"),
                ).close()
        file_store = resources.enter_context(FileStore(path))
        _check_store(file_store, experiment)
        # A GPU streams fastest from memory; a matrix that would fill most of it comes from the disk in every sweep.
        if device.kind == "cuda" and total < CPU.free_nbytes() // 2:
            yield resources.enter_context(HostStore.from_store(file_store))
        else:
            yield file_store


def _check_free_space(path: Path, nbytes: int) -> None:
    existing = _existing(path.parent)
    free = shutil.disk_usage(existing).free
    if free < nbytes:
        raise StoreError(
            f"the matrix needs {format_nbytes(nbytes)} of disk, {existing} has {format_nbytes(free)} free; "
            "name another place as memory.store"
        )


def _existing(folder: Path) -> Path:
    """Return a folder, or the nearest one above that exists."""
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if place.exists())
