"""Benchmarks, which tests do not run, find what they import from each other and from the package."""

import ast
import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
#: Scripts by the names under which they import each other: `zoo.run` in a package, `cg` beside it.
SCRIPTS = {".".join(path.relative_to(FOLDER).with_suffix("").parts): path for path in sorted(FOLDER.rglob("*.py"))}


@pytest.mark.parametrize("script", SCRIPTS)
def test_imported_names_exist(script, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    for node in ast.walk(ast.parse(SCRIPTS[script].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (
            node.module in {"zoo", *SCRIPTS} or node.module.startswith("penstock")
        ):
            module = importlib.import_module(node.module)
            missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
            missing = [name for name in missing if not _is_module(f"{node.module}.{name}")]
            assert not missing, (node.module, missing)


def _is_module(name):
    try:
        return importlib.import_module(name) is not None
    except ImportError:
        return False
