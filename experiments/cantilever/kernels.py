"""Compiles the CPU kernels that an experiment needs before its first run on a machine."""

from __future__ import annotations

from penstock.experiments.cantilever.configuration import Experiment
from penstock.progress import Reporter
from penstock.spmv.compilation.ahead import CompileTask, compile_ahead

__all__ = ["compile_kernels"]

_CALLS = "penstock.kernel_calls"


def compile_kernels(experiment: Experiment, reporter: Reporter) -> None:
    """Compile the kernels of an experiment on a CPU, unless they are cached; several processes share the work."""
    if experiment.memory.device != "cpu":
        return
    # Which format a plan chooses is known later; streamed, it is mostly half of the matrix.
    asked, streamed = experiment.memory.format, experiment.memory.budget is not None
    format_name = ("symmetric_bsr" if streamed else "bsr") if asked == "auto" else asked
    dof, preconditioner = experiment.model.dof, experiment.solver.preconditioner
    stored = {"format_name": format_name, "dof": dof}
    products = {
        "symmetric_bsr": "symmetric_bsr_kernels:_reach",
        "sliced_bsr": "sliced_bsr:_spmv",
        "bsr": "bsr:_spmv_3" if dof == 3 else "bsr:_spmv_any",
    }
    # The longest ones first.
    tasks = [CompileTask(f"{_CALLS}:assemble", ("penstock.fem.assembly:_fill",), stored)]
    if format_name in products:
        kernel = f"penstock.spmv.formats.{products[format_name]}"
        tasks.insert(0, CompileTask(f"{_CALLS}:multiply", (kernel,), stored))
    if preconditioner == "chebyshev":
        step = "penstock.spmv.vectors.space:_three_terms_of_vector"
        tasks.append(CompileTask(f"{_CALLS}:polynomial", (step,), {"dof": dof}))
    if not experiment.is_block:
        last = "penstock.solvers.cg_kernels:_extend"
        tasks.append(CompileTask(f"{_CALLS}:iterate", (last,), {"dof": dof, "preconditioner": preconditioner}))
    if any(task.needed for task in tasks):
        with reporter.stage("compile") as stage:
            compile_ahead(tasks, stage.advance)
