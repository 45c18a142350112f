"""The penstock command, as a user meets it."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
import typer

from penstock.commands import app as cli
from penstock.commands.command import COMMANDS
from penstock.spmv import DeviceError

PENSTOCK = [sys.executable, "-m", "penstock"]
EXPERIMENT = "model: {nodes: [21, 5, 5]}\nmaterial: {kind: lognormal}\nmemory: {budget: 200 KiB}\n"


def in_a_process(*arguments, cwd):
    """Run the command as a user does."""
    return subprocess.run([*PENSTOCK, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.fixture
def penstock(monkeypatch, capsys):
    """Runs the command in this process, where the libraries are loaded, and returns what a process of its own would."""

    def run(*arguments, cwd):
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["penstock", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return subprocess.CompletedProcess(arguments, ended.value.code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "beam.yaml").write_text(EXPERIMENT)
    return tmp_path


def test_run_prints_plan_progress_and_result_and_show_prints_it_again(folder, penstock):
    ran = in_a_process("run", "beam.yaml", cwd=folder)

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.index("Plan") < ran.stdout.index("solve") < ran.stdout.index("Result")
    assert "Results are in results/beam" in ran.stdout

    result = folder / "results" / "beam"
    (result / "deformed.png").unlink()
    shown = penstock("show", "results/beam", cwd=folder)

    assert shown.returncode == 0, shown.stderr
    assert "tip deflection" in shown.stdout
    assert (result / "plan.txt").read_text().strip() in shown.stdout
    assert (result / "deformed.png").exists()


def test_python_can_run_the_command(folder):
    printed = in_a_process("--version", cwd=folder)

    assert printed.returncode == 0, printed.stderr
    assert re.fullmatch(r"penstock \d+\.\d+\S*\n", printed.stdout)
    assert "Usage: penstock [OPTIONS]" in in_a_process("--help", cwd=folder).stdout


@pytest.mark.parametrize(
    ("shell", "file"),
    [("bash", ".bashrc"), ("zsh", ".zshrc"), ("fish", ".config/fish/completions/penstock.fish")],
)
def test_shells_complete_the_command(shell, file, folder, penstock, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setattr("shellingham.detect_shell", lambda *arguments: (shell, f"/bin/{shell}"))

    shown = penstock("--show-completion", cwd=folder)
    assert "complete" in shown.stdout
    assert "_PENSTOCK_COMPLETE" in shown.stdout
    assert "python" not in shown.stdout

    installed = penstock("--install-completion", cwd=folder)
    assert f"{shell} completion installed" in installed.stdout
    assert (folder / file).exists()

    for name, value in {
        "_PENSTOCK_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": "penstock sch",
        "COMP_CWORD": "1",
        "_TYPER_COMPLETE_ARGS": "penstock sch",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }.items():
        monkeypatch.setenv(name, value)
    assert "schema" in penstock(cwd=folder).stdout


def test_a_second_run_gets_a_folder_of_its_own(folder, penstock):
    for expected in ("results/beam\n", "results/beam-2\n"):
        assert f"Results are in {expected}" in penstock("run", "beam.yaml", cwd=folder).stdout


def test_dry_run_prints_the_plan_and_makes_nothing(folder, penstock):
    result = penstock("run", "beam.yaml", "--dry-run", cwd=folder)

    assert "slots" in result.stdout
    assert [path.name for path in folder.iterdir()] == ["beam.yaml"]


def test_init_writes_a_file_that_runs_and_does_not_overwrite_it(tmp_path, penstock):
    assert penstock("init", "new.yaml", cwd=tmp_path).returncode == 0
    assert penstock("run", "new.yaml", "--dry-run", cwd=tmp_path).returncode == 0
    again = penstock("init", "new.yaml", cwd=tmp_path)
    assert (again.returncode, "exists; name another file" in again.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["run", "nothing.yaml"], "cannot read nothing.yaml"),
        (["run", "bad.yaml"], "did you mean 'budget'"),
        (["run", "small.yaml"], "the smallest that does is"),
        (["run", "--resume", "nothing"], "there is nothing to resume"),
        (["run"], "name an experiment FILE"),
        (["run", "beam.yaml", "--resume", "x"], "neither FILE, --output nor --dry-run"),
        (["show", "nothing"], "not a finished run"),
    ],
)
def test_a_mistake_ends_in_one_message_without_a_traceback(arguments, advice, folder, penstock):
    (folder / "bad.yaml").write_text("model: {nodes: 9}\nmemory: {budgte: 1 GiB}")
    (folder / "small.yaml").write_text("model: {nodes: 33}\nmemory: {budget: 9000}")

    result = penstock(*arguments, cwd=folder)

    assert result.returncode == 2
    assert advice in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.stderr + result.stdout
    assert not (folder / "results").exists() or not any((folder / "results").iterdir())


def test_a_mistake_ends_a_process_with_the_same_status_and_message(folder):
    result = in_a_process("run", "nothing.yaml", cwd=folder)

    assert (result.returncode, result.stdout) == (2, "")
    assert "cannot read nothing.yaml" in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_a_solve_that_fails_has_an_exit_status_of_its_own(folder, penstock):
    (folder / "beam.yaml").write_text(EXPERIMENT + "solver: {maxiter: 3}\n")

    result = penstock("run", "beam.yaml", cwd=folder)

    assert result.returncode == 1
    assert "raise maxiter" in result.stdout


def test_control_c_leaves_a_checkpoint_and_resume_finishes(folder, penstock):
    # A tolerance that takes long enough to be interrupted, in steps short enough to stop at once.
    (folder / "beam.yaml").write_text(
        "model: {nodes: [81, 7, 7]}\nmemory: {budget: 1 MiB}\noutput: {checkpoint_seconds: 0.02}\n"
    )
    process = subprocess.Popen([*PENSTOCK, "run", "beam.yaml"], cwd=folder, stdout=subprocess.PIPE, text=True)
    checkpoint = folder / "results" / "beam" / "checkpoint.npz"
    deadline = time.monotonic() + 100
    while not checkpoint.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]

    assert process.returncode == 130
    assert "Stopped on request; resume with: penstock run --resume results/beam" in output
    resumed = penstock("run", "--resume", "results/beam", cwd=folder)
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads((folder / "results" / "beam" / "result.json").read_text())["converged"]


def test_info_lists_the_machine_and_the_kernels(tmp_path, penstock):
    result = penstock("info", "--no-measure", cwd=tmp_path)

    assert result.returncode == 0, result.stderr
    for word in ("numba", "bsr", "csr", "processor"):
        assert word in result.stdout


def test_info_measures_bandwidths(tmp_path, penstock):
    result = penstock("info", cwd=tmp_path)

    assert result.stdout.count("GB/s") >= 2
    assert list(tmp_path.iterdir()) == []


ALTERED = {
    "residuals.csv": b"iteration,relative_residual\n0\n",
    "result.json": b"[1]",
    "timeline.json": b'[{"kind": 1}]',
    "plan.txt": b"\xff\xfe\x00",
    "solution.vtkhdf": b"no field",
}


def test_altered_files_of_a_run_are_one_error(folder, penstock):
    """Found by the campaign: a shortened line of residuals.csv ended in a traceback."""
    penstock("run", "beam.yaml", cwd=folder)
    run = folder / "results" / "beam"
    for name, content in ALTERED.items():
        whole = (run / name).read_bytes()
        (run / name).write_bytes(content)
        shown = penstock("show", "results/beam", cwd=folder)
        assert shown.returncode == 2, name
        assert "results/beam" in shown.stderr
        (run / name).write_bytes(whole)
    assert penstock("show", "results/beam", cwd=folder).returncode == 0


@pytest.mark.parametrize("command", COMMANDS.keys())
def test_the_examples_in_the_help_of_a_command_are_taken(command, monkeypatch, tmp_path, penstock):
    """Each is parsed as the command would, without doing it; files that must exist need not."""
    monkeypatch.setenv("COLUMNS", "120")
    shown = penstock(command, "--help", cwd=tmp_path)
    of_typer = typer.main.get_command(cli.app).commands[command]
    for example in COMMANDS[command].examples:
        assert " ".join(example.split()) in " ".join(shown.stdout.split())
        name, verb, *arguments = shlex.split(example.partition(" > ")[0])
        assert (name, verb) == ("penstock", command)
        of_typer.make_context(command, arguments)


def test_every_command_has_examples():
    assert set(COMMANDS.keys()) == set(typer.main.get_command(cli.app).commands)
    assert all(COMMANDS[name].examples for name in COMMANDS.keys())  # noqa: SIM118 - a registry


def test_an_interrupt_while_the_command_is_loaded_ends_in_one_line(tmp_path):
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").write_text("raise KeyboardInterrupt")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    ended = subprocess.run([*PENSTOCK, "info"], env=environment, cwd=tmp_path, capture_output=True, text=True)

    assert ended.returncode == 130
    assert ended.stderr == "interrupted\n"


def test_info_says_why_there_is_no_gpu(tmp_path, penstock, monkeypatch):
    def refuse():
        raise DeviceError("a CUDA device was requested, but CuPy is not installed: pip install it, or use device: cpu")

    monkeypatch.setattr("penstock.experiments.reporting.environment.cuda_device_count", refuse)
    result = penstock("info", "--no-measure", cwd=tmp_path)

    assert "none: CuPy is not installed: pip install it" in result.stdout


@pytest.mark.parametrize(
    ("command", "text", "told"),
    [
        ("overlap", EXPERIMENT, "try: penstock run a.yaml"),
        ("run", "cases: [{dof: 3, nodes: 9}]", "try: penstock overlap a.yaml"),
        ("run", "model: {nodes: [9,5", "not valid YAML, line 1, column 20: expected ',' or ']'"),
    ],
)
def test_a_file_of_another_command_or_none_is_one_line(command, text, told, tmp_path, penstock):
    (tmp_path / "a.yaml").write_text(text)
    ended = penstock(command, "a.yaml", cwd=tmp_path)

    assert ended.returncode == 2
    assert told in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("variable", "value", "status"),
    [("NUMBA_NUM_THREADS", "0", 2), ("NUMBA_NUM_THREADS", "many", 2), ("MPLBACKEND", "nonsense", 0)],
)
def test_variables_of_the_environment_end_in_no_traceback(folder, monkeypatch, variable, value, status):
    monkeypatch.setenv(variable, value)
    (folder / "beam.yaml").write_text("model: {nodes: [9, 3, 3]}")
    ran = in_a_process("run", "beam.yaml", "-q", cwd=folder)
    assert ran.returncode == status, ran.stderr
    assert "Traceback" not in ran.stderr
    assert (f"{variable} must be a number of threads, 1 or more, not '{value}'" in ran.stderr) == (status == 2)


def test_a_run_whose_output_is_closed_leaves_its_results(folder):
    (folder / "beam.yaml").write_text("model: {nodes: [9, 3, 3]}\noutput: {figures: false}")
    command = ["sh", "-c", 'exec "$@" >&-', "sh", *PENSTOCK, "run", "beam.yaml"]
    ran = subprocess.run(command, cwd=folder, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert (folder / "results" / "beam" / "result.json").exists()


@pytest.mark.parametrize("elsewhere", ["..", "/tmp/penstock-of-a-stranger", "link"])
def test_a_file_does_not_choose_a_folder_outside_the_working_folder(folder, penstock, elsewhere):
    work = folder / "work"
    work.mkdir()
    (work / "link").symlink_to(folder)
    (work / "a.yaml").write_text(f"model: {{nodes: [9, 3, 3]}}\noutput: {{figures: false, directory: {elsewhere}}}")
    refused = penstock("run", "a.yaml", cwd=work)
    assert refused.returncode == 2
    assert f"output.directory {elsewhere} lies outside the working folder" in refused.stderr
    assert sorted(entry.name for entry in folder.iterdir()) == ["beam.yaml", "work"]

    assert penstock("run", "a.yaml", "--output", folder / "mine", cwd=work).returncode == 0
    assert (folder / "mine" / "result.json").exists()


def test_an_empty_folder_of_the_user_stays_when_a_run_fails(folder, penstock):
    (folder / "beam.yaml").write_text("model: {nodes: [17, 9, 9]}\nmemory: {budget: 1 KiB}")
    (folder / "mine").mkdir(mode=0o750)
    assert penstock("run", "beam.yaml", "--output", "mine", cwd=folder).returncode == 2
    assert list((folder / "mine").iterdir()) == []
    assert penstock("run", "beam.yaml", "--output", "made", cwd=folder).returncode == 2
    assert not (folder / "made").exists()
