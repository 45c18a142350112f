"""Times of transfers and computations: recorded while a matrix was swept, or foretold from a schedule."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from penstock.streaming.schedule import Compute, Copy, Release, Step

__all__ = ["Span", "SpanKind", "Timeline", "foretell"]

#: ``read`` is from disk into page-locked memory, ``transfer`` into a slot, ``compute`` the products with a subdivision.
SpanKind = Literal["read", "transfer", "compute"]


@dataclass(frozen=True)
class Span:
    """One read, transfer or computation, in seconds from the start of the recording."""

    kind: SpanKind
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

    def add(self, kind: SpanKind, subdivision: int, slot: int | None, start: float, stop: float) -> None:
        """Add a span given by the clock."""
        if start >= self.origin:
            self.spans.append(Span(kind, subdivision, slot, start - self.origin, stop - self.origin))

    def seconds(self, kind: SpanKind) -> float:
        """Return the time that spans of one kind took together."""
        return sum(span.stop - span.start for span in self.spans if span.kind == kind)

    def last(self, kind: SpanKind) -> float:
        """Return when the last span of a kind ended."""
        return max(span.stop for span in self.spans if span.kind == kind)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the spans as plain JSON values."""
        return [asdict(span) for span in self.spans]

    @classmethod
    def from_json(cls, data: list[dict[str, Any]]) -> Timeline:
        """Read what :meth:`to_json` wrote."""
        return cls([Span(**entry) for entry in data])

    def to_chrome_trace(self) -> str:
        """Return the recording as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

        One track a kind of span; times in microseconds, as the format has them.
        """
        tracks = {kind: number for number, kind in enumerate(("read", "transfer", "compute"))}
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": kind}}
            for kind, number in tracks.items()
        ]
        for span in self.spans:
            events.append(
                {
                    "ph": "X",
                    "name": f"{span.kind} {span.subdivision}",
                    "pid": 0,
                    "tid": tracks[span.kind],
                    "ts": 1e6 * span.start,
                    "dur": 1e6 * (span.stop - span.start),
                    "args": {"subdivision": span.subdivision, "slot": span.slot},
                }
            )
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def foretell(
    steps: Iterable[Step],
    transfer_seconds: Callable[[int], float],
    compute_seconds: Callable[[int], float],
    *,
    overlap: bool,
) -> Timeline:
    """Play a schedule in time, on a link and a processor that do one thing each at a time.

    Parameters
    ----------
    steps : iterable of Step
        A run without hazards.
    transfer_seconds, compute_seconds : callable
        Time that a subdivision takes.
    overlap : bool
        False: a transfer waits for all computations issued before it.

    Returns
    -------
    Timeline
    """
    timeline = Timeline()
    link = processor = 0.0  # when each is free
    arrived: dict[int, float] = {}
    released: dict[int, float] = {}
    for step in steps:
        match step:
            case Copy(subdivision, slot):
                start = max(link, released.get(slot, 0.0), 0.0 if overlap else processor)
                link = arrived[slot] = start + transfer_seconds(subdivision)
                timeline.add("transfer", subdivision, slot, start, link)
            case Compute(subdivision, slot):
                start = max(processor, 0.0 if slot is None else arrived[slot])
                processor = start + compute_seconds(subdivision)
                timeline.add("compute", subdivision, slot, start, processor)
            case Release(slot):
                released[slot] = processor
    return timeline
