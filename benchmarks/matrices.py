"""The shapes of matrix that the literature on sparse products discusses, seeded: python benchmarks/matrices.py.

Each is a stand-in for a published matrix, its namesake, so that nothing need be downloaded: it has about the namesake's
rows, entries and spread of row lengths, not its values, and its columns only in outline. The namesakes' figures are
those of Table 2 of Kreutzer et al., "A unified sparse matrix data format for efficient general sparse matrix-vector
multiplication on modern processors with wide SIMD units" (SIAM J. Sci. Comput. 36, 2014), the SELL-C-sigma paper.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.sparse
from csr_arrays import Array
from lattices import arrow, dense, fem_shell, full_row, lattice4d, stencil5, stencil7, stencil27
from rich.console import Console
from rich.table import Table
from scattered import amg_coarse, circuit, economics, empty_rows, power, rail, tall, web, wide

__all__ = ["MATRICES", "MatrixSpec", "build", "row_statistics"]

# A matrix whose row lengths have a coefficient of variation below this is called regular.
REGULAR_VARIATION = 0.25


@dataclass(frozen=True)
class MatrixSpec:
    """One matrix of the list.

    Parameters
    ----------
    name : str
        Stable: results are filed under it.
    build : callable
        Returns the matrix from a random generator and, if given, a scale: ``build(rng, scale=1.0)``.
    seed : int
        Of the random generator that :func:`build` passes.
    kind : {"regular", "irregular"}
        Whether the rows are about equally long.
    description : str
        What the matrix is and, if it has a namesake, the namesake's figures.
    namesake : (str, int, int) or None
        Name, rows and nonzeros of the published matrix.
    """

    name: str
    build: Callable[..., scipy.sparse.csr_array]
    seed: int
    kind: str
    description: str
    namesake: tuple[str, int, int] | None


def build(name: str, *, scale: float = 1.0) -> scipy.sparse.csr_array:
    """Build a matrix of the list, the same one at every call.

    Parameters
    ----------
    name : str
        A key of ``MATRICES``.
    scale : float
        Factor on the number of rows, for tests; the columns shrink alike. Rows keep their lengths as far as there are
        columns for them. Lattices round each extent, so that their number of rows follows only roughly.

    Returns
    -------
    csr_array
        float64 values, uniform between -1 and 1; int32 column indices that ascend in each row.
    """
    if scale <= 0:
        raise ValueError(f"a matrix of scale {scale} has no rows")
    spec = MATRICES[name]
    return spec.build(np.random.default_rng(spec.seed), scale)


def row_statistics(lengths: Array) -> tuple[float, int, float]:
    """Return the mean, the largest and the coefficient of variation of row lengths."""
    mean = float(lengths.mean())
    return mean, int(lengths.max()), float(lengths.std()) / mean


def _spec(
    build: Callable[..., scipy.sparse.csr_array],
    seed: int,
    kind: str,
    description: str,
    namesake: tuple[str, int, int] | None = None,
) -> MatrixSpec:
    if namesake is not None:
        name, rows, nonzeros = namesake
        description += f"; after {name}, {rows:,} rows, {nonzeros:,} nonzeros, {nonzeros / rows:.2f} a row"
    return MatrixSpec(build.__name__, build, seed, kind, description, namesake)


MATRICES: dict[str, MatrixSpec] = {
    spec.name: spec
    for spec in (
        # The namesake is a 2-D lattice with 4 entries a row; a stencil's diagonal makes them a quarter more here.
        _spec(stencil5, 1, "regular", "5-point stencil, 725 x 725", ("mc2depi", 525_825, 2_100_225)),
        _spec(stencil7, 2, "regular", "7-point stencil, 126 x 126 x 126"),
        _spec(stencil27, 3, "regular", "27-point stencil, 96 x 96 x 96"),
        _spec(lattice4d, 4, "regular", "lattice QCD, 8 x 8 x 8 x 8, periodic", ("qcd5_4", 49_152, 1_916_928)),
        _spec(fem_shell, 5, "regular", "shell elements, banded 6 x 6 blocks", ("pwtk", 217_918, 11_634_424)),
        _spec(dense, 6, "regular", "dense matrix stored sparse", ("dense2", 2_000, 4_000_000)),
        _spec(full_row, 7, "irregular", "tridiagonal with one full row"),
        _spec(arrow, 8, "irregular", "full first row and column, and the diagonal"),
        _spec(web, 9, "irregular", "power-law rows, one of 4,700", ("webbase-1M", 1_000_005, 3_105_536)),
        _spec(circuit, 10, "irregular", "short rows, one of 353", ("scircuit", 170_998, 958_936)),
        _spec(economics, 11, "irregular", "very uneven short rows", ("mac_econ_fwd500", 206_500, 1_273_389)),
        _spec(power, 12, "irregular", "uneven short rows, half far columns", ("kkt_power", 2_063_494, 14_612_663)),
        _spec(rail, 13, "irregular", "few, very long rows", ("rail4284", 4_284, 11_279_748)),
        _spec(amg_coarse, 14, "irregular", "coarse level of algebraic multigrid, lognormal rows"),
        _spec(empty_rows, 15, "irregular", "60 % empty rows, the others short"),
        _spec(tall, 16, "irregular", "100 times as many rows as columns, short rows"),
        _spec(wide, 17, "regular", "100 times as many columns as rows, long rows"),
    )
}


def main() -> None:
    """Build every matrix and print what it really is."""
    table = Table(title="Benchmark matrices")
    table.add_column("name")
    for column in ("rows", "columns", "nonzeros", "mean", "longest", "variation", "seconds"):
        table.add_column(column, justify="right")
    table.add_column("description")
    for name, spec in MATRICES.items():
        began = time.perf_counter()
        matrix = build(name)
        seconds = time.perf_counter() - began
        mean, longest, variation = row_statistics(np.diff(matrix.indptr))
        sizes = [f"{size:,}" for size in (*matrix.shape, matrix.nnz)]
        figures = [f"{mean:.2f}", f"{longest:,}", f"{variation:.2f}", f"{seconds:.1f}"]
        table.add_row(name, *sizes, *figures, spec.description)
    Console(width=None if sys.stdout.isatty() else 220).print(table)


if __name__ == "__main__":
    main()
