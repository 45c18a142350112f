"""A streamed solve of an experiment file against the same solve in memory, and against the solver a user would pick.

    python benchmarks/experiment.py cpu2 examples/cantilever.yaml
    python benchmarks/experiment.py h200 examples/cantilever_cuda.yaml

``floor_seconds`` is the bytes of all sweeps over the link (of the disk, or page-locked memory), measured before and after
the solve. The peers run in memory: ``memory`` is penstock, ``scipy_csr`` or ``cupy_csr`` that library's CG on CSR with a
Jacobi preconditioner to the same tolerance on the recursive residual.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from peer import Peer, seconds_of
from record import argument_parser, record, write

from penstock.experiments import read_experiment, run_experiment
from penstock.experiments.cantilever.loads import right_hand_sides
from penstock.experiments.reporting.summary import solve_seconds
from penstock.solvers import block_jacobi, cg
from penstock.spmv import CPU, Device
from penstock.streaming.measurement.probes import measure_disk, measure_link, measure_memory


def measured_link(device: Device, folder: Path) -> float:
    """Return bytes a second."""
    return measure_disk(folder)[0] if device == CPU else measure_link(device)


def timed(device: Device, action: Any) -> tuple[float, Any]:
    """Return the seconds of the second call, and its result."""
    action()
    return seconds_of(device, action)


def peer_solve(peer: Peer, device: Device, b: Any, rtol: float) -> tuple[float, int, float]:
    """Return seconds, iterations and true residual of SciPy's or CuPy's CG."""
    iterations = [0]

    def count(_: Any) -> None:
        iterations[0] += 1

    def solve() -> Any:
        iterations[0] = 0
        return peer.solve(b, 20_000, rtol, count)

    seconds, x = timed(device, solve)
    return seconds, iterations[0], peer.true_residual(b, x)


def main() -> None:
    """Measure, print and write the JSON."""
    parser = argument_parser(__doc__)
    parser.add_argument("experiment", type=Path)
    arguments = parser.parse_args()
    experiment = read_experiment(arguments.experiment)
    device, beam = Device.parse(experiment.memory.device), experiment.cantilever()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        links = [measured_link(device, Path(folder))]
        run_folder = run_experiment(experiment, Path(folder) / "run").folder
        result = json.loads(run_folder.result.read_text(encoding="utf-8"))
        links.append(measured_link(device, Path(folder)))
    b = device.asarray(right_hand_sides(experiment, beam))
    A = beam.matrix().to_device(device)
    M = block_jacobi(A, beam.dof)
    memory_seconds, memory = timed(device, functools.partial(cg, A, b, M=M, rtol=experiment.solver.rtol))
    del A, M
    peer = Peer(beam.matrix("csr").to_csr(), device)
    peer_seconds, peer_iterations, peer_residual = peer_solve(peer, device, b, experiment.solver.rtol)
    link, solve = max(links), solve_seconds(result)
    matrix = f"cube{beam.mesh.node_counts[0]}-dof{beam.dof}"
    common = {"floor": result["bytes_streamed"] / link, "nbytes": result["bytes_streamed"]}
    peers = {"memory": memory_seconds, peer.name: peer_seconds}
    entry = record(f"cg/streamed/{matrix}", [solve], **common, peers=peers, experiment=result)
    entry |= {
        "link_fraction": result["bytes_streamed"] / solve / link,
        "memory_iterations": memory.iterations,
        "memory_true_residual": memory.true_residual,
        f"{peer.name}_iterations": peer_iterations,
        f"{peer.name}_true_residual": peer_residual,
    }
    limits = {
        "read_GBps": measure_memory(device, 256 << 20 if device == CPU else 8 << 30) / 1e9,
        "link_GBps": link / 1e9,
    }
    print(
        f"{entry['name']}: {solve:.2f} s streamed ({100 * entry['link_fraction']:.1f} % of the link, {result['iterations']} "
        f"iterations, true residual {result['true_residual']:.2e}), {memory_seconds:.2f} s in memory, "
        f"{peer.name} {peer_seconds:.2f} s ({peer_iterations} iterations)"
    )
    write("experiment", arguments, limits, [entry])


if __name__ == "__main__":
    main()
