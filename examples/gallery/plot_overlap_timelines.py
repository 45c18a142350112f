"""
Transfers and products, overlap off and on
==========================================

A sweep over a matrix on disk: every bar is the transfer of a subdivision, or the products with it. Without overlap they take
turns. With overlap the next subdivision arrives while the one before is multiplied, and the longer of the two bounds the sweep. A
block of 8 vectors makes products long enough to see them.
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from penstock.experiments.reporting.figures import draw_spans
from penstock.fem import Cantilever
from penstock.streaming import FileStore, Ring, StreamedMatrix, Workload

beam = Cantilever(nodes=(40, 20, 20), dof=3)
X = np.random.default_rng(0).standard_normal((beam.unknowns, 8))
timelines, products = {}, []

with (
    tempfile.TemporaryDirectory() as folder,
    FileStore.create(Path(folder) / "beam", beam.subdivisions(8), shape=beam.shape) as store,
):
    for overlap in (False, True):
        ring = Ring(slots=2, overlap=overlap, sweeps="restart")
        with StreamedMatrix(store, store.index.nbytes // 3, ring=ring, workload=Workload(columns=8)) as A:
            A @ X  # reads every subdivision for the first time, and verifies its checksums
            with A.recording() as timeline:
                products.append(A @ X)
            timelines[f"overlap {'on' if overlap else 'off'}"] = timeline

assert np.array_equal(*products)
assert np.array_equal(products[0], beam.matrix() @ X)  # the same bits as in memory

# %%
# Numbers are those of the subdivisions. Both rows share their axis of time.
figure, rows = plt.subplots(2, 1, figsize=(9, 3.6), sharex=True, layout="constrained")
for axes, (title, timeline) in zip(rows, timelines.items(), strict=True):
    draw_spans(axes, timeline)
    axes.set_title(title, loc="left")
rows[-1].set_xlabel("milliseconds")
plt.show()
