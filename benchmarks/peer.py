"""The solver that a user would take instead, and the clock by which it is compared."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse
import scipy.sparse.linalg

from penstock.spmv import Array, Device


def seconds_of(device: Device, action: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of a call, the device's work included, and its result."""
    device.synchronize()
    began = time.perf_counter()
    result = action()
    device.synchronize()
    return time.perf_counter() - began, result


class Peer:
    """CG of SciPy or CuPy on CSR with Jacobi.

    Parameters
    ----------
    A : csr_array
        On the host.
    device : Device
    """

    def __init__(self, A: Any, device: Device) -> None:
        self.xp = device.xp
        if device.kind == "cuda":
            import cupyx.scipy.sparse
            import cupyx.scipy.sparse.linalg

            self.name, self.linalg = "cupy_csr", cupyx.scipy.sparse.linalg
            host = scipy.sparse.csr_matrix((A.data, A.indices, A.indptr), shape=A.shape)
            self.A: Any = cupyx.scipy.sparse.csr_matrix(host)
        else:
            self.name, self.linalg, self.A = "scipy_csr", scipy.sparse.linalg, A
        inverse = 1 / self.A.diagonal()
        self.M = self.linalg.LinearOperator(A.shape, matvec=lambda r: inverse * r, dtype=np.float64)

    def solve(self, b: Array, maxiter: int, rtol: float = 0.0, callback: Callable[[Any], None] | None = None) -> Any:
        """Return the solution after so many iterations, or fewer where the tolerance is met."""
        return self.linalg.cg(self.A, b, M=self.M, maxiter=maxiter, rtol=rtol, callback=callback)[0]

    def true_residual(self, b: Array, x: Array) -> float:
        """Return ``||b - A x|| / ||b||``."""
        return float(self.xp.linalg.norm(b - self.A @ x) / self.xp.linalg.norm(b))
