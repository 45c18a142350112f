"""The summary of a command says where its whole time went."""

import json
import re
import subprocess
import sys
import time

import pytest
import scipy.io
import scipy.sparse
import yaml

from penstock.experiments import Experiment, run_experiment
from penstock.experiments.reporting import folder
from penstock.experiments.reporting.summary import summary_of
from penstock.host import start
from penstock.spmv import StoreError

CANTILEVER = {
    "model": {"nodes": 10},
    "solver": {"preconditioner": "auto"},
    "memory": {"device": "cpu", "budget": "1 MiB"},
}


def timed(*arguments):
    """Run a command in a process of its own; return the seconds that it took, and what it printed."""
    began = time.perf_counter()
    ran = subprocess.run(
        [sys.executable, "-m", "penstock", *map(str, arguments)], capture_output=True, text=True, timeout=240
    )
    return time.perf_counter() - began, ran


def named(results, ran):
    """Return the parts in a results folder, which the summary that was printed sums up."""
    parts = json.loads((results / "result.json").read_text())["timings"]
    told = float(re.search(r"^seconds +([\d.]+) in all: ", ran.stdout, re.MULTILINE)[1])
    assert told == pytest.approx(sum(parts.values()), abs=0.006)
    assert all(seconds >= 0 for seconds in parts.values())
    return parts


def test_runs_their_resumptions_samples_and_files_name_their_whole_time(tmp_path):
    (tmp_path / "beam.yaml").write_text(yaml.safe_dump(CANTILEVER | {"solver": {"maxiter": 2}}))
    A = scipy.sparse.diags_array([-1.0, 4.0, -1.0], offsets=[-1, 0, 1], shape=(400, 400))
    scipy.io.mmwrite(tmp_path / "A.mtx", A)
    beam, solved = tmp_path / "beam", tmp_path / "solved"
    several = CANTILEVER | {"material": {"kind": "lognormal", "samples": 3}}
    (tmp_path / "several.yaml").write_text(yaml.safe_dump(several))
    commands = {
        "run": (beam, ("run", tmp_path / "beam.yaml", "--output", beam)),
        "resume": (beam, ("run", "--resume", beam, "--maxiter", 900)),
        "samples": (tmp_path / "samples", ("run", tmp_path / "several.yaml", "--output", tmp_path / "samples")),
        "solve": (solved, ("solve", tmp_path / "A.mtx", "--output", solved, "--device", "cpu")),
    }
    expected = {
        "run": {"assembling", "loads", "drawing", "planning"},
        "resume": {"assembling", "loads", "drawing", "planning", "reading"},
        "samples": {"assembling", "loads", "drawing", "planning"},
        "solve": {"reading", "looking", "converting", "drawing", "planning"},
    }
    for name, (results, arguments) in commands.items():
        seconds, ran = timed(*arguments)
        assert ran.returncode == (1 if name == "run" else 0), ran.stderr
        parts = named(results, ran)
        assert {"starting", "setting up", "iterating", "writing", "compiling", "rest"} | expected[name] <= set(parts)
        assert 0.8 * seconds <= sum(parts.values()) <= 1.02 * seconds
        assert parts["rest"] <= 0.1 * seconds
    result = json.loads((beam / "result.json").read_text())
    assert result["earlier_seconds"] > 0
    assert "earlier runs " in summary_of(result)


def refusing(error):
    def write(path, data):
        raise error

    return write


def test_results_stay_where_there_is_no_room_for_the_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "write_json", refusing(StoreError("the disk is full")))
    outcome = run_experiment(Experiment(**CANTILEVER), tmp_path / "beam")
    assert outcome.reason.name == "CONVERGED"
    result = outcome.folder.read_json(outcome.folder.result)
    assert result["converged"]
    assert "timings" not in result
    assert "seconds          compile " in outcome.folder.summary()


def test_an_interrupt_at_the_end_costs_no_results(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "write_json", refusing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt) as interrupt:
        run_experiment(Experiment(**CANTILEVER), tmp_path / "beam")
    assert interrupt.value.__notes__ == [f"the results are in {tmp_path / 'beam'}"]
    assert {"result.json", "solution.vtkhdf", "deformed.png"} <= {file.name for file in (tmp_path / "beam").iterdir()}


def test_results_of_earlier_versions_are_summed_up_as_they_were(tmp_path):
    result = {
        "message": "converged", "unknowns": 9, "nonzeros": 9, "matrix_nbytes": 72, "format": "csr", "iterations": 1,
        "true_residual": 0.0, "budget_nbytes": None, "bytes_streamed": 0, "link_fraction": None,
        "seconds": {"compile": 0.0, "plan": 0.25, "solve": 1.5, "total": 2.0},
    }  # fmt: skip
    assert summary_of(result).splitlines()[-1] == "seconds          compile 0.00, plan 0.25, solve 1.50, total 2.00"


def test_the_start_of_a_command_is_counted_once(monkeypatch):
    monkeypatch.setattr(start, "_began", None)
    assert start.take_starting_seconds() == 0
    start.command_begins()
    assert start.take_starting_seconds() > 0
    assert start.take_starting_seconds() == 0


def test_a_process_that_was_a_shell_before_began_when_python_did(monkeypatch):
    monkeypatch.setattr(start, "_began", None)
    monkeypatch.setattr(start, "_OLDEST_SECONDS", -1.0)
    start.command_begins()
    assert start.take_starting_seconds() < 1
