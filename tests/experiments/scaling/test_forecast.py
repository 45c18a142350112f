"""What a system takes on several GPUs: forecasts against what was measured, and the command that prints them."""

import dataclasses
import io
import json
import re
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from penstock.commands.app import app
from penstock.experiments import Experiment, read_experiment
from penstock.experiments.cantilever.matrix_storage import plan_experiment, workspace_nbytes
from penstock.experiments.scaling.devices import device_rates
from penstock.experiments.scaling.forecast import Wires, default_ranks, forecast
from penstock.experiments.scaling.table import scaling_table
from penstock.spmv import BudgetError, Device, DeviceError, InputError
from penstock.streaming.planning.estimate import TYPICAL

RECORDS = json.loads((Path(__file__).parents[3] / "benchmarks" / "results" / "distributed-h200x2.json").read_text())[
    "records"
]
SOLVERS = {
    "block_jacobi": {"preconditioner": "block_jacobi"},
    "chebyshev17": {"preconditioner": "chebyshev", "degree": 17},
    "coarse_level": {
        "preconditioner": "smoothed_aggregation",
        "degree": 9,
    },  # 14 products an iteration, as they were measured
}


def experiment(nodes, solver, **memory):
    memory = {"device": "cuda", "matrix": "stored", **memory}
    content = {"model": {"nodes": list(nodes)}, "solver": solver, "memory": memory}
    return Experiment.model_validate(content)


MEASURED = [r for r in RECORDS if r["name"].count("/") == 4 and r["name"].split("/")[3] in SOLVERS]


@pytest.mark.parametrize("record", MEASURED, ids=lambda r: r["name"])
def test_forecasts_agree_with_what_two_gpus_took(record):
    """Streamed, the benchmark gives a GPU a quarter of the bytes of all blocks of its square, cut into 64 subdivisions."""
    _, _, where, name, ranks = record["name"].split("/")
    count, (along, *across) = int(ranks[1:]), record["nodes"]
    memory = {"budget": "1 TiB", "subdivisions": 64} if where == "streamed" else {}
    asked = experiment(record["nodes"], SOLVERS[name], format="symmetric_bsr", **memory)
    nodes = -(-along // count) * across[0] * across[1]
    limit = 100 << 30
    if where == "streamed":
        vectors = workspace_nbytes(asked, asked.preconditioner, 3 * nodes)
        limit = vectors + nodes * 27 * 76 // 4

    found = forecast(asked, count, limit, dataclasses.replace(TYPICAL, link=55.5e9), Wires())

    assert found.streamed == (where == "streamed")
    assert 0.85 <= found.seconds / record["seconds"] <= 1.15


def test_more_ranks_take_a_matrix_into_memory_and_each_needs_two_planes():
    asked = experiment((64, 64, 64), SOLVERS["chebyshev17"], format="symmetric_bsr")
    found = [forecast(asked, ranks, 256 << 20, TYPICAL, Wires()) for ranks in (1, 4)]

    assert [one.streamed for one in found] == [True, False]
    assert found[1].efficiency_against(found[0]) > 1
    assert found[1].planes == 16
    assert default_ranks(asked, 1000) == [1, 2, 4, 8, 16, 32]
    assert default_ranks(asked, 6) == [1, 2, 4, 6]
    with pytest.raises(InputError, match="planes"):
        forecast(asked, 64, 256 << 20, TYPICAL, Wires())
    with pytest.raises(BudgetError, match="vectors"):
        forecast(asked, 1, 16 << 20, TYPICAL, Wires())


def test_the_budget_of_the_file_limits_the_matrix_of_a_rank():
    free, limited = (
        forecast(experiment((64, 64, 64), SOLVERS["block_jacobi"], **memory), 1, 128 << 30, TYPICAL, Wires())
        for memory in ({}, {"budget": "64 MiB"})
    )

    assert (free.streamed, limited.streamed) == (False, True)
    assert limited.seconds > free.seconds


@pytest.mark.parametrize(("solver", "known"), [("coarse_level", True), ("block_jacobi", False)])
def test_a_solve_has_a_column_if_its_iterations_are_known(solver, known):
    found = [forecast(experiment((32, 32, 32), SOLVERS[solver]), 1, 128 << 30, TYPICAL, Wires())]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(scaling_table(found))
    printed = console.export_text()

    assert found[0].iterations is not None if known else found[0].iterations is None
    assert ("known only after a solve" in " ".join(printed.split())) == (not known)
    assert (" solve " in printed.split("1")[0]) == known


@pytest.mark.parametrize("content", [None, "{memory: 3082, link: 54.81}"])
def test_a_plan_for_a_gpu_that_is_not_there_takes_rates(content, tmp_path, monkeypatch):
    file, rates = tmp_path / "gpu.yaml", "h100"
    if content is not None:
        rates = str(tmp_path / "rates.yaml")
        Path(rates).write_text(content)
    asked = {"model": {"nodes": [40, 40, 40]}, "memory": {"device": "cuda", "budget": "20 MiB"}}
    file.write_text(yaml.safe_dump(asked))

    run = CliRunner().invoke(app, ["plan", str(file), "--rates", rates])

    assert run.exit_code == 0, run.output
    expected = plan_experiment(read_experiment(file), device_rates("h100"))
    assert re.search(r"a sweep +about \S+ m?s", run.output)
    assert run.output.strip() == expected.explain().strip()


def test_rates_of_no_device_and_of_no_use_are_refused(tmp_path):
    with pytest.raises(InputError, match="there is no h999"):
        device_rates("h999")
    (tmp_path / "rates.yaml").write_text("{memory: -1, link: 55}")
    with pytest.raises(InputError, match="memory"):
        device_rates(str(tmp_path / "rates.yaml"))


def test_the_rates_of_an_h200_are_about_those_that_were_measured():
    assert device_rates("H200").memory == pytest.approx(TYPICAL.memory, rel=0.02)
    assert device_rates("h200").link == pytest.approx(TYPICAL.link, rel=0.02)


def test_without_a_gpu_the_command_says_that_it_takes_rates(tmp_path, monkeypatch):
    def refuse(name):
        raise DeviceError("there is no GPU")

    monkeypatch.setattr(Device, "parse", refuse)
    file = tmp_path / "gpu.yaml"
    file.write_text(yaml.safe_dump({"model": {"nodes": 9}, "memory": {"device": "cuda", "budget": "1 MiB"}}))

    run = CliRunner().invoke(app, ["plan", str(file)])

    assert isinstance(run.exception, DeviceError)
    assert any("--rates h100" in note for note in run.exception.__notes__)


def test_ranks_of_several_hosts_wait_longer_for_sums_and_messages():
    wires = Wires()

    assert wires.sum_seconds(1) == wires.exchange_seconds(1, 1e6) == 0
    assert wires.sum_seconds(8) < wires.sum_seconds(16) < wires.sum_seconds(64)
    assert wires.exchange_seconds(8, 1e6) < wires.exchange_seconds(16, 1e6)


def test_the_command_prints_a_table_says_what_does_not_fit_and_draws(tmp_path):
    file, figure = tmp_path / "large.yaml", tmp_path / "scaling.png"
    file.write_text(yaml.safe_dump({"model": {"nodes": [96, 96, 96]}, "solver": {"preconditioner": "chebyshev"}}))

    run = CliRunner().invoke(
        app, ["plan", str(file), "--ranks", "4", "--gpu-memory", "200 MiB", "--figure", str(figure)]
    )

    assert run.exit_code == 0, run.output
    assert "1 GPU: the vectors and coarse levels of a rank take" in run.output
    assert "streamed" in run.output
    assert "efficiency" in run.output
    assert figure.exists()


def test_without_ranks_the_command_prints_the_plan_of_a_run(tmp_path):
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump({"model": {"nodes": [9, 5, 5]}}))

    run = CliRunner().invoke(app, ["plan", str(file)])

    assert run.exit_code == 0, run.output
    assert "matrix " in run.output
