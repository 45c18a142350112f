"""The search for modes of a system that is open, or of a small one, and what is read off them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from scipy.sparse.csgraph import connected_components

from penstock.driver.open_system import OpenSystem
from penstock.driver.predicted import pattern_of_nodes
from penstock.driver.progress import Reporter, Stage
from penstock.driver.request import Placement
from penstock.solvers import MethodChoice, SmoothedAggregation, SmoothedAggregationSpec
from penstock.solvers.amg.grid_points import GridPoints
from penstock.solvers.amg.modes import rigid_body_modes
from penstock.solvers.eigen.dense import dense_modes, massless_error
from penstock.solvers.eigen.mass import LumpedMass, Mass, as_mass, mass_norms
from penstock.solvers.eigen.modes import (
    LowestModes,
    ModesRecord,
    ModesState,
    Monitor,
    SearchLimits,
    block_columns,
    lowest_modes,
    with_modes_degree,
    workspace_nbytes,
)
from penstock.solvers.eigen.result import Modes, ModesReason, of_translations, with_fixed_signs
from penstock.spmv import CPU, Array, Device, InputError, SparseMatrix, SweptOperator, device_of, format_nbytes
from penstock.spmv.device import count_true

# A block iterates this many vectors at most, and at least; more modes are found block after block.
_LARGEST_BLOCK, _LEAST_BLOCK = 256, 4
# Rows of a matrix up to which its parts are looked for, in a few hundredths of a second.
_LOOKED_AT_ROWS = 200_000
# Each part has aggregates of its own: many small ones would make a large coarse level.
_MOST_PARTS = 20


def modes_method(mass_nbytes: int) -> MethodChoice:
    """Return what plans must know of the search for modes, beside a mass matrix of some bytes."""
    return MethodChoice(
        "block LOBPCG",
        _refuse_to_solve,
        lambda n, count, dtype: workspace_nbytes(n, count, dtype) + mass_nbytes,
        largest_block=_LARGEST_BLOCK,
        iterates="vector",
    )


def _refuse_to_solve(*_: Any, **__: Any) -> Any:
    raise InputError("modes are found by penstock.eigsh")


@dataclass
class ModesSearch:
    """What is looked for, and who hears of it."""

    k: int
    M: Any
    tol: float
    maxiter: int
    monitor: Monitor | None
    reporter: Reporter
    state: ModesState | None = None

    def densely(self, K: Any, unknowns: int) -> Modes:
        """Leave a small problem to LAPACK."""
        n = K.shape[0]
        began = time.perf_counter()
        with self.reporter.stage("solve"):
            mass = as_mass(self.M, n, unknowns, CPU)
            found = dense_modes(K, mass.to_csr(), self.k)
            low = np.maximum(np.abs(found.values), np.abs(found.values[found.zeros :]).min(initial=np.inf))
            low = np.where(np.isfinite(low), low, 1.0)
            norms = [np.linalg.norm(of, axis=0) for of in (found.differences, found.of_mass)]
            residuals = norms[0] / (low * norms[1])
            reason = "converged" if (residuals <= self.tol).all() else "rounding floor"
            errors = mass_norms(mass, np.ascontiguousarray(found.differences))
            lowest = LowestModes(
                found.values, found.vectors, found.of_mass, residuals, errors, found.zeros, reason, 0, found.next_value
            )
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
        moved = 0 if swept is None else swept.bytes_streamed
        M = self._coarse_level(system)
        unknowns = M.level.T.block_size
        with self.reporter.part("convert"):
            mass = as_mass(self._in_order(system), K.shape[0], unknowns, K.device)
            moves = _moving(K.device, mass, M)
        block = _block(system, self.k)
        with self.reporter.stage("solve") as stage:
            limits = SearchLimits(self.tol, self.maxiter, block, _most_columns(system, block))
            watch = partial(self._watch, stage)
            rounding = float(np.finfo(np.float32 if system.narrow else np.float64).eps)
            found = lowest_modes(
                K, mass, M, self.k, limits, monitor=watch, state=self.state, moves=moves, rounding=rounding
            )
            modes = _modes(found, mass, unknowns, time.perf_counter() - began)
        if swept is not None:
            modes = replace(modes, sweeps=swept.sweeps, bytes_streamed=swept.bytes_streamed - moved)
        facts = [*system.explain(), f"{'mass':<11} {_described(mass)}"]
        if block < (wanted := _wanted(system, self.k)):
            facts.append(f"{'blocks':<11} {block} vectors at a time, for which there is room, instead of {wanted}")
        elif found.columns > block:
            facts.append(
                f"{'blocks':<11} {found.columns} vectors at a time, to represent all modes far below the others"
            )
        planned = 0 if (placement := system.placement) is None else _planned_nbytes(placement)
        return replace(modes, vectors=_back(system, modes.vectors), decisions="\n".join(facts), planned_nbytes=planned)

    def _coarse_level(self, system: OpenSystem) -> SmoothedAggregation:
        if (of_parts := _spec_for_parts(system)) is not None:
            return _built(system, of_parts)
        M = system.preconditioner() if system.streamed is None else None
        if isinstance(M, SmoothedAggregation):
            return M
        size = system.request.node_size(1 if system.placement is None else system.placement.spec.block_size)
        spec: Any = replace(_default_spec(system), block_size=size)
        if system.order is not None:
            spec = spec.in_order(system.order.forward)
        return _built(system, spec)

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


def _default_spec(system: OpenSystem) -> SmoothedAggregationSpec:
    """Return the specification of a coarse level for modes, with what is known of the nodes."""
    known = {name: of for name, of in system.request.options.items() if name in ("coordinates", "near_null_space")}
    return with_modes_degree(SmoothedAggregationSpec(**known))


def _built(system: OpenSystem, spec: Any) -> SmoothedAggregation:
    with system.reporter.stage("prepare"), system.A.device.current():
        made: SmoothedAggregation = spec.build(system.matrix)
    return made


def _spec_for_parts(system: OpenSystem) -> SmoothedAggregationSpec | None:
    """Return the system's coarse level with rigid motions in place of coordinates, if K in memory has several parts.

    Aggregates of coordinates may hold nodes of two parts, whose motions the coarse level then mixes; those of the graph do not.
    """
    K, spec = system.matrix, system.request.preconditioner
    if not isinstance(K, SparseMatrix) or K.shape[0] > _LOOKED_AT_ROWS:
        return None
    if not isinstance(spec, SmoothedAggregationSpec):  # of a prepared system
        spec = _default_spec(system)
    if spec.coordinates is None or spec.near_null_space is not None:
        return None
    if callable(spec.coordinates) or isinstance(spec.coordinates, GridPoints):
        return None  # of a structured mesh, which is in one part
    points = device_of(spec.coordinates).to_host(spec.coordinates)
    size = K.shape[0] // len(points)
    part = connected_components(pattern_of_nodes(K.to_device(CPU), size), directed=False)[1]
    if not 1 < (np.bincount(part) > 1).sum() <= _MOST_PARTS:  # single nodes, such as fixed ones, do not count
        return None
    of_parts: SmoothedAggregationSpec = replace(
        spec, coordinates=None, near_null_space=rigid_body_modes(points, size), block_size=size
    )
    return of_parts


def _block(system: OpenSystem, k: int) -> int:
    """Return the vectors that iterate together: those that were planned, or those for which half of the free memory has room."""
    placement = system.placement
    if placement is not None and isinstance(system.request.method, MethodChoice):
        return placement.together
    return max(_LEAST_BLOCK, min(_wanted(system, k), _fitting(system)))


def _most_columns(system: OpenSystem, block: int) -> int:
    """Return how many vectors may iterate together: more than ``block`` where K is in memory and no limit is given."""
    if system.streamed is not None or system.request.memory is not None:
        return block
    return max(block, _fitting(system))


def _fitting(system: OpenSystem) -> int:
    """Return for how many vectors that iterate half of the free memory has room."""
    K = system.matrix
    return int(K.device.free_nbytes() // 2 // workspace_nbytes(K.shape[0], 1))


def _wanted(system: OpenSystem, k: int) -> int:
    """Return the vectors that iterate if there is room for them."""
    asked = isinstance(system.request.method, MethodChoice)  # for modes
    return system.request.columns if asked else block_columns(k, system.matrix.device.kind)


def _planned_nbytes(placement: Placement) -> int:
    return placement.plan_of_matrix.storage_nbytes + placement.plan.workspace_nbytes


def _described(mass: Mass) -> str:
    kind = "a diagonal" if isinstance(mass, LumpedMass) else "a sparse matrix"
    return f"{kind} of {format_nbytes(mass.nbytes)}, in memory"


def _moving(device: Device, mass: Mass, M: SmoothedAggregation) -> Array:
    """Return which unknowns have mass and are coupled with others by K; refuse those that are coupled without mass."""
    heavy, T, xp = mass.diagonal() > 0, M.level.T, device.xp
    coupled = xp.zeros(mass.shape[0], dtype=bool)
    for mode in range(T.modes):
        coarse, motion = xp.zeros(T.unknowns), xp.zeros(mass.shape[0])
        coarse[mode :: T.modes] = 1.0
        T.prolong(coarse, motion)
        coupled |= motion != 0
    if massless := int(count_true(~heavy & coupled)):
        raise massless_error(massless)
    return coupled & heavy


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
