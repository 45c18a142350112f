"""A solve on a machine that also does something else: quiet, beside busy processes, with a quota and bound to one core.

    python benchmarks/busy.py cpu2

Each run is the command ``penstock run`` of a streamed system in a process of its own, which plans, assembles and solves; its
matrix and plan are the same in all runs. ``seconds`` are those of the solve. The peer ``spinning`` is the same run with threads
that spin while they wait, as OpenMP's do by themselves for some milliseconds, and ``sleeping`` one whose threads sleep at once.
``ratio`` is to the quiet run. Beside k busy loops on c cores, a process whose threads never wait for each other would take
(c + k) / c of the quiet time. A quota is set with control groups of version 1 or 2, and left out where this process may not make
them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from record import argument_parser, printed, record, write

EXPERIMENT = """
model: {nodes: [61, 21, 21], dof: 3}
memory: {budget: 24 MiB, format: bsr, subdivisions: 24, slots: 10}
solver: {preconditioner: chebyshev, degree: 9}
output: {figures: false, field: false}
"""
SPINNING = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "300000"}
SLEEPING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
#: Seconds after which a run is killed; a spinning one beside busy processes would take minutes.
LIMIT = 90


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[Callable[[], None]]:
    """Keep ``count`` processes busy; yield what a run does in its process first: nothing."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield lambda: None
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextlib.contextmanager
def one_core() -> Iterator[Callable[[], None]]:
    """Yield what binds a process to one core."""
    first = min(os.sched_getaffinity(0))
    yield lambda: os.sched_setaffinity(0, {first})


@contextlib.contextmanager
def quota_of_one_core() -> Iterator[Callable[[], None]]:
    """Make a control group with the time of one core; yield what moves a process into it."""
    one = Path("/sys/fs/cgroup/cpu")
    group = (one if one.exists() else Path("/sys/fs/cgroup")) / f"benchmark-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        if one.exists():
            (group / "cpu.cfs_period_us").write_text("100000")
            (group / "cpu.cfs_quota_us").write_text("100000")
        else:
            (group / "cpu.max").write_text("100000 100000")
        yield lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None
    finally:
        group.rmdir()


CONDITIONS: dict[str, Callable[[], contextlib.AbstractContextManager[Callable[[], None]]]] = {
    "quiet": lambda: busy_loops(0),
    "two_busy_loops": lambda: busy_loops(2),
    "six_busy_loops": lambda: busy_loops(6),
    "quota_of_one_core": quota_of_one_core,
    "bound_to_one_core": one_core,
}


def run(folder: Path, first: Callable[[], None], environment: dict[str, str]) -> tuple[float, int] | None:
    """Return the seconds and the bytes streamed of one solve, or None if it takes too long."""
    output = folder / "out"
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "penstock", "run", str(folder / "x.yaml"), "--output", str(output)]
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "NUMBA_NUM_THREADS")
    }
    process = subprocess.Popen(command, env={**kept, **environment}, preexec_fn=first, stdout=subprocess.DEVNULL)
    try:
        if process.wait(LIMIT):
            raise SystemExit("a run failed")
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None
    result = json.loads((output / "result.json").read_text())
    assert result["converged"], result["message"]
    return float(result["seconds"]["solve"]), int(result["bytes_streamed"])


def main() -> None:
    """Measure all conditions and write the records."""
    parser = argument_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    records, quiet = [], 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "x.yaml").write_text(EXPERIMENT)
        run(folder, lambda: None, {})  # compiles, and measures rates
        for condition, make in CONDITIONS.items():
            samples, spinning, sleeping = [], [], []
            try:
                for number in range(arguments.repeats):
                    with make() as first:
                        found = run(folder, first, {})
                        assert found is not None, f"a run takes more than {LIMIT} s"
                        samples.append(found[0])
                        peer = run(folder, first, SLEEPING)
                        sleeping.append(LIMIT if peer is None else peer[0])
                        # One spinning run tells enough where it takes minutes.
                        if number == 0 or condition in ("quiet", "bound_to_one_core"):
                            peer = run(folder, first, SPINNING)
                            spinning.append(LIMIT if peer is None else peer[0])
            except PermissionError as error:
                print(f"{condition} is left out: {error}")
                continue
            quiet = quiet or statistics.median(samples)
            entry = record(
                f"busy/{condition}",
                samples,
                floor=quiet,
                nbytes=found[1],
                peers={"spinning": statistics.median(spinning), "sleeping": statistics.median(sleeping)},
                ratio=statistics.median(samples) / quiet,
                peer_is_a_limit=max(spinning) >= LIMIT,
            )
            records.append(printed(entry, f"{entry['ratio']:.2f} x quiet"))
    write("busy", arguments, {}, records)


if __name__ == "__main__":
    main()
