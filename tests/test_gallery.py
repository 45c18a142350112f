"""Every script of the gallery runs, what it asserts holds, and it draws a picture."""

import importlib.util
import runpy
import sys
from pathlib import Path

import matplotlib
import pytest

pytestmark = pytest.mark.usefixtures("one_thread")
GALLERY = Path(__file__).parents[1] / "examples" / "gallery"
SCRIPTS = sorted(GALLERY.glob("plot_*.py"))
NEEDS = {"plot_elasticity_scikit_fem": "skfem", "plot_pyamg_hierarchy": "pyamg"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_of_the_gallery_draws_its_picture(script, tmp_path, monkeypatch):
    needed = NEEDS.get(script.stem)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setenv("MPLBACKEND", "Agg")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    pyplot.close("all")

    runpy.run_path(str(script), run_name="__main__")

    figures = [pyplot.figure(number) for number in pyplot.get_fignums()]
    pyplot.close("all")
    assert figures
    assert all(figure.axes for figure in figures)
    assert not list(tmp_path.iterdir()), "a script of the gallery leaves nothing behind"


def test_the_gallery_has_seventeen_scripts():
    assert len(SCRIPTS) == 17
