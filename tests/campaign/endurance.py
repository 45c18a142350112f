"""Cases that repeat one thing many times, and look for what is left each time: descriptors, threads, memory."""

import gc
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from penstock.fem import Cantilever
from penstock.solvers import cg, chebyshev
from penstock.streaming import FileStore, StreamedMatrix, Workload

__all__ = ["repeated"]

BEAM = Cantilever(nodes=(13, 5, 5), dof=3)
_LEAST_LEAK_NBYTES = 12 << 20


def repeated(seed: int, base: Path) -> str:
    """Make 1,000 sweeps, 500 solves or 200 stores; descriptors and threads are as many afterwards, and memory hardly more."""
    rng = random.Random(seed)
    A, b = BEAM.matrix("bsr"), BEAM.load()
    path = base / f"{seed}-repeated"
    FileStore.create(path, BEAM.subdivisions(6, "bsr")).close()
    store = FileStore(path)
    streamed = StreamedMatrix(store, int(0.7 * store.index.nbytes), workload=Workload(degree=3))

    def sweeps(number: int) -> None:
        streamed @ b

    def solves(number: int) -> None:
        cg(A if number % 2 else streamed, b, M=chebyshev(A if number % 2 else streamed, 3), maxiter=5)

    def stores(number: int) -> None:
        FileStore.create(path / f"{number % 3}", BEAM.subdivisions(6, "bsr"), overwrite=True).close()
        with FileStore(path / f"{number % 3}") as one, StreamedMatrix(one, int(0.7 * one.index.nbytes)) as again:
            again @ b

    kinds: dict[str, tuple[Callable[[int], None], int]] = {
        "sweeps": (sweeps, 1000),
        "solves": (solves, 500),
        "stores": (stores, 200),
    }
    name = rng.choice(sorted(kinds))
    act, count = kinds[name]
    for number in range(count // 10):  # caches and pools are filled
        act(number)
    before = _held()
    for number in range(count):
        act(number)
    after = _held()
    streamed.close()
    store.close()
    assert after[:2] == before[:2], f"descriptors and threads {before[:2]}, then {after[:2]}"
    assert after[2] - before[2] < _LEAST_LEAK_NBYTES, f"{(after[2] - before[2]) >> 20} MiB more memory"
    assert np.isfinite(b).all()
    return f"{count} {name}"


def _held() -> tuple[int, int, int]:
    """Return open descriptors, threads, and bytes of resident memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/fd")), threading.active_count(), pages * os.sysconf("SC_PAGE_SIZE")
