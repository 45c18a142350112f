"""The lowest modes of ``K x = lambda M x`` from a coarse level: start, blocks, free motions, and the probe for missed ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg

from penstock.solvers.amg.smoothed_aggregation import SmoothedAggregation
from penstock.solvers.amg.specs import SmoothedAggregationSpec
from penstock.solvers.eigen.coarse_modes import CoarseModes, coarse_mass, coarse_modes
from penstock.solvers.eigen.lobpcg import Found, Matrix, ModesIteration, column_norms, sizes_of
from penstock.solvers.eigen.mass import Mass, mass_norms
from penstock.solvers.eigen.sweep import BLOCKS, ModesSweep
from penstock.solvers.eigen.uncoupled import UncoupledModes, uncoupled_modes
from penstock.spmv import Array, Device, InputError, device_of
from penstock.spmv.device import count_true
from penstock.spmv.vectors.noise import noise

# The degree of the polynomial: the usual one, and that where stiffness jumps, which takes a third more products and saves as many
# passes. There are more guard vectors then, by the last number: many modes are close to each other.
_DEGREE, _ROUGH_DEGREE, _ROUGH_GUARDS = 9, 13, 8
# Guard vectors: at least the first number, and one for as many wanted modes as the second.
_GUARDS, _GUARD_SHARE = 5, 3
# A block has a multiple of this many vectors, for which kernels of products are fast.
_MULTIPLES = {"cpu": 4, "cuda": 8}
# Vectors that begin at random; those of the probe, how many of them begin at random, and its passes.
_RANDOM, _PROBED, _RANDOM_PROBED, _PROBES = 2, 8, 4, 2
# A value that the probe finds is of a missed mode if it is below the largest one by this share.
_MISSED = 1e-3
# Ends of a block after which others follow.
_DONE = ("converged", "rounding floor")
# Below this residual a value is about that of a mode.
_ROUGHLY = 1e-2
# A negative value of this share of the largest one is no rounding, not even in entries of float32.
_NEGATIVE = 1e-6
# Rounding that a residual and a value may keep, in units of that of the largest entry.
_FLOOR, _ZERO = 32.0, 32.0


class ModesState(NamedTuple):
    """What an iteration for modes goes on from.

    Parameters
    ----------
    vectors : array, (n, columns)
        The Ritz vectors that iterate.
    values : float64 array, (columns,)
    found : array, (n, modes), or None
        Modes that were found in earlier blocks.
    found_values : float64 array, (modes,)

    Examples
    --------
    >>> import penstock
    >>> from penstock.fem import Cantilever
    >>> beam, shapes = Cantilever(nodes=(17, 6, 6), dof=3), []
    >>> look = lambda record: shapes.append(record.state.vectors.shape)
    >>> X = beam.mesh.coordinates()
    >>> _ = penstock.eigsh(beam.matrix(), 2, beam.mass(), coordinates=X, device="cpu", monitor=look)
    >>> shapes[0]
    (1836, 8)
    """

    vectors: Array
    values: Matrix
    found: Array | None
    found_values: Matrix


class ModesRecord(NamedTuple):
    """The argument of ``monitor``, which is called after each pass.

    Parameters
    ----------
    iteration : int
        Passes of the iteration so far.
    values : float64 array
        Ritz values of the modes that are looked for now.
    residuals : float64 array
        Their relative residuals.
    found : int
        Modes that were found in earlier blocks.
    state : ModesState
        Valid until the monitor returns.

    Examples
    --------
    >>> import penstock
    >>> from penstock.fem import Cantilever
    >>> beam, seen = Cantilever(nodes=(17, 6, 6), dof=3), []
    >>> K, X = beam.matrix(), beam.mesh.coordinates()
    >>> modes = penstock.eigsh(K, 2, beam.mass(), coordinates=X, device="cpu", monitor=seen.append)
    >>> [record.iteration for record in seen[:3]], bool(seen[-1].residuals.max() <= 1e-6)
    ([0, 1, 2], True)
    """

    iteration: int
    values: Matrix
    residuals: Matrix
    found: int
    state: ModesState


Monitor = Callable[[ModesRecord], object]


class SearchLimits(NamedTuple):
    """The tolerance of residuals, the iterations of a block, the vectors that iterate together, and the most that fit."""

    tol: float
    maxiter: int
    block: int
    most: int


@dataclass
class LowestModes:
    """What was found: ascending values, M-orthonormal vectors on the device, and how the search went."""

    values: Matrix
    vectors: Array
    of_mass: Array
    residuals: Matrix
    errors: Matrix
    zeros: int
    reason: str
    iterations: int
    next_value: float | None
    missed: int = 0
    columns: int = 0  # that iterated together


def block_columns(k: int, kind: str, *, rough: bool = False) -> int:
    """Return the vectors that iterate for k modes on a kind of device, if there is room for them.

    ``rough``: the stiffness jumps from node to node.
    """
    columns, multiple = k + max(_GUARDS, k // _GUARD_SHARE) + rough * _ROUGH_GUARDS, _MULTIPLES[kind]
    return -(-columns // multiple) * multiple


def with_modes_degree(spec: SmoothedAggregationSpec, *, rough: bool = False) -> SmoothedAggregationSpec:
    """Return the specification of a coarse level with the degree that suits modes, if that is left open."""
    return replace(spec, degree=_ROUGH_DEGREE if rough else _DEGREE) if spec.degree == "auto" else spec


def workspace_nbytes(n: int, columns: int, dtype: Any = np.float64) -> int:
    """Return the bytes of the vectors of a block."""
    return BLOCKS * n * columns * int(np.dtype(dtype).itemsize)


def lowest_modes(
    K: Any,
    mass: Mass,
    M: SmoothedAggregation,
    k: int,
    limits: SearchLimits,
    *,
    monitor: Monitor | None = None,
    state: ModesState | None = None,
    moves: Array | None = None,
    rounding: float = float(np.finfo(float).eps),
) -> LowestModes:
    """Return the lowest k modes; ``state`` is that of an earlier search.

    K is the matrix of which M is the coarse level, and M the mass matrix is ``mass``, on the device of K. ``moves``, bool (n,),
    are the unknowns that K couples with others; all that have mass by default. ``rounding`` is the relative one of the entries
    of the caller's K, which decides what is zero.
    """
    moves = mass.diagonal() > 0 if moves is None else moves
    apart, moves = uncoupled_modes(K, M, mass, moves, k)
    if apart is not None and not count_true(moves):
        return _merged(None, apart, k)
    search = _Search(K, mass, M, k, limits, monitor, moves, rounding)
    try:
        with K.device.current(), np.errstate(all="ignore"):
            found = search.run(state)
            return found if apart is None else _merged(found, apart, k)
    except InputError:
        raise
    except (np.linalg.LinAlgError, ValueError) as error:  # of LAPACK, whose matrices are made of K and M
        raise InputError(
            f"the search for modes broke down, as it may where K is not positive semidefinite or M not positive definite: {error}"
        ) from error


def _merged(found: LowestModes | None, apart: UncoupledModes, k: int) -> LowestModes:
    """Return the lowest k modes of those that were found and those of uncoupled unknowns, which are exact."""
    xp, none = device_of(apart.vectors).xp, np.zeros(len(apart.values))
    if found is None:
        zeros = int((apart.values == 0).sum())
        return LowestModes(apart.values, apart.vectors, apart.of_mass, none, none, zeros, "converged", 0, None)
    values = np.concatenate([found.values, apart.values])
    order = np.argsort(values, kind="stable")[:k]
    order = np.concatenate([order[order < found.zeros], order[order >= found.zeros]])
    place = device_of(apart.vectors).asarray(order)
    vectors, of_mass = (
        xp.ascontiguousarray(xp.concatenate(pair, axis=1)[:, place])
        for pair in ((found.vectors, apart.vectors), (found.of_mass, apart.of_mass))
    )
    residuals, errors = (np.concatenate([of, none])[order] for of in (found.residuals, found.errors))
    left = np.sort(values)[k : k + 1]
    following = [value for value in (found.next_value, *left) if value is not None]
    return replace(
        found, values=values[order], vectors=vectors, of_mass=of_mass, residuals=residuals, errors=errors,
        next_value=min(following, default=None),
    )  # fmt: skip


class _Search:
    def __init__(
        self,
        K: Any,
        mass: Mass,
        M: SmoothedAggregation,
        k: int,
        limits: SearchLimits,
        monitor: Monitor | None,
        moves: Array,
        rounding: float,
    ) -> None:
        self.K, self.mass, self.M, self.k, self.limits = K, mass, M, k, limits
        self.columns = limits.block
        self.monitor, self.moves, self.iterations = monitor, moves, 0
        self.device: Device = K.device
        #: About the largest value.
        self.scale = M.level.scale / float(mass.diagonal().mean())
        eps = float(np.finfo(float).eps)
        #: What rounding in K makes of a value that is zero, and rounding in products with K.
        self.zero, self.unit = max(_ZERO * eps, rounding) * self.scale, _FLOOR * eps * self.scale

    def run(self, before: ModesState | None) -> LowestModes:
        """Find the modes, block by block, and look for missed ones."""
        count = max(self.columns, block_columns(self.k, self.K.device.kind))
        coarse = coarse_modes(self.M.level, coarse_mass(self.M, self.mass), count, self.zero, self.k)
        zeros = min(self.k, int(coarse.free.shape[1]))
        free = self._free_motions(coarse, zeros) if coarse.free.shape[1] else None
        wanted = self.k - zeros
        if free is not None and not wanted:
            following = 0.0 if coarse.free.shape[1] > zeros else None
            others = coarse.values[coarse.values > self.zero]
            return self._result(free, None, zeros, "converged", following, least=others.min(initial=self.scale))
        self._widen(coarse.soft)
        state, next_value = self._start(coarse), None
        found = 0 if before is None else self._resume(state, before)
        at_floor = False
        while True:
            now = min(wanted - found, max(1, self.columns - max(_GUARDS, self.columns // 4)))
            reason = self._iterate(state, now)
            if now < self.columns and state.residuals[now] < _ROUGHLY:
                next_value = float(state.values[now])
            new = state.found(slice(0, now))
            state.locked = new if state.locked is None else state.locked.joined(new)
            found += now
            self._check_sign(state)
            at_floor |= reason == "rounding floor"
            if reason not in _DONE or found == wanted:
                break
            self._go_on(state, now, found)
        if reason == "converged" and at_floor:
            reason = "rounding floor"
        missed = self._probe(state, now) if reason in _DONE else 0
        regular = state.locked.values[state.locked.values > self.zero]
        return self._result(
            free, state.locked, zeros, reason, next_value, missed, least=regular.min(initial=self.scale)
        )

    def _widen(self, soft: int) -> None:
        """Let as many vectors iterate as represent all soft modes, if there is room for them."""
        multiple = _MULTIPLES[self.K.device.kind]
        needed = -(-(soft + _RANDOM) // multiple) * multiple
        if self.columns < needed <= self.limits.most:
            self.columns = needed

    def _start(self, coarse: CoarseModes) -> ModesIteration:
        """Return the state before the first pass: the modes of the coarse level, and random vectors."""
        sweep = ModesSweep(self.K, self.mass, self.M, self.columns)
        known = min(max(1, self.columns - _RANDOM), coarse.vectors.shape[1])
        c = self.device.xp.zeros((self.M.level.T.unknowns, self.columns))
        c[:, :known] = coarse.vectors[:, :known]
        values = np.zeros(self.columns)
        values[:known] = coarse.values[:known]
        sigma = 0.5 * float(values[0]) if coarse.free.shape[1] and known else 0.0
        state = ModesIteration(sweep, coarse, values, c, coarse.mass.apply(c), None, sigma, self.zero)
        state.has_soft = coarse.soft <= known
        self._randomise(state, slice(known, self.columns), seed=0)
        return state

    def _resume(self, state: ModesIteration, before: ModesState) -> int:
        """Go on from the vectors of an earlier search; return how many modes it had found."""
        sweep, xp = state.sweep, self.device.xp
        if before.found is not None:
            for first in range(0, before.found.shape[1], self.columns):
                some = self.device.asarray(before.found[:, first : first + self.columns])
                count = int(some.shape[1])
                sweep.X[...], state.c[...] = 0.0, 0.0
                sweep.X[:, :count] = some
                state.values[:count] = before.found_values[first : first + count]
                state.below_m = sweep.restrict(self.mass.apply(sweep.X))
                sweep.run(state.c, state.values, lambda: False)
                state.measure()
                new = state.found(slice(0, count))
                state.locked = new if state.locked is None else state.locked.joined(new)
        kept = min(self.columns, before.vectors.shape[1])
        sweep.X[...] = 0.0
        sweep.X[:, :kept] = self.device.asarray(xp.ascontiguousarray(self.device.asarray(before.vectors)[:, :kept]))
        state.c[...] = 0.0
        state.values[:kept] = before.values[:kept]
        state.below_m = sweep.restrict(self.mass.apply(sweep.X))
        if kept < self.columns:
            self._randomise(state, slice(kept, self.columns), seed=1 << 16)
        return len(before.found_values)

    def _randomise(self, state: ModesIteration, columns: slice, seed: int) -> None:
        """Empty some columns, and let the next pass make new directions of random vectors in their place."""
        sweep, n, count = state.sweep, self.K.shape[0], columns.stop - columns.start
        sweep.X[:, columns], state.c[:, columns], state.below_m[:, columns] = 0.0, 0.0, 0.0
        sweep.Q[:, columns] = noise(self.device, seed, n * count).reshape(n, count)
        sweep.Q[:, columns] *= self.moves[:, None]
        state.values[columns] = 0.0
        sweep.driven = columns

    def _iterate(self, state: ModesIteration, wanted: int) -> str:
        before = state.iteration

        def look(now: ModesIteration) -> bool:
            if self.monitor is None:
                return False
            locked = now.locked
            known = (None, np.empty(0)) if locked is None else (locked.vectors, locked.values)
            state = ModesState(now.sweep.X, now.values, *known)
            values, residuals = now.values[:wanted].copy(), now.residuals[:wanted].copy()
            return bool(
                self.monitor(
                    ModesRecord(self.iterations + now.iteration - before, values, residuals, len(known[1]), state)
                )
            )

        reason = state.run(wanted, self.limits.tol, before + self.limits.maxiter, self._floor, look)
        self.iterations += state.iteration - before + 1
        return reason

    def _check_sign(self, state: ModesIteration) -> None:
        """Refuse a K that has a negative eigenvalue, beyond what rounding makes of one that is zero."""
        lowest, largest = int(np.argmin(state.values)), float(np.abs(state.values).max())
        least, is_one = float(state.values[lowest]), bool(state.residuals[lowest] < _ROUGHLY)
        if is_one and least < -max(self.zero, _NEGATIVE * largest):
            raise InputError(f"K is not positive semidefinite: it has an eigenvalue of {least:.3g} or less")

    def _floor(self, values: Matrix) -> Matrix:
        """Return the residuals that rounding leaves: that of products with K, whose entries are much larger than the values."""
        rounding = np.where(np.abs(values) > self.zero, self.unit, self.zero)
        return np.asarray(rounding / sizes_of(values, self.zero))

    def _go_on(self, state: ModesIteration, done: int, found: int) -> None:
        """Go on with the guard vectors, and further modes of the coarse level, after ``found`` modes in all."""
        sweep, kept, coarse = state.sweep, self.columns - done, state.coarse
        state.forget_directions()
        sweep.X[:, :kept] = sweep.X[:, done:].copy()
        sweep.X[:, kept:] = 0.0
        state.below_m[:, :kept] = state.below_m[:, done:].copy()
        state.values[:kept] = state.values[done:].copy()
        state.c[...] = 0.0
        more = self.device.xp.ascontiguousarray(coarse.vectors[:, found + kept : found + self.columns])
        stop = kept + int(more.shape[1])
        state.c[:, kept:stop], state.below_m[:, kept:stop] = more, coarse.mass.apply(more)
        state.values[kept:stop] = coarse.values[found + kept : found + kept + more.shape[1]]
        if stop < self.columns:
            self._randomise(state, slice(stop, self.columns), seed=found << 20)

    def _probe(self, state: ModesIteration, done: int) -> int:
        """Look for modes that were missed, from random vectors beside the found ones; return how many there were.

        After two passes the lowest value outside the found modes is near the lowest that they miss, with high probability.
        """
        assert state.locked is not None
        self._narrow(state, done)
        largest, missed = float(state.locked.values.max()), 0
        while True:
            state.advance(_PROBES, self._floor)
            self.iterations += _PROBES
            self._check_sign(state)
            low = int((state.values < largest * (1 - _MISSED)).sum())
            if not low or self._iterate(state, low) not in _DONE:
                return missed
            state.locked = state.locked.joined(state.found(slice(0, low)))
            missed += low
            state.forget_directions()
            state.c[...] = 0.0
            self._randomise(state, slice(0, low), seed=missed << 24)

    def _narrow(self, state: ModesIteration, done: int) -> None:
        """Let a block of few vectors take the place of the block: guard vectors, and random ones."""
        guards = min(self.columns - done, _PROBED - _RANDOM_PROBED)
        kept, columns = slice(done, done + guards), min(_PROBED, self.columns)
        guards = min(guards, columns)
        X, below_m, values = (of[..., kept][..., :guards].copy() for of in (state.sweep.X, state.below_m, state.values))
        del state.sweep
        state.sweep = ModesSweep(self.K, self.mass, self.M, columns)
        state.forget_directions()
        state.has_soft = False  # one of them may have been missed
        state.c = self.device.xp.zeros((self.M.level.T.unknowns, columns))
        state.below_m, state.values = self.device.xp.zeros_like(state.c), np.zeros(columns)
        state.sweep.X[:, :guards], state.below_m[:, :guards], state.values[:guards] = X, below_m, values
        if guards < columns:
            self._randomise(state, slice(guards, columns), seed=1 << 20)

    def _free_motions(self, coarse: CoarseModes, zeros: int) -> Found:
        """Return the motions without energy of the body itself, M-orthonormal, with their products."""
        xp, device = self.K.device.xp, self.K.device
        Z = xp.empty((self.K.shape[0], coarse.free.shape[1]))
        self.M.level.T.prolong(coarse.free, Z)
        of_m = self.mass.apply(Z)
        gram = device.to_host(Z.T @ of_m)
        factor = device.asarray(np.ascontiguousarray(scipy.linalg.inv(np.linalg.cholesky((gram + gram.T) / 2)).T))
        Z, of_m = (xp.ascontiguousarray((of @ factor)[:, :zeros]) for of in (Z, of_m))
        of_k = self.K.apply(Z)
        energies = Z.T @ of_k
        values = np.diag(device.to_host(energies)).copy()
        difference, nothing = of_k - of_m * device.asarray(values), xp.zeros((0, zeros))
        residuals, errors = column_norms(difference) / column_norms(of_m), mass_norms(self.mass, difference)
        return Found(Z, of_m, nothing, nothing, energies, xp.eye(zeros), values, residuals, errors)

    def _result(
        self,
        free: Found | None,
        found: Found | None,
        zeros: int,
        reason: str,
        next_value: float | None,
        missed: int = 0,
        *,
        least: float,
    ) -> LowestModes:
        """Return what was found; residuals of free motions become relative to the ``least`` value that is not zero."""
        xp = self.K.device.xp
        parts = [part for part in (free, found) if part is not None]
        values = np.concatenate([part.values for part in parts])
        residuals = np.concatenate([part.residuals for part in parts])
        vectors = xp.concatenate([part.vectors for part in parts], axis=1)
        of_mass = xp.concatenate([part.of_mass for part in parts], axis=1)
        if free is not None:
            residuals[:zeros] /= least
            if reason == "converged" and residuals[:zeros].max() > max(self.limits.tol, self.unit / least):
                reason = "rounding floor"
        order = np.concatenate([np.arange(zeros), zeros + np.argsort(values[zeros:], kind="stable")])[: self.k]
        zeros = max(zeros, int((values[order] <= self.zero).sum()))
        if zeros == len(order) and next_value is not None and next_value <= self.zero:
            next_value = float(values[order[-1]])  # both are zero
        on_device = self.K.device.asarray(order)
        return LowestModes(
            values[order],
            xp.ascontiguousarray(vectors[:, on_device]),
            xp.ascontiguousarray(of_mass[:, on_device]),
            residuals[order],
            np.concatenate([part.errors for part in parts])[order],
            zeros,
            reason,
            self.iterations,
            next_value,
            missed,
            self.columns,
        )
