"""Indices of SciPy matrices in every format are checked before SciPy converts them, which would write outside its arrays."""

import numpy as np
import pytest
import scipy.sparse

import penstock
from penstock.spmv import InputError, as_operator, suggest_format
from penstock.spmv.formats.validation import in_csr
from penstock.streaming import HostStore, StoreBuilder, StreamedMatrix

N = 12
LINE = scipy.sparse.diags_array([-1.0, 4.0, -1.0], offsets=[-1, 0, 1], shape=(N, N)).tocsr()
FORMATS = ["csr", "csc", "coo", "bsr", "dok", "lil", "dia"]


def damaged(kind, index):
    """Return a matrix of which one index is another one."""
    A = LINE.copy().asformat(kind)
    if kind == "coo":
        A.coords[0][3] = index
    else:
        A.indices[3] = index
    return A


@pytest.mark.parametrize("kind", FORMATS)
def test_whole_matrices_are_converted(kind):
    A = LINE.asformat(kind)
    found = in_csr(A, "A")
    assert found.format == "csr"
    assert abs(found - LINE).nnz == 0
    assert kind != "csr" or found is A


@pytest.mark.parametrize("index", [N, -1, 10**9, -(10**9)])
@pytest.mark.parametrize("kind", ["csc", "coo", "bsr"])
def test_an_index_out_of_range_is_refused(kind, index):
    with pytest.raises(InputError, match=rf"^A: a (row|column) index.* is {index}, outside 0 to {N - 1}"):
        in_csr(damaged(kind, index), "A")


@pytest.mark.parametrize(
    "use",
    [
        lambda A, path: penstock.solve(A, np.ones(N), device="cpu"),
        lambda A, path: as_operator(A),
        lambda A, path: suggest_format(A),
        lambda A, path: HostStore.create(A),
        lambda A, path: StreamedMatrix(A, "1 MiB"),
        lambda A, path: StoreBuilder(path / "a", A.shape).add_matrix(A),
    ],
    ids=["solve", "as_operator", "suggest_format", "HostStore", "StreamedMatrix", "StoreBuilder"],
)
@pytest.mark.parametrize("kind", ["csc", "coo"])
def test_every_way_in_refuses_it(kind, use, tmp_path):
    with pytest.raises(InputError, match="-3, outside 0 to 11"):
        use(damaged(kind, -3), tmp_path)


@pytest.mark.parametrize("offsets", [[1], [0, 99], [0, 5, 3], [0, -1, 2]])
def test_offsets_that_descend_or_leave_the_entries_are_refused(offsets):
    A = LINE.tocsc()
    A.indptr[: len(offsets)] = offsets
    with pytest.raises(InputError, match=r"offsets (descend|must be 13)"):
        in_csr(A, "A")


def test_arrays_of_other_types_and_lengths_are_refused():
    A = LINE.tocsc()
    A.indices = A.indices.astype(float)
    with pytest.raises(InputError, match="row index is of type float64; expected whole numbers"):
        in_csr(A, "A")
    B = LINE.tocoo()
    B.data = B.data[1:]
    with pytest.raises(InputError, match="33 values, 34 rows and 34 columns"):
        in_csr(B, "A")


def test_an_array_of_one_dimension_is_no_matrix():
    with pytest.raises(InputError, match=r"A has the shape \(6,\); expected a matrix"):
        penstock.solve(scipy.sparse.coo_array(np.ones(6)), np.ones(6), device="cpu")
