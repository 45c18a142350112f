"""Stores are built from entries in any order, in limited memory, and nothing is left of a build that ends early."""

import numpy as np
import pytest
import scipy.sparse

from penstock.fem import Cantilever
from penstock.spmv import BudgetError, InputError, StoreError
from penstock.streaming import FileStore, StoreBuilder, StreamedMatrix
from penstock.streaming.stores import packing
from penstock.streaming.stores import store_builder as module
from penstock.streaming.stores.whole import read_whole

BEAM = Cantilever(nodes=(9, 5, 5), dof=3)


def shuffled(matrix, seed=0):
    entries = scipy.sparse.coo_array(matrix)
    order = np.random.default_rng(seed).permutation(entries.nnz)
    return entries.row[order], entries.col[order], entries.data[order]


@pytest.mark.parametrize("memory", ["1 GiB", "256 KiB", "20 KiB"])
@pytest.mark.parametrize("options", [{}, {"format": "csr"}, {"format": "symmetric_bsr", "block_size": 3}])
def test_entries_in_any_order_give_the_matrix(tmp_path, memory, options):
    A = BEAM.matrix("csr").to_csr()
    rows, columns, values = shuffled(A)
    with StoreBuilder(tmp_path / "store", A.shape, memory=memory, **options) as builder:
        for part in np.array_split(np.arange(values.size), 7):
            builder.add(rows[part], columns[part], values[part])
        with builder.finish() as store:
            x = np.random.default_rng(1).normal(size=A.shape[0])
            with StreamedMatrix(store, store.index.nbytes) as streamed:
                np.testing.assert_allclose(streamed @ x, A @ x, atol=1e-12)
            if not options:
                assert store.index.format_name == "bsr"
    assert [entry.name for entry in tmp_path.iterdir()] == ["store"]


def test_what_is_added_several_times_is_summed(tmp_path):
    """Whether or not the entries are in one run."""
    values = np.random.default_rng(0).normal(size=3000) * 10.0 ** np.random.default_rng(1).integers(-8, 8, 3000)
    expected = np.zeros(3)
    for place, value in enumerate(values):
        expected[place % 3] += value
    for name, memory in (("one", "1 GiB"), ("many", "10 KiB")):
        with StoreBuilder(tmp_path / name, (5, 5), memory=memory) as builder:
            for start in range(0, 3000, 300):
                places = np.arange(start, start + 300) % 3
                builder.add(places, places, values[start : start + 300])
            assert (len(builder._runs) > 5) == (name == "many")
            with builder.finish() as store:
                found = read_whole(store).toarray()
        np.testing.assert_allclose(np.diag(found)[:3], expected, rtol=1e-14)
        assert np.count_nonzero(found) == 3


def test_element_matrices_are_assembled(tmp_path):
    elements = np.random.default_rng(2).integers(0, 40, size=(60, 4))
    matrices = np.random.default_rng(3).normal(size=(60, 4, 4))
    expected = np.zeros((40, 40))
    for unknowns, matrix in zip(elements, matrices, strict=True):
        np.add.at(expected, np.ix_(unknowns, unknowns), matrix)
    with StoreBuilder(tmp_path / "a", (40, 40)) as builder:
        builder.add_elements(elements[:30], matrices[:30])
        builder.add_elements(elements[30:], matrices[30:])
        with builder.finish() as store:
            np.testing.assert_allclose(read_whole(store).toarray(), expected, atol=1e-13)
    with StoreBuilder(tmp_path / "b", (40, 40)) as builder:
        builder.add_elements(elements, matrices[0])
        builder.add_matrix(scipy.sparse.eye_array(3), first_row=37)
        with builder.finish() as store:
            assert read_whole(store).shape == (40, 40)


def test_slabs_are_cut_where_entries_are_many(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_SLAB_NBYTES", 200 << 10)
    beam = Cantilever(nodes=(65, 9, 9), dof=3)
    A = beam.matrix("csr").to_csr()
    with StoreBuilder(tmp_path / "a", A.shape, block_size=3) as builder:
        builder.add_matrix(A)
        with builder.finish() as store:
            assert len(store.index.subdivisions) > 20
            sizes = [part.nnz for part in store.index.subdivisions]
            assert max(sizes) <= 12 << 10
            np.testing.assert_allclose((read_whole(store) - A).data, 0, atol=1e-15)


def test_a_matrix_without_entries_is_one_of_zeros(tmp_path):
    with StoreBuilder(tmp_path / "a", (7, 7)) as builder, builder.finish() as store:
        assert (store.index.shape, store.index.nnz) == ((7, 7), 0)


@pytest.mark.parametrize(
    ("entries", "advice"),
    [
        (([0], [0, 1], [1.0]), "1 rows, 2 columns and 1 values"),
        (([9], [0], [1.0]), "row 9 is outside 0 to 8"),
        (([0], [-1], [1.0]), "column -1 is outside 0 to 8"),
        (([0.5], [0], [1.0]), "rows must be integers, not float64"),
        (([0], [0], [np.nan]), "finite real numbers"),
        (([0], [0], [1j]), "finite real numbers"),
    ],
)
def test_what_cannot_be_an_entry_is_refused_and_nothing_is_left(tmp_path, entries, advice):
    with pytest.raises(InputError, match=advice), StoreBuilder(tmp_path / "a", (9, 9)) as builder:
        builder.add(*entries)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_taken_is_refused_before_anything_is_added(tmp_path):
    FileStore.create(tmp_path / "a", BEAM.subdivisions(2)).close()
    with pytest.raises(InputError, match="exists"):
        StoreBuilder(tmp_path / "a", (9, 9))
    with StoreBuilder(tmp_path / "a", (9, 9), overwrite=True) as builder:
        builder.add([0], [0], [1.0])
        builder.finish().close()
    with pytest.raises(InputError, match="finished"):
        builder.add([0], [0], [1.0])
    with FileStore(tmp_path / "a") as store:
        assert store.index.shape == (9, 9)


def test_a_builder_that_has_ended_builds_nothing(tmp_path):
    with StoreBuilder(tmp_path / "a", (9, 9), overwrite=True) as builder:
        builder.add([0], [0], [1.0])
        builder.finish().close()
        with pytest.raises(InputError, match="finished"):
            builder.finish()
    with FileStore(tmp_path / "a") as store:
        assert store.index.nnz == 1


def test_what_cannot_be_built_is_refused_at_the_start(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("years")
    with pytest.raises(InputError, match="exists"):
        StoreBuilder(tmp_path / "thesis", (9, 9), overwrite=True)
    with pytest.raises(InputError, match="nonsense"):
        StoreBuilder(tmp_path / "a", (9, 9), format="nonsense")


def test_a_run_that_could_not_be_written_is_not_lost(tmp_path, monkeypatch):
    def full(path, *arrays):
        raise OSError(28, "No space left on device")

    with StoreBuilder(tmp_path / "a", (9, 9), memory="1 KiB") as builder:
        builder.add(np.arange(9), np.arange(9), np.ones(9))
        with monkeypatch.context() as patch:
            patch.setattr(module._Run, "write", full)
            with pytest.raises(StoreError, match="No space left"):
                builder.add(np.arange(9), np.arange(9), np.ones(9))
        builder.add([], [], [])
        with builder.finish() as store:
            np.testing.assert_array_equal(read_whole(store).diagonal(), np.ones(9))


def test_rows_without_entries_are_cut_to_the_memory_too(tmp_path):
    rows = 5_000_000
    with StoreBuilder(tmp_path / "a", (rows, 5), memory="1 MiB") as builder:
        builder.add([0, 3_000_000, rows - 1], [0, 1, 4], [1.0, 2.0, 3.0])
        with builder.finish() as store:
            sizes = [part.row_stop - part.row_start for part in store.index.subdivisions]
            assert max(sizes) <= (1 << 20) // 64
            assert (sum(sizes), store.index.nnz) == (rows, 3)


def test_many_entries_in_one_range_of_rows_are_cut_to_the_memory_too(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_RANGES", 1)
    A = scipy.sparse.random_array((20_000, 50), density=0.1, rng=np.random.default_rng(0), format="csr")
    with StoreBuilder(tmp_path / "a", A.shape, memory="1 MiB") as builder:
        builder.add_matrix(A)
        with builder.finish() as store:
            assert max(part.nnz for part in store.index.subdivisions) <= 1.1 * (1 << 20) / 76
            assert abs(read_whole(store) - A).nnz == 0


def test_more_rows_than_slabs_of_the_memory_are_refused_before_anything_is_made(tmp_path):
    with pytest.raises(
        InputError, match=r"1000000000000 rows are more than 16384 slabs of \d+ rows, the largest for 1 MiB"
    ):
        StoreBuilder(tmp_path / "a", (10**12, 5), memory="1 MiB")
    assert list(tmp_path.iterdir()) == []


def test_half_of_a_matrix_whose_rows_cannot_be_compared_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "available_nbytes", lambda: 10_000)
    with StoreBuilder(tmp_path / "a", (900, 900), format="symmetric_bsr", block_size=3) as builder:
        builder.add([0], [0], [1.0])
        with pytest.raises(BudgetError, match=r"vectors of 900 rows take 28.1\d? KiB, but 9.7\d* KiB"):
            builder.finish()
