"""A command that is told to end leaves nothing half written."""

import signal

import pytest

from penstock.driver.progress import Reporter
from penstock.experiments.reporting.interrupts import stop_requests
from penstock.fem import Cantilever
from penstock.host.signals import ended_as_interrupted
from penstock.spmv import StoreError
from penstock.streaming import FileStore

SIGNALS = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


@pytest.fixture(params=SIGNALS)
def number(request):
    """A signal that is not ignored, as it is by what nohup starts."""
    number = getattr(signal, request.param)
    before = signal.signal(number, signal.SIG_DFL)
    yield number
    signal.signal(number, before)


def test_while_a_matrix_is_written(number, tmp_path):

    def slabs():
        for count, slab in enumerate(Cantilever(nodes=4, dof=3).subdivisions(4)):
            if count == 2:
                signal.raise_signal(number)
            yield slab

    with pytest.raises(SystemExit) as ended, ended_as_interrupted():
        FileStore.create(tmp_path / "A", slabs())

    assert ended.value.code == 128 + number
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(number) == signal.SIG_DFL


def test_a_signal_that_is_ignored_stays_ignored():
    number = getattr(signal, SIGNALS[-1])
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with ended_as_interrupted():
            signal.raise_signal(number)
    finally:
        signal.signal(number, before)


def ended_by(number, clearing_up):
    """Send a signal to a block whose end clears something up."""
    with ended_as_interrupted():
        try:
            signal.raise_signal(number)
        finally:
            clearing_up()


def test_a_second_signal_does_not_disturb_what_the_first_began(number):
    cleared = []

    def clearing_up():
        signal.raise_signal(number)
        cleared.append("up")

    with pytest.raises(SystemExit) as ended:
        ended_by(number, clearing_up)
    assert cleared == ["up"]
    assert ended.value.code == 128 + number


def test_what_goes_wrong_while_clearing_up_is_told(number):
    def clearing_up():
        raise StoreError("cannot remove")

    with pytest.raises(StoreError, match="cannot remove"):
        ended_by(number, clearing_up)


def test_a_solve_ends_after_its_iteration(number):
    with ended_as_interrupted(), stop_requests(Reporter()) as stop:
        assert not stop.is_set()
        signal.raise_signal(number)
        assert stop.is_set()


def test_a_terminal_that_is_gone_does_not_disturb_a_solve(number):
    class Gone(Reporter):
        def text(self, title, body):
            raise OSError("no terminal")

    with stop_requests(Gone()) as stop:
        signal.raise_signal(number)
        assert stop.is_set()


def stop_when_told(number, status):
    with ended_as_interrupted(), stop_requests(Reporter()):
        signal.raise_signal(number)
        raise SystemExit(status)


@pytest.mark.parametrize(("status", "expected"), [(130, None), (1, 1)])
def test_a_solve_that_stops_ends_with_the_status_of_its_signal(number, status, expected):
    with pytest.raises(SystemExit) as ended:
        stop_when_told(number, status)
    assert ended.value.code == (expected or 128 + number)
    with pytest.raises(SystemExit) as later, ended_as_interrupted():
        raise SystemExit(130)
    assert later.value.code == 130
