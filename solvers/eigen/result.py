"""The modes of a body: values, vectors, and what an engineer reads off them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from penstock.spmv import Array, InputError, NotConvergedError, device_of, format_nbytes
from penstock.spmv.explanations import as_table

Matrix = np.ndarray[Any, Any]
# Modes that a description lists.
_LISTED = 12
_AXES = {"x": 0, "y": 1, "z": 2}


class ModesReason(enum.Enum):
    """Why the search for modes ended. The value of a member explains the reason and what to do.

    Examples
    --------
    >>> from penstock.solvers import ModesReason
    >>> ModesReason("converged: the residuals of all modes meet the tolerance").name
    'CONVERGED'
    """

    CONVERGED = "converged: the residuals of all modes meet the tolerance"
    MAXITER = "stopped at maxiter before the residuals met the tolerance; raise maxiter or loosen tol"
    STOPPED = "stopped on request between two iterations"
    ROUNDING_FLOOR = (
        "stopped because the residuals no longer fall: they have reached what rounding in K x leaves where eigenvalues are this "
        "far below the largest one; the values are more accurate than the residuals, see errors"
    )
    STAGNATED = (
        "stopped because the residuals no longer fall: the coarse level represents slow modes of K badly; coordinates, or a "
        "near_null_space, make a better one where they are not given"
    )
    NOT_FINITE = "stopped because numbers left the range of their type: check K and M, and their units"


@dataclass(frozen=True, repr=False)
class Modes:
    """The lowest modes of ``K x = lambda M x``; ``values, vectors = modes`` works as of SciPy's ``eigsh``.

    Parameters
    ----------
    values : float64 array on the host, (k,)
        Ascending.
    vectors : array, (n, k)
        ``X^T M X = I``; the largest entry of each is positive. On the device where K lives.
    residuals : float64 array, (k,)
        ``||K x - lambda M x|| / (lambda ||M x||)``, from K and M; of free motions relative to the first value that is not zero.
    errors : float64 array, (k,)
        An eigenvalue is within this distance of each value (Krylov and Weinstein); the value is usually much nearer to it.
    zeros : int
        Free motions of the body, the first modes.
    reason : ModesReason
    message : str
    iterations : int
        Passes of the iteration over K, those of the search for missed modes included.
    sweeps : int
        Passes over a streamed K from the opening on; of a K in memory the iterations.
    bytes_streamed : int
    next_value : float or None
        About the next eigenvalue, if it is known.
    missed : int
        Modes that the iteration had missed and the search for them found.
    translations : float64 array, (k, directions)
        ``x^T M e`` for unit translations e of the whole body; no directions for other than 2, 3 or 6 unknowns a node.
    masses : float64 array, (directions, directions)
        ``e^T M e``: on the diagonal the mass of the body.
    timings : dict
        Seconds.
    decisions : str
    planned_nbytes : int
        Memory of the device that was planned before the start, for K, M, vectors and preconditioner; 0 for small problems.

    Examples
    --------
    >>> import penstock
    >>> from penstock.fem import Cantilever
    >>> beam = Cantilever(nodes=(9, 3, 3), dof=3)
    >>> modes = penstock.eigsh(beam.matrix(), 3, beam.mass(), device="cpu")
    >>> modes.converged, modes.values.shape, modes.vectors.shape, modes.frequencies.round(4).tolist()
    (True, (3,), (243, 3), [0.042, 0.042, 0.1553])
    """

    values: Matrix
    vectors: Array
    residuals: Matrix
    errors: Matrix
    zeros: int
    reason: ModesReason
    message: str
    iterations: int
    sweeps: int
    bytes_streamed: int
    next_value: float | None
    missed: int
    translations: Matrix
    masses: Matrix
    timings: dict[str, float] = field(default_factory=dict)
    decisions: str = ""
    planned_nbytes: int = 0

    @property
    def converged(self) -> bool:
        """Whether the residuals of all modes meet the tolerance."""
        return self.reason is ModesReason.CONVERGED

    @property
    def frequencies(self) -> Matrix:
        """``sqrt(lambda) / (2 pi)``: in Hz if stiffness and density are in SI units."""
        return np.sqrt(np.maximum(self.values, 0.0)) / (2 * np.pi)

    @property
    def cuts_cluster(self) -> bool:
        """Whether the next eigenvalue is that of the last mode, of which more modes would belong together."""
        return self.next_value is not None and bool(self.next_value <= self.values[-1] + CLUSTER * abs(self.values[-1]))

    def participation(self, direction: Any) -> Matrix:
        """Return the participation factors ``x^T M e`` of the modes in a direction.

        Parameters
        ----------
        direction : {"x", "y", "z"} or sequence of float, (directions,)
            A vector is scaled to length 1.

        Raises
        ------
        InputError
            If the unknowns of a node are no displacements, or the direction does not fit.
        """
        return self.translations @ self._direction(direction)

    def effective_mass(self, direction: Any) -> Matrix:
        """Return the masses that move with the modes in a direction; those of all modes add up to the mass of the body.

        Parameters
        ----------
        direction : {"x", "y", "z"} or sequence of float, (directions,)
        """
        return self.participation(direction) ** 2

    def _direction(self, direction: Any) -> Matrix:
        count = self.translations.shape[1]
        if not count:
            raise InputError(
                "the unknowns are not known to be displacements: give block_size=2, 3 or 6, or coordinates"
            )
        if isinstance(direction, str):
            if _AXES.get(direction, count) >= count:
                raise InputError(
                    f"direction must be one of {', '.join(list(_AXES)[:count])} or a vector, not {direction!r}"
                )
            axis: Matrix = np.eye(count)[_AXES[direction]]
            return axis
        try:
            vector = np.asarray(direction, dtype=np.float64)
        except (TypeError, ValueError):
            vector = np.empty(0)
        if vector.shape != (count,) or not np.isfinite(vector).all() or not vector.any():
            raise InputError(f"direction must be a vector of {count} numbers that are not all zero, not {direction!r}")
        unit: Matrix = vector / np.linalg.norm(vector)
        return unit

    def check(self) -> Self:
        """Return the modes themselves if they have converged, else raise a NotConvergedError with the message."""
        if not self.converged:
            raise NotConvergedError(self.message, self)
        return self

    def explain(self) -> str:
        """Return what was decided, found and spent, one fact a line, and a table of the modes."""
        streamed = f", {format_nbytes(self.bytes_streamed)} streamed" if self.bytes_streamed else ""
        lines = [
            *([self.decisions] if self.decisions else []),
            f"{'outcome':<11} {self.message}",
            f"{'cost':<11} {self.iterations} iterations, {self.sweeps} passes over K{streamed}",
            *(f"{title:<11} {text}" for title, text in self._findings()),
        ]
        return "\n".join([*lines, *self._table()])

    def _findings(self) -> list[tuple[str, str]]:
        found = []
        if self.zeros:
            found.append(("free", f"{self.zeros} motions without energy, the first modes: the body is not supported"))
        if self.missed:
            found.append(("missed", f"{self.missed} modes were found by the search for missed ones only"))
        if self.cuts_cluster:
            found.append(
                (
                    "cluster",
                    f"the next value is that of mode {len(self.values)}: ask for more modes to have all that belong together",
                )
            )
        return found

    def _table(self) -> list[str]:
        count = self.translations.shape[1]
        shares = [f"mass {axis}" for axis in list(_AXES)[:count]]
        lines = [" ".join(f"{title:>11}" for title in ("mode", "value", "frequency", "residual", *shares))]
        totals = np.diag(self.masses)
        for number in range(min(len(self.values), _LISTED)):
            row = [
                f"{number + 1:>11d}",
                *(f"{of[number]:>11.4g}" for of in (self.values, self.frequencies, self.residuals)),
            ]
            row += [f"{share:>11.1%}" for share in self.translations[number] ** 2 / np.where(totals > 0, totals, 1.0)]
            lines.append(" ".join(row))
        if len(self.values) > _LISTED:
            lines.append(f"{'...':>11}")
        return lines

    def __iter__(self) -> Any:
        return iter((self.values, self.vectors))

    def __getitem__(self, number: int) -> Any:
        """``eigsh(K)[0]`` are the values, as of SciPy's."""
        return (self.values, self.vectors)[number]

    def __repr__(self) -> str:
        reason = self.reason.name.lower().replace("_", " ")
        first, last = self.frequencies[[0, -1]]
        count, unknowns = len(self.values), self.vectors.shape[0]
        return f"<Modes {count} of {unknowns:,} unknowns, frequencies {first:.4g} to {last:.4g}, {reason}>"

    def _repr_html_(self) -> str:
        return as_table(self.explain())


#: Values nearer to each other than this share belong to one cluster.
CLUSTER = 1e-4


def with_fixed_signs(vectors: Array) -> Array:
    """Return vectors whose entries of largest magnitude are positive; in place."""
    xp = device_of(vectors).xp
    for column in range(vectors.shape[1]):
        of_column = xp.ascontiguousarray(vectors[:, column])
        if float(of_column.max()) < -float(of_column.min()):
            vectors[:, column] = -of_column
    return vectors


def of_translations(of_mass: Array, directions: int, unknowns: int) -> Matrix:
    """Return ``(M X)^T e`` for unit translations e, (k, directions)."""
    device = device_of(of_mass)
    if not directions:
        return np.zeros((of_mass.shape[1], 0))
    sums = [device.to_host(device.xp.ascontiguousarray(of_mass[d::unknowns]).sum(axis=0)) for d in range(directions)]
    return np.stack(sums, axis=1)
