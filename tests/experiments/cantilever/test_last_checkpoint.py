"""The last checkpoint of a run is written while the report is made."""

import time

import pytest

from penstock.driver.progress import Reporter
from penstock.experiments import Experiment, ResultsFolder, resume_experiment, run_experiment
from penstock.experiments import run as run_module
from penstock.experiments.reporting import checkpoint as checkpoint_module
from penstock.solvers import StopReason
from penstock.spmv import StoreError


def experiment(**output):
    return Experiment.model_validate({"model": {"nodes": [13, 4, 4]}, "output": output})


def written_slowly(monkeypatch):
    def slowly(path, contents, real=checkpoint_module.write_sealed):
        time.sleep(0.2)
        real(path, contents)

    monkeypatch.setattr(checkpoint_module, "write_sealed", slowly)


def interrupted(*arguments, **options):
    raise KeyboardInterrupt


def test_a_run_interrupted_while_it_draws_has_its_solution(tmp_path, monkeypatch):
    written_slowly(monkeypatch)
    monkeypatch.setattr(ResultsFolder, "draw", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(experiment(figures=True), tmp_path / "run")
    assert (tmp_path / "run" / "checkpoint.npz").exists()
    monkeypatch.undo()
    (tmp_path / "run" / "result.json").unlink()  # as if it had not come so far

    outcome = resume_experiment(tmp_path / "run")

    assert outcome.reason is StopReason.CONVERGED
    assert outcome.folder.read_json(outcome.folder.result)["iterations"] > 0


@pytest.mark.parametrize("at", [1, 2])
def test_one_that_is_interrupted_again_has_it_too(at, tmp_path, monkeypatch):
    asked = []

    def impatient(futures, timeout=None, real=run_module.wait):
        asked.append(futures)
        if len(asked) == at:
            raise KeyboardInterrupt
        return real(futures, timeout)

    written_slowly(monkeypatch)
    monkeypatch.setattr(ResultsFolder, "write_field", interrupted)
    monkeypatch.setattr(run_module, "wait", impatient)
    monkeypatch.setattr(run_module, "_UNSEEN_SECONDS", 0.01)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(experiment(figures=False), tmp_path / "run")
    monkeypatch.undo()
    assert len(asked) == at

    assert resume_experiment(tmp_path / "run").reason is StopReason.CONVERGED


@pytest.mark.parametrize(("unseen", "shown"), [(60.0, False), (0.01, True)])
def test_waiting_for_one_is_shown_if_it_takes_long_and_so_is_reading_it(unseen, shown, tmp_path, monkeypatch):
    titles, reporter = [], Reporter()
    monkeypatch.setattr(reporter, "stage", lambda title, real=reporter.stage: titles.append(title) or real(title))
    monkeypatch.setattr(run_module, "_UNSEEN_SECONDS", unseen)
    written_slowly(monkeypatch)
    first = experiment(figures=False).changed(solver={"maxiter": 3})
    outcome = run_experiment(first, tmp_path / "run", reporter=reporter)
    assert outcome.reason is StopReason.MAXITER
    assert ("checkpoint" in titles) is shown
    assert "read" not in titles

    resume_experiment(tmp_path / "run", reporter=reporter, maxiter=500)
    assert "read" in titles
    result = outcome.folder.read_json(outcome.folder.result)
    assert result["timings"]["reading"] > 0
    assert result["timings"]["writing"] > 0


@pytest.mark.parametrize("error", [StoreError("no space is left"), MemoryError()])
def test_a_full_disk_costs_the_checkpoint_only(error, tmp_path, monkeypatch):
    def full(path, contents):
        raise error

    texts = []
    reporter = Reporter()
    monkeypatch.setattr(reporter, "text", lambda title, body: texts.append((title, body)))
    monkeypatch.setattr(checkpoint_module, "write_sealed", full)

    outcome = run_experiment(experiment(figures=False), tmp_path / "run", reporter=reporter)

    assert outcome.reason is StopReason.CONVERGED
    warning = str(error) or "there is too little memory for a checkpoint"
    assert ("Warning", warning) in texts
