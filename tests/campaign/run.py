"""Attacks penstock for some minutes: every case in a process of its own, with limits of time and memory.

    make campaign
    python tests/campaign/run.py --minutes 60 --seed 7

Prints a table of cases by kind and outcome. A case is named by its kind and seed, and repeated by ``--only KIND --seed SEED
--cases 1``. Ends with exit code 1 if a case ended in a traceback, a crash, at a limit, or with a false claim.
"""

import argparse
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

os.environ.setdefault("NUMBA_NUM_THREADS", "1")  # cases are forked, which threads do not survive
sys.path.insert(0, str(Path(__file__).parent))

import cases

from penstock.spmv import PenstockError


def outcome_of(kind: str, seed: int, base: Path) -> tuple[str, str]:
    """Return the outcome of one case, in a process of its own, and what it says of a fault."""
    this = cases.CASES[kind]
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        signal.alarm(this.seconds)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if this.memory_nbytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (this.memory_nbytes, this.memory_nbytes))
        try:
            told = this.case(seed, base)
        except PenstockError as error:
            told = "refused" if len(str(error)) < 3000 else "TRACEBACK\nan error of more than 3000 characters"
        except BaseException:
            told = "TRACEBACK\n" + traceback.format_exc()[-1500:]
        os.write(writer, told.encode(errors="replace"))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        told = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    if status:
        number = os.waitstatus_to_exitcode(status)
        return ("HANG" if number == -signal.SIGALRM else f"CRASH {number}"), ""
    outcome, _, detail = told.partition("\n")
    return outcome, detail


def main() -> int:
    """Run the campaign and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", choices=sorted(cases.CASES), help="one kind of cases")
    parser.add_argument("--cases", type=int, help="stop after so many")
    parser.add_argument("--prepare", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.prepare:
        cases.prepare(asked.prepare)
        return 0
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in cases.CASES if asked.only in (None, kind)}
    faults, began = [], time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        subprocess.run([sys.executable, __file__, "--prepare", name], check=True)
        seed = asked.seed
        while time.monotonic() - began < 60 * asked.minutes and (
            asked.cases is None or seed < asked.seed + asked.cases
        ):
            for kind in counts:
                if asked.only or seed % cases.CASES[kind].every == 0:
                    outcome, detail = outcome_of(kind, seed, Path(name))
                    counts[kind][outcome] += 1
                    if outcome.isupper() or outcome.startswith("CRASH"):
                        faults.append((kind, seed, outcome, detail))
                        print(f"{outcome}: --only '{kind}' --seed {seed} --cases 1\n{detail}", flush=True)
            for left in Path(name).glob(f"{seed}*"):
                left.unlink() if left.is_file() else shutil.rmtree(left)
            seed += 1
    print(
        f"\nseeds {asked.seed} to {seed - 1}, {time.monotonic() - began:.0f} s\n\n| kind | cases | outcomes |\n|---|---|---|"
    )
    for kind, found in counts.items():
        print(f"| {kind} | {found.total()} | {', '.join(f'{count} {name}' for name, count in found.most_common())} |")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
