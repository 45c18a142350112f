"""The command that compares formats, and operations with those of other libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.commands.command import command
from penstock.commands.terminal import complete, free_name, open_terminal


@command(
    "penstock bench A.mtx cube32-dof3 --columns 1,8,32",
    "penstock bench A.mtx --operation spgemm",
)
def bench(
    matrices: Annotated[
        list[str], typer.Argument(help="Files of <matrix programs>, or generated ones such as cube32-dof3.")
    ],
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")] = "cpu",
    columns: Annotated[str, typer.Option(help="Numbers of vectors, such as 1,8,32.")] = "1",
    study: Annotated[
        bool, typer.Option("--study", help="Also compare kernels, partitions, chunks and sorting scopes.")
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Samples of each.")] = 11,
    output: Annotated[Path | None, typer.Option(help="Folder for the JSON and the figures.")] = None,
    operation: Annotated[
        str, typer.Option(help="spmv: products with vectors; trsv: triangular solves; spgemm: A A; galerkin: P' A P.")
    ] = "spmv",
) -> None:
    """Compare products with matrices in all formats, or other operations, and those of other libraries."""
    if operation != "spmv":
        _bench_operation(operation, matrices, device, repeats, output)
        return
    from penstock.experiments.formats.report import (
        BenchFolder,
        BenchRequest,
        bench_products,
        disagreements,
        records_table,
    )
    from penstock.files.registry import read_matrix
    from penstock.spmv import Device

    numbers = columns.split(",")
    if not all(number.strip().isdecimal() and int(number) > 0 for number in numbers):
        raise typer.BadParameter(f"--columns takes whole numbers such as 1,8,32, not {columns!r}")
    request = BenchRequest(Device.parse(device), tuple(int(number) for number in numbers), study, repeats)
    named = [read_matrix(matrix) for matrix in matrices]
    folder = BenchFolder(output or free_name(Path("bench-results")))
    if folder.records.exists():
        raise typer.BadParameter(f"{folder.path} holds the records of another run; name another folder")
    console, reporter = open_terminal()
    hint = f"the records of matrices that were done are in {folder.path}"
    complete(lambda: bench_products(named, folder.path, request, reporter=reporter), hint, console, folder.records)
    result = folder.read()
    console.print(records_table(result["records"]))
    for sentence in disagreements(result["records"]):
        console.print(sentence, highlight=False, soft_wrap=True, markup=False)
    for case in result["refused"]:
        console.print(f"{case['matrix']}: no {case['case']}: {case['reason']}", highlight=False, markup=False)
    console.print(f"memory bandwidth {result['limits']['read_GBps']:.4g} GB/s", highlight=False)
    console.print(f"Records and {len(folder.figures())} figures are in {folder.path}", highlight=False, soft_wrap=True)


def _bench_operation(operation: str, matrices: list[str], device: str, repeats: int, output: Path | None) -> None:
    from penstock.experiments.formats.operations import OPERATIONS, OperationStudy, operations_table
    from penstock.files.registry import read_matrix
    from penstock.spmv import Device

    if operation not in OPERATIONS:
        raise typer.BadParameter(f"--operation is spmv, {', '.join(OPERATIONS)}, not {operation!r}")
    named, directory = [read_matrix(matrix) for matrix in matrices], output or free_name(Path("bench-results"))
    console, reporter = open_terminal()
    study = OperationStudy(operation, named, Device.parse(device), directory, repeats=repeats, reporter=reporter)
    hint = f"the records of matrices that were done are in {directory}"
    complete(lambda: (study.folder, study.run()), hint, console, study.folder.records)
    console.print(operations_table(study.records))
    console.print(f"Records and pictures are in {directory}", highlight=False, soft_wrap=True)
