"""Makes stores of what callers have: a matrix, or the folder of a store."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import scipy.sparse

from penstock.spmv import InputError, SparseMatrix
from penstock.spmv.formats.validation import in_csr
from penstock.streaming.stores.base import Store
from penstock.streaming.stores.file_store import FileStore
from penstock.streaming.stores.host_store import HostStore
from penstock.streaming.stores.packing import as_matrix

# Subdivisions of which the budget has room for about eight, but not more than a sweep can well start.
_IN_BUDGET, _MOST = 8, 512


def as_store(given: Any, budget_nbytes: int, resources: ExitStack) -> Store:
    """Return a store for a store, the folder of one, or a matrix on the host, which is streamed from its own arrays.

    A matrix is cut to suit a budget of ``budget_nbytes``; ``resources`` closes what is opened here.
    """
    if isinstance(given, str | Path):
        if Path(given).is_file():
            raise InputError(f"{given} is a file; store the matrix in it first: penstock store {given} STORE")
        return cast(Store, resources.enter_context(FileStore(given)))
    if scipy.sparse.issparse(given) or isinstance(given, SparseMatrix):
        matrix = as_matrix(
            in_csr(given, "the matrix") if getattr(given, "format", "csr") not in ("csr", "bsr") else given
        )
        if not matrix.shape[0]:
            raise InputError("the matrix has no rows, so there is nothing to stream")
        cuts = -(-matrix.shape[0] // matrix.row_granularity)
        count = min(cuts, _MOST, -(-_IN_BUDGET * matrix.nbytes // max(1, budget_nbytes)))
        return cast(Store, resources.enter_context(HostStore.from_matrix(matrix, count)))
    if isinstance(given, Store):
        return given
    raise InputError(
        f"cannot stream a {type(given).__name__}; pass a FileStore, a HostStore, the folder of a store or a sparse matrix"
    )
