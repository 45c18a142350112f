"""Whether stiffness, or the shape of elements, jumps between nodes: such bodies have many local modes, close to each other."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.spmv import Array, CsrMatrix
from penstock.spmv.products.block_rows import row_numbers

# Rows that are looked at, and the factor by which ``k_ii / m_ii`` differs between neighbours of half of them. Measured: 1 in a
# uniform mesh, at its surface too, 1.6 in a ball of tetrahedra and with a lognormal stiffness of sigma 0.5; 3 in a random mixture
# of 1 and 1000, 250 with few stiff elements, 7 to 20 in meshes with slivers.
_ROWS, _FACTOR = 400, 2.5


def is_rough(K: CsrMatrix, masses: np.ndarray[Any, Any] | None, size: int) -> bool:
    """Return whether ``k_ii / m_ii`` differs much between neighbours, judged by some rows.

    ``masses``, (n,), is the diagonal of the mass matrix on the host, None of the identity; ``size`` is the number of unknowns of
    a node, of which those of one kind are compared. Reads about 30,000 rows of K.
    """
    n = K.shape[0]
    rows = np.unique(np.linspace(0, n - 1, min(n, _ROWS)).astype(np.int64))
    numbers, entries = _entries(K, K.device.asarray(rows))
    places = K.device.to_host(K.column_indices[entries]).astype(np.int64)
    owners = rows[K.device.to_host(numbers)]
    if not (places.size and places.min() >= 0 and places.max() < n):  # a damaged matrix is refused elsewhere
        return False
    alike = places % size == owners % size
    owners, places = owners[alike], places[alike]
    if not owners.size:
        return False
    needed, of_all = np.unique(np.concatenate([owners, places]), return_inverse=True)
    ratios = _diagonal(K, needed)
    ratios /= 1.0 if masses is None else np.where(masses[needed] > 0, masses[needed], np.inf)
    own, other = ratios[of_all[: len(owners)]], ratios[of_all[len(owners) :]]
    regular = (own > 0) & (other > 0)
    differs = np.ones_like(own)
    differs[regular] = np.maximum(own[regular] / other[regular], other[regular] / own[regular])
    of_rows = np.maximum.reduceat(differs, np.flatnonzero(np.diff(owners, prepend=-1)))
    return bool(np.median(of_rows) > _FACTOR)


def _entries(K: CsrMatrix, rows: Array) -> tuple[Array, Array]:
    """Return for every entry of some rows the number of its row among them, and its place in the arrays of K."""
    xp = K.device.xp
    starts = K.row_offsets[rows].astype(np.int64)
    counts = K.row_offsets[rows + 1] - starts
    offsets = xp.concatenate([xp.zeros(1, dtype=np.int64), xp.cumsum(counts)])
    numbers = row_numbers(offsets, int(offsets[-1]))
    return numbers, xp.arange(len(numbers)) + (starts - offsets[:-1])[numbers]


def _diagonal(K: CsrMatrix, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the diagonal entries of some rows."""
    on_device = K.device.asarray(rows)
    numbers, entries = _entries(K, on_device)
    own = K.column_indices[entries] == on_device[numbers]
    weights = (K.values[entries] * own).astype(np.float64)
    sums: np.ndarray[Any, Any] = K.device.to_host(K.device.xp.bincount(numbers, weights=weights, minlength=len(rows)))
    return sums
