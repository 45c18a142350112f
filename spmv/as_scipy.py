"""What scripts and solvers written for SciPy call on an operator: products by other names, sums, and ``LinearOperator``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from numbers import Real
from typing import Any

import numpy as np

from penstock.spmv.device import Array, Device
from penstock.spmv.errors import InputError

__all__ = ["LikeScipy"]


class LikeScipy(ABC):
    """Base of operators that behave like matrices of SciPy: all that follows from ``apply``."""

    shape: tuple[int, int]
    dtype: np.dtype[np.generic]
    device: Device

    # NumPy leaves sums and products with its arrays to these methods, instead of taking each entry by itself.
    __array_ufunc__ = None

    @abstractmethod
    def apply(self, x: Array, out: Array | None = None, *, alpha: float = 1.0, beta: float = 0.0) -> Array:
        """Return ``out = alpha * A @ x + beta * out``."""

    def __matmul__(self, x: Array) -> Array:
        """``A @ x`` is ``A.apply(x)``."""
        return self.apply(x)

    def dot(self, x: Array) -> Array:
        """Return ``A @ x``, as matrices of SciPy do."""
        return self.apply(x)

    def __mul__(self, factor: Any) -> Any:
        """Return a number times the operator, as a ``LinearOperator``."""
        return self.linear_operator() * factor if isinstance(factor, Real) else NotImplemented

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        """Return the operator divided by a number, as a ``LinearOperator``."""
        return self.linear_operator() * (1.0 / divisor) if isinstance(divisor, Real) else NotImplemented

    def __neg__(self) -> Any:
        """Return minus the operator, as a ``LinearOperator``."""
        return self.linear_operator() * -1.0

    def __add__(self, other: Any) -> Any:
        """Return the sum with another operator or matrix on the same device, as a ``LinearOperator``."""
        return self.linear_operator() + self._linear(other)

    def __radd__(self, other: Any) -> Any:
        """Return the sum with a matrix of SciPy or CuPy, as a ``LinearOperator``; with 0, which ``sum`` begins with, itself."""
        if isinstance(other, Real) and other == 0:
            return self
        return self._linear(other) + self.linear_operator()

    def __sub__(self, other: Any) -> Any:
        """Return the difference to another operator or matrix on the same device, as a ``LinearOperator``."""
        return self.linear_operator() + -1.0 * self._linear(other)

    def __rsub__(self, other: Any) -> Any:
        """Return a matrix of SciPy or CuPy minus the operator, as a ``LinearOperator``."""
        return self._linear(other) + -self

    def matvec(self, x: Array) -> Array:
        """Return ``A @ x``: by this name solvers of SciPy find it, so ``scipy.sparse.linalg.eigsh(A)`` works as it is.

        Raises
        ------
        InputError
            If the operator has the rows of one of several ranks, because the sums of those solvers would be of one rank.
        """
        self._check_alone()
        return self.apply(x)

    def linear_operator(self) -> Any:
        """Return this operator as SciPy's ``LinearOperator``, or CuPy's on a GPU, for their solvers and for sums and products.

        Streamed operators too: each product is then a sweep over the matrix, and a product with a block one for all its vectors.

        Returns
        -------
        scipy.sparse.linalg.LinearOperator or cupyx.scipy.sparse.linalg.LinearOperator

        Raises
        ------
        InputError
            As :meth:`matvec`.

        Examples
        --------
        >>> import scipy.sparse.linalg
        >>> from penstock.fem import Cantilever
        >>> A = Cantilever(nodes=(5, 3, 3)).matrix()
        >>> [largest] = scipy.sparse.linalg.eigsh(A.linear_operator(), k=1, return_eigenvectors=False)
        >>> scaled = A.linear_operator() * (1.0 / largest)
        >>> scaled.shape
        (135, 135)
        """
        self._check_alone()
        return self._library().LinearOperator(self.shape, self.apply, matmat=self.apply, dtype=self.dtype)

    def _library(self) -> Any:
        if self.device.kind == "cuda":
            import cupyx.scipy.sparse.linalg as library
        else:
            import scipy.sparse.linalg as library
        return library

    def _linear(self, other: Any) -> Any:
        if isinstance(other, LikeScipy):
            if other.device != self.device:
                raise InputError(
                    f"one operator computes on {self.device}, the other on {other.device}; move one of them"
                )
            return other.linear_operator()
        return self._library().aslinearoperator(other)

    def _check_alone(self) -> None:
        size = getattr(getattr(self, "communicator", None), "size", 1)
        if size > 1:
            raise InputError(
                f"this {type(self).__name__} has the rows of one of {size} ranks, and solvers of SciPy know nothing of the "
                "others; use cg or block_cg"
            )
