"""Compiles the CPU kernels that an experiment needs before its first run on a machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.experiments.cantilever.configuration import Experiment
from penstock.fem.assembly import CHUNKED_FORMATS
from penstock.spmv.compilation.ahead import Compilation, CompileTask

_CALLS = "penstock.driver.kernel_calls"


def start_compilation(experiment: Experiment) -> Compilation:
    """Start to compile the CPU kernels of an experiment, unless they are cached; several processes share the work."""
    # Which format a plan chooses is known later; streamed, it is mostly half of the matrix.
    requested, streamed = experiment.memory.format, experiment.memory.budget is not None
    format_name = ("symmetric_bsr" if streamed else "bsr") if requested == "auto" else requested
    stored: dict[str, Any] = {"format_name": format_name, "dof": experiment.model.dof}
    filling = "_fill_chunks" if format_name in CHUNKED_FORMATS else "_fill_rows"
    assembly = CompileTask(f"{_CALLS}:assemble", (f"penstock.fem.box_rows:{filling}",), stored)
    blocks = CompileTask(f"{_CALLS}:invert", ("penstock.solvers.preconditioners:_invert_blocks",))
    if experiment.memory.device != "cpu":  # a stored matrix is assembled, and blocks are inverted, on the host
        on_host = [] if experiment.on_arrival else [assembly]
        return Compilation([*on_host, blocks] if experiment.solver.chosen != "none" else on_host)
    # At its first import on a machine, Matplotlib lists the fonts, which takes as long as a kernel.
    fonts = replace(assembly, function=f"{_CALLS}:list_fonts", arguments={})
    # The longest first, so that all processes end at about the same time.
    return Compilation([*_iterations(experiment), *_products(experiment, stored), assembly, fonts])


def _products(experiment: Experiment, stored: dict[str, Any]) -> list[CompileTask]:
    """Return the tasks, if any, for products in a format."""
    kernels = {
        "symmetric_bsr": "symmetric_bsr_kernels:_find_reach",
        "sliced_bsr": "sliced_bsr:_spmv",
        "bsr": "bsr:_spmv_3" if experiment.model.dof == 3 else "bsr:_spmv_any",
    }
    kernel = kernels.get(stored["format_name"])
    return [CompileTask(f"{_CALLS}:multiply", (f"penstock.spmv.formats.{kernel}",), stored)] if kernel else []


def _iterations(experiment: Experiment) -> list[CompileTask]:
    """Return the tasks for the solver and its preconditioner."""
    dof, preconditioner = experiment.model.dof, experiment.solver.chosen
    tasks = []
    if preconditioner in ("chebyshev", "smoothed_aggregation"):
        step = "penstock.spmv.vectors.space:_three_terms_of_vector"
        tasks.append(CompileTask(f"{_CALLS}:polynomial", (step,), {"dof": dof}))
    if preconditioner == "smoothed_aggregation":
        for function, kernel in (
            ("multiply_coarse", "penstock.spmv.formats.bsr:_diagonal_blocks"),
            ("multiply_blocks", "penstock.spmv.products.block_products:_smooth"),
            ("aggregate", "penstock.solvers.amg.tentative:_orthonormalise"),
        ):
            tasks.append(CompileTask(f"{_CALLS}:{function}", (kernel,), {"dof": dof}))
    elif preconditioner != "chebyshev" and not experiment.is_block:
        last = "penstock.solvers.cg_kernels:extend"
        tasks.append(CompileTask(f"{_CALLS}:iterate", (last,), {"dof": dof, "preconditioner": preconditioner}))
    return tasks
