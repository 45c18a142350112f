"""The command that describes this machine and what is installed on it."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from penstock.commands.command import command


@command(
    "penstock info",
    "penstock info --no-measure",
    "penstock info --refresh",
)
def info(
    measure: Annotated[bool, typer.Option(help="Measure memory, disk and link bandwidth (a few seconds).")] = True,
    refresh: Annotated[
        bool, typer.Option(help="Measure the rates anew that plans use, for this folder's disk.")
    ] = False,
) -> None:
    """List devices, formats, kernels and libraries, and measure this machine."""
    from penstock.experiments.reporting.environment import (
        describe_environment,
        measure_machine,
        refresh_rates,
        why_no_gpu,
    )
    from penstock.spmv import format_names, registered_kernels

    environment = describe_environment()
    gpus, missing = len(environment["machine"]["gpus"]), why_no_gpu()
    if missing is not None:
        environment["machine"]["gpus"] = f"none: {missing}"
    table = Table(show_header=False, box=None, pad_edge=False)
    for section, entries in environment.items():
        for name, value in entries.items():
            table.add_row(section, name, json.dumps(value) if isinstance(value, list | dict) else str(value))
            section = ""
    title = "kernels"
    for name in format_names():
        kernels = ", ".join(
            f"{operation} ({kind})" for format_name, operation, kind in registered_kernels() if format_name == name
        )
        table.add_row(title, name, kernels)
        title = ""
    for name, rate in (measure_machine(gpus) if measure else []) + (refresh_rates(gpus) if refresh else []):
        table.add_row("measured", name, rate)
    Console().print(table, markup=False)
