"""What a person sees of a run: a line a minute in a log, one line that changes in a notebook."""

import io
import math
import re
import sys
import threading
import time
import types

import pytest
from rich.console import Console

from penstock.driver import progress
from penstock.driver.progress import RichReporter
from penstock.spmv.compilation.watch import compiling


class Notebook:
    """Stands for IPython's display, and keeps the states of every line."""

    def __init__(self):
        self.lines = []

    def display(self, data, raw=False, display_id=False):
        if not raw:  # a text of its own, which rich shows
            return None
        assert display_id
        states = [data["text/plain"]]
        self.lines.append(states)
        return types.SimpleNamespace(update=lambda data, raw: states.append(data["text/plain"]))


@pytest.fixture
def notebook(monkeypatch):
    made = Notebook()
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=made.display))
    return made


def solve(reporter):
    with reporter.stage("solve") as stage:
        for done in (-0.1, 0.25, 1.5):
            stage.advance(done, f"at {done}")


def test_a_notebook_has_one_line_for_a_part_which_changes(notebook, monkeypatch):
    monkeypatch.setattr(progress, "_NOTEBOOK_SECONDS", 0.0)
    solve(RichReporter(Console(force_jupyter=True)))
    (states,) = notebook.lines
    assert [state.split(" s  ")[1].split("  at")[0] for state in states] == [
        "",
        f"{'░' * 20}   0%",
        f"{'█' * 5}{'░' * 15}  25%",
        f"{'█' * 20} 100%",
        "at 1.5",
    ]
    assert all(state.startswith("solve") for state in states)


def test_a_notebook_is_not_flooded(notebook, monkeypatch):
    monkeypatch.setattr(progress, "_NOTEBOOK_SECONDS", 1e9)
    with RichReporter(Console(force_jupyter=True)).stage("solve") as stage:
        for number in range(10_000):
            stage.advance(number / 10_000)
    assert [len(states) for states in notebook.lines] == [2]


@pytest.mark.parametrize(("every", "lines"), [(None, 1), (0.0, 4)])
def test_a_log_gets_a_line_at_the_end_and_now_and_then(every, lines):
    out = io.StringIO()
    solve(RichReporter(Console(file=out), every))
    printed = out.getvalue().splitlines()
    assert len(printed) == lines
    assert printed[-1].endswith("at 1.5")
    if lines > 1:
        assert "   0%  at -0.1" in printed[0]


def test_a_log_says_soon_what_has_begun_and_only_once(monkeypatch):
    monkeypatch.setattr(progress, "_FIRST_SECONDS", 0.05)
    out = io.StringIO()
    with RichReporter(Console(file=out, width=100)).stage("survey"):
        began = time.perf_counter()
        while not out.getvalue().endswith("\n") and time.perf_counter() - began < 30:
            time.sleep(0.01)
        assert re.fullmatch(r"survey +0\.\d\d s  begun\n", out.getvalue())
        time.sleep(0.2)
    assert len(out.getvalue().splitlines()) == 2


def test_a_part_that_is_over_or_failed_says_no_more_that_it_has_begun(monkeypatch):
    monkeypatch.setattr(progress, "_FIRST_SECONDS", 0.1)
    out = io.StringIO()
    with pytest.raises(RuntimeError), RichReporter(Console(file=out, width=100)).stage("survey"):
        raise RuntimeError
    time.sleep(0.3)
    assert "begun" not in out.getvalue()


def compile_twice(reporter, monkeypatch):
    monkeypatch.setattr(progress, "_NOTICED_SECONDS", 0.03)
    with reporter.stage("solve") as stage:
        stage.advance(0.5, "iteration 1")
        noted, note = threading.Event(), stage.note
        monkeypatch.setattr(stage, "note", lambda detail: (note(detail), noted.set()))
        with compiling():
            assert noted.wait(30)  # long on a busy machine only
        with compiling():
            time.sleep(0.01)
        stage.advance(1.0, "iteration 2")


def test_a_log_says_at_once_that_kernels_are_compiled_and_later_how_long(monkeypatch):
    told = io.StringIO()
    compile_twice(RichReporter(Console(file=told, width=200)), monkeypatch)
    advice, first, last = told.getvalue().splitlines()
    assert advice == "Kernels are compiled once on a machine; 'penstock warm-up' does it ahead."
    assert first.endswith("compiling kernels")
    assert re.search(r"iteration 2; \d+\.\d s of it compiling kernels$", last)


def test_a_bar_says_what_was_compiled_beside_the_last_detail(monkeypatch):
    told = io.StringIO()
    compile_twice(RichReporter(Console(file=told, width=200, force_terminal=True)), monkeypatch)
    assert re.search(r"iteration 2; \d+\.\d s of it compiling kernels", told.getvalue())


def test_a_notebook_says_at_the_end_how_long_kernels_were_compiled(notebook, monkeypatch):
    compile_twice(RichReporter(Console(force_jupyter=True)), monkeypatch)
    (states,) = notebook.lines
    assert any(state.endswith(" s  compiling kernels") for state in states)
    assert re.search(r"iteration 2; \d+\.\d s of it compiling kernels$", states[-1])


def test_a_part_that_hardly_compiles_says_nothing_of_it():
    told = io.StringIO()
    with RichReporter(Console(file=told, width=200)).stage("solve"), compiling():
        pass
    assert "compil" not in told.getvalue()


def test_without_threads_to_be_had_a_log_goes_on(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(progress.threading.Timer, "start", refuse)
    written = io.StringIO()
    solve(RichReporter(Console(file=written, force_terminal=False), every=0.0))
    assert "at 1.5" in written.getvalue()


def test_residuals_that_are_not_finite_show_no_progress():
    record = types.SimpleNamespace(
        state=types.SimpleNamespace(residual_norms=[1.0]), residual_norm=math.inf, bytes_streamed=0, iteration=3
    )
    assert progress.solve_progress(record, 1e-8) == (0.0, "iteration 3, residual inf")
    record.residual_norm = math.nan
    assert progress.solve_progress(record, 1e-8)[0] == 0.0
