"""A command that is told to end leaves nothing half written."""

import signal

import pytest

from penstock.ending import ended_as_interrupted
from penstock.fem import Cantilever
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
