"""Figures are loaded in a thread beside a run."""

import sys
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


def test_threads_take_turns_often_only_while_figures_are_loaded(monkeypatch):
    usual, meanwhile = sys.getswitchinterval(), []
    monkeypatch.setattr(figures_ahead, "_import", lambda: meanwhile.append(sys.getswitchinterval()))

    figures_ahead._load()

    assert meanwhile[0] < usual == sys.getswitchinterval()
