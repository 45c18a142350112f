"""Figures are loaded in a thread beside a run."""

import threading

from penstock.experiments.reporting import figures_ahead
from penstock.host import threads


def test_thread_pools_are_found_before_another_thread_loads_libraries(monkeypatch):
    threads.find_pools.cache_clear()
    found = []

    class Recorded(threading.Thread):
        def start(self):
            found.append(threads.find_pools.cache_info().currsize)

    monkeypatch.setattr(figures_ahead.threading, "Thread", Recorded)

    figures_ahead.load_figures_ahead()

    assert found == [1]
