"""
The frequencies of a beam, and what beam theory says
=====================================================

``penstock.eigsh`` finds the lowest modes of a clamped beam of steel. Each family of modes, bending, torsion and tension, has a
frequency that theory knows. The participating masses tell which mode is which.
"""

import matplotlib.pyplot as plt
import numpy as np

import penstock
from penstock.fem import Cantilever, LinearElasticity

young, poisson, density = 210e9, 0.3, 7850.0
length, side = 2.0, 0.1
beam = Cantilever(nodes=(161, 9, 9), lengths=(length, side, side), element=LinearElasticity(young, poisson))
modes = penstock.eigsh(beam.matrix(), 9, beam.mass(density), coordinates=beam.mesh.coordinates(), device="cpu")
print(modes.explain())

# %%
# Bending by Euler and Bernoulli's theory with Timoshenko's corrections for shear and rotary inertia (first order, k = 5/6);
# torsion of a square section, whose stiffness is 0.1406 of the fourth power of its side; tension of a bar.
shear = young / (2 * (1 + poisson))
slenderness = side**2 / 12 / length**2
bending = 3.516 / (2 * np.pi * length**2) * np.sqrt(young * side**2 / 12 / density)
bending *= 1 - 0.5 * slenderness * (1.0 + young / (5 / 6 * shear)) * 4.65
torsion = np.sqrt(shear * 0.1406 * 6 / density) / (4 * length)
tension = np.sqrt(young / density) / (4 * length)
found = modes.frequencies
axial = int(np.argmax(modes.effective_mass("x")))
# Torsion moves no mass in any direction.
moved = sum(modes.effective_mass(axis) for axis in "xyz")
twisting = int(np.flatnonzero(moved < 1e-6 * modes.masses[0, 0])[0])
for name, theory, number in (("bending", bending, 0), ("torsion", torsion, twisting), ("tension", tension, axial)):
    print(f"{name}: {found[number]:.1f} Hz, by theory {theory:.1f} Hz")
    assert abs(found[number] / theory - 1) < 0.02

# %%
# How much of the mass of the beam moves with the modes up to each one.
figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
for axis in "xyz":
    share = np.cumsum(modes.effective_mass(axis)) / modes.masses[0, 0]
    axes.step(found, share, where="post", marker="o", label=f"along {axis}")
axes.set(xlabel="frequency [Hz]", ylabel="share of the mass", ylim=(0, 1))
axes.legend()
plt.show()
