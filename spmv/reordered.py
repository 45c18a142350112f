"""An operator for vectors in another order of the unknowns."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.spmv.device import Array
from penstock.spmv.operator import Operator, ValidatedOperator


class Reordered(ValidatedOperator):
    """``P^T A P``: unknown ``k`` of the operator is unknown ``places[k]`` here."""

    def __init__(self, of: Operator, places: Any) -> None:
        self.shape, self.dtype, self.device = of.shape, np.dtype(of.dtype), of.device
        self._of, self._places = of, of.device.asarray(places)

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        image = self._of.apply(self.device.xp.ascontiguousarray(x[self._places]))
        result = self.device.xp.empty_like(out)
        result[self._places] = image
        out[...] = alpha * result if beta == 0.0 else alpha * result + beta * out
