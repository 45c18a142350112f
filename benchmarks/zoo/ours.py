"""Solve a system that :mod:`zoo.run` has written by ``penstock.solve``: python -m zoo.ours FOLDER RTOL CAP."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import penstock
from penstock.spmv import PenstockError
from penstock.spmv.compilation.watch import compile_seconds
from zoo.child import cap_cpu, leave, timed
from zoo.system import System, load_system


def preconditioner_named(decisions: str) -> str:
    """Return the preconditioner that a result's decisions name, the last one if it was changed."""
    found = re.findall(r"preconditioner (.+)$|^(LAPACK|solver +.*Cholesky.*)$", decisions, re.MULTILINE)
    return next((name for pair in reversed(found) for name in pair if name), "none")


def main() -> None:
    """Compile by a small system of the same family, then measure; again, if that took another way and kernels were compiled."""
    folder, rtol, cap = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])

    def solve(system: System) -> Any:
        return penstock.solve(system.A, system.b, rtol=rtol, device="cpu", on_failure="return", **system.given)

    cap_cpu(cap)
    try:
        solve(load_system(folder / "first"))
        system = load_system(folder)
        compiled = compile_seconds()
        result, seconds = timed(lambda: solve(system), cap)
        if compile_seconds() > compiled:
            result, seconds = timed(lambda: solve(system), cap)
    except PenstockError as error:
        leave(folder, None, {"message": f"{type(error).__name__}: {error}"})
        return
    found = {"iterations": result.iterations, "preconditioner": preconditioner_named(result.decisions)}
    leave(folder, result.x, {**seconds, **found, "message": "" if result.converged else result.message})


if __name__ == "__main__":
    main()
