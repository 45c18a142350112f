"""Cases of processes that fork, threads that solve at once, and stores that are altered while they are open."""

import concurrent.futures
import multiprocessing
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_info

from penstock import solve
from penstock.fem import Cantilever
from penstock.spmv import StoreError
from penstock.streaming import FileStore, StreamedMatrix

__all__ = ["altered_while_open", "forks", "threads"]

BEAM = Cantilever(nodes=(9, 5, 5), dof=3)


def _solution(seed: int) -> bytes:
    b = np.random.default_rng(seed).standard_normal(BEAM.unknowns)
    return solve(BEAM.matrix("csr").to_csr(), b, device="cpu", preconditioner="smoothed_aggregation").x.tobytes()


def forks(seed: int, base: Path) -> str:
    """Fork after a solve, by a pool or by hand, and compute in memory or streamed; the bits are those of the parent."""
    rng = random.Random(seed)
    _solution(seed)
    if rng.random() < 0.3:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map_async(_solution, [seed] * 3).get(timeout=40) == [_solution(seed)] * 3
        return "a pool"
    path = base / f"{seed}-forks"
    with (
        FileStore.create(path, BEAM.subdivisions(6, "bsr")) as store,
        StreamedMatrix(store, rng.choice([2, 3, 9]) * max(store.index.sizes["whole"])) as A,
    ):
        x = np.random.default_rng(seed).standard_normal(BEAM.unknowns)
        work: list[Callable[[], bytes]] = [lambda: (A @ x).tobytes(), lambda: _solution(seed)]
        rng.shuffle(work)
        before = [act() for act in work]
        child = os.fork()
        if not child:
            same = [act() for act in work] == before
            if rng.random() < 0.5:
                A.close()
            os._exit(0 if same else 1)
        assert [act() for act in work] == before, "the parent"
        assert os.waitpid(child, 0)[1] == 0, "the child"
    return "a fork"


def threads(seed: int, base: Path) -> str:
    """Solve at once in some threads; the bits are those of a solve alone, and BLAS has as many threads as before."""
    alone = [_solution(seed + number) for number in range(4)]
    before = _blas_threads()
    with concurrent.futures.ThreadPoolExecutor(random.Random(seed).randint(2, 4)) as pool:
        assert list(pool.map(_solution, range(seed, seed + 4))) == alone
    assert _blas_threads() == before
    return "the same bits"


def _blas_threads() -> list[int]:
    return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]


def altered_while_open(seed: int, base: Path) -> str:
    """Write into a store between two sweeps: the products are those of before, or there is one error."""
    rng, path = random.Random(seed), base / f"{seed}-open"
    name = rng.choice(["csr", "bsr", "sell", "symmetric_bsr", "ell", "coo"])
    shutil.copytree(base / name, path)
    with (
        FileStore(path, verify=rng.choice(["once", "always"])) as store,
        StreamedMatrix(store, 2 * max(store.index.sizes["whole"])) as A,
    ):
        x = np.load(base / "b.npy")
        y = [A @ x for _ in range(2)]
        with open(path / "slabs.bin", "r+b") as file:
            nbytes = file.seek(0, os.SEEK_END)
            for _ in range(rng.choice([1, 5, 50])):
                file.seek(rng.randrange(nbytes))
                file.write(rng.randbytes(rng.choice([1, 8, 4096])))
            file.truncate(rng.choice([nbytes, nbytes, rng.randrange(nbytes)]))
        try:
            for number in range(6):
                assert np.array_equal(A @ x, y[number % 2]), "another product without a word"
        except StoreError:
            return "refused"
    return "as before"
