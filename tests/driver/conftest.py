"""What several tests of the driver share."""

import pytest

from penstock.driver import predicted


@pytest.fixture(autouse=True, scope="module")
def always_in_one_thread(one_thread):
    """These systems are small."""


@pytest.fixture
def small_matrices_are_worth_it(monkeypatch):
    """Let multigrid take the place of Jacobi for small matrices too, and nothing else do so."""
    monkeypatch.setitem(predicted._OVERHEAD_SECONDS, "cpu", 0.0)
    monkeypatch.setattr(predicted, "_WORTH_SCALAR", 70)
    monkeypatch.setattr(predicted.FactorisationLook, "within", lambda *of: None)
