"""Stops long work at the next good moment when a signal asks for it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from penstock.driver.progress import Reporter
from penstock.host.signals import ENDING_SIGNALS, note_signal


@contextlib.contextmanager
def stop_requests(reporter: Reporter, current: str = "this iteration") -> Iterator[threading.Event]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into an event; a second one raises KeyboardInterrupt.

    The reporter shows that the request was received, and that ``current`` is finished before stopping.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING_SIGNALS)}
    signals = [number for number in before if number == signal.SIGINT or before[number] != signal.SIG_IGN]

    def handle(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        note_signal(number)
        with contextlib.suppress(OSError):  # the terminal may be gone
            reporter.text(f"Stopping after {current}", "Interrupt again to stop at once.")

    for number in signals:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number in signals:
            signal.signal(number, before[number])
