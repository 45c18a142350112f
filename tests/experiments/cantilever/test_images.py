"""Experiments whose matrix is streamed for residuals only: all iterations are made with an image of it in fewer digits."""

import json
import re

import h5py
import numpy as np
import pytest
from interrupting import interrupt_at
from typer.testing import CliRunner

from penstock.commands.app import app
from penstock.driver import open_system as open_system_module
from penstock.experiments import Experiment, read_experiment, resume_experiment, run_experiment
from penstock.experiments import run as run_module
from penstock.solvers.image_solve import ImageUnfitError
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


def test_an_unfit_image_is_left_for_the_matrix(tmp_path, monkeypatch):
    real = run_module.open_system

    def open_system(matrix, request, **options):
        if request.precision != "float64":
            raise ImageUnfitError("it is too coarse")
        return real(matrix, request, **options)

    monkeypatch.setattr(run_module, "open_system", open_system)
    folder = run_experiment(experiment(), tmp_path / "run").folder

    assert result_of(folder)["converged"]
    assert result_of(folder)["precision"] == "float64"
    assert read_experiment(folder.configuration).memory.precision == "float64"


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
    with pytest.raises(ValueError, match="mpi has no images"):
        Experiment.model_validate({**DESCRIBED, "parallel": "mpi"})


def test_the_plan_says_what_a_run_will_do(tmp_path):
    file = tmp_path / "beam.yaml"
    file.write_text(
        "model: {nodes: [33, 7, 7], dof: 3}\nmemory: {budget: 700 KiB, precision: auto}\n"
        "solver: {preconditioner: smoothed_aggregation}\n"
    )

    planned = CliRunner().invoke(app, ["plan", str(file)])

    assert planned.exit_code == 0, planned.output
    assert re.search(r"an image of the matrix in int16.*\n(.*\n)*residuals +computed with A in float64", planned.output)
