"""What usual solves compile, on a GPU or a CPU, and how long the first one on a machine takes for it.

    python benchmarks/compilation.py h200                time the first calls of every case
    python benchmarks/compilation.py h200 --package      record what each needs in the package, whose solves compile it at once
    python benchmarks/compilation.py cpu2 --device cpu   time the first calls on a CPU, and of the command that runs an experiment

Every case is a process of its own. ``seconds`` are those of its first call with empty caches of compiled kernels, most imports
included; ``floor_seconds`` those of the first call of a process that finds them filled. ``instantiations`` are CUDA kernels,
also of CuPy, or functions that Numba compiles.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from record import argument_parser, printed, record, write

PACKAGED = Path(__file__).parents[1] / "penstock" / "spmv" / "compilation" / "usual_kernels.json"
# Unknowns a node, nodes a side, right-hand sides, whether coordinates are given, and where the matrix is: in memory, streamed in
# every iteration, or iterated with in fewer digits.
CASES = (
    (3, 96, 1, True, "memory"),
    (3, 96, 1, True, "streamed"),
    (3, 96, 1, True, "float32"),
    (3, 96, 1, True, "int16"),
    (3, 96, 8, True, "memory"),
    (3, 96, 8, True, "streamed"),
    (3, 64, 1, False, "memory"),
    (3, 64, 1, False, "streamed"),
    (6, 48, 1, True, "memory"),
    (6, 48, 1, True, "streamed"),
    (1, 128, 1, False, "memory"),
    (1, 128, 1, True, "memory"),
    (1, 128, 1, True, "streamed"),
    (1, 128, 1, False, "streamed"),
)
# Those on a CPU; the first one is small enough for a factorisation.
CPU_CASES = (
    (3, 8, 1, True, "memory"),
    (3, 28, 1, True, "memory"),
    (3, 28, 1, True, "streamed"),
    (3, 28, 8, True, "memory"),
    (3, 28, 1, False, "memory"),
    (6, 20, 1, True, "memory"),
    (1, 48, 1, True, "memory"),
    (1, 48, 1, False, "memory"),
)
_TYPES = {"double": "float64", "float": "float32", "long long": "int64", "int": "int32", "bool": "bool"}
_EXPERIMENT = Path(__file__).parents[1] / "examples" / "cantilever.yaml"
# Of the bytes of the matrix, the memory in these cases.
_SHARES = {"streamed": 0.25, "float32": 0.32, "int16": 0.2}


def system_of(dof: int, nodes: int, columns: int, given: bool) -> tuple[Any, Any, dict[str, Any]]:
    """Return a matrix, right-hand sides, and the coordinates as an option if they are given."""
    from penstock.fem import Cantilever, LognormalMaterial

    beam = Cantilever(nodes=nodes, dof=dof, material=LognormalMaterial(sigma=0.5))
    A, rng = beam.matrix("csr").to_csr(), np.random.default_rng(0)
    b = rng.standard_normal((A.shape[0], columns) if columns > 1 else A.shape[0])
    return A, b, {"coordinates": beam.mesh.coordinates()} if given else {}


def run_case(dof: int, nodes: int, columns: int, given: bool, where: str, ahead: bool) -> dict[str, Any]:
    """Solve in this process; return the case, the seconds and the instantiations, before it was decided what to do and after.

    Unless kernels are compiled ``ahead``, these are just those that are needed.
    """
    import penstock
    from penstock.driver import opening
    from penstock.spmv.compilation.usual_kernels import OPENING, recorded

    calls = {} if ahead else cupy_calls()
    A, b, options = system_of(dof, nodes, columns, given)
    if where != "memory":
        precision = "float64" if where == "streamed" else where
        options |= {"memory": int(_SHARES[where] * 8 * A.nnz), "precision": precision}
    seen: dict[str, dict[str, list[str]]] = {}
    begin = opening.begin_compilation

    def noting(case: str, device: Any) -> None:
        seen[case] = with_calls(recorded(), calls)
        if ahead:
            begin(case, device)

    opening.begin_compilation = noting
    began = time.perf_counter()
    result = penstock.solve(A, b, device="cuda", rtol=1e-6, maxiter=200, on_failure="return", **options)
    seconds = time.perf_counter() - began
    [case] = [name for name in seen if name != OPENING]
    return {
        "case": case,
        "seconds": seconds,
        "compiling": result.timings["compiling"],
        "opening": seen[case],
        "kernels": with_calls(recorded(), calls),
    }


def with_calls(kernels: dict[str, list[str]], calls: dict[str, None]) -> dict[str, list[str]]:
    """Return kernels with calls of CuPy, if there are any."""
    from penstock.spmv.compilation.cupy_kernels import CUPY

    return kernels | ({CUPY: list(calls)} if calls else {})


def cupy_calls() -> dict[str, None]:
    """Return calls of CuPy for which it compiles kernels from now on, of arrays without gaps, in the order of these."""
    from cupy.cuda import compiler

    compile_module, calls = compiler._compile_module_with_cache, {}

    def noting(source: str, *arguments: Any, **options: Any) -> Any:
        head = re.search(r"__global__ void (cupy_\w+)\((.*?)\)", source, re.DOTALL)
        if head and (call := call_of(*head.groups())) is not None:
            calls[call] = None
        return compile_module(source, *arguments, **options)

    compiler._compile_module_with_cache = noting
    return calls


def call_of(name: str, parameters: str) -> str | None:
    """Return the call for which CuPy makes a kernel of this name and these parameters, as ``compile_cupy_kernel`` takes it."""
    import cupy

    arrays = re.findall(r"CArray<([\w ]+), (\d), (\d), (\d)>", parameters)
    if not arrays or any(tuple(layout) != ("1", "1", "1") for _, *layout in arrays):
        return None
    if name == "cupy_fill":
        return f"fill({_TYPES[arrays[0][0]]})" if arrays[0][0] in _TYPES else None
    function, _, types = name.removeprefix("cupy_").partition("__")
    if function not in ("arange", "copy") and getattr(getattr(cupy, function, None), "nout", 0) != 1:
        return None
    *of_arguments, of_result = types.split("_")
    if function == "arange":
        return f"arange({of_result})"
    if function == "copy":
        of_arguments.append(of_result)
    return f"{function}({', '.join(of_arguments)})" if types else None


def run_cpu_case(dof: int, nodes: int, columns: int, given: bool, where: str) -> dict[str, Any]:
    """Solve in this process; return the case, the seconds, and what Numba compiled."""
    from numba.core import event

    import penstock
    from penstock.spmv.compilation.watch import compile_seconds

    A, b, options = system_of(dof, nodes, columns, given)
    if where == "streamed":
        options["memory"] = int(_SHARES[where] * 8 * A.nnz)
    before, began = compile_seconds(), time.perf_counter()
    with event.install_recorder("numba:compile") as recorder:
        penstock.solve(A, b, device="cpu", **options)
    seconds = time.perf_counter() - began
    started = [each.data["dispatcher"].py_func.__qualname__ for _, each in recorder.buffer if each.is_start]
    vectors, known = "one vector" if columns == 1 else "several vectors", "with" if given else "without"
    place = "in memory" if where == "memory" else where
    case = f"{A.shape[0]:,} unknowns, {dof} a node, {known} coordinates, {vectors}, {place}"
    return {"case": case, "seconds": seconds, "compiling": compile_seconds() - before, "kernels": sorted(set(started))}


def seconds_of_experiment(caches: str) -> float:
    """Return the seconds of ``penstock run`` in a new process, which compiles in several processes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "penstock", "run", str(_EXPERIMENT), "--output", f"{folder}/results"]
        began = time.perf_counter()
        subprocess.run(command, env={**os.environ, "NUMBA_CACHE_DIR": caches}, capture_output=True, check=True)
        return time.perf_counter() - began


def main_on_cpu(arguments: argparse.Namespace) -> None:
    """Time the first calls on a CPU, and write the JSON."""
    records = []
    for case in CPU_CASES:
        with tempfile.TemporaryDirectory() as caches:
            first, again = (in_new_process(case, caches, kind="--cpu-case") for _ in range(2))
        more = {"instantiations": len(first["kernels"]), "compiling": first["compiling"], "kernels": first["kernels"]}
        entry = record(
            f"compilation/{first['case']}", [first["seconds"]], floor=again["seconds"], nbytes=0, peers={}, **more
        )
        records.append(printed(entry, "the first call"))
    with tempfile.TemporaryDirectory() as caches:
        first_run, next_run = (seconds_of_experiment(caches) for _ in range(2))
    entry = record(f"compilation/penstock run {_EXPERIMENT.name}", [first_run], floor=next_run, nbytes=0, peers={})
    records.append(printed(entry, "the first run"))
    write("compilation", arguments, {}, records)


def in_new_process(
    case: tuple[Any, ...], caches: str | None, *, ahead: bool = True, kind: str = "--case"
) -> dict[str, Any]:
    """Return what :func:`run_case` does in a process of its own, or, of another kind, :func:`run_cpu_case`."""
    command = [sys.executable, __file__, kind, json.dumps([*case, ahead] if kind == "--case" else case)]
    of_caches = {} if caches is None else dict.fromkeys(("NUMBA_CACHE_DIR", "CUPY_CACHE_DIR"), caches)
    done = subprocess.run(command, env={**os.environ, **of_caches}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def joined(one: dict[str, list[str]], other: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the instantiations of either."""
    return {file: list(dict.fromkeys([*one.get(file, ()), *other.get(file, ())])) for file in {**one, **other}}


def without(some: dict[str, list[str]], others: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the instantiations that are not among others."""
    left = {file: [name for name in names if name not in others.get(file, ())] for file, names in some.items()}
    return {file: names for file, names in left.items() if names}


def record_lists(packaged: Path) -> None:
    """Record what each case needs, in the order of need, and write it into a file."""
    kernels: dict[str, dict[str, list[str]]] = {}
    opening: dict[str, list[str]] = {}
    for case in CASES:
        found = in_new_process(case, None, ahead=False)
        if case[-1] == "memory":  # others are looked at in pieces
            opening = joined(opening, found["opening"])
        kernels[found["case"]] = joined(kernels.get(found["case"], {}), found["kernels"])
        print(f"{found['case']}: {sum(map(len, found['kernels'].values()))} instantiations", flush=True)
    lists = {"opening": opening, **{case: without(kernels[case], opening) for case in sorted(kernels)}}
    packaged.write_text(json.dumps(lists, indent=1) + "\n", encoding="utf-8")


def time_first_calls(arguments: argparse.Namespace) -> None:
    """Time the first calls on a GPU, and write the JSON after each case."""
    records = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as caches:
            first, again = (in_new_process(case, caches) for _ in range(2))
        count = sum(map(len, first["kernels"].values()))
        more = {"instantiations": count, "compiling": first["compiling"]}
        known = "with" if case[3] else "without"
        name = f"{first['case']}, {known} coordinates"
        entry = record(f"compilation/{name}", [first["seconds"]], floor=again["seconds"], nbytes=0, peers={}, **more)
        records.append(printed(entry, "the first call"))
        write("compilation", arguments, {}, records)  # of what is measured so far


def main() -> None:
    """Record all cases, or time them and write the JSON."""
    parser = argument_parser(__doc__)
    parser.add_argument("--package", action="store_true", help="write the instantiations into the package")
    parser.add_argument("--packaged", type=Path, default=PACKAGED, help="or into another file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments: argparse.Namespace = parser.parse_args()
    if arguments.device == "cpu":
        main_on_cpu(arguments)
    elif arguments.package:
        record_lists(arguments.packaged)
    else:
        time_first_calls(arguments)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(run_case(*json.loads(sys.argv[2]))))
    elif sys.argv[1:2] == ["--cpu-case"]:
        print(json.dumps(run_cpu_case(*json.loads(sys.argv[2]))))
    else:
        main()
