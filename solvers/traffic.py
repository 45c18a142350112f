"""What a solve has moved: counters of a streamed matrix, read from a start on."""

from __future__ import annotations

from penstock.spmv import CountsTraffic, Operator

__all__ = ["Traffic"]


class Traffic:
    """What a matrix has moved since this was made; a resident one moves nothing."""

    def __init__(self, A: Operator) -> None:
        self._streamed: CountsTraffic | None = A if isinstance(A, CountsTraffic) else None
        of = self._streamed
        self._sweeps, self._nbytes = (0, 0) if of is None else (of.sweeps, of.bytes_streamed)

    @property
    def bytes_streamed(self) -> int:
        """Bytes moved."""
        return 0 if self._streamed is None else self._streamed.bytes_streamed - self._nbytes

    def sweeps(self, products: int) -> int:
        """Return the passes over the matrix; over a resident one as many as products were made."""
        return products if self._streamed is None else self._streamed.sweeps - self._sweeps
