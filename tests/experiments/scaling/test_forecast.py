"""What a system takes on several GPUs: forecasts against what was measured, and the command that prints them."""

import dataclasses
import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from penstock.cli import app
from penstock.experiments import Experiment
from penstock.experiments.cantilever.matrix_storage import workspace_nbytes
from penstock.experiments.scaling.forecast import Wires, default_ranks, forecast
from penstock.spmv import BudgetError, InputError
from penstock.streaming.planning.estimate import TYPICAL

RECORDS = json.loads((Path(__file__).parents[3] / "benchmarks" / "results" / "distributed-h200x2.json").read_text())[
    "records"
]
SOLVERS = {
    "block_jacobi": {"preconditioner": "block_jacobi"},
    "chebyshev17": {"preconditioner": "chebyshev", "degree": 17},
    "coarse_level": {"preconditioner": "smoothed_aggregation"},
}


def experiment(nodes, solver, **memory):
    content = {"model": {"nodes": list(nodes)}, "solver": solver, "memory": {"device": "cuda", **memory}}
    return Experiment.model_validate(content)


MEASURED = [r for r in RECORDS if r["name"].count("/") == 4 and r["name"].split("/")[3] in SOLVERS]


@pytest.mark.parametrize("record", MEASURED, ids=lambda r: r["name"])
def test_forecasts_agree_with_what_two_gpus_took(record):
    """Streamed, the benchmark gives a GPU a quarter of the bytes of all blocks of its square, cut into 64 subdivisions."""
    _, _, where, name, ranks = record["name"].split("/")
    count, (along, *across) = int(ranks[1:]), record["nodes"]
    memory = {"budget": "1 GiB", "subdivisions": 64} if where == "streamed" else {}
    asked = experiment(record["nodes"], SOLVERS[name], format="symmetric_bsr", **memory)
    nodes = -(-along // count) * across[0] * across[1]
    limit = 100 << 30
    if where == "streamed":
        vectors, _ = workspace_nbytes(asked, asked.preconditioner, 3 * nodes)
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
