"""A matrix of the host that a GPU looks at and converts piece by piece becomes what the host would make of it."""

import numpy as np
import pytest
from kernel_targets import gpu_count

from penstock.fem import Cantilever, LognormalMaterial
from penstock.spmv import BsrMatrix, CsrMatrix, Device, SymmetricBsrMatrix
from penstock.spmv.formats import statistics, through_device, upper_half
from penstock.spmv.formats.statistics import MatrixStatistics
from penstock.spmv.formats.survey import Defect
from penstock.spmv.formats.upper_half import UpperHalf

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(gpu_count() == 0, reason="no CUDA device")]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(statistics, "WORTH_NBYTES", 0)
    monkeypatch.setattr(through_device, "_PIECE_NBYTES", 100_000)


def matrix(dof, nodes=(21, 7, 6)):
    beam = Cantilever(nodes=nodes, dof=dof, material=LognormalMaterial(0.5, 1))
    return CsrMatrix.from_csr(beam.matrix("csr").to_csr())


@pytest.mark.parametrize("converter", [None, UpperHalf])
@pytest.mark.parametrize("dof", [1, 3, 6])
def test_half_of_a_matrix_is_that_of_the_host_to_the_bit(dof, converter, monkeypatch):
    A = matrix(dof)

    through = MatrixStatistics.of(A, through=Device("cuda"), converter=converter)
    assert through.survey == MatrixStatistics.of(A).survey
    if converter is not None and dof > 1:  # what has been looked at has been converted
        monkeypatch.setattr(through_device, "_pieces", None)
    found = SymmetricBsrMatrix.of_statistics(through, block_size=dof)

    expected = SymmetricBsrMatrix.of_statistics(MatrixStatistics.of(A), block_size=dof)
    for name, array in expected.arrays().items():
        assert np.array_equal(found.arrays()[name], array), name


def test_half_of_a_matrix_that_is_larger_than_expected_is_made_later(monkeypatch):
    A = matrix(3)
    monkeypatch.setattr(upper_half, "_ROOM", 0.6)

    through = MatrixStatistics.of(A, through=Device("cuda"), converter=UpperHalf)
    assert through.survey == MatrixStatistics.of(A).survey
    assert through.take_converted(3, np.float64) is None

    expected = SymmetricBsrMatrix.of_statistics(MatrixStatistics.of(A), block_size=3)
    found = SymmetricBsrMatrix.of_statistics(through, block_size=3)
    for name, array in expected.arrays().items():
        assert np.array_equal(found.arrays()[name], array), name


def test_what_another_format_does_not_use_is_forgotten():
    A = matrix(3)
    through = MatrixStatistics.of(A, through=Device("cuda"), converter=UpperHalf)
    assert not through.survey.defects

    BsrMatrix.of_statistics(through, block_size=3)

    assert through.take_converted(3, np.float64) is None


@pytest.mark.parametrize("converter", [None, UpperHalf])
@pytest.mark.parametrize("change", ["offsets", "range", "order", "value", "skew"])
def test_defects_are_seen(change, converter):
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

    seen = MatrixStatistics.of(damaged, through=Device("cuda"), converter=converter).survey

    assert seen == MatrixStatistics.of(damaged).survey if change != "offsets" else seen.defects == Defect.OFFSETS
    assert seen.defects or seen.skew
