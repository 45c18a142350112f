"""The shape of the project: who may import whom, what is packaged, what is public."""

import ast
import importlib
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("spmv", "streaming", "solvers", "fem", "experiments")
MAY_IMPORT = {
    "spmv": set(),
    "streaming": {"spmv"},
    "solvers": {"spmv"},
    "fem": {"spmv"},
    "experiments": {"spmv", "streaming", "solvers", "fem"},
}
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def imported_folders(path: Path) -> set[str]:
    """Return the penstock subpackages that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("penstock.")}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_only_what_lies_below_it(folder):
    for path in (ROOT / folder).rglob("*.py"):
        assert imported_folders(path) <= MAY_IMPORT[folder] | {folder}, path.name


def test_the_list_of_packages_is_that_of_the_disk():
    on_disk = {"penstock"}
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


def test_importing_penstock_loads_nothing_heavy():
    import subprocess
    import sys

    code = "import sys, penstock; print(sorted({'numpy', 'numba', 'scipy', 'matplotlib'} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    assert loaded == "[]"
