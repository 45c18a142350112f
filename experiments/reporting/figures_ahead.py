"""Loads what draws pictures while a run computes: importing Matplotlib takes half a second."""

from __future__ import annotations

import contextlib
import threading

from penstock.host.threads import find_pools


def load_figures_ahead() -> None:
    """Begin to load what draws, in a thread that nobody waits for: who draws sooner waits where it imports the same."""
    find_pools()
    with contextlib.suppress(RuntimeError):  # no thread is to be had: it is loaded when it is needed
        threading.Thread(target=_load, name="figures-ahead", daemon=True).start()


def _load() -> None:
    with contextlib.suppress(Exception):  # the import that draws raises the error again
        import matplotlib.backends.backend_agg  # noqa: F401
        import PIL.Image

        import penstock.experiments.reporting.figures  # noqa: F401

        PIL.Image.preinit()  # the formats of pictures, of which Matplotlib uses one
