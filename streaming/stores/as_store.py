"""Opens what callers pass, a matrix or the folder of a store, as a store."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import scipy.sparse

from penstock.spmv import InputError, SparseMatrix
from penstock.spmv.formats.partition import count_granules
from penstock.spmv.formats.validation import in_csr
from penstock.streaming.stores.base import Store
from penstock.streaming.stores.file_store import FileStore
from penstock.streaming.stores.host_store import HostStore
from penstock.streaming.stores.packing import as_matrix

# The budget has room for about eight subdivisions of a matrix, which is cut into no more than a sweep can start quickly.
_IN_BUDGET, _MOST = 8, 512


def as_store(source: Any, budget_nbytes: int, resources: ExitStack) -> Store:
    """Return a store for a store, the folder of one, or a matrix on the host, which is streamed from its own arrays.

    A matrix is cut to suit a budget of ``budget_nbytes``; ``resources`` closes what is opened here.
    """
    if isinstance(source, str | Path):
        if Path(source).is_file():
            raise InputError(f"{source} is a file; store the matrix in it first: penstock store {source} STORE")
        return cast(Store, resources.enter_context(FileStore(source)))
    if scipy.sparse.issparse(source) or isinstance(source, SparseMatrix):
        matrix = as_matrix(
            in_csr(source, "the matrix") if getattr(source, "format", "csr") not in ("csr", "bsr") else source
        )
        if not matrix.shape[0]:
            raise InputError("the matrix has no rows, so there is nothing to stream")
        count = min(count_granules(matrix), _MOST, -(-_IN_BUDGET * matrix.nbytes // max(1, budget_nbytes)))
        return cast(Store, resources.enter_context(HostStore.from_matrix(matrix, count)))
    if isinstance(source, Store):
        return source
    raise InputError(
        f"cannot stream a {type(source).__name__}; pass a FileStore, a HostStore, the folder of a store or a sparse matrix"
    )
