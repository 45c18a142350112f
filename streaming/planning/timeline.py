"""Times of transfers and computations, recorded during sweeps or simulated from a schedule."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

#: ``read``: from disk into page-locked memory; ``transfer``: into a slot; ``compute``: the products with a subdivision;
#: ``host``: those that the CPU computes beside a GPU.
SpanKind = Literal["read", "transfer", "compute", "host"]


@dataclass(frozen=True)
class Span:
    """One read, transfer or computation, in seconds from the start of the recording.

    Parameters
    ----------
    kind : {"read", "transfer", "compute", "host"}
        ``read``: from disk into page-locked memory; ``host``: products that the CPU computes beside a GPU.
    subdivision : int
    slot : int or None
        None without a slot.
    start, stop : float
        Seconds.

    Examples
    --------
    >>> from penstock.streaming import Schedule, simulate
    >>> schedule = Schedule(subdivisions=3, resident=frozenset(), slots=2)
    >>> simulate(schedule.prologue(), lambda number: 2.0, lambda number: 1.0, overlap=True).spans[1]
    Span(kind='transfer', subdivision=1, slot=1, start=2.0, stop=4.0)
    """

    kind: SpanKind
    subdivision: int
    slot: int | None
    start: float
    stop: float


@dataclass
class Timeline:
    """Recorded or simulated spans.

    Parameters
    ----------
    spans : list of Span
    origin : float
        Clock at the start of the recording; spans that began earlier are dropped.

    Examples
    --------
    >>> from penstock.streaming import Schedule, simulate
    >>> schedule = Schedule(subdivisions=4, resident=frozenset(), slots=2)
    >>> steps = [*schedule.prologue(), *schedule.sweep(0), *schedule.epilogue(1)]
    >>> timeline = simulate(steps, lambda number: 2.0, lambda number: 1.0, overlap=True)
    >>> timeline.seconds("transfer"), timeline.last("compute")
    (12.0, 9.0)
    """

    spans: list[Span] = field(default_factory=list)
    origin: float = field(default=0.0, compare=False)

    def add(self, kind: SpanKind, subdivision: int, slot: int | None, start: float, stop: float) -> None:
        """Add a span; its times are those of the clock."""
        if start >= self.origin:
            self.spans.append(Span(kind, subdivision, slot, start - self.origin, stop - self.origin))

    def seconds(self, kind: SpanKind) -> float:
        """Return the total time of all spans of one kind."""
        return sum(span.stop - span.start for span in self.spans if span.kind == kind)

    def last(self, kind: SpanKind) -> float:
        """Return the end of the last span of a kind."""
        return max(span.stop for span in self.spans if span.kind == kind)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the spans as plain JSON values."""
        return [asdict(span) for span in self.spans]

    @classmethod
    def from_json(cls, data: list[dict[str, Any]]) -> Timeline:
        """Read what :meth:`to_json` wrote."""
        return cls([Span(**entry) for entry in data])

    def to_chrome_trace(self) -> str:
        """Return the spans as a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing.

        Each kind of span has a track of its own; times are in microseconds, as the format requires.
        """
        tracks = {kind: number for number, kind in enumerate(get_args(SpanKind))}
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
