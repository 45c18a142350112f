"""Solve a cantilever on several ranks: mpiexec -n 4 python examples/on_many_ranks.py

Every rank has the rows of some planes of nodes. Without mpiexec there is one rank, which has all of them.
"""

import numpy as np

from penstock.distributed import DistributedMatrix, MpiCommunicator, RowPartition
from penstock.fem import Cantilever
from penstock.solvers import cg, chebyshev

beam = Cantilever(nodes=(33, 7, 7), dof=3)
plane = 7 * 7 * 3

with MpiCommunicator() as ranks:
    partition = RowPartition.even(33 * plane, ranks.size, multiple=plane)
    own = partition.of(ranks.rank)
    A = DistributedMatrix.from_rows(
        beam.rows(own.start, own.stop), partition, ranks, format="symmetric_bsr", block_size=3
    )
    b = beam.load()[own]

    result = cg(A, b, M=chebyshev(A, 5, block_size=3), rtol=1e-8)

    largest = ranks.largest(float(np.abs(result.x).max()))
    if ranks.rank == 0:
        print(f"ranks                   {ranks.size}")
        print(f"iterations              {result.iterations}")
        print(f"true relative residual  {result.true_residual:.1e}")
        print(f"largest displacement    {largest:.4f}")
