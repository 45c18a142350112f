"""Ranks run an experiment together: ``mpiexec -n 3 penstock run FILE.yaml`` with ``parallel: mpi``."""

import json
import sys

import h5py
import numpy as np
import pytest
import unfit_images
import yaml
from launching import BINARIES, launch

from penstock.experiments import Experiment, run_experiment

CONTENT = {
    "model": {"nodes": [13, 4, 4]},
    "material": {"kind": "lognormal"},
    "solver": {"preconditioner": "block_jacobi"},
    "output": {"figures": False},
}


def command(ranks, *arguments):
    """Run penstock on some ranks."""
    return launch(ranks, BINARIES / "penstock", *arguments)


@pytest.fixture
def write(tmp_path):
    def written(**changes):
        path = tmp_path / "experiment.yaml"
        path.write_text(yaml.safe_dump({**CONTENT, **changes}))
        return path

    return written


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "results"
    run_experiment(Experiment.model_validate(CONTENT), folder)
    return folder


def result_of(folder):
    return json.loads((folder / "result.json").read_text())


def field_of(folder):
    with h5py.File(folder / "solution.vtkhdf") as file:
        return np.array(file["VTKHDF/PointData/displacement"])


def test_other_ranks_go_on_with_what_ranks_have_begun(write, alone, tmp_path):
    folder = tmp_path / "out"
    file = write(parallel="mpi", solver={"preconditioner": "block_jacobi", "maxiter": 20})

    first = command(2, "run", file, "--output", folder)

    assert first.returncode == 1, first.stderr
    assert first.stdout.count("Not converged") == 1  # one rank speaks
    assert (folder / "checkpoint.npz").exists()

    second = command(3, "run", "--resume", folder, "--maxiter", "500")

    assert second.returncode == 0, second.stderr
    found, expected = result_of(folder), result_of(alone)
    assert found["converged"]
    assert found["true_residual"] <= 1e-8
    assert found["ranks"] == 3
    assert abs(found["iterations"] - expected["iterations"]) <= 3
    assert np.allclose(field_of(folder), field_of(alone), rtol=0, atol=1e-6 * abs(field_of(alone)).max())
    assert not (folder / "checkpoint.npz").exists()
    assert "ranks            3" in second.stdout


@pytest.mark.parametrize(("others", "storage"), [(3, "auto"), (2, "csr")])
def test_a_coarse_level_goes_on_and_of_other_ranks_from_the_iterate(others, storage, write, alone, tmp_path):
    folder = tmp_path / "out"
    solver = {"preconditioner": "smoothed_aggregation", "maxiter": 3}
    file = write(parallel="mpi", solver=solver, memory={"format": storage})

    first = command(2, "run", file, "--output", folder)
    second = command(others, "run", "--resume", folder, "--maxiter", "500")

    assert (first.returncode, second.returncode) == (1, 0), first.stderr + second.stderr
    found = result_of(folder)
    assert found["converged"]
    assert 4 <= found["iterations"] <= 20
    assert np.allclose(field_of(folder), field_of(alone), rtol=0, atol=1e-6 * abs(field_of(alone)).max())


@pytest.mark.parametrize("name", ["chebyshev", "smoothed_aggregation"])
def test_ranks_stream_their_rows_and_others_go_on(name, write, tmp_path):
    folder, model = tmp_path / "out", {"nodes": [31, 6, 6]}
    run_experiment(Experiment.model_validate({**CONTENT, "model": model}), tmp_path / "alone")
    solver, memory = {"preconditioner": name, "maxiter": 3}, {"budget": "200 KiB", "format": "symmetric_bsr"}

    first = command(2, "run", write(parallel="mpi", model=model, solver=solver, memory=memory), "--output", folder)
    assert first.returncode == 1, first.stderr
    stopped = result_of(folder)
    second = command(3, "run", "--resume", folder, "--maxiter", "500")

    assert second.returncode == 0, second.stderr
    found, alone = result_of(folder), result_of(tmp_path / "alone")
    assert found["converged"]
    assert found["true_residual"] <= 1e-8
    assert (stopped["ranks"], found["ranks"]) == (2, 3)
    assert found["unknowns"] == alone["unknowns"]
    # Half of the matrix, without what couples the ranks, in pieces of whole pages; each rank has less memory than its part.
    assert 0.4 < found["matrix_nbytes"] / alone["matrix_nbytes"] < 0.8
    assert found["peak_budget_nbytes"] <= 200 << 10 < stopped["matrix_nbytes"] / 2
    assert found["bytes_streamed"] > stopped["bytes_streamed"] > stopped["matrix_nbytes"]
    expected = field_of(tmp_path / "alone")
    assert np.allclose(field_of(folder), expected, rtol=0, atol=1e-6 * abs(expected).max())
    assert not list(folder.glob("matrix*"))
    assert (folder / "timeline.json").exists()


def test_ranks_assemble_their_rows_on_arrival_and_others_go_on(write, tmp_path):
    folder, model = tmp_path / "out", {"nodes": [31, 6, 6]}
    run_experiment(Experiment.model_validate({**CONTENT, "model": model}), tmp_path / "alone")
    solver = {"preconditioner": "smoothed_aggregation", "maxiter": 3}
    memory = {"budget": "200 KiB", "format": "symmetric_bsr", "matrix": "on_arrival"}

    first = command(2, "run", write(parallel="mpi", model=model, solver=solver, memory=memory), "--output", folder)
    second = command(3, "run", "--resume", folder, "--maxiter", "500")

    assert (first.returncode, second.returncode) == (1, 0), first.stderr + second.stderr
    found = result_of(folder)
    assert found["converged"]
    assert found["true_residual"] <= 1e-8
    assert (found["ranks"], found["bytes_streamed"]) == (3, 0)
    assert found["peak_budget_nbytes"] <= 200 << 10
    assert "in their slots" in (folder / "plan.txt").read_text()
    expected = field_of(tmp_path / "alone")
    assert np.allclose(field_of(folder), expected, rtol=0, atol=1e-6 * abs(expected).max())


@pytest.mark.parametrize(
    ("precision", "budget", "used"), [("auto", "330 KiB", "int16"), ("float32", "600 KiB", "float32")]
)
def test_ranks_hold_images_of_their_rows_and_others_go_on(precision, budget, used, write, tmp_path):
    folder, model = tmp_path / "out", {"nodes": [31, 6, 6]}
    run_experiment(Experiment.model_validate({**CONTENT, "model": model}), tmp_path / "alone")
    solver = {"preconditioner": "smoothed_aggregation", "maxiter": 6}
    memory = {"budget": budget, "precision": precision}

    first = command(2, "run", write(parallel="mpi", model=model, solver=solver, memory=memory), "--output", folder)
    assert first.returncode == 1, first.stderr
    second = command(3, "run", "--resume", folder, "--maxiter", "500")

    assert second.returncode == 0, second.stderr
    found = result_of(folder)
    assert found["converged"]
    assert found["true_residual"] <= 1e-8
    assert (found["ranks"], found["precision"]) == (3, used)
    assert found["sweeps"] <= 10 < found["iterations"]
    assert 0 < found["image_nbytes"] < found["peak_budget_nbytes"] <= found["budget_nbytes"]
    assert f"an image of the matrix in {used}" in (folder / "plan.txt").read_text()
    expected = field_of(tmp_path / "alone")
    assert np.allclose(field_of(folder), expected, rtol=0, atol=1e-6 * abs(expected).max())
    assert not list(folder.glob("matrix*"))


def test_the_cut_is_one_that_the_rank_with_the_fewest_rows_can_make(write, tmp_path):
    model, memory = {"nodes": [25, 6, 6]}, {"budget": "330 KiB", "precision": "auto"}
    solver = {"preconditioner": "smoothed_aggregation"}
    file = write(parallel="mpi", model=model, memory=memory, solver=solver)

    run = command(2, "run", file, "--output", tmp_path / "out")  # of 13 planes and of 12, with 15 and 14 chunks

    assert run.returncode == 0, run.stderr
    assert result_of(tmp_path / "out")["converged"]
    assert yaml.safe_load((tmp_path / "out" / "configuration.yaml").read_text())["memory"]["subdivisions"] == 14


def test_ranks_end_together_where_the_rows_of_some_fit_their_budget(write, tmp_path):
    model, memory = {"nodes": [5, 12, 12]}, {"budget": "260 KiB", "format": "symmetric_bsr"}

    run = command(2, "run", write(parallel="mpi", model=model, memory=memory), "--output", tmp_path / "out")

    assert run.returncode == 0, run.stderr
    assert "resident    everything" in (tmp_path / "out" / "plan.txt").read_text()  # of the first rank, with two planes
    assert result_of(tmp_path / "out")["bytes_streamed"] > 0  # by the other one, with three
    assert (tmp_path / "out" / "timeline.json").exists()


def test_ranks_leave_an_unfit_image_together(write, tmp_path):
    folder, model = tmp_path / "out", {"nodes": [31, 6, 6]}
    memory = {"budget": "330 KiB", "precision": "auto"}

    run = launch(2, sys.executable, unfit_images.__file__, write(parallel="mpi", model=model, memory=memory), folder)

    assert run.returncode == 0, run.stderr
    found = result_of(folder)
    assert (found["converged"], found["precision"], found["ranks"]) == (True, "float64", 2)
    assert "image" not in (folder / "plan.txt").read_text()
    assert not (folder / "checkpoint.npz").exists()


def test_pictures_without_a_field_are_drawn_by_one_rank(write, tmp_path):
    """All ranks write the last checkpoint together, though only one of them draws."""
    file = write(parallel="mpi", model={"nodes": [7, 4, 4]}, output={"figures": True, "field": False})

    run = command(2, "run", file, "--output", tmp_path / "out")

    assert run.returncode == 0, run.stderr
    assert (tmp_path / "out" / "convergence.png").exists()


def test_more_ranks_than_pairs_of_planes_do_not_stream(write, tmp_path):
    file = write(parallel="mpi", model={"nodes": [3, 4, 4]}, memory={"budget": "1 MiB"})

    run = command(2, "run", file, "--output", tmp_path / "out")

    assert run.returncode == 2
    assert "2 ranks are too many for 3 planes of nodes; to stream, each needs two" in run.stderr
    assert not (tmp_path / "out").exists()


def test_several_loads_are_solved_by_ranks_together(write, tmp_path):
    cases = {"cases": [{"kind": "shear"}, {"kind": "axial"}]}

    run = command(2, "run", write(parallel="mpi", load=cases), "--output", tmp_path / "out")

    assert run.returncode == 0, run.stderr
    assert [column["reason"] for column in result_of(tmp_path / "out")["columns"]] == ["converged"] * 2


def test_copies_that_do_not_know_each_other_are_refused(write, tmp_path):
    run = command(2, "run", write(), "--output", tmp_path / "out")

    assert run.returncode == 2
    assert run.stderr.count("a launcher started 2 copies") == 1
    assert not (tmp_path / "out").exists()


def test_an_error_of_all_ranks_is_told_once(write, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")

    run = command(2, "run", write(parallel="mpi"), "--output", tmp_path / "out")

    assert run.returncode == 2
    assert run.stderr.count("error:") == 1, run.stderr
    assert "failed, so all are stopped" not in run.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory": {"budget": "1 MiB", "store": "matrix"}}, "memory.store"),
        ({"memory": {"budget": "1 MiB", "devices": ["cuda", "cpu"]}}, "memory.devices"),
        ({"solver": {"preconditioner": "multigrid"}}, "block_jacobi"),
        ({"material": {"kind": "lognormal", "samples": 3}}, "material.samples"),
    ],
)
def test_what_ranks_cannot_do_is_refused_before_anything_starts(changes, message):
    with pytest.raises(ValueError, match=message):
        Experiment.model_validate({**CONTENT, **changes, "parallel": "mpi"})
