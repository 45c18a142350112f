"""Experiments whose matrix is streamed for residuals only: all iterations are made with an image of it in fewer digits."""

import json
import re

import h5py
import numpy as np
import pytest
from interrupting import interrupt_at
from typer.testing import CliRunner
from unfit_images import open_unfit

from penstock.commands.app import app
from penstock.driver import open_system as open_system_module
from penstock.experiments import Experiment, read_experiment, resume_experiment, run_experiment
from penstock.experiments import run as run_module
from penstock.spmv import BudgetError, InputError

DESCRIBED = {
    "model": {"nodes": [33, 7, 7], "dof": 3},
    "material": {"kind": "lognormal"},
    "solver": {"preconditioner": "smoothed_aggregation"},
    "memory": {"budget": "700 KiB", "precision": "auto"},
    "output": {"figures": False},
}


def experiment(**changes):
    sections = {name: {**section, **changes.get(name, {})} for name, section in DESCRIBED.items()}
    return Experiment.model_validate(sections)


def result_of(folder):
    return json.loads(folder.result.read_text())


def field(folder):
    with h5py.File(folder.field) as file:
        return np.asarray(file["VTKHDF/PointData/displacement"])


@pytest.mark.parametrize(("precision", "budget", "used"), [
    ("auto", "700 KiB", "int16"), ("int16", "900 KiB", "int16"), ("auto", "1 MiB", "float32"), ("float32", "1 MiB", "float32"),
])  # fmt: skip
def test_few_sweeps_are_left_and_the_solution_is_the_same(precision, budget, used, tmp_path):
    streamed = run_experiment(experiment(memory={"precision": "float64"}), tmp_path / "streamed").folder
    folder = run_experiment(experiment(memory={"precision": precision, "budget": budget}), tmp_path / "image").folder

    result = result_of(folder)
    assert result["converged"]
    assert result["true_residual"] <= 1e-8
    assert result["precision"] == used
    assert result["sweeps"] <= 8
    assert result["sweeps"] < result_of(streamed)["sweeps"] / 3
    assert np.allclose(field(folder), field(streamed), atol=1e-6 * abs(field(streamed)).max())
    assert f"an image of the matrix in {used}" in folder.plan.read_text()
    assert read_experiment(folder.configuration).memory.precision == used
    assert not folder.matrix.exists()


def test_a_matrix_that_fits_has_no_image(tmp_path):
    folder = run_experiment(experiment(memory={"budget": "100 MiB"}), tmp_path / "run").folder

    assert result_of(folder)["precision"] == "float64"
    assert "image" not in folder.plan.read_text()


@pytest.mark.parametrize("preconditioner", ["multigrid", "incomplete_cholesky", "block_jacobi"])
def test_preconditioners_of_matrices_in_memory_work_out_of_core(preconditioner, tmp_path):
    folder = run_experiment(experiment(solver={"preconditioner": preconditioner}), tmp_path / "run").folder

    assert result_of(folder)["converged"]
    assert result_of(folder)["sweeps"] <= 8


def test_an_interrupted_run_is_resumed_with_its_image(tmp_path, monkeypatch):
    described = experiment()
    whole = run_experiment(described, tmp_path / "whole").folder
    with monkeypatch.context() as patch:
        interrupt_at(patch, open_system_module, 4)
        stopped = run_experiment(described, tmp_path / "stopped")
    assert stopped.interrupted

    resumed = resume_experiment(tmp_path / "stopped").folder

    assert result_of(resumed)["precision"] == "int16"
    assert np.allclose(field(resumed), field(whole), atol=1e-6 * abs(field(whole)).max())


@pytest.mark.parametrize("store", [False, True])
def test_an_unfit_image_is_left_for_the_matrix_as_it_would_have_been_streamed(store, tmp_path, monkeypatch):
    memory = {"store": str(tmp_path / "store")} if store else {}
    asked = run_experiment(experiment(memory={"precision": "float64"}), tmp_path / "asked").folder
    monkeypatch.setattr(run_module, "open_system", open_unfit)
    folder = run_experiment(experiment(memory=memory), tmp_path / "run").folder

    assert result_of(folder)["converged"]
    assert result_of(folder)["precision"] == "float64"
    assert not folder.checkpoint.exists()
    saved, wanted = (read_experiment(of.configuration).memory for of in (folder, asked))
    assert saved.precision == "float64"
    if not store:
        assert (saved.format, saved.subdivisions, saved.slots) == (wanted.format, wanted.subdivisions, wanted.slots)
    assert "image" not in folder.plan.read_text()


def test_a_store_is_used_as_an_earlier_run_has_cut_it(tmp_path):
    memory = {"store": str(tmp_path / "store")}
    first = run_experiment(experiment(memory=memory), tmp_path / "first").folder
    again = run_experiment(experiment(memory={**memory, "budget": "800 KiB"}), tmp_path / "again").folder
    streamed = run_experiment(experiment(memory={**memory, "precision": "float64"}), tmp_path / "streamed").folder

    assert [result_of(folder)["precision"] for folder in (first, again, streamed)] == ["int16", "int16", "float64"]
    assert len({read_experiment(folder.configuration).memory.subdivisions for folder in (first, again, streamed)}) == 1


def test_another_precision_is_named_where_a_run_is_resumed(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_at(patch, open_system_module, 4)
        folder = run_experiment(experiment(), tmp_path / "run").folder
    text = folder.configuration.read_text()
    folder.configuration.write_text(text.replace("precision: int16", "precision: float64"))

    with pytest.raises(InputError, match="precision"):
        resume_experiment(tmp_path / "run")


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(BudgetError, match=r"image of .* in int16 .* do not fit"):
        run_experiment(experiment(memory={"precision": "int16", "budget": "300 KiB"}), tmp_path / "small")
    with pytest.raises(InputError, match="no image in int16"):
        run_experiment(experiment(memory={"precision": "int16", "format": "csr"}), tmp_path / "csr")
    for changes, told in (
        ({"memory": {"budget": None}}, "takes a budget"),
        ({"memory": {"values": "float32"}}, "images are of float64"),
        ({"memory": {"devices": ["cuda:0", "cpu"]}}, "devices share every product"),
    ):
        with pytest.raises(ValueError, match=told):
            experiment(**changes)


def test_an_image_that_a_method_has_no_use_for_is_refused(tmp_path):
    for precision, refused in (("int16", True), ("auto", False)):
        described = experiment(memory={"precision": precision}, solver={"method": "minres", "preconditioner": "auto"})
        if refused:
            with pytest.raises(InputError, match="is for cg, not for minres"):
                run_experiment(described, tmp_path / precision)
        else:
            folder = run_experiment(described, tmp_path / precision).folder
            assert result_of(folder)["precision"] == "float64"
    with pytest.raises(InputError, match="blocks of several unknowns"):
        run_experiment(
            experiment(model={"dof": 1}, memory={"precision": "int16", "budget": "30 KiB"}), tmp_path / "scalar"
        )


def test_a_run_that_is_killed_after_its_image_was_left_begins_anew(tmp_path, monkeypatch):
    """The state in the checkpoint is one of the image."""
    described = experiment(output={"checkpoint_seconds": 1e-3})
    with monkeypatch.context() as patch:
        interrupt_at(patch, open_system_module, 4)
        folder = run_experiment(described, tmp_path / "run").folder
    assert folder.checkpoint.exists()
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "open_system", open_unfit)
        patch.setattr(run_module.Run, "_solve", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            resume_experiment(tmp_path / "run")

    assert result_of(resume_experiment(tmp_path / "run").folder)["converged"]


def test_the_plan_says_what_a_run_will_do(tmp_path):
    file = tmp_path / "beam.yaml"
    file.write_text(
        "model: {nodes: [33, 7, 7], dof: 3}\nmemory: {budget: 700 KiB, precision: auto}\n"
        "solver: {preconditioner: smoothed_aggregation}\n"
    )

    planned = CliRunner().invoke(app, ["plan", str(file)])

    assert planned.exit_code == 0, planned.output
    assert re.search(r"an image of the matrix in int16.*\n(.*\n)*residuals +computed with A in float64", planned.output)


@pytest.mark.parametrize("precision", ["auto", "float64"])
def test_a_stiffness_beyond_float32_is_stored_without_planes(precision, tmp_path):
    changes = {"memory": {"budget": "1100 KiB", "precision": precision}, "material": {"young": 1e-45}}

    outcome = run_experiment(experiment(**changes), tmp_path / "run")

    assert result_of(outcome.folder)["converged"]
