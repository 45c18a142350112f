"""The iteration of preconditioned conjugate gradients (Hestenes and Stiefel 1952; Saad 2003, algorithm 9.1).

One iteration, in three fused passes over vectors; scalars stay on the device of the vectors::

    q = A p                       product
    alpha = rho / p.q             curvature: reads 2 n values
    r -= alpha q;  z = M r        descend:   reads 2 n, writes 2 n (n without a preconditioner); sums r.r and r.z
    x += alpha p                  extend:    reads 3 n, writes 2 n
    beta = r.z / rho;  p = z + beta p

This is 11 n values besides those of A and M, 10 n without a preconditioner. A preconditioner of diagonal blocks of b rows is
part of the second pass and reads its own b n values; any other one is applied between the passes, and r.z then reads 2 n more.
Vectors in memory: b of the caller, x, the best x so far, r, p, q and, with a preconditioner, z. On a CPU, without other ranks
and with two sums an iteration, M is not applied to an r that meets the tolerance: the recurrence halts there, and the true
residual decides.

A preconditioner made of products with A also computes ``w = A z``. Then q is not a product but ``w + beta q``, which reads 2 n
values and writes n: streamed, all products of an iteration can share a sweep, and w is an additional vector. The bound of the
drift then does not include rounding in q; convergence is still declared on the true residual.

With ``reductions=1``, all sums over ranks of an iteration are one (Chronopoulos and Gear 1989). w is then formed for any
preconditioner, instead of A p, and ``p.A p`` is deduced from ``z.A z``: 5 n values and one vector more.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from penstock.solvers.cg_kernels import CpuPasses, CudaPasses, Halt, Passes, Scalar
from penstock.solvers.method import MOST_UNREAD
from penstock.solvers.preconditioners import DiagonalBlocks, with_product
from penstock.spmv import Array, Operator
from penstock.spmv.communicator import communicator_of
from penstock.spmv.compilation.cuda_graph import Replay
from penstock.spmv.operator import is_capturable, unchecked_product


class CgRecurrence:
    """The iteration, on vectors (n,) of the caller: x, r and p are advanced in place, q, z and w are workspace.

    z is None without a preconditioner. w holds the image of z, if M computes it or all sums are formed ``at_once``; then q must
    be the image of p when the first iteration begins.

    After a halt, iterations change nothing until :meth:`put` resumes them. The host may thus start many iterations before it
    reads the scalars. If A and M only start kernels of this library on a GPU, an iteration is captured as a CUDA graph.
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
        *,
        at_once: bool = False,
    ) -> None:
        device, self._at_once = A.device, at_once
        # One array, so that one copy transfers everything to the host.
        self._ledger = device.xp.zeros(len(Scalar) + MOST_UNREAD)
        self._seen = device.pinned_like(self._ledger)
        self._seen[...] = 0.0
        blocks = M.blocks if isinstance(M, DiagonalBlocks) else None
        applied = M if blocks is None else None
        scalars, norms_squared = self._ledger[: len(Scalar)], self._ledger[len(Scalar) :]
        z = r if z is None else z
        vectors, ledger = (x, r, p, q, z, z if w is None else w), (scalars, norms_squared)
        kind = CudaPasses if device.kind == "cuda" else CpuPasses
        self._passes: Passes = kind(*vectors, blocks, *ledger, device, communicator_of(A), at_once)
        self._device = device
        self._multiply = unchecked_product(A)
        self._precondition = None if applied is None else unchecked_product(applied)
        self._with_product = None if w is None else with_product(M, A)
        capturable = device.kind == "cuda" and all(is_capturable(op) for op in (A, applied) if op is not None)
        iterate = self._iterate_with_one_sum if at_once else self._iterate
        self._iterate_once = Replay(iterate, capturable=True) if capturable else iterate
        self.matrix_seconds = self.preconditioner_seconds = 0.0
        self._left_out = 0  # products with A that the last `advance` skipped

    def advance(self, iterations: int) -> int:
        """Start iterations, at most :data:`MOST_UNREAD`, and return how many products with A they take.

        On CUDA the host does not wait for them.
        """
        self._left_out = 0
        for _ in range(iterations):
            self._iterate_once()
        return iterations - self._left_out

    def _iterate(self) -> None:
        passes = self._passes
        if self._with_product is None:
            self._product(passes.p, passes.q)  # q = A p
        passes.curvature()  # alpha = rho / p.q
        passes.descend()  # r -= alpha q;  z = M r if M is diagonal
        self._apply_preconditioner()  # z = M r;  w = A z
        passes.extend()  # x += alpha p;  beta = r.z / rho;  p = z + beta p
        if self._with_product is not None:
            passes.extend_image()  # q = w + beta q

    def _iterate_with_one_sum(self) -> None:
        """Iterate by the recurrences of Chronopoulos and Gear (1989), with the image of z instead of that of p.

        The bound of the drift then uses the x.x of the iteration before: sums of this one come too early for its own.
        """
        passes = self._passes
        passes.close()
        passes.descend()
        self._apply_preconditioner()
        if self._with_product is None:
            self._product(passes.z, passes.w)
        passes.image_product()
        passes.add_up()
        passes.foresee()
        passes.extend()
        passes.extend_image()
        passes.curvature()

    def _product(self, x: Array, out: Array) -> None:
        """Set ``out = A x``."""
        began = time.perf_counter()
        self._multiply(x, out, 1.0, 0.0)
        self.matrix_seconds += time.perf_counter() - began

    def _apply_preconditioner(self) -> None:
        """Set z, and w if the preconditioner computes it, and sum r.z, unless a pass does or nothing reads them."""
        if self._precondition is not None and self._passes.will_halt:
            self._left_out += self._with_product is not None
        elif self._precondition is not None:
            of, began = self._passes, time.perf_counter()
            if self._with_product is None:
                self._precondition(of.r, of.z, 1.0, 0.0)
            else:
                self._with_product.apply_with_product(of.r, of.z, of.w)
            self.preconditioner_seconds += time.perf_counter() - began
            of.residual_product()

    def look(self) -> np.ndarray[Any, Any]:
        """Wait for all started iterations and return the scalars."""
        self._passes.close()
        self._device.copy_to_pinned(self._ledger, self._seen)
        return self._seen[: len(Scalar)]

    def norms(self, since: int) -> list[float]:
        """Return ``||r||`` after each iteration from number ``since`` on, as read by the last :meth:`look`."""
        norms, until = self._seen[len(Scalar) :], int(self._seen[Scalar.ITERATION])
        squares = [float(norms[number % MOST_UNREAD]) for number in range(since, until)]
        return [math.sqrt(square) if square >= 0 else math.nan for square in squares]

    def put(self, **scalars: float) -> None:
        """Change scalars, by their names in lower case, after a :meth:`look`; this ends a halt."""
        for name, value in {"halt": Halt.NO_HALT, **scalars}.items():
            self._seen[Scalar[name.upper()]] = value
        self._passes.numbers[...] = self._device.asarray(self._seen[: len(Scalar)])
        if self._at_once:  # later directions' curvatures are deduced from that of this one
            self._passes.curvature()
            self._passes.add_up()
