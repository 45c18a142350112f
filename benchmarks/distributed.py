"""Several ranks against one: iterations of ``cg`` in memory and streamed, at constant work a rank and at constant work in all.

    mpiexec -n 2 python benchmarks/distributed.py h200x2 --device cuda      (NCCL, a GPU each)
    mpiexec -n 2 python benchmarks/distributed.py cpu2 --edge 24

A cantilever of EDGE^3 nodes with 3 unknowns a rank, longer with more ranks (weak), or of 5/4 EDGE a side (strong). One
rank measures alone first, while the others wait. ``seconds`` is an iteration; ``efficiency`` compares it with one rank's, and
``predicted_efficiency`` adds to that rank's time, or to half of it, the sums and messages that were measured alone.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from record import argument_parser, record, told, write

from penstock.distributed import (
    DistributedMatrix,
    DistributedStreamedMatrix,
    MpiCommunicator,
    NcclCommunicator,
    RowPartition,
    gpu_of_rank,
    split_rows,
)
from penstock.fem import Cantilever, LognormalMaterial
from penstock.solvers import block_jacobi, cg, chebyshev
from penstock.spmv import CPU, Device
from penstock.streaming import HostStore, Ring, StreamedMatrix, Workload

_DEGREE, _REPEATS = 17, 3
_ITERATIONS = {"block_jacobi": 300, "chebyshev17": 15}
_PRECONDITIONERS: dict[str, Callable[[Any], Any]] = {
    "block_jacobi": lambda A: block_jacobi(A, 3),
    "chebyshev17": lambda A: chebyshev(A, _DEGREE, block_size=3),
}


class Point:
    """A cantilever shared out among the ranks of a communicator."""

    def __init__(self, ranks: MpiCommunicator, device: Device, nodes: tuple[int, int, int]) -> None:
        self.ranks, self.device, self.nodes = ranks, device, nodes
        self.beam = Cantilever(nodes=nodes, dof=3, material=LognormalMaterial(sigma=0.5, seed=1))
        self.plane = 3 * nodes[1] * nodes[2]
        self.partition = RowPartition.even(self.beam.unknowns, ranks.size, multiple=self.plane)
        self.own = self.partition.of(ranks.rank)
        self.rows = self.beam.rows(self.own.start, self.own.stop)
        self.b = device.asarray(self.beam.load()[self.own])

    def in_memory(self, name: str) -> list[float]:
        """Return the seconds of an iteration, half of the matrix in memory."""
        return self._seconds(self._matrix, name)

    @functools.cached_property
    def _matrix(self) -> DistributedMatrix:
        form = {"format": "symmetric_bsr", "block_size": 3, "device": self.device}
        return DistributedMatrix.from_rows(self.rows, self.partition, self.ranks, **form)  # type: ignore[arg-type]

    @contextmanager
    def _streamed(self) -> Iterator[DistributedStreamedMatrix]:
        """Open half of the square, streamed through a quarter of the bytes of all its blocks."""
        square, couplings = split_rows(self.rows, self.partition, self.ranks, block_size=3)
        chunk, scalars = 32 * 3, square.to_csr()  # half a matrix is stored in chunks of 32 nodes
        bounds = range(0, square.shape[0], -(-square.shape[0] // 64 // chunk) * chunk)
        slabs = (scalars[start : start + bounds.step] for start in bounds)
        budget = square.nbytes // 4
        with HostStore.create(slabs, format="symmetric_bsr", block_size=3) as store:
            plan = {"workload": Workload(degree=_DEGREE), "ring": Ring(sweeps="alternate")}
            with StreamedMatrix(store, budget, device=self.device, **plan) as streamed:  # type: ignore[arg-type]
                there = [coupling.to_device(self.device) for coupling in couplings]
                yield DistributedStreamedMatrix(streamed, there, self.ranks)

    def streamed(self, name: str) -> list[float]:
        """Return the seconds of an iteration, half of the matrix streamed through a quarter of the bytes of all its blocks."""
        with self._streamed() as A:
            return self._seconds(A, name)

    def _seconds(self, A: Any, name: str) -> list[float]:
        M, iterations, samples = _PRECONDITIONERS[name](A), _ITERATIONS[name], []
        for _ in range(_REPEATS + 1):
            self.device.synchronize()
            self.ranks.barrier()
            began = time.perf_counter()
            result = cg(A, self.b, M=M, rtol=1e-30, maxiter=iterations)
            self.device.synchronize()
            self.ranks.barrier()
            samples.append((time.perf_counter() - began) / result.iterations)
        return samples[1:]  # the first one compiles and captures


def communication(ranks: MpiCommunicator, device: Device, nbytes: int) -> tuple[float, float]:
    """Return the seconds of a sum of four numbers, and of an exchange of some bytes with one neighbour."""
    partials, sums = device.xp.ones((4, 512)), device.xp.empty((4, 512))
    outgoing, incoming = device.xp.ones(nbytes // 8), device.xp.empty(nbytes // 8)

    def exchange() -> None:
        neighbour = ranks.rank ^ 1
        under_way = ranks.start_exchange([(neighbour, outgoing, incoming)] if neighbour < ranks.size else [])
        under_way.wait()
        under_way.end()

    found = []
    for work in (lambda: ranks.add_up(partials, sums), exchange):
        times = []
        for _ in range(6):
            ranks.barrier()
            began = time.perf_counter()
            for _ in range(50):
                work()
            device.synchronize()
            times.append((time.perf_counter() - began) / 50)
        found.append(statistics.median(times[1:]))
    return found[0], found[1]


class Study:
    """All points, of one rank and of all."""

    def __init__(self, everybody: MpiCommunicator, alone: MpiCommunicator, device: Device) -> None:
        self.everybody, self.alone, self.device = everybody, alone, device
        self.records: list[dict[str, Any]] = []

    def measure(
        self, name: str, sizes: tuple[tuple[int, int, int], tuple[int, int, int]], ways: dict[str, str]
    ) -> None:
        """Measure some ways to solve, with one rank and with all."""
        strong = name == "strong"
        taken: dict[str, list[float]] = {}
        if self.everybody.rank == 0:
            point = Point(self.alone, self.device, sizes[0])
            taken = {way: getattr(point, where)(way.split("/")[1]) for way, where in ways.items()}
            del point
        self.everybody.barrier()
        point = Point(self.everybody, self.device, sizes[1])
        reduction, exchange = communication(self.everybody, self.device, 8 * point.plane)
        for way, where in ways.items():
            samples = getattr(point, where)(way.split("/")[1])
            ranks = self.everybody.size
            if self.everybody.rank:
                continue
            one = statistics.median(taken[way])
            products = _DEGREE if way.endswith("17") else 1
            least = one / ranks if strong else one
            for count, of in ((1, taken[way]), (ranks, samples)):
                seconds = statistics.median(of)
                ideal = one / count if strong else one
                predicted = 1.0 if count == 1 else least / (least + 2 * reduction + products * exchange)
                entry = record(
                    f"distributed/{name}/{way}/r{count}", of, floor=ideal, nbytes=0, peers={}, efficiency=ideal / seconds,
                    predicted_efficiency=predicted, nodes=sizes[count > 1], reduction_seconds=reduction,
                    exchange_seconds=exchange,
                )  # fmt: skip
                self.records.append(told(entry, f"efficiency {ideal / seconds:.3f}, predicted {predicted:.3f},"))


def main() -> None:
    """Measure, print and write the JSON."""
    parser = argument_parser(__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--edge", type=int, default=128, help="nodes a side")
    parser.add_argument("--way", action="append", help="such as memory/block_jacobi; several times; default all")
    arguments = parser.parse_args()
    with MpiCommunicator() as ranks:
        device = gpu_of_rank(ranks) if arguments.device == "cuda" else CPU
        kind: Any = NcclCommunicator if arguments.device == "cuda" else MpiCommunicator
        from mpi4py import MPI

        given = {"device": device} if arguments.device == "cuda" else {}
        everybody, alone = kind(**given), kind(comm=MPI.COMM_SELF, **given)
        study, edge = Study(everybody, alone, device), arguments.edge
        ways = {f"memory/{name}": "in_memory" for name in _PRECONDITIONERS} | {"streamed/chebyshev17": "streamed"}
        if arguments.way:
            ways = {name: where for name, where in ways.items() if name in arguments.way}
        with device.current():
            study.measure("weak", ((edge,) * 3, (edge * ranks.size, edge, edge)), ways)
            larger = edge * 5 // 4
            study.measure("strong", ((larger,) * 3, (larger,) * 3), ways)
            few = {"memory/block_jacobi": "in_memory"}
            study.measure("small", ((11, 11, 11), (11 * ranks.size, 11, 11)), few)
        if ranks.rank == 0:
            write("distributed", arguments, {}, study.records)


if __name__ == "__main__":
    main()
