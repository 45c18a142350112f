"""Pictures of a run: their labels are plain text, and a body of any size is drawn from few points."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from penstock.experiments.reporting import figures
from penstock.fem import BoxMesh
from penstock.streaming import Timeline
from penstock.streaming.planning.timeline import Span


@pytest.fixture
def drawn(monkeypatch):
    """Return the figures that are drawn, instead of writing them."""
    collected = []
    monkeypatch.setattr(figures, "_save", lambda figure, path: collected.append(figure))
    return collected


def labels(figure: Figure) -> list[str]:
    figure.canvas.draw()
    axis = figure.axes[0].yaxis
    texts = [text.get_text() for text in axis.get_ticklabels(which="both")]
    return [text for text in texts if text]


@pytest.mark.parametrize(
    ("history", "expected"),
    [([1.0, 1e-4, 1e-8], "10⁻⁴"), ([1.0, 0.8, 0.5], "6\N{MULTIPLICATION SIGN}10⁻¹"), ([0.0, 0.0], "0.00")],
)
def test_residuals_are_labelled_without_formulas(drawn, tmp_path, history, expected):
    figures.draw_convergence(tmp_path / "a.png", [history], history[-1], 0.0)
    found = labels(drawn[0])
    assert expected in found
    assert not any("$" in label for label in found)


def test_all_bars_of_a_row_are_drawn_at_once(drawn, tmp_path):
    spans = [Span("compute", number, None, number * 1e-3, number * 1e-3 + 9e-4) for number in range(300)]
    figures.draw_timeline(tmp_path / "a.png", Timeline(spans))
    bars = drawn[0].axes[0].collections
    assert sum(len(of.get_paths()) for of in bars) == 300
    assert len(bars) <= 2


@pytest.mark.parametrize("dof", [1, 3, 6])
def test_a_large_body_is_drawn_from_few_points_and_scaled_by_all(drawn, tmp_path, monkeypatch, dof):
    given = []
    kind = figures.Poly3DCollection
    monkeypatch.setattr(figures, "Poly3DCollection", lambda quads, **style: given.append(quads) or kind(quads, **style))
    mesh = BoxMesh(nodes=(65, 5, 70))
    solution = np.zeros((*mesh.node_counts, dof))
    solution[-1] = 0.5
    solution[32, 2, 35] = 2.0  # inside, and drawn nowhere
    figures.draw_deformed(tmp_path / "a.png", mesh, solution)
    [quads] = given
    assert len(quads) == 2 * (32 * 32 + 2 * 32 * 4)
    moved = 0.0 if dof == 1 else 0.15 * max(mesh.side_lengths) * 0.5 / 2.0
    assert quads[..., 0].max() == pytest.approx(mesh.side_lengths[0] + moved)
    assert len(drawn) == 1
