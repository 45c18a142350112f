"""Kernels are compiled before the first run on a machine, by several processes, and not again."""

import os
import subprocess
import sys

import pytest

from penstock.driver import kernel_calls
from penstock.experiments.cantilever import kernels
from penstock.experiments.cantilever.configuration import Experiment
from penstock.spmv.compilation import ahead
from penstock.spmv.compilation.ahead import Compilation, CompileTask, is_cached


def experiment(**sections):
    return Experiment.model_validate({"model": {"nodes": 5, "dof": sections.pop("dof", 3)}, **sections})


def tasks_of(monkeypatch, described, cached=False):
    """The tasks that an experiment starts."""
    started = []

    def start(tasks, numbers):
        started[:] = tasks
        return _Ended()

    monkeypatch.setattr(ahead, "_start", start)
    monkeypatch.setattr(ahead, "is_cached", lambda kernel: cached)
    with kernels.start_compilation(described) as compilation:
        compilation.wait(lambda share, text: None)
    assert compilation.finished
    return started


class _Ended:
    """A process that has ended."""

    def poll(self):
        return 0


@pytest.mark.parametrize("dof", [1, 3, 6])
@pytest.mark.parametrize(
    "memory", [{}, {"budget": "1 MiB"}, {"format": "csr"}, {"budget": "1 MiB", "format": "sliced_bsr"}]
)
@pytest.mark.parametrize("preconditioner", ["none", "jacobi", "block_jacobi", "chebyshev"])
def test_every_task_can_be_carried_out_and_compiles_the_kernel_it_names(memory, preconditioner, dof, monkeypatch):
    described = experiment(dof=dof, memory=memory, solver={"preconditioner": preconditioner})

    tasks = tasks_of(monkeypatch, described)

    assert tasks
    monkeypatch.undo()
    for task in tasks:
        function = getattr(kernel_calls, task.function.partition(":")[2])
        function(**task.arguments)
        assert not task.needed


def test_nothing_is_started_where_everything_is_cached(monkeypatch):
    assert tasks_of(monkeypatch, experiment(), cached=True) == []


@pytest.mark.parametrize("matrix", ["on_arrival", "stored"])
@pytest.mark.parametrize("preconditioner", ["none", "block_jacobi"])
def test_a_run_on_a_gpu_compiles_what_the_host_computes(preconditioner, matrix, monkeypatch):
    described = experiment(memory={"device": "cuda", "matrix": matrix}, solver={"preconditioner": preconditioner})

    functions = [task.function.partition(":")[2] for task in tasks_of(monkeypatch, described)]

    assert functions == (matrix == "stored") * ["assemble"] + (preconditioner != "none") * ["invert"]


def test_an_interrupt_ends_the_processes(monkeypatch):
    monkeypatch.setattr(CompileTask, "needed", property(lambda self: True))

    def interrupted():
        with Compilation([CompileTask("time:sleep", (), {"secs": 60})]) as compilation:
            processes.extend(compilation._running)
            raise KeyboardInterrupt

    processes = []
    with pytest.raises(KeyboardInterrupt):
        interrupted()

    [process] = processes
    assert process.wait(timeout=10) < 0


def test_a_process_compiles_into_the_cache_that_this_one_reads(tmp_path):
    """In a cache of its own, where nothing is compiled yet."""
    code = (
        "from penstock.spmv.compilation.ahead import Compilation, CompileTask\n"
        "task = CompileTask('penstock.driver.kernel_calls:polynomial', ('penstock.spmv.vectors.space:_three_terms_of_vector',),"
        " {'dof': 1})\n"
        "assert task.needed\n"
        "seen = []\n"
        "with Compilation([task]) as compilation:\n"
        "    compilation.wait(lambda share, text: seen.append((share, text)))\n"
        "assert not task.needed\n"
        "assert seen[-1] == (1.0, 'compiling kernels, once on a machine'), seen\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)})


def test_a_task_that_fails_does_not_stop_the_run(monkeypatch):
    monkeypatch.setattr(CompileTask, "needed", property(lambda self: True))
    shares = []

    with Compilation([CompileTask("penstock.driver.kernel_calls:nothing_of_that_name", ())]) as compilation:
        compilation.wait(lambda share, text: shares.append(share))

    assert shares[-1] == 1.0


def test_what_has_no_cache_counts_as_compiled():
    assert is_cached(len)
