"""7-point Laplacians of 0.5 to 16 million rows: products, triangular solves by levels and by elements, Galerkin products.

    python benchmarks/laplacians.py h200                      on a GPU, against cuSPARSE and two cores of its host
    python benchmarks/laplacians.py cpu2 --device cpu --edge 32

The three figures of Li, Falgout and Yang's paper on the GPU kernels of hypre, made anew; ``docs/draw_laplacians.py`` draws them.
``spmv`` is a product with a vector. ``forward`` and ``backward`` are the two triangular solves of a Gauss-Seidel relaxation:
``levels`` launches a kernel for every level, or several narrow ones; ``elements`` lets every row wait for those it needs, in the
order of levels. ``RAP`` is the coarse matrix of aggregates of 2 x 2 x 2 nodes, both products, the search for their patterns
included, and for ours the transpose of P. GFLOPS count a multiplication and an addition for every stored entry. The floor moves
matrices and vectors once.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import graphs
import numba
import numpy as np
from cusparse import TriangularPeer
from peer import seconds_of
from products import cupy_csr, prolongator
from record import argument_parser, printed, record, write
from triangular import samples_of

from penstock.solvers import TriangularSolve, galerkin, transpose
from penstock.spmv import CPU, CsrMatrix, Device
from penstock.streaming.measurement.probes import measure_memory

EDGES = (80, 128, 160, 200, 256)
WAYS = {"levels": "levels", "elements": "dataflow"}
_CALLS, _CORES = 3, 2


class Laplacian:
    """The records of one size.

    Parameters
    ----------
    edge : int
    device : Device
    bandwidth : float
        Bytes a second.
    """

    def __init__(self, edge: int, device: Device, bandwidth: float) -> None:
        self.name, self.edge, self.device, self.bandwidth = f"laplace7-{edge}", edge, device, bandwidth
        self.A = graphs.stencil(device, edge, 7)
        self.x = device.asarray(np.random.default_rng(0).normal(size=self.A.shape[0]))
        self.y = device.xp.empty_like(self.x)

    def _samples(self, action: Callable[[], Any], *, captured: bool = False) -> list[float]:
        if self.device.kind == "cuda":
            return samples_of(action, captured=captured)
        action()
        return [seconds_of(self.device, action)[0] for _ in range(_CALLS)]

    def _entry(
        self, name: str, samples: list[float], nbytes: int, entries: int, peers: dict[str, float], **more: Any
    ) -> dict[str, Any]:
        more["gflops"] = 2 * entries / statistics.median(samples) / 1e9
        more["peer_gflops"] = {peer: 2 * entries / seconds / 1e9 for peer, seconds in peers.items()}
        entry = record(
            f"{name}/{self.name}", samples, floor=nbytes / self.bandwidth, nbytes=nbytes, peers=peers, **more
        )
        return printed(entry, f"{more['gflops']:.1f} GFLOPS,")

    def product(self) -> dict[str, Any]:
        """Measure a product with a vector."""
        A, peers = CsrMatrix.from_csr(self.A, strategy="auto"), {}
        samples = self._samples(lambda: A @ self.x)  # a call from Python, as that of the peer
        if self.device.kind == "cuda":
            theirs = cupy_csr(self.A)
            peers["cusparse"] = statistics.median(samples_of(lambda: theirs @ self.x))
        return self._entry("spmv", samples, A.nbytes + 16 * len(self.x), A.nnz, peers)

    def solves(self) -> list[dict[str, Any]]:
        """Measure the forward and the backward solve of a relaxation, both ways."""
        lower, found = graphs.lower_triangle(self.A), []
        upper = transpose(lower)
        assert isinstance(upper, CsrMatrix)
        for direction, triangle in (("forward", lower), ("backward", upper)):
            peers = {}
            if self.device.kind == "cuda" and direction == "forward":
                arrays = (lower.row_offsets.astype(np.int32), lower.column_indices, lower.values)
                with TriangularPeer(*arrays, self.x, self.y) as peer:
                    peer.analyse()
                    peers["cusparse"] = statistics.median(samples_of(peer.solve))
            for way, schedule in WAYS.items():
                options: dict[str, Any] = {"schedule": schedule} if self.device.kind == "cuda" else {}
                solve = TriangularSolve(triangle, lower=direction == "forward", order="levels", **options)
                samples = self._samples(
                    lambda solve=solve: solve.apply(self.x, self.y),
                    captured=solve.capturable,
                )
                name, nbytes = f"gauss_seidel/{direction}/{way}", solve.rows.nbytes + 32 * len(self.x)
                found.append(self._entry(name, samples, nbytes, triangle.nnz, peers, levels=solve.levels))
        return found

    def coarse(self) -> dict[str, Any]:
        """Measure a Galerkin product."""
        P = prolongator(self.A, self.edge)
        form = lambda: galerkin(self.A, P)  # noqa: E731
        C = form()
        samples = [seconds_of(self.device, form)[0] for _ in range(_CALLS)]
        nbytes = self.A.nbytes + 2 * P.nbytes + C.nbytes  # type: ignore[union-attr]
        peers: dict[str, float] = {}
        if self.device.kind == "cuda":
            import cupyx.cusparse as theirs

            A_, P_, R_ = (cupy_csr(M) for M in (self.A, P, transpose(P)))  # type: ignore[arg-type]
            both = lambda: theirs.spgemm(R_, theirs.spgemm(A_, P_))  # noqa: E731
            both()
            peers["cusparse"] = statistics.median([seconds_of(self.device, both)[0] for _ in range(_CALLS)])
            A, P = self.A.to_device(CPU), P.to_device(CPU)
            threads = numba.get_num_threads()
            numba.set_num_threads(min(_CORES, threads))
            galerkin(A, P)
            peers[f"{_CORES} cores"] = seconds_of(CPU, lambda: galerkin(A, P))[0]
            numba.set_num_threads(threads)
        entry = record(f"galerkin/RAP/{self.name}", samples, floor=nbytes / self.bandwidth, nbytes=nbytes, peers=peers)
        return printed(entry, f"{self.A.shape[0]} rows,")


def main() -> None:
    """Measure, print and write the JSON."""
    parser = argument_parser(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--edge", type=int, action="append", help="nodes a side; several can be given")
    arguments = parser.parse_args()
    device = Device.parse(arguments.device)
    bandwidth, records = measure_memory(device, 4 << 30), []
    for edge in arguments.edge or EDGES:
        size = Laplacian(edge, device, bandwidth)
        records += [size.product(), *size.solves(), size.coarse()]
        write("laplacians", arguments, {"read_GBps": bandwidth / 1e9}, records)  # what is measured stays measured


if __name__ == "__main__":
    main()
