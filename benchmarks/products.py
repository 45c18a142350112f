"""Products of sparse matrices against cuSPARSE, in one run.

    python benchmarks/products.py h200                         all matrices
    python benchmarks/products.py h200 --matrix laplace7-128   one of them

``spgemm/AA`` squares a matrix. ``spgemm/AP`` and ``spgemm/RAP`` are the two products of a coarse matrix R (A P), where P is the
smoothed prolongator of aggregates of 2 x 2 x 2 nodes and R its transpose; ``RAP`` is the second of them. Seconds are medians of
whole calls, the search for the pattern included; ``values_seconds`` is a product whose pattern is known. ``extra_bytes`` is
what a call takes from an empty memory pool beyond its result. The floor reads both factors and writes the result once.
``galerkin/...`` are products of blocks: see block_galerkin.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import graphs
import numpy as np
from block_galerkin import block_galerkin
from peer import seconds_of
from record import argument_parser, printed, record, write

from penstock.solvers import multiply, product_pattern, transpose
from penstock.spmv import CsrMatrix, Device
from penstock.streaming.measurement.probes import measure_memory

_CALLS = 5


def taken_from_pool(device: Device, action: Callable[[], Any]) -> tuple[int, float, Any]:
    """Return the bytes that a call takes from an empty pool, its seconds, and its result."""
    import cupy

    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        seconds, result = seconds_of(device, action)
    return int(pool.total_bytes()), seconds, result


def prolongator(A: CsrMatrix, edge: int) -> CsrMatrix:
    """Return ``(I - 2/3 D^-1 A) T`` for aggregates of 2 x 2 x 2 nodes of a cube."""
    xp, n = A.device.xp, A.shape[0]
    own, half = xp.arange(n), -(-edge // 2)
    axes = (own // edge**2 // 2, own // edge % edge // 2, own % edge // 2)
    aggregate = ((axes[0] * half + axes[1]) * half + axes[2]).astype(np.int32)
    T = graphs.matrix_of(xp.arange(n + 1, dtype=np.int64), aggregate, xp.ones(n), columns=half**3)
    P = multiply(A, T)
    rows = xp.searchsorted(P.row_offsets, xp.arange(P.nnz), side="right") - 1
    values = (P.column_indices == aggregate[rows]) - 2 / 3 / 6 * P.values
    return graphs.matrix_of(P.row_offsets, P.column_indices, values, columns=half**3)


def products(device: Device, chosen: list[str] | None) -> Iterator[tuple[str, CsrMatrix, CsrMatrix]]:
    """Make the factors one pair after another."""
    squares: dict[str, Callable[[], CsrMatrix]] = {
        "laplace27-64": lambda: graphs.stencil(device, 64, 27),
        "laplace27-100": lambda: graphs.stencil(device, 100, 27),
        "powerlaw-60k": lambda: graphs.power_law(device, 60_000, 4),
    }
    for name, make in squares.items():
        if not chosen or name in chosen:
            A = make()
            yield f"AA/{name}", A, A
    for edge in (80, 128, 200, 256):
        name = f"laplace7-{edge}"
        if not chosen or name in chosen:
            A = graphs.stencil(device, edge, 7)
            P = prolongator(A, edge)
            yield f"AP/{name}", A, P
            AP, R = multiply(A, P), transpose(P)
            del A, P
            yield f"RAP/{name}", R, AP
            del AP, R


def cupy_csr(A: CsrMatrix) -> Any:
    """Return a matrix as CuPy's, without a copy of its values."""
    import cupyx.scipy.sparse

    arrays = (A.values, A.column_indices, A.row_offsets.astype(np.int32))
    matrix = cupyx.scipy.sparse.csr_matrix(arrays, shape=A.shape)
    matrix.has_sorted_indices = matrix.has_canonical_format = True
    return matrix


def measured(name: str, A: CsrMatrix, B: CsrMatrix, bandwidth: float) -> dict[str, Any]:
    """Return the record of a product."""
    import cupyx.cusparse

    device = A.device
    v = device.asarray(np.random.default_rng(0).normal(size=B.shape[1]))
    expected = A @ (B @ v)
    multiply(A, B)
    extra, _, C = taken_from_pool(device, lambda: multiply(A, B))
    error = float(abs(C @ v - expected).max() / abs(expected).max())
    nbytes, result = A.nbytes + B.nbytes + C.nbytes, C.nbytes
    entries = C.nnz
    del C
    samples = [seconds_of(device, lambda: multiply(A, B))[0] for _ in range(_CALLS)]
    pattern = product_pattern(A, B)
    values = [seconds_of(device, lambda pattern=pattern: multiply(A, B, pattern=pattern))[0] for _ in range(_CALLS)]
    del pattern
    of_a, of_b = cupy_csr(A), cupy_csr(B)
    peer_extra, peer_first, D = taken_from_pool(device, lambda: cupyx.cusparse.spgemm(of_a, of_b))
    peer_result, peer_entries = 12 * D.nnz + 4 * (D.shape[0] + 1), D.nnz
    del D
    peer = statistics.median([seconds_of(device, lambda: cupyx.cusparse.spgemm(of_a, of_b))[0] for _ in range(_CALLS)])
    more = {
        "extra_bytes": extra - result,
        "peer_extra_bytes": peer_extra - peer_result,
        "peer_first_seconds": peer_first,
    }
    assert entries == peer_entries, (entries, peer_entries)
    entry = record(
        f"spgemm/{name}",
        samples,
        floor=nbytes / bandwidth,
        nbytes=nbytes,
        peers={"cusparse": peer},
        **more,
        values_seconds=statistics.median(values),
        entries=entries,
        error=error,
    )
    memory = f"{more['extra_bytes'] / 1e6:.0f} MB beside the result ({more['peer_extra_bytes'] / 1e6:.0f})"
    return printed(
        entry,
        f"{entries} entries, {memory}, values alone {1e3 * entry['values_seconds']:.2f} ms, error {error:.0e}, it",
    )


def main() -> None:
    """Measure, print and write the JSON."""
    parser = argument_parser(__doc__)
    parser.add_argument("--matrix", action="append", help="only these; cube128-dof3 is that of the products of blocks")
    arguments = parser.parse_args()
    device = Device.parse("cuda")
    bandwidth, records = measure_memory(device, 4 << 30), []
    for name, A, B in products(device, arguments.matrix):
        records.append(measured(name, A, B, bandwidth))
        write("products", arguments, {"read_GBps": bandwidth / 1e9}, records)  # what is measured stays measured
    if not arguments.matrix or "cube128-dof3" in arguments.matrix:
        records += block_galerkin(device, bandwidth)
        write("products", arguments, {"read_GBps": bandwidth / 1e9}, records)


if __name__ == "__main__":
    main()
