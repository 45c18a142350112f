"""Loads what draws pictures while a run computes: importing Matplotlib takes half a second."""

from __future__ import annotations

import contextlib
import sys
import threading

from penstock.host.threads import find_pools

# Seconds after which the thread lets another one run that waits. Python's own 0.005 would pass at every kernel and file that a
# run starts meanwhile; much less slows its set-up, in which the thread then still loads.
_TURN = 1e-3


def load_figures_ahead() -> None:
    """Begin to load what draws, in a thread that nobody waits for: who draws sooner waits where it imports the same."""
    find_pools()
    with contextlib.suppress(RuntimeError):  # no thread is to be had: it is loaded when it is needed
        threading.Thread(target=_load, name="figures-ahead", daemon=True).start()


def _load() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(_TURN, before))
    try:
        _import()
    finally:
        sys.setswitchinterval(before)


def _import() -> None:
    with contextlib.suppress(Exception):  # the import that draws raises the error again
        import matplotlib.backends.backend_agg  # noqa: F401
        import PIL.Image

        import penstock.experiments.reporting.figures  # noqa: F401

        PIL.Image.preinit()  # the formats of pictures, of which Matplotlib uses one
