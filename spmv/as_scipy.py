"""The interface of SciPy's matrices for operators: products by other names, sums, and ``LinearOperator``."""

from __future__ import annotations

import functools
import operator
from abc import ABC, abstractmethod
from numbers import Real
from typing import Any, Self

import numpy as np

from penstock.spmv.device import Array, Device
from penstock.spmv.errors import InputError


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
        if isinstance(x, LikeScipy) or hasattr(x, "tocsr"):
            raise InputError(
                "A @ x takes a vector or a block of vectors; penstock.solvers.multiply multiplies sparse matrices"
            )
        return self.apply(x)

    def dot(self, x: Array) -> Array:
        """Return ``A @ x``, as matrices of SciPy do."""
        return self.apply(x)

    def __mul__(self, factor: Any) -> Any:
        """Return a number times the operator, as an operator."""
        number = _number(factor)
        return NotImplemented if number is None else Combination([(number * of, part) for of, part in self._terms()])

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        """Return the operator divided by a number, as an operator."""
        number = _number(divisor)
        return NotImplemented if number is None else self * (1.0 / number)

    def __neg__(self) -> Combination:
        """Return minus the operator, as an operator."""
        return Combination([(-of, part) for of, part in self._terms()])

    def __pos__(self) -> Self:
        """Return the operator."""
        return self

    def __add__(self, other: Any) -> Any:
        """Return the sum with an operator or a matrix on the same device, as an operator; ``sum`` begins with 0."""
        if _number(other) == 0.0:
            return self
        terms = _terms_of(other)
        return NotImplemented if terms is None else Combination([*self._terms(), *terms])

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        """Return the difference to an operator or a matrix on the same device, as an operator."""
        if _number(other) == 0.0:
            return self
        terms = _terms_of(other)
        return NotImplemented if terms is None else Combination([*self._terms(), *((-of, part) for of, part in terms)])

    def __rsub__(self, other: Any) -> Any:
        """Return a matrix minus the operator, as an operator."""
        return -self + other

    def _terms(self) -> list[Term]:
        """Return the terms of this sum: numbers and operators."""
        return [(1.0, self)]

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
        if self.device.kind == "cuda":
            from cupyx.scipy.sparse.linalg import LinearOperator
        else:
            from scipy.sparse.linalg import LinearOperator
        return LinearOperator(self.shape, self.apply, matmat=self.apply, dtype=self.dtype)

    def _check_alone(self) -> None:
        size = getattr(getattr(self, "communicator", None), "size", 1)
        if size > 1:
            raise InputError(
                f"this {type(self).__name__} has the rows of one of {size} ranks, and solvers of SciPy know nothing of the "
                "others; use cg or block_cg"
            )


class Combination(LikeScipy):
    """A sum of operators and of matrices of SciPy, CuPy or NumPy, each times a number.

    Its type is the widest of theirs. Values in float32 stay as they are stored, and are multiplied by vectors in float64 if
    any part has float64. The first operator of penstock decides the device.
    """

    def __init__(self, terms: list[Term]) -> None:
        own = [part for _, part in terms if isinstance(part, LikeScipy)]
        self.shape, self.device = own[0].shape, own[0].device
        self.dtype = np.result_type(np.float32, *(getattr(part, "dtype", None) or np.float64 for _, part in terms))
        for part in own:
            if part.device != self.device:
                raise InputError(
                    f"one operator computes on {self.device}, the other on {part.device}; move one of them"
                )
        for _, part in terms:
            if tuple(part.shape) != tuple(self.shape):
                raise InputError(f"operators of shapes {tuple(self.shape)} and {tuple(part.shape)} have no sum")
        if self.dtype not in (np.float32, np.float64):
            raise InputError(f"a sum of type {self.dtype} is not supported; give real numbers of up to 64 bits")
        self._sum = [(of, self._widened(part) if isinstance(part, LikeScipy) else part) for of, part in terms]

    def _widened(self, part: Any) -> Any:
        if part.dtype == self.dtype:
            return part
        if not hasattr(part, "from_arrays"):
            raise InputError(
                f"a {type(part).__name__} in {part.dtype} takes no vectors in {self.dtype}; sum parts of one type"
            )
        return part.from_arrays(part.shape, self.dtype, part.arrays(), part.parameters())

    def _terms(self) -> list[Term]:
        return self._sum

    def apply(self, x: Array, out: Array | None = None, *, alpha: float = 1.0, beta: float = 0.0) -> Array:
        """Return ``out = alpha * A @ x + beta * out``, as :meth:`penstock.spmv.ValidatedOperator.apply`."""
        x = self.device.xp.asarray(x)
        if x.dtype.kind in "iub" or not np.can_cast(self.dtype, x.dtype):
            x = x.astype(self.dtype)
        # One product after another: no more than two of them are in memory.
        total = functools.reduce(operator.add, ((number * alpha) * (part @ x) for number, part in self._sum))
        if out is None:
            return total.astype(self.dtype, copy=False)
        out[...] = total + beta * out if beta else total
        return out

    def __repr__(self) -> str:
        return f"<Combination of {len(self._sum)} operators, {self.shape[0]:,} x {self.shape[1]:,}, {self.dtype}, {self.device}>"


#: A number and an operator or a matrix.
Term = tuple[float, Any]


def _number(value: Any) -> float | None:
    """Return a real number as float, and None for anything else; arrays without dimensions are numbers, too."""
    is_real = isinstance(value, Real) or (
        getattr(value, "ndim", None) == 0 and getattr(value.dtype, "kind", "") in "fiub"
    )
    return float(value) if is_real else None


def _terms_of(other: Any) -> list[Term] | None:
    """Return the terms of an operator or a matrix, or None for what is neither."""
    if isinstance(other, LikeScipy):
        return other._terms()
    is_matrix = len(getattr(other, "shape", ())) == 2 and hasattr(other, "__matmul__") and hasattr(other, "dtype")
    return [(1.0, other)] if is_matrix else None
