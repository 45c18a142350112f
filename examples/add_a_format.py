"""A format of one's own: storage by diagonals, for the CPU and for CUDA devices, streamed and solved with like any other."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numba import prange

from penstock.spmv import CsrMatrix, SparseMatrix, register_kernel
from penstock.spmv.compilation.cuda_module import CudaSource, launch, type_names
from penstock.spmv.compilation.jit import parallel_kernel

KERNELS = CudaSource(Path(__file__).parent, "diagonals.cu")


@dataclass(frozen=True, eq=False, repr=False)
class DiaMatrix(SparseMatrix, name="dia"):
    shape: tuple
    dtype: np.dtype
    offsets: np.ndarray  # column minus row of each diagonal
    values: np.ndarray  # (diagonals, rows), 0 where nothing is stored

    @classmethod
    def from_csr(cls, A, *, values_dtype=None, check=True):
        A = CsrMatrix.from_csr(A, values_dtype=values_dtype, check=check)
        (rows, columns, entries), xp = A.triplets(), A.device.xp
        offsets, diagonal = xp.unique(columns.astype(np.int64) - rows, return_inverse=True)
        values = xp.zeros((offsets.size, A.shape[0]), dtype=A.values_dtype)
        values[diagonal, rows] = entries
        return cls(A.shape, A.dtype, offsets.astype(np.int32), values)

    def triplets(self):
        diagonal, rows = self.device.xp.nonzero(self.values)
        return rows, rows + self.offsets[diagonal], self.values[diagonal, rows]

    def rows(self, start, stop):
        shape, offsets = (stop - start, self.shape[1]), self.offsets + np.int32(start)
        return DiaMatrix(shape, self.dtype, offsets, self.values[:, start:stop].copy())


@parallel_kernel
def dia_spmv(offsets, values, x, out, alpha, beta):
    for row in prange(out.shape[0]):
        total = 0.0
        for d in range(offsets.shape[0]):
            if values[d, row] != 0:  # a NaN in x must not pass through what is not stored
                total += np.float64(values[d, row]) * x[np.int64(row) + offsets[d]]
        out[row] = alpha * total if beta == 0.0 else alpha * total + beta * out[row]


@register_kernel("dia", "spmv", "cpu")
def dia_spmv_cpu(A, x, out, alpha, beta):
    dia_spmv(A.offsets, A.values, x, out, alpha, beta)


@register_kernel("dia", "spmv", "cuda")
def dia_spmv_cuda(A, x, out, alpha, beta):
    function = KERNELS.function(f"dia_spmv<{type_names(A.values, x)}>")
    arguments = (np.int64(A.shape[0]), np.int32(A.offsets.size), A.offsets, A.values, x, out)
    launch(function, A.shape[0], 256, (*arguments, np.float64(alpha), np.float64(beta)))
