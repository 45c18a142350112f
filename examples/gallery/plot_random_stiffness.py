"""
A beam of random stiffness
==========================

The stiffness of every element is random. Each sample is another matrix, solved with the deflection of the mean as a first guess.
Mean and deviation of the deflection along the beam come out.
"""

import matplotlib.pyplot as plt
import numpy as np

from penstock.fem import Cantilever, LognormalMaterial
from penstock.solvers import cg, smoothed_aggregation

samples = 24
bodies = [
    Cantilever(nodes=(33, 5, 5), dof=3, lengths=8.0, material=LognormalMaterial(sigma=0.8, seed=seed))
    for seed in range(1, samples + 1)
]
b = bodies[0].load("shear")
coordinates = bodies[0].mesh.coordinates()

deflections, total = [], 0
for body in bodies:
    A = body.matrix()
    guess = total / len(deflections) if deflections else None
    result = cg(A, b, guess, M=smoothed_aggregation(A, coordinates=coordinates), rtol=1e-8)
    assert np.linalg.norm(b - A @ result.x) <= 1e-8 * np.linalg.norm(b)
    deflections.append(result.x.reshape(33, 5, 5, 3)[:, 2, 2, 2])  # of the axis of the beam, in z
    total = total + result.x

# %%
mean, deviation = np.mean(deflections, axis=0), np.std(deflections, axis=0, ddof=1)
print(
    f"tip {mean[-1]:.4g} +- {deviation[-1]:.2g}, known to {deviation[-1] / np.sqrt(samples):.1g} by {samples} samples"
)
assert 0 < deviation[-1] < 0.2 * abs(mean[-1])

x = coordinates.reshape(33, 5, 5, 3)[:, 0, 0, 0]
figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
axes.plot(x, np.transpose(deflections), color="0.8", lw=0.7)
axes.fill_between(x, mean - deviation, mean + deviation, alpha=0.4, label="one standard deviation")
axes.plot(x, mean, label=f"mean of {samples} samples")
axes.set(xlabel="along the beam", ylabel="deflection")
axes.legend()
plt.show()
