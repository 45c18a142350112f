"""Draws docs/mirrored_sweeps.png: when each of two ranks computed with which subdivision, with sweeps mirrored and not.

NUMBA_NUM_THREADS=1 mpiexec -n 2 python docs/draw_mirrored_sweeps.py
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from penstock.distributed import DistributedStreamedMatrix, MpiCommunicator, RowPartition, split_rows
from penstock.fem import Cantilever
from penstock.solvers import chebyshev
from penstock.streaming import HostStore, Ring, StreamedMatrix, Workload

PRODUCTS, SWEEPS = 5, 4
SUBDIVISIONS, PLANES, SIDE = 24, 5, 24  # of a rank, of nodes in a subdivision, nodes along the sides of a plane
COLORS = ["#1f6fb2", "#e07b28"]

Bar = tuple[float, float, int]


def computations(A: DistributedStreamedMatrix, ranks: MpiCommunicator) -> list[Bar]:
    """Return begin, end and subdivision of the computations of some sweeps, in seconds from the start of the first rank."""
    polynomial = chebyshev(A, PRODUCTS, block_size=3)
    v = np.random.default_rng(ranks.rank).normal(size=A.shape[0])
    polynomial @ v  # kernels are compiled
    ranks.barrier()
    before = A.sweeps
    with A.recording() as timeline:
        while A.sweeps < before + SWEEPS:
            polynomial @ v
    zero = timeline.origin + ranks.largest(-timeline.origin)
    above = ranks.rank * SUBDIVISIONS
    return [
        (span.start + zero, span.stop + zero, span.subdivision + above)
        for span in timeline.spans
        if span.kind == "compute"
    ]


def recorded(ranks: MpiCommunicator) -> dict[str, list[list[Bar]]]:
    """Return the computations of every rank, for both ways to sweep."""
    beam, plane = Cantilever(nodes=(2 * SUBDIVISIONS * PLANES, SIDE, SIDE), dof=3), 3 * SIDE * SIDE
    partition = RowPartition.even(2 * SUBDIVISIONS * PLANES * plane, ranks.size, multiple=plane)
    own = partition.of(ranks.rank)
    square, couplings = split_rows(beam.rows(own.start, own.stop), partition, ranks, block_size=3)
    scalars, found = square.to_csr(), {}
    slabs = (scalars[start : start + PLANES * plane] for start in range(0, square.shape[0], PLANES * plane))
    with HostStore.create(slabs, format="bsr", block_size=3) as store:
        for title, mirrored in (("odd ranks sweep the other way", True), ("all ranks sweep the same way", False)):
            plan = {"workload": Workload(degree=PRODUCTS), "ring": Ring(sweeps="alternate")}
            with StreamedMatrix(store, int(0.6 * store.index.nbytes), **plan) as streamed:
                A = DistributedStreamedMatrix(streamed, couplings, ranks, mirrored=mirrored)
                found[title] = ranks.of_all(computations(A, ranks))
    return found


def draw(found: dict[str, list[list[Bar]]]) -> None:
    """Draw the computations over time, a row for each subdivision."""
    figure = Figure(figsize=(8.4, 3.6), layout="constrained")
    for axes, (title, of_ranks) in zip(figure.subplots(1, 2, sharex=True, sharey=True), found.items(), strict=True):
        for rank, bars in enumerate(of_ranks):
            for start, stop, subdivision in bars:
                axes.broken_barh([(1e3 * start, 1e3 * (stop - start))], (subdivision - 0.5, 1), color=COLORS[rank])
            axes.plot([], [], color=COLORS[rank], linewidth=5, label=f"rank {rank}")
        axes.axhline(SUBDIVISIONS - 0.5, color="#8a8f98", linewidth=0.8)
        axes.set(xlabel="milliseconds", ylim=(-0.5, 2 * SUBDIVISIONS - 0.5))
        axes.set_title(title, fontsize=10)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.axes[0].set_ylabel("subdivision, of both ranks")
    figure.axes[0].legend(frameon=False, loc="upper right", fontsize=8)
    figure.savefig(Path(__file__).with_name("mirrored_sweeps.png"), dpi=150)


if __name__ == "__main__":
    with MpiCommunicator() as ranks:
        found = recorded(ranks)
        if ranks.rank == 0:
            draw(found)
