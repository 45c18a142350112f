"""M of ``K x = lambda M x``: products of some rows, inside a pass over K, and rows of nodes for the coarse level."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import scipy.linalg
import scipy.sparse

from penstock.solvers.amg.inner_iterations import InnerIterations
from penstock.solvers.method import is_symmetric
from penstock.spmv import Array, Device, InputError, NodeMatrix, ValidatedOperator, VectorSpace
from penstock.spmv.products.block_rows import BlockRows
from penstock.spmv.vectors.noise import noise

# Steps that look for a negative eigenvalue of M, and what is zero beside its diagonal of ones.
_LANCZOS, _LOST = 15, 1e-8
# Vectors for which M is solved together, and what is added for the digits that the solves leave.
_SOLVED_AT_ONCE, _MARGIN = 4, 1.01


class Mass(ValidatedOperator, ABC):
    """A symmetric positive (semi)definite M of n unknowns, in the memory of its device."""

    def __init__(self, n: int, device: Device) -> None:
        self.shape, self.dtype, self.device = (n, n), np.dtype(np.float64), device

    @property
    def capturable(self) -> bool:
        """True: a product only launches kernels."""
        return True

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes on the device."""

    @abstractmethod
    def apply_rows(self, rows: slice, x: Array, out: Array) -> None:
        """Set ``out`` to some rows of ``M x``, those of whole nodes."""

    @abstractmethod
    def node_rows(self, size: int, start: int, stop: int) -> BlockRows:
        """Return the rows of some nodes of ``size`` unknowns."""

    @abstractmethod
    def diagonal(self) -> Array:
        """Return the diagonal, (n,)."""

    @abstractmethod
    def on(self, device: Device) -> Mass:
        """Return M on a device."""

    @abstractmethod
    def to_csr(self) -> scipy.sparse.csr_array:
        """Return M as SciPy CSR on the host."""


class LumpedMass(Mass):
    """A diagonal."""

    def __init__(self, diagonal: Array, device: Device) -> None:
        super().__init__(len(diagonal), device)
        self._diagonal = device.asarray(diagonal, dtype=np.float64)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return int(self._diagonal.nbytes)

    def apply_rows(self, rows: slice, x: Array, out: Array) -> None:
        """Set ``out`` to some rows of ``M x``."""
        of_rows = self._diagonal[rows]
        self.device.xp.multiply(x[rows], of_rows if x.ndim == 1 else of_rows[:, None], out=out)

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        VectorSpace(self.device).write(
            alpha, x * (self._diagonal if x.ndim == 1 else self._diagonal[:, None]), beta, out
        )

    def node_rows(self, size: int, start: int, stop: int) -> BlockRows:
        """Return the rows of some nodes of ``size`` unknowns."""
        xp = self.device.xp
        blocks = self._diagonal[start * size : stop * size].reshape(-1, size, 1) * xp.eye(size)
        return BlockRows(start, xp.arange(stop - start + 1), xp.arange(start, stop, dtype=np.int32), blocks)

    def diagonal(self) -> Array:
        """Return the diagonal, (n,)."""
        return self._diagonal

    def on(self, device: Device) -> LumpedMass:
        """Return M on a device."""
        return self if device == self.device else LumpedMass(self.device.to_host(self._diagonal), device)

    def to_csr(self) -> scipy.sparse.csr_array:
        """Return M as SciPy CSR on the host."""
        return scipy.sparse.diags_array(self.device.to_host(self._diagonal), format="csr")


class ConsistentMass(Mass):
    """A sparse matrix, stored for nodes where it couples equal unknowns of them only."""

    def __init__(self, matrix: NodeMatrix) -> None:
        super().__init__(matrix.shape[0], matrix.device)
        self._matrix = matrix

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._matrix.nbytes

    def apply_rows(self, rows: slice, x: Array, out: Array) -> None:
        """Set ``out`` to some rows of ``M x``, those of whole nodes."""
        self._matrix.apply_rows(rows, x, out)

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        self._matrix._apply(x, out, alpha, beta)

    def node_rows(self, size: int, start: int, stop: int) -> BlockRows:
        """Return the rows of some nodes of ``size`` unknowns."""
        own, xp, weights = self._matrix.nodes, self.device.xp, self._matrix.weights
        if len(weights) == size:
            rows = own.rows(start, stop).arrays()
            blocks = rows["values"][:, None, None] * xp.diag(self.device.asarray(weights))
            return BlockRows(start, rows["row_offsets"].astype(np.int64), rows["column_indices"], blocks)
        first, last = start * size // len(weights), stop * size // len(weights)
        part = scipy.sparse.kron(own.rows(first, last).to_csr(), scipy.sparse.diags_array(weights), format="csr")
        blocks = part.tobsr((size, size))
        blocks.sort_indices()
        arrays = (blocks.indptr.astype(np.int64), blocks.indices.astype(np.int32), blocks.data)
        return BlockRows(start, *map(self.device.asarray, arrays))

    def diagonal(self) -> Array:
        """Return the diagonal, (n,)."""
        return self._matrix.diagonal()

    def on(self, device: Device) -> ConsistentMass:
        """Return M on a device."""
        return self if device == self.device else ConsistentMass(self._matrix.to_device(device))

    def to_csr(self) -> scipy.sparse.csr_array:
        """Return M as SciPy CSR on the host."""
        return self._matrix.to_csr()


def mass_norms(mass: Mass, vectors: Array) -> np.ndarray[Any, Any]:
    """Return the norms of vectors, (n, k), in that of the inverse of M, by solves with M to three digits.

    M is well conditioned once its rows are scaled to a unit diagonal (Wathen 1987), so that a few products suffice.
    """
    xp, host = mass.device.xp, mass.device.to_host
    diagonal = mass.diagonal()
    inverse = LumpedMass(xp.where(diagonal > 0, 1 / xp.where(diagonal > 0, diagonal, 1.0), 0.0), mass.device)
    solve = inverse if isinstance(mass, LumpedMass) else InnerIterations(mass, inverse)
    squares = []
    for first in range(0, vectors.shape[1], _SOLVED_AT_ONCE):
        some = xp.ascontiguousarray(vectors[:, first : first + _SOLVED_AT_ONCE])
        squares.append(np.diag(host(some.T @ solve.apply(some))))
    return _MARGIN * np.sqrt(np.maximum(np.concatenate(squares), 0.0)) if squares else np.empty(0)


def as_mass(M: Any, n: int, unknowns: int, device: Device) -> Mass:
    """Return M of a caller on a device.

    Parameters
    ----------
    M : None, array (n,), SciPy or CuPy sparse matrix, penstock matrix or NodeMatrix
        None is the identity; a vector is the diagonal.
    n : int
        Unknowns of K.
    unknowns : int
        Of a node, which are looked for in M.
    device : Device

    Raises
    ------
    InputError
        If M does not fit K, or is not symmetric, or has a diagonal entry that is negative.
    """
    mass = _converted(M, n, unknowns, device)
    if mass.shape != (n, n):
        raise InputError(f"M has shape {mass.shape}, but K has {n} rows")
    least = float(mass.diagonal().min()) if n else 0.0
    if not least >= 0:
        raise InputError(f"M has a diagonal entry of {least:g}, so it is not positive definite")
    mass = mass.on(device)
    if not (isinstance(mass, LumpedMass) or is_symmetric(mass, VectorSpace(device))):
        raise InputError("M is not symmetric: u.M(Mu) differs from Mu.Mu for a random vector u")
    if not isinstance(mass, LumpedMass) and _has_negative_value(mass):
        raise InputError("M is not positive definite: there is an x with x.M x < 0")
    return mass


def _has_negative_value(mass: Mass) -> bool:
    """Return whether some steps of Lanczos find a negative eigenvalue of M, scaled to a unit diagonal."""
    space, xp = VectorSpace(mass.device), mass.device.xp
    diagonal = mass.diagonal()
    scale = xp.where(diagonal > 0, 1 / xp.sqrt(xp.where(diagonal > 0, diagonal, 1.0)), 0.0)
    v = scale * noise(mass.device, 0, mass.shape[0])
    v /= max(space.norm(v), float(np.finfo(float).tiny))
    before, off, diagonals, offs = xp.zeros_like(v), 0.0, [], []
    for _ in range(_LANCZOS):
        w = scale * mass.apply(scale * v) - off * before
        diagonals.append(space.dot(v, w))
        w -= diagonals[-1] * v
        off = space.norm(w)
        if off <= _LOST:
            break
        offs.append(off)
        before, v = v, w / off
    values = scipy.linalg.eigvalsh_tridiagonal(diagonals, offs[: len(diagonals) - 1])
    return bool(values[0] < -_LOST)


def _converted(M: Any, n: int, unknowns: int, device: Device) -> Mass:
    if isinstance(M, Mass):
        return M
    if M is None:
        return LumpedMass(device.xp.ones(n), device)
    if isinstance(M, NodeMatrix):
        return ConsistentMass(M.to_device(device))
    if hasattr(M, "to_csr"):
        M = M.to_csr()
    elif type(M).__module__.startswith("cupyx.scipy.sparse"):
        M = M.get()
    if not scipy.sparse.issparse(M):
        dense = M.get() if hasattr(M, "get") else np.asarray(M)
        if dense.ndim == 1 and dense.dtype.kind in "fiu":
            _check_finite(dense)
            return LumpedMass(dense.astype(np.float64), device)
        raise InputError(
            "M must be a sparse matrix, a vector that is its diagonal, or None for the identity, not "
            f"{type(M).__name__} of shape {getattr(dense, 'shape', None)}"
        )
    if M.dtype.kind not in "fiub":
        raise InputError(f"M must be real, not {M.dtype}")
    A = scipy.sparse.csr_array(M, dtype=np.float64)
    A.sum_duplicates()
    if A.shape[0] != A.shape[1]:
        raise InputError(f"M must be square, not of shape {A.shape}")
    _check_finite(A.data)
    entries = A.tocoo()
    if not (entries.data[entries.row != entries.col]).any():
        return LumpedMass(A.diagonal(), device)
    of_nodes = NodeMatrix.of(A, unknowns)
    return ConsistentMass(NodeMatrix(A, [1.0]) if of_nodes is None else of_nodes)


def _check_finite(values: np.ndarray[Any, Any]) -> None:
    if not np.isfinite(values).all():
        raise InputError("M has entries that are not finite")
