"""The products of a coarse matrix by blocks: T'AT, the smoothed prolongator P = (I - w D^-1 A) T, and P'(AP).

The nodes of a cube have 3 unknowns, aggregates are boxes of about 3 x 3 x 3 nodes with the 6 rigid motions. Patterns are known,
as for a matrix whose values change; ``pattern_seconds`` is the search for them. The floor moves every factor once, and A P both
ways; ``floor_without_image_seconds`` leaves A P out, as if it never left the chip.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
from peer import seconds_of
from record import printed, record
from systems import System

from penstock.solvers.amg.boxes import box_aggregates
from penstock.solvers.amg.modes import rigid_body_modes
from penstock.solvers.amg.tentative import StoredTentative
from penstock.solvers.preconditioners import block_jacobi
from penstock.spmv import Array, Device
from penstock.spmv.compilation.table import find_kernel
from penstock.spmv.products.block_products import product_of_pattern, smoothed_rows
from penstock.spmv.products.block_rows import BlockRows, as_csr

_CALLS, _EDGE, _FACTOR = 7, 128, 0.4


class _Product:
    """A product whose pattern is known, its seconds and those of the search for the pattern."""

    def __init__(
        self,
        A: BlockRows,
        B: BlockRows,
        columns: int,
        finish: Callable[[BlockRows], BlockRows] = lambda rows: rows,
    ) -> None:
        self.device = A.device
        search = lambda: find_kernel("block_rows", "pattern", A.device.kind)(A, B, columns)  # noqa: E731
        pattern = search()
        self.pattern_seconds, pattern = seconds_of(self.device, search)
        self._form: Callable[[], BlockRows] = lambda: finish(product_of_pattern(A, B, columns, pattern))
        self.rows = self._form()

    def samples(self) -> list[float]:
        """Return the seconds of some products."""
        return [seconds_of(self.device, self._form)[0] for _ in range(_CALLS)]


def _nbytes(*parts: BlockRows) -> int:
    return sum(int(part.offsets.nbytes + part.columns.nbytes + part.blocks.nbytes) for part in parts)


def _error(device: Device, unknowns: int, found: Callable[[Array], Array], expected: Callable[[Array], Array]) -> float:
    v = device.asarray(np.random.default_rng(0).normal(size=unknowns))
    wanted = expected(v)
    return float(abs(found(v) - wanted).max() / abs(wanted).max())


def block_galerkin(device: Device, bandwidth: float) -> list[dict[str, Any]]:
    """Return the records ``galerkin/<TAT|P|PAP>/cube128-dof3``."""
    system = System(f"cube{_EDGE}", (_EDGE,) * 3, Device("cpu"))
    matrix = system.make("bsr").to_device(device)
    diagonal = block_jacobi(matrix, 3)
    nodes = matrix.shape[0] // 3
    arrays = matrix.arrays()
    A = BlockRows(0, arrays["row_offsets"].astype(np.int64), arrays["column_indices"], matrix.values)
    modes = rigid_body_modes(device.asarray(system.beam.mesh.coordinates()), 3)
    aggregates = box_aggregates((_EDGE,) * 3, 3)
    T = StoredTentative(modes, device.xp.ones(matrix.shape[0], dtype=bool), aggregates, 3, device)
    own, coarse, unknowns = T.rows(0, nodes), T.aggregates.count, T.unknowns
    records = []

    def tell(name: str, factors: list[_Product], nbytes: int, image: int, error: float) -> None:
        parts = [factor.samples() for factor in factors]
        samples = [sum(seconds) for seconds in zip(*parts, strict=True)]
        entry = record(
            f"galerkin/{name}/cube{_EDGE}-dof3",
            samples,
            floor=(nbytes + 2 * image) / bandwidth,
            nbytes=nbytes + 2 * image,
            peers={},
            floor_without_image_seconds=nbytes / bandwidth,
            parts_seconds=[statistics.median(one) for one in parts],
            pattern_seconds=sum(factor.pattern_seconds for factor in factors),
            error=error,
        )
        printed(entry, f"{entry['seconds'] / entry['floor_seconds']:.2f} floors, error {error:.0e},")
        records.append(entry)

    csr_T = as_csr(own, coarse)
    image = _Product(A, own, coarse)
    TAT = _Product(own.transposed(coarse), image.rows, coarse)
    csr = as_csr(TAT.rows, coarse)
    expected = lambda v: as_csr(own.transposed(coarse), nodes) @ (matrix @ (csr_T @ v))  # noqa: E731
    error = _error(device, unknowns, lambda v: csr @ v, expected)
    tell("TAT", [image, TAT], _nbytes(A, own, own, TAT.rows), _nbytes(image.rows), error)
    del image, TAT, csr

    P = _Product(A, own, coarse, lambda rows: smoothed_rows(rows, own, diagonal.blocks, _FACTOR))
    csr_P = as_csr(P.rows, coarse)
    smooth = lambda v: csr_T @ v - _FACTOR * (diagonal @ (matrix @ (csr_T @ v)))  # noqa: E731
    tell("P", [P], _nbytes(A, own, P.rows), 0, _error(device, unknowns, lambda v: csr_P @ v, smooth))

    prolongator = P.rows
    image, R = _Product(A, prolongator, coarse), prolongator.transposed(coarse)
    PAP = _Product(R, image.rows, coarse)
    csr = as_csr(PAP.rows, coarse)
    error = _error(device, unknowns, lambda v: csr @ v, lambda v: as_csr(R, nodes) @ (matrix @ (csr_P @ v)))
    tell("PAP", [image, PAP], _nbytes(A, prolongator, R, PAP.rows), _nbytes(image.rows), error)
    return records
