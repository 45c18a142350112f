"""Versions, the conda recipe, the citation and the oldest versions agree with pyproject.toml."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

import penstock

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]
# What conda calls otherwise than PyPI.
CONDA_NAMES = {"matplotlib-base": "matplotlib"}


def bounds(requirements):
    """Return the lower bounds of requirements of pip or conda, by name."""
    return dict(re.fullmatch(r"([\w-]+)(?:\[\w+\])? ?>=([\d.]+)", one).groups() for one in requirements if ">=" in one)


def test_the_wheel_has_the_cuda_sources_of_every_folder_and_what_modules_read():
    on_disk: dict[str, set[str]] = {}
    for path in (*ROOT.glob("*/kernels/*.cu*"), *ROOT.glob("*/compilation/*.json")):
        on_disk.setdefault(f"penstock.{path.parts[-3]}.{path.parts[-2]}", set()).add(f"*{path.suffix}")
    data = SETTINGS["tool"]["setuptools"]["package-data"]

    assert {package: set(patterns) for package, patterns in data.items() if package != "penstock"} == on_disk
    assert on_disk.keys() <= set(SETTINGS["tool"]["setuptools"]["packages"])


@pytest.fixture(scope="module")
def recipe():
    text = (ROOT / "recipe" / "meta.yaml").read_text()
    text = re.sub(r"{%.*%}", "", text)
    return yaml.safe_load(re.sub(r"{{ (\w+) }}", r"\1", text))


def test_the_version_is_that_of_the_installation():
    assert penstock.__version__ == version("penstock")


def test_a_copy_that_is_not_installed_has_a_version(tmp_path):
    """One reaches the checkout through a link only, and finds nothing of an installation."""
    (tmp_path / "penstock").symlink_to(ROOT / "penstock")
    code = "import penstock; print(penstock.__version__); import penstock.spmv"
    paths = os.pathsep.join(path for path in sys.path if path.endswith("-packages"))
    blocked = "import importlib.metadata as m\nm.version = lambda name: m.distribution(name + ' is not installed')\n"
    printed = subprocess.run(
        [sys.executable, "-S", "-c", blocked + code],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{paths}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert printed.strip() == SETTINGS["tool"]["setuptools_scm"]["fallback_version"]


def test_the_recipe_requires_what_the_project_requires(recipe):
    required = recipe["requirements"]
    run = {CONDA_NAMES.get(name, name): bound for name, bound in bounds(required["run"]).items()}
    python = {"python": PROJECT["requires-python"].removeprefix(">=")}

    assert run == bounds(PROJECT["dependencies"]) | python
    assert bounds(required["host"]) == bounds(SETTINGS["build-system"]["requires"]) | python
    assert "pip" in required["host"]
    extras = PROJECT["optional-dependencies"]
    cuda = bounds(extras["cuda"])["cupy-cuda13x"]
    assert bounds(required["run_constrained"]) == {"cupy": cuda} | bounds(extras["mpi"] + extras["files"])


def test_the_recipe_is_of_this_project(recipe):
    assert recipe["package"]["name"] == PROJECT["name"]
    assert recipe["build"]["entry_points"] == [f"{name} = {place}" for name, place in PROJECT["scripts"].items()]
    assert recipe["about"]["summary"] == PROJECT["description"]
    assert recipe["about"]["license"] == PROJECT["license"]
    fallback = SETTINGS["tool"]["setuptools_scm"]["fallback_version"]
    assert f'"v{fallback}"' in (ROOT / "recipe" / "meta.yaml").read_text()


def test_the_citation_is_of_this_project():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())

    assert citation["cff-version"] == "1.2.0"
    assert citation["message"]
    assert citation["title"] == PROJECT["name"]
    assert citation["authors"] == PROJECT["authors"]
    assert citation["license"] == PROJECT["license"]
    assert citation["abstract"] == PROJECT["description"] + "."


def test_the_oldest_versions_are_those_of_the_requirements():
    script = [sys.executable, ROOT / ".ci" / "lower_bounds.py", "test"]
    printed = subprocess.run(script, capture_output=True, text=True, check=True).stdout.split()
    extras = PROJECT["optional-dependencies"]

    expected = bounds(PROJECT["dependencies"] + extras["test"] + extras["mpi"] + extras["files"])
    assert dict(line.split("==") for line in printed) == expected


def test_every_python_of_the_classifiers_is_tried():
    """The first one with the oldest versions of the libraries."""
    named = re.findall(r"(?:try_in|find_python) ([\d.]+)\)", (ROOT / ".ci" / "wheels").read_text())

    assert [f"Programming Language :: Python :: {name}" for name in sorted(named)] == [
        line for line in PROJECT["classifiers"] if "Python :: " in line
    ]
