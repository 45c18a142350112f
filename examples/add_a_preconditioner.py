"""A preconditioner of one's own: symmetric successive over-relaxation, usable by name wherever a preconditioner is chosen."""

from dataclasses import dataclass

import numpy as np
import scipy.sparse
from scipy.sparse.linalg import spsolve_triangular

import penstock
from penstock.fem import Cantilever
from penstock.solvers import PreconditionerSpec
from penstock.spmv import CPU, InputError, ValidatedOperator


class Ssor(ValidatedOperator):
    """``M = w (2 - w) (D + w U)^-1 D (D + w L)^-1`` with ``A = L + D + U``, on the host (Saad 2003, section 10.2)."""

    def __init__(self, A, omega):
        lower, self.diagonal = scipy.sparse.tril(A, -1), A.diagonal()
        self.lower = scipy.sparse.csr_array(omega * lower + scipy.sparse.diags_array(self.diagonal))
        self.upper = scipy.sparse.csr_array(self.lower.T)
        self.omega, self.shape, self.dtype, self.device = omega, A.shape, np.dtype(A.dtype), CPU

    def _apply(self, x, out, alpha, beta):
        half = spsolve_triangular(self.lower, x, lower=True)
        diagonal = self.diagonal.reshape(-1, *[1] * (x.ndim - 1))
        z = spsolve_triangular(self.upper, diagonal * half, lower=False) * (self.omega * (2 - self.omega))
        out[...] = alpha * z if beta == 0.0 else alpha * z + beta * out


@dataclass(frozen=True)
class SsorSpec(PreconditionerSpec, name="ssor"):
    omega: float = 1.5

    def build(self, A):
        if not hasattr(A, "to_csr") or A.device != CPU:
            raise InputError("ssor needs the entries of a matrix in the host's memory; raise memory=, or use chebyshev")
        return Ssor(A.to_csr(), self.omega)

    def vectors(self, columns, *, streamed_to_gpu):
        return 2 * columns


if __name__ == "__main__":
    beam = Cantilever(nodes=(33, 9, 9), dof=3)
    A, b = beam.matrix().to_csr(), beam.load()
    for name in ("jacobi", "ssor"):
        result = penstock.solve(A, b, preconditioner=name, device="cpu")
        print(f"{name:<10} {result.iterations:>5} iterations, true relative residual {result.true_residual:.1e}")
