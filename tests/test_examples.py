"""Every example runs. YAML examples run at a smaller size, scripts as they are unless they have an option for it."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from kernel_targets import gpu_count

from penstock.experiments import Experiment, plan_experiment, read_experiment, run_experiment
from penstock.experiments.overlap.configuration import OverlapStudy, read_overlap_study
from penstock.experiments.overlap.report import run_overlap_study
from penstock.experiments.overlap.study import study_points

pytestmark = pytest.mark.usefixtures("one_thread")
EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(path for path in EXAMPLES.glob("*.py") if not path.stem.startswith("add_a_"))  # tested on their own
EXPERIMENTS = sorted(EXAMPLES.glob("*.yaml"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_solves_its_system(script, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    smaller = ["--nodes", "16"] if script.stem == "out_of_core_at_memory_speed" else []
    monkeypatch.setattr(sys, "argv", [str(script), *smaller])  # not the options of pytest

    runpy.run_path(str(script), run_name="__main__")

    printed = capsys.readouterr().out
    assert float(re.findall(r"true relative residual\s+([\d.e+-]+)", printed)[-1]) <= 1e-8
    if script.stem == "solve_over_budget":
        assert re.search(r"bit-equal to the resident solve\s+True", printed)


def test_the_worked_example_of_the_solvers_prints_what_its_page_says(capsys):
    page = (EXAMPLES.parent / "docs" / "solvers.md").read_text()
    code = next(code for code in re.findall(r"```python\n(.*?)```", page, re.S) if "print(" in code)
    claimed = page.split("\nprints\n")[1].split("```")[1].split("\n")[1:-1]

    exec(compile(code, "solvers.md", "exec"), {})

    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(claimed) == 5
    for ours, theirs in zip(printed, claimed, strict=True):
        # Rounding differs between processors; the rest does not.
        assert int(ours.split()[0]) == pytest.approx(int(theirs.split()[0]), rel=0.03)
        assert re.sub(r"[\d.e-]+", "", ours) == re.sub(r"[\d.e-]+", "", theirs)


def smaller(path: Path) -> Experiment:
    """Return an experiment file with a coarse mesh, the budget scaled with the matrix."""
    full = read_experiment(path)
    data = yaml.safe_load(path.read_text())
    nodes = data["model"]["nodes"]
    data["model"]["nodes"] = [33, 5, 5] if isinstance(nodes, list) else 13
    small = Experiment.model_validate(data)
    if full.memory.budget is not None:
        # A cut into a thousand pieces, through a hundredth of the matrix, has no likeness on a coarse mesh.
        cut = [data["memory"].pop(name, None) for name in ("subdivisions", "slots")]
        share = full.memory.budget / full.cantilever().nnz if cut == [None, None] else 2.0
        data["memory"]["budget"] = int(share * small.cantilever().nnz)
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
        if plan.ring.on_arrival:
            assert result["bytes_streamed"] == 0
            return
        assert plan.streamed_nbytes == result["matrix_nbytes"] - result["resident_nbytes"]
        expected = sum(map(plan.sweep_nbytes, range(result["sweeps"])))
        # Sweeps in a given direction may fill the ring anew: that in which a coarse matrix is formed, and the next.
        assert expected <= result["bytes_streamed"] <= expected + 2 * plan.storage_nbytes


def test_the_overlap_study_for_any_machine_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = yaml.safe_load((EXAMPLES / "overlap" / "small_cpu.yaml").read_text())
    data["cases"] = [{**case, "nodes": 8} for case in data["cases"]]
    data["subdivisions"] = data["subdivisions"][1:3]
    study = OverlapStudy.model_validate(data)

    folder, completed = run_overlap_study(study, tmp_path / "study")

    records = folder.read()["records"]
    assert completed

    assert study.device == "cpu"
    assert len(records) == 2 * len(study_points(study)) == 2 * 12
    assert max(record["worst_error"] for record in records) < 1


def test_the_papers_study_has_its_cases_by_its_protocol():
    study = read_overlap_study(EXAMPLES / "overlap" / "paper.yaml")

    cases = [(case.dof, case.nodes) for case in study.cases]
    assert cases == [(1, 128), (1, 256), (3, 128), (3, 160), (6, 96), (6, 128)]
    assert study.subdivisions == (2, 4, 8, 12, 13, 16, 24, 32, 41, 61, 64)
    assert (study.protocol, study.device, study.repeats, study.columns) == ("paper", "cuda", (50,), (1,))


def test_the_block_krylov_study_multiplies_blocks_once():
    study = read_overlap_study(EXAMPLES / "overlap" / "block_krylov.yaml")

    assert (study.protocol, study.repeats, study.columns) == ("engine", (1,), (8, 16, 32))
    assert study.format == "sliced_bsr"


def test_the_demo_is_as_large_as_promised():
    experiment = read_experiment(EXAMPLES / "cantilever.yaml")
    plan = plan_experiment(experiment)

    assert experiment.cantilever().unknowns >= 100_000
    assert plan.index.nbytes >= max(100_000_000, 3 * plan.budget_nbytes)
    assert experiment.solver.rtol <= 1e-8


@pytest.mark.parametrize(
    ("page", "last", "smaller", "solves", "left"),
    [
        ("README.md", 1, {"(300, 300)": "(60, 60)", '"2 MiB"': '"100 KiB"'}, 2, []),
        ("docs/start/first-solve.md", 3, {"(300, 300)": "(60, 60)", '"2 MiB"': '"100 KiB"'}, 2, []),
        ("docs/how-to/from-disk.md", 1, {"(65, 17, 17)": "(33, 9, 9)", '"8 MiB"': '"1 MiB"'}, 1, ["beam-matrix"]),
    ],
)
def test_the_scripts_of_a_page_run(page, last, smaller, solves, left, tmp_path, monkeypatch, capsys):
    """The last ones, one after the other, as a reader would go on."""
    text = (EXAMPLES.parent / page).read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[-last:])
    monkeypatch.chdir(tmp_path)
    for full, small in smaller.items():
        assert full in code
        code = code.replace(full, small)

    exec(compile(code, page, "exec"), {})

    assert capsys.readouterr().out.count("converged:") == solves
    assert os.listdir(tmp_path) == left


def test_the_table_of_the_readme_is_that_of_the_records():
    root = EXAMPLES.parent
    checked = subprocess.run([sys.executable, root / "benchmarks" / "readme_table.py", "--check"], check=False)

    assert checked.returncode == 0
    assert len((root / "README.md").read_text().splitlines()) <= 120
