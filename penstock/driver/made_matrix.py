"""A matrix that is known by its elements, as a source: held in memory where it fits, else assembled where it is used."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from penstock.driver.placement import place_index
from penstock.driver.progress import Reporter
from penstock.driver.request import Placement, Request
from penstock.driver.row_order import BY_LEVELS, IN_LAYERS, in_best_order, levels_may_pay
from penstock.solvers import PRECONDITIONERS, method_named
from penstock.spmv import CPU, Array, BudgetError, Device, InputError, Operator, SparseMatrix
from penstock.spmv.model.timing import time_once
from penstock.streaming import (
    LevelOrder,
    LinkRates,
    MadeStore,
    MatrixIndex,
    Ring,
    SlabMaker,
    Store,
    StreamPlan,
    index_of,
    layer_order,
    level_order,
    reach_of,
)
from penstock.streaming.execution.budget import check_room
from penstock.streaming.measurement.rates import WORTH_MEASURING_NBYTES, machine_rates

_HALF = "symmetric_bsr"
# Slabs of the index by which it is tested whether a matrix fits.
_CUT = 64
# Nodes are taken to be in random order if an element spans more than four layers of a cube.
_RANDOM = 4


class MadeMatrix(Protocol):
    """What a matrix says of itself that is assembled where it is used, as :class:`penstock.ElementMatrix` does."""

    coordinates: Array
    connectivity: Array
    factors: Array
    fixed: Array
    element: Any

    @property
    def dof(self) -> int:
        """Unknowns of a node."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""

    @property
    def reach(self) -> int:
        """The largest difference of the numbers of two coupled nodes."""

    def elements_nbytes(self, format_name: str) -> int:
        """Return the bytes of what it is made from."""

    def matrix(self, format_name: str, *, device: Device | str) -> SparseMatrix:
        """Assemble all of it in the memory of a device."""

    def row_maker(
        self, format_name: str, device: Device | str, *, row_bounds: Sequence[int] | None = None
    ) -> SlabMaker:
        """Return what makes its rows; if there are bounds of slabs, from elements that stay in host memory."""

    def window_nbytes(self, format_name: str, row_bounds: Sequence[int]) -> tuple[int, int]:
        """Return the bytes of elements that are copied to make all slabs between bounds, and to make the largest."""

    def largest_cut(self, format_name: str) -> int:
        """Return the largest number of slabs."""

    def symbolic_slabs(self, count: int, format_name: str) -> list[SparseMatrix]:
        """Return slabs without memory."""

    def coupled_columns(self, row_start: int, row_stop: int) -> range:
        """Return the columns with which a slab couples to the right."""

    def graph(self) -> Any:
        """Return the graph of the nodes."""

    def renumbered(self, permutation: Array) -> Self:
        """Return the matrix with its nodes in another order."""

    def with_factors_of(self, other: Self) -> Self:
        """Return the matrix with the factors of another one of the mesh, in the order of its elements."""


def with_coordinates(matrix: Any, preconditioner: Any, method: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return options of a preconditioner with the coordinates of a matrix of elements, if it has a use for them."""
    known = {"coordinates", "near_null_space"} & options.keys()
    if known or not isinstance(preconditioner, str):
        return options
    if preconditioner == "auto":
        uses = method_named(method).definite  # others begin with a preconditioner that has no coarse level
    else:
        uses = preconditioner in PRECONDITIONERS and PRECONDITIONERS[preconditioner].uses_near_null_space
    return {**options, "coordinates": matrix.coordinates} if uses else options


class _InOrder(NamedTuple):
    """A matrix with its nodes in an order, and its placement."""

    order: LevelOrder | None
    matrix: MadeMatrix
    placement: Placement

    @property
    def stream_plan(self) -> StreamPlan:
        return self.placement.stream_plan


class MadeMatrixSource:
    """Places a :class:`MadeMatrix`, and makes it or the store that makes its rows."""

    def __init__(self, matrix: MadeMatrix, reporter: Reporter | None = None) -> None:
        self.matrix, self.shape, self.reporter = matrix, matrix.shape, reporter or Reporter()
        self._format, self._device = _HALF, CPU
        self._order: LevelOrder | None = None
        self._ordered = matrix

    def place(self, request: Request) -> Placement:
        """Decide on memory or arrival, on the format, and, where sweeps gain by it, on another order of the nodes.

        Raises
        ------
        InputError
            If the blocks or the format are others than a matrix of elements has.
        """
        dof, self._device = self.matrix.dof, request.device
        self._order, self._ordered = None, self.matrix
        with self.reporter.part("plan"):
            return self._place(request, dof)

    def _place(self, request: Request, dof: int) -> Placement:
        from penstock.fem.element_rows import FORMATS, check_format  # whoever has such a matrix has loaded the package

        if request.block_size not in ("auto", dof):
            raise InputError(f"the nodes of this matrix have {dof} unknowns, not block_size={request.block_size}")
        if request.format is not None:
            check_format(request.format)
        preferred = request.specs_held(dof, entries=True)[0].formats
        names = [name for name in FORMATS[::-1] if name in preferred and request.format in (None, name)]
        facts = self._gather_nodes()
        for name in dict.fromkeys([*names, request.format or _HALF]):
            self._format = name
            placement = self._placed(self._ordered, request)
            if not placement.plan.slots:
                return self._in_this_order(placement, facts)
        most = max(max(spec.products_per_iteration(streamed=True)) for spec in request.specs(dof, streamed=True))
        orders = {IN_LAYERS: lambda: layer_order(self.matrix.coordinates, dof), BY_LEVELS: self._by_levels}
        if facts:  # they are in layers
            del orders[IN_LAYERS]

        def in_order(order: LevelOrder) -> _InOrder:
            ordered = self.matrix.renumbered(order.permutation)
            return _InOrder(order, ordered, self._placed(ordered, request))

        def suffices(one: _InOrder) -> bool:
            plan = one.stream_plan
            return plan.powers_per_sweep >= most or (plan.powers_per_sweep > 1 and plan.reach == 1)

        may_pay = partial(levels_may_pay, request=request, nodes=self.shape[0] // dof, entries=0)
        chosen = _InOrder(self._order, self._ordered, placement)
        chosen, facts = in_best_order(chosen, orders, in_order, suffices, may_pay, facts)
        self._order, self._ordered, placement = chosen
        return self._in_this_order(placement, facts)

    def _gather_nodes(self) -> list[tuple[str, str]]:
        """Put nodes that are coupled near each other, if they are numbered at random, and say so."""
        across = (self.shape[0] / self.matrix.dof) ** (2 / 3)  # nodes of a layer of a cube
        if self.matrix.reach <= _RANDOM * across:
            return []
        order = layer_order(self.matrix.coordinates, self.matrix.dof)
        ordered = self.matrix.renumbered(order.permutation)
        if 2 * ordered.reach >= self.matrix.reach:
            return []
        self._order, self._ordered = order, ordered
        reaches = f"elements span {ordered.reach:,} nodes, in the original order {self.matrix.reach:,}"
        return [("order", f"{IN_LAYERS}: {reaches}")]

    def _in_this_order(self, placement: Placement, facts: list[tuple[str, str]]) -> Placement:
        """Return a placement of the matrix in the order that was chosen, and what is said of it."""
        known = tuple(fact for fact in placement.facts if fact[0] != "order" or not facts)
        return replace(placement, facts=(*known, *facts), order=self._order)

    def _by_levels(self) -> LevelOrder:
        # Of the nodes in layers, if they are: their graph is found sooner.
        permutation = level_order(self._ordered.graph()).permutation
        if self._order is not None:
            permutation = self._order.permutation[permutation]
        return LevelOrder(permutation, self.matrix.dof)

    def _placed(self, matrix: MadeMatrix, request: Request) -> Placement:
        """Place a matrix in its order; if a GPU has no room for its elements, they stay in host memory."""
        rate = cache(partial(self._making_rate, matrix))
        try:
            nbytes = matrix.elements_nbytes(self._format)
            check_room(request.device, nbytes, "the elements of the mesh")
            placement = self._placed_with(matrix, request, Ring(on_arrival=True), ("the elements", nbytes), rate)
            placement.check_room(request.device)
            return placement
        except BudgetError:
            if request.device.kind == "cpu":  # where they lie in host memory already
                raise
        most, index = 0, self._rough_index(matrix)
        moved, needed = matrix.window_nbytes(self._format, index.row_bounds)
        while needed > most:  # until the slabs that are planned need no more room for their elements than was left
            most = needed
            ring = Ring(on_arrival=True, moved_share=moved / index.nbytes)
            placement = self._placed_with(matrix, request, ring, ("the elements of one subdivision", most), rate)
            index = placement.plan_of_store.index
            moved, needed = matrix.window_nbytes(self._format, index.row_bounds)
        return _with_moved_share(placement, moved / index.nbytes)

    def _index_for(self, matrix: MadeMatrix, count: int) -> MatrixIndex:
        return index_of(matrix.symbolic_slabs(count, self._format), matrix.shape)

    def _rough_index(self, matrix: MadeMatrix) -> MatrixIndex:
        return self._index_for(matrix, min(_CUT, matrix.largest_cut(self._format)))

    def _placed_with(
        self, matrix: MadeMatrix, request: Request, ring: Ring, beside: tuple[str, int], rate: Callable[[bool], float]
    ) -> Placement:
        """Place a matrix. ``beside`` names what else lies on the device, with its bytes; ``rate`` is :meth:`_making_rate`."""

        def reach_for(index: MatrixIndex) -> int:
            columns = [matrix.coupled_columns(part.row_start, part.row_stop) for part in index.subdivisions]
            return reach_of(index.row_starts, columns)

        def rates(nbytes: int) -> LinkRates | None:
            if nbytes < WORTH_MEASURING_NBYTES:
                return None
            rates = machine_rates(request.device, Path(tempfile.gettempdir()))
            return replace(rates, link=rate(ring.moves_nothing))

        precision = "float64" if request.precision == "auto" else request.precision  # what an image saves is the link
        return place_index(
            self._rough_index(matrix),
            replace(request, precision=precision, block_size=matrix.dof),
            reach_for=reach_for,
            rates=rates,
            index_for=partial(self._index_for, matrix),
            ring=ring,
            beside=(beside,),
            entries=True,
            symmetry="by construction: a matrix of elements",
        )

    def _making_rate(self, matrix: MadeMatrix, elements_on_device: bool) -> float:
        """Return the bytes a second at which a subdivision is made, the second time, perhaps from elements that are copied."""
        device, index = self._device, self._rough_index(matrix)
        number = len(index.subdivisions) // 2
        bounds = None if elements_on_device else index.row_bounds[number : number + 2]
        store = MadeStore(index, matrix.row_maker(self._format, device, row_bounds=bounds))
        with device.current():
            buffer = device.xp.empty(max(index.sizes["whole"]), dtype=np.uint8)
            for _ in range(2):
                seconds, _ = time_once(functools.partial(store.make_into, number, buffer), device)
            del store, buffer
            if device.kind == "cuda":  # slots are not taken from this pool
                device.xp.get_default_memory_pool().free_all_blocks()
        return index.subdivisions[number].nbytes / seconds

    def make(self, placement: Placement, resources: ExitStack) -> Operator | Store:
        """Assemble the matrix, or return the store that makes its rows where they are used."""
        with self.reporter.stage("assemble"):
            if placement.plan.slots or placement.image is not None:
                plan = placement.plan_of_store
                bounds = None if plan.ring.moves_nothing else plan.index.row_bounds
                return MadeStore(plan.index, self._ordered.row_maker(self._format, self._device, row_bounds=bounds))
            where = self._assembles_on(placement.plan.storage_nbytes)
            return self._ordered.matrix(self._format, device=where).to_device(self._device)

    def _assembles_on(self, beside_nbytes: int) -> Device:
        """Return where a matrix that is held in memory is assembled: on the host, if a GPU has no room for its elements."""
        needed = beside_nbytes + self._ordered.elements_nbytes(self._format)
        return CPU if self._device.kind == "cuda" and needed > self._device.free_nbytes() else self._device

    def check_same_mesh(self, matrix: Any) -> None:
        """Refuse a matrix that differs in more than the factors of its elements, with an InputError."""
        for name in ("shape", "coordinates", "ghosts", "connectivity", "fixed", "element"):
            before, now = getattr(self.matrix, name), getattr(matrix, name)
            if not (np.array_equal(before, now) if hasattr(before, "dtype") else before == now):
                raise InputError(
                    f"the new matrix is of another mesh or law than the prepared one: see its {name}; prepare it"
                )

    def refill(self, A: SparseMatrix, matrix: MadeMatrix) -> None:
        """Write the values of a matrix of the same mesh into one that :meth:`make` has returned."""
        where, target = self._assembles_on(0), A.arrays()["values"]
        maker = self._in_this_order_too(matrix).row_maker(self._format, where)
        with A.device.current():
            values = target if where == A.device else np.empty(target.shape, dtype=target.dtype)
            maker.make(0, A.shape[0], {"values": values})
            if values is not target:
                target.set(values)

    def refilled(self, store: MadeStore, matrix: MadeMatrix) -> MadeStore:
        """Return the store of a matrix of the same mesh; what its maker holds on a device is shared where it can be."""
        maker: Any = store.maker
        return MadeStore(store.index, maker.with_factors(self._in_this_order_too(matrix).factors))

    def _in_this_order_too(self, matrix: MadeMatrix) -> MadeMatrix:
        """Return a matrix of the same mesh in the order in which this one is used."""
        return matrix if self._ordered is self.matrix else self._ordered.with_factors_of(matrix)


def _with_moved_share(placement: Placement, share: float) -> Placement:
    """Return a placement whose plan knows exactly what moves for its own subdivisions."""

    def exact(plan: Any) -> Any:
        return replace(plan, ring=replace(plan.ring, moved_share=share)) if plan.slots else plan

    if placement.image is not None:
        return replace(placement, image=replace(placement.image, plan=exact(placement.image.plan)))
    return replace(placement, plan=exact(placement.plan))
