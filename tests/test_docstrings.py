"""Every public name is documented with an example, and every example in the package runs."""

import doctest
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from test_architecture import FOLDERS, REAL_FOLDERS, ROOT

from penstock.spmv.compilation.table import KERNELS

PACKAGES = ("penstock", *(f"penstock.{folder}" for folder in FOLDERS), "penstock.streaming.testing")
#: Names without a docstring of their own: what ``__doc__`` returns is that of their type. A comment ``#:`` above the assignment
#: documents them, which Sphinx and editors show, and the examples of their type or of functions that take them show their use.
CONSTANTS = {
    "penstock.__version__",
    "penstock.fem.LOAD_KINDS",
    "penstock.solvers.METHODS",
    "penstock.solvers.PRECONDITIONERS",
    "penstock.solvers.SOLVERS",
    "penstock.spmv.Array",
    "penstock.spmv.CPU",
    "penstock.streaming.CUTS",
}
#: Names with a docstring, whose example stands elsewhere.
WITHOUT_EXAMPLE = {
    "penstock.experiments.Experiment": "the JSON schema takes the docstring as its description; see penstock.experiments",
    "penstock.streaming.testing.StoreContract": "pytest runs it; its docstring shows how to inherit it",
}
#: Examples that are not run.
SKIPPED = {
    "penstock.distributed.NcclCommunicator": "needs a GPU",
    "penstock.distributed.gpu_of_rank": "needs a GPU",
}


def public_names():
    """All names in ``__all__`` of the public packages."""
    packages = {package: importlib.import_module(package) for package in PACKAGES}
    return {
        f"{package}.{name}": getattr(module, name) for package, module in packages.items() for name in module.__all__
    }


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("penstock", *(part for part in parts if part not in ("penstock", "__init__"))))


#: Modules whose examples need a library that is not installed with the package.
NEEDS = {"penstock.jax": "jax", "penstock.torch": "torch"}
PUBLIC = public_names()
SOURCES = {
    module_name(path): path
    for folder in ("penstock", *(f"penstock/{name}" for name in REAL_FOLDERS), *FOLDERS)
    for path in sorted((ROOT / folder).glob("*.py" if folder.startswith("penstock") else "**/*.py"))
}
WITH_EXAMPLES = sorted(name for name, path in SOURCES.items() if re.search(r"^\s*>>> ", path.read_text(), re.M))


def own_docstring(thing: object) -> str:
    """Return the docstring that stands in a class or function itself, not one that is inherited, generated or of its type."""
    if inspect.isclass(thing) and thing is not Any:  # a class in some versions of Python
        docstring = thing.__dict__.get("__doc__") or ""
        return "" if docstring.startswith(f"{thing.__name__}(") else inspect.cleandoc(docstring)  # that of a dataclass
    return inspect.cleandoc(thing.__doc__ or "") if inspect.isfunction(thing) else ""


def examples_of(thing: object) -> list[doctest.Example]:
    _, heading, text = own_docstring(thing).partition("\nExamples\n--------\n")
    return doctest.DocTestParser().get_examples(text) if heading else []


def test_every_public_name_has_a_docstring_with_an_example():
    missing = {
        name: "no docstring" if not own_docstring(thing) else "no Examples section with an example"
        for name, thing in PUBLIC.items()
        if name not in CONSTANTS | WITHOUT_EXAMPLE.keys() and not examples_of(thing)
    }

    assert missing == {}


def test_every_public_function_describes_its_parameters():
    missing = {
        name: parameter
        for name, thing in PUBLIC.items()
        if inspect.isfunction(thing)
        for parameter in inspect.signature(thing).parameters
        if not re.search(rf"(?m)^[\w*, ]*\b{parameter}\b", own_docstring(thing).partition("\nParameters\n")[2])
    }

    assert missing == {}


def test_constants_are_documented_by_comments():
    for name in CONSTANTS:
        package, _, constant = name.rpartition(".")
        texts = [path.read_text() for module, path in SOURCES.items() if module.startswith(package)]

        assert any(re.search(rf"^ *#: .+\n *{constant}\b.*( = |: )", text, re.M) for text in texts), name


def test_exemptions_are_needed():
    assert CONSTANTS | WITHOUT_EXAMPLE.keys() | SKIPPED.keys() <= PUBLIC.keys()
    assert not [name for name in CONSTANTS if own_docstring(PUBLIC[name])]
    assert not [name for name in WITHOUT_EXAMPLE if examples_of(PUBLIC[name])]
    skipping = {
        name for name, thing in PUBLIC.items() if any(doctest.SKIP in one.options for one in examples_of(thing))
    }
    assert skipping == SKIPPED.keys()


class Finder(doctest.DocTestFinder):
    """Also finds functions behind decorators, such as context managers."""

    def _from_module(self, module, thing):
        return super()._from_module(module, inspect.unwrap(thing) if inspect.isfunction(thing) else thing)


@pytest.fixture
def registered():
    """Take out again what examples register."""
    before = set(KERNELS.keys())
    yield
    for key in set(KERNELS.keys()) - before:
        KERNELS.remove(key)


@pytest.mark.parametrize("module", WITH_EXAMPLES)
@pytest.mark.usefixtures("registered")
def test_examples_run(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if module in NEEDS:
        pytest.importorskip(NEEDS[module])
    loaded = importlib.import_module(module)
    tests = [test for test in Finder(recurse=True).find(loaded, module) if test.examples]
    runner = doctest.DocTestRunner(verbose=False)
    report = []

    for test in tests:
        runner.run(test, out=report.append)

    assert tests
    assert not runner.failures, "".join(report)
    assert list(tmp_path.iterdir()) == []  # examples write into temporary folders only
