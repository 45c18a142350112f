"""What all tests of experiments share."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from penstock.driver import opening

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True, scope="module")
def always_in_one_thread(one_thread):
    """These systems are small."""


@pytest.fixture
def rendered_pictures():
    """For tests that claim something about pictures: they are rendered as for a user."""


@pytest.fixture(autouse=True)
def composed_pictures(request, monkeypatch):
    """Elsewhere pictures are composed but not rendered, which takes longer than these small solves; files mark their places."""
    if "rendered_pictures" not in request.fixturenames:
        monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: Path(path).write_bytes(PNG_SIGNATURE))


@pytest.fixture
def learning():
    """For tests of what the first sweeps change; elsewhere plans do not depend on the clock."""


@pytest.fixture(autouse=True)
def plans_that_stay(request, monkeypatch):
    """Keep plans as they are, although the first sweeps differ from rates that a test has made up."""
    if "learning" not in request.fixturenames:
        monkeypatch.setattr(opening, "plan_again", lambda *arguments: None)
