"""A matrix of the host that a GPU looks at and converts piece by piece becomes what the host would make of it."""

import numpy as np
import pytest
from kernel_targets import gpu_count

from penstock.fem import Cantilever, LognormalMaterial
from penstock.spmv import CsrMatrix, Device, SymmetricBsrMatrix
from penstock.spmv.formats import statistics, through_device
from penstock.spmv.formats.statistics import MatrixStatistics
from penstock.spmv.formats.survey import Defect

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(gpu_count() == 0, reason="no CUDA device")]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(statistics, "WORTH_NBYTES", 0)
    monkeypatch.setattr(through_device, "_PIECE_NBYTES", 100_000)


def matrix(dof, nodes=(21, 7, 6)):
    beam = Cantilever(nodes=nodes, dof=dof, material=LognormalMaterial(0.5, 1))
    return CsrMatrix.from_csr(beam.matrix("csr").to_csr())


@pytest.mark.parametrize("dof", [1, 3, 6])
def test_half_of_a_matrix_is_that_of_the_host_to_the_bit(dof):
    A = matrix(dof)

    through = MatrixStatistics.of(A, through=Device("cuda"))
    found = SymmetricBsrMatrix.of_statistics(through, block_size=dof)

    expected = SymmetricBsrMatrix.of_statistics(MatrixStatistics.of(A), block_size=dof)
    assert through.survey == MatrixStatistics.of(A).survey
    for name, array in expected.arrays().items():
        assert np.array_equal(found.arrays()[name], array), name


@pytest.mark.parametrize("change", ["offsets", "range", "order", "value", "skew"])
def test_defects_are_seen(change):
    A = matrix(3)
    offsets, columns, values = (array.copy() for array in (A.row_offsets, A.column_indices, A.values))
    place = int(offsets[700])
    if change == "offsets":
        offsets[700] = offsets[701] + 1
    elif change == "range":
        columns[place] = A.shape[1]
    elif change == "order":
        columns[place : place + 2] = columns[place : place + 2][::-1].copy()
    elif change == "value":
        values[place] = np.nan
    else:
        values[place] += 1.0
    arrays = {"row_offsets": offsets, "column_indices": columns, "values": values}
    damaged = CsrMatrix.from_arrays(A.shape, A.dtype, arrays, {})

    seen = MatrixStatistics.of(damaged, through=Device("cuda")).survey

    assert seen == MatrixStatistics.of(damaged).survey if change != "offsets" else seen.defects == Defect.OFFSETS
    assert seen.defects or seen.skew
