"""Benchmarks, which tests do not run, find what they import from each other and from the package."""

import ast
import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_imported_names_exist(path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    own = {other.stem for other in FOLDER.glob("*.py")}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module in own or node.module.startswith("penstock")):
            module = importlib.import_module(node.module)
            missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
            missing = [name for name in missing if not _is_module(f"{node.module}.{name}")]
            assert not missing, (node.module, missing)


def _is_module(name):
    try:
        return importlib.import_module(name) is not None
    except ImportError:
        return False
