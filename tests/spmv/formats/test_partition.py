"""A matrix is cut into row slabs of about equal numbers of stored entries."""

import itertools

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.spmv import BsrMatrix, CsrMatrix, InputError, format_named
from penstock.spmv.formats.partition import count_granules, cut_rows

pure = settings(deadline=None, max_examples=150, database=None)


def csr_with(lengths):
    columns = max(lengths, default=0) + 1
    indices = np.concatenate([np.arange(length) for length in lengths] or [[]]).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return scipy.sparse.csr_array((np.ones(indices.size), indices, offsets), shape=(len(lengths), columns))


@st.composite
def row_lengths_and_parts(draw):
    lengths = draw(st.lists(st.sampled_from([0, 0, 1, 2, 5, 40]), min_size=1, max_size=40))
    return lengths, draw(st.integers(1, len(lengths)))


@pure
@given(row_lengths_and_parts())
def test_slabs_cover_all_rows_and_none_is_empty(case):
    lengths, parts = case
    bounds = cut_rows(CsrMatrix.from_csr(csr_with(lengths)), parts)

    assert (len(bounds), bounds[0], bounds[-1]) == (parts + 1, 0, len(lengths))
    assert all(start < stop for start, stop in itertools.pairwise(bounds))


@pure
@given(st.lists(st.integers(1, 6), min_size=1, max_size=60), st.data())
def test_no_border_is_farther_than_a_row_from_the_equal_share(lengths, data):
    """Of rows so short that no slab must be shifted to keep another from being empty."""
    parts = data.draw(st.integers(1, max(1, len(lengths) // 12)))
    bounds, offsets = cut_rows(CsrMatrix.from_csr(csr_with(lengths)), parts), np.cumsum([0, *lengths])

    for part, bound in enumerate(bounds):
        assert abs(offsets[bound] - offsets[-1] * part / parts) <= max(lengths)


@pure
@given(row_lengths_and_parts(), st.sampled_from([2, 3]))
def test_borders_of_blocked_formats_are_multiples_of_the_block(case, size):
    lengths, parts = case
    matrix = BsrMatrix.from_csr(
        scipy.sparse.kron(csr_with(lengths), np.ones((size, size)), format="csr"), block_size=size
    )

    bounds = cut_rows(matrix, parts)
    assert all(bound % size == 0 for bound in bounds)
    assert [bound // size for bound in bounds] == cut_rows(CsrMatrix.from_csr(csr_with(lengths)), parts)
    scalars = CsrMatrix.from_csr(matrix.to_csr())
    assert all(bound % size == 0 for bound in cut_rows(scalars, parts, together=size))
    most = count_granules(matrix, together=4)
    assert most == -(-len(lengths) * size // (4 if size == 2 else 12))
    assert all(bound % 4 == bound % size == 0 for bound in cut_rows(matrix, most, together=4)[:-1])


@pytest.mark.parametrize(
    ("name", "keywords"),
    [
        ("csr", {}),
        ("ell", {}),
        ("sliced_ell", {}),
        ("sell", {"chunk_height": 4, "sorting_scope": 4}),
        ("sliced_bsr", {"block_size": 3}),
        ("symmetric_bsr", {"block_size": 3}),
        ("sell", {"chunk_height": 4, "sorting_scope": 16}),
        ("sliced_bsr", {"block_size": 1, "sorting_scope": 64}),
    ],
    ids=str,
)  # fmt: skip
def test_even_rows_are_cut_into_even_slabs(name, keywords):
    n = 960
    A = scipy.sparse.diags_array([np.ones(n)] * 5, offsets=range(-2, 3), shape=(n, n), format="csr")
    matrix = format_named(name).from_csr(A, **keywords)

    heights = np.diff(cut_rows(matrix, 4))

    assert heights.sum() == n
    assert heights.max() - heights.min() <= 2 * matrix.row_granularity
    assert (heights[:-1] % matrix.row_granularity == 0).all()


@pytest.mark.parametrize("parts", [0, -1, 4])
def test_more_slabs_than_pieces_or_none_are_refused(parts):
    matrix = BsrMatrix.from_csr(scipy.sparse.eye_array(9, format="csr"), block_size=3)

    with pytest.raises(InputError, match=f"cannot cut 3 pieces of 3 rows into {parts} slabs"):
        cut_rows(matrix, parts)
