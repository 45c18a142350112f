"""Several ranks against one: iterations of ``cg`` in memory and streamed, at constant work a rank and at constant work in all.

    mpiexec -n 2 python benchmarks/distributed.py h200x2 --device cuda      (NCCL, a GPU each)
    mpiexec -n 2 python benchmarks/distributed.py cpu2 --edge 24

A cantilever of EDGE^3 nodes with 3 unknowns a rank, longer with more ranks (weak), or of 5/4 EDGE a side (strong). One
rank measures alone first, while the others wait. ``seconds`` is an iteration; ``efficiency`` compares it with one rank's, and
``predicted_efficiency`` adds to that rank's time, or to half of it, sums, messages and coarse solves that were measured alone.

On GPUs, ``both`` is one system solved to a true residual of 1e-8 where the memory pool of each GPU has a limit, and half of the
matrix takes more than all limits together; ``links`` are the bytes a second that all GPUs get from their host at once.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from record import argument_parser, printed, record, write

from penstock.distributed import (
    Coupling,
    DistributedMatrix,
    DistributedStreamedMatrix,
    MpiCommunicator,
    NcclCommunicator,
    RowPartition,
    gpu_of_rank,
    split_rows,
)
from penstock.fem import Cantilever, LognormalMaterial
from penstock.solvers import block_jacobi, cg, chebyshev, smoothed_aggregation
from penstock.spmv import CPU, Device
from penstock.streaming import HostStore, Ring, StreamedMatrix, Workload

_DEGREE, _REPEATS = 17, 3
_ITERATIONS = {"block_jacobi": 300, "block_jacobi_one_sum": 300, "chebyshev17": 15, "coarse_level": 8}
# Of an iteration: products, sums that cg adds up on the device, and sums that the host waits for.
_COUNTS = {
    "block_jacobi": (1, 2, 0),
    "block_jacobi_one_sum": (1, 1, 0),
    "chebyshev17": (_DEGREE, 2, 0),
    "coarse_level": (14, 1, 5),
}
_PRECONDITIONERS: dict[str, Callable[[Any, Any], Any]] = {
    "block_jacobi": lambda A, point: block_jacobi(A, 3),
    "block_jacobi_one_sum": lambda A, point: block_jacobi(A, 3),
    "chebyshev17": lambda A, point: chebyshev(A, _DEGREE, block_size=3),
    "coarse_level": lambda A, point: smoothed_aggregation(A, coordinates=point.coordinates, aggregates=point.counts),
}
# Of ``both``: vectors of cg and of the polynomial, and a share of half of the matrix that each GPU has besides.
_VECTORS, _SHARE = 13, 0.15


class Point:
    """A cantilever shared out among the ranks of a communicator."""

    def __init__(self, ranks: MpiCommunicator, device: Device, nodes: tuple[int, int, int]) -> None:
        self.ranks, self.device, self.nodes = ranks, device, nodes
        self.beam = Cantilever(nodes=nodes, dof=3, material=LognormalMaterial(sigma=0.5, seed=1))
        self.plane = 3 * nodes[1] * nodes[2]
        self.partition = RowPartition.even(self.beam.unknowns, ranks.size, multiple=self.plane)
        self.own = self.partition.of(ranks.rank)
        planes = slice(self.own.start // self.plane, self.own.stop // self.plane)
        self.coordinates, self.counts = self.beam.mesh.coordinates(planes), (planes.stop - planes.start, *nodes[1:])
        self.rows = self.beam.rows(self.own.start, self.own.stop)
        self.b = device.asarray(self.beam.load()[self.own])
        #: Seconds of a coarse solve, once there has been one.
        self.coarse_seconds = 0.0

    def in_memory(self, name: str) -> list[float]:
        """Return the seconds of an iteration, half of the matrix in memory."""
        return self._seconds(self._matrix, name)

    @functools.cached_property
    def _matrix(self) -> DistributedMatrix:
        form = {"format": "symmetric_bsr", "block_size": 3, "device": self.device}
        return DistributedMatrix.from_rows(self.rows, self.partition, self.ranks, **form)  # type: ignore[arg-type]

    @functools.cached_property
    def _split(self) -> tuple[HostStore, list[Coupling], int]:
        """Half of the square in host memory, the couplings, and the bytes of all its blocks."""
        square, couplings = split_rows(self.rows, self.partition, self.ranks, block_size=3)
        chunk, scalars = 32 * 3, square.to_csr()  # half a matrix is stored in chunks of 32 nodes
        bounds = range(0, square.shape[0], -(-square.shape[0] // 64 // chunk) * chunk)
        slabs = (scalars[start : start + bounds.step] for start in bounds)
        store = HostStore.create(slabs, format="symmetric_bsr", block_size=3)
        return store, [coupling.to_device(self.device) for coupling in couplings], square.nbytes

    @contextmanager
    def opened(self, budget: int | None = None) -> Iterator[DistributedStreamedMatrix]:
        """Open half of the square, streamed through a budget or a quarter of the bytes of all its blocks."""
        store, couplings, nbytes = self._split
        plan = {"workload": Workload(degree=_DEGREE), "ring": Ring(sweeps="alternate")}
        with StreamedMatrix(store, budget or nbytes // 4, device=self.device, **plan) as streamed:  # type: ignore[arg-type]
            yield DistributedStreamedMatrix(streamed, couplings, self.ranks)

    @property
    def half_nbytes(self) -> int:
        """Bytes of half of the square."""
        return self._split[0].index.nbytes

    def close(self) -> None:
        """Unlock the store's memory."""
        if "_split" in self.__dict__:
            self._split[0].close()

    def streamed(self, name: str) -> list[float]:
        """Return the seconds of an iteration, half of the matrix streamed through a quarter of the bytes of all its blocks."""
        with self.opened() as A:
            return self._seconds(A, name)

    def _seconds(self, A: Any, name: str) -> list[float]:
        M, iterations, samples = _PRECONDITIONERS[name](A, self), _ITERATIONS[name], []
        reductions = 1 if name.endswith("one_sum") else 2
        for _ in range(_REPEATS + 1):
            began = self.now()
            result = cg(A, self.b, M=M, rtol=1e-30, maxiter=iterations, reductions=reductions)
            samples.append((self.now() - began) / result.iterations)
        if name == "coarse_level":
            r = self.device.xp.ones(M.level.T.unknowns)
            M.level.solve(r)
            began = self.now()
            for _ in range(20):
                M.level.solve(r)
            self.coarse_seconds = (self.now() - began) / 20
        return samples[1:]  # the first one compiles and captures

    def now(self) -> float:
        """Return the time when all ranks have got here."""
        self.device.synchronize()
        self.ranks.barrier()
        return time.perf_counter()


def communication(ranks: MpiCommunicator, device: Device, nbytes: int) -> tuple[float, float, float]:
    """Return the seconds of a sum of four numbers, of an exchange of some bytes with one neighbour, and of a sum on the host."""
    partials, sums = device.xp.ones((4, 512)), device.xp.empty((4, 512))
    outgoing, incoming = device.xp.ones(nbytes // 8), device.xp.empty(nbytes // 8)

    def exchange() -> None:
        neighbour = ranks.rank ^ 1
        under_way = ranks.start_exchange([(neighbour, outgoing, incoming)] if neighbour < ranks.size else [])
        under_way.wait()
        under_way.end()

    found = []
    for work in (lambda: ranks.add_up(partials, sums), exchange, lambda: ranks.total(np.ones(1))):
        times = []
        for _ in range(6):
            ranks.barrier()
            began = time.perf_counter()
            for _ in range(50):
                work()
            device.synchronize()
            times.append((time.perf_counter() - began) / 50)
        found.append(statistics.median(times[1:]))
    return found[0], found[1], found[2]


class Study:
    """All points, of one rank and of all."""

    def __init__(self, everybody: MpiCommunicator, alone: MpiCommunicator, device: Device) -> None:
        self.everybody, self.alone, self.device = everybody, alone, device
        self.records: list[dict[str, Any]] = []

    def measure(
        self, name: str, sizes: tuple[tuple[int, int, int], tuple[int, int, int]], ways: dict[str, str]
    ) -> None:
        """Measure some ways to solve, with one rank and with all."""
        taken: dict[str, tuple[list[float], float]] = {}
        if self.everybody.rank == 0:
            point = Point(self.alone, self.device, sizes[0])
            for way, where in ways.items():
                taken[way] = getattr(point, where)(way.split("/")[1]), point.coarse_seconds
            point.close()
            del point
        self.everybody.barrier()
        point = Point(self.everybody, self.device, sizes[1])
        costs = communication(self.everybody, self.device, 8 * point.plane)
        for way, where in ways.items():
            samples = getattr(point, where)(way.split("/")[1])
            if not self.everybody.rank:
                self._tell(name, way, sizes, taken[way], (samples, point.coarse_seconds), costs)
        point.close()

    def _tell(
        self,
        name: str,
        way: str,
        sizes: tuple[tuple[int, int, int], tuple[int, int, int]],
        alone: tuple[list[float], float],
        together: tuple[list[float], float],
        costs: tuple[float, float, float],
    ) -> None:
        """Record a point and what was predicted for it; alone and together are seconds of iterations and of a coarse solve."""
        ranks, kind = self.everybody.size, way.split("/")[1]
        products, sums, waits = _COUNTS[kind]
        one, solves = statistics.median(alone[0]), 2 if kind == "coarse_level" else 0
        shared = one - solves * alone[1]
        reduction, exchange, on_host = costs
        least = (shared / ranks if name == "strong" else shared) + solves * together[1]
        predicted = least + sums * reduction + products * exchange + waits * on_host
        for count, samples in ((1, alone[0]), (ranks, together[0])):
            seconds, ideal = statistics.median(samples), one / count if name == "strong" else one
            expected = 1.0 if count == 1 else ideal / predicted
            entry = record(
                f"distributed/{name}/{way}/r{count}", samples, floor=ideal, nbytes=0, peers={}, efficiency=ideal / seconds,
                predicted_efficiency=expected, nodes=sizes[count > 1], reduction_seconds=reduction,
                exchange_seconds=exchange,
            )  # fmt: skip
            self.records.append(printed(entry, f"efficiency {ideal / seconds:.3f}, predicted {expected:.3f},"))

    def both(self, edge: int) -> None:
        """Solve one system with one GPU and with all, each with the same limit of its memory pool."""
        nodes, pool = (edge,) * 3, self.device.xp.get_default_memory_pool()
        vectors = 8 * 3 * edge**3 * _VECTORS
        seconds, limit, told_by = {}, 0, {}
        for ranks in (self.alone, self.everybody):
            if ranks is self.alone and self.everybody.rank:
                self.everybody.barrier()
                continue
            point = Point(ranks, self.device, nodes)
            if ranks is self.alone:
                limit = vectors + int(_SHARE * point.half_nbytes)
            limit = int(self.everybody.of_first(float(limit))) if ranks is self.everybody else limit
            own = vectors * (point.own.stop - point.own.start) // point.beam.unknowns
            pool.free_all_blocks()
            pool.set_limit(limit)
            with point.opened(limit - own) as A:
                M = chebyshev(A, _DEGREE, block_size=3)
                cg(A, point.b, M=M, rtol=1e-30, maxiter=3)
                began = point.now()
                result = cg(A, point.b, M=M, rtol=1e-8)
                seconds[ranks.size] = point.now() - began
                told_by[ranks.size] = (result.iterations, result.true_residual)
            nbytes = ranks.total(np.array([float(point.half_nbytes)]))[0]
            point.close()
            del point, A, M, result
            pool.set_limit(size=0)
            if ranks is self.alone:
                self.everybody.barrier()
        if not self.everybody.rank:
            count = self.everybody.size
            for size in (1, count):
                iterations, residual = told_by[size]
                entry = record(
                    f"distributed/both/cube{edge}-dof3/r{size}", [seconds[size]], floor=seconds[1] / size, nbytes=int(nbytes),
                    peers={}, speedup=seconds[1] / seconds[size], efficiency=seconds[1] / seconds[size] / size,
                    limit_nbytes=limit, iterations=iterations, true_residual=residual,
                )  # fmt: skip
                self.records.append(
                    printed(entry, f"{iterations} iterations, {residual:.1e}, x {seconds[1] / seconds[size]:.2f},")
                )

    def links(self) -> None:
        """Measure the bytes a second that one GPU and all GPUs at once get from page-locked memory."""
        nbytes, xp = 2 << 30, self.device.xp
        source = np.frombuffer(xp.cuda.alloc_pinned_memory(nbytes), dtype=np.uint8, count=nbytes)
        source[:] = 1
        target = xp.empty(nbytes, dtype=np.uint8)
        rates = {}
        for ranks in (self.alone, self.everybody):
            if ranks is self.everybody or not self.everybody.rank:
                target.set(source)
                times = []
                for _ in range(5):
                    self.device.synchronize()
                    ranks.barrier()
                    began = time.perf_counter()
                    for _ in range(4):
                        target.set(source)
                    self.device.synchronize()
                    times.append((time.perf_counter() - began) / 4)
                rates[ranks.size] = float(ranks.total(np.array([nbytes / statistics.median(times)]))[0])
            self.everybody.barrier()
        if not self.everybody.rank:
            for size, rate in rates.items():
                entry = record(
                    f"distributed/links/r{size}",
                    [nbytes / rate],
                    floor=nbytes / rates[1] / size,
                    nbytes=nbytes,
                    peers={},
                    GBps=rate / 1e9,
                )
                self.records.append(printed(entry, f"{rate / 1e9:.1f} GB/s,"))


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
        ways = {f"memory/{name}": "in_memory" for name in _PRECONDITIONERS if not name.endswith("one_sum")}
        ways |= {f"streamed/{name}": "streamed" for name in ("chebyshev17", "coarse_level")}
        if arguments.way:
            ways = {name: where for name, where in ways.items() if name in arguments.way}
        with device.current():
            study.measure("weak", ((edge,) * 3, (edge * ranks.size, edge, edge)), ways)
            larger = edge * 5 // 4
            study.measure("strong", ((larger,) * 3, (larger,) * 3), ways)
            few = {f"memory/{name}": "in_memory" for name in ("block_jacobi", "block_jacobi_one_sum")}
            study.measure("small", ((11, 11, 11), (11 * ranks.size, 11, 11)), few)
            if arguments.device == "cuda" and ranks.size > 1:
                study.both(larger)
                study.links()
        if ranks.rank == 0:
            write("distributed", arguments, {}, study.records)


if __name__ == "__main__":
    main()
