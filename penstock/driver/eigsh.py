"""``penstock.eigsh``: the lowest modes of ``K x = lambda M x``, whether or not K fits the memory of the device.

>>> import penstock
>>> from penstock.fem import Cantilever
>>> beam = Cantilever(nodes=(9, 3, 3), dof=3)
>>> modes = penstock.eigsh(beam.matrix(), 3, beam.mass(), device="cpu")
>>> modes.converged, modes.frequencies.round(4).tolist()
(True, [0.042, 0.042, 0.1553])
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

import numpy as np

from penstock.driver.argument_checks import checked_failure, checked_options, unknowns_of_a_node
from penstock.driver.inputs import GivenMatrix, as_given_matrix
from penstock.driver.made_matrix import with_coordinates
from penstock.driver.open_system import OpenSystem
from penstock.driver.opening import open_system
from penstock.driver.progress import CallClock, Reporter, RichReporter, Stage, time_facts
from penstock.driver.request import Request
from penstock.solvers import MethodChoice, SmoothedAggregation, SmoothedAggregationSpec
from penstock.solvers.amg.modes import check_shape_of_modes
from penstock.solvers.eigen.dense import dense_modes, massless_error
from penstock.solvers.eigen.mass import LumpedMass, Mass, as_mass, mass_norms
from penstock.solvers.eigen.modes import (
    LowestModes,
    ModesRecord,
    block_columns,
    lowest_modes,
    workspace_nbytes,
)
from penstock.solvers.eigen.result import Modes, ModesReason, of_translations, with_fixed_signs
from penstock.spmv import (
    CPU,
    Array,
    Device,
    InputError,
    NotConvergedWarning,
    SweptOperator,
    format_nbytes,
    parse_nbytes,
)
from penstock.spmv.device import count_true
from penstock.streaming.stores.whole import read_whole

# Up to this many unknowns the problem is dense; up to the second number if the block would be a large part of all vectors.
_DENSE_ROWS, _MOST_DENSE_ROWS, _LARGE_PART = 1200, 6000, 4
# Nodes of an aggregate, the first that give the coarse level at least this many unknowns for a vector of the block.
_AGGREGATE_NODES, _COARSE_SHARE = (125, 64, 27, 8), 4
# A block iterates this many vectors at most, and at least; more modes are found block after block.
_LARGEST_BLOCK, _LEAST_BLOCK = 256, 4

Monitor = Callable[[ModesRecord], object]


def eigsh(
    K: Any,
    k: int = 10,
    M: Any = None,
    *,
    which: str = "SM",
    tol: float = 1e-6,
    maxiter: int = 200,
    device: str = "auto",
    memory: int | str | None = None,
    preconditioner: Any = "auto",
    block_size: int | Literal["auto"] = "auto",
    near_null_space: Any = None,
    coordinates: Any = None,
    monitor: Monitor | None = None,
    progress: bool = False,
    folder: str | Path | None = None,
    on_failure: Literal["warn", "return", "raise"] = "warn",
) -> Modes:
    """Return the k lowest eigenvalues and eigenvectors of ``K x = lambda M x``, K symmetric and not indefinite.

    An iteration is one pass over K and M; ten modes take about 10 to 25 of them, at any size. K is streamed where it does not
    fit; M and 14 vectors for each vector of the block (those of the modes, and a third more) are in memory. Free bodies are
    recognised: their motions without energy are the first modes. At the end random vectors look for modes that were missed,
    which finds them with high probability, but proves nothing.

    Parameters
    ----------
    K : matrix
        As for :func:`penstock.solve`: stiffness. Positive definite, or semidefinite as of a free body.
    k : int
    M : None, array (n,), sparse matrix or NodeMatrix
        Mass: the identity, a diagonal, or a symmetric positive definite matrix that couples no unknowns that K does not couple.
        Unknowns without mass are refused, unless K does not couple them with others, as it does not fixed ones.
    which : {"SM"}
        For the interface of SciPy: the smallest.
    tol : float
        Converged means ``||K x - lambda M x|| <= tol lambda ||M x||`` for each mode. Eigenvalues are then accurate to about the
        square of that, relative to gaps.
    maxiter : int
        Iterations of a block at most.
    device, memory, block_size, near_null_space, coordinates, folder : optional
        As for :func:`penstock.solve`. Coordinates, or the near-null space, make the coarse level of elastic bodies: without them
        it knows no rotations and several times as many iterations are needed.
    preconditioner : "auto" or SmoothedAggregationSpec
    monitor : callable, optional
        ``monitor(record)`` after each pass, with a :class:`~penstock.solvers.ModesRecord`; ends the search if it returns True.
    progress : bool, to show progress on the terminal or in the notebook
    on_failure : {"warn", "return", "raise"}
        What happens if a mode does not converge, as for :func:`penstock.solve`.

    Returns
    -------
    Modes
        Up to 1,200 unknowns are left to LAPACK.

    Raises
    ------
    InputError
        If an argument does not fit; BudgetError or DeviceError as for :func:`penstock.solve`.

    Notes
    -----
    Block LOBPCG (Knyazev 2001; Duersch, Shao, Yang and Gu 2018) whose coarse level is treated inside the Rayleigh-Ritz step; see
    :mod:`penstock.solvers.eigen.lobpcg`.

    Examples
    --------
    >>> import numpy as np, penstock, scipy.sparse
    >>> K = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(50, 50))
    >>> values, vectors = penstock.eigsh(K, 2, device="cpu")
    >>> np.allclose(values, 4 * np.sin(np.pi * np.arange(1, 3) / 102) ** 2), vectors.shape
    (True, (50, 2))
    """
    checked_failure(on_failure)
    _check_numbers(k, tol, maxiter, which, monitor)
    options = checked_options(device, "auto", block_size, folder, near_null_space, coordinates)
    clock = CallClock(RichReporter.on_terminal() if progress else Reporter())
    with clock.running():
        with clock.part("read"):
            given = as_given_matrix(K)
        if given.kind == "elements":
            options = with_coordinates(given.matrix, "auto", "auto", options)
        if k > given.rows:
            raise InputError(f"k must be at most the {given.rows} unknowns, not {k}")
        search = _Search(int(k), M, float(tol), int(maxiter), monitor, clock)
        if (small := _entries_of_small(given, int(k))) is not None:
            modes = search.densely(small, _unknowns(given, block_size, options))
        else:
            request = _request(given, int(k), M, device, memory, preconditioner, block_size, options)
            with open_system(given, request, folder=folder, reporter=clock) as system:
                modes = search.iteratively(system)
    return _judged(search.explained(modes), on_failure)


def eigsh_of_system(
    system: OpenSystem,
    clock: CallClock,
    k: int,
    M: Any,
    *,
    which: str = "SM",
    tol: float = 1e-6,
    maxiter: int = 200,
    monitor: Monitor | None = None,
    on_failure: Literal["warn", "return", "raise"] = "warn",
) -> Modes:
    """Return the modes of a system that is open; parameters are those of :func:`eigsh`."""
    checked_failure(on_failure)
    _check_numbers(k, tol, maxiter, which, monitor)
    n = system.A.shape[0]
    if not _LARGE_PART * block_columns(k, "cpu") <= n:
        raise InputError(
            f"k = {k} is too large a part of {n} modes for iterations; penstock.eigsh leaves small problems to LAPACK"
        )
    search = _Search(int(k), M, float(tol), int(maxiter), monitor, clock)
    with system.A.device.current():
        modes = search.iteratively(system)
    return _judged(search.explained(modes), on_failure)


def _check_numbers(k: Any, tol: Any, maxiter: Any, which: Any, monitor: Any) -> None:
    if isinstance(k, bool) or not isinstance(k, Integral) or k < 1:
        raise InputError(f"k must be a whole number of modes, 1 or more, not {k!r}")
    if isinstance(tol, bool) or not isinstance(tol, Real) or not 0 < float(tol) < 1:
        raise InputError(f"tol must be a number between 0 and 1, not {tol!r}")
    if isinstance(maxiter, bool) or not isinstance(maxiter, Integral) or maxiter < 1:
        raise InputError(f"maxiter must be a whole number, 1 or more, not {maxiter!r}")
    if which not in ("SM", "SA"):
        raise InputError(f"which must be 'SM', the smallest eigenvalues, not {which!r}: others are not looked for")
    if not (monitor is None or callable(monitor)):
        raise InputError(f"monitor must be a function of a ModesRecord, not {monitor!r}")


def _entries_of_small(given: GivenMatrix, k: int) -> Any:
    """Return K in SciPy's CSR if the problem is dense for us, else None."""
    n, block = given.rows, block_columns(k, "cpu")
    dense = n <= _DENSE_ROWS or _LARGE_PART * block > n
    if not dense or given.kind in ("operator", "source"):
        return None
    if n > _MOST_DENSE_ROWS:
        raise InputError(f"k = {k} is too large a part of the {n} modes: at most {n // 6} are found by iterations")
    if given.kind == "store":
        return read_whole(given.matrix)
    if given.kind == "elements":
        return given.matrix.matrix("bsr", device="cpu").to_csr()
    return given.checked(given.matrix.to_device(CPU)).matrix.to_csr() if given.kind == "csr" else given.matrix.to_csr()


def _unknowns(given: GivenMatrix, block_size: int | Literal["auto"], options: dict[str, Any]) -> int:
    """Return the unknowns of a node as far as they are known at once; 1 if not."""
    size = unknowns_of_a_node(given.rows, block_size, options.get("coordinates"))
    if size != "auto":
        return int(size)
    return int(getattr(given.matrix, "row_granularity", 1)) if given.kind == "format" else 1


def _request(
    given: GivenMatrix,
    k: int,
    M: Any,
    device: str,
    memory: int | str | None,
    preconditioner: Any,
    block_size: int | Literal["auto"],
    options: dict[str, Any],
) -> Request:
    """Return what is asked of the opening: a coarse level, and room for M and the vectors of the block."""
    place = given.find_device(device)
    columns = block_columns(k, place.kind)
    if (modes := options.get("near_null_space")) is not None:
        check_shape_of_modes(np.shape(modes), given.rows)
    if isinstance(preconditioner, SmoothedAggregationSpec):
        spec = preconditioner
        if options:
            raise InputError(
                "coordinates and near_null_space are options of the preconditioner's specification; give them there"
            )
    elif preconditioner in ("auto", "smoothed_aggregation"):
        spec = SmoothedAggregationSpec(aggregate_nodes=_aggregate_nodes(given, columns, block_size, options), **options)
    else:
        raise InputError(
            f"preconditioner must be 'auto' or a SmoothedAggregationSpec, as modes need a coarse level, not {preconditioner!r}"
        )
    if block_size == "auto" and spec.block_size != 1:
        block_size = spec.block_size
    coordinates = None if callable(spec.coordinates) else spec.coordinates
    block_size = unknowns_of_a_node(given.rows, block_size, coordinates)
    of_mass = _mass_nbytes(M, given.rows)
    method = MethodChoice(
        "block LOBPCG",
        _refuse_to_solve,
        lambda n, count, dtype: workspace_nbytes(n, count, dtype) + of_mass,
        largest_block=_LARGEST_BLOCK,
    )
    room = None if memory is None else parse_nbytes(memory)
    return Request(place, columns, room, spec, block_size, options, given.name, method=method, precision="float64")


def _refuse_to_solve(*_: Any, **__: Any) -> Any:
    raise InputError("modes are found by penstock.eigsh")


def _mass_nbytes(M: Any, n: int) -> int:
    """Return the bytes of M on the device, about, before it is converted."""
    if hasattr(M, "nnz"):
        return 12 * int(M.nnz)
    return int(getattr(M, "nbytes", 8 * n))


def _aggregate_nodes(
    given: GivenMatrix, columns: int, block_size: int | Literal["auto"], options: dict[str, Any]
) -> int | Literal["auto"]:
    """Return the nodes of an aggregate with which the coarse level has unknowns enough for the block; "auto" of large systems."""
    size = _unknowns(given, block_size, options)
    points, modes = options.get("coordinates"), options.get("near_null_space")
    of_aggregate = size
    if modes is not None:
        of_aggregate = 1 if np.ndim(modes) == 1 else int(np.shape(modes)[1])
    elif points is not None and size > 1:
        of_aggregate = 6 if np.shape(points)[1] == 3 else 3
    nodes = given.rows // size
    for count in _AGGREGATE_NODES:
        if nodes // count * of_aggregate >= _COARSE_SHARE * columns:
            break
    return "auto" if count == _AGGREGATE_NODES[0] else count


@dataclass
class _Search:
    """One call: what is looked for, and the clock of its parts."""

    k: int
    M: Any
    tol: float
    maxiter: int
    monitor: Monitor | None
    clock: CallClock

    def densely(self, K: Any, unknowns: int) -> Modes:
        """Leave a small problem to LAPACK."""
        n = K.shape[0]
        began = time.perf_counter()
        with self.clock.stage("solve"):
            mass = as_mass(self.M, n, unknowns, CPU)
            found = dense_modes(K, mass.to_csr(), self.k)
            low = np.maximum(np.abs(found.values), np.abs(found.values[found.zeros :]).min(initial=np.inf))
            low = np.where(np.isfinite(low), low, 1.0)
            norms = [np.linalg.norm(of, axis=0) for of in (found.differences, found.of_mass)]
            lowest = LowestModes(
                found.values, found.vectors, found.of_mass, norms[0] / (low * norms[1]),
                mass_norms(mass, np.ascontiguousarray(found.differences)), found.zeros, "converged", 0, found.next_value,
            )  # fmt: skip
            modes = _modes(lowest, mass, unknowns, time.perf_counter() - began)
        facts = {
            "matrix": f"{n:,} x {n:,}, {K.nnz:,} entries, used as a dense one",
            "solver": f"LAPACK, as the problem has only {n:,} unknowns",
            "device": str(CPU),
        }
        return replace(modes, decisions="\n".join(f"{title:<11} {text}" for title, text in facts.items()))

    def iteratively(self, system: OpenSystem) -> Modes:
        """Find the modes of a system that is open, by iterations with its coarse level."""
        K, began = system.matrix, time.perf_counter()
        swept = K if isinstance(K, SweptOperator) else None
        before = (0, 0) if swept is None else (swept.sweeps, swept.bytes_streamed)
        M = self._coarse_level(system)
        unknowns = M.level.T.block_size
        with self.clock.part("convert"):
            mass = as_mass(self._in_order(system), K.shape[0], unknowns, K.device)
            _check_massless(K.device, mass, M)
        block = _block(system, self.k)
        with self.clock.stage("solve") as stage:
            found = lowest_modes(
                K, mass, M, self.k, tol=self.tol, maxiter=self.maxiter, block=block, monitor=partial(self._watch, stage)
            )
            modes = _modes(found, mass, unknowns, time.perf_counter() - began)
        if swept is not None:
            modes = replace(modes, sweeps=swept.sweeps, bytes_streamed=swept.bytes_streamed - before[1])
        facts = [*system.explain(), f"{'mass':<11} {_described(mass)}"]
        if block < (wanted := block_columns(self.k, K.device.kind)):
            facts.append(f"{'blocks':<11} {block} vectors at a time, for which there is room, instead of {wanted}")
        return replace(modes, vectors=_back(system, modes.vectors), decisions="\n".join(facts))

    def _coarse_level(self, system: OpenSystem) -> SmoothedAggregation:
        M = system.preconditioner() if system.streamed is None else None
        if isinstance(M, SmoothedAggregation):
            return M
        known = {name: of for name, of in system.request.options.items() if name in ("coordinates", "near_null_space")}
        size = system.request.block_size
        if size == "auto":
            size = 1 if system.placement is None else system.placement.spec.block_size
        spec: Any = SmoothedAggregationSpec(block_size=size, **known)
        if system.order is not None:
            spec = spec.in_order(system.order.forward)
        with system.reporter.stage("prepare"), system.A.device.current():
            made: SmoothedAggregation = spec.build(system.matrix)
        return made

    def _in_order(self, system: OpenSystem) -> Any:
        """Return M in the order of the rows in which K is stored."""
        order, M = system.order, self.M
        if order is None or M is None:
            return M
        diagonal = np.ndim(M) == 1 and not hasattr(M, "nnz")
        if diagonal:
            return order.forward(CPU.asarray(M) if not hasattr(M, "get") else M.get())
        matrix = as_mass(M, system.A.shape[0], 1, CPU).to_csr()
        return order.matrix(matrix)

    def _watch(self, stage: Stage, record: ModesRecord) -> bool:
        worst = float(record.residuals.max(initial=0.0))
        share = (record.found + float((record.residuals <= self.tol).sum())) / self.k
        if worst > self.tol and math.isfinite(worst):
            share = max(share, math.log(max(worst, 1e-300)) / math.log(self.tol)) if worst < 1 else share
        done = record.found + int((record.residuals <= self.tol).sum())
        stage.advance(min(share, 1.0), f"iteration {record.iteration}, {done} of {self.k} modes, residual {worst:.2e}")
        return self.monitor is not None and bool(self.monitor(record))

    def explained(self, modes: Modes) -> Modes:
        """Add to the modes what the call has cost."""
        cost, parts = f"found in {self.clock.seconds:.3g} s", self.clock.take()
        decisions = "\n".join([modes.decisions, *time_facts(cost, parts)])
        return replace(modes, decisions=decisions, timings={**modes.timings, **parts})


def _block(system: OpenSystem, k: int) -> int:
    """Return the vectors that iterate together: those that were planned, or those for which half of the free memory has room."""
    K, placement = system.matrix, system.placement
    if placement is not None and isinstance(system.request.method, MethodChoice):
        return placement.together
    each = workspace_nbytes(K.shape[0], 1)
    return int(max(_LEAST_BLOCK, min(block_columns(k, K.device.kind), K.device.free_nbytes() // 2 // each)))


def _described(mass: Mass) -> str:
    kind = "a diagonal" if isinstance(mass, LumpedMass) else "a sparse matrix"
    return f"{kind} of {format_nbytes(mass.nbytes)}, in memory"


def _check_massless(device: Device, mass: Mass, M: SmoothedAggregation) -> None:
    """Refuse unknowns without mass that K couples with others: those of which the coarse level has motions."""
    massless = mass.diagonal() == 0
    if not count_true(massless):
        return
    T, xp = M.level.T, device.xp
    moved = xp.zeros(mass.shape[0])
    for mode in range(T.modes):
        coarse = xp.zeros(T.unknowns)
        coarse[mode :: T.modes] = 1.0
        motion = xp.zeros(mass.shape[0])
        T.prolong(coarse, motion)
        moved += xp.abs(motion)
    if coupled := int(count_true(massless & (moved > 0))):
        raise massless_error(coupled)


def _back(system: OpenSystem, vectors: Array) -> Array:
    """Return vectors where K lives, in the caller's order."""
    device = system.A.device
    if system.order is None:
        return vectors
    host = system.order.back(device.to_host(vectors))
    return device.asarray(host) if device.kind == "cuda" else host


def _modes(found: LowestModes, mass: Mass, unknowns: int, seconds: float) -> Modes:
    """Return the modes with what is read off them."""
    device, reason = mass.device, ModesReason[found.reason.upper().replace(" ", "_")]
    directions = {2: 2, 3: 3, 6: 3}.get(unknowns, 0)
    of_mass = found.of_mass
    unit = device.xp.zeros((mass.shape[0], directions))
    for direction in range(directions):
        unit[direction::unknowns, direction] = 1.0
    masses = device.to_host(unit.T @ mass.apply(unit)) if directions else np.zeros((0, 0))
    translations = of_translations(of_mass, directions, unknowns)
    vectors = with_fixed_signs(found.vectors)
    flipped = np.diag(device.to_host(vectors.T @ of_mass)) < 0
    translations[flipped] *= -1.0
    worst = float(found.residuals.max(initial=0.0))
    message = f"{reason.value} (iteration {found.iterations}, largest residual {worst:.3g})"
    return Modes(
        found.values, vectors, found.residuals, found.errors, found.zeros, reason, message, found.iterations, found.iterations,
        0, found.next_value, found.missed, translations, masses, {"total": seconds},
    )  # fmt: skip


def _judged(modes: Modes, on_failure: str) -> Modes:
    """Warn of modes that have not converged, or raise an error; what the caller's monitor ended is intended."""
    if modes.converged or modes.reason is ModesReason.STOPPED or on_failure == "return":
        return modes
    if on_failure == "raise":
        return modes.check()
    warnings.warn(f"the modes did not converge: {modes.message}", NotConvergedWarning, stacklevel=3)
    return modes
