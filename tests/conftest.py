"""What all tests share."""

import gc
import os
from pathlib import Path

import pytest

# Every test has a cache of its own, and so have the commands that it starts: without this, each would list the fonts anew.
_CACHES = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
os.environ.setdefault("MPLCONFIGDIR", str(_CACHES / "matplotlib"))


def pytest_collection_finish():
    """Take what lives as long as the session out of the garbage collector's sight: thousands of tests, and all modules."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path_factory, monkeypatch):
    """Keep measured rates out of the user's cache, and what lies there out of the tests."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder
