"""The benchmark matrices are the same at every call, well formed, and as large and as uneven as they say."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # scripts import each other from there
import matrices
import scattered

NAMES = tuple(matrices.MATRICES)
SCALE = 0.01
# Full size: whole matrices where that takes a moment, else the row lengths, which come first from the same generator.
SMALL = ("stencil5", "lattice4d", "fem_shell", "dense")
LENGTHS = {
    "web": scattered.web_lengths,
    "circuit": scattered.circuit_lengths,
    "economics": scattered.economics_lengths,
    "power": scattered.power_lengths,
    "rail": scattered.rail_lengths,
}


def full_lengths(name, draw):
    """Return the row lengths that the full-size matrix has, without its entries."""
    spec = matrices.MATRICES[name]
    return draw(np.random.default_rng(spec.seed), spec.namesake[1])


def row_lengths(name, scale):
    return np.diff(matrices.build(name, scale=scale).indptr)


@pytest.mark.parametrize("name", NAMES)
def test_a_matrix_is_well_formed(name):
    matrix = matrices.build(name, scale=SCALE)
    rows, columns = matrix.shape
    row = np.repeat(np.arange(rows), np.diff(matrix.indptr))

    assert matrix.data.dtype == np.float64
    assert matrix.indices.dtype == np.int32
    assert matrix.indices.min() >= 0
    assert matrix.indices.max() < columns
    # Ascending strictly: sorted, and nothing twice.
    assert np.all(np.diff(row * columns + matrix.indices.astype(np.int64)) > 0)
    assert -1 <= matrix.data.min() < -0.9
    assert 0.9 < matrix.data.max() < 1
    assert abs(matrix.data.mean()) < 0.05


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_gives_one_matrix(name):
    spec = matrices.MATRICES[name]
    first, again = matrices.build(name, scale=SCALE), matrices.build(name, scale=SCALE)
    other = spec.build(np.random.default_rng(spec.seed + 1000), SCALE)

    for array in ("data", "indices", "indptr"):
        np.testing.assert_array_equal(getattr(first, array), getattr(again, array))
    assert first.nnz != other.nnz or np.any(first.data != other.data)


def test_no_two_matrices_share_a_seed():
    assert len({spec.seed for spec in matrices.MATRICES.values()}) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_kind_tells_even_rows_from_uneven_ones(name):
    _, _, variation = matrices.row_statistics(row_lengths(name, SCALE))

    kind = "regular" if variation < matrices.REGULAR_VARIATION else "irregular"
    assert matrices.MATRICES[name].kind == kind


@pytest.mark.parametrize("name", SMALL)
def test_a_structured_matrix_has_the_size_of_its_namesake(name):
    matrix = matrices.build(name)
    _, rows, nonzeros = matrices.MATRICES[name].namesake

    assert matrix.shape[0] == pytest.approx(rows, rel=0.1)
    # The namesake of the 5-point stencil has 4 entries a row.
    assert matrix.nnz == pytest.approx(nonzeros * (5 / 4 if name == "stencil5" else 1), rel=0.1)


@pytest.mark.parametrize("name", LENGTHS)
def test_a_scattered_matrix_has_the_size_of_its_namesake(name):
    lengths = full_lengths(name, LENGTHS[name])

    assert lengths.sum() == pytest.approx(matrices.MATRICES[name].namesake[2], rel=0.1)
    assert lengths.min() >= 1


@pytest.mark.parametrize("name", LENGTHS)
def test_the_lengths_are_those_of_the_matrix(name):
    spec = matrices.MATRICES[name]
    matrix = matrices.build(name, scale=SCALE)

    expected = LENGTHS[name](np.random.default_rng(spec.seed), matrix.shape[0])

    np.testing.assert_array_equal(np.diff(matrix.indptr), np.minimum(expected, matrix.shape[1]))
    # At scale 1 that is the namesake's own number of rows, the one that full_lengths takes.
    assert matrix.shape[0] == round(SCALE * spec.namesake[1])


def test_every_namesake_is_checked():
    named = {name for name, spec in matrices.MATRICES.items() if spec.namesake}
    assert named == {*SMALL, *LENGTHS}


@pytest.mark.parametrize("name", [name for name, spec in matrices.MATRICES.items() if spec.namesake])
def test_the_description_gives_the_figures_of_the_namesake(name):
    namesake, rows, nonzeros = matrices.MATRICES[name].namesake
    description = matrices.MATRICES[name].description

    for figure in (namesake, f"{rows:,} rows", f"{nonzeros:,} nonzeros", f"{nonzeros / rows:.2f} a row"):
        assert figure in description


@pytest.mark.parametrize(("name", "longest"), [("web", 4_700), ("circuit", 353)])
def test_one_row_is_the_longest(name, longest):
    for lengths in (full_lengths(name, LENGTHS[name]), row_lengths(name, SCALE)):
        assert lengths.max() == longest
        assert np.count_nonzero(lengths == longest) == 1


def test_circuit_rows_are_mostly_short():
    assert np.mean(full_lengths("circuit", scattered.circuit_lengths) < 10) == pytest.approx(0.94, abs=0.005)


@pytest.mark.parametrize(("name", "variation"), [("rail", 1.6), ("power", 1.05), ("economics", 0.72)])
def test_rows_are_as_uneven_as_promised(name, variation):
    assert matrices.row_statistics(full_lengths(name, LENGTHS[name]))[2] == pytest.approx(variation, rel=0.05)


def test_amg_rows_have_a_long_tail():
    lengths = scattered.amg_coarse_lengths(np.random.default_rng(0), 300_000)

    assert 30 <= lengths.mean() <= 50
    assert 500 <= lengths.max() <= 2_000


def test_amg_columns_cluster_around_the_diagonal():
    matrix = matrices.build("amg_coarse", scale=0.1).tocoo()
    distance = np.abs(matrix.col - matrix.row)

    assert np.mean(distance < 2_500) > 0.85
    assert np.mean(distance > 10_000) > 0.01


def test_more_than_half_the_rows_are_empty():
    lengths = row_lengths("empty_rows", SCALE)

    assert np.count_nonzero(lengths == 0) == 6_000
    assert lengths[lengths > 0].mean() == pytest.approx(8, rel=0.05)


def test_a_web_page_in_front_has_many_links():
    counts = np.bincount(matrices.build("web", scale=0.1).indices)

    assert counts.max() > 100 * counts.mean()
    assert np.argmax(counts) < counts.size // 100


@pytest.mark.parametrize("name", ["tall", "wide"])
def test_one_side_is_a_hundred_times_the_other(name):
    matrix = matrices.build(name, scale=SCALE)

    assert matrix.shape == ((20_000, 200) if name == "tall" else (200, 20_000))
    assert matrix.nnz == pytest.approx(SCALE * 8e6, rel=0.02)


def test_a_full_row_crosses_a_tridiagonal_matrix():
    pattern = matrices.build("full_row", scale=1e-5).toarray() != 0

    expected = np.abs(np.subtract.outer(np.arange(10), np.arange(10))) <= 1
    expected[5] = True
    np.testing.assert_array_equal(pattern, expected)


def test_an_arrow_points_at_the_first_entry():
    pattern = matrices.build("arrow", scale=1e-5).toarray() != 0

    expected = np.eye(10, dtype=bool)
    expected[0] = expected[:, 0] = True
    np.testing.assert_array_equal(pattern, expected)


@pytest.mark.parametrize(
    ("name", "scale", "extents", "reach", "dof"),
    [
        ("stencil5", 1e-4, (7, 7), "cross", 1),
        ("stencil7", 1e-4, (6, 6, 6), "cross", 1),
        ("stencil27", 1e-4, (4, 4, 4), "box", 1),
        ("fem_shell", 1e-3, (6, 6), "box", 6),
    ],
)
def test_a_stencil_couples_neighbours(name, scale, extents, reach, dof):
    pattern = matrices.build(name, scale=scale).toarray() != 0

    points = np.indices(extents).reshape(len(extents), -1)
    steps = np.abs(points[:, :, None] - points[:, None, :])
    expected = steps.sum(axis=0) <= 1 if reach == "cross" else steps.max(axis=0) <= 1
    np.testing.assert_array_equal(pattern, np.kron(expected, np.ones((dof, dof), bool)))


def test_a_periodic_lattice_couples_neighbouring_sites_of_every_colour():
    matrix = matrices.build("lattice4d", scale=(4 / 8) ** 4)

    assert matrix.shape == 2 * (12 * 4**4,)
    assert set(np.diff(matrix.indptr)) == {39}
    assert set(np.bincount(matrix.indices)) == {39}
    coordinates = matrix.tocoo()
    sites = [np.array(np.unravel_index(index // 12, (4, 4, 4, 4))) for index in (coordinates.row, coordinates.col)]
    steps = (sites[0] - sites[1]) % 4
    # One step along one axis, forwards or, which is 3 modulo 4, backwards.
    assert np.all(np.sort(np.minimum(steps, 4 - steps), axis=0) == [[0], [0], [0], [1]])
    # In space both spins of both neighbours, in time one spin of one neighbour, in 3 colours each.
    np.testing.assert_array_equal(np.count_nonzero(steps, axis=1) / matrix.shape[0], [12, 12, 12, 3])


def test_a_scale_without_rows_is_refused():
    with pytest.raises(ValueError, match="no rows"):
        matrices.build("web", scale=0)
