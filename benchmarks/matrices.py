"""The shapes of matrix that the literature on sparse products discusses, seeded: python benchmarks/matrices.py.

Each is a stand-in for a published matrix, its namesake, so that nothing need be downloaded: it has about the namesake's
rows, entries and spread of row lengths, not its values, and its columns only in outline. The namesakes' figures are
those of Table 2 of Kreutzer et al., "A unified sparse matrix data format for efficient general sparse matrix-vector
multiplication on modern processors with wide SIMD units" (SIAM J. Sci. Comput. 36, 2014), the SELL-C-sigma paper.
"""

import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse
import scipy.special
from rich.console import Console
from rich.table import Table

__all__ = ["MATRICES", "MatrixSpec", "build", "row_statistics"]

Array = np.ndarray[Any, Any]
Generator = np.random.Generator

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


# Lattices


def stencil5(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """5 points in 2-D."""
    return _csr(rng, *_lattice((725, 725), scale, _cross(2)))


def stencil7(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """7 points in 3-D."""
    return _csr(rng, *_lattice((126, 126, 126), scale, _cross(3)))


def stencil27(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """27 points in 3-D."""
    return _csr(rng, *_lattice((96, 96, 96), scale, _box(3)))


def fem_shell(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """Bilinear shell elements: 9 nodes around each node, 6 unknowns a node."""
    lengths, nodes = _lattice((191, 190), scale, _box(2))
    blocks = rng.uniform(-1, 1, (nodes.size, 6, 6))
    return scipy.sparse.bsr_array((blocks, nodes, _row_offsets(lengths)), shape=2 * (6 * lengths.size,)).tocsr()


def lattice4d(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """Wilson's hopping matrix of lattice QCD on a periodic 4-D lattice: 4 spins and 3 colours a site, no diagonal.

    A spatial neighbour couples two of its spins to each spin here, ``1 +- gamma``; in time ``1 +- gamma`` is a
    projection in the usual basis, so that a spin sees only one of the two neighbours: 6 * 2 + 1 = 13 times 3 colours.
    """
    extent = max(3, round(8 * scale**0.25))
    sites = np.arange(extent**4, dtype=np.int32).reshape(4 * (extent,))
    partners = ((3, 2, 1, 0), (3, 2, 1, 0), (2, 3, 0, 1))

    def neighbour(axis: int, step: int, spin: int) -> Array:
        return np.roll(sites, step, axis).ravel() * 4 + spin

    coupled = [
        [
            neighbour(axis, step, other)
            for axis in range(3)
            for step in (-1, 1)
            for other in (spin, partners[axis][spin])
        ]
        + [neighbour(3, -1 if spin < 2 else 1, spin)]
        for spin in range(4)
    ]
    spins: Array = np.sort(np.array(coupled).transpose(2, 0, 1).reshape(-1, 13), axis=1)
    columns = np.repeat((spins[:, :, None] * 3 + np.arange(3, dtype=np.int32)).reshape(-1, 39), 3, axis=0)
    return _csr(rng, np.full(len(columns), 39), columns.ravel())


def _lattice(extents: tuple[int, ...], scale: float, offsets: list[tuple[int, ...]]) -> tuple[Array, Array]:
    """Return the row lengths and columns of a lattice without wrap-around; offsets ascend, and so do the columns."""
    extents = tuple(max(2, round(extent * scale ** (1 / len(extents)))) for extent in extents)
    points = np.indices(extents, dtype=np.int32).reshape(len(extents), -1)
    strides = [int(np.prod(extents[axis + 1 :])) for axis in range(len(extents))]
    rows = np.arange(points.shape[1], dtype=np.int32)
    columns = np.empty((rows.size, len(offsets)), np.int32)
    inside = np.ones(columns.shape, bool)
    for place, offset in enumerate(offsets):
        columns[:, place] = rows + np.dot(strides, offset)
        for point, extent, step in zip(points, extents, offset, strict=True):
            if step:
                inside[:, place] &= point != (0 if step < 0 else extent - 1)
    return inside.sum(axis=1), columns[inside]


def _box(dimensions: int) -> list[tuple[int, ...]]:
    return list(itertools.product((-1, 0, 1), repeat=dimensions))


def _cross(dimensions: int) -> list[tuple[int, ...]]:
    return [offset for offset in _box(dimensions) if np.count_nonzero(offset) <= 1]


# Matrices with full rows


def dense(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """Every entry stored."""
    rows = _scaled(2_000, scale)
    return _csr(rng, np.full(rows, rows), np.tile(np.arange(rows), rows))


def full_row(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """Tridiagonal but for the row in the middle, which is full."""
    lengths, columns = _lattice((1_000_000,), scale, _cross(1))
    rows = lengths.size
    start, stop = _row_offsets(lengths)[[rows // 2, rows // 2 + 1]]
    lengths[rows // 2] = rows
    return _csr(rng, lengths, np.concatenate([columns[:start], np.arange(rows), columns[stop:]]))


def arrow(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """First row, first column and diagonal."""
    rows = _scaled(1_000_000, scale)
    lengths = np.full(rows, 2)
    lengths[0] = rows
    pairs = np.zeros((rows - 1, 2), np.int32)
    pairs[:, 1] = np.arange(1, rows)
    return _csr(rng, lengths, np.concatenate([np.arange(rows), pairs.ravel()]))


# Matrices of scattered columns. Their row lengths are functions of their own, so that a test can look at those of the
# full size without the entries; each matrix draws its lengths first, so that equal seeds give equal lengths.


def web(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """Links of pages: most to pages of the same host, the others mostly to the few that everybody links to."""
    return _scattered(rng, web_lengths(rng, _scaled(1_000_005, scale)), far=0.3, spread=30, popularity=3)


def web_lengths(rng: Generator, rows: int) -> Array:
    """Return lengths of a power law, ``k**-2.2``, and one row of 4,700 that no other reaches."""
    lengths = _power_law(rng, rows, exponent=2.2, first=1, last=4_699)
    lengths[rng.integers(rows)] = 4_700
    return lengths


def circuit(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """Nodes of a circuit: a few neighbours each, nets of supply and clock long."""
    return _scattered(rng, circuit_lengths(rng, _scaled(170_998, scale)), far=0.2, spread=50)


def circuit_lengths(rng: Generator, rows: int) -> Array:
    """Return lengths below 10 in 94 % of the rows, from 10 in a power law otherwise, and one row of 353."""
    short = 1 + rng.binomial(8, 0.49, rows)
    long = _power_law(rng, rows, exponent=3.5, first=10, last=352)
    lengths = np.where(rng.random(rows) < 0.94, short, long)
    lengths[rng.integers(rows)] = 353
    return lengths


def economics(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """Equations of a macroeconomic model, of very uneven rows."""
    return _scattered(rng, economics_lengths(rng, _scaled(206_500, scale)), far=0.3, spread=100)


def economics_lengths(rng: Generator, rows: int) -> Array:
    """Return lengths of mean 6.2 and coefficient of variation 0.7."""
    return _gamma_lengths(rng, rows, mean=6.17, variation=0.72)


def power(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """Optimal power flow: two halves of a KKT matrix, so that columns are near the diagonal or anywhere."""
    return _scattered(rng, power_lengths(rng, _scaled(2_063_494, scale)), far=0.5, spread=100)


def power_lengths(rng: Generator, rows: int) -> Array:
    """Return lengths of mean 7.1 and coefficient of variation 1.05."""
    return _gamma_lengths(rng, rows, mean=7.08, variation=1.05)


def rail(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """Set cover of railway timetables: a trip a row, a crew's duty a column."""
    return _scattered(rng, rail_lengths(rng, _scaled(4_284, scale)), _scaled(1_092_610, scale))


def rail_lengths(rng: Generator, rows: int) -> Array:
    """Return lengths of mean 2,633 and coefficient of variation 1.6."""
    return _lognormal_lengths(rng, rows, mean=2_633, variation=1.65)  # the quantiles' own is a little lower


def amg_coarse(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """Coarse level of algebraic multigrid, filled in by the Galerkin product."""
    return _scattered(rng, amg_coarse_lengths(rng, _scaled(300_000, scale)), far=0.05, spread=500)


def amg_coarse_lengths(rng: Generator, rows: int) -> Array:
    """Return lengths of mean 40 whose longest has about a thousand."""
    return _lognormal_lengths(rng, rows, mean=40, variation=0.9)


def empty_rows(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """Rows of which most are empty, such as a block of a distributed matrix that holds only couplings."""
    return _scattered(rng, empty_rows_lengths(rng, _scaled(1_000_000, scale)), far=0.2, spread=100)


def empty_rows_lengths(rng: Generator, rows: int) -> Array:
    """Return lengths of which 60 % are 0 and the others have a mean of 8."""
    lengths = 1 + rng.poisson(7, rows)
    lengths[rng.permutation(rows)[: round(0.6 * rows)]] = 0
    return lengths


def tall(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """Many more rows than columns."""
    return _scattered(rng, rng.poisson(4, _scaled(2_000_000, scale)), _scaled(20_000, scale))


def wide(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """Many more columns than rows."""
    return _scattered(rng, rng.poisson(400, _scaled(20_000, scale)), _scaled(2_000_000, scale))


def _power_law(rng: Generator, rows: int, *, exponent: float, first: int, last: int) -> Array:
    lengths = np.arange(first, last + 1)
    weights = lengths.astype(float) ** -exponent
    return rng.choice(lengths, rows, p=weights / weights.sum())


def _gamma_lengths(rng: Generator, rows: int, *, mean: float, variation: float) -> Array:
    """Return lengths of at least 1. Rounding up adds one half to the mean and next to nothing to the deviation."""
    deviation, mean = mean * variation, mean - 0.5
    return np.ceil(rng.gamma((mean / deviation) ** 2, deviation**2 / mean, rows)).astype(np.int64)


def _lognormal_lengths(rng: Generator, rows: int, *, mean: float, variation: float) -> Array:
    """Return the distribution's quantiles, shuffled: samples of so long a tail would miss the mean by some percent."""
    variance = np.log1p(variation**2)
    normal = scipy.special.ndtri((np.arange(rows) + 0.5) / rows)
    lengths = mean * np.exp(np.sqrt(variance) * normal - variance / 2)
    return rng.permutation(np.maximum(np.rint(lengths), 1).astype(np.int64))


def _scattered(
    rng: Generator,
    lengths: Array,
    column_count: int | None = None,
    *,
    far: float = 1.0,
    spread: float = 1.0,
    popularity: float = 1.0,
) -> scipy.sparse.csr_array:
    """Return a matrix of exactly these row lengths, its columns drawn.

    Parameters
    ----------
    lengths : array, (rows,)
        Cut where they exceed the number of columns.
    column_count : int, optional
        Square if left out.
    far : float
        Share of the entries that may be in any column; the others are around the diagonal.
    spread : float
        Mean distance of the others from it, beyond the width that a row's own entries take.
    popularity : float
        1 draws far columns evenly; above 1 they crowd towards the first.

    Notes
    -----
    Drawn columns repeat. Dropping the copies would shorten the rows, so a row of k entries draws from k - 1 columns
    fewer and its i-th column in order moves i places on: then all differ and the row keeps its length.
    """
    column_count = column_count or lengths.size
    lengths = np.minimum(lengths, column_count)
    row = np.repeat(np.arange(lengths.size), lengths)
    last = column_count - lengths[row]
    drawn = row * (column_count / lengths.size) - lengths[row] / 2 + rng.laplace(0, spread, row.size)
    anywhere = rng.random(row.size) < far
    drawn[anywhere] = last[anywhere] * rng.random(np.count_nonzero(anywhere)) ** popularity
    columns = np.clip(np.rint(drawn).astype(np.int64), 0, last)
    # One sort of row and column together sorts all rows at once.
    columns += row * column_count
    columns.sort()
    columns -= row * column_count
    columns += np.arange(row.size) - _row_offsets(lengths)[row]
    return _csr(rng, lengths, columns, column_count)


def _csr(rng: Generator, lengths: Array, columns: Array, column_count: int | None = None) -> scipy.sparse.csr_array:
    arrays = (rng.uniform(-1, 1, columns.size), columns.astype(np.int32, copy=False), _row_offsets(lengths))
    return scipy.sparse.csr_array(arrays, shape=(lengths.size, column_count or lengths.size))


def _row_offsets(lengths: Array) -> Array:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _scaled(count: int, scale: float) -> int:
    return max(1, round(count * scale))


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
