"""Counts what a solve passes through: files of the package, and classes of which objects are made.

    python tests/traced_solves.py

A file counts if one of its functions runs, but for imports; a class if an object of it is made, by its ``__init__`` or as a
dataclass. The matrices are tiny: the ways are the same for large ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import scipy.sparse

import penstock
from penstock.fem import Cantilever

ROOT = Path(penstock.__file__).parent


def traced(action: Callable[[], object]) -> tuple[set[str], set[str]]:
    """Return the files and the classes that a call passes through."""
    files: set[str] = set()
    classes: set[str] = set()

    def note(frame, event, argument):
        if event != "call":
            return
        code = frame.f_code
        name = code.co_filename
        ours = name.startswith(str(ROOT)) or "/penstock/" in name
        if code.co_name == "<module>":
            return
        made = frame.f_locals.get("self") if code.co_name in ("__init__", "__post_init__") else None
        if made is not None and type(made).__module__.startswith("penstock."):
            classes.add(type(made).__qualname__)
        if ours and name.endswith(".py"):
            files.add(str(Path(name).resolve()))

    action()  # what is imported or compiled at the first call does not count
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return files, classes


def in_memory() -> tuple[set[str], set[str]]:
    """Trace a matrix of SciPy that is solved by iterations in memory; by itself, one so small is factorised by LAPACK."""
    A = scipy.sparse.diags_array([-1.0, 4.0, -1.0], offsets=[-1, 0, 1], shape=(12, 12)).tocsr()
    return traced(lambda: penstock.solve(A, np.ones(12), device="cpu", preconditioner="jacobi"))


def streamed() -> tuple[set[str], set[str]]:
    """Trace a matrix that is streamed, with a coarse level."""
    beam = Cantilever(nodes=(21, 3, 3), dof=3)
    A, b, points = beam.matrix().to_csr(), beam.load(), beam.mesh.coordinates()
    return traced(lambda: penstock.solve(A, b, device="cpu", coordinates=points, memory="150 KiB"))


if __name__ == "__main__":
    for way in (in_memory, streamed):
        files, classes = way()
        print(f"{way.__name__}: {len(files)} files, {len(classes)} classes")
        if "-v" in sys.argv:
            print("  " + "\n  ".join(sorted(str(Path(file)).replace(str(ROOT.parent) + "/", "") for file in files)))
            print("  " + ", ".join(sorted(classes)))
