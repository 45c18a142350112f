"""The shape of the project: what is packaged, what is public, how large files and functions are."""

import ast
import importlib
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("spmv", "streaming", "solvers", "distributed", "fem", "experiments")
# Those that stand in penstock/ itself, beside the links.
REAL_FOLDERS = sorted({path.parent.name for path in (ROOT / "penstock").glob("*/__init__.py")} - set(FOLDERS))
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_the_list_of_packages_is_that_of_the_disk():
    on_disk = {"penstock", *(f"penstock.{folder}" for folder in REAL_FOLDERS)}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("__init__.py"):
            on_disk.add(".".join(["penstock", *path.parent.relative_to(ROOT).parts]))

    assert set(SETTINGS["packages"]) == on_disk


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_links_for_type_checkers_point_to_the_folders(folder):
    link = ROOT / "penstock" / folder

    assert link.is_symlink()
    assert link.resolve() == ROOT / folder
    assert SETTINGS["package-dir"][f"penstock.{folder}"] == folder


@pytest.mark.parametrize("folder", FOLDERS)
def test_public_names_exist_and_are_sorted(folder):
    module = importlib.import_module(f"penstock.{folder}")

    assert all(hasattr(module, name) for name in module.__all__)
    assert len(set(module.__all__)) == len(module.__all__)


SOLVE = "import numpy, scipy.sparse; penstock.solve(scipy.sparse.eye_array(5).tocsr(), numpy.ones(5));"


@pytest.mark.parametrize(
    ("done", "unused"),
    [
        ("", {"numpy", "numba", "scipy", "matplotlib"}),
        (SOLVE, {"pydantic", "h5py", "penstock.fem", "penstock.experiments", "matplotlib"}),
    ],
    ids=["import", "solve"],
)
def test_what_is_not_needed_is_not_loaded(done, unused):
    """Each of these takes a tenth of a second in a script that solves once."""
    import subprocess
    import sys

    code = f"import sys, penstock; {done} print(sorted({unused} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    assert loaded == "[]"


SOURCES = [
    path for folder in (*FOLDERS, "benchmarks", "examples", "docs") for path in sorted((ROOT / folder).rglob("*.py"))
] + [path for folder in (".", *REAL_FOLDERS) for path in sorted((ROOT / "penstock" / folder).glob("*.py"))]
# Functions whose parameters are the interface that people know from SciPy, and the command of that name.
MANY_PARAMETERS = {"solve", "prepare", "eigsh", "modes", "cg", "block_cg", "solve_by_image"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_small(path):
    text = path.read_text()

    assert len(text.splitlines()) <= 500  # an idea stands in one file; most have far fewer
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno - lines_of_docstring(node) < 60 or is_kernel(node), node.name
            parameters = [argument.arg for argument in node.args.args + node.args.kwonlyargs]
            allowed = node.name.startswith("_") or node.name in MANY_PARAMETERS or is_kernel(node)
            assert len(set(parameters) - {"self", "cls"}) <= 10 or allowed, node.name


def lines_of_docstring(node: ast.FunctionDef) -> int:
    """Count the lines of a docstring."""
    return len((ast.get_docstring(node) or "").splitlines())


def is_kernel(node: ast.FunctionDef) -> bool:
    """Whether a function is compiled by Numba."""
    return any(
        isinstance(decorator, ast.Name) and ("kernel" in decorator.id or "parallel" in decorator.id)
        for decorator in node.decorator_list
    )
