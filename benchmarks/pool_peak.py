"""How much memory of a GPU a run takes at most."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def peak_of_pool() -> Iterator[list[int]]:
    """Look every 20 ms at the bytes that CuPy's pool has handed out, and hold the most of them."""
    import cupy

    pool, most, ended = cupy.get_default_memory_pool(), [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            most[0] = max(most[0], pool.used_bytes())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        ended.set()
        thread.join()
