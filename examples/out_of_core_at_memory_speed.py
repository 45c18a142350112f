"""One system solved four ways, with a quarter of the matrix allowed in memory: what streaming costs, and what it need not cost.

python examples/out_of_core_at_memory_speed.py                            # from a disk, on the CPU
python examples/out_of_core_at_memory_speed.py --device cuda --nodes 128  # from host memory, on a GPU
"""

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from penstock.experiments.reporting.figures import draw_comparison
from penstock.fem import Cantilever, LognormalMaterial
from penstock.solvers import cg, chebyshev, jacobi
from penstock.spmv import Device
from penstock.streaming import (
    Candidate,
    FileStore,
    HostStore,
    Ring,
    StreamedMatrix,
    Workload,
    choose,
    index_of,
    plan_stream,
)
from penstock.streaming.measurement.rates import machine_rates

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--nodes", type=int, default=24, help="nodes a side of the cube")
parser.add_argument("--device", default="cpu")
options = parser.parse_args(sys.argv[1:] if sys.argv[0] == __file__ else [])

device = Device.parse(options.device)
beam = Cantilever(nodes=options.nodes, dof=3, material=LognormalMaterial(sigma=0.5, seed=1))
b = device.asarray(beam.load())
rates = machine_rates(device, Path.cwd())

# A subdivision for every plane of nodes couples with its neighbours only: that lets powers of the matrix share sweeps.
index = index_of(beam.symbolic_slabs(options.nodes, "bsr"), beam.shape)
budget = index.nbytes // 4
one_power = partial(plan_stream, index, budget, rates=rates)
candidates = (Candidate(index, Workload(degree=degree)) for degree in (5, 9, 13, 17, 25, 33))
several_powers = choose(candidates, budget, rates=rates)
print(several_powers.explain(), end="\n\n")

records, histories = [], []


def solve(title, A, M, moves):
    """Solve, and print a line."""
    began = time.perf_counter()
    result = cg(A, b, M=M, rtol=1e-8)
    seconds = time.perf_counter() - began
    sweeps, moved = (result.sweeps if moves else 0), result.bytes_streamed / 1e9
    print(f"{title:<32}{seconds:>8.2f} s{result.iterations:>12}{sweeps:>8}{moved:>10.2f}")
    records.append({"title": title, "seconds": seconds})
    histories.append(result.residual_norms)
    return result


print(f"{'variant':<32}{'solve':>10}{'iterations':>12}{'sweeps':>8}{'GB moved':>10}")
resident = beam.matrix().to_device(device)
solve("in memory", resident, jacobi(resident), moves=False)
del resident

with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # on the disk that was measured
    slabs = beam.subdivisions(options.nodes)
    store = (
        FileStore.create(Path(folder) / "beam", slabs, shape=beam.shape)
        if device.kind == "cpu"
        else HostStore.create(slabs)
    )
    variants = {
        "streamed, no overlap": (one_power(ring=Ring(overlap=False)), jacobi),
        "streamed, overlap": (one_power(), jacobi),
        "streamed, several powers a sweep": (several_powers, partial(chebyshev, degree="auto")),
    }
    with store:
        for title, (plan, preconditioner) in variants.items():
            with StreamedMatrix(store, budget, device=device, plan=plan) as A:
                last = solve(title, A, preconditioner(A), moves=True)

draw_comparison(Path("out_of_core.png"), records, histories)
print(f"\ntrue relative residual  {last.true_residual:.2e}\ndrawn in out_of_core.png")
