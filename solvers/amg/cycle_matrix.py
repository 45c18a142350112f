"""What the cycles of coarse levels multiply by: matrices in float32, which take half of the bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import numpy as np

from penstock.solvers.preconditioners import DiagonalBlocks
from penstock.spmv import Array, BsrMatrix, CsrMatrix

AnyMatrix = TypeVar("AnyMatrix", bound="BsrMatrix | CsrMatrix")

# A matrix is stored in float32 if its largest value is in this range, and the inverses of its diagonal blocks are below its end.
_RANGE = (1e-25, 1e37)
# Where coarse levels multiply by copies in float32, and from what size on: on a CPU their kernels take longer to compile than
# they save, and a GPU reads smaller matrices in less time than a launch takes.
_LOWERED_ON, _WORTHWHILE_NBYTES = ("cuda",), 32 << 20


def cycle_matrix(A: AnyMatrix, diagonal: DiagonalBlocks | None = None) -> AnyMatrix:
    """Return a matrix for cycles to multiply by: a copy of its values in float32, with the other arrays shared.

    The copy is in float64 if the largest value, or an entry of an inverse of its diagonal blocks, which ``diagonal`` holds, is
    beyond the range of float32. It is a copy in any case: new values of a matrix must not change a cycle that was made before.
    """
    fits = A.values.size and _RANGE[0] < _magnitude(A.values) < _RANGE[1]
    if diagonal is not None and diagonal.blocks.size:
        fits = fits and _magnitude(diagonal.blocks) < _RANGE[1]
    return replace(A, values=A.values.astype(np.float32 if fits else np.float64))


def float32_copy(A: BsrMatrix, diagonal: DiagonalBlocks) -> BsrMatrix | None:
    """Return a float32 copy of a coarse matrix, or None where it would not pay or would overflow."""
    if A.device.kind not in _LOWERED_ON or A.values.nbytes < _WORTHWHILE_NBYTES:
        return None
    copy = cycle_matrix(A, diagonal)
    return copy if copy.values.dtype == np.float32 else None


def _magnitude(values: Array) -> float:
    """Return the largest absolute value, without a copy of them."""
    return max(float(values.max()), -float(values.min()))
