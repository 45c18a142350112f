"""Experiments that look for modes: described in YAML, planned, run, interrupted and resumed."""

import contextlib
import json
import threading

import h5py
import numpy as np
import pytest
from scipy.sparse.linalg import eigsh

from penstock.experiments import Experiment, plan_experiment, read_experiment, resume_experiment, run_experiment
from penstock.experiments.cantilever import modes_run
from penstock.experiments.reporting.folder import ResultsFolder
from penstock.solvers import StopReason
from penstock.spmv import InputError

MODEL = {"nodes": [25, 6, 6], "dof": 3, "lengths": 5.0}


@pytest.fixture(scope="module", autouse=True)
def always_in_one_thread(one_thread):
    """These systems are small."""


def experiment(**sections):
    asked = {"model": MODEL, "analysis": {"kind": "modes", "count": 6}, "solver": {"preconditioner": "auto"}}
    return Experiment(**{**asked, "output": {"figures": False}, **sections})


def exact_values(case):
    K, M = case.cantilever().matrix().to_csr(), case.mass().to_csr()
    heavy = np.flatnonzero(M.diagonal() > 0)
    K, M = (A.tocsc()[heavy][:, heavy] for A in (K, M))
    return np.sort(eigsh(K, 14, M=M, sigma=0, return_eigenvectors=False))[: case.analysis.count]


@pytest.mark.parametrize("memory", [{}, {"budget": "700 KiB"}, {"budget": "700 KiB", "matrix": "on_arrival"}])
def test_a_run_leaves_frequencies_and_shapes(memory, tmp_path):
    case = experiment(memory=memory, output={"figures": True})
    outcome = run_experiment(case, tmp_path / "run")
    assert outcome.reason is StopReason.CONVERGED
    result = json.loads(outcome.folder.result.read_text())
    assert np.allclose(result["values"], exact_values(case), rtol=1e-8)
    assert result["sweeps"] > 0
    assert bool(result["bytes_streamed"]) == (memory.keys() == {"budget"})
    assert {path.name for path in outcome.folder.path.iterdir()} == {
        "configuration.yaml", "environment.json", "modes.png", "modes.vtkhdf", "plan.txt", "result.json",
    }  # fmt: skip
    with h5py.File(outcome.folder.modes) as file:
        root = file["VTKHDF"]
        assert root["Steps"].attrs["NSteps"] == 6
        assert np.allclose(root["Steps/Values"], result["frequencies"])
        assert root["PointData/displacement"].shape == (6, 6, 6, 25, 3)
    assert "frequency" in outcome.folder.summary()
    assert outcome.folder.draw(case.cantilever()) == [outcome.folder.path / "modes.png"]


def test_the_file_may_name_the_analysis_in_a_word(tmp_path):
    path = tmp_path / "beam.yaml"
    path.write_text(
        "model: {nodes: [25, 6, 6], lengths: 5.0}\nanalysis: modes\ncount: 4\nsolver: {preconditioner: auto}\n"
    )
    case = read_experiment(path)
    assert case.analysis.is_modes
    assert case.analysis.count == 4
    outcome = run_experiment(case.changed(output={"figures": False, "field": False}), tmp_path / "run")
    assert read_experiment(outcome.folder.configuration).analysis == case.analysis


def test_plans_count_the_vectors_of_the_block_and_the_mass():
    case = experiment(memory={"budget": "700 KiB"})
    plan = plan_experiment(case)
    assert plan.workload.columns == 12  # 6 modes and as many guards
    vectors = 14 * 12 * 8 * case.cantilever().unknowns
    assert vectors + case.mass_nbytes <= plan.workload.workspace_nbytes <= 1.6 * (vectors + case.mass_nbytes)


@pytest.mark.parametrize(
    ("sections", "match"),
    [
        ({"load": {"kind": "axial"}}, "no use for load"),
        ({"parallel": "mpi"}, "no use for parallel"),
        ({"material": {"kind": "lognormal", "samples": 3}}, "no use for material.samples"),
        ({"memory": {"budget": "1 MiB", "precision": "auto"}}, "no use for memory.precision"),
        ({"solver": {}}, "preconditioner: auto"),
        ({"analysis": {"kind": "modes", "count": 900}}, "too large a part"),
        ({"analysis": {"kind": "modes", "rotary_inertia": 0.1}}, "rotary_inertia"),
        ({"analysis": {"count": 5}}, "add kind: modes"),
    ],
)
def test_settings_that_contradict_modes_are_refused(sections, match):
    with pytest.raises(ValueError, match=match):
        experiment(**sections)


@pytest.mark.parametrize(("block", "passes"), [(12, 5), (8, 14)])
def test_a_stopped_run_resumes_where_it_was(block, passes, tmp_path, monkeypatch):
    """Within the only block, and within the second one."""
    monkeypatch.setattr("penstock.driver.modes_search._block", lambda system, k: block)
    count = 6 if block == 12 else 10
    case = experiment(memory={"budget": "700 KiB"}, analysis={"kind": "modes", "count": count})
    asked = []

    class Stopping(modes_run.ModesRun):
        def _is_due(self, seconds):
            return True

    @contextlib.contextmanager
    def stopping(reporter, current=""):
        event = threading.Event()
        event.is_set = lambda: asked.append(1) or len(asked) >= passes
        yield event

    with monkeypatch.context() as patch:
        patch.setattr(modes_run, "stop_requests", stopping)
        patch.setattr("penstock.experiments.cantilever.run.ModesRun", Stopping)
        stopped = run_experiment(case, tmp_path / "run")
    assert stopped.interrupted
    with np.load(stopped.folder.checkpoint) as checkpoint:
        assert ("found" in checkpoint) == (block == 8)
    resumed = resume_experiment(tmp_path / "run")
    assert resumed.reason is StopReason.CONVERGED
    assert not resumed.folder.checkpoint.exists()
    result = json.loads(resumed.folder.result.read_text())
    assert np.allclose(result["values"], exact_values(case), rtol=1e-8)
    if block == 12:
        whole = json.loads(run_experiment(case, tmp_path / "whole").folder.result.read_text())
        assert result["iterations"] < whole["iterations"]


def test_too_few_iterations_leave_a_checkpoint_from_which_more_go_on(tmp_path):
    case = experiment(solver={"preconditioner": "auto", "maxiter": 2})
    outcome = run_experiment(case, tmp_path / "run")
    assert outcome.reason is StopReason.MAXITER
    assert resume_experiment(tmp_path / "run", maxiter=100).reason is StopReason.CONVERGED


def test_a_damaged_checkpoint_and_other_settings_are_refused(tmp_path):
    case = experiment(solver={"preconditioner": "auto", "maxiter": 2})
    folder = run_experiment(case, tmp_path / "run").folder
    whole = folder.configuration.read_text()
    folder.configuration.write_text(whole.replace("density: 1.0", "density: 2.0"))
    with pytest.raises(InputError, match="density"):
        resume_experiment(folder.path)
    folder.configuration.write_text(whole)
    data = bytearray(folder.checkpoint.read_bytes())
    data[len(data) // 2] ^= 1
    folder.checkpoint.write_bytes(bytes(data))
    with pytest.raises(InputError, match="cannot be resumed"):
        resume_experiment(folder.path)


def test_a_folder_shows_its_modes_again(tmp_path):
    outcome = run_experiment(experiment(), tmp_path / "run")
    summary = ResultsFolder(outcome.folder.path).summary()
    assert "mass x" in summary
    assert summary.splitlines()[0].startswith("converged")
