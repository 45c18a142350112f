"""What conjugate gradients remember from one iteration to the next, and write into a checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from penstock.solvers.saved_state import SavedState
from penstock.solvers.states import StateLayout, check_all, check_counts, check_history, check_numbers
from penstock.spmv import Array


@dataclass
class CgState(SavedState):
    """Everything that the next iteration needs; a checkpoint is a saved state.

    Parameters
    ----------
    x, r, p : array, (n,)
        Iterate, recursive residual, search direction.
    rho : float
        ``r . M r``.
    iteration : int
    last_true_residual : float
        ``||b - A x||`` when it was last computed to test convergence; infinite before.
    residual_norms : list of float
        Relative, as in the result.
    matrix_norm : float
        Largest ``||A p|| / ||p||`` so far.
    drift, first_drift : float
        Bound of the distance, due to rounding, between the recursive and the true residual; its value when the residual was last
        computed as ``b - A x``.
    replacements : int
        Number of times that the residual was computed as ``b - A x`` after the first time.
    energy : float
        Lower bound of ``x . (b + r) / 2`` when r was last computed so, which only rounding makes smaller; minus infinity before.
    q : array, (n,), optional
        ``A p``, if the preconditioner computes it.
    system : SystemMark, optional
        What the state knows of its system.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import cg
    >>> beam = Cantilever(nodes=(5, 3, 3), dof=3)
    >>> A, b = beam.matrix(), beam.load()
    >>> state = cg(A, b, maxiter=10).state
    >>> state.iteration, len(state.residual_norms), cg(A, b, state=state).converged
    (10, 11, True)
    """

    vectors: ClassVar[tuple[str, ...]] = ("x", "r", "p", "q")

    x: Array
    r: Array
    p: Array
    rho: float
    iteration: int = 0
    last_true_residual: float = math.inf
    residual_norms: list[float] = field(default_factory=list)
    matrix_norm: float = 0.0
    drift: float = 0.0
    first_drift: float = 0.0
    replacements: int = 0
    energy: float = -math.inf
    q: Array | None = None

    def check(self, layout: StateLayout) -> None:
        """Raise an InputError if arrays or numbers do not fit the layout, or cannot be; the message names the first."""
        check_all(layout, self, ("x", "r", "p", *(() if self.q is None else ("q",))))
        check_numbers({"rho": self.rho}, positive=True)
        check_numbers({name: getattr(self, name) for name in ("matrix_norm", "drift", "first_drift")})
        check_numbers({"energy": self.energy}, least=-math.inf)
        check_numbers({"last_true_residual": self.last_true_residual}, finite=False)
        check_counts(iteration=self.iteration, replacements=self.replacements)
        check_history(self.residual_norms)
