"""Solve a system that :mod:`zoo.run` has written by a peer: python -m zoo.theirs FOLDER RTOL CAP PEER.

It runs by the Python that has the peer, which need not have penstock.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import scipy.sparse

from zoo.child import leave, timed
from zoo.peers import PEERS, Problem


def load_problem(folder: Path, rtol: float) -> Problem:
    """Return the data of a system that is given to a peer."""
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    with np.load(folder / "arrays.npz") as arrays:
        b, modes, kernel = (arrays.get(name) for name in ("b", "slow_modes", "kernel"))
    A = scipy.sparse.csr_matrix(scipy.sparse.load_npz(folder / "A.npz"))
    return Problem(A, b, modes, kernel, facts["unknowns_per_node"], facts["dimensions"], rtol)


def main() -> None:
    """Measure."""
    folder, rtol, cap, peer = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), PEERS[sys.argv[4]]
    problem = load_problem(folder, rtol)
    __import__(peer.module)
    try:
        (x, iterations), seconds = timed(lambda: peer.solve(problem), cap)
    except Exception as error:  # of any library
        leave(folder, None, {"message": f"{type(error).__name__}: {error}"})
        return
    leave(folder, x, {**seconds, "iterations": iterations, "message": ""})


if __name__ == "__main__":
    main()
