"""
The lowest modes of a beam over budget
======================================

A system that is prepared for the stiffness K hands its operators to SciPy: ``lobpcg`` takes the matrix and its preconditioner,
``eigsh`` the inverse. Here both find the lowest modes of a clamped beam, ``K x = w**2 M x``. K streams through half of the memory
that it takes, and the sweeps over it are counted.
"""

import matplotlib.pyplot as plt
import numpy as np
import scipy.sparse
from scipy.sparse.linalg import eigsh, lobpcg

import penstock
from penstock.fem import Cantilever

nodes, length, wanted = (41, 4, 6), 12.0, 4
beam = Cantilever(nodes=nodes, dof=3, lengths=length)
plane = nodes[1] * nodes[2]  # the nodes of the first plane are clamped and left out
K = beam.matrix("csr").to_csr()[3 * plane :, 3 * plane :]
coordinates = beam.mesh.coordinates()[plane:]


def mass_of_line(count, side):
    """Return the consistent mass matrix of a line of linear elements."""
    ones = np.ones(count - 1)
    ends = np.r_[ones, 0] + np.r_[0, ones]
    return scipy.sparse.diags_array([ones, 2 * ends, ones], offsets=[-1, 0, 1]) * (side / (count - 1) / 6)


# %%
# The mass matrix of trilinear elements on a box is a Kronecker product, and the same for the three directions.
along, across, upwards = map(mass_of_line, nodes, beam.mesh.side_lengths)
M = scipy.sparse.kron(scipy.sparse.kron(scipy.sparse.kron(along, across), upwards), scipy.sparse.eye_array(3))
M = M.tocsr()[3 * plane :, 3 * plane :]

# %%
# A pass over the matrix serves all vectors of LOBPCG, and only one of the solves of ``eigsh``, which finds the modes to more
# digits.
start = np.random.default_rng(0).standard_normal((K.shape[0], wanted + 3))
budget = 3 * K.nnz  # bytes: a quarter of what CSR takes; the upper half in blocks takes twice as much
with penstock.prepare(K, coordinates=coordinates, columns=wanted + 3, memory=budget, device="cpu") as system:
    print(system.explain())
    A = system.matrix
    squares, modes = lobpcg(A, start, B=M, M=system.preconditioner, largest=False, tol=1e-5, maxiter=60)
    by_blocks = A.sweeps
    inverse = system.inverse.linear_operator()
    exact, _ = eigsh(A.linear_operator(), k=wanted, M=M, sigma=0.0, OPinv=inverse, v0=start[:, 0])
    by_solves = A.sweeps - by_blocks
print(f"sweeps: {by_blocks} of lobpcg, {by_solves} of eigsh")

frequencies, modes = np.sqrt(squares[:wanted]), modes[:, :wanted]
in_memory = eigsh(K.tocsc(), k=wanted, M=M.tocsc(), sigma=0.0, return_eigenvectors=False)
assert np.allclose(exact, np.sort(in_memory), rtol=1e-6)
assert np.allclose(frequencies**2, exact, rtol=1e-4)
assert by_blocks < by_solves

# %%
# Euler and Bernoulli's theory knows the first frequency in each direction: with Young's modulus and density 1, 3.516 over the
# square of the length, times the radius of gyration.
theory = [3.516 / length**2 * side / np.sqrt(12) for side in beam.mesh.side_lengths[1:]]
print("frequencies", frequencies, "of slender beams", theory)
assert np.allclose(frequencies[:2], theory, rtol=0.05)

# %%
# The axis of the beam, in the direction in which each mode moves it most.
x = np.linspace(0, length, nodes[0])
figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
for frequency, mode in zip(frequencies, modes.T, strict=True):
    axis = np.zeros((nodes[0], 3))
    axis[1:] = mode.reshape(-1, nodes[1], nodes[2], 3)[:, nodes[1] // 2, nodes[2] // 2]
    direction = np.abs(axis).max(axis=0).argmax()
    shape = axis[:, direction] / axis[np.abs(axis[:, direction]).argmax(), direction]
    axes.plot(x, shape, ("-", "-", "--")[direction], label=f"{'xyz'[direction]}, frequency {frequency:.3g}")
axes.set(xlabel="along the beam", ylabel="displacement of the axis")
axes.legend(title="direction")
plt.show()
