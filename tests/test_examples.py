"""Every example runs. YAML examples run at a smaller size, scripts as they are."""

import json
import os
import re
import runpy
from pathlib import Path

import pytest
import yaml
from kernel_targets import gpu_count

from penstock.experiments import Experiment, plan_experiment, read_experiment, run_experiment

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(path for path in EXAMPLES.glob("*.py") if path.stem != "add_a_format")  # tested beside the contract
EXPERIMENTS = sorted(EXAMPLES.glob("*.yaml"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_solves_its_system(script, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    runpy.run_path(str(script), run_name="__main__")

    residual = float(re.search(r"true relative residual\s+(\S+)", capsys.readouterr().out)[1])
    assert residual <= 1e-8


def test_the_over_budget_script_is_bit_equal_to_the_resident_solve(capsys):
    runpy.run_path(str(EXAMPLES / "solve_over_budget.py"), run_name="__main__")

    assert re.search(r"bit-equal to the resident solve\s+True", capsys.readouterr().out)


def smaller(path: Path) -> Experiment:
    """Return an experiment file with a coarse mesh, the budget scaled with the matrix."""
    full = read_experiment(path)
    data = yaml.safe_load(path.read_text())
    nodes = data["model"]["nodes"]
    data["model"]["nodes"] = [33, 5, 5] if isinstance(nodes, list) else 13
    small = Experiment.model_validate(data)
    if full.memory.budget is not None:
        share = small.cantilever().nnz / full.cantilever().nnz
        data["memory"]["budget"] = int(full.memory.budget * share)
        small = Experiment.model_validate(data)
    return small


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_experiment_converges_within_its_budget(path, tmp_path):
    experiment = smaller(path)
    if experiment.memory.device != "cpu" and gpu_count() == 0:
        experiment = experiment.model_copy(update={"memory": experiment.memory.model_copy(update={"device": "cpu"})})

    outcome = run_experiment(experiment, tmp_path / "run")

    result = json.loads(outcome.folder.result.read_text())
    assert result["converged"]
    assert result["true_residual"] <= experiment.solver.rtol
    if experiment.memory.budget is not None:
        assert result["peak_budget_nbytes"] <= experiment.memory.budget < result["matrix_nbytes"]
        plan = plan_experiment(read_experiment(outcome.folder.configuration))
        assert plan.streamed_nbytes == result["matrix_nbytes"] - result["resident_nbytes"]
        assert result["bytes_streamed"] == sum(map(plan.sweep_nbytes, range(result["sweeps"])))


def test_the_demo_is_as_large_as_promised():
    experiment = read_experiment(EXAMPLES / "cantilever.yaml")
    plan = plan_experiment(experiment)

    assert experiment.cantilever().unknowns >= 100_000
    assert plan.index.nbytes >= max(100_000_000, 3 * plan.budget_nbytes)
    assert experiment.solver.rtol <= 1e-8


def test_the_readme_script_runs(tmp_path, monkeypatch, capsys):
    code = re.search(r"```python\n(.*?)```", (EXAMPLES.parent / "README.md").read_text(), re.DOTALL)[1]
    monkeypatch.chdir(tmp_path)
    smaller_code = code.replace("(65, 17, 17)", "(33, 9, 9)").replace('"8 MiB"', '"1 MiB"')
    assert smaller_code != code

    exec(compile(smaller_code, "README.md", "exec"), {})

    assert "converged" in capsys.readouterr().out
    assert os.listdir(tmp_path) == ["beam-matrix"]
