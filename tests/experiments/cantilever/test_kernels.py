"""Kernels are compiled before the first run on a machine, by several processes, and not again."""

import os
import subprocess
import sys

import pytest

from penstock import kernel_calls
from penstock.experiments.cantilever import kernels
from penstock.experiments.cantilever.configuration import Experiment
from penstock.progress import Reporter
from penstock.spmv.compilation import ahead
from penstock.spmv.compilation.ahead import CompileTask, compile_ahead, is_cached


def experiment(**sections):
    return Experiment.model_validate({"model": {"nodes": 5, "dof": sections.pop("dof", 3)}, **sections})


def tasks_of(monkeypatch, described, cached=False):
    """The tasks that an experiment starts."""
    started = []
    monkeypatch.setattr(kernels, "compile_ahead", lambda tasks, advance: started.extend(tasks))
    monkeypatch.setattr(ahead, "is_cached", lambda kernel: cached)
    kernels.compile_kernels(described, Reporter())
    return started


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


def test_nothing_is_started_where_everything_is_cached_or_on_a_gpu(monkeypatch):
    assert tasks_of(monkeypatch, experiment(), cached=True) == []
    assert tasks_of(monkeypatch, experiment(memory={"device": "cuda"})) == []


def test_a_process_compiles_into_the_cache_that_this_one_reads(tmp_path):
    """In a cache of its own, where nothing is compiled yet."""
    code = (
        "from penstock.spmv.compilation.ahead import CompileTask, compile_ahead\n"
        "task = CompileTask('penstock.kernel_calls:polynomial', ('penstock.spmv.vectors.space:_three_terms_of_vector',),"
        " {'dof': 1})\n"
        "assert task.needed\n"
        "seen = []\n"
        "compile_ahead([task], lambda share, text: seen.append((share, text)))\n"
        "assert not task.needed\n"
        "assert seen[-1] == (1.0, 'compiling kernels (first run only)'), seen\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)})


def test_a_task_that_fails_does_not_stop_the_run(monkeypatch):
    monkeypatch.setattr(CompileTask, "needed", property(lambda self: True))
    shares = []

    compile_ahead(
        [CompileTask("penstock.kernel_calls:nothing_of_that_name", ())], lambda share, text: shares.append(share)
    )

    assert shares[-1] == 1.0


def test_what_has_no_cache_counts_as_compiled():
    assert is_cached(len)
