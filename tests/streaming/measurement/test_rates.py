"""Rates of the machine: measured once, believed for a week, and never in the way."""

import json
import os
import subprocess
import sys
import time

import pytest

from penstock.spmv import CPU
from penstock.spmv.model.timing import time_by_host_clock
from penstock.streaming import LinkRates
from penstock.streaming.measurement import rates as module
from penstock.streaming.measurement.probes import cores_are_busy, measure_memory, measure_scattering, measure_starts
from penstock.streaming.measurement.rates import machine_rates, rates_file

DAY = 24 * 3600.0


@pytest.fixture
def measured(monkeypatch):
    """Replace measurements by numbers that count them."""
    calls = []

    def disk(directory):
        calls.append(directory)
        return 1e9 + len(calls), True

    monkeypatch.setattr(module, "measure_disk", disk)
    monkeypatch.setattr(module, "cores_are_busy", lambda: False)
    monkeypatch.setattr(module, "measure_memory", lambda device, nbytes: 2e10)
    monkeypatch.setattr(module, "measure_starts", lambda device, directory: (1e-5, 2e-6, 0.0))
    monkeypatch.setattr(module, "measure_scattering", lambda device, memory: 0.4)
    return calls


def rewrite(change):
    """Change the only entry that is kept."""
    [(key, entry)] = json.loads(rates_file().read_text()).items()
    rates_file().write_text(json.dumps({key: change(entry)}))


def test_those_of_busy_cores_are_kept_for_ten_minutes(measured, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "cores_are_busy", lambda: True)
    machine_rates(CPU, tmp_path)
    machine_rates(CPU, tmp_path)
    assert len(measured) == 1
    rewrite(lambda entry: {**entry, "time": entry["time"] - 700})
    monkeypatch.setattr(module, "cores_are_busy", lambda: False)
    machine_rates(CPU, tmp_path)
    assert len(measured) == 2
    rewrite(lambda entry: {**entry, "time": entry["time"] - 700})
    machine_rates(CPU, tmp_path)
    assert len(measured) == 2


def test_busy_cores_are_noticed():
    """Beside three loops that are bound to the same core, a thread gets about a quarter of it."""
    core = {min(os.sched_getaffinity(0))}
    before = os.sched_getaffinity(0)
    loop = f"import os; os.sched_setaffinity(0, {core})\nwhile True: pass"
    loops = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(3)]
    try:
        os.sched_setaffinity(0, core)
        deadline = time.monotonic() + 10
        while not cores_are_busy() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert cores_are_busy(0.2)
    finally:
        os.sched_setaffinity(0, before)
        for process in loops:
            process.kill()
            process.wait()


def test_they_are_measured_once_and_kept(measured, tmp_path, cache_of_its_own):
    first = machine_rates(CPU, tmp_path)

    assert first == machine_rates(CPU, tmp_path / "not" / "yet") == LinkRates(1e9 + 1, 2e10, 1e-5, 2e-6, 0.0, 0.4)
    assert len(measured) == 1
    assert [path.name for path in (cache_of_its_own / "penstock").iterdir()] == ["rates.json"]


def test_fresh_ones_are_measured_whatever_is_kept_and_kept_in_turn(measured, tmp_path):
    machine_rates(CPU, tmp_path)

    assert machine_rates(CPU, tmp_path, fresh=True).link == machine_rates(CPU, tmp_path).link == 1e9 + 2


@pytest.mark.parametrize(("age", "times"), [(6 * DAY, 1), (8 * DAY, 2), (-DAY, 2)], ids=["new", "old", "of tomorrow"])
def test_they_are_believed_for_a_week(age, times, measured, tmp_path):
    machine_rates(CPU, tmp_path)
    rewrite(lambda entry: {**entry, "time": entry["time"] - age})

    machine_rates(CPU, tmp_path)

    assert len(measured) == times


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
def test_a_damaged_file_is_replaced(content, measured, tmp_path):
    rates_file().parent.mkdir()
    rates_file().write_bytes(content)

    assert machine_rates(CPU, tmp_path) == machine_rates(CPU, tmp_path)
    assert len(measured) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: {**entry, "rates": {"speed": 1}},
        lambda entry: {"time": entry["time"]},
        lambda entry: {**entry, "time": "now"},
        lambda entry: [],
        lambda entry: {**entry, "rates": {"link": "fast", "memory": None}},
    ],
    ids=["other rates", "no rates", "no time", "no entry", "no numbers"],
)
def test_a_damaged_entry_is_measured_again(damage, measured, tmp_path):
    machine_rates(CPU, tmp_path)
    rewrite(damage)

    assert machine_rates(CPU, tmp_path).link == 1e9 + 2


def test_a_cache_that_cannot_be_written_costs_a_measurement_and_no_more(measured, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))

    assert machine_rates(CPU, tmp_path).link == 1e9 + 1
    assert machine_rates(CPU, tmp_path).link == 1e9 + 2


def test_starting_costs_time_and_the_disk_is_left_as_it_was(tmp_path):
    transfer, product, gap = measure_starts(CPU, tmp_path)

    assert 0 < transfer < 0.1
    assert 0 < product < 0.1
    assert gap == product
    assert list(tmp_path.iterdir()) == []


def test_half_a_matrix_is_multiplied_at_some_share_of_the_memory_rate():
    assert 0 < measure_scattering(CPU, measure_memory(CPU, 64 << 20)) < 2


def test_rates_of_an_earlier_version_are_measured_again(measured, tmp_path):
    machine_rates(CPU, tmp_path)
    rewrite(
        lambda entry: {**entry, "rates": {key: rate for key, rate in entry["rates"].items() if key != "scattering"}}
    )

    machine_rates(CPU, tmp_path)

    assert len(measured) == 2


def test_actions_are_timed_in_turn_after_warming_up():
    calls = []

    samples = time_by_host_clock(
        {name: lambda name=name: calls.append(name) for name in "ab"}, CPU, repeats=3, warmups=2
    )

    assert calls == ["a", "b"] * 5
    assert {name: len(times) for name, times in samples.items()} == {"a": 3, "b": 3}
    assert all(seconds >= 0 for times in samples.values() for seconds in times)
