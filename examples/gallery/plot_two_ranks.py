"""
Two MPI ranks share a system
============================

Every rank has the rows of some planes of nodes, and sends its neighbour what that needs. The solver is the same ``cg``. This page
starts two ranks by ``mpiexec``; where there is none, it says so and solves alone.
"""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from penstock.fem import Cantilever
from penstock.solvers import block_jacobi, cg

SCRIPT = """
import sys
import numpy as np
from penstock.distributed import DistributedMatrix, MpiCommunicator, RowPartition
from penstock.fem import Cantilever
from penstock.solvers import block_jacobi, cg

beam, plane = Cantilever(nodes=(33, 7, 7), dof=3, lengths=6.0), 7 * 7 * 3
with MpiCommunicator() as ranks:
    partition = RowPartition.even(33 * plane, ranks.size, multiple=plane)
    own = partition.of(ranks.rank)
    A = DistributedMatrix.from_rows(beam.rows(own.start, own.stop), partition, ranks, block_size=3)
    result = cg(A, beam.load()[own], M=block_jacobi(A, 3), rtol=1e-8)
    np.save(f"{sys.argv[1]}/{ranks.rank}.npy", result.x)
"""

beam = Cantilever(nodes=(33, 7, 7), dof=3, lengths=6.0)
A, b = beam.matrix(), beam.load()

# mpiexec stands beside Python where it was installed with pip, as the package mpich.
mpiexec = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
if mpiexec and importlib.util.find_spec("mpi4py"):
    with tempfile.TemporaryDirectory() as folder:
        command = [mpiexec, "-n", "2", sys.executable, "-c", SCRIPT, folder]
        subprocess.run(command, check=True, timeout=120)
        parts = [np.load(f"{folder}/{rank}.npy") for rank in range(2)]
else:
    print("There is no mpiexec or no mpi4py here, so one process solves alone: pip install 'penstock[mpi]' mpich")
    parts = [cg(A, b, M=block_jacobi(A, 3), rtol=1e-8).x]

# %%
# Joined in the order of the ranks, the parts solve the whole system.
x = np.concatenate(parts)
residual = np.linalg.norm(b - A @ x) / np.linalg.norm(b)
print(f"{len(parts)} ranks, true relative residual {residual:.1e}")
assert residual <= 1.01e-8  # ranks and one process sum the residual in different orders

# %%
figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
height = beam.mesh.coordinates()[:, [0, 2]] + [0, 1] * (0.25 * x / np.abs(x).max()).reshape(-1, 3)[:, [0, 2]] * 6
first = 0
for rank, part in enumerate(parts):
    nodes = slice(first, first + part.size // 3)
    axes.plot(*height[nodes].T, ".", ms=3, label=f"rank {rank}: {part.size:,} unknowns")
    first = nodes.stop
axes.set(title="The deformed beam, and who has which nodes", aspect="equal", xlabel="x", ylabel="z")
axes.legend()
plt.show()
