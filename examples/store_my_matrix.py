"""Hand over a matrix of your own, too large to hold at once, as row slabs; solve with it later."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import scipy.sparse

from penstock.solvers import cg, jacobi
from penstock.streaming import FileStore, StreamedMatrix

ROWS, SLAB_ROWS = 300_000, 25_000


def row_slabs() -> Iterator[scipy.sparse.csr_array]:
    """Make 25,000 rows at a time; yours may come from files, a database or another program."""
    for start in range(0, ROWS, SLAB_ROWS):
        rows = np.arange(start, start + SLAB_ROWS)
        columns = np.stack([rows - 500, rows - 1, rows, rows + 1, rows + 500], axis=1)
        values = np.tile([-1.0, -1.0, 4.01, -1.0, -1.0], (SLAB_ROWS, 1))
        inside = (columns >= 0) & (columns < ROWS)
        offsets = np.concatenate([[0], np.cumsum(inside.sum(axis=1))])
        yield scipy.sparse.csr_array((values[inside], columns[inside], offsets), shape=(SLAB_ROWS, ROWS))


with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "my-matrix"
    FileStore.create(path, row_slabs(), shape=(ROWS, ROWS)).close()

    # Any time later, and in another program:
    with FileStore(path) as store, StreamedMatrix(store, budget="6 MiB") as A:
        print(A.plan.explain(), end="\n\n")
        result = cg(A, np.ones(ROWS), M=jacobi(A), rtol=1e-8)

print(f"{'iterations':<28}{result.iterations:>12}")
print(f"{'true relative residual':<28}{result.true_residual:>12.2e}")
print(f"{'sweeps over the matrix':<28}{result.sweeps:>12}")
print(f"{'GB streamed':<28}{result.bytes_streamed / 1e9:>12.3f}")
