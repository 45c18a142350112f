"""
Time steps that grow
====================

A torch heats one spot of an insulated plate for a while, and then the heat spreads. An implicit step solves
``(M + dt K) x = M x_old + dt f`` from the last temperature as first guess. The step doubles whenever the temperature has
changed little; the prepared system then takes the new values by ``update``.
"""

import matplotlib.pyplot as plt
import numpy as np
import scipy.sparse

import penstock

nodes = 101
h, ones = 1.0 / (nodes - 1), np.ones(nodes - 1)
ends = np.r_[ones, 0] + np.r_[0, ones]
stiffness = scipy.sparse.diags_array([-ones, ends, -ones], offsets=[-1, 0, 1]) / h
mass = scipy.sparse.diags_array([ones, 2 * ends, ones], offsets=[-1, 0, 1]) * (h / 6)
K = (scipy.sparse.kron(stiffness, mass) + scipy.sparse.kron(mass, stiffness)).tocsr()  # bilinear elements
M = scipy.sparse.kron(mass, mass).tocsr()

x, y = np.meshgrid(*2 * [np.linspace(0, 1, nodes)], indexing="ij")
torch = np.exp(-200 * ((x - 0.3) ** 2 + (y - 0.4) ** 2)).ravel()
f = M @ torch / (np.ones(nodes**2) @ (M @ torch))  # a unit of heat in a unit of time
off, end = 0.01, 1.0  # when the torch goes out, and when it ends

# %%
# ``near_null_space`` gives the system a coarse level, so that long steps, where K dominates, need as few iterations as short
# ones.
dt, now = 1e-4, 0.0
temperature = np.zeros(nodes**2)
places = {"the spot": (30, 40), "the middle": (50, 50), "the far corner": (100, 100)}
times, steps, iterations, curves = [0.0], [], [], [temperature.reshape(nodes, nodes)]
updates, sweeps = 0, 0
with penstock.prepare(M + dt * K, near_null_space=np.ones(nodes**2), device="cpu") as system:
    while now < end:
        heat = f if now < off - dt / 2 else 0.0 * f
        result = system.solve(M @ temperature + dt * heat, x0=temperature).check()
        change = np.abs(result.x - temperature).max() / np.abs(result.x).max()
        temperature, now = result.x, now + dt
        times.append(now)
        steps.append(dt)
        iterations.append(result.iterations)
        curves.append(temperature.reshape(nodes, nodes))
        sweeps += result.sweeps
        if change < 0.03 and now > off:
            dt *= 2
            system.update(M + dt * K)
            updates += 1

print(f"{len(steps)} steps, {updates} updates, {sum(iterations)} iterations, {sweeps} sweeps over the matrix")

# %%
# The plate is insulated: the heat that went in is still there, and in the end it is spread evenly.
heat = np.ones(nodes**2) @ (M @ temperature)
assert abs(heat - off) <= 1e-5 * off
assert np.ptp(temperature) < 0.02 * temperature.mean()
assert max(iterations) <= 12

# %%
figure, (curve, step) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for name, (i, j) in places.items():
    curve.semilogx(times[1:], [field[i, j] for field in curves[1:]], label=name)
curve.axvline(off, color="0.6", ls=":", label="the torch goes out")
curve.set(xlabel="time", ylabel="temperature")
curve.legend()
step.loglog(times[1:], steps, "k.-")
step.set(xlabel="time", ylabel="time step")
count = step.twinx()
count.plot(times[1:], iterations, "o", ms=3, color="tab:blue")
count.set_ylim(0, None)
count.set_ylabel("iterations", color="tab:blue")
plt.show()
