"""What all tests of experiments share."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def rendered_pictures():
    """For tests that claim something about pictures: they are rendered as for a user."""


@pytest.fixture(autouse=True)
def composed_pictures(request, monkeypatch):
    """Elsewhere pictures are composed but not rendered, which takes longer than these small solves; files mark their places."""
    if "rendered_pictures" not in request.fixturenames:
        monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: Path(path).write_bytes(PNG_SIGNATURE))
