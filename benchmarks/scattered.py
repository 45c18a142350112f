"""Generated matrices of scattered columns.

Their row lengths are functions of their own, so that a test can look at those of the full size without the entries; each matrix
draws its lengths first, so that equal seeds give equal lengths.
"""

import numpy as np
import scipy.sparse
import scipy.special
from csr_arrays import Array, Generator, csr_of, row_offsets_of, scaled

__all__ = [
    "amg_coarse",
    "amg_coarse_lengths",
    "circuit",
    "circuit_lengths",
    "economics",
    "economics_lengths",
    "empty_rows",
    "power",
    "power_lengths",
    "rail",
    "rail_lengths",
    "tall",
    "web",
    "web_lengths",
    "wide",
]


def web(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """Links of pages: most to pages of the same host, the others mostly to the few that everybody links to."""
    return _scattered(rng, web_lengths(rng, scaled(1_000_005, scale)), far=0.3, spread=30, popularity=3)


def web_lengths(rng: Generator, rows: int) -> Array:
    """Return lengths of a power law, ``k**-2.2``, and one row of 4,700 that no other reaches."""
    lengths = _power_law(rng, rows, exponent=2.2, first=1, last=4_699)
    lengths[rng.integers(rows)] = 4_700
    return lengths


def circuit(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """Nodes of a circuit: a few neighbours each, nets of supply and clock long."""
    return _scattered(rng, circuit_lengths(rng, scaled(170_998, scale)), far=0.2, spread=50)


def circuit_lengths(rng: Generator, rows: int) -> Array:
    """Return lengths below 10 in 94 % of the rows, from 10 in a power law otherwise, and one row of 353."""
    short = 1 + rng.binomial(8, 0.49, rows)
    long = _power_law(rng, rows, exponent=3.5, first=10, last=352)
    lengths = np.where(rng.random(rows) < 0.94, short, long)
    lengths[rng.integers(rows)] = 353
    return lengths


def economics(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """Equations of a macroeconomic model, of very uneven rows."""
    return _scattered(rng, economics_lengths(rng, scaled(206_500, scale)), far=0.3, spread=100)


def economics_lengths(rng: Generator, rows: int) -> Array:
    """Return lengths of mean 6.2 and coefficient of variation 0.7."""
    return _gamma_lengths(rng, rows, mean=6.17, variation=0.72)


def power(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """Optimal power flow: two halves of a KKT matrix, so that columns are near the diagonal or anywhere."""
    return _scattered(rng, power_lengths(rng, scaled(2_063_494, scale)), far=0.5, spread=100)


def power_lengths(rng: Generator, rows: int) -> Array:
    """Return lengths of mean 7.1 and coefficient of variation 1.05."""
    return _gamma_lengths(rng, rows, mean=7.08, variation=1.05)


def rail(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """Set cover of railway timetables: a trip a row, a crew's duty a column."""
    return _scattered(rng, rail_lengths(rng, scaled(4_284, scale)), scaled(1_092_610, scale))


def rail_lengths(rng: Generator, rows: int) -> Array:
    """Return lengths of mean 2,633 and coefficient of variation 1.6."""
    return _lognormal_lengths(rng, rows, mean=2_633, variation=1.65)  # the quantiles' own is a little lower


def amg_coarse(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """Coarse level of algebraic multigrid, filled in by the Galerkin product."""
    return _scattered(rng, amg_coarse_lengths(rng, scaled(300_000, scale)), far=0.05, spread=500)


def amg_coarse_lengths(rng: Generator, rows: int) -> Array:
    """Return lengths of mean 40 whose longest has about a thousand."""
    return _lognormal_lengths(rng, rows, mean=40, variation=0.9)


def empty_rows(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """Rows of which most are empty, such as a block of a distributed matrix that holds only couplings."""
    return _scattered(rng, empty_rows_lengths(rng, scaled(1_000_000, scale)), far=0.2, spread=100)


def empty_rows_lengths(rng: Generator, rows: int) -> Array:
    """Return lengths of which 60 % are 0 and the others have a mean of 8."""
    lengths = 1 + rng.poisson(7, rows)
    lengths[rng.permutation(rows)[: round(0.6 * rows)]] = 0
    return lengths


def tall(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """Many more rows than columns."""
    return _scattered(rng, rng.poisson(4, scaled(2_000_000, scale)), scaled(20_000, scale))


def wide(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """Many more columns than rows."""
    return _scattered(rng, rng.poisson(400, scaled(20_000, scale)), scaled(2_000_000, scale))


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
    columns += np.arange(row.size) - row_offsets_of(lengths)[row]
    return csr_of(rng, lengths, columns, column_count)
