"""Cases that run whole commands: killed at a random moment, without enough of something, and on altered results folders."""

import random
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import mutations
import numpy as np

from penstock.experiments.reporting.ownership import LOCK_NAME
from penstock.fem import Cantilever
from penstock.spmv import StoreError
from penstock.streaming import FileStore

__all__ = ["altered_folder", "killed", "killed_while_storing", "scarce", "write_folders"]

EXPERIMENT = """model: {nodes: [25, 9, 9], dof: 3}
material: {kind: lognormal, sigma: 0.5}
memory: {budget: 2 MiB, format: FORMAT, subdivisions: 12}
solver: {rtol: 1.0e-8, preconditioner: PRECONDITIONER}
output: {figures: false, checkpoint_seconds: 0.01}
"""
# Python with a limit that no system call sets for root.
NO_THREADS = """import runpy, sys, threading
def start(self): raise RuntimeError("can't start new thread")
threading.Thread.start = start
sys.argv[0] = "penstock"
runpy.run_module("penstock", run_name="__main__")"""


def write_folders(base: Path) -> None:
    """Write one finished results folder, and one of a run that was stopped at a checkpoint."""
    text = _experiment("bsr", "block_jacobi")
    (base / "finished.yaml").write_text(text.replace("0.01", "1000"))
    _run(["run", str(base / "finished.yaml"), "--output", str(base / "finished")])
    (base / "stopped.yaml").write_text(text.replace("rtol", "maxiter: 40, rtol"))
    done = _penstock(["run", str(base / "stopped.yaml"), "--output", str(base / "stopped")])
    assert (base / "stopped" / "checkpoint.npz").exists(), done.stderr


def altered_folder(seed: int, base: Path) -> str:
    """Resume or show a results folder of which one file was altered, cut off or lost."""
    rng, path = random.Random(seed), base / f"{seed}-folder"
    shutil.copytree(base / rng.choice(["finished", "stopped", "stopped"]), path)
    file = rng.choice(sorted(entry for entry in path.iterdir() if entry.is_file()))
    if rng.random() < 0.1:
        file.unlink()
    elif file.suffix in (".yaml", ".json", ".csv", ".txt"):
        file.write_text(mutations.altered_text(file.read_text(), rng), errors="replace")
    else:
        file.write_bytes(mutations.altered_bytes(file.read_bytes(), rng))
    command = rng.choice([["run", "--resume"], ["show"]])
    try:
        return _refused_or("done", _penstock([*command, str(path)]))
    finally:
        shutil.rmtree(path, ignore_errors=True)


def scarce(seed: int, base: Path) -> str:
    """Run without enough descriptors, disk, memory or threads: one error or none, and afterwards the run can be made."""
    rng, path = random.Random(seed), base / f"{seed}-scarce"
    path.mkdir()
    text, whole = _whole_run(rng, base)
    (path / "x.yaml").write_text(text)
    arguments = ["run", str(path / "x.yaml"), "--output", str(path / "out")]
    what, number, most = rng.choice(
        [
            ("descriptors", resource.RLIMIT_NOFILE, rng.randint(5, 40)),
            ("disk", resource.RLIMIT_FSIZE, rng.choice([1 << 12, 1 << 16, 1 << 20, 4 << 20])),
            ("memory", resource.RLIMIT_AS, rng.randint(1000, 2500) << 20),
            ("threads", None, 0),
        ]
    )
    if number is None:
        done = _penstock(arguments, [sys.executable, "-c", NO_THREADS])
    else:
        done = _penstock(arguments, limit=(number, most))
    # Below that, the libraries that penstock imports end as they like.
    outcome = "too little to start" if _before_penstock(done) else _refused_or("done", done)
    if outcome != "done":
        _run(_again(arguments, path / "out"))
    _compared(whole, path / "out")
    shutil.rmtree(path)
    return f"{what}: {outcome}"


def killed(seed: int, base: Path) -> str:
    """Kill a run at random moments, resume it until it ends, and compare it with one that was not killed."""
    rng, path = random.Random(seed), base / f"{seed}-run"
    path.mkdir()
    text, whole = _whole_run(rng, base)
    (path / "x.yaml").write_text(text)
    arguments = ["run", str(path / "x.yaml"), "--output", str(path / "out")]
    kills = 0
    told = None
    while told is None:
        seconds = rng.uniform(0.3, 3.5) if kills < 6 else 150.0
        told = _killed_after(seconds, [sys.executable, "-m", "penstock", *arguments])
        kills += told is None
        arguments = _again(arguments, path / "out")
    if "is finished" in told:  # it was killed after it had written everything
        (path / "out" / LOCK_NAME).unlink(missing_ok=True)
    else:
        assert not told, told[-500:]
    same = _compared(whole, path / "out")
    shutil.rmtree(path)
    return f"{kills} kills, {'the same' if same else 'other'} bits"


def killed_while_storing(seed: int, base: Path) -> str:
    """Kill a process that writes a store: the store is not there or whole, and can then be written and read."""
    rng, path = random.Random(seed), base / f"{seed}-stores"
    path.mkdir()
    script = f"""from penstock.fem import Cantilever
from penstock.streaming import FileStore
FileStore.create({str(path / "a")!r}, Cantilever(nodes=(33, 17, 17), dof=3).subdivisions(16, "bsr")).close()"""
    told = _killed_after(rng.uniform(0.8, 2.0), [sys.executable, "-c", script])
    assert not told, told[-500:]
    try:
        FileStore(path / "a").close()
        outcome = "whole"
    except StoreError:
        assert not (path / "a").exists()
        outcome = "not there"
        beam = Cantilever(nodes=(9, 5, 5), dof=3)
        with FileStore.create(path / "a", beam.subdivisions(4, "bsr")) as store:
            assert store.index.shape == (beam.unknowns, beam.unknowns)
    shutil.rmtree(path)
    return outcome


def _experiment(format_name: str, preconditioner: str) -> str:
    return EXPERIMENT.replace("FORMAT", format_name).replace("PRECONDITIONER", preconditioner)


def _whole_run(rng: random.Random, base: Path) -> tuple[str, Path]:
    """Return a random experiment, and the results of a run of it that nothing disturbed."""
    format_name, preconditioner = rng.choice(["bsr", "symmetric_bsr"]), rng.choice(["chebyshev", "block_jacobi"])
    text, whole = _experiment(format_name, preconditioner), base / f"whole-{format_name}-{preconditioner}"
    if not (whole / "result.json").exists():
        shutil.rmtree(whole, ignore_errors=True)
        (base / f"{whole.name}.yaml").write_text(text)
        _run(["run", str(base / f"{whole.name}.yaml"), "--output", str(whole)])
    return text, whole


def _penstock(
    arguments: list[str], python: list[str] | None = None, limit: tuple[int, int] | None = None
) -> subprocess.CompletedProcess[str]:
    def limited() -> None:
        if limit is not None:
            resource.setrlimit(limit[0], (limit[1], limit[1]))

    command = [*(python or [sys.executable, "-m", "penstock"]), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limited)


def _run(arguments: list[str]) -> None:
    done = _penstock(arguments)
    assert done.returncode == 0, done.stderr[-500:]


def _killed_after(seconds: float, command: list[str]) -> str | None:
    """Return None if the command had to be killed, and otherwise what it told of an error."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        told = process.communicate(timeout=seconds)[1]
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        return None
    return told if process.returncode else ""


def _again(arguments: list[str], folder: Path) -> list[str]:
    return ["run", "--resume", str(folder)] if (folder / "configuration.yaml").exists() else arguments


def _refused_or(word: str, done: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in done.stderr + done.stdout, done.stderr[-1500:]
    assert done.returncode >= 0, f"signal {-done.returncode}: {done.stderr[-500:]}"
    assert (done.stderr + done.stdout).strip(), "ended without a word"
    return {0: word, 1: "not converged"}.get(done.returncode, "refused")


def _before_penstock(done: subprocess.CompletedProcess[str]) -> bool:
    """Return whether the process ended while Python or a library was loaded, which penstock cannot answer for."""
    loading = ("ImportError", "in <module>\n    import", "OpenBLAS", "Fatal Python error", "error while loading")
    return done.returncode != 0 and any(word in done.stderr for word in loading)


def _compared(whole: Path, folder: Path) -> bool:
    """Return whether two runs have the same solution bit for bit; raise if they differ by more than rounding."""
    left = {entry.name for entry in folder.iterdir()} - {entry.name for entry in whole.iterdir()}
    assert not left, f"left behind: {left}"
    fields = []
    for one in (whole, folder):
        with h5py.File(one / "solution.vtkhdf") as file:
            fields.append(np.asarray(file["VTKHDF/PointData/displacement"]))
    assert np.allclose(*fields, rtol=1e-5, atol=1e-7 * np.abs(fields[0]).max()), "another solution"
    return bool(np.array_equal(*fields))
