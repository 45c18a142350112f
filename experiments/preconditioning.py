"""The preconditioners that experiments and commands name: how they are made, and what a plan must know of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.solvers import block_jacobi, chebyshev
from penstock.spmv import Operator

__all__ = ["DEFAULT_PRODUCTS", "PreconditionerKind", "Preconditioning"]

PreconditionerKind = Literal["none", "jacobi", "block_jacobi", "chebyshev"]
DEFAULT_PRODUCTS = 9


@dataclass(frozen=True)
class Preconditioning:
    """A choice of preconditioner.

    Parameters
    ----------
    kind : {"none", "jacobi", "block_jacobi", "chebyshev"}
    block_size : int
        Of ``block_jacobi``.
    products : int
        Of ``chebyshev``, an iteration.
    """

    kind: PreconditionerKind
    block_size: int = 1
    products: int = DEFAULT_PRODUCTS

    def build(self, A: Operator) -> Operator | None:
        """Return the preconditioner of a matrix."""
        if self.kind == "chebyshev":
            return chebyshev(A, self.products)
        return None if self.kind == "none" else block_jacobi(A, 1 if self.kind == "jacobi" else self.block_size)

    def vectors(self, columns: int) -> int:
        """Return how many vectors it holds for so many right-hand sides at a time."""
        return {"none": 0, "jacobi": 1, "block_jacobi": self.block_size, "chebyshev": 1 + 2 * columns}[self.kind]

    @property
    def following_products(self) -> int:
        """Products that follow each other in an application; 1 for one that makes none."""
        return max(1, self.products - 1) if self.kind == "chebyshev" else 1
