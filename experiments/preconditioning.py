"""The preconditioners that experiments and commands name: how they are made, and what a plan must know of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from penstock.solvers import block_jacobi, chebyshev
from penstock.spmv import Operator
from penstock.streaming import StreamedMatrix, StreamPlan, plan_products

__all__ = ["PreconditionerKind", "Preconditioning", "Products"]

PreconditionerKind = Literal["none", "jacobi", "block_jacobi", "chebyshev"]
#: Of a Chebyshev polynomial, an iteration.
Products = int | Literal["auto"]


@dataclass(frozen=True)
class Preconditioning:
    """A choice of preconditioner.

    Parameters
    ----------
    kind : {"none", "jacobi", "block_jacobi", "chebyshev"}
    block_size : int
        Of ``block_jacobi``, and of the blocks in ``chebyshev``.
    products : int or "auto"
        Of ``chebyshev``, an iteration; ``auto`` leaves them to the plan.
    """

    kind: PreconditionerKind
    block_size: int = 1
    products: Products = "auto"

    def build(self, A: Operator) -> Operator | None:
        """Return the preconditioner of a matrix."""
        if self.kind == "chebyshev":
            aligned = not isinstance(A, StreamedMatrix) or A.keeps_together(self.block_size)
            return chebyshev(A, self.products, block_size=self.block_size if aligned else 1)
        return None if self.kind == "none" else block_jacobi(A, 1 if self.kind == "jacobi" else self.block_size)

    def vectors(self, columns: int, *, recorded: bool) -> int:
        """Return how many vectors it holds for so many right-hand sides at a time.

        Parameters
        ----------
        columns : int
        recorded : bool
            Whether sweeps are recorded and replayed, as those of a matrix are that is streamed to a GPU.
        """
        blocks = 2 if columns == 1 else 3  # of products with the matrix, besides those of the solver
        if recorded:
            blocks += 3
        held = {
            "none": 0,
            "jacobi": 1,
            "block_jacobi": self.block_size,
            "chebyshev": self.block_size + blocks * columns,
        }
        return held[self.kind]

    def planned(self, plan_for: Callable[[int], StreamPlan]) -> StreamPlan:
        """Return the plan that ``plan_for(products)`` makes for the products that follow each other in an application."""
        if self.kind != "chebyshev":
            return plan_for(1)
        return plan_products(plan_for) if self.products == "auto" else plan_for(self.products)
