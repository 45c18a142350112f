"""Times are foretold from a schedule as they would be measured, and recorded ones open in other programs."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.streaming import Compute, Copy, Release, Schedule, Span, Timeline, simulate

pure = settings(deadline=None, max_examples=200, database=None)


def run_of(schedule, sweeps=1):
    return schedule.prologue() + [step for number in range(sweeps) for step in schedule.sweep(number)]


def end(steps, transfer, compute, overlap=True):
    return max(span.stop for span in simulate(steps, transfer, compute, overlap=overlap).spans)


def constant(seconds):
    return lambda number: seconds


class TestByHand:
    FOUR = Schedule(4, frozenset(), slots=2, sweeps="restart")

    @pytest.mark.parametrize(
        ("transfer", "compute", "seconds"),
        [
            (2.0, 1.0, 4 * 2.0 + 1.0),  # the link never waits; the last computation is left over
            (1.0, 2.0, 1.0 + 4 * 2.0),  # the processor waits for the first transfer only
            (1.0, 1.0, 5.0),
        ],
    )
    def test_double_buffering_hides_all_but_the_first_or_last_piece(self, transfer, compute, seconds):
        assert end(self.FOUR.sweep(0), constant(transfer), constant(compute)) == seconds

    def test_a_transfer_waits_for_the_release_of_its_slot(self):
        """Of uneven pieces: the third transfer starts when the first computation is over, at 1 + 10."""
        steps = self.FOUR.sweep(0)
        timeline = simulate(steps, constant(1.0), lambda number: 10.0 if number == 0 else 1.0, overlap=True)

        assert [(s.subdivision, s.slot, s.start, s.stop) for s in timeline.spans if s.kind == "transfer"] == [
            (0, 0, 0.0, 1.0), (1, 1, 1.0, 2.0), (2, 0, 11.0, 12.0), (3, 1, 12.0, 13.0),
        ]  # fmt: skip
        assert [(s.subdivision, s.start, s.stop) for s in timeline.spans if s.kind == "compute"] == [
            (0, 1.0, 11.0), (1, 11.0, 12.0), (2, 12.0, 13.0), (3, 13.0, 14.0),
        ]  # fmt: skip

    def test_without_overlap_a_transfer_waits_for_the_computations_before_it(self):
        steps = [Copy(0, 0), Compute(0, 0), Release(0), Compute(2, None), Copy(1, 1), Compute(1, 1), Release(1)]

        spans = simulate(steps, constant(1.0), constant(5.0), overlap=False).spans

        assert [(span.start, span.stop) for span in spans] == [(0, 1), (1, 6), (6, 11), (11, 12), (12, 17)]

    def test_a_resident_subdivision_waits_for_no_transfer(self):
        steps = [Copy(0, 0), Compute(1, None), Compute(0, 0), Release(0)]

        assert end(steps, constant(3.0), constant(2.0)) == 5.0

    def test_a_turn_saves_the_transfers_of_what_the_slots_hold(self):
        turning, going_on = (Schedule(4, frozenset(), 2, sweeps=sweep_order) for sweep_order in ("alternate", "cyclic"))

        assert end(run_of(turning, 2), constant(1.0), constant(0.0)) == 4 + 2
        assert end(run_of(going_on, 2), constant(1.0), constant(0.0)) == 4 + 4 + 2  # two are fetched ahead


@st.composite
def played(draw):
    count = draw(st.integers(1, 8))
    resident = draw(st.frozensets(st.integers(0, count - 1)))
    sweep_order = draw(st.sampled_from(["cyclic", "alternate", "restart"]))
    schedule = Schedule(count, resident, draw(st.integers(1, 4)), draw(st.booleans()), sweep_order)
    times = st.lists(st.integers(0, 9).map(float), min_size=count, max_size=count)
    return schedule, draw(st.integers(1, 3)), draw(times).__getitem__, draw(times).__getitem__


@pure
@given(played())
def test_no_run_is_shorter_than_its_link_or_its_processor_nor_longer_than_both(case):
    schedule, sweeps, transfer, compute = case
    timeline = simulate(run_of(schedule, sweeps), transfer, compute, overlap=schedule.overlap)

    link, processor = timeline.seconds("transfer"), timeline.seconds("compute")
    last = max(span.stop for span in timeline.spans)
    assert max(link, processor) <= last <= link + processor
    assert processor == sweeps * sum(map(compute, range(schedule.subdivisions)))
    assert timeline.last("compute") == last or schedule.overlap
    if not schedule.overlap:
        assert last == link + processor


@pure
@given(played())
def test_nothing_foretold_breaks_the_rules_of_a_link_a_processor_and_slots(case):
    schedule, sweeps, transfer, compute = case
    spans = simulate(run_of(schedule, sweeps), transfer, compute, overlap=schedule.overlap).spans

    for kind in ("transfer", "compute"):
        alone = [span for span in spans if span.kind == kind]
        assert all(before.stop <= after.start for before, after in itertools.pairwise(alone))
    holds, arrived = {}, {}
    for span in spans:
        if span.kind == "transfer":
            holds[span.slot], arrived[span.slot] = span.subdivision, span.stop
        elif span.slot is not None:
            assert holds[span.slot] == span.subdivision
            assert arrived[span.slot] <= span.start


class TestATimeline:
    SPANS = (
        Span("read", 0, None, 0.0, 0.5),
        Span("transfer", 0, 1, 0.5, 0.75),
        Span("compute", 0, 1, 0.75, 2.0),
        Span("compute", 1, None, 2.0, 2.5),
    )

    def test_sums_and_ends_by_kind(self):
        timeline = Timeline(list(self.SPANS))

        assert [timeline.seconds(kind) for kind in ("read", "transfer", "compute")] == [0.5, 0.25, 1.75]
        assert [timeline.last(kind) for kind in ("read", "transfer", "compute")] == [0.5, 0.75, 2.5]

    def test_survives_json(self):
        timeline = Timeline(list(self.SPANS))

        assert Timeline.from_json(json.loads(json.dumps(timeline.to_json()))) == timeline

    def test_is_a_chrome_trace_with_a_named_track_a_kind_in_microseconds(self):
        trace = json.loads(Timeline(list(self.SPANS)).to_chrome_trace())["traceEvents"]

        tracks = {event["tid"]: event["args"]["name"] for event in trace if event["ph"] == "M"}
        complete = [event for event in trace if event["ph"] == "X"]
        assert sorted(tracks.values()) == ["compute", "host", "read", "transfer"]
        assert len(complete) == len(self.SPANS) == len(trace) - len(tracks)
        for event, span in zip(complete, self.SPANS, strict=True):
            assert tracks[event["tid"]] == span.kind
            assert event["name"] == f"{span.kind} {span.subdivision}"
            assert (event["ts"], event["dur"]) == pytest.approx((1e6 * span.start, 1e6 * (span.stop - span.start)))
            assert event["args"] == {"subdivision": span.subdivision, "slot": span.slot}
