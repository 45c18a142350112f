"""What CONTRIBUTING says of the way of a solve through the files is what a solve does."""

import re
import sys
from pathlib import Path

from test_architecture import ROOT

import penstock
from penstock.fem import Cantilever

STEP = re.compile(r"^(\d+)\. `([\w.]+)` in `([\w/.]+)`", re.MULTILINE)


def test_one_solve_passes_through_the_files_in_the_order_that_contributing_names():
    steps = STEP.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert [int(number) for number, _, _ in steps] == list(range(1, 13))
    beam, called = Cantilever(nodes=(5, 3, 3), dof=3), {}

    def note(frame, event, _argument):
        if event == "call":
            called.setdefault((frame.f_code.co_qualname, Path(frame.f_code.co_filename)), len(called))

    A, b = beam.matrix().to_csr(), beam.load()
    penstock.solve(A, b, device="cpu")  # compiles what is missing
    sys.setprofile(note)
    try:
        result = penstock.solve(A, b, device="cpu")
    finally:
        sys.setprofile(None)

    assert result.converged
    order = {(name, path.resolve()): number for (name, path), number in called.items() if path.is_relative_to(ROOT)}
    places = [order[name, ROOT / file] for _, name, file in steps]
    assert places == sorted(places)
