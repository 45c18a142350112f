"""Where the matrix of an experiment lives, and how it is planned to go through its memory budget."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from penstock.driver.image_placement import IMAGE_PRECISIONS, image_is_wanted, place_image, refuse_without_image
from penstock.driver.modes_search import modes_method
from penstock.driver.opening import write_store
from penstock.driver.placement import solve_candidates
from penstock.driver.progress import Reporter
from penstock.driver.request import Placement, Request, Vectors
from penstock.experiments.cantilever.configuration import Experiment
from penstock.fem.assembly import ASSEMBLED_FORMATS
from penstock.solvers import PreconditionerSpec, block_cg_workspace_nbytes
from penstock.spmv import BudgetError, Device, InputError, StoreError, format_named, format_nbytes
from penstock.spmv.formats.limits import INT32_MAX
from penstock.streaming import (
    CUTS,
    Candidate,
    FileStore,
    HostStore,
    LinkRates,
    MadeStore,
    MatrixIndex,
    Ring,
    Store,
    StreamPlan,
    choose,
    index_of,
    plan_stream,
    reach_of,
)
from penstock.streaming.measurement.rates import WORTH_MEASURING_NBYTES, machine_rates

# A format with this many times the bytes of another one is not tried beside it.
_MANY_MORE = 1.5


def plan_experiment(experiment: Experiment, rates: LinkRates | None = None, *, solves: int | None = None) -> StreamPlan:
    """Plan an experiment without allocating anything of its size; needs neither its device nor the matrix.

    Parameters
    ----------
    experiment : Experiment
    rates : LinkRates, optional
        Of this machine; without them plans are compared at typical rates and predict no times.
    solves : int, optional
        For which the system is opened; by default one, or one for each sample of the material.

    Raises
    ------
    BudgetError
        If the budget is too small; the message gives the smallest that would do.

    Examples
    --------
    >>> from penstock.experiments import Experiment, plan_experiment
    >>> experiment = Experiment(model={"nodes": 64}, memory={"budget": "64 MiB", "subdivisions": 64})
    >>> plan = plan_experiment(experiment)
    >>> plan.slots, plan.storage_nbytes <= 64 << 20
    (3, True)
    """
    cantilever, memory, request = experiment.cantilever(), experiment.memory, request_of(experiment)
    request = replace(request, solves=solves or request.solves)
    spec = request.preconditioner
    workload = functools.partial(_vectors(experiment, request).workload, request)
    if rates is not None and experiment.on_arrival:
        rates = rates.on_arrival()
    if memory.budget is None:
        index = _symbolic_index(experiment, resident_format(experiment), 1 + cantilever.nnz // INT32_MAX)
        [degree] = spec.products_per_iteration(streamed=False)
        return plan_stream(index, index.nbytes, workload(spec, degree), rates=rates)
    if spec.needs_entries:
        raise InputError(
            f"the preconditioner {spec.name} needs the whole matrix in memory, and one with a budget is streamed; leave out "
            "memory.budget, or choose chebyshev or smoothed_aggregation"
        )
    ring = _ring(experiment)
    if (stored := _stored_index(experiment)) is not None:
        reach = _reach(experiment, stored)
        degrees = spec.products_per_iteration(streamed=stored.nbytes > memory.budget)
        candidates: Iterable[Candidate] = (Candidate(stored, workload(spec, degree), reach) for degree in degrees)
        return choose(candidates, memory.budget, ring, rates=rates)
    plans: list[StreamPlan] = []
    refused: Exception = InputError("no format fits")
    for format_name, is_large in _formats(experiment):
        if is_large and plans:
            continue
        for counts in _cuts(experiment, format_name):
            try:
                candidates = solve_candidates(
                    functools.partial(_symbolic_index, experiment, format_name),
                    counts,
                    [spec],
                    workload,
                    functools.partial(_reach, experiment),
                )
                plans.append(choose(candidates, memory.budget, ring, rates=rates))
                break
            except (BudgetError, InputError) as error:  # another cut or format may need less
                refused = refused if is_large else error
    if not plans:
        raise refused
    plan = min(plans, key=StreamPlan.estimated_solve_seconds)
    if plan.slots:
        return plan
    [degree] = spec.products_per_iteration(streamed=False)  # it fits as a whole
    return plan_stream(plan.index, memory.budget, workload(spec, degree), ring, rates=rates)


def request_of(experiment: Experiment, device: Device | None = None) -> Request:
    """Return what an experiment asks for; by default of a device that this machine need not have."""
    memory = experiment.memory
    kind, _, number = memory.device.partition(":")
    return Request(
        device or Device(cast(Any, kind), int(number or 0)),
        experiment.columns,
        memory.budget,
        experiment.preconditioner,
        experiment.model.dof,
        method=modes_method(experiment.mass_nbytes) if experiment.analysis.is_modes else experiment.solver.method,
        one_block=experiment.is_block,
        resident=memory.budget is None,
        precision=memory.precision,
        solves=experiment.material.samples or 1,
    )


def place_experiment(experiment: Experiment, request: Request, plan: StreamPlan) -> Placement:
    """Return the decisions that go with a plan, and what the first sweeps may still change."""
    cantilever, memory, spec = experiment.cantilever(), experiment.memory, request.preconditioner
    vectors = _vectors(experiment, request)
    choices = vectors.choices(request, [spec])
    if memory.slots is not None and len(choices) == 1:
        choices = ()  # nothing is left to choose
    how: dict[str, Any] = {"choices": choices, "ring": _ring(experiment), "method": request.chosen_method.label}
    if memory.budget is not None:
        spec = spec.with_products(plan.workload.degree)
    how["is_definite"] = True
    return Placement(plan, spec, vectors.together, vectors.solver_nbytes, cantilever.nnz, (), **how)


def place_with_image(experiment: Experiment, request: Request) -> Placement | None:
    """Return the decisions for iterations with an image in fewer digits; None where the matrix fits, or no image does.

    Raises
    ------
    InputError, BudgetError
        If the precision is float32 or int16, and the matrix has no such image or no room for it.
    """
    cantilever, memory = experiment.cantilever(), experiment.memory
    if memory.budget is None or request.precision == "float64":
        return None
    if experiment.on_arrival and request.precision not in IMAGE_PRECISIONS:
        return None  # what an image saves is the link
    # A configuration refuses this, but a variant of one is not checked again.
    if memory.devices is not None or memory.values != "float64":
        raise InputError("images are of float64, and of matrices that one device multiplies by; leave out precision")
    if not image_is_wanted(request, np.dtype(memory.values)):
        refuse_without_image(request, None)
        return None
    name = "symmetric_bsr" if memory.format == "auto" else memory.format
    stored = _stored_index(experiment)

    def index_for(cut: int) -> MatrixIndex:
        return _symbolic_index(experiment, name, cut) if stored is None else stored

    if stored is None:
        cuts = sorted({cut for of_kind in _cuts(experiment, name) for cut in of_kind})
    else:
        cuts = [len(stored.subdivisions)]
    index = index_for(cuts[0])
    if request.precision not in IMAGE_PRECISIONS and index.nbytes <= memory.budget:
        return None
    placed = place_image(
        index_for,
        cuts,
        (index.nbytes, index.part_nbytes("values")),
        request,
        [request.preconditioner],
        _vectors(experiment, request),
        cantilever.nnz,
        ring=_ring(experiment),
    )
    if placed is None:
        refuse_without_image(request, index)
        return None
    return replace(placed, is_definite=True)


def _stored_index(experiment: Experiment) -> MatrixIndex | None:
    """Return how the matrix is stored where an earlier run has left it in ``memory.store``, or None."""
    path = experiment.memory.store
    if path is None or not path.exists():
        return None
    with FileStore(path) as store:
        _check_store(store, experiment)
        return store.index


def _ring(experiment: Experiment) -> Ring:
    memory = experiment.memory
    return Ring(slots=memory.slots, overlap=memory.overlap, on_arrival=experiment.on_arrival)


def _vectors(experiment: Experiment, request: Request) -> Vectors:
    """Return the vectors of all right-hand sides, which are solved together, and the elements if they lie beside these."""
    cantilever = experiment.cantilever()
    beside = (("the elements", cantilever.elements_nbytes),) if experiment.on_arrival and request.memory else ()
    return _vectors_of(request, cantilever.unknowns, beside)


def _vectors_of(request: Request, unknowns: int, beside: tuple[tuple[str, int], ...] = ()) -> Vectors:
    columns, method = request.columns, request.chosen_method
    if request.one_block and method.definite:
        nbytes = block_cg_workspace_nbytes(unknowns, columns, preconditioned=request.preconditioner.writes_vector)
    else:
        nbytes = method.workspace_nbytes(unknowns, columns, np.float64)
    return Vectors(columns, nbytes, unknowns, np.float64, beside)


def workspace_nbytes(experiment: Experiment, spec: PreconditionerSpec, unknowns: int) -> int:
    """Return the bytes of all vectors of an experiment's solve."""
    request = request_of(experiment)
    return _vectors_of(request, unknowns).nbytes(request, spec)


def _symbolic_index(experiment: Experiment, format_name: str, count: int) -> MatrixIndex:
    """Return the index of the matrix in a number of subdivisions, without assembling it."""
    cantilever, dtype = experiment.cantilever(), np.dtype(experiment.memory.values)
    return index_of(cantilever.symbolic_slabs(count, format_name, values_dtype=dtype), cantilever.shape)


def _formats(experiment: Experiment) -> list[tuple[str, bool]]:
    """Return the formats in which the matrix may be streamed, and whether others have far fewer bytes, which come first."""
    if experiment.memory.format != "auto":
        return [(experiment.memory.format, False)]
    names = [name for name in ASSEMBLED_FORMATS if format_named(name).traits.streams]
    cantilever = experiment.cantilever()
    count = 1 + cantilever.nnz // INT32_MAX
    nbytes = {
        name: _symbolic_index(experiment, name, min(count, cantilever.largest_cut(name))).nbytes for name in names
    }
    large = {name: nbytes[name] > _MANY_MORE * min(nbytes.values()) for name in names}
    return sorted(large.items(), key=lambda of: of[1])


def _cuts(experiment: Experiment, format_name: str) -> Iterator[tuple[int, ...]]:
    """Yield numbers of subdivisions to try; the second ones only if none of the first fits."""
    cantilever, wanted = experiment.cantilever(), experiment.memory.subdivisions
    limit = cantilever.largest_cut(format_name)
    if wanted is not None:
        if wanted > limit:
            raise InputError(f"{format_name} can be cut into {limit} subdivisions at most, not {wanted}")
        yield (wanted,)
        return
    if max(experiment.preconditioner.products_per_iteration(streamed=True)) > 1:
        # Whole planes of nodes couple with their neighbours only, in a format that can be cut there; so do rows of two planes and
        # more, wherever they are cut.
        planes = cantilever.mesh.node_counts[0]
        whole = {count for count in range(1, planes + 1) if planes % count == 0}
        yield tuple(
            sorted({min(count, limit) for count in whole.union(count for count in CUTS if 2 * count <= planes)})
        )
    yield tuple(sorted({min(count, limit) for count in CUTS}))


def _reach(experiment: Experiment, index: MatrixIndex) -> int:
    """Return the reach of a cut. The pattern is symmetric: a coupling to the left is one to the right as well."""
    cantilever, dof = experiment.cantilever(), experiment.cantilever().dof
    slabs = [(part.row_start // dof, -(-part.row_stop // dof)) for part in index.subdivisions]
    columns = [range(dof * nodes[0], dof * (cantilever.mesh.last_neighbour(*nodes) + 1)) for nodes in slabs]
    return reach_of(index.row_starts, columns)


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
    actual, requested = store.index.format_name, experiment.memory.format
    if requested not in ("auto", actual):
        raise InputError(
            f"the store {store.path} holds a {actual} matrix instead of {requested}; name another memory.store"
        )
    count, wanted = len(store.index.subdivisions), experiment.memory.subdivisions
    if wanted is not None and wanted != count:
        raise InputError(
            f"the store {store.path} has {count} subdivisions instead of {wanted}; name another memory.store"
        )


def measure_rates(experiment: Experiment, device: Device, directory: Path) -> LinkRates | None:
    """Return the measured rates of link and memory for the time estimates of a plan; None where there is nothing to estimate."""
    nbytes = experiment.cantilever().nnz * np.dtype(experiment.memory.values).itemsize
    if experiment.memory.budget is None or nbytes < WORTH_MEASURING_NBYTES:
        return None
    return machine_rates(device, streams_from(experiment, directory))


def streams_from(experiment: Experiment, directory: Path) -> Path:
    """Return a folder on the disk from which the matrix is streamed; ``directory`` if ``memory.store`` names none."""
    store = experiment.memory.store
    return directory if store is None else _existing(store.parent)


def open_store(
    experiment: Experiment, plan: StreamPlan, device: Device, path: Path, reporter: Reporter, *, planes: bool = False
) -> Store:
    """Build the matrix where it is streamed from, or open it: on disk for the CPU, in host memory for a GPU, or nowhere.

    ``path`` is the place on disk if ``memory.store`` names none; with ``planes`` values are stored in two planes there.
    """
    memory, cantilever, index = experiment.memory, experiment.cantilever(), plan.index
    if experiment.on_arrival:
        with reporter.stage("assemble"):
            return MadeStore(index, cantilever.row_maker(index.format_name, device))
    slabs = cantilever.subdivisions(len(index.subdivisions), index.format_name, values_dtype=np.dtype(memory.values))
    if device.kind == "cuda" and memory.store is None:
        return fill_memory(slabs, index, reporter)
    path = memory.store or path
    if not path.exists():
        fill_disk(path, slabs, index, _store_label(experiment), reporter, planes=planes).close()
    store = FileStore(path)
    _check_store(store, experiment)
    return store


def fill_memory(slabs: Iterable[Any], index: MatrixIndex, reporter: Reporter) -> HostStore:
    """Build a matrix that is planned like ``index`` in host memory."""
    with reporter.stage("assemble") as stage:

        def counted() -> Iterator[Any]:
            for number, slab in enumerate(slabs):
                stage.advance(number / len(index.subdivisions))
                yield slab

        return HostStore.create(counted(), index.shape)


def fill_disk(
    path: Path, slabs: Iterable[Any], index: MatrixIndex, label: str, reporter: Reporter, *, planes: bool = False
) -> FileStore:
    """Build a matrix that is planned like ``index`` on disk, if it has room there."""
    existing = _existing(path.parent)
    free = shutil.disk_usage(existing).free
    if free < index.nbytes:
        raise StoreError(
            f"the matrix needs {format_nbytes(index.nbytes)} of disk, {existing} has {format_nbytes(free)} free; "
            "name another place as memory.store"
        )
    with reporter.stage("assemble") as stage:
        return write_store(path, slabs, index, label, stage, planes=planes)


def _existing(folder: Path) -> Path:
    """Return a folder, or the nearest one above that exists."""
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if place.exists())
