"""CG and block CG, an iteration and a whole solve, in memory and streamed, against SciPy or CuPy on CSR.

    python benchmarks/cg.py cpu2
    python benchmarks/cg.py h200 --device cuda

An iteration's seconds are the difference of two solves, of a few and of many iterations, over the difference of their
iterations: starting up is left out, the solvers' own looks at the residual are not. Neither reaches the 64th iteration, where a
slow solve tests once whether its matrix is symmetric, unless the format says so. ``floor_seconds`` is the bytes of that
iteration over the measured read bandwidth, of streamed solves the bytes moved over the measured link. All solve with Jacobi,
the peers too, and all to the same tolerance; the peers' residual is the recursive one. Load cases are samples of a random end
load, as experiments have them.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from calls import CallTrace
from peer import Peer, seconds_of
from record import argument_parser, printed, record, write

from penstock.experiments import Experiment
from penstock.experiments.cantilever.loads import right_hand_sides
from penstock.fem import Cantilever
from penstock.solvers import block_cg, block_cg_workspace_nbytes, cg, cg_workspace_nbytes, jacobi
from penstock.spmv import Array, Device, Operator
from penstock.streaming import HostStore, StreamedMatrix, Workload, plan_stream
from penstock.streaming.measurement.probes import measure_link, measure_memory

RTOL = 1e-5
# Values per row that an iteration reads and writes besides those of A: the solvers' modules count them. The product reads p
# and writes q; Jacobi reads a diagonal, which block CG does twice.
CG_VALUES, BLOCK_CG_VALUES, DIAGONALS = 11 + 2, 10 + 2, 2
# Of the load cases, how many are also solved one after the other: the rest is taken to be like them. Streamed, so many of
# their iterations are measured: they take the iterations of the same solve in memory, with the same bits.
SINGLES, SINGLE_ITERATIONS = 4, 50


def iteration_seconds(
    device: Device, solves: dict[str, Callable[[int], Any]], few: int, many: int, repeats: int = 7
) -> dict[str, list[float]]:
    """Return samples of the seconds of an iteration of each solver, ``solve(maxiter)``, measured in turn."""
    samples: dict[str, list[float]] = {name: [] for name in solves}
    for repeat in range(repeats + 1):
        for name, solve in solves.items():
            short, long = (seconds_of(device, partial(solve, count))[0] for count in (few, many))
            if repeat:  # the first one warms up
                samples[name].append((long - short) / (many - few))
    return samples


class Cube:
    """A cantilever of equal sides and its load cases, on a device."""

    def __init__(self, nodes: int, dof: int, device: Device) -> None:
        self.name, self.device = f"cube{nodes}-dof{dof}", device
        self.model = {"nodes": [nodes] * 3, "dof": dof}
        self.beam = Cantilever(nodes=nodes, dof=dof)
        self.n = self.beam.unknowns
        self.limit = measure_memory(device, 256 << 20 if device.kind == "cpu" else 8 << 30)
        self.assembled = functools.cache(self.beam.matrix)
        self.loads = functools.cache(self._loads)

    @functools.cached_property
    def peer(self) -> Peer:
        """The solver that a user would take instead."""
        return Peer(self.assembled("csr").to_csr(), self.device)

    def _loads(self, columns: int) -> Array:
        """Return load cases (n, columns)."""
        experiment = Experiment.model_validate({"model": self.model, "load": {"samples": columns}})
        return self.device.asarray(right_hand_sides(experiment, self.beam))

    def matrix(self, format_name: str) -> Operator:
        """Return the matrix on the device."""
        return self.assembled(format_name).to_device(self.device)


def measure_cg(cube: Cube, formats: tuple[str, ...], few: int, many: int) -> list[dict[str, Any]]:
    """An iteration of CG in each format, and of the peer's."""
    b = cube.loads(1)[:, 0].copy()
    peer = cube.peer
    matrices = {name: cube.matrix(name) for name in formats}
    solves: dict[str, Callable[[int], Any]] = {
        name: partial(_penstock_cg, A, jacobi(A), b) for name, A in matrices.items()
    }
    samples = iteration_seconds(cube.device, {**solves, peer.name: partial(peer.solve, b)}, few, many)
    peers = {peer.name: statistics.median(samples.pop(peer.name))}
    records = []
    for name, A in matrices.items():
        nbytes = A.nbytes + (CG_VALUES + 1) * b.nbytes
        entry = record(
            f"cg/memory/{cube.name}/{name}", samples[name], floor=nbytes / cube.limit, nbytes=nbytes, peers=peers
        )
        records.append(printed(entry, "an iteration"))
    return records


def _penstock_cg(A: Operator, M: Operator, b: Array, maxiter: int) -> Any:
    result = cg(A, b, M=M, rtol=0.0, maxiter=maxiter)
    assert result.iterations == maxiter, result.message
    return result


def measure_block_iteration(cube: Cube, format_name: str, columns: int) -> list[dict[str, Any]]:
    """An iteration of block CG; no peer has one."""
    A, B = cube.matrix(format_name), cube.loads(columns)
    M = jacobi(A)

    def solve(maxiter: int) -> Any:
        result = block_cg(A, B, M=M, rtol=0.0, maxiter=maxiter)
        assert result.iterations == maxiter, result.columns[0].message
        return result

    samples = iteration_seconds(cube.device, {"block": solve}, 5, 25, repeats=5)["block"]
    nbytes = A.nbytes + BLOCK_CG_VALUES * B.nbytes + DIAGONALS * 8 * cube.n
    name = f"block_cg/memory/{cube.name}/k{columns}/iteration"
    return [printed(record(name, samples, floor=nbytes / cube.limit, nbytes=nbytes, peers={}), "an iteration")]


def measure_block_solve(cube: Cube, format_name: str, columns: int) -> list[dict[str, Any]]:
    """All load cases: as a block, one after the other by ``cg``, and by the peer's."""
    device, B = cube.device, cube.loads(columns)
    A = cube.matrix(format_name)
    M, peer = jacobi(A), cube.peer
    singles = [B[:, column].copy() for column in range(columns)]
    for warm in (partial(block_cg, A, B, M=M), partial(cg, A, singles[0], M=M)):
        warm(maxiter=3)
    peer.solve(singles[0], 3)
    seconds, result = seconds_of(device, partial(block_cg, A, B, M=M, rtol=RTOL))
    alone = [seconds_of(device, partial(cg, A, b, M=M, rtol=RTOL)) for b in singles[:SINGLES]]
    theirs = [seconds_of(device, partial(peer.solve, b, 100_000, RTOL)) for b in singles]
    assert result.converged, result.columns[0].message
    residuals = [peer.true_residual(b, x) for b, (_, x) in zip(singles, theirs, strict=True)]
    nbytes = result.iterations * (A.nbytes + BLOCK_CG_VALUES * B.nbytes + DIAGONALS * 8 * cube.n)
    entry = record(
        f"block_cg/memory/{cube.name}/k{columns}",
        [seconds],
        floor=nbytes / cube.limit,
        nbytes=nbytes,
        peers={
            peer.name: sum(time for time, _ in theirs),
            f"cg, {SINGLES} scaled to {columns}": columns * statistics.fmean(time for time, _ in alone),
        },
        rtol=RTOL,
        iterations=result.iterations,
        single_iterations=[one.iterations for _, one in alone],
        largest_true_residual=max(column.true_residual for column in result.columns),
        largest_peer_residual=max(residuals),
    )
    return [printed(entry, f"{result.iterations} iterations")]


def measure_streamed(cube: Cube, columns: int, link: float) -> list[dict[str, Any]]:
    """The block, and some of its columns one after the other, with matrix storage of a quarter of the matrix."""
    device, B, whole = cube.device, cube.loads(columns), cube.assembled("sliced_bsr")
    budget, singles = whole.nbytes // 4, [B[:, column].copy() for column in range(SINGLES)]
    resident = cube.matrix("sliced_bsr")
    iterations = [cg(resident, b, M=jacobi(resident), rtol=RTOL).iterations for b in singles]
    del resident

    def streamed(store: HostStore, together: int) -> tuple[StreamedMatrix, int]:
        block_nbytes = block_cg_workspace_nbytes(
            cube.n, columns, preconditioned=False
        )  # Jacobi needs no block of its own
        workspace = block_nbytes if together > 1 else cg_workspace_nbytes(cube.n)
        plan = plan_stream(store.index, budget, workload=Workload(columns=together, workspace_nbytes=workspace))
        return StreamedMatrix(store, budget, device=device, plan=plan), workspace

    def entry(name: str, samples: list[float], moved: list[int], A: StreamedMatrix, workspace: int, **more: Any) -> Any:
        sizes = {"matrix_bytes": whole.nbytes, "budget_bytes": budget, "peak_budget_bytes": A.budget.peak_nbytes}
        nbytes = int(statistics.median(moved))
        return record(name, samples, floor=nbytes / link, nbytes=nbytes, peers={}, rtol=RTOL, vectors_bytes=workspace,
                      **sizes, **more)  # fmt: skip

    with HostStore.from_matrix(whole, 32) as store:
        A, workspace = streamed(store, columns)
        with A:
            M = jacobi(A)
            block_cg(A, B, M=M, maxiter=2)
            seconds, block = seconds_of(device, partial(block_cg, A, B, M=M, rtol=RTOL))
            assert block.converged
            of_block = entry(
                f"block_cg/streamed/{cube.name}/k{columns}", [seconds], [block.bytes_streamed], A, workspace,
                iterations=block.iterations, sweeps=block.sweeps,
            )  # fmt: skip
        A, workspace = streamed(store, 1)
        with A:
            M = jacobi(A)
            cg(A, singles[0], M=M, maxiter=2)
            runs = [seconds_of(device, partial(cg, A, b, M=M, rtol=0.0, maxiter=SINGLE_ITERATIONS)) for b in singles]
            # A whole solve has one sweep more than iterations, for the true residual, as these have.
            scales = [(count + 1) / run.sweeps for count, (_, run) in zip(iterations, runs, strict=True)]
            whole_seconds = [scale * taken for scale, (taken, _) in zip(scales, runs, strict=True)]
            whole_bytes = [int(scale * run.bytes_streamed) for scale, (_, run) in zip(scales, runs, strict=True)]
            of_one = entry(
                f"cg/streamed/{cube.name}", whole_seconds, whole_bytes, A, workspace,
                iterations=iterations, measured_iterations=SINGLE_ITERATIONS,
            )  # fmt: skip
    all_seconds, all_bytes = (columns * statistics.fmean(of) for of in (whole_seconds, whole_bytes))
    of_block["peers"] = {f"cg, {SINGLES} scaled to {columns}": all_seconds}
    of_block |= {
        "bytes_ratio": block.bytes_streamed / all_bytes,
        "iterations_ratio": block.iterations / statistics.fmean(iterations) / columns,
        "times_faster": all_seconds / seconds,
    }
    for one in (of_block, of_one):
        printed(one, f"{one['iterations']} iterations, {one['bytes'] / 1e9:.1f} GB")
    print(
        f"  bytes {of_block['bytes_ratio']:.5f} of {columns} single solves' (iterations alone: "
        f"{of_block['iterations_ratio']:.5f}), {of_block['times_faster']:.1f} x faster"
    )
    return [of_block, of_one]


def measure_looks(cube: Cube, format_name: str, iterations: int) -> list[dict[str, Any]]:
    """What a solve calls between two looks: every call of the CUDA API, and what the memory pool hands out."""
    A, b = cube.matrix(format_name), cube.loads(1)[:, 0].copy()
    M, pool = jacobi(A), cube.device.xp.get_default_memory_pool()
    looks: list[dict[str, Any]] = []
    trace = CallTrace()

    def monitor(state_record: Any) -> None:
        looks.append({"iteration": state_record.iteration, "calls": trace.take(), "pool_used": pool.used_bytes(),
                      "pool_total": pool.total_bytes()})  # fmt: skip

    options: dict[str, Any] = {"M": M, "rtol": 0.0, "maxiter": iterations, "check_every": iterations // 4}
    cg(A, b, **options)
    with trace:
        seconds, _ = seconds_of(cube.device, partial(cg, A, b, monitor=monitor, **options))
    between = {name: count for name, count in looks[1]["calls"].items() if count}
    print(f"cg/looks/{cube.name}: from the first look to the second, {options['check_every']} iterations: {between}")
    return [record(f"cg/looks/{cube.name}/{format_name}", [seconds], floor=0.0, nbytes=0, peers={}, looks=looks)]


def main() -> None:
    """Measure, print and write the JSON."""
    parser = argument_parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--nodes", type=int, help="nodes a side of the large cube")
    parser.add_argument("--columns", type=int, help="load cases")
    arguments = parser.parse_args()
    device = Device.parse(arguments.device)
    on_gpu = device.kind == "cuda"
    columns = arguments.columns or (32 if on_gpu else 16)
    large = Cube(arguments.nodes or (128 if on_gpu else 32), 3, device)
    limits, records = {"read_GBps": large.limit / 1e9}, []
    with device.current():
        link = measure_link(device) if on_gpu else 0.0
        if on_gpu:
            limits["link_GBps"] = link / 1e9
        for part in gpu_parts(large, columns, link) if on_gpu else cpu_parts(large, columns):
            records += part()
            write("cg", arguments, limits, records)  # what is measured stays measured


def gpu_parts(large: Cube, columns: int, link: float) -> list[Callable[[], list[dict[str, Any]]]]:
    """What is measured on a GPU."""
    return [
        partial(measure_cg, Cube(16, 1, large.device), ("csr",), 20, 60),
        partial(measure_cg, large, ("sliced_bsr", "symmetric_bsr", "bsr", "csr"), 20, 60),
        partial(measure_looks, large, "sliced_bsr", 64),
        partial(measure_block_iteration, large, "sliced_bsr", columns),
        partial(measure_block_solve, large, "sliced_bsr", columns),
        partial(measure_streamed, large, columns, link),
    ]


def cpu_parts(large: Cube, columns: int) -> list[Callable[[], list[dict[str, Any]]]]:
    """What is measured on a CPU."""
    return [
        partial(measure_cg, Cube(8, 1, large.device), ("csr",), 10, 40),
        partial(measure_cg, Cube(16, 1, large.device), ("csr",), 10, 60),
        partial(measure_cg, large, ("csr", "sliced_bsr", "symmetric_bsr"), 5, 45),
        partial(measure_block_iteration, large, "sliced_bsr", columns),
        partial(measure_block_solve, large, "sliced_bsr", columns),
    ]


if __name__ == "__main__":
    main()
