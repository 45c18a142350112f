"""Systems as engineers and researchers have them, solved by ``penstock.solve`` as it is, against the solvers they would use.

    python benchmarks/zoo cpu2
    python benchmarks/zoo cpu2 --size small --family bone --family fibres --no-peers
    python benchmarks/zoo cpu2 --resume          (goes on with what an interrupted run has left)

Families are in the files beside this one; each gives what a user of such a problem knows: coordinates, a near-null space, a null
space, or nothing. Every solver gets the same knowledge, and runs in a process of its own on one core with one thread, to a
relative residual of 1e-8. ``seconds`` and ``peers`` are CPU seconds of set-up and solve together, after kernels have been
compiled; only peers that solved the system are among ``peers``. ``true_residual`` is computed here from A, b and x. A solve that
takes more than ``--cap`` CPU seconds is ended and has not converged. ``solvers`` says what each peer did. CHOLMOD factorises, the
others iterate. Where rounding alone leaves more than that residual, ten times what it leaves is enough (``at_rounding_floor``).

Peers: PyAMG, and with Debian's packages python3-petsc4py, python3-scipy and, for scikit-sparse, libsuitesparse-dev: GAMG,
BoomerAMG and CHOLMOD. They may be installed for another Python, that of the system; ``PETSC_DIR`` says where PETSc is, if it
is not found. An optimised BLAS, such as libopenblas0-serial, makes CHOLMOD several times as fast. Missing peers are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from record import argument_parser, current_commit, record, write

from penstock.experiments.reporting.environment import check_same_machine
from zoo.families import FAMILIES, SIZES, System, build
from zoo.peers import PEERS
from zoo.processes import Limits, judge, measured, pythons_of_peers
from zoo.summary import summary

RTOL = 1e-8


@dataclass
class Run:
    """The solves of one system after another.

    Parameters
    ----------
    limits : Limits
    pythons : dict
        The Python of each peer.
    """

    limits: Limits
    pythons: dict[str, str]
    commit: str = field(default_factory=current_commit)

    def measure(self, size: str, name: str) -> dict[str, Any]:
        """Return the record of one system."""
        system = build(name, SIZES[size])
        with tempfile.TemporaryDirectory() as directory:
            folder = Path(directory)
            system.save(folder)
            (folder / "first").mkdir()
            build(name, min(SIZES[size], SIZES["least"])).save(folder / "first")
            own = measured(system, folder, self.limits, sys.executable)
            self._told("penstock", own)
            solvers = {}
            for peer, python in self.pythons.items():
                if system.null_space is None or PEERS[peer].singular:
                    solvers[peer] = measured(system, folder, self.limits, python, peer)
                    self._told(peer, solvers[peer])
        judge(own, solvers, self.limits.rtol)
        return self._entry(f"zoo/{size}/{name}", system, own, solvers)

    def _told(self, name: str, outcome: dict[str, Any]) -> None:
        done = {"CPU s": "cpu_seconds", "iterations": "iterations", "residual": "true_residual"}
        numbers = [f"{outcome[key]:.3g} {what}" for what, key in done.items() if outcome.get(key) is not None]
        words = [outcome.get("preconditioner", ""), outcome["message"]]
        print(f"  {name}: {', '.join([*numbers, *filter(None, words)])}", flush=True)

    def _entry(self, name: str, system: System, own: dict[str, Any], solvers: dict[str, Any]) -> dict[str, Any]:
        A = system.A
        return record(
            name,
            own.pop("samples", [self.limits.cap]),
            floor=0.0,
            nbytes=int(A.data.nbytes + A.indices.nbytes + A.indptr.nbytes),
            peers={peer: of["cpu_seconds"] for peer, of in solvers.items() if of["converged"]},
            **own,
            unknowns=A.shape[0],
            entries=int(A.nnz),
            given=list(system.given),
            solvers=solvers,
            cap_seconds=self.limits.cap,
            commit=self.commit,
        )


def earlier_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of an interrupted run on this machine."""
    if not path.exists():
        return []
    data = json.loads(path.read_text(encoding="utf-8"))
    check_same_machine(data, path)
    return list(data["records"])


def arguments_of(given: list[str] | None = None) -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--size", action="append", choices=list(SIZES), help="default: small, then large")
    parser.add_argument(
        "--family", action="append", choices=sorted(FAMILIES), help="several can be given; default: all"
    )
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument(
        "--resume", action="store_true", help="keep the records of the JSON and add those that it lacks"
    )
    parser.add_argument("--cap", type=float, default=120.0, help="CPU seconds of a solve")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="that all solves run on")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> None:
    """Measure, print, and write the JSON after every system."""
    arguments = arguments_of(given)
    limits = Limits(RTOL, arguments.cap, arguments.core)
    run = Run(limits, {} if arguments.no_peers else pythons_of_peers(arguments.core))
    records = earlier_records(arguments.output / f"zoo-{arguments.machine}.json") if arguments.resume else []
    done = {entry["name"] for entry in records}
    names = (f"zoo/{size}/{name}" for size in SIZES for name in FAMILIES)
    places = {name: place for place, name in enumerate(names)}
    for size in arguments.size or ("small", "large"):
        for name in arguments.family or FAMILIES:
            if f"zoo/{size}/{name}" not in done:
                print(f"zoo/{size}/{name}", flush=True)
                records.append(run.measure(size, name))
                records.sort(
                    key=lambda entry: places.get(entry["name"], len(places))
                )  # as if it had not been interrupted
                write("zoo", arguments, {}, records)
    print(summary(records))


if __name__ == "__main__":
    main()
