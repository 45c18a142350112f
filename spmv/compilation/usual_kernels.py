"""The instantiations of CUDA kernels that usual solves need, so that the first on a machine compiles them all at once."""

from __future__ import annotations

import functools
import json
from importlib import resources

from penstock.host.threads import usable_cores
from penstock.spmv.compilation.cuda_module import compile_together, compiled_functions, known_sources
from penstock.spmv.compilation.cupy_kernels import CUPY, LOADING
from penstock.spmv.device import Device

#: The case of what looks at a matrix before it is decided how it is used.
OPENING = "opening"

_FILE = "usual_kernels.json"
# More threads do not make NVRTC faster.
_MOST_THREADS = 16


def case_name(preconditioner: str, block_size: int, columns: int, *, streamed: bool, precision: str = "float64") -> str:
    """Return the name of what decides the instantiations of a solve, all but a few; another precision is that of an image.

    Examples
    --------
    >>> from penstock.spmv.compilation.usual_kernels import case_name
    >>> case_name("smoothed_aggregation", 3, 1, streamed=False)
    'smoothed_aggregation of 3 unknowns a node, one vector, in memory'
    """
    vectors, where = "one vector" if columns == 1 else "several vectors", "streamed" if streamed else "in memory"
    if precision != "float64":
        where = f"with an image in {precision}"
    return f"{preconditioner} of {block_size} unknowns a node, {vectors}, {where}"


@functools.cache
def usual_kernels() -> dict[str, dict[str, list[str]]]:
    """Return the instantiations by case and source file, and calls of CuPy, as ``benchmarks/compilation.py`` has recorded them.

    Files are in the order in which a solve first needs them, and so are the instantiations of each.
    """
    text = (resources.files(__package__) / _FILE).read_text(encoding="utf-8")
    kernels: dict[str, dict[str, list[str]]] = json.loads(text)
    return kernels


def begin_compilation(case: str, device: Device) -> None:
    """Begin to compile what a case needs on a GPU, in the background; nothing for a case that is not known.

    What CuPy finds in its cache on disk takes a few milliseconds each, which the solve would need for it anyway.
    """
    sources, kernels = known_sources(), usual_kernels().get(case, {})
    wanted = [
        (sources[file], expression)
        for file, expressions in kernels.items()
        if file in sources
        for expression in expressions
    ]
    calls = [*LOADING, *kernels[CUPY]] if CUPY in kernels else []
    compile_together(wanted, calls, min(usable_cores(), _MOST_THREADS), device)


def recorded() -> dict[str, list[str]]:
    """Return the instantiations that this process has compiled, by source file, in the order in which they were needed."""
    found: dict[str, list[str]] = {}
    for source, expression in compiled_functions():
        found.setdefault(str(source), []).append(expression)
    return found
