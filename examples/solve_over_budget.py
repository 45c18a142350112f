"""A matrix of three times the memory it is allowed, streamed from disk into conjugate gradients."""

import tempfile
from pathlib import Path

import numpy as np

from penstock.fem import Cantilever, LognormalMaterial
from penstock.solvers import block_jacobi, cg
from penstock.streaming import FileStore, StreamedMatrix

beam = Cantilever(nodes=(65, 13, 13), dof=3, lengths=5.0, material=LognormalMaterial(sigma=0.5))
b = beam.load("shear")

with tempfile.TemporaryDirectory() as folder:
    # Assembled and written one subdivision at a time: the whole matrix is never in memory.
    store = FileStore.create(Path(folder) / "beam", beam.subdivisions(32), shape=beam.shape)
    with store, StreamedMatrix(store, budget=store.index.nbytes // 3) as A:
        print(A.plan.explain(), end="\n\n")
        result = cg(A, b, M=block_jacobi(A, beam.dof), rtol=1e-8)

resident = cg(beam.matrix(), b, M=block_jacobi(beam.matrix(), beam.dof), rtol=1e-8)
print(f"{'iterations':<34}{result.iterations:>12}")
print(f"{'true relative residual':<34}{result.true_residual:>12.2e}")
print(f"{'GB streamed':<34}{result.bytes_streamed / 1e9:>12.3f}")
print(f"{'tip deflection':<34}{beam.tip_deflection(result.x):>12.4f}")
print(f"{'bit-equal to the resident solve':<34}{np.array_equal(result.x, resident.x)!s:>12}")
