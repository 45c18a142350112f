"""The tests marked ``gpu`` under NVIDIA's compute-sanitizer, where every array is an allocation of its own.

    python tests/sanitized.py FOLDER --tool memcheck --minutes 9
    python tests/sanitized.py FOLDER tests/spmv/vectors tests/solvers --tool racecheck

CuPy's memory pool cuts arrays out of large allocations, in which an access outside an array may still be inside the allocation;
here it is left out. Tests that measure the pool itself fail for that reason and are told as failed. Tests are dealt to processes,
each of which stops at the time limit and keeps what it passed in FOLDER; a second run with the same FOLDER goes on with the rest.
FOLDER/summary-TOOL.json has the counts, with findings in CuPy's own kernels apart. Needs the CUDA toolkit's compute-sanitizer.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FINDING = re.compile(r"Invalid|Misaligned|Race reported|Uninitialized|Barrier error|Out-of-range|[1-9]\d* errors?\b")


# This file is also the plugin of the tests that it starts.
def pytest_configure():
    """Give every array an allocation of its own."""
    import cupy

    cupy.cuda.set_allocator(None)


def pytest_runtest_logreport(report):
    """Keep what has ended, as it ends: a process that dies loses nothing."""
    if report.when == "call" or report.outcome != "passed":
        with Path(os.environ["SANITIZED_ENDED"]).open("a") as file:
            file.write(
                json.dumps({"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}) + "\n"
            )


def pytest_runtest_teardown(item):
    """Stop at the time limit, between two tests, so that the sanitizer closes its report."""
    if time.time() > float(os.environ["SANITIZED_UNTIL"]):
        item.session.shouldstop = "the time is up"


def ended(folder: Path, tool: str) -> dict[str, dict]:
    """Return what earlier processes have ended, by test."""
    lines = (line for file in folder.glob(f"{tool}-*.jsonl") for line in file.read_text().splitlines())
    return {entry["test"]: entry for entry in map(json.loads, lines)}


def collected(paths: list[str]) -> list[str]:
    """Return the names of the tests marked ``gpu`` in these files and folders; in all, if there are none."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", *paths]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if "::" in line]


def dealt(tests: Iterable[str], count: int) -> list[list[str]]:
    """Deal tests to processes in turn, so that each has some of the slow cases of a function."""
    hands: list[list[str]] = [[] for _ in range(count)]
    for number, test in enumerate(tests):
        hands[number % count].append(test)
    return [hand for hand in hands if hand]


def start(hand: list[str], folder: Path, tool: str, until: float) -> subprocess.Popen:
    """Start one process with its tests."""
    name = f"{tool}-{time.time_ns()}"
    (folder / f"{name}.txt").write_text("\n".join(hand))
    command = [
        "compute-sanitizer",
        "--tool",
        tool,
        "--log-file",
        str(folder / f"{name}.log"),
        sys.executable,
        "-m",
        "pytest",
    ]
    command += ["-q", "-m", "gpu", "-p", "sanitized", "-p", "no:cacheprovider", "--timeout=0", f"@{folder / name}.txt"]
    path = os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"PYTHONPATH": path, "SANITIZED_UNTIL": str(until), "SANITIZED_ENDED": str(folder / f"{name}.jsonl")}
    with (folder / f"{name}.out").open("w") as output:
        return subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "NUMBA_NUM_THREADS": "1", **own}, stdout=output, stderr=output
        )


def summary(folder: Path, tool: str) -> dict:
    """Sum the reports of all processes so far; one that was killed at its limit has told its findings but no sum."""
    outcomes = ended(folder, tool)
    logs = [file.read_text(errors="replace") for file in folder.glob(f"{tool}-*.log")]
    found = [line.strip("= ") for log in logs for line in log.splitlines() if FINDING.search(line)]
    return {
        "tool": tool,
        **{kind: sum(entry["outcome"] == kind for entry in outcomes.values()) for kind in ("passed", "skipped")},
        "failed": sorted(test for test, entry in outcomes.items() if entry["outcome"] == "failed"),
        "processes": len(logs),
        "closed": sum(" SUMMARY: " in log for log in logs),
        "findings": sorted({line for line in found if "cupy_" not in line}),
        "findings_in_cupy": sorted({line for line in found if "cupy_" in line}),
    }


def main() -> None:
    """Run the tests that FOLDER has not seen yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("tests", nargs="*", help="files and folders of tests; all by default")
    parser.add_argument("--tool", choices=["memcheck", "racecheck", "initcheck", "synccheck"], default="memcheck")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    until = time.time() + 60 * arguments.minutes
    seen = ended(arguments.folder, arguments.tool)
    tests = [test for test in collected(arguments.tests) if test not in seen]
    processes = [start(hand, arguments.folder, arguments.tool, until) for hand in dealt(tests, arguments.processes)]
    for process in processes:
        try:
            process.wait(max(1.0, until + 45 - time.time()))
        except subprocess.TimeoutExpired:  # a single test that takes longer; its report stays open
            process.kill()
            process.wait()
    told = {**summary(arguments.folder, arguments.tool), "asked": len(tests) + len(seen)}
    (arguments.folder / f"summary-{arguments.tool}.json").write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps(told, indent=1))
    raise SystemExit(bool(told["findings"]) or not told["passed"])


if __name__ == "__main__":
    main()
