"""Values that are replaced where they are, in every format."""

import numpy as np
import pytest
import scipy.sparse

from penstock.fem import Cantilever
from penstock.spmv import InputError, format_named, format_names
from penstock.spmv.formats import base


def _matrices():
    rng = np.random.default_rng(3)
    beam = Cantilever(nodes=(7, 4, 4), dof=3).matrix().to_csr()
    uneven = scipy.sparse.random_array((90, 90), density=0.05, rng=rng, format="csr")
    uneven = uneven + uneven.T + scipy.sparse.eye_array(90) * 9
    uneven.data[0] = 0.0  # a stored zero
    return {"beam": beam, "uneven": uneven.tocsr(), "diagonal": scipy.sparse.eye_array(60, format="csr")}


@pytest.mark.parametrize("slab_nbytes", [2_000, 256 << 20])
@pytest.mark.parametrize("values_dtype", [np.float64, np.float32])
@pytest.mark.parametrize("matrix", ["beam", "uneven", "diagonal"])
@pytest.mark.parametrize("name", format_names())
def test_a_refilled_matrix_is_the_converted_one(name, matrix, values_dtype, slab_nbytes, monkeypatch):
    monkeypatch.setattr(base, "_LARGE_SLAB_NBYTES", slab_nbytes)
    A = _matrices()[matrix]
    scales = np.random.default_rng(4).random(A.shape[0]) + 0.5
    rows = np.repeat(np.arange(A.shape[0]), np.diff(A.indptr))
    B = scipy.sparse.csr_array((A.data * (scales[rows] * scales[A.indices]), A.indices, A.indptr), shape=A.shape)
    options = {"block_size": 3} if format_named(name).traits.blocked else {}
    refilled = format_named(name).from_csr(A, values_dtype=values_dtype, **options)
    refilled = refilled.from_arrays(
        refilled.shape, refilled.dtype, {k: v.copy() for k, v in refilled.arrays().items()}, refilled.parameters()
    )
    before = {name: array.ctypes.data for name, array in refilled.arrays().items()}
    refilled.refill(B)
    expected = format_named(name).from_csr(B, values_dtype=values_dtype, check=False, **options)
    for field, array in refilled.arrays().items():
        assert array.ctypes.data == before[field]
        assert np.array_equal(array, expected.arrays()[field]), field


@pytest.mark.parametrize("name", format_names())
def test_another_pattern_is_refused(name):
    A = _matrices()["beam"]
    B = scipy.sparse.eye_array(A.shape[0], format="csr")
    matrix = format_named(name).from_csr(A)
    with pytest.raises(InputError, match="has another pattern"):
        matrix.refill(B)
