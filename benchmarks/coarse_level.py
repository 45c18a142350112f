"""A coarse level: iterations, sweeps and seconds of whole solves, in memory and streamed, against what there was.

    python benchmarks/coarse_level.py h200 --device cuda
    python benchmarks/coarse_level.py h200 --device cuda --matrix cube64-dof3 --matrix beam512x32x32-dof3

Cantilevers of random stiffness (lognormal, sigma 0.5) under a shear load, to a true relative residual of 1e-8. In memory half of
the matrix is stored; streamed, the matrix storage has a quarter of the BSR matrix. ``seconds`` is the solve, ``setup_seconds``
making the preconditioner, both the second time, when kernels have been compiled. Peers, in memory: CG with block Jacobi and with
a Chebyshev polynomial, and what a user would pick instead.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

from peer import Peer, seconds_of
from record import argument_parser, record, told, write
from systems import System

from penstock.solvers import block_jacobi, cg, chebyshev, preconditioner_spec, smoothed_aggregation
from penstock.spmv import Device, Operator
from penstock.streaming import LinkRates
from penstock.streaming.measurement.probes import measure_link
from penstock.streaming.measurement.rates import machine_rates

RTOL = 1e-8
MATRICES = {
    "cuda": ("cube32-dof3", "cube64-dof3", "cube128-dof3", "beam512x32x32-dof3", "cube104-dof6", "cube256-dof1"),
    "cpu": ("cube32-dof3", "cube48-dof3", "beam129x9x9-dof3", "cube16-dof6"),
}


def system_named(name: str, device: Device) -> System:
    """Return the cantilever of a name such as ``cube128-dof3`` or ``beam512x32x32-dof3``."""
    found = re.fullmatch(r"(?:cube(\d+)|beam(\d+)x(\d+)x(\d+))-dof([136])", name)
    if found is None:
        raise SystemExit(f"no matrix is called {name}")
    side, *sides, dof = found.groups()
    nodes = (int(side),) * 3 if side else tuple(int(extent) for extent in sides)
    return System(name, nodes, device, dof=int(dof))


class Solves:
    """Solves of one system."""

    def __init__(self, system: System) -> None:
        self.system, self.device, self.b = system, system.device, system.load()

    def with_coarse_level(self, A: Operator) -> dict[str, Any]:
        """Set up and solve twice, and return the figures of the second time."""
        beam = self.system.beam
        where = {"coordinates": beam.mesh.coordinates(), "aggregates": beam.mesh.node_counts}
        make = partial(smoothed_aggregation, A, **where, block_size=beam.dof)
        for _ in range(2):
            before = getattr(A, "sweeps", 0)
            setup_seconds, M = seconds_of(self.device, make)
            setup_sweeps = getattr(A, "sweeps", 0) - before
            solve = partial(cg, A, self.b, M=M, rtol=RTOL)
            seconds, result = seconds_of(self.device, solve)
        samples = [seconds, *(seconds_of(self.device, solve)[0] for _ in range(2))]
        level = M.level
        return {
            "samples": samples, "setup_seconds": setup_seconds, "iterations": result.iterations, "sweeps": result.sweeps,
            "setup_sweeps": setup_sweeps, "true_residual": result.true_residual, "coarse_unknowns": level.T.unknowns,
            "bytes_streamed": result.bytes_streamed,
        }  # fmt: skip

    def in_memory(self, limit: float, peers: bool) -> dict[str, Any]:
        """The matrix in memory."""
        A = self.system.matrix("symmetric_bsr").to_device(self.device)
        found = self.with_coarse_level(A)
        others, iterations = self._peers(A) if peers else ({}, {})
        found["peer_iterations"] = iterations
        products = found["iterations"] * 14
        return self._entry("memory", found, others, products * A.nbytes / limit, products * A.nbytes)

    def _peers(self, A: Operator) -> tuple[dict[str, float], dict[str, int]]:
        """Return the seconds and the iterations of other ways to solve in memory."""
        found, iterations = {}, {}
        block = self.system.beam.dof
        for name, M in (("block_jacobi", block_jacobi(A, block)), ("chebyshev", chebyshev(A, 25, block_size=block))):
            cg(A, self.b, M=M, maxiter=5)
            found[name], result = seconds_of(self.device, partial(cg, A, self.b, M=M, rtol=RTOL))
            iterations[name] = result.iterations
            print(f"  {name}: {result.iterations} iterations, {found[name]:.3f} s", flush=True)
        peer = Peer(self.system.matrix("csr").to_csr(), self.device)
        found[peer.name], _ = seconds_of(self.device, partial(peer.solve, self.b, 20_000, RTOL))
        return found, iterations

    def streamed(self, rates: LinkRates, link: float, memory: dict[str, Any]) -> dict[str, Any]:
        """The matrix streamed, with a quarter of the storage of BSR."""
        system = self.system
        plan = system.plan_for(preconditioner_spec("smoothed_aggregation", block_size=system.beam.dof), rates)
        print(plan.explain(), flush=True)
        with system.streamed(plan) as A:
            found = self.with_coarse_level(A)
            found["peak_budget_bytes"] = A.budget.peak_nbytes
        found |= {"format": plan.index.format_name, "budget_bytes": system.budget, "matrix_bytes": plan.index.nbytes,
                  "slots": plan.slots, "products_a_sweep": plan.powers_per_sweep}  # fmt: skip
        moved = found["bytes_streamed"]
        return self._entry("streamed", found, {"memory": memory["seconds"], **memory["peers"]}, moved / link, moved)

    def _entry(
        self, way: str, found: dict[str, Any], peers: dict[str, float], floor: float, nbytes: int
    ) -> dict[str, Any]:
        samples = found.pop("samples")
        entry = record(
            f"coarse_level/{way}/{self.system.name}", samples, floor=floor, nbytes=nbytes, peers=peers, **found
        )
        told(entry, f"{found['iterations']} iterations, set-up {found['setup_seconds']:.3f} s, solve")
        return entry


def main() -> None:
    """Measure, print and write the JSON after every matrix."""
    parser = argument_parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--matrix", action="append", help="such as cube128-dof3; several can be given")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--no-streamed", action="store_true")
    arguments = parser.parse_args()
    device = Device.parse(arguments.device)
    records: list[dict[str, Any]] = []
    with device.current():
        rates = machine_rates(device, Path.cwd(), fresh=True)
        link = measure_link(device) if device.kind == "cuda" else rates.link
        limits = {"link_GBps": link / 1e9, "read_GBps": rates.memory / 1e9}
        for name in arguments.matrix or MATRICES[device.kind]:
            solves = Solves(system_named(name, device))
            records.append(solves.in_memory(rates.memory, not arguments.no_peers))
            if not arguments.no_streamed:
                records.append(solves.streamed(rates, link, records[-1]))
            write("coarse_level", arguments, limits, records)
            del solves
            if device.kind == "cuda":
                device.xp.get_default_memory_pool().free_all_blocks()


if __name__ == "__main__":
    main()
