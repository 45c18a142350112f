"""What the generated matrices of both kinds share."""

from typing import Any

import numpy as np
import scipy.sparse

__all__ = ["Array", "Generator", "csr_of", "row_offsets_of", "scaled"]

Array = np.ndarray[Any, Any]
Generator = np.random.Generator


def csr_of(rng: Generator, lengths: Array, columns: Array, column_count: int | None = None) -> scipy.sparse.csr_array:
    """Return the matrix of given row lengths and columns, with values uniform between -1 and 1."""
    arrays = (rng.uniform(-1, 1, columns.size), columns.astype(np.int32, copy=False), row_offsets_of(lengths))
    return scipy.sparse.csr_array(arrays, shape=(lengths.size, column_count or lengths.size))


def row_offsets_of(lengths: Array) -> Array:
    """Return where each row begins."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def scaled(count: int, scale: float) -> int:
    """Return a number of rows times a factor, at least 1."""
    return max(1, round(count * scale))
