"""What is added to a registry is an equal: by as few files as CONTRIBUTING says, or by the entry point of another package.

The examples of things of one's own are put into a copy of the package, or into a package of their own, and used in a process that
knows nothing else of them.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from test_architecture import FOLDERS, ROOT

EXAMPLES = ROOT / "examples"

#: Runs before what each addition is used for: a small system, in memory and in files, and the command line.
PREPARE = """
import numpy as np, pathlib, scipy.io, scipy.sparse, penstock
from penstock.fem import Cantilever
from typer.testing import CliRunner

beam = Cantilever(nodes=3, dof=1)
A, b = beam.matrix().to_csr(), beam.load()
scipy.io.mmwrite("A.mtx", A, precision=17)
np.save("b.npy", b)

def command(*arguments, code=0):
    from penstock.commands.app import app
    ended = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    assert ended.exit_code == code, ended.output
    return " ".join(ended.output.replace("│", " ").split())

def solved(folder):
    x = np.load(pathlib.Path(folder, "solution.npy")).reshape(-1)
    assert np.linalg.norm(b - A @ x) <= 1.001e-8 * np.linalg.norm(b)  # sums of NumPy are rounded otherwise

def ran(solver):
    pathlib.Path("beam.yaml").write_text(
        f"model: {{nodes: 3, dof: 1}}\\nsolver: {{{solver}}}\\noutput: {{field: false, figures: false}}"
    )
    assert "Results are in" in command("run", "beam.yaml", "--output", "ran")
"""


@dataclass(frozen=True)
class Addition:
    """Something of one's own: the example that declares it, where it goes, and a script that uses it everywhere."""

    example: str
    place: str
    imported_in: str | None
    use: str
    group: str | None = None
    files: dict[str, str] = field(default_factory=dict)  # further ones: where they go, by name


ADDITIONS = {
    "format": Addition(
        "add_a_format",
        "spmv/formats/dia.py",
        "spmv/formats/__init__.py",
        """
        assert "dia spmv (cpu)" in command("info", "--no-measure")
        from penstock.spmv import format_named, format_names
        assert "dia" in format_names()
        assert penstock.solve(format_named("dia").from_csr(A), b, device="cpu").converged
        command("solve", "A.mtx", "b.npy", "--format", "dia", "--output", "solved")
        solved("solved")
        assert "dia" in pathlib.Path("solved", "plan.txt").read_text()
        assert " dia," in command("solve", "--help")
        command("store", "A.mtx", "stored", "--format", "dia")
        assert penstock.solve("stored", b, device="cpu").converged
        """,
        "penstock.formats",
        {"diagonals.cu": "spmv/kernels/diagonals.cu"},
    ),
    "preconditioner": Addition(
        "add_a_preconditioner",
        "solvers/ssor.py",
        "solvers/__init__.py",
        """
        assert "preconditioner ssor" in penstock.solve(A, b, preconditioner="ssor", device="cpu").explain()
        command("solve", "A.mtx", "b.npy", "--precond", "ssor", "--output", "solved")
        solved("solved")
        assert "ssor" in command("solve", "--help")
        assert '"ssor"' in command("schema")
        ran("preconditioner: ssor, options: {omega: 1.2}")
        """,
        "penstock.preconditioners",
    ),
    "Krylov method": Addition(
        "add_a_solver",
        "solvers/steepest_descent.py",
        "solvers/__init__.py",
        """
        result = penstock.solve(A, b, method="steepest_descent", device="cpu", rtol=1e-6)
        assert result.converged and "steepest descent" in result.explain()
        plain = penstock.solve(A, b, method="steepest_descent", preconditioner="none", device="cpu", rtol=1e-6)
        assert plain.converged and plain.iterations > result.iterations
        whole = ["solve", "A.mtx", "b.npy", "--method", "steepest_descent"]
        command(*whole, "--output", "whole")
        command(*whole, "--maxiter", "5", "--output", "resumed", code=1)
        command("solve", "--resume", "resumed", "--maxiter", "5000")
        solved("resumed")
        once, twice = (np.load(pathlib.Path(of, "solution.npy")) for of in ("whole", "resumed"))
        assert np.array_equal(once, twice)
        assert "steepest_descent (steepest descent)" in command("solve", "--help")
        assert '"steepest_descent"' in command("schema")
        ran("method: steepest_descent, rtol: 1e-6")
        """,
        "penstock.methods",
    ),
    "store": Addition(
        "add_a_store",
        "streaming/stores/compressed.py",
        "streaming/__init__.py",
        """
        from penstock.streaming import HostStore
        try:
            from penstock.streaming import CompressedStore
        except ImportError:
            from plugged import CompressedStore
        plain = HostStore.create(beam.subdivisions(3))
        result = penstock.solve(CompressedStore(plain), b, memory=plain.index.nbytes // 2, device="cpu")
        assert result.converged and result.bytes_streamed > 0
        """,
    ),
    "reader of files": Addition(
        "add_a_reader",
        "penstock/files/lines.py",
        "penstock/files/registry.py",
        """
        entries = A.tocoo()
        np.savetxt("A.csv", np.transpose([entries.row, entries.col, entries.data]), "%d,%d,%.17g")
        np.savetxt("b.csv", b)
        assert penstock.solve("A.csv", b, device="cpu").converged
        command("solve", "A.csv", "b.csv", "--output", "solved")
        solved("solved")
        assert "CSV" in command("solve", "--help") and "CSV" in command("store", "--help")
        command("store", "A.csv", "stored")
        assert penstock.solve("stored", b, device="cpu").converged
        ended = command("solve", "A.csv", "b.csv")
        assert "results/solve-A" in ended
        """,
        "penstock.readers",
    ),
    "command": Addition(
        "add_a_command",
        "penstock/commands/diagonal.py",
        None,
        """
        assert command("diagonal", "A.mtx") == f"{A.diagonal().min():g} to {A.diagonal().max():g}"
        assert "diagonal" in command("--help")
        shown = command("diagonal", "--help")
        assert "Matrix Market" in shown and "For example: penstock diagonal A.mtx" in shown
        """,
        "penstock.commands",
    ),
}


def used(addition: Addition, code: Path, folder: Path) -> None:
    """Use an addition in a process that finds the package, or the one of the addition, in a folder."""
    script = PREPARE + re.sub("^        ", "", addition.use, flags=re.MULTILINE)
    environment = os.environ | {"PYTHONPATH": str(code)}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr


def written_for_the_package(addition: Addition) -> str:
    """Return the text of an example as a file of the package has it: CUDA sources stand in a folder of kernels."""
    text = (EXAMPLES / f"{addition.example}.py").read_text(encoding="utf-8")
    return text.replace('CudaSource(Path(__file__).parent, "', 'CudaSource("penstock.spmv.kernels", "').replace(
        "from penstock.spmv import CsrMatrix, SparseMatrix, register_kernel",
        "from penstock.spmv.compilation.table import register_kernel\n"
        "from penstock.spmv.formats.base import SparseMatrix\n"
        "from penstock.spmv.formats.csr import CsrMatrix",
    )


def import_of(addition: Addition) -> str:
    """Return the line that imports a file of the package."""
    package, _, name = addition.place.removesuffix(".py").removeprefix("penstock/").replace("/", ".").rpartition(".")
    names = re.findall(r"^class (\w*Store)\b", (EXAMPLES / f"{addition.example}.py").read_text(), re.MULTILINE)
    if names:
        return f"from penstock.{package}.{name} import {', '.join(names)}\n"
    return f"from penstock.{package} import {name}\n"


def sources(folder: Path) -> dict[Path, bytes]:
    """Return the contents of all files in a folder but those that Python and Numba keep."""
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.resolve(): path.read_bytes() for path in files}


@pytest.mark.parametrize("kind", ADDITIONS)
def test_it_takes_as_many_files_as_contributing_says(kind, tmp_path):
    addition, copy, work = ADDITIONS[kind], tmp_path / "copy", tmp_path / "work"
    work.mkdir()
    for folder in ("penstock", *FOLDERS):
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True)  # with the kernels that are compiled
    before = sources(copy)

    (copy / addition.place).write_text(written_for_the_package(addition))
    for name, place in addition.files.items():
        shutil.copy(EXAMPLES / name, copy / place)
    if addition.imported_in is not None:
        with open(copy / addition.imported_in, "a") as file:
            file.write(import_of(addition))

    changed = sources(copy).items() - before.items()
    [row] = re.findall(rf"^\| an? {kind} \| (\d) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert len(changed) == int(row)
    used(addition, copy, work)


@pytest.mark.parametrize("kind", ADDITIONS)
def test_a_package_of_its_own_needs_an_entry_point_only(kind, tmp_path):
    addition, code, work = ADDITIONS[kind], tmp_path / "code", tmp_path / "work"
    described = code / "plugged-1.0.dist-info"
    for folder in (work, described):
        folder.mkdir(parents=True)
    shutil.copy(EXAMPLES / f"{addition.example}.py", code / "plugged.py")
    for name in addition.files:
        shutil.copy(EXAMPLES / name, code)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    if addition.group is not None:  # a store is handed over
        (described / "entry_points.txt").write_text(f"[{addition.group}]\nplugged = plugged\n")
    used(addition, code, work)
