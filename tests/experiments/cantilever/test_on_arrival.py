"""Experiments whose matrix is assembled where it is used: results are those of a stored matrix, and nothing is stored."""

import json

import h5py
import numpy as np
import pytest
from interrupting import interrupt_at
from kernel_targets import DEVICES
from pydantic import ValidationError
from typer.testing import CliRunner

from penstock.commands.app import app
from penstock.driver import open_system
from penstock.experiments import Experiment, plan_experiment, read_experiment, resume_experiment, run_experiment
from penstock.streaming import LinkRates

DESCRIBED = {
    "model": {"nodes": [33, 7, 7], "dof": 3},
    "material": {"kind": "lognormal"},
    "solver": {"preconditioner": "smoothed_aggregation"},
    "memory": {"budget": "700 KiB", "matrix": "on_arrival"},
    "output": {"figures": False},
}


def experiment(**changes):
    sections = {name: {**section, **changes.get(name, {})} for name, section in DESCRIBED.items()}
    return Experiment.model_validate(sections | {"load": changes.get("load", {})})


def result_of(folder):
    return json.loads(folder.result.read_text())


def field(folder, name="displacement"):
    with h5py.File(folder.field) as file:
        return np.asarray(file[f"VTKHDF/PointData/{name}"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format_name", ["csr", "bsr", "sliced_bsr", "symmetric_bsr"])
@pytest.mark.parametrize("dof", [1, 3, 6])
def test_the_solution_is_that_of_the_stored_matrix(device, format_name, dof, tmp_path):
    budget = {1: "150 KiB", 3: "1 MiB", 6: "4 MiB"}[dof]
    memory = {"device": device, "format": format_name, "budget": budget}
    ways = {"on_arrival": 0, "stored": 1}
    folders = {
        way: run_experiment(
            experiment(model={"dof": dof}, memory={**memory, "matrix": way}, solver={"preconditioner": "block_jacobi"}),
            tmp_path / way,
        ).folder
        for way in ways
    }

    results = {way: result_of(folder) for way, folder in folders.items()}
    for way, moves in ways.items():
        assert results[way]["converged"]
        assert (results[way]["bytes_streamed"] > 0) == bool(moves)
        assert read_experiment(folders[way].configuration).memory.matrix == way
    assert results["on_arrival"]["iterations"] == pytest.approx(results["stored"]["iterations"], rel=0.02)
    assert not folders["on_arrival"].matrix.exists()
    assert "made        " in folders["on_arrival"].plan.read_text()
    name = "temperature" if dof == 1 else "displacement"
    solutions = [field(folders[way], name) for way in ways]
    np.testing.assert_allclose(*solutions, atol=1e-6 * abs(solutions[1]).max())


def test_values_may_be_of_float32(tmp_path):
    folder = run_experiment(experiment(memory={"values": "float32", "budget": "400 KiB"}), tmp_path / "run").folder

    assert result_of(folder)["converged"]
    assert result_of(folder)["bytes_streamed"] == 0


def test_a_run_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    whole = run_experiment(experiment(), tmp_path / "whole").folder
    with monkeypatch.context() as patch:
        interrupt_at(patch, open_system, 5)
        stopped = run_experiment(experiment(), tmp_path / "run")
    assert stopped.interrupted

    folder = resume_experiment(tmp_path / "run").folder

    assert result_of(folder)["converged"]
    assert field(folder).tobytes() == field(whole).tobytes()


def test_samples_differ_in_their_elements_only(tmp_path):
    material = {"samples": 3, "seed": 5}
    folders = [
        run_experiment(experiment(material=material, memory={"matrix": way}), tmp_path / way).folder
        for way in ("on_arrival", "stored")
    ]

    results = [result_of(folder) for folder in folders]
    assert results[0]["converged"]
    assert results[0]["tip_deflection"] == pytest.approx(results[1]["tip_deflection"], rel=1e-6)
    assert results[0]["tip_deflection_deviation"] > 0


def test_an_image_may_still_be_asked_for(tmp_path):
    asked = run_experiment(experiment(memory={"precision": "float32", "budget": "1 MiB"}), tmp_path / "asked").folder
    auto = run_experiment(experiment(memory={"precision": "auto"}), tmp_path / "auto").folder

    assert result_of(asked)["precision"] == "float32"
    assert result_of(asked)["bytes_streamed"] == 0
    assert result_of(auto)["precision"] == "float64"  # what an image saves is the link


@pytest.mark.gpu
def test_a_resumed_run_needs_no_more_memory_than_one_from_the_start(tmp_path):
    """The vectors of a checkpoint wait on the host until the solve has its own."""
    cupy = pytest.importorskip("cupy")
    pool, unknowns = cupy.get_default_memory_pool(), 3 * 65**3
    changes = {
        "model": {"nodes": 65},
        "solver": {"degree": 5, "aggregate_nodes": 64, "options": {"keep_vectors": False}},
        "memory": {"device": "cuda", "budget": "32 MiB", "subdivisions": 32, "slots": 3},  # one plan for all
    }

    def peak(run):
        pool.free_all_blocks()
        before = pool.total_bytes()
        outcome = run()
        return outcome, pool.total_bytes() - before

    whole, of_whole = peak(lambda: run_experiment(experiment(**changes), tmp_path / "whole"))
    changes["solver"]["maxiter"] = 3
    run_experiment(experiment(**changes), tmp_path / "stopped")
    resumed, of_resumed = peak(lambda: resume_experiment(tmp_path / "stopped", maxiter=500))

    assert result_of(resumed.folder)["converged"]
    assert np.allclose(field(resumed.folder), field(whole.folder), rtol=0, atol=1e-7)
    assert of_resumed < of_whole + 8 * unknowns  # less than one vector more


@pytest.mark.parametrize(
    ("memory", "on_arrival"),
    [
        ({"matrix": "auto", "device": "cuda"}, True),
        ({"matrix": "auto", "device": "cpu"}, False),
        ({"matrix": "auto", "device": "cuda", "store": "matrix"}, False),
        ({"matrix": "auto", "devices": ["cuda:0", "cpu"]}, False),
        ({"matrix": "stored", "device": "cuda"}, False),
        ({"matrix": "on_arrival", "device": "cpu"}, True),
    ],
)
def test_a_gpu_assembles_on_arrival_unless_something_is_stored(memory, on_arrival):
    described = experiment(memory=memory, solver={"preconditioner": "block_jacobi"})

    assert described.on_arrival == on_arrival


def test_ranks_assemble_on_arrival_what_they_stream():
    streams, holds = (
        Experiment.model_validate({**DESCRIBED, "memory": {"device": "cuda", **memory}, "parallel": "mpi"})
        for memory in ({"budget": "700 KiB"}, {})
    )

    assert streams.on_arrival
    assert streams.of_planes(9).on_arrival
    assert not holds.on_arrival


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"memory": {"store": "matrix"}}, "store keeps a stored matrix"),
        ({"memory": {"devices": ["cuda:0", "cpu"]}}, "devices share a stored matrix"),
        ({"parallel": "mpi", "memory": {"budget": None}}, "assembles on arrival what is streamed"),
    ],
)
def test_what_needs_a_stored_matrix_is_refused(sections, message):
    described = {**DESCRIBED, **sections, "memory": {**DESCRIBED["memory"], **sections.get("memory", {})}}

    with pytest.raises(ValidationError, match=message):
        Experiment.model_validate(described)


def test_a_plan_counts_elements_and_assembly(tmp_path):
    described = experiment(model={"nodes": 64}, memory={"budget": "64 MiB", "device": "cuda"})
    rates = LinkRates(link=55e9, memory=3e12, side_by_side=4)

    plan, stored = (
        plan_experiment(described.changed(memory={"matrix": way}), rates) for way in ("on_arrival", "stored")
    )

    assert plan.streamed_nbytes == 0 < stored.streamed_nbytes
    assert "MiB for the elements" in plan.explain()
    assert "assembly" in plan.explain()
    assert "link" not in plan.explain()
    assert plan.estimated_solve_seconds() < stored.estimated_solve_seconds()


def test_the_command_says_what_it_would_do(tmp_path):
    file = tmp_path / "beam.yaml"
    file.write_text(
        "model: {nodes: [33, 7, 7]}\nsolver: {preconditioner: auto}\n"
        "memory: {budget: 700 KiB, device: cuda, matrix: on_arrival}\n"
    )

    result = CliRunner().invoke(app, ["plan", str(file), "--rates", "h100"])

    assert result.exit_code == 0, result.output
    assert "made        " in result.output
