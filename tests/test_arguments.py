"""Arguments that cannot be meant are refused with what was expected, wherever they would be taken or end in another library."""

import numpy as np
import pytest
import scipy.sparse

import penstock
from penstock.distributed import columns_within
from penstock.fem import BoxMesh, Cantilever, face_load
from penstock.spmv import BsrMatrix, Device, InputError, suggest_format
from penstock.streaming import FileStore

MESH = BoxMesh(nodes=3)


def traction(points):
    return points[:, :1]


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        (lambda: suggest_format(None), "NoneType is no sparse matrix"),
        (lambda: suggest_format(np.eye(3)), "ndarray is no sparse matrix"),
        (lambda: Device("gpu"), "unknown device 'gpu'"),
        (lambda: Device("cuda", -1), "unknown device"),
        (lambda: face_load(MESH, 5, 0, traction, 1), "axis 5"),
        (lambda: face_load(MESH, 0, 7, traction, 1), "side 7"),
        (lambda: face_load(MESH, 0, 1, traction, 1, order=0), "Gauss points"),
        (lambda: columns_within(Cantilever(nodes=4).matrix(), slice(0, 10**5)), "out of range"),
        (lambda: columns_within(Cantilever(nodes=4).matrix(), slice(1, 10)), "cut blocks of 3"),
    ],
)
def test_it_is_refused(call, advice):
    with pytest.raises(InputError, match=advice):
        call()


def test_formats_of_penstock_are_ranked_too():
    A = Cantilever(nodes=5).matrix()
    assert isinstance(A, BsrMatrix)
    assert suggest_format(A)[0].format_name == "bsr"


def test_a_store_is_multiplied_by_its_path(tmp_path):
    A = scipy.sparse.diags_array([1.0, 2.0, 3.0]).tocsr()
    FileStore.create(tmp_path / "a", A).close()
    with penstock.multiply_store(tmp_path / "a", A, tmp_path / "b") as squares:
        assert squares.index.nnz == 3
