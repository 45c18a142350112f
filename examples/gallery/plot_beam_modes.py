"""
The lowest modes of a beam over budget
======================================

``A.linear_operator()`` hands any penstock operator to the rest of SciPy, a streamed one too. Here ``eigsh`` finds the lowest
modes of vibration of a beam whose matrix streams through seven tenths of its memory. It asks for solves with A, which ``cg``
with a coarse level does in some twenty passes each, because one pass serves 14 products. Every node has the mass one.
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from scipy.sparse.linalg import LinearOperator, eigsh

from penstock.fem import Cantilever
from penstock.solvers import cg, smoothed_aggregation
from penstock.streaming import FileStore, StreamedMatrix, Workload

beam = Cantilever(nodes=(25, 5, 4), dof=3, lengths=8.0)
coordinates = beam.mesh.coordinates()


def lowest_modes(A, count=3):
    """Return the lowest eigenvalues of A and their vectors, by Lanczos iterations with the inverse of A."""
    M = smoothed_aggregation(A, coordinates=coordinates)
    inverse = LinearOperator(A.shape, matvec=lambda b: cg(A, b.ravel(), M=M, rtol=1e-9).x, dtype=A.dtype)
    start = np.random.default_rng(0).standard_normal(A.shape[0])
    return eigsh(A.linear_operator(), k=count, sigma=0.0, OPinv=inverse, v0=start, tol=1e-6, ncv=8)


with (
    tempfile.TemporaryDirectory() as folder,
    FileStore.create(Path(folder) / "beam", beam.subdivisions(25), shape=beam.shape) as store,
    StreamedMatrix(store, store.index.nbytes * 7 // 10, workload=Workload(degree=14)) as A,
):
    eigenvalues, modes = lowest_modes(A)
    residuals = np.linalg.norm(A @ modes - modes * eigenvalues, axis=0)
    print(f"{A.sweeps} sweeps, {A.bytes_streamed / 1e6:.0f} MB streamed")

print("eigenvalues", eigenvalues)
print("residuals  ", residuals)
in_memory, _ = lowest_modes(beam.matrix())
assert np.allclose(eigenvalues, in_memory, rtol=1e-7)
assert residuals.max() <= 1e-6 * eigenvalues.max()

# %%
# Bending about the soft axis, about the stiff one, and the second mode about the soft one, as the axis of the beam moves.
x = coordinates.reshape(25, 5, 4, 3)[:, 0, 0, 0]
figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
for eigenvalue, mode in zip(eigenvalues, modes.T, strict=True):
    axis = mode.reshape(25, 5, 4, 3)[:, 2, 1]
    direction = np.abs(axis).max(axis=0).argmax()
    shape = axis[:, direction] / np.abs(axis[:, direction]).max()
    axes.plot(x, shape, label=f"{'xyz'[direction]}, frequency {np.sqrt(eigenvalue):.3g}")
axes.set(xlabel="along the beam", ylabel="displacement of the axis")
axes.legend(title="direction")
plt.show()
