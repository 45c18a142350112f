"""One iteration of preconditioned conjugate gradients in three fused passes, whose scalars stay where the vectors are.

Values read and written per iteration besides those of A and M, with n rows: p.q reads 2 n; r -= alpha q, with z = M r and
the two inner products, reads 2 n and writes 2 n (n without a preconditioner); x += alpha p, with p = z + beta p, reads 3 n and
writes 2 n: 11 n values, 10 n without a preconditioner. A preconditioner of diagonal blocks of b rows is part of the second
pass and costs its own b n values; any other one is applied between the passes, and r.z then reads 2 n more.

A preconditioner of products with A brings ``w = A z`` along. Then q = A p is not a product but ``w + beta q``, which reads 2 n
values and writes n: streamed, all products of an iteration may share a sweep. What rounding adds to q that way is not in the
bound of the drift; convergence is declared on the true residual all the same.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from penstock.solvers.cg_passes import CgVectors, CpuPasses, CudaPasses, Halt, Number
from penstock.solvers.preconditioners import DiagonalBlocks, with_product
from penstock.spmv import Array, Operator, ValidatedOperator
from penstock.spmv.cuda_graph import RecordedGraph, record_graph
from penstock.spmv.operator import product_of

__all__ = ["KEPT_NORMS", "CgRecurrence"]

_NUMBERS = len(Number)
#: Iterations that may be started before the host looks, at most: so many residual norms are kept.
KEPT_NORMS = 256


class CgRecurrence:
    """The iteration of CG on vectors of its caller.

    Parameters
    ----------
    A : Operator
    M : Operator or None
    x, r, p : array, (n,)
        Iterate, residual and search direction, advanced in place.
    q, z : array, (n,)
        Work; z is None without a preconditioner.
    w : array, (n,), optional
        Work for the image of z, if M is to form it; then q must be that of p when the first iteration begins.

    Notes
    -----
    When the recurrence halts, that iteration and all later ones leave everything as it is, until the halt is lifted by
    :meth:`put`. The host may thus start many iterations before it looks at the numbers.

    Where A and M only start kernels of this library on a GPU, an iteration is recorded as a CUDA graph.
    """

    def __init__(
        self,
        A: Operator,
        M: Operator | None,
        x: Array,
        r: Array,
        p: Array,
        q: Array,
        z: Array | None,
        w: Array | None = None,
    ) -> None:
        self.device = A.device
        on_gpu = self.device.kind == "cuda"
        # In one piece, so that one copy brings all of it to the host.
        self._ledger = self.device.xp.zeros(_NUMBERS + KEPT_NORMS)
        self._seen = self.device.host_twin(self._ledger)
        self._seen[...] = 0.0
        blocks = M.blocks if isinstance(M, DiagonalBlocks) else None
        numbers, norms_squared = self._ledger[:_NUMBERS], self._ledger[_NUMBERS:]
        z = r if z is None else z
        vectors = CgVectors(x, r, p, q, z, z if w is None else w, blocks, numbers, norms_squared)
        self._passes = (CudaPasses if on_gpu else CpuPasses)(vectors, self.device)
        self._vectors = vectors
        self._matrix = product_of(A)
        applied = M if blocks is None else None
        self._preconditioner = None if applied is None else product_of(applied)
        of_products = None if w is None else with_product(M, A)
        self._with_product = None if of_products is None else of_products.apply_with_product
        self._recordable = on_gpu and _is_recordable(A) and (applied is None or _is_recordable(applied))
        self._graph: RecordedGraph | None = None
        self._loaded = False
        self.matrix_seconds = self.preconditioner_seconds = 0.0

    def advance(self, iterations: int) -> None:
        """Start so many iterations, :data:`KEPT_NORMS` at most; on CUDA the host does not wait for them."""
        for _ in range(iterations):
            if self._graph is not None:
                self._graph.launch()
                continue
            self._iterate()
            if self._recordable and self._loaded:
                self._graph = record_graph(self._iterate)
            self._loaded = True  # by the first iteration: a kernel cannot be loaded while it is recorded

    def _iterate(self) -> None:
        vectors, passes, began = self._vectors, self._passes, time.perf_counter()
        if self._with_product is None:
            self._matrix(vectors.p, vectors.q, 1.0, 0.0)
            self.matrix_seconds += time.perf_counter() - began
        passes.curvature()
        passes.descend()
        if self._preconditioner is not None:
            began = time.perf_counter()
            if self._with_product is None:
                self._preconditioner(vectors.r, vectors.z, 1.0, 0.0)
            else:
                self._with_product(vectors.r, vectors.z, vectors.w)
            self.preconditioner_seconds += time.perf_counter() - began
            passes.residual_product()
        passes.extend()
        if self._with_product is not None:
            passes.extend_image()

    def look(self) -> np.ndarray[Any, Any]:
        """Wait for the iterations started, and return the numbers as they are then."""
        self._passes.close()
        self.device.copy_to_twin(self._ledger, self._seen)
        return self._seen[:_NUMBERS]

    def norms(self, since: int) -> list[float]:
        """Return ``||r||`` after each iteration from number ``since`` on, as of the last look."""
        kept, until = self._seen[_NUMBERS:], int(self._seen[Number.ITERATION])
        squares = [float(kept[number % KEPT_NORMS]) for number in range(since, until)]
        return [math.sqrt(square) if square >= 0 else math.nan for square in squares]

    def put(self, **numbers: float) -> None:
        """Change some numbers, by their names in lower case, after a look; this lifts a halt."""
        for name, value in {"halt": Halt.NO, **numbers}.items():
            self._seen[Number[name.upper()]] = value
        self._vectors.numbers[...] = self.device.asarray(self._seen[:_NUMBERS])


def _is_recordable(operator: Operator) -> bool:
    return isinstance(operator, ValidatedOperator) and operator.recordable
