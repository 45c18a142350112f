"""Tests of the iteration for modes."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def always_in_one_thread(one_thread):
    """These systems are small."""
