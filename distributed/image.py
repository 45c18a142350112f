"""An image in fewer digits of a streamed matrix that ranks share: each rank holds that of its square in memory."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from penstock.distributed.matrix import DistributedMatrix
from penstock.distributed.streamed import DistributedStreamedMatrix
from penstock.streaming.image import image_of_streamed


class DistributedImage(DistributedMatrix):
    """An image of a matrix that ranks share and stream, for :func:`penstock.solvers.solve_by_image`; made by ``of``.

    The square of each rank is rounded to float32 or to 16 bits and stays in memory; couplings with neighbours keep their digits.
    Iterations and the set-up of a preconditioner use the image, and only residuals stream the matrix.

    Examples
    --------
    >>> from penstock.distributed import (
    ...     DistributedImage, DistributedStreamedMatrix, MpiCommunicator, RowPartition, split_rows
    ... )
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import block_jacobi, cg, solve_by_image
    >>> from penstock.streaming import HostStore, StreamedMatrix
    >>> beam, ranks = Cantilever(nodes=(9, 3, 3), dof=3), MpiCommunicator()
    >>> partition = RowPartition.even(beam.unknowns, ranks.size, multiple=3)
    >>> own = partition.of(ranks.rank)
    >>> square, couplings = split_rows(beam.matrix().rows(own.start, own.stop), partition, ranks, block_size=3)
    >>> with StreamedMatrix(HostStore.from_matrix(square, 8), "100 KiB") as streamed:
    ...     A = DistributedStreamedMatrix(streamed, couplings, ranks)
    ...     image = DistributedImage.of(A, "float32")
    ...     result = solve_by_image(cg, A, image, beam.load()[own], M=block_jacobi(image, 3), rtol=1e-9)
    ...     result.converged, result.sweeps < 5 < result.iterations
    (True, True)
    """

    @classmethod
    def of(cls, A: DistributedStreamedMatrix, values_dtype: Any = np.float32) -> Self:
        """Return the image in float32 or int16; one sweep over the squares. Collective.

        Raises
        ------
        InputError
            On all ranks, if the format of a square has no image of this type.
        """
        with A.communicator.together():
            try:
                square = image_of_streamed(A.square, values_dtype)
            finally:
                A.turn_to(1)  # neighbours sweep towards each other again
        return cls(square, A.couplings, A.communicator)

    @property
    def values_dtype(self) -> np.dtype[Any]:
        """The type of the values of the squares."""
        dtype: np.dtype[Any] = np.dtype(self.square.values_dtype)
        return dtype
