"""The operator protocol, and a base class that validates arguments in one place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import numpy as np

from penstock.spmv.as_scipy import LikeScipy
from penstock.spmv.device import Array, Device, device_of
from penstock.spmv.errors import InputError


@runtime_checkable
class Operator(Protocol):
    """Anything linear that can be applied to a vector ``(n,)`` or a C-ordered block of vectors ``(n, k)``.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> A = Cantilever(nodes=2, dof=1).matrix()
    >>> isinstance(A, Operator), A.shape, A.dtype.name, str(A.device)
    (True, (8, 8), 'float64', 'cpu')
    """

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Type of the vectors: float64 or float32."""

    @property
    def device(self) -> Device:
        """Where the vectors live."""

    def apply(self, x: Array, out: Array | None = None, *, alpha: float = 1.0, beta: float = 0.0) -> Array:
        """Return ``out = alpha * A @ x + beta * out``; with ``beta == 0`` the old ``out`` is never read."""


@runtime_checkable
class HasDiagonalBlocks(Protocol):
    """An operator that provides the dense blocks on its diagonal, which Jacobi preconditioners need.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> Cantilever(nodes=3, dof=3).matrix().diagonal_blocks(3).shape
    (27, 3, 3)
    """

    def diagonal_blocks(self, size: int) -> Array:
        """Return the blocks as an array ``(rows / size, size, size)``."""


@runtime_checkable
class HasAbsoluteProduct(Protocol):
    """An operator that can compute ``|A| @ x``, which bounds the rounding error of ``A @ x``.

    Examples
    --------
    >>> import scipy.sparse
    >>> from penstock.spmv import as_operator
    >>> as_operator(scipy.sparse.csr_array([[4.0, -1.0], [-1.0, 4.0]])).apply_absolute([1.0, 1.0]).tolist()
    [5.0, 5.0]
    """

    def apply_absolute(self, x: Array) -> Array:
        """Return ``|A| @ x`` for ``x`` of shape ``(columns,)``."""


class ValidatedOperator(LikeScipy, ABC):
    """Base of operators: ``apply`` checks shapes, types and devices; ``_apply`` contains only the mathematics.

    Examples
    --------
    >>> import numpy as np
    >>> from penstock.spmv import CPU, ValidatedOperator
    >>> class Twice(ValidatedOperator):
    ...     shape, dtype, device = (2, 2), np.dtype(np.float64), CPU
    ...     def _apply(self, x, out, alpha, beta):
    ...         out[...] = 2 * alpha * x + (beta * out if beta else 0)
    >>> (Twice() @ [1.0, 3.0]).tolist()
    [2.0, 6.0]
    """

    # Annotations only: a subclass sets them as attributes, as fields of a dataclass, or as properties.
    shape: tuple[int, int]
    dtype: np.dtype[np.generic]
    device: Device

    @property
    def capturable(self) -> bool:
        """Whether every product only launches the same kernels of this library, so that a CUDA graph can capture it."""
        return False

    @abstractmethod
    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        """Write ``alpha * A @ x + beta * out`` into ``out``; arguments are valid, ``beta == 0`` must not read out."""

    def apply(self, x: Array, out: Array | None = None, *, alpha: float = 1.0, beta: float = 0.0) -> Array:
        """Return ``out = alpha * A @ x + beta * out``.

        Parameters
        ----------
        x : array, (columns,) or (columns, k)
            A vector, or k vectors with the k values of a row adjacent (C order). Real; integers and narrower floats are
            cast to ``dtype``, wider floats are refused.
        out : array, (rows,) or (rows, k), optional
            Result; of type ``dtype``, C-contiguous, not overlapping ``x``. Allocated by default.
        alpha, beta : float
            Scalars. With ``beta == 0`` the old content of ``out``, NaN or not, has no effect.

        Raises
        ------
        InputError
            If a shape, type or device does not fit; the message gives both sides.

        Notes
        -----
        On a CUDA device the work is ordered on CuPy's current stream and the host does not wait for it.
        """
        rows, columns = self.shape
        x = as_vectors(x, columns, self, "x")
        out_shape = (rows, *x.shape[1:])
        if out is None and beta != 0:
            raise InputError("beta is not zero, so out must be passed: it is scaled and added to")
        out = as_output(out, out_shape, self, x, "x")
        with self.device.current():
            self._apply(x, out, float(alpha), float(beta))
        return out

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(self._facts())}>"

    def _facts(self) -> list[str]:
        """Return the parts of ``repr``."""
        return [f"{self.shape[0]:,} x {self.shape[1]:,}", str(self.dtype), str(self.device)]


def is_capturable(operator: Operator) -> bool:
    """Return whether every product only launches the same kernels, so that a CUDA graph can capture it."""
    return isinstance(operator, ValidatedOperator) and operator.capturable


class SweptOperator(ValidatedOperator):
    """A streamed matrix as solvers see it: a product is a pass over a matrix that need not fit in the memory of the device.

    The defaults are those of an operator whose products share no sweep and whose entries are not accessible; a subclass overrides
    what differs.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.streaming import HostStore, StreamedMatrix, Workload
    >>> beam = Cantilever(nodes=4, dof=3)
    >>> store = HostStore.create(beam.subdivisions(4))
    >>> with StreamedMatrix(store, "64 KiB", workload=Workload(workspace_nbytes=4096)) as A:
    ...     product = A @ beam.load()
    ...     isinstance(A, SweptOperator), A.sweeps, A.bytes_streamed, A.direction, A.workspace_nbytes
    (True, 1, 98304, -1, 4096)
    """

    @property
    def alternates(self) -> bool:
        """Whether sweeps alternate in direction, and a solver that makes one in between restores the direction of the next."""
        return False

    @property
    @abstractmethod
    def sweeps(self) -> int:
        """Passes over the whole matrix so far."""

    @property
    @abstractmethod
    def bytes_streamed(self) -> int:
        """Bytes that those sweeps moved over the link."""

    @property
    @abstractmethod
    def waited_seconds(self) -> float:
        """Seconds that the host has waited, for a GPU while products were started or for data while the CPU computed them."""

    @property
    @abstractmethod
    def workspace_nbytes(self) -> int:
        """Bytes that the plan reserves for the vectors of a solver; 0 if it reserves none."""

    @property
    @abstractmethod
    def direction(self) -> int:
        """Direction of the next sweep: 1 for ascending rows, -1 for descending rows."""

    @abstractmethod
    def turn_to(self, direction: int) -> None:
        """Set the direction of the next sweep."""

    @abstractmethod
    def recording(self) -> AbstractContextManager[Any]:
        """Record the times of all transfers and computations in a ``with`` block."""

    def sweeps_of(self, products: int) -> int:
        """Return the sweeps of some consecutive products; here none share one."""
        return products

    def turn_back(self, products: int) -> None:
        """Let the next consecutive products sweep as this many of them did before; here they need not."""
        return

    def advance(self, recurrence: Any) -> None:
        """Perform all steps of a recurrence."""
        recurrence.run_whole(self, range(len(recurrence.steps)))

    def preferred_degree(self) -> int | None:
        """Return the polynomial degree that makes the best use of a sweep; None if it does not matter."""
        return None

    def keeps_together(self, rows: int) -> bool:
        """Return whether every block of ``rows`` rows, which a diagonal may couple, is always advanced as a whole."""
        return True

    def apply_all(self, *products: tuple[Array, Array, float, float]) -> None:
        """Compute ``out = alpha A @ x + beta out`` for each ``(x, out, alpha, beta)``, in one sweep if several share one."""
        for product in products:
            self._apply(*product)

    @property
    def can_round(self) -> bool:
        """Whether fewer bytes move for a product with the matrix rounded to float32, by :meth:`apply_rounded`."""
        return False

    def apply_rounded(self, x: Array, out: Array | None = None) -> Array:
        """Return ``y`` with ``|y - A x| <= 2 ** -24 |A| |x|``, but for the rounding of the product."""
        return self.apply(x, out)

    def replayed_vectors(self, like: Array) -> tuple[Array, Array] | None:
        """Return vectors of a shape, the same ones in every call, between which a GPU replays products; None if it does not."""
        return None

    @property
    def row_bounds(self) -> tuple[int, ...] | None:
        """Rows between which rows are always advanced as a whole, from 0 to the number of rows; None if they are not known."""
        return None

    @property
    def block_size(self) -> int:
        """Rows of the dense blocks that are stored; 1 without blocks."""
        return 1

    def visit_slabs(self, visit: Callable[[int, Any], None]) -> None:
        """Call ``visit(first_row, slab)`` for all subdivisions, in one sweep."""
        raise InputError(
            f"a coarse level is made of the entries of a matrix, which {type(self).__name__} does not show"
        )


def unchecked_product(operator: Operator) -> Callable[[Array, Array, float, float], object]:
    """Return ``product(x, out, alpha, beta)`` without the checks of ``apply``, for callers with validated vectors."""
    if isinstance(operator, ValidatedOperator):
        return operator._apply
    return lambda x, out, alpha, beta: operator.apply(x, out, alpha=alpha, beta=beta)


def as_output(out: Array | None, shape: tuple[int, ...], operator: Operator, x: Array, name: str) -> Array:
    """Return ``out`` after checking its shape, type, layout, device and overlap with ``x``; a new array for None."""
    if out is None:
        return operator.device.xp.empty(shape, dtype=operator.dtype)
    if out.shape != shape or out.dtype != operator.dtype or not out.flags.c_contiguous:
        raise InputError(
            f"out must be a C-contiguous array of shape {shape} and type {operator.dtype}, not {out.shape} and {out.dtype}"
        )
    if device_of(out) != operator.device:
        raise InputError(f"out lives on {device_of(out)}, the operator on {operator.device}")
    if operator.device.xp.may_share_memory(x, out):
        raise InputError(f"{name} and out overlap; give out its own memory")
    return out


def as_vectors(x: Array, length: int, operator: Operator, name: str) -> Array:
    """Return ``x`` as C-contiguous vectors of the operator's type on its device.

    Parameters
    ----------
    x : array, (length,) or (length, k)
        Real. Integers and narrower floats are cast; Python numbers adopt the operator's type.
    length : int
        Rows that x must have.
    operator : Operator
        Whose type and device x must fit.
    name : str
        What messages call x.

    Returns
    -------
    array, (length,) or (length, k)
        Of the operator's ``dtype``; x itself where nothing had to be cast or copied.

    Raises
    ------
    InputError
        If ``x`` has another length, more than two dimensions, a type that cannot be cast safely, or lives elsewhere.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> as_vectors([1, 2, 3, 4, 5, 6, 7, 8], 8, Cantilever(nodes=2, dof=1).matrix(), "x").dtype.name
    'float64'
    """
    if not hasattr(x, "dtype"):
        x = operator.device.asarray(x)
        if x.dtype == np.float64:  # Python numbers adopt the type of the operator
            x = x.astype(operator.dtype)
    if x.ndim not in (1, 2) or x.shape[0] != length:
        raise InputError(f"{name} must have shape ({length},) or ({length}, k), not {x.shape}")
    if x.dtype.kind not in "fiub" or not np.can_cast(x.dtype, operator.dtype, casting="same_kind"):
        raise InputError(
            f"{name} has type {x.dtype}, the operator works in {operator.dtype}; cast it with .astype({operator.dtype})"
        )
    if x.dtype.kind == "f" and x.dtype.itemsize > operator.dtype.itemsize:
        raise InputError(f"{name} is {x.dtype}, the operator {operator.dtype}: cast one of them, digits would be lost")
    if device_of(x) != operator.device:
        raise InputError(f"{name} lives on {device_of(x)}, the operator on {operator.device}; move one of them")
    return operator.device.xp.ascontiguousarray(x, dtype=operator.dtype)
