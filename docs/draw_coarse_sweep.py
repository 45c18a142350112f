"""Draws docs/coarse_sweep.png: the recorded timeline of one iteration with a coarse level, streamed on a CPU.

python docs/draw_coarse_sweep.py
"""

from collections import Counter
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from penstock.fem import Cantilever, LognormalMaterial
from penstock.solvers import cg, smoothed_aggregation
from penstock.streaming import HostStore, Ring, StreamedMatrix, Workload

PARTS, PRODUCTS = 24, 14
# The first product of each part of the chain, its name and its colour.
CHAIN = {
    0: ("x = p(D A) T (c + e) + y", "#1f6fb2"),
    2: ("r = b - A x", "#c0392b"),
    3: ("m = q(D A) D r", "#e07b28"),
    11: ("u = A m", "#7d5ba6"),
    12: ("s = A p(D A) m", "#3a9a5b"),
}
TRANSFER = "#b9bec7"

beam = Cantilever(nodes=(48, 24, 24), dof=3, material=LognormalMaterial(sigma=0.5, seed=1))
with HostStore.create(beam.subdivisions(PARTS, "bsr")) as store:
    budget, workload = (PRODUCTS + 2) * max(store.index.sizes["whole"]), Workload(degree=PRODUCTS)
    with StreamedMatrix(store, budget, workload=workload, ring=Ring(slots=PRODUCTS + 1)) as A:
        M = smoothed_aggregation(A, coordinates=beam.mesh.coordinates(), aggregates=beam.mesh.node_counts)
        state = cg(A, beam.load(), M=M, rtol=1e-8, maxiter=2).state
        with A.recording() as timeline:
            cg(A, beam.load(), M=M, rtol=1e-8, maxiter=3, state=state)

# A resumed solve repeats the last sweep before it goes on: the iteration is the second one.
seen: Counter[int] = Counter()
figure = Figure(figsize=(7.2, 4.0), layout="constrained")
axes = figure.subplots()
computed = [span for span in timeline.spans if span.kind == "compute"]
begin = sorted(span.start for span in computed)[len(computed) // 2]
for span in timeline.spans:
    if span.kind == "compute":
        stage = seen[span.subdivision] % PRODUCTS
        seen[span.subdivision] += 1
        first = max(start for start in CHAIN if start <= stage)
        color, height = CHAIN[first][1], 0.9
    else:
        color, height = TRANSFER, 0.5
    if span.start >= begin - 0.002:
        axes.barh(
            span.subdivision,
            1e3 * (span.stop - span.start),
            left=1e3 * (span.start - begin),
            height=height,
            color=color,
        )
axes.set(xlabel="ms", ylabel="subdivision", ylim=(PARTS, -1))
handles = [Patch(color=TRANSFER, label="transfer"), *(Patch(color=color, label=name) for name, color in CHAIN.values())]
axes.legend(handles=handles, frameon=False, fontsize=8, ncols=2, loc="best")
figure.savefig(Path(__file__).with_name("coarse_sweep.png"), dpi=150)
