"""Registries refuse names that are taken, whatever the things are, and let a module be loaded again."""

import importlib
import importlib.metadata
from dataclasses import replace

import pytest

from penstock.files import mat, npz
from penstock.files.reader import READERS
from penstock.solvers import METHODS
from penstock.spmv import InputError, registry
from penstock.spmv.registry import Registry


def test_a_description_under_a_taken_name_is_refused():
    known = METHODS["cg"]
    for other in (replace(known, label="another"), replace(known, solve=print)):
        with pytest.raises(InputError, match="a method 'cg' exists already"):
            METHODS.add("cg", other)
    assert METHODS["cg"] is known
    METHODS.add("cg", replace(known))  # of the same parts


def test_a_module_may_declare_its_things_again():
    for module in (mat, npz):
        importlib.reload(module)
    assert READERS["mat"].matrix is mat.read_mat


def test_equal_things_are_the_same_and_others_are_not():
    colours = Registry("colour")
    colours.add("red", "#ff0000")
    colours.add("red", "#ff0000")
    with pytest.raises(InputError, match="a colour 'red' exists already: '#ff0000'"):
        colours.add("red", "#ee0000")


def test_what_installed_packages_offer_is_contained(monkeypatch):
    class Entry:
        def load(self):
            colours.add("blue", "#0000ff")

    colours = Registry("colour", "penstock.colours")
    monkeypatch.setattr("penstock.spmv.registry.entry_points", lambda group: [Entry()])
    assert "blue" in colours
    assert "green" not in colours


def test_all_registries_share_one_look_at_the_installed_packages(monkeypatch):
    looks, look = [], importlib.metadata.entry_points
    monkeypatch.setattr("importlib.metadata.entry_points", lambda: looks.append(1) or look())
    registry._installed.cache_clear()
    for group in ("penstock.colours", "penstock.sounds"):
        assert Registry("thing", group).keys() == []
    assert looks == [1]


def test_a_package_that_cannot_be_loaded_is_a_warning_and_others_are_there(monkeypatch):
    class Broken:
        value = "broken.colours"

        def load(self):
            raise ImportError("no module named 'paint'")

    class Entry:
        def load(self):
            colours.add("blue", "#0000ff")

    colours = Registry("colour", "penstock.colours")
    monkeypatch.setattr("penstock.spmv.registry.entry_points", lambda group: [Broken(), Entry()])
    with pytest.warns(
        RuntimeWarning, match=r"broken\.colours .*penstock\.colours cannot be loaded: ImportError: .*paint"
    ):
        assert colours.keys() == ["blue"]
