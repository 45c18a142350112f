"""Kernels compiled ahead are those that solves need."""

import functools
import multiprocessing
import time

import numpy as np
import pytest
from kernel_targets import gpu_count
from typer.testing import CliRunner

from penstock.commands import warm_up as warm_up_command
from penstock.commands.app import app
from penstock.spmv import InputError


def fail():
    raise InputError("no disk for compiled kernels")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_kind_of_task_runs(device):
    if device == "cuda" and not gpu_count():
        pytest.skip("no CUDA device")
    kinds = {}
    for task in warm_up_command.usual_tasks(device):
        if not isinstance(task, functools.partial):
            kinds[task] = task
        elif task.func is warm_up_command.solve_small:
            kinds.setdefault(task.args[-1], task)
        else:
            kinds.setdefault(task.func, task)
    assert len(kinds) == 13
    for task in kinds.values():
        task()


def test_the_command_compiles_in_processes(monkeypatch):
    monkeypatch.setattr(
        warm_up_command, "usual_tasks", lambda device: [functools.partial(np.ones, n) for n in (1, 2, 3)]
    )
    ran = CliRunner().invoke(app, ["warm-up", "--quiet"])
    assert ran.exit_code == 0, ran.output
    assert ran.output == ""


def test_a_task_that_fails_is_told(monkeypatch):
    monkeypatch.setattr(warm_up_command, "usual_tasks", lambda device: [fail])
    ran = CliRunner().invoke(app, ["warm-up"])
    assert isinstance(ran.exception, InputError)
    assert "no disk" in str(ran.exception)


def test_a_device_that_is_none_is_refused():
    ran = CliRunner().invoke(app, ["warm-up", "--device", "tpu"])
    assert isinstance(ran.exception, InputError)
    assert "unknown device 'tpu'" in str(ran.exception)


def test_what_is_left_early_leaves_no_process():
    tasks, began = [functools.partial(np.ones, 1), functools.partial(time.sleep, 100)], time.monotonic()
    running = warm_up_command._run(tasks, 2)
    assert [next(running), next(running)] == [0, 1]
    running.close()
    assert time.monotonic() - began < 60
    # A thread of the pool waits for its processes as well: for a moment one that has ended can be unknown to us.
    while multiprocessing.active_children() and time.monotonic() - began < 60:
        time.sleep(0.01)
    assert multiprocessing.active_children() == []
