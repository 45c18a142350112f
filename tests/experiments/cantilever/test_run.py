"""Runs: what they leave, what stops them, and going on from a checkpoint."""

import csv
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from interrupting import interrupt_at
from kernel_targets import gpu_count

from penstock.driver import open_system as open_system_module
from penstock.experiments import (
    Experiment,
    ResultsFolder,
    plan_experiment,
    read_experiment,
    resume_experiment,
    run_experiment,
)
from penstock.experiments import run as run_module
from penstock.experiments.cantilever import single_run
from penstock.spmv import InputError, StoreError
from penstock.streaming import FileStore, HostStore, LinkRates
from penstock.streaming.measurement import first_sweeps
from penstock.streaming.measurement.rates import rates_file

SMALL = {"model": {"nodes": [21, 5, 5]}, "material": {"kind": "lognormal"}, "memory": {"budget": "200 KiB"}}
RESULT_KEYS = {
    "converged", "reason", "iterations", "true_residual", "sweeps", "bytes_streamed", "matrix_nbytes", "budget_nbytes",
    "peak_budget_nbytes", "unknowns", "nonzeros", "tip_deflection", "seconds", "device", "format", "staged",
    "link_fraction", "memory_fraction", "predicted_sweep_seconds",
}  # fmt: skip


def experiment(**changes):
    return Experiment.model_validate({**SMALL, **changes})


def field(folder: ResultsFolder) -> np.ndarray:
    with h5py.File(folder.field) as file:
        return np.asarray(file["VTKHDF/PointData/displacement"])


@pytest.mark.usefixtures("rendered_pictures")
def test_a_run_leaves_everything_that_is_promised(tmp_path):
    folder = run_experiment(experiment(), tmp_path / "run").folder

    names = {path.name for path in folder.path.iterdir()}
    assert names == {
        "configuration.yaml", "plan.txt", "result.json", "residuals.csv", "environment.json", "solution.vtkhdf",
        "timeline.json", "timeline.trace.json", "convergence.png", "timeline.png", "deformed.png",
    }  # fmt: skip
    result = json.loads(folder.result.read_text())
    assert set(result) >= RESULT_KEYS
    assert set(result["seconds"]) == {"compile", "assembly", "plan", "preconditioner", "solve", "total"}
    assert result["converged"]
    assert result["true_residual"] <= 1e-8
    # So small a matrix is solved sooner than rates are measured.
    assert [result[key] for key in ("link_fraction", "memory_fraction", "predicted_sweep_seconds")] == [None] * 3
    decided = read_experiment(folder.configuration)
    plan = plan_experiment(decided)
    assert plan.streamed_nbytes == result["matrix_nbytes"] - result["resident_nbytes"]
    assert result["bytes_streamed"] == sum(map(plan.sweep_nbytes, range(result["sweeps"])))
    assert result["peak_budget_nbytes"] <= result["budget_nbytes"] < result["matrix_nbytes"]
    with open(folder.residuals, newline="") as file:
        assert len(list(csv.DictReader(file))) == result["iterations"] + 1
    # The plan is written down, so that going on does not depend on what is measured then; the rest is as it was given.
    assert decided.model_copy(update={"memory": experiment().memory}) == experiment()


def test_streamed_and_resident_runs_give_the_same_bits(tmp_path):
    fields = []
    for number, memory in enumerate([{}, {"budget": "150 KiB"}, {"budget": "300 KiB", "overlap": False}]):
        memory["format"] = "bsr"
        fields.append(field(run_experiment(experiment(memory=memory), tmp_path / str(number)).folder))

    assert np.array_equal(fields[0], fields[1])
    assert np.array_equal(fields[0], fields[2])


def test_a_matrix_shared_between_devices_is_reported_with_its_division(tmp_path, monkeypatch):
    """Both parts run on the CPU here, as no GPU is needed to see what is written."""

    def in_memory(experiment, plan, *others, planes):
        slabs = experiment.cantilever().subdivisions(len(plan.index.subdivisions), plan.index.format_name)
        return HostStore.create(slabs)

    monkeypatch.setattr(single_run, "open_store", in_memory)
    given = experiment(memory={"budget": "200 KiB", "subdivisions": 10, "format": "bsr"})
    given = given.model_copy(update={"memory": given.memory.model_copy(update={"devices": ("cuda:0", "cpu")})})

    folder = run_experiment(given, tmp_path / "run").folder

    result = json.loads(folder.result.read_text())
    gpu = result["gpu_subdivisions"]
    assert result["converged"]
    assert 1 <= gpu <= 10
    assert f"{gpu} of 10 subdivisions" in folder.plan.read_text()
    assert f"gpu_subdivisions: {gpu}" in folder.configuration.read_text()
    hosts = [span["subdivision"] for span in json.loads(folder.timeline.read_text()) if span["kind"] == "host"]
    assert hosts == list(range(gpu, 10))


@pytest.mark.gpu
@pytest.mark.skipif(gpu_count() == 0, reason="no CUDA device")
def test_a_run_shared_by_a_gpu_and_the_cpu_goes_on_to_the_same_bits(tmp_path):
    memory = {"budget": "200 KiB", "subdivisions": 10, "format": "bsr", "devices": ["cuda:0", "cpu"]}
    whole = run_experiment(experiment(memory=memory), tmp_path / "whole").folder
    decided = read_experiment(whole.configuration)
    stopped = decided.model_copy(update={"solver": decided.solver.model_copy(update={"maxiter": 5})})

    run_experiment(stopped, tmp_path / "stopped")
    resumed = resume_experiment(tmp_path / "stopped", maxiter=10_000).folder

    assert json.loads(resumed.result.read_text())["converged"]
    assert np.array_equal(field(whole), field(resumed))
    alone = run_experiment(experiment(memory={"budget": "200 KiB", "format": "bsr"}), tmp_path / "alone").folder
    np.testing.assert_allclose(field(whole), field(alone), rtol=0, atol=1e-6 * np.abs(field(alone)).max())


@pytest.mark.parametrize("dof", [1, 3, 6])
@pytest.mark.parametrize("material", ["uniform", "lognormal", "two_phase"])
def test_every_model_and_material_converges(dof, material, tmp_path):
    model = {"nodes": [9, 4, 4], "dof": dof}
    folder = run_experiment(
        experiment(model=model, material={"kind": material}, memory={"budget": "100 KiB"}), tmp_path / "run"
    ).folder

    assert json.loads(folder.result.read_text())["converged"]


def test_a_run_that_does_not_converge_says_so_and_still_reports(tmp_path):
    folder = run_experiment(experiment(solver={"maxiter": 5}), tmp_path / "run").folder

    result = json.loads(folder.result.read_text())
    assert (result["converged"], result["reason"], result["iterations"]) == (False, "maxiter", 5)
    assert "raise maxiter" in folder.summary()


def test_a_folder_with_something_in_it_is_refused_and_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")

    with pytest.raises(InputError, match="is not an empty folder; choose another --output"):
        run_experiment(experiment(), tmp_path)

    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_an_error_leaves_no_folder(tmp_path, monkeypatch):
    def refuse(*arguments, **keywords):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("penstock.streaming.stores.store_files.os.fsync", refuse)

    with pytest.raises(StoreError, match=r"No space left on device; .* are free there; nothing was left"):
        run_experiment(experiment(), tmp_path / "run")

    assert list(tmp_path.iterdir()) == []


def test_a_disk_too_small_is_found_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))

    with pytest.raises(StoreError, match=r"the matrix needs .* of disk, .* name another place as memory\.store"):
        run_experiment(experiment(), tmp_path / "run")

    assert not (tmp_path / "run").exists()


def test_a_store_of_ones_own_is_kept_used_again_and_not_mistaken(tmp_path):
    memory = {"budget": "200 KiB", "store": str(tmp_path / "matrix")}
    first = run_experiment(experiment(memory=memory), tmp_path / "a").folder
    written = (tmp_path / "matrix" / "slabs.bin").stat().st_mtime_ns

    second = run_experiment(experiment(memory=memory), tmp_path / "b").folder

    assert (tmp_path / "matrix" / "slabs.bin").stat().st_mtime_ns == written
    assert np.array_equal(field(first), field(second))
    with pytest.raises(InputError, match="holds another matrix"):
        run_experiment(experiment(memory=memory, material={"kind": "lognormal", "seed": 2}), tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_store_altered_between_runs_is_found(tmp_path):
    memory = {"budget": "200 KiB", "store": str(tmp_path / "matrix")}
    run_experiment(experiment(memory=memory), tmp_path / "a")
    with open(tmp_path / "matrix" / "slabs.bin", "r+b") as file:
        file.seek(5000)
        byte = file.read(1)
        file.seek(5000)
        file.write(bytes([byte[0] ^ 1]))

    with pytest.raises(StoreError, match="does not match its checksum"):
        run_experiment(experiment(memory=memory), tmp_path / "b")


@pytest.mark.parametrize(
    ("asked", "rates", "found"),
    [
        ("auto", LinkRates(1e9, 1e12), "symmetric_bsr"),
        ("bsr", LinkRates(1e9, 1e12), "bsr"),
        ("auto", LinkRates(np.inf, np.inf, 0.0, 1e-3), "bsr"),
    ],
    ids=["link-bound", "named", "bound by starts"],
)
def test_a_plan_takes_the_format_of_the_shortest_sweep_unless_one_is_named(asked, rates, found):
    described = experiment(memory={"budget": "400 KiB", "format": asked, "subdivisions": 5})

    assert plan_experiment(described, rates).index.format_name == found


@pytest.mark.parametrize("asked", ["auto", "symmetric_bsr"])
def test_what_the_plan_decided_is_written_down_and_runs_again_without_rates(asked, tmp_path, monkeypatch):
    described = experiment(memory={"budget": "200 KiB", "format": asked}, output={"figures": False})
    with monkeypatch.context() as patch:
        patch.setattr(single_run, "measure_rates", lambda *arguments: LinkRates(1e9, 1e12))
        first = run_experiment(described, tmp_path / "first").folder
    result, decided = json.loads(first.result.read_text()), read_experiment(first.configuration)
    written = (decided.memory.format, decided.memory.subdivisions, decided.memory.slots)

    again = run_experiment(decided, tmp_path / "again").folder

    assert written == (result["format"], result["subdivisions"], result["slots"])
    assert result["format"] == "symmetric_bsr"
    assert again.configuration.read_text() == first.configuration.read_text()
    assert np.array_equal(field(again), field(first))


def test_a_result_tells_how_near_the_solve_came_to_the_rates(tmp_path, monkeypatch):
    monkeypatch.setattr(single_run, "measure_rates", lambda *arguments: LinkRates(1e9, 2e10))
    folder = run_experiment(experiment(output={"figures": False}), tmp_path / "run").folder

    result = json.loads(folder.result.read_text())
    seconds = result["seconds"]["preconditioner"] + result["seconds"]["solve"]
    assert result["link_fraction"] == pytest.approx(result["bytes_streamed"] / seconds / 1e9)
    assert result["memory_fraction"] == pytest.approx(result["sweeps"] * result["matrix_nbytes"] / seconds / 2e10)
    assert 0 < result["predicted_sweep_seconds"] < 1
    assert result["staged"] is False
    trace = json.loads((folder.path / "timeline.trace.json").read_text())
    assert {event["name"].split()[0] for event in trace["traceEvents"] if event["ph"] == "X"} >= {"transfer", "compute"}


@pytest.mark.parametrize("iteration", [1, 17])
@pytest.mark.parametrize(
    "memory",
    [{"budget": "200 KiB", "format": "bsr"}, {"budget": "200 KiB", "format": "symmetric_bsr"}, {}],
    ids=["streamed bsr", "streamed symmetric_bsr", "resident"],
)
def test_an_interrupted_run_resumed_is_bit_equal_to_an_uninterrupted_one(iteration, memory, tmp_path, monkeypatch):
    described = experiment(memory=memory, output={"figures": False})
    whole = run_experiment(described, tmp_path / "whole").folder
    with monkeypatch.context() as patch:
        interrupt_at(patch, open_system_module, iteration)
        outcome = run_experiment(described, tmp_path / "stopped")
    assert outcome.interrupted
    assert outcome.folder.checkpoint.exists()
    assert not outcome.folder.result.exists()

    resumed = resume_experiment(tmp_path / "stopped").folder

    assert np.array_equal(field(resumed), field(whole))
    assert resumed.residuals.read_text() == whole.residuals.read_text()
    a, b = (json.loads(folder.result.read_text()) for folder in (resumed, whole))
    assert {a["iterations"], a["true_residual"], a["tip_deflection"]} == {
        b["iterations"], b["true_residual"], b["tip_deflection"]
    }  # fmt: skip
    assert not resumed.checkpoint.exists()
    assert not resumed.matrix.exists()


@pytest.mark.parametrize("load", [{}, {"samples": 3}], ids=["one load", "block"])
@pytest.mark.parametrize(
    "memory",
    [{"budget": "200 KiB", "format": "bsr"}, {"budget": "150 KiB", "format": "symmetric_bsr"}, {}],
    ids=["streamed bsr", "streamed symmetric_bsr", "resident"],
)
def test_so_is_one_whose_products_share_sweeps(load, memory, tmp_path, monkeypatch):
    described = experiment(memory=memory, load=load, solver={"preconditioner": "chebyshev"}, output={"figures": False})
    whole = run_experiment(described, tmp_path / "whole").folder
    for iteration in (1, 6):
        stopped = tmp_path / f"stopped at {iteration}"
        with monkeypatch.context() as patch:
            interrupt_at(patch, open_system_module, iteration)
            assert run_experiment(described, stopped).interrupted

        resumed = resume_experiment(stopped).folder

        assert json.loads(whole.result.read_text())["iterations"] > iteration
        assert np.array_equal(field(resumed), field(whole))
        assert resumed.residuals.read_text() == whole.residuals.read_text()


def test_a_run_interrupted_twice_still_ends_with_the_same_bits(tmp_path, monkeypatch):
    whole = run_experiment(experiment(), tmp_path / "whole").folder
    with monkeypatch.context() as patch:
        interrupt_at(patch, open_system_module, 5)
        run_experiment(experiment(), tmp_path / "stopped")
    with monkeypatch.context() as patch:
        interrupt_at(patch, open_system_module, 11)
        assert resume_experiment(tmp_path / "stopped").interrupted

    assert np.array_equal(field(resume_experiment(tmp_path / "stopped").folder), field(whole))


@pytest.mark.parametrize("iteration", [1, 4])
@pytest.mark.parametrize(
    "memory",
    [
        {"budget": "200 KiB", "format": "bsr"},
        {"budget": "150 KiB", "format": "symmetric_bsr"},
        {"budget": "110 KiB", "format": "symmetric_bsr", "slots": 3},
        {},
    ],
    ids=["streamed bsr", "streamed symmetric_bsr", "several sweeps an iteration", "resident"],
)
def test_and_one_with_a_coarse_level(iteration, memory, tmp_path, monkeypatch):
    solver = {"preconditioner": "smoothed_aggregation", "rtol": 1e-10}
    described = experiment(memory=memory, solver=solver, output={"figures": False})
    whole = run_experiment(described, tmp_path / "whole").folder
    with monkeypatch.context() as patch:
        interrupt_at(patch, open_system_module, iteration)
        assert run_experiment(described, tmp_path / "stopped").interrupted

    resumed = resume_experiment(tmp_path / "stopped").folder

    assert np.array_equal(field(resumed), field(whole))
    assert resumed.residuals.read_text() == whole.residuals.read_text()


def test_checkpoints_are_written_as_time_passes(tmp_path, monkeypatch):
    written = []
    real = run_module.write_checkpoint

    def write(path, checkpoint, **how):
        written.append(checkpoint.state.iteration)
        return real(path, checkpoint, **how)

    monkeypatch.setattr(run_module, "write_checkpoint", write)

    run_experiment(experiment(output={"checkpoint_seconds": 1e-6}), tmp_path / "run")

    assert len(written) > 10
    assert written == sorted(written)


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path):
    """SIGKILL gives no chance to write anything: what is on disk must do."""
    whole = run_experiment(experiment(solver={"rtol": 1e-10}), tmp_path / "whole").folder
    code = (
        "import sys, time\n"
        "from penstock.driver import open_system as r\n"
        "from penstock.experiments import run_experiment, Experiment\n"
        "real = r.solve_progress\n"
        "r.solve_progress = lambda *a: (time.sleep(0.01), real(*a))[1]\n"
        f"run_experiment(Experiment.model_validate({experiment(solver={'rtol': 1e-10}).model_dump(mode='json')!r}"
        f" | {{'output': {{'checkpoint_seconds': 0.05}}}}), {str(tmp_path / 'killed')!r})"
    )
    one_thread = {**os.environ, "NUMBA_NUM_THREADS": "1"}  # as here: sums of other threads differ in their last bits
    process = subprocess.Popen([sys.executable, "-c", code], env=one_thread)
    checkpoint = tmp_path / "killed" / "checkpoint.npz"
    deadline = time.monotonic() + 120
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    process.kill()
    process.wait()

    resumed = resume_experiment(tmp_path / "killed").folder

    assert np.array_equal(field(resumed), field(whole))


def test_a_run_killed_before_its_first_checkpoint_begins_anew(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_at(patch, open_system_module, 5)
        folder = run_experiment(experiment(memory={"budget": "300 KiB"}), tmp_path / "run").folder
    folder.checkpoint.unlink()
    (tmp_path / "run" / "matrix.partial-x1").mkdir()
    (tmp_path / "run" / "matrix.partial-x1" / "slabs.bin").write_bytes(b"half")

    outcome = resume_experiment(folder.path)

    assert outcome.reason.name == "CONVERGED"
    assert not list(folder.path.glob("matrix*"))


@pytest.mark.parametrize("damage", ["truncated", "other size"])
def test_a_checkpoint_that_cannot_be_used_is_refused(damage, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_at(patch, open_system_module, 5)
        folder = run_experiment(experiment(), tmp_path / "run").folder
    if damage == "truncated":
        folder.checkpoint.write_bytes(folder.checkpoint.read_bytes()[:500])
    else:
        folder.configuration.write_text(folder.configuration.read_text().replace("- 21", "- 23"))

    with pytest.raises(InputError, match=r"nothing to resume|cannot be resumed from.*whole zip|another length"):
        resume_experiment(folder.path)


def test_a_finished_run_is_not_resumed(tmp_path):
    run_experiment(experiment(), tmp_path / "run")

    with pytest.raises(InputError, match="is finished; look at it with penstock show"):
        resume_experiment(tmp_path / "run")


def test_a_run_outside_the_main_thread_needs_no_signals(tmp_path):
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(run_experiment(experiment(), tmp_path / "run")))
    thread.start()
    thread.join()

    assert outcomes[0].reason.name == "CONVERGED"


def test_the_signal_handlers_are_as_before_after_a_run(tmp_path):
    before = signal.getsignal(signal.SIGINT)

    run_experiment(experiment(), tmp_path / "run")

    assert signal.getsignal(signal.SIGINT) is before


def test_nothing_in_the_results_names_this_machine(tmp_path):
    folder = run_experiment(experiment(), tmp_path / "run").folder

    for path in (folder.result, folder.environment, folder.plan):
        text = path.read_text()
        assert str(Path.home()) not in text
        assert str(tmp_path) not in text
        assert os.uname().nodename not in text


def test_a_store_left_behind_by_an_interrupt_while_building_is_no_store(tmp_path, monkeypatch):
    real = FileStore.create.__func__

    def interrupted(cls, path, slabs, **keywords):
        def some():
            yield next(iter(slabs))
            raise KeyboardInterrupt

        return real(cls, path, some(), **keywords)

    monkeypatch.setattr(FileStore, "create", classmethod(interrupted))

    with pytest.raises(KeyboardInterrupt):
        run_experiment(experiment(), tmp_path / "run")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("learning")
def test_a_run_that_was_planned_on_a_busy_machine_plans_again_after_two_sweeps(tmp_path, monkeypatch, cache_of_its_own):
    quiet = LinkRates(2e8, 2e10, product_start=1e-6, product_gap=1e-6)
    busy = replace(quiet, product_start=1.0, product_gap=1.0)
    monkeypatch.setattr(single_run, "measure_rates", lambda *arguments: busy)
    monkeypatch.setattr(first_sweeps, "learned_rates", lambda plan, timeline: None if plan.rates == quiet else quiet)
    memory = {"budget": "600 KiB", "format": "bsr", "subdivisions": 21}
    described = experiment(solver={"preconditioner": "chebyshev"}, memory=memory)

    folder = run_experiment(described, tmp_path / "run").folder

    assert "planned again with " in folder.plan.read_text()
    decided = read_experiment(folder.configuration)
    assert decided.solver.degree > 1
    assert plan_experiment(decided).powers_per_sweep > 1
    result = json.loads(folder.result.read_text())
    assert result["converged"]
    assert result["sweeps"] < result["iterations"] * decided.solver.degree
    assert json.loads(rates_file().read_text())  # the next run plans with these

    again = run_experiment(decided, tmp_path / "again").folder
    assert "planned again" not in again.plan.read_text()
    np.testing.assert_array_equal(field(folder), field(again))


def test_the_timeline_is_that_of_a_sweep_of_the_solve(tmp_path, monkeypatch):
    """With as many products from every subdivision as the plan makes."""
    rates = LinkRates(1e8, 1e11, transfer_start=1e-6, product_start=1e-6)
    monkeypatch.setattr(single_run, "measure_rates", lambda *arguments: rates)
    memory = {"budget": "600 KiB", "format": "bsr", "subdivisions": 21}
    folder = run_experiment(experiment(solver={"preconditioner": "chebyshev"}, memory=memory), tmp_path / "run").folder
    powers = json.loads(folder.result.read_text())["products_a_sweep"]
    computed = [span["subdivision"] for span in json.loads(folder.timeline.read_text()) if span["kind"] == "compute"]
    assert powers > 2
    assert len(computed) == 21 * powers
