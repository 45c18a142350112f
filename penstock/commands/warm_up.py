"""The command that compiles the usual kernels of a machine ahead of its first solve."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Annotated, Any

import typer

from penstock.commands.command import command
from penstock.commands.terminal import Quiet, Verbose, noting_interrupts, open_terminal
from penstock.host.threads import usable_cores

Task = Callable[[], None]

_DOFS = (3, 1, 6)
_NODES = 12
# Most processes at once: each has a context on a GPU, and Windows cannot wait for more than 61.
_MOST = {"cpu": 61, "cuda": 4}
_FORMATS = ("symmetric_bsr", "bsr", "sliced_bsr")
_HOW = (("smoothed_aggregation", True), ("chebyshev", True), ("auto", False), ("jacobi", False))


@command(
    "penstock warm-up",
    "penstock warm-up --device cuda",
)
def warm_up(
    device: Annotated[
        str, typer.Option(help="cpu, cuda or cuda:1; for a GPU its kernels and those of the host.")
    ] = "cpu",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Compile the kernels that most solves need, so that the first one on this machine need not wait for them."""
    from penstock.spmv import Device

    kind = Device.parse(device).kind
    console, reporter = open_terminal(quiet, verbose)

    def compiled() -> None:
        with reporter.stage("compile") as stage:
            tasks = usual_tasks(device)
            for done in _run(tasks, min(usable_cores(), _MOST[kind])):
                stage.advance(done / len(tasks), f"{done} of {len(tasks)} small solves and products")

    noting_interrupts(compiled)
    if not quiet:
        console.print("The usual kernels are compiled and cached on this machine.")


def _run(tasks: list[Task], count: int) -> Iterator[int]:
    """Run tasks in ``count`` processes, and yield how many have ended; after an error or an interrupt end those processes."""
    from penstock.spmv import PenstockError

    yield 0
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), initializer=_leave_interrupts) as processes:
        try:
            for done, future in enumerate(as_completed([processes.submit(task) for task in tasks]), start=1):
                future.result()
                yield done
        except BrokenProcessPool as error:
            raise PenstockError("a process that compiled kernels was killed; is there enough memory?") from error
        finally:
            processes.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():  # a solve that has begun may take long to end
                process.terminate()


def _leave_interrupts() -> None:
    """Ignore Ctrl-C in these processes: the command ends them, without a message from each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def usual_tasks(device: str) -> list[Task]:
    """Return calls of kernels on small data, the longest ones first; several processes may share them."""
    from penstock.driver import kernel_calls as calls

    tasks: list[Task] = [partial(solve_small, device, *how) for how in itertools.product(_DOFS, (1, 4), _HOW)]
    for dof in _DOFS:
        tasks += [
            partial(of, dof) for of in (calls.aggregate, calls.multiply_coarse, calls.multiply_blocks, calls.polynomial)
        ]
        tasks += [partial(of, name, dof) for name in _FORMATS for of in (calls.multiply, calls.assemble)]
        tasks += [partial(calls.iterate, dof, name) for name in ("block_jacobi", "chebyshev")]
    return [*tasks, calls.invert, calls.list_fonts]


def solve_small(device: str, dof: int, columns: int, how: tuple[str, bool]) -> None:
    """Solve a small system as a script does, for some right-hand sides, with a preconditioner and streamed or not."""
    import numpy as np

    from penstock import solve
    from penstock.fem import Cantilever

    beam, (preconditioner, streamed) = Cantilever(nodes=_NODES, dof=dof), how
    A = beam.matrix("csr").to_csr()
    b = np.ones((A.shape[0], columns) if columns > 1 else A.shape[0])
    modes = beam.rigid_body_modes() if preconditioner == "smoothed_aggregation" else None
    memory = 6 * A.nnz if streamed else None  # half of it
    options: dict[str, Any] = {"memory": memory, "preconditioner": preconditioner, "near_null_space": modes}
    solve(A, b, device=device, maxiter=50, on_failure="return", **options)
