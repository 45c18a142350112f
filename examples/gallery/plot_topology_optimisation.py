"""
Thirty designs of a cantilever
==============================

The SIMP method looks for the stiffest body of a given mass. Each element has a density between 0 and 1, and its stiffness grows
with the third power of it, so that densities between the two do not pay. Every design is one solve with new values of the same
pattern, because an empty element keeps 1e-9 of its stiffness: ``update`` writes them into the prepared system, and each solve
begins at the displacement of the design before.
"""

import time

import matplotlib.pyplot as plt
import numpy as np
from scipy.ndimage import gaussian_filter

import penstock
from penstock.fem import Cantilever

shape, mass, least = (60, 1, 20), 0.4, 1e-9  # elements, share of the volume, stiffness of an empty element
designs = 30


class Densities:
    """The stiffness factors of the elements, as ``penstock.fem`` asks for them."""

    def __init__(self, densities):
        self.factors = least + (1 - least) * densities**3

    def layer(self, index, shape):
        return self.factors[index].reshape(shape)


def body(densities):
    nodes = tuple(count + 1 for count in shape)
    return Cantilever(nodes, dof=3, lengths=float(shape[0]), material=Densities(densities))


def smoothed(values):
    """Average over neighbours, which keeps the members from being thinner than an element."""
    return gaussian_filter(values, 0.7)


# %%
# The energy of each element follows from the displacements of its eight nodes.
full = body(np.ones(shape))
element = full.law.stiffness(full.mesh.spacing)
numbers = np.arange(full.mesh.node_count).reshape(full.mesh.node_counts)
corners = [
    numbers[i : shape[0] + i, j : shape[1] + j, k : shape[2] + k] for i in (0, 1) for j in (0, 1) for k in (0, 1)
]
nodes_of_element = np.stack(corners, axis=-1)


def energies(x):
    """Return twice the energy of every element, if it were solid."""
    moved = x.reshape(-1, 3)[nodes_of_element].reshape(*shape, 24)
    return np.einsum("xyzi,ij,xyzj->xyz", moved, element, moved)


def improved(variables, sensitivity):
    """Return the next design: more where that stiffens most, with the same mass (optimality criterion)."""
    low, high = 0.0, 10 * sensitivity.max()
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        new = np.clip(
            variables * np.sqrt(sensitivity / middle),
            np.maximum(0, variables - 0.2),
            np.minimum(1, variables + 0.2),
        )
        low, high = (middle, high) if new.mean() > mass else (low, middle)
    return new


# %%
# The system is prepared for the first design. Every fifth one is also solved by ``penstock.solve``, which sets everything up
# anew, from the same first guess.
load, coordinates = full.load("shear"), full.mesh.coordinates()
variables = np.full(shape, mass)
compliances, iterations, reused, anew = [], [], [], []
with penstock.prepare(body(variables).matrix("csr").to_csr(), coordinates=coordinates, device="cpu") as system:
    x = np.zeros(full.unknowns)
    for design in range(designs):
        densities = np.clip(smoothed(variables), 0, 1)
        A = body(densities).matrix("csr").to_csr()
        began = time.perf_counter()
        system.update(A)
        result = system.solve(load, x0=x, rtol=1e-6).check()
        seconds = time.perf_counter() - began
        if design % 5 == 1:
            began = time.perf_counter()
            fresh = penstock.solve(A, load, x0=x, rtol=1e-6, coordinates=coordinates, device="cpu").check()
            anew.append(time.perf_counter() - began)
            reused.append(seconds)
            assert abs(load @ fresh.x - load @ result.x) <= 1e-3 * (load @ result.x)
        x = result.x
        assert np.linalg.norm(load - A @ x) <= 1e-6 * np.linalg.norm(load)
        compliances.append(load @ x)
        iterations.append(result.iterations)
        sensitivity = smoothed(3 * (1 - least) * densities**2 * energies(x))
        variables = improved(variables, sensitivity)

print(f"{full.unknowns:,} unknowns, compliance {compliances[0]:.0f} -> {compliances[-1]:.0f}")
print(
    f"update and solve {np.median(reused):.3f} s, penstock.solve {np.median(anew):.3f} s: medians of {len(anew)} designs"
)
assert compliances[-1] < 0.5 * compliances[0]
assert max(iterations) < 60

# %%
figure, (shown, history) = plt.subplots(1, 2, figsize=(10, 3.2), width_ratios=(2, 1), layout="constrained")
shown.imshow(densities[:, 0].T, cmap="gray_r", origin="lower", vmin=0, vmax=1)
shown.set(title="density, clamped on the left, loaded on the right", xticks=[], yticks=[])
history.plot(compliances, "k", label="compliance")
history.set(xlabel="design", ylabel="compliance", ylim=(0, None))
count = history.twinx()
count.plot(iterations, "o", ms=3, color="tab:blue")
count.set_ylabel("iterations of the solve", color="tab:blue")
count.set_ylim(0, None)
plt.show()
