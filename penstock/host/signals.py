"""Lets a command clean up before a signal ends it."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

#: From kill, a batch system or a shutdown; from a terminal that closes, where there are terminals that do.
ENDING_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))

#: Exit status of a command that stopped on request.
INTERRUPTED = 130
# Signals that parts of the command have obeyed.
_obeyed: list[int] = []


def note_signal(number: int) -> None:
    """Let a command that stops for this signal end with its status, not that of Ctrl-C."""
    if number in ENDING_SIGNALS:
        _obeyed.append(number)


@contextlib.contextmanager
def ended_as_interrupted() -> Iterator[None]:
    """Let these signals end the block as Ctrl-C does, so that what was half written is removed; exit with 128 + their number.

    A signal that is ignored, as under ``nohup``, stays ignored. So does a second one, which batch systems and terminals send
    while the first is being obeyed.
    """
    received: list[int] = []
    _obeyed.clear()

    def handle(number: int, frame: Any) -> None:
        received.append(number)
        if len(received) == 1:
            raise KeyboardInterrupt

    changed = [number for number in ENDING_SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    for number in changed:
        signal.signal(number, handle)
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as end:
        if not received and _obeyed and getattr(end, "code", None) == INTERRUPTED:
            received.append(_obeyed[0])
        if not received:
            raise
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)
    if received:
        sys.exit(128 + received[0])
