"""Matrices that couple equal unknowns of nodes only, such as mass matrices: one number for a block of unknowns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import scipy.sparse

from penstock.spmv.device import Array, Device
from penstock.spmv.errors import InputError
from penstock.spmv.formats.csr import CsrMatrix
from penstock.spmv.operator import ValidatedOperator


class NodeMatrix(ValidatedOperator):
    """``S x diag(weights)``, the Kronecker product of a matrix of nodes and of weights of the unknowns of a node.

    A product reads 12 bytes for an entry of S, where CSR would read as many for every unknown of a node.

    Parameters
    ----------
    nodes : CsrMatrix or SciPy matrix, (nodes, nodes)
        S.
    weights : sequence of float, (unknowns of a node,)
    fixed : bool array, (n,), optional
        Unknowns whose rows and columns are empty.

    Raises
    ------
    InputError
        If S is not square, or a weight is not finite.

    Examples
    --------
    >>> import numpy as np, scipy.sparse
    >>> from penstock.spmv import NodeMatrix
    >>> M = NodeMatrix(scipy.sparse.csr_array([[2.0, 1.0], [1.0, 2.0]]), [1.0, 1.0, 1.0])
    >>> M.shape, (M @ np.arange(6.0)).tolist()
    ((6, 6), [3.0, 6.0, 9.0, 6.0, 9.0, 12.0])
    """

    def __init__(self, nodes: Any, weights: Any, fixed: Any = None) -> None:
        if scipy.sparse.issparse(nodes):
            nodes = CsrMatrix.from_csr(scipy.sparse.csr_array(nodes, dtype=np.float64))
        self.weights = np.array(weights, dtype=np.float64)
        if nodes.shape[0] != nodes.shape[1] or self.weights.ndim != 1 or not np.isfinite(self.weights).all():
            raise InputError(
                f"a matrix of nodes must be square, not {nodes.shape}, and have a finite weight for each unknown of a node"
            )
        self.nodes: CsrMatrix = nodes
        n = nodes.shape[0] * len(self.weights)
        self.shape, self.dtype, self.device = (n, n), np.dtype(np.float64), nodes.device
        self._weights = None if (self.weights == 1.0).all() else self.device.asarray(self.weights)
        #: 0 for fixed unknowns and 1 for others, (n,); None if none is fixed.
        self.free: Array | None = None
        if fixed is not None and (mask := self.device.to_host(fixed)).any():
            if mask.shape != (n,):
                raise InputError(f"fixed must have shape ({n},), not {mask.shape}")
            self.free = self.device.asarray(np.where(mask, 0.0, 1.0))
        self._slabs: dict[tuple[int, int], CsrMatrix] = {(0, nodes.shape[0]): nodes}

    @classmethod
    def of(cls, A: scipy.sparse.csr_array, unknowns: int) -> NodeMatrix | None:
        """Return a SciPy matrix as one of nodes of some unknowns, or None if it couples different unknowns, or unequally."""
        if unknowns == 1:
            return cls(A, [1.0])
        if A.shape[0] % unknowns:
            return None
        entries = A.tocoo()
        row, column = entries.row % unknowns, entries.col % unknowns
        if (row != column)[entries.data != 0].any():
            return None
        diagonal = A.diagonal().reshape(-1, unknowns)
        total = diagonal.sum(axis=0)
        first = int(np.argmax(total != 0))
        if not total[first]:
            return None
        weights = total / total[first]
        nodes = scipy.sparse.csr_array(A[first::unknowns, first::unknowns])
        whole = scipy.sparse.kron(nodes, scipy.sparse.diags_array(weights), format="csr")
        scale = np.abs(A.data).max(initial=0.0)
        return cls(nodes, weights) if abs(whole - A).max() <= 8 * np.finfo(float).eps * scale else None

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix of nodes, and of the mask of fixed unknowns."""
        return self.nodes.nbytes + (0 if self.free is None else int(self.free.nbytes))

    @property
    def capturable(self) -> bool:
        """True: a product only launches kernels."""
        return True

    def to_csr(self) -> scipy.sparse.csr_array:
        """Return a SciPy CSR array on the host."""
        A = scipy.sparse.kron(self.nodes.to_csr(), scipy.sparse.diags_array(self.weights), format="csr")
        if self.free is None:
            return A
        free = scipy.sparse.diags_array(self.device.to_host(self.free))
        A = (free @ A @ free).tocsr()
        A.eliminate_zeros()
        return A

    def to_device(self, device: Device) -> NodeMatrix:
        """Return this matrix on a device."""
        if device == self.device:
            return self
        fixed = None if self.free is None else self.device.to_host(self.free) == 0
        return NodeMatrix(self.nodes.to_device(device), self.weights, fixed)

    def diagonal(self) -> Array:
        """Return the diagonal, (n,)."""
        diagonal = (self.nodes.diagonal_blocks(1).reshape(-1, 1) * self.device.asarray(self.weights)).reshape(-1)
        return diagonal if self.free is None else diagonal * self.free

    def apply_rows(self, rows: slice, x: Array, out: Array) -> None:
        """Set ``out`` to some rows of ``M x``, those of whole nodes, for x that vanishes at fixed unknowns."""
        size = len(self.weights)
        key = (rows.start // size, rows.stop // size)
        if key not in self._slabs:
            # Offsets that count from the first entry of all: others would be computed, which a capture of kernels forbids.
            offsets = self.nodes.row_offsets[key[0] : key[1] + 1]
            self._slabs[key] = replace(self.nodes, shape=(key[1] - key[0], self.nodes.shape[1]), row_offsets=offsets)
        wide = x.reshape(self.nodes.shape[0], -1)
        self._slabs[key].apply_slab(0, wide, out.reshape(key[1] - key[0], -1), 1.0, 0.0)
        if self._weights is not None:
            scaled = out.reshape(key[1] - key[0], size, -1)
            scaled *= self._weights[:, None]
        if self.free is not None:
            by_row = out.reshape(len(out), -1)
            by_row *= self.free[rows][:, None]

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        if self.free is not None:
            x = x * (self.free if x.ndim == 1 else self.free[:, None])
        image = out if alpha == 1.0 and beta == 0.0 else self.device.xp.empty_like(out)
        self.apply_rows(slice(0, self.shape[0]), x, image)
        if image is not out:
            out[...] = alpha * image if beta == 0.0 else alpha * image + beta * out
