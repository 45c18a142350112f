"""Vectors that A maps to zero: they are removed from b and x where the caller gives them, and else sought among known ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import scipy.sparse

from penstock.solvers import SolveResult, StopReason
from penstock.solvers.amg.modes import rigid_body_modes
from penstock.spmv import Array, CsrMatrix, Device, HasAbsoluteProduct, InputError, Operator, device_of
from penstock.spmv.foreign import as_array, is_foreign
from penstock.spmv.vectors.noise import noise

# A caller's vector is in the null space if A maps it to less than this share of what |A| makes of its absolute values.
_SMALL_IMAGE = 1e-6
# What is left of a vector is rounding below this share of its largest entry.
_ROUNDING = 1e-14
# A known one is, if each entry of its image is within 64 roundings of the largest term of that row.
_ROUNDINGS, _UNIT = 64, float(np.finfo(np.float64).eps) / 2
# Rows of the first piece of the matrix that is read, and of the largest.
_FIRST_ROWS, _MOST_ROWS = 1024, 1 << 16


@dataclass(frozen=True)
class NullSpace:
    """An orthonormal basis of vectors that A maps to zero: float64 on the host, (n, k), in the caller's order of the rows."""

    basis: np.ndarray[Any, Any]

    @classmethod
    def given(cls, null_space: Any, rows: int) -> Self:
        """Return the caller's null space: ``"constants"``, or an array ``(n,)`` or ``(n, k)`` of finite independent columns."""
        if isinstance(null_space, str):
            if null_space != "constants":
                raise InputError(f"null_space must be 'constants' or an array of shape ({rows}, k), not {null_space!r}")
            return cls(np.full((rows, 1), 1 / np.sqrt(rows)))
        try:
            host = _on_host(null_space)
        except ValueError:  # rows of different lengths
            host = np.empty(0, dtype=object)
        if host.dtype.kind not in "fiub" or host.ndim not in (1, 2) or len(host) != rows or not host.size:
            raise InputError(
                f"null_space must be 'constants' or real numbers of shape ({rows}, k), not an array of shape {host.shape} and "
                f"type {host.dtype}"
            )
        vectors = host.reshape(rows, -1).astype(np.float64)
        lengths = np.linalg.norm(vectors, axis=0)
        if not np.isfinite(lengths).all() or not lengths.all():
            raise InputError("the vectors of null_space must be finite, and none may be zero")
        basis, factor = np.linalg.qr(vectors / lengths)
        if vectors.shape[1] > rows or np.abs(np.diag(factor)).min() < 1e-10:
            raise InputError("the vectors of null_space are linearly dependent; give a basis")
        return cls(basis)

    @classmethod
    def found(cls, A: CsrMatrix, known: KnownModes) -> Self | None:
        """Return the combinations of known modes that A maps to zero but for rounding, or None if there are none.

        Reads rows in growing pieces, and ends at the first piece that shows that nothing is mapped to zero: as a rule the
        first, for which only the modes of its columns are made.
        """
        if _shows_none(A, known):
            return None
        modes = known.all()
        longest = np.abs(modes).max(axis=0)
        modes = modes[:, longest > 0] / longest[longest > 0]
        if modes.size:  # combinations that are zero themselves say nothing of A
            left, lengths, _ = np.linalg.svd(modes, full_matrices=False)
            modes = left[:, lengths > 1e-10 * lengths[0]]
        rows = A.shape[0]
        factor, start, count = np.zeros((0, modes.shape[1])), 0, _FIRST_ROWS
        while start < rows and modes.shape[1]:
            stop = min(rows, start + count)
            piece = _rows_on_host(A, start, stop)
            image = _relative_image(piece, modes)
            if not np.isfinite(image).all():
                return None
            factor = np.asarray(np.linalg.qr(np.vstack([factor, image]), mode="r"))
            noise = _ROUNDINGS * _UNIT * np.sqrt(stop)
            if len(factor) >= modes.shape[1] and np.linalg.svd(factor, compute_uv=False)[-1] > noise:
                return None
            start, count = stop, min(2 * count, _MOST_ROWS)
        if not modes.shape[1]:
            return None
        _, values, combinations = np.linalg.svd(factor)
        small = np.concatenate([values, np.zeros(modes.shape[1] - len(values))]) <= noise
        return cls(np.linalg.qr(modes @ combinations[small].T)[0]) if small.any() else None

    def check(self, A: Operator, forward: Any = None) -> None:
        """Refuse vectors that A does not map to zero, at the cost of one pass; ``forward`` puts them into the order of A."""
        vectors = self.basis if forward is None else forward(self.basis)
        block = A.device.asarray(np.ascontiguousarray(vectors), dtype=A.dtype)
        images = A.device.to_host(A.apply(block))
        sizes = A.device.xp.abs(block)
        if isinstance(A, HasAbsoluteProduct):
            of_sizes = [A.apply_absolute(A.device.xp.ascontiguousarray(sizes[:, k])) for k in range(sizes.shape[1])]
            scales = np.array([float(A.device.xp.linalg.norm(of)) for of in of_sizes])
        else:  # |A| is not known: a random vector shows how large A is
            scales = np.linalg.norm(A.device.to_host(A.apply(block * noise(A.device, 0, len(block))[:, None])), axis=0)
        shares = np.linalg.norm(images, axis=0) / np.maximum(scales, 1e-300)
        if shares.max() > _SMALL_IMAGE:
            worst = int(shares.argmax())
            raise InputError(
                f"vector {worst} of null_space is not mapped to zero: ||A v|| is {shares[worst]:.2g} of || |A| |v| ||; leave "
                "null_space out if A is not singular"
            )

    def without(self, vectors: Array) -> Array:
        """Return vectors, (n,) or (n, k), less their components in the null space, as float64 where they live.

        They are removed twice, as rounding of large ones leaves some; where only rounding is left, so are the rest.
        """
        home: Device = device_of(vectors)
        basis, block = home.asarray(self.basis), vectors.astype(np.float64)
        left = block
        for _ in range(2):
            left = left - basis @ (basis.T @ left)
        largest = home.xp.abs(block).max(axis=0)
        return home.xp.where(home.xp.abs(left).max(axis=0) > _ROUNDING * largest, left, 0.0)

    def shares(self, vectors: Array) -> np.ndarray[Any, Any]:
        """Return the share of each vector's norm that lies in the null space; 0 for zero vectors."""
        home: Device = device_of(vectors)
        block = vectors.reshape(len(vectors), -1).astype(np.float64)
        largest = home.xp.maximum(home.xp.abs(block).max(axis=0), 1e-300)  # squares must not overflow
        block = block / largest
        inside = home.xp.linalg.norm(home.asarray(self.basis).T @ block, axis=0)
        return home.to_host(inside / home.xp.maximum(home.xp.linalg.norm(block, axis=0), 1e-300))


class KnownModes:
    """The vectors that a matrix may map to zero: the caller's near-null space, the rigid motions, else a constant.

    What does not fit is left to the preconditioner to refuse.
    """

    def __init__(self, options: dict[str, Any], rows: int, block_size: Any) -> None:
        vectors, points = options.get("near_null_space"), options.get("coordinates")
        self._rows, self._near_null_space, self._points = rows, None, None
        self.size = block_size if isinstance(block_size, int) and block_size > 0 and rows % block_size == 0 else 1
        if vectors is not None:
            vectors = np.asarray(_on_host(vectors), dtype=np.float64).reshape(len(vectors), -1)
            self._near_null_space = vectors if len(vectors) == rows else None
        elif points is not None and not callable(points) and self.size > 1:
            host = np.asarray(_on_host(points), dtype=np.float64)
            fits = host.ndim == 2 and (host.shape[1], self.size) in {(2, 2), (2, 3), (3, 3), (3, 6)}
            self._points = host if fits and len(host) * self.size == rows else None

    def all(self) -> np.ndarray[Any, Any]:
        """Return them as ``(rows, k)``; a constant if they are not finite."""
        modes = self.of_nodes(slice(None))
        return modes if np.isfinite(modes).all() else np.ones((self._rows, 1))

    def of_nodes(self, nodes: Any) -> np.ndarray[Any, Any]:
        """Return the rows of some nodes, ``size`` for each; of rigid motions, such that span the same."""
        if self._points is not None:
            return np.asarray(rigid_body_modes(self._points[nodes], self.size))
        if self._near_null_space is not None:
            of_nodes = self._near_null_space.reshape(-1, self.size, self._near_null_space.shape[1])[nodes]
            return np.asarray(of_nodes.reshape(-1, self._near_null_space.shape[1]))
        count = self._rows if isinstance(nodes, slice) else len(nodes) * self.size
        return np.ones((count, 1))


def _shows_none(A: CsrMatrix, known: KnownModes) -> bool:
    """Return whether the first rows show that no combination of the modes is mapped to zero."""
    rows, size = min(A.shape[0], _FIRST_ROWS), known.size
    piece = _rows_on_host(A, 0, rows)
    if not piece.nnz:
        return False
    nodes = np.unique(piece.indices // size)
    modes = known.of_nodes(nodes)
    columns = np.searchsorted(nodes, piece.indices // size) * size + piece.indices % size
    local = scipy.sparse.csr_array((piece.data, columns, piece.indptr), shape=(rows, len(modes)))
    longest = np.abs(modes).max(axis=0)
    if not np.isfinite(longest).all() or not longest.all() or rows < modes.shape[1]:
        return False
    image = _relative_image(local, modes / longest)
    if not np.isfinite(image).all():
        return False
    return bool(np.linalg.svd(image, compute_uv=False)[-1] > _ROUNDINGS * _UNIT * np.sqrt(rows))


def _relative_image(A: scipy.sparse.csr_array, modes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the image of modes, each row relative to its largest sum of the terms' sizes."""
    image, scale = A @ modes, (abs(A) @ np.abs(modes)).max(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative: np.ndarray[Any, Any] = np.where(scale > 0, image / scale, 0.0)
    return relative


def _on_host(array: Any) -> np.ndarray[Any, Any]:
    """Return an array of CuPy, Torch or JAX, or what NumPy takes for one, on the host."""
    array = as_array(array) if is_foreign(array) else array
    return np.asarray(array.get() if hasattr(array, "get") and hasattr(array, "dtype") else array)


def _rows_on_host(A: CsrMatrix, start: int, stop: int) -> scipy.sparse.csr_array:
    """Return some rows as a SciPy matrix, copied from a GPU if need be."""
    to_host = A.device.to_host
    offsets = to_host(A.row_offsets[start : stop + 1]).astype(np.int64)
    part = slice(int(offsets[0]), int(offsets[-1]))
    arrays = (
        to_host(A.values[part]).astype(np.float64, copy=False),
        to_host(A.column_indices[part]),
        offsets - offsets[0],
    )
    return scipy.sparse.csr_array(arrays, shape=(stop - start, A.shape[1]))


def inconsistent_result(x: Array, share: float) -> SolveResult:
    """Return the result of a right-hand side that no x reaches, with x = 0, and the share of b that lies in the null space."""
    cost: dict[str, Any] = {"sweeps": 0, "bytes_streamed": 0, "timings": {"total": 0.0}}
    result = SolveResult.of(x, StopReason.INCONSISTENT, [1.0], 1.0, None, **cost)
    message = f"{StopReason.INCONSISTENT.value} ({share:.3g} of b lies in the null space of A; no solve was begun, and x is zero)"
    return replace(result, message=message)
