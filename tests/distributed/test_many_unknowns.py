"""A rank's rows of a system with more unknowns than 32-bit integers count: its square and couplings count their own columns."""

from contextlib import nullcontext

import numpy as np

from penstock.distributed import RowPartition, split_rows
from penstock.fem import Cantilever, LognormalMaterial

BEAM = Cantilever(nodes=(200_000_001, 2, 2), dof=3, material=LognormalMaterial(sigma=0.5))
PLANE = 12


class LastOfTwo:
    """The second of two ranks, whose neighbour has all other rows."""

    rank, size = 1, 2

    def together(self):
        return nullcontext()

    def check_same(self, **settings):
        pass

    def exchange_objects(self, to_each):
        """The neighbour needs our first plane, as we need its last one."""
        first = (BEAM.unknowns - 5 * PLANE) // 3
        return [np.arange(first, first + PLANE // 3), np.empty(0, np.int64)]


def test_rows_beyond_two_thousand_million_are_split_into_a_square_and_a_coupling():
    rows = BEAM.unknowns
    partition = RowPartition((0, rows - 5 * PLANE, rows))
    assert rows > 2**31
    slab = BEAM.rows(rows - 5 * PLANE, rows)

    square, [coupling] = split_rows(slab, partition, LastOfTwo(), block_size=3)

    assert square.shape == (5 * PLANE, 5 * PLANE)
    dense = np.asarray(square.to_csr().todense())
    assert np.array_equal(dense, dense.T)
    assert (np.linalg.eigvalsh(dense) > 0).all()
    assert (coupling.rows, coupling.matrix.shape, coupling.sends) == (slice(0, PLANE), (PLANE, PLANE), slice(0, PLANE))
    # The whole slab times a rigid motion is zero: what leaves the square comes through the coupling.
    ones = np.tile([1.0, 0.0, 0.0], 5 * PLANE // 3)
    image = square @ ones
    image[:PLANE] += coupling.matrix @ ones[:PLANE]
    assert np.abs(image).max() <= 1e-10 * np.abs(dense).max()
