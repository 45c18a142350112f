"""The command that plans an experiment without running it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.commands.command import command
from penstock.commands.terminal import open_terminal

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.experiments import Experiment
    from penstock.streaming import LinkRates


def print_plan(experiment: Experiment, console: Console, rates: LinkRates | None = None) -> None:
    """Print the plan of an experiment at these rates, or at those measured on this machine; an image needs none."""
    from penstock.experiments import plan_experiment
    from penstock.experiments.cantilever.matrix_storage import measure_rates, place_with_image, request_of
    from penstock.spmv import Device, DeviceError

    if (placement := place_with_image(experiment, request_of(experiment))) is not None:
        console.print(placement.explain(), highlight=False, soft_wrap=True, markup=False)
        return
    try:
        rates = rates or measure_rates(experiment, Device.parse(experiment.memory.device), Path.cwd())
    except DeviceError as error:
        error.add_note("to plan for another machine, give its rates: penstock plan FILE --rates h100")
        raise
    console.print(plan_experiment(experiment, rates).explain(), highlight=False, soft_wrap=True, markup=False)


@command(
    "penstock plan beam.yaml",
    "penstock plan beam.yaml --rates h100",
    "penstock plan beam.yaml --ranks 64 --figure scaling.png",
)
def plan(
    file: Annotated[Path, typer.Argument(help="Experiment in YAML.")],
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Forecast up to this many GPUs, each with some planes of nodes.")
    ] = None,
    gpu_memory: Annotated[str, typer.Option(help="Of each GPU.")] = "130 GiB",
    rates: Annotated[
        str | None,
        typer.Option(
            help="Plan at the rates of a GPU, such as h100 or a100-80, or of a file {memory: 4400, link: 55} in GB/s."
        ),
    ] = None,
    memory: Annotated[
        float | None, typer.Option(help="GB/s that kernels of a GPU read; 4400 by default.", min=1)
    ] = None,
    link: Annotated[
        float | None, typer.Option(help="GB/s of a GPU's link to its host; 55 by default.", min=0.1)
    ] = None,
    peer: Annotated[float, typer.Option(help="GB/s between GPUs of a host, each way.", min=0.1)] = 247.0,
    network: Annotated[float, typer.Option(help="GB/s of a GPU to other hosts, each way.", min=0.1)] = 50.0,
    gpus_a_host: Annotated[int, typer.Option(help="GPUs of a host.", min=1)] = 8,
    figure: Annotated[Path | None, typer.Option(help="PNG to draw.")] = None,
) -> None:
    """Print the plan of an experiment on this machine or at --rates; with --ranks what it takes on several GPUs, or on H200s."""
    from penstock.experiments import read_experiment
    from penstock.experiments.scaling.devices import device_rates
    from penstock.experiments.scaling.forecast import Forecast, Wires, default_ranks, forecasts
    from penstock.experiments.scaling.table import scaling_table
    from penstock.spmv.sizes import parse_nbytes
    from penstock.streaming.planning.estimate import TYPICAL

    console, reporter = open_terminal()
    experiment = read_experiment(file)
    if ranks is None:
        if figure is not None:
            raise typer.BadParameter("--figure draws a forecast for several GPUs; give --ranks too")
        print_plan(experiment, console, None if rates is None else device_rates(rates))
        return
    known = TYPICAL if rates is None else device_rates(rates)
    overrides = {"memory": memory, "link": link}
    known = replace(known, **{name: 1e9 * rate for name, rate in overrides.items() if rate is not None})
    wires = Wires(gpus_a_host, 1e9 * peer, 1e9 * network)
    counts, feasible = default_ranks(experiment, ranks), []
    with reporter.stage("forecast") as stage:
        for number, (count, one) in enumerate(
            forecasts(experiment, counts, parse_nbytes(gpu_memory), known, wires), start=1
        ):
            if isinstance(one, Forecast):
                feasible.append(one)
            else:
                console.print(f"{count} GPU{'s' * (count > 1)}: {one}", highlight=False, soft_wrap=True)
            stage.advance(number / len(counts))
    if not feasible:
        raise typer.Exit(1)
    console.print(scaling_table(feasible))
    if figure is not None:
        from penstock.experiments.scaling.figure import draw_scaling

        draw_scaling(figure, feasible)
        console.print(f"Drawn in {figure}", highlight=False, soft_wrap=True)
