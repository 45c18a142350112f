"""A coarse level: iterations, sweeps and seconds of whole solves, in memory and streamed, against what there was.

    python benchmarks/coarse_level.py h200 --device cuda
    python benchmarks/coarse_level.py h200 --device cuda --matrix cube64-dof3 --matrix cube128-dof3-shuffled

Cantilevers of random stiffness (lognormal, sigma 0.5) under a shear load, to a true relative residual of 1e-8. In memory half of
the matrix is stored; streamed, the matrix storage has a quarter of the BSR matrix. ``seconds`` is the solve, ``setup_seconds``
making the preconditioner, both the second time, when kernels have been compiled. Peers, in memory: CG with block Jacobi and with
a Chebyshev polynomial, and what a user would pick instead; on a CPU also algebraic multigrid (``amg``), with ``cpu_seconds``
of set-up and solve together, summed over threads. ``-jumps``: 30 % of the elements are 1000 times as stiff. ``-shuffled``: the
nodes in random order, the aggregates found in the graph of the matrix; streamed, the rows are put in the order of levels.
``k32``: 32 samples of a random load by ``block_cg``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from amg_peers import amg_figures
from peer import Peer, seconds_of
from record import argument_parser, printed, record, write
from systems import Reordered, System

from penstock.experiments import Experiment
from penstock.experiments.cantilever.loads import right_hand_sides
from penstock.fem import TwoPhaseMaterial
from penstock.solvers import block_cg, block_jacobi, cg, chebyshev, jacobi, preconditioner_spec
from penstock.spmv import Array, Device, Operator
from penstock.streaming import LinkRates, StreamedMatrix
from penstock.streaming.measurement.probes import measure_link
from penstock.streaming.measurement.rates import machine_rates

RTOL = 1e-8
SAMPLES = 32
WITH_SAMPLES = ("cube128-dof3", "cube48-dof3")
# Whose peers would take most of the time: thousands of iterations, or a conversion of billions of entries on the host.
WITHOUT_PEERS = ("cube192-dof3", "cube128-dof3-shuffled")
MATRICES = {
    "cuda": (
        "cube32-dof3",
        "cube64-dof3",
        "cube128-dof3",
        "beam512x32x32-dof3",
        "cube104-dof6",
        "cube256-dof1",
        "cube128-dof3-shuffled",
    ),
    "cpu": (
        "cube32-dof3",
        "cube48-dof3",
        "beam129x9x9-dof3",
        "cube16-dof6",
        "cube40-dof3",
        "cube24-dof3-jumps",
    ),
}


def system_named(name: str, device: Device, *, streamed: bool = False) -> System:
    """Return the cantilever of a name such as ``cube128-dof3`` or ``beam512x32x32-dof3``."""
    found = re.fullmatch(r"(?:cube(\d+)|beam(\d+)x(\d+)x(\d+))-dof([136])(-shuffled|-jumps)?", name)
    if found is None:
        raise SystemExit(f"no matrix is called {name}")
    side, *sides, dof, special = found.groups()
    nodes = (int(side),) * 3 if side else tuple(int(extent) for extent in sides)
    if special == "-shuffled":
        return Reordered(name, nodes, device, levels=streamed)
    material = TwoPhaseMaterial(contrast=1000.0, fraction=0.3) if special else None
    return System(name, nodes, device, dof=int(dof), material=material)


class Solves:
    """Solves of one system."""

    def __init__(self, system: System) -> None:
        self.system, self.device, self.b = system, system.device, system.load()
        self._samples_of_load: Array | None = None
        self._spec = preconditioner_spec("smoothed_aggregation", block_size=system.beam.dof, **system.place())

    def with_coarse_level(self, A: Operator) -> dict[str, Any]:
        """Set up and solve twice, and return the figures of the second time."""
        make = self._maker(A)
        for _ in range(2):
            before, cpu = getattr(A, "sweeps", 0), time.process_time()
            setup_seconds, M = seconds_of(self.device, make)
            setup_sweeps = getattr(A, "sweeps", 0) - before
            solve = partial(cg, A, self.b, M=M, rtol=RTOL)
            seconds, result = seconds_of(self.device, solve)
            cpu = time.process_time() - cpu
        samples = [seconds, *(seconds_of(self.device, solve)[0] for _ in range(2))]
        level = M.level
        return {
            "samples": samples, "setup_seconds": setup_seconds, "iterations": result.iterations, "sweeps": result.sweeps,
            "setup_sweeps": setup_sweeps, "true_residual": result.true_residual, "coarse_unknowns": level.T.unknowns,
            "degree": M.degree, "transfer_bytes": level.T.nbytes,
            "bytes_streamed": result.bytes_streamed, "cpu_seconds": cpu,
        }  # fmt: skip

    def _maker(self, A: Operator) -> Callable[[], Any]:
        """Return what makes the preconditioner, of the degree of the plan if A is streamed."""
        spec = self._spec.with_products(A.plan.workload.degree) if isinstance(A, StreamedMatrix) else self._spec
        return partial(spec.build, A)

    def in_memory(self, limit: float, peers: bool) -> dict[str, Any]:
        """The matrix in memory."""
        # Half of a shuffled matrix would add to rows all over the vector.
        A = self.system.matrix("bsr" if isinstance(self.system, Reordered) else "symmetric_bsr").to_device(self.device)
        found = self.with_coarse_level(A)
        others, iterations = self._peers(A) if peers else ({}, {})
        found["peer_iterations"] = iterations
        if peers and self.device.kind == "cpu":
            system = self.system
            matrix, modes = system.matrix("csr").to_csr(), system.beam.rigid_body_modes()
            amg = list(amg_figures(matrix, modes, self.b, system.beam.dof, RTOL))
            others |= {peer.name: peer.seconds for peer in amg}
            found["amg"] = {peer.name: asdict(peer) for peer in amg}
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
        plan = system.plan_for(self._spec, rates)
        print(plan.explain(), flush=True)
        with system.streamed(plan) as A:
            found = self.with_coarse_level(A)
            found["peak_budget_bytes"] = A.budget.peak_nbytes
        found |= {"format": plan.index.format_name, "budget_bytes": system.budget, "matrix_bytes": plan.index.nbytes,
                  "slots": plan.slots, "products_a_sweep": plan.powers_per_sweep}  # fmt: skip
        moved = found["bytes_streamed"]
        return self._entry("streamed", found, {"memory": memory["seconds"], **memory["peers"]}, moved / link, moved)

    def samples_in_memory(self, limit: float) -> dict[str, Any]:
        """Samples of a random load, with the matrix in memory; the peer is block CG without a coarse level."""
        A = self.system.matrix("sliced_bsr").to_device(self.device)  # its products with blocks are the fastest
        found = self._samples(A)
        floor = 14 * found["iterations"] * (A.nbytes + 2 * SAMPLES * self.b.nbytes)
        return self._entry("memory", found, found.pop("peers"), floor / limit, floor, f"/k{SAMPLES}")

    def samples_streamed(self, rates: LinkRates, link: float) -> dict[str, Any]:
        """The same with a quarter of the storage of BSR."""
        system = self.system
        plan = system.plan_for(self._spec, rates, SAMPLES)
        with system.streamed(plan) as A:
            found = self._samples(A, peer=False)
        with system.streamed(system.plan_for(preconditioner_spec("jacobi"), rates, SAMPLES)) as A:
            block_cg(A, self._loads(), M=jacobi(A), maxiter=2)
            peers = self._block_peer(A)
        found |= {"format": plan.index.format_name, "budget_bytes": system.budget, "slots": plan.slots}
        moved, peers = found["bytes_streamed"], {**found.pop("peers"), **peers}
        return self._entry("streamed", found, peers, moved / link, moved, f"/k{SAMPLES}")

    def _loads(self) -> Array:
        if self._samples_of_load is None:
            beam = self.system.beam
            model = {"nodes": list(beam.mesh.node_counts), "dof": beam.dof}
            experiment = Experiment.model_validate({"model": model, "load": {"samples": SAMPLES}})
            self._samples_of_load = self.device.asarray(right_hand_sides(experiment, beam))
        return self._samples_of_load

    def _block_peer(self, A: Operator) -> dict[str, float]:
        seconds, result = seconds_of(self.device, partial(block_cg, A, self._loads(), M=jacobi(A), rtol=RTOL))
        assert result.converged, result.columns[0].message
        print(f"  block_cg with Jacobi: {result.iterations} iterations, {seconds:.2f} s", flush=True)
        return {"block_cg_jacobi": seconds}

    def _samples(self, A: Operator, *, peer: bool = True) -> dict[str, Any]:
        """Solve all samples together."""
        setup_seconds, M = seconds_of(self.device, self._maker(A))
        samples = []
        for _ in range(3):
            seconds, result = seconds_of(self.device, partial(block_cg, A, self._loads(), M=M, rtol=RTOL))
            samples.append(seconds)
        assert result.converged, result.columns[0].message
        return {
            "samples": samples[1:], "setup_seconds": setup_seconds, "iterations": result.iterations, "sweeps": result.sweeps,
            "true_residual": max(column.true_residual for column in result.columns),
            "bytes_streamed": result.bytes_streamed, "peers": self._block_peer(A) if peer else {},
        }  # fmt: skip

    def _entry(
        self, way: str, found: dict[str, Any], peers: dict[str, float], floor: float, nbytes: int, more: str = ""
    ) -> dict[str, Any]:
        samples = found.pop("samples")
        entry = record(
            f"coarse_level/{way}/{self.system.name}{more}", samples, floor=floor, nbytes=nbytes, peers=peers, **found
        )
        printed(entry, f"{found['iterations']} iterations, set-up {found['setup_seconds']:.3f} s, solve")
        return entry


def main() -> None:
    """Measure, print and write the JSON after every matrix."""
    parser = argument_parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--matrix", action="append", help="such as cube128-dof3; several can be given")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--no-streamed", action="store_true")
    parser.add_argument("--no-samples", action="store_true")
    arguments = parser.parse_args()
    device = Device.parse(arguments.device)
    records: list[dict[str, Any]] = []
    with device.current():
        rates = machine_rates(device, Path.cwd(), fresh=True)
        link = measure_link(device) if device.kind == "cuda" else rates.link
        limits = {"link_GBps": link / 1e9, "read_GBps": rates.memory / 1e9}
        for name in arguments.matrix or MATRICES[device.kind]:
            solves = Solves(system_named(name, device))
            records.append(solves.in_memory(rates.memory, not (arguments.no_peers or name in WITHOUT_PEERS)))
            if not arguments.no_streamed:
                if name.endswith("-shuffled"):
                    solves = Solves(system_named(name, device, streamed=True))
                records.append(solves.streamed(rates, link, records[-1]))
            if name in WITH_SAMPLES and not arguments.no_samples:
                records += [solves.samples_in_memory(rates.memory), solves.samples_streamed(rates, link)]
            write("coarse_level", arguments, limits, records)
            del solves
            if device.kind == "cuda":
                device.xp.get_default_memory_pool().free_all_blocks()


if __name__ == "__main__":
    main()
