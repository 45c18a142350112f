"""How full blocks would be: of small matrices counted, of larger ones estimated from some rows."""

import numpy as np
import pytest
import scipy.sparse

from penstock.spmv import CsrMatrix
from penstock.spmv.formats.statistics import MatrixStatistics, count_blocks


def counted(A, size):
    """Return the share of the scalars in blocks that are stored, by blocks of SciPy."""
    blocks = scipy.sparse.csr_array(A).tobsr((size, size)).data
    return A.nnz / blocks.size


def line(nodes):
    return scipy.sparse.diags_array([-1.0, 4.0, -1.0], offsets=[-1, 0, 1], shape=(nodes, nodes))


def in_blocks(nodes, size):
    return scipy.sparse.kron(line(nodes), np.ones((size, size)))


def statistics_of(A):
    return MatrixStatistics.of(CsrMatrix.from_csr(scipy.sparse.csr_array(A)))


@pytest.mark.parametrize("nodes", [8, 120, 840, 10_080, 60_480])
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_fills_are_those_of_all_rows(nodes, size):
    nodes = nodes // size * size
    A = in_blocks(nodes // size, size).tocsr()
    found = statistics_of(A).fills
    expected = {other: counted(A, other) for other in range(2, 9) if nodes % other == 0}
    assert found == {other: pytest.approx(fill, rel=0.01) for other, fill in expected.items() if fill > 0.5}
    assert size == 1 or found[size] == 1.0


@pytest.mark.parametrize("scalar_share", [0.2, 0.5, 0.8])
def test_rows_that_differ_from_others_count(scalar_share):
    scalars = round(scalar_share * 20_160 / 840) * 840
    A = scipy.sparse.block_diag([line(scalars), in_blocks((20_160 - scalars) // 4, 4)]).tocsr()
    fill = statistics_of(A).fill(4)
    assert fill == pytest.approx(counted(A, 4), rel=1e-12 if fill > 0.4 else 0.2)


def test_sizes_that_some_rows_rule_out_are_not_counted_in_all(monkeypatch):
    rows = []

    def counting(device, shape, *arrays, **options):
        rows.append(shape[0])
        return count_blocks(device, shape, *arrays, **options)

    monkeypatch.setattr("penstock.spmv.formats.statistics.count_blocks", counting)
    assert set(statistics_of(line(50_400)).fills) == {2}  # exactly half and more, of two rows at the ends
    assert sum(rows) < 50_400 + 7 * 8 * 300
    rows.clear()
    random = np.random.default_rng(0)
    places = random.integers(16_800, size=(2, 50_000))
    graph = scipy.sparse.coo_array((np.ones(50_000), places), shape=(16_800, 16_800))
    assert set(statistics_of(scipy.sparse.kron(graph, np.ones((3, 3)))).fills) == {2, 3}
    assert rows.count(50_400) == 2


def test_an_empty_matrix_has_no_blocks():
    assert statistics_of(scipy.sparse.csr_array((0, 0))).fills == {}
