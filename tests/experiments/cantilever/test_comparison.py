"""One system in all variants: the same solution, a table and a picture; an interrupted comparison is resumed."""

import json

import h5py
import numpy as np
import pytest
import yaml
from interrupting import interrupt_at
from typer.testing import CliRunner

from penstock.commands.app import app
from penstock.driver import open_system, opening
from penstock.experiments import Experiment, run_experiment
from penstock.experiments.cantilever import comparison as comparison_module
from penstock.experiments.cantilever import single_run as single_run_module
from penstock.experiments.cantilever.comparison import VARIANTS, compare_experiment
from penstock.spmv import InputError
from penstock.streaming import LinkRates

DESCRIBED = {
    "model": {"nodes": [32, 5, 5], "dof": 3},
    "solver": {"rtol": 1e-9},
    "memory": {"budget": "600 KiB"},
    "output": {"figures": False},
}
# For tests that claim nothing about the solution.
BRIEF = {"rtol": 1e-4}


@pytest.fixture(autouse=True, scope="module")
def rates():
    """Of a slow disk: starts would take longer than these small pieces."""
    rates = LinkRates(1e8, 1e11, transfer_start=1e-6, product_start=1e-6)
    with pytest.MonkeyPatch.context() as patch:
        measured = lambda of, *rest: None if of.memory.budget is None else rates  # noqa: E731
        patch.setattr(single_run_module, "measure_rates", measured)
        patch.setattr(opening, "plan_again", lambda *arguments: None)  # which are fast here
        yield


def described(**sections):
    return Experiment.model_validate(
        {name: {**DESCRIBED.get(name, {}), **sections.get(name, {})} for name in {**DESCRIBED, **sections}}
    )


def records_of(folder):
    return {record["way"]: record for record in json.loads(folder.records.read_text())}


def solution_of(folder):
    with h5py.File(folder.field) as file:
        return np.asarray(file["VTKHDF/PointData/displacement"])


@pytest.fixture(scope="module")
def compared(rates, tmp_path_factory):
    return compare_experiment(described(), tmp_path_factory.mktemp("compare") / "run")


def test_all_variants_have_the_same_solution(compared):
    folder, ended = compared
    assert ended
    records = records_of(folder)
    assert list(records) == list(VARIANTS)
    assert all(record["converged"] and record["true_residual"] <= 1e-9 for record in records.values())
    solutions = [solution_of(folder.variant(name)) for name in VARIANTS]
    for solution in solutions[1:]:
        np.testing.assert_allclose(solution, solutions[0], atol=1e-5 * np.abs(solutions[0]).max())


def test_each_variant_does_what_its_name_says(compared):
    folder, _ = compared
    records = records_of(folder)
    assert records["memory"]["bytes_streamed"] == 0
    for name in list(VARIANTS)[1:]:
        assert (records[name]["bytes_streamed"] > 0) == (name != "on_arrival")
        saved = yaml.safe_load(folder.variant(name).configuration.read_text())
        assert saved["memory"]["overlap"] == ("no_overlap" not in name)
        assert saved["memory"]["budget"] == 600 << 10
        assert (records[name]["precision"] != "float64") == name.startswith("image")
    assert [records[name]["products"] == 1 for name in VARIANTS] == [True] * 3 + [False] * 5
    assert records["on_arrival"]["iterations"] < records["wavefront"]["iterations"]
    assert records["image"]["sweeps"] < records["coarse_level"]["sweeps"] / 2
    assert records["wavefront"]["sweeps"] < records["overlap"]["sweeps"] / 2
    assert records["coarse_level"]["iterations"] < records["wavefront"]["iterations"]


def test_a_table_and_a_picture_are_left(compared):
    folder, _ = compared
    table = folder.table.read_text()
    assert all(variant.title in table for variant in VARIANTS.values())
    assert folder.figure.read_bytes().startswith(b"\x89PNG")


def test_without_a_budget_a_quarter_of_the_matrix_is_taken(tmp_path):
    folder, _ = compare_experiment(described(memory={"budget": None}, solver=BRIEF), tmp_path / "run")
    nbytes = described().cantilever().nnz * 8
    assert yaml.safe_load(folder.configuration.read_text())["memory"]["budget"] == nbytes // 4
    assert records_of(folder)["overlap"]["converged"]


def test_an_interrupted_comparison_goes_on(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_at(patch, open_system, 60)  # of the first variant
        folder, ended = compare_experiment(described(), tmp_path / "run")
    assert not ended
    assert folder.variant("memory").checkpoint.exists()

    again, ended = compare_experiment(None, tmp_path / "run")

    assert ended
    assert again.path == folder.path
    assert all(record["converged"] for record in records_of(again).values())
    before = folder.variant("memory").result.stat().st_mtime_ns
    compare_experiment(None, tmp_path / "run")  # nothing is left to do
    assert folder.variant("memory").result.stat().st_mtime_ns == before


def test_a_variant_that_is_refused_is_recorded_and_the_others_are_solved(tmp_path):
    folder, ended = compare_experiment(described(memory={"budget": "60 KiB", "slots": 40}), tmp_path / "run")
    records = records_of(folder)
    assert ended
    assert records["memory"]["converged"]
    assert "budget" in records["overlap"]["refused"]
    assert "was refused: " in folder.table.read_text()


def test_a_cut_that_cannot_be_is_noted_and_the_command_fails(tmp_path):
    file = tmp_path / "small.yaml"
    memory = {**DESCRIBED["memory"], "subdivisions": 10_000}
    file.write_text(yaml.safe_dump({**DESCRIBED, "model": {"nodes": [16, 5, 5], "dof": 3}, "memory": memory}))
    result = CliRunner().invoke(app, ["compare", str(file), "--output", str(tmp_path / "run")])

    assert result.exit_code == 1, result.output
    records = json.loads((tmp_path / "run" / "comparison.json").read_text())
    assert [("refused" in record) for record in records] == [False] + [True] * 5
    assert "subdivisions at most" in records[1]["refused"]


def test_variants_do_not_inherit_a_precision(tmp_path):
    folder, _ = compare_experiment(described(memory={"precision": "auto"}, solver=BRIEF), tmp_path / "run")

    for way, record in records_of(folder).items():
        assert (record["precision"] != "float64") == way.startswith("image")


@pytest.mark.parametrize("memory", [{"values": "float32"}, {"budget": "1 GiB"}, {"format": "csr"}])
def test_where_there_is_no_image_there_is_no_variant_with_one(memory, tmp_path):
    folder, ended = compare_experiment(described(memory=memory, solver=BRIEF), tmp_path / "run")

    assert ended
    assert list(records_of(folder)) == [name for name in VARIANTS if not name.startswith("image")]


def test_a_brief_solve_is_made_twice(tmp_path, monkeypatch):
    """The first one may include loading kernels."""
    solved = []
    monkeypatch.setattr(comparison_module, "_BRIEF_SECONDS", 1e9)  # on a busy machine no solve may be brief
    monkeypatch.setattr(
        comparison_module, "run_experiment", lambda *args, **rest: solved.append(args) or run_experiment(*args, **rest)
    )
    folder, _ = compare_experiment(described(solver=BRIEF), tmp_path / "run")
    assert len(solved) == 2 * len(VARIANTS)
    for record in records_of(folder).values():
        if record["way"] != "on_arrival":  # a subdivision is made again where that is cheaper than a long ring
            assert record["products_a_sweep"] == (
                record["products"] if record["way"] in ("wavefront", "coarse_level") else 1
            )


@pytest.mark.parametrize("sections", [{"material": {"kind": "lognormal", "samples": 3}}, {"load": {"samples": 2}}])
def test_samples_are_no_single_system(sections, tmp_path):
    with pytest.raises(InputError, match="one system and one right-hand side"):
        compare_experiment(described(**sections), tmp_path / "run")


def test_a_folder_without_a_comparison_cannot_be_gone_on_with(tmp_path):
    with pytest.raises(InputError, match="no comparison to resume"):
        compare_experiment(None, tmp_path)


def test_the_command_prints_the_table(tmp_path):
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump({**DESCRIBED, "model": {"nodes": [16, 5, 5], "dof": 3}}))
    result = CliRunner().invoke(app, ["compare", str(file), "--output", str(tmp_path / "run")])

    assert result.exit_code == 0, result.output
    for variant in list(VARIANTS.values())[:5]:  # it fits the budget, so there is no image
        assert variant.title in result.output
    assert "comparison.png" in [path.name for path in (tmp_path / "run").iterdir()]
    assert CliRunner().invoke(app, ["compare"]).exit_code == 2
