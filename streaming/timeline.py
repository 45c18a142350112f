"""Recorded times of transfers and computations."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__ = ["Span", "Timeline"]


@dataclass(frozen=True)
class Span:
    """One transfer or computation, in seconds from the start of the recording."""

    kind: Literal["transfer", "compute"]
    subdivision: int
    slot: int | None
    start: float
    stop: float


@dataclass
class Timeline:
    """Spans recorded while a streamed matrix was swept.

    Parameters
    ----------
    spans : list of Span
    origin : float
        Clock at the start of the recording; spans that began earlier are left out.
    """

    spans: list[Span] = field(default_factory=list)
    origin: float = field(default=0.0, compare=False)

    def add(
        self, kind: Literal["transfer", "compute"], subdivision: int, slot: int | None, start: float, stop: float
    ) -> None:
        """Add a span given by the clock."""
        if start >= self.origin:
            self.spans.append(Span(kind, subdivision, slot, start - self.origin, stop - self.origin))

    def to_json(self) -> list[dict[str, Any]]:
        """Return the spans as plain JSON values."""
        return [asdict(span) for span in self.spans]

    @classmethod
    def from_json(cls, data: list[dict[str, Any]]) -> Timeline:
        """Read what :meth:`to_json` wrote."""
        return cls([Span(**entry) for entry in data])
