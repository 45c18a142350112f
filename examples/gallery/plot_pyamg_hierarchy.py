"""
A PyAMG hierarchy as preconditioner
===================================

PyAMG knows many ways to make a multigrid hierarchy. ``Multigrid.from_pyamg`` takes its levels and runs the cycles with penstock's
kernels: on a GPU where there is one, else on all cores.
"""

import matplotlib.pyplot as plt
import numpy as np
import pyamg

from penstock.fem import Cantilever, LognormalMaterial
from penstock.solvers import Multigrid, block_jacobi, cg
from penstock.spmv import Device, DeviceError

try:
    device = Device.parse("cuda")
except DeviceError:  # no GPU, or no CuPy
    device = Device.parse("cpu")

beam = Cantilever(nodes=(33, 9, 9), dof=3, lengths=4.0, material=LognormalMaterial(sigma=0.5))
on_host = beam.matrix()
modes = beam.law.rigid_body_modes(beam.mesh.coordinates())
hierarchy = pyamg.smoothed_aggregation_solver(on_host.to_csr().tobsr((3, 3)), B=modes, symmetry="hermitian")
print(hierarchy)

# %%
A, b = on_host.to_device(device), device.asarray(beam.load())
preconditioners = {
    "block Jacobi": block_jacobi(A, 3),
    "the hierarchy": Multigrid.from_pyamg(hierarchy, device=device),
}
figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
for name, M in preconditioners.items():
    result = cg(A, b, M=M, rtol=1e-8)
    residual = np.linalg.norm(beam.load() - on_host @ device.to_host(result.x)) / np.linalg.norm(beam.load())
    print(f"{name:<16} {result.iterations:>4} iterations, true relative residual {residual:.1e}, on {device}")
    assert residual <= 1.01e-8
    axes.semilogy(result.residual_norms, label=f"{name}, {result.iterations} iterations")
assert result.iterations < 40
axes.set(xlabel="iteration", ylabel="relative residual")
axes.legend()
plt.show()
