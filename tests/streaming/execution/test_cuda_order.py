"""What a recorded sweep leaves unordered may run in any order: checked on every pair, without a GPU.

Streams and events are played by stand-ins that keep, of everything issued, the set of all that has ended before it begins.
"""

import itertools
from types import SimpleNamespace

import pytest

from penstock.streaming.execution import cuda as cuda_executor
from penstock.streaming.execution.cuda import CudaExecutor
from penstock.streaming.planning.schedule import Copy, Schedule

SUBDIVISIONS, SLOTS = 14, 6


class Stream:
    current = None

    def __init__(self, non_blocking=True):
        self.before = frozenset()
        self.ptr = self

    def wait_event(self, event):
        self.before |= event.before

    def issue(self, what):
        """Return all that has ended when ``what`` begins."""
        before = self.before
        self.before = before | {what}
        return before

    def __enter__(self):
        self.outer, Stream.current = Stream.current, self

    def __exit__(self, *exception):
        Stream.current = self.outer


class Event:
    def record(self, stream):
        self.before = stream.before


class Lent:
    """A store whose pieces say which subdivision they belong to by their address."""

    def segments(self, number, part):
        yield 0, SimpleNamespace(ctypes=SimpleNamespace(data=number), nbytes=1)


class Recorder(CudaExecutor):
    """Plays the parts of a sweep, one after the other, and notes what was issued and what had ended before."""

    def __init__(self, link_binds, host_computes):
        runtime = SimpleNamespace(memcpyAsync=self.copy)
        cuda = SimpleNamespace(Stream=Stream, get_current_stream=lambda: Stream.current, runtime=runtime)
        self._cupy, self._copy_stream, self._staging = SimpleNamespace(cuda=cuda), Stream(), None
        self._link_binds, self._host_computes = link_binds, host_computes
        self._direct, self._made, self._completed, self._incomplete = Lent(), None, None, set()
        self._part, self.timeline = "whole", None
        self.slots = [SimpleNamespace(data=SimpleNamespace(ptr=slot)) for slot in range(SLOTS)]
        self._slabs = SimpleNamespace(slab=lambda step, residents: None)
        self.issued = {}

    def note(self, kind, subdivision, detail, stream):
        what = (kind, subdivision, detail)
        self.issued[what] = stream.issue(what)

    def copy(self, slot, subdivision, nbytes, kind, stream):
        self.note("copy", subdivision, slot, stream)

    def run(self, steps):
        parts = self._parts(steps)
        with Stream():
            for part, lanes in parts:
                self._issue_in_branches(
                    part, {}, lambda number, slab, stage: self.note("compute", number, stage, Stream.current), lanes
                )
        return parts


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    monkeypatch.setattr(cuda_executor, "_new_events", lambda count: [Event() for _ in range(count)])


@pytest.mark.parametrize(
    ("link_binds", "host_computes", "count"), [(False, False, 1), (True, False, 3), (True, True, 1)]
)
@pytest.mark.parametrize("sweep_order", ["alternate", "restart"])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(("stages", "reach"), [(1, 1), (3, 1), (5, 1), (3, 2)])
@pytest.mark.parametrize("resident", [frozenset(), frozenset({0, 4, 9}), frozenset({5, 6, 13})])
def test_whatever_is_unordered_touches_different_rows(
    link_binds, host_computes, count, sweep_order, number, stages, reach, resident
):
    schedule = Schedule(SUBDIVISIONS, resident, SLOTS, sweeps=sweep_order)
    recorder = Recorder(link_binds, host_computes)
    slots = {step.subdivision: step.slot for step in schedule.prologue(number)}

    parts = recorder.run(schedule.sweep(number, stages, reach))

    assert sum(len(part) for part, _ in parts) == len(schedule.sweep(number, stages, reach))
    assert len(parts) == count
    assert not host_computes or [lanes for _, lanes in parts] == [1]  # several would make the host wait
    computed = [what for what in recorder.issued if what[0] == "compute"]
    assert len(computed) == SUBDIVISIONS * stages
    copied = {subdivision: ("copy", subdivision, slot) for kind, subdivision, slot in recorder.issued if kind == "copy"}
    for what, before in recorder.issued.items():
        kind, subdivision, detail = what
        near = range(max(0, subdivision - reach), min(SUBDIVISIONS, subdivision + reach + 1))
        if kind == "copy":  # the last one in its slot has been read by all stages
            for other in (other for other, slot in slots.items() if slot == detail):
                assert {("compute", other, stage) for stage in range(stages)} <= before
            slots = {other: slot for other, slot in slots.items() if slot != detail} | {subdivision: detail}
            continue
        assert subdivision not in copied or copied[subdivision] in before
        assert detail == 0 or {("compute", other, detail - 1) for other in near} <= before
    for one, other in itertools.combinations(computed, 2):
        if one not in recorder.issued[other] and other not in recorder.issued[one]:
            assert abs(one[1] - other[1]) > reach  # half a matrix adds to the rows of those below, too


@pytest.mark.parametrize("sweep_order", ["alternate", "restart"])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(("stages", "reach"), [(1, 1), (3, 1), (3, 2)])
@pytest.mark.parametrize("link_binds", [False, True])
def test_what_arrives_is_completed_once_before_it_is_used_and_one_after_the_other(
    link_binds, sweep_order, number, stages, reach
):
    schedule = Schedule(SUBDIVISIONS, frozenset({5}), SLOTS, sweeps=sweep_order)
    recorder, completed = Recorder(link_binds, False), []

    def complete(subdivision, buffer, part, scratch):
        completed.append(subdivision)
        recorder.note("complete", subdivision, len(completed), Stream.current)

    recorder._completed, recorder._scratch = SimpleNamespace(complete=complete), None
    steps = schedule.sweep(number, stages, reach)

    assert [lanes for _, lanes in recorder.run(steps)] == [1]
    copied = [subdivision for kind, subdivision, _ in recorder.issued if kind == "copy"]
    assert copied
    assert completed == copied
    assert not recorder._incomplete
    for what, before in recorder.issued.items():
        kind, subdivision, detail = what
        if kind == "complete":
            assert any(of[:2] == ("copy", subdivision) for of in before)
            assert {("complete", completed[place - 1], place) for place in range(1, detail)} <= before
        elif kind == "compute" and subdivision in copied:
            assert any(of[:2] == ("complete", subdivision) for of in before)
    # The copies do not wait for what is completed beside them.
    waits = [
        ("complete", completed[-2], len(completed) - 1) in recorder.issued[("copy", *of)] for of in _last_copies(steps)
    ]
    assert not any(waits)


def _last_copies(steps):
    return [(step.subdivision, step.slot) for step in steps if isinstance(step, Copy)][-1:]
