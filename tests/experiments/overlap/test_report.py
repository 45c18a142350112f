"""The table of gains and the figures of a study, from records made by hand."""

import re

import pytest
from matplotlib.figure import Figure

from penstock.experiments.overlap.figures import PAPER_FLOPS_PER_BYTE, draw_rates, draw_timelines
from penstock.experiments.overlap.report import gains_table
from penstock.streaming import Span, Timeline

pytestmark = pytest.mark.usefixtures("rendered_pictures")


def records(*, dof=3, nodes=6, matrix="cube", repeats=2, columns=1, seconds=((2, 3.0, 2.0),), hidden=0.625):
    """Return the records of a matrix; ``seconds`` are subdivisions, and times with overlap off and on."""
    made = []
    for count, *times in seconds:
        for kind, time in zip(("off", "on"), times, strict=True):
            name = f"overlap/{matrix}/{kind}/s{count}/r{repeats}" + (f"/k{columns}" if columns > 1 else "")
            made.append(
                {
                    "name": name, "matrix": matrix, "dof": dof, "nodes": nodes, "repeats": repeats, "columns": columns,
                    "subdivisions": count, "overlap": kind, "seconds": time, "predicted_seconds": 1 / count,
                    "gflops": 12 / time, "transfer_gflops": 8.0, "compute_gflops": 7.0, "times_floor": time / 1.6,
                    "gain": times[0] / times[1] - 1, "hidden": hidden, "serial_gflops": 1.5, "format": "bsr",
                    "protocol": "paper", "device": "cpu",
                }
            )  # fmt: skip
    return made


def rows(table):
    """Return the rows of a Markdown table as dictionaries."""
    shown = [line for line in table.splitlines() if line.startswith("|")]
    header, rule, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in shown)
    assert set(rule) == {"---"}
    return [dict(zip(header, line, strict=True)) for line in lines]


def test_the_best_of_each_matrix_repeats_and_columns_is_a_row():
    found = rows(
        gains_table(
            records(seconds=((2, 3.0, 2.5), (4, 3.2, 2.0), (8, 3.3, 2.2)))
            + records(repeats=5)
            + records(columns=8)
            + records(matrix="beam")
        )
    )

    keys = [(row["matrix"], row["products"]) for row in found]
    assert keys == [("cube", "2"), ("cube", "5"), ("cube", "2 of 8 vectors"), ("beam", "2")]
    best = found[0]
    assert (best["cut"], best["GFLOP/s"], best["gain"], best["hidden"]) == ("4", "6", "60.0 %", "62.5 %")
    assert (best["on"], best["off"]) == ("1.250", "2.000")
    # The one predicted to be fastest took that much longer than the best.
    assert (best["planned cut"], best["slower by"]) == ("8", "10.0 %")


def test_every_column_stands_in_the_legend_except_that_of_the_matrix():
    table, _, legend = gains_table(records()).partition("\n\n")

    assert set(rows(table)[0]) - {"matrix"} == set(re.findall(r"\*([^*]+)\*:", legend))


@pytest.mark.parametrize(
    ("dof", "nodes", "stated"),
    [
        (3, 128, "a gain of just above 40 %, about 33 GFLOP/s, serial 2.67 GFLOP/s."),
        (6, 128, "a gain of 65.7 % at 61 subdivisions, 53.07 GFLOP/s, serial 3.20 GFLOP/s."),
        (1, 128, "serial 1.08 GFLOP/s."),
    ],
)
def test_what_the_paper_states_of_its_own_cases_stands_below(dof, nodes, stated):
    table = gains_table(records(dof=dof, nodes=nodes, repeats=50))

    assert len(rows(table)) == 1
    assert table.endswith(f"\n\nThe paper states for cube: {stated}\n")


@pytest.mark.parametrize(
    "other",
    [
        {"repeats": 8},
        {"repeats": 50, "columns": 8},
        {"repeats": 50, "nodes": 160},
        {"repeats": 50, "dof": 6, "nodes": (128, 128, 127)},
    ],
    ids=str,
)
def test_what_the_paper_states_is_not_compared_with_anything_else(other):
    table = gains_table(records(**{"dof": 3, "nodes": 128} | other))

    assert "paper" not in table
    assert len(rows(table)) == 1


def test_overlap_that_costs_more_than_it_hides_hides_nothing():
    [row] = rows(gains_table(records(seconds=((2, 3.0, 3.5),), hidden=-2.129)))

    assert row["hidden"] == "0.0 %"
    assert row["gain"].startswith("-")


def test_a_share_that_an_old_record_holds_is_at_most_the_whole():
    [row] = rows(gains_table(records(hidden=3.791)))

    assert row["hidden"] == "100.0 %"


def test_a_beam_read_back_from_json_has_a_row():
    assert len(rows(gains_table(records(nodes=[6, 7, 8])))) == 1


@pytest.fixture
def drawn(monkeypatch):
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    return figures


@pytest.mark.parametrize(
    ("read_GBps", "columns", "label"),
    [(40.0, 1, "7.5"), (4000.0, 1, "750 (outside)"), (40.0, 8, None)],
    ids=["inside", "outside", "of one vector"],
)
def test_rates_are_drawn_with_their_bound_and_the_papers_count_where_it_fits(
    read_GBps, columns, label, drawn, tmp_path
):
    draw_rates(tmp_path / "a.png", records(columns=columns, seconds=((8, 3.0, 2.0), (2, 4.0, 3.0))), read_GBps)

    [axes] = drawn[0].axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    counted = [name for name in lines if "the paper's count" in name]
    assert [name.split("count, ")[1] for name in counted] == ([label] if label else [])
    assert list(lines["bound of overlap: the slower of both"].get_ydata()) == [7.0, 7.0]
    assert list(lines["overlap on"].get_xdata()) == [2, 8]
    assert list(lines["overlap on"].get_ydata()) == [4.0, 6.0]
    assert list(lines["overlap off"].get_ydata()) == [3.0, 4.0]
    assert list(lines["transfer alone"].get_ydata()) == [8.0, 8.0]
    assert axes.get_ylim()[1] < 4 * 12
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_the_limits_of_the_paper_are_those_of_its_equations():
    assert {dof: round(3350 * ratio, 1) for dof, ratio in PAPER_FLOPS_PER_BYTE.items()} == {
        1: 418.8,
        3: 628.1,
        6: 717.9,
    }


def test_both_timelines_are_drawn_on_one_scale(drawn, tmp_path):
    off = Timeline([Span("transfer", 0, 0, 0.0, 1.0), Span("compute", 0, 0, 1.0, 2.0)])
    on = Timeline([Span("transfer", 0, 0, 0.0, 1.0), Span("compute", 0, 0, 0.5, 1.5)])

    draw_timelines(tmp_path / "a.png", off, on, "a cube")

    above, below = drawn[0].axes
    assert (above.get_title(), below.get_title()) == ("overlap off: a cube", "overlap on: a cube")
    assert above.get_xlim() == below.get_xlim()
    assert above.get_xlim()[1] >= 2000
