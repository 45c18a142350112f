"""``penstock.eigsh``: the lowest modes of ``K x = lambda M x``, whether or not K fits the memory of the device.

>>> import penstock
>>> from penstock.fem import Cantilever
>>> beam = Cantilever(nodes=(9, 3, 3), dof=3)
>>> modes = penstock.eigsh(beam.matrix(), 3, beam.mass(), device="cpu")
>>> modes.converged, modes.frequencies.round(4).tolist()
(True, [0.042, 0.042, 0.1553])
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

import numpy as np

from penstock.driver.argument_checks import OnFailure, checked_failure, checked_options, unknowns_of_a_node
from penstock.driver.foreign import from_elsewhere, refuse_gradients
from penstock.driver.inputs import GivenMatrix, as_given_matrix
from penstock.driver.made_matrix import with_coordinates
from penstock.driver.matrix_checks import check_numbering, check_square
from penstock.driver.modes_search import ModesSearch, modes_method
from penstock.driver.open_system import OpenSystem
from penstock.driver.opening import open_system
from penstock.driver.progress import CallClock, Reporter, RichReporter, time_facts
from penstock.driver.request import Request
from penstock.driver.rough_stiffness import is_rough
from penstock.solvers import SmoothedAggregationSpec
from penstock.solvers.amg.modes import check_shape_of_modes
from penstock.solvers.eigen.modes import Monitor, block_columns, with_modes_degree
from penstock.solvers.eigen.result import Modes, ModesReason
from penstock.spmv import (
    CPU,
    CsrMatrix,
    InputError,
    NotConvergedWarning,
    parse_nbytes,
)
from penstock.spmv.formats.statistics import MatrixStatistics
from penstock.streaming.stores.whole import read_whole

# Up to this many unknowns the problem is dense; up to the second number if the block would be a large part of all vectors.
_DENSE_ROWS, _MOST_DENSE_ROWS, _LARGE_PART = 1200, 6000, 4
# Nodes of an aggregate, the first that give the coarse level enough unknowns for each vector of the block: of plates few unknowns
# represent the wanted modes badly. The smallest aggregates make an expensive coarse level, for want of others only.
_AGGREGATE_NODES, _COARSE_SHARE, _LEAST_SHARE = (125, 64, 27, 8), 60, 4
# Why there is a coarse level, in plans.
_WHY = "modes need a coarse level"
_ROUGHLY = "; stiffness jumps between nodes, so the degree is higher, and more vectors iterate"
# What errors name for matrices through which Torch or JAX differentiates.
_CALL = "eigsh(K, k, M)"


def eigsh(
    K: Any,
    k: int = 10,
    M: Any = None,
    *,
    which: str = "SM",
    tol: float = 1e-6,
    maxiter: int = 200,
    device: str = "auto",
    memory: int | str | None = None,
    preconditioner: Any = "auto",
    block_size: int | Literal["auto"] = "auto",
    near_null_space: Any = None,
    coordinates: Any = None,
    monitor: Monitor | None = None,
    progress: bool = False,
    folder: str | Path | None = None,
    on_failure: OnFailure = "warn",
) -> Modes:
    """Return the k lowest eigenvalues and eigenvectors of ``K x = lambda M x``, K symmetric and not indefinite.

    An iteration is one pass over K and M; ten modes take about 10 to 25 of them, at any size. K is streamed where it does not
    fit; M and 14 vectors for each vector of the block (those of the modes, and a third more) are in memory. Free bodies are
    recognised: their motions without energy are the first modes. At the end random vectors look for modes that were missed,
    which finds them with high probability, but proves nothing.

    Parameters
    ----------
    K : matrix
        Stiffness, of any kind that :func:`penstock.solve` takes; positive definite, or semidefinite for a free body.
    k : int
    M : None, array (n,), sparse matrix or NodeMatrix
        Mass: the identity, a diagonal, or a symmetric positive definite matrix that couples no unknowns that K does not couple.
        Unknowns without mass are refused, unless K does not couple them with others, as it does not fixed ones.
    which : {"SM", "SA"}
        For the interface of SciPy: the smallest.
    tol : float
        Converged means ``||K x - lambda M x|| <= tol lambda ||M x||`` for each mode. Eigenvalues are then accurate to about the
        square of that, relative to gaps.
    maxiter : int
        Iterations of a block at most.
    device, memory, block_size, near_null_space, coordinates, folder : optional
        As for :func:`penstock.solve`. Coordinates, or the near-null space, make the coarse level of elastic bodies: without them
        it knows no rotations and several times as many iterations are needed.
    preconditioner : "auto" or SmoothedAggregationSpec
    monitor : callable, optional
        ``monitor(record)`` after each pass, with a :class:`~penstock.solvers.ModesRecord`; ends the search if it returns True.
    progress : bool, to show progress on the terminal or in the notebook
    on_failure : {"warn", "return", "raise"}
        What happens if a mode does not converge, as for :func:`penstock.solve`.

    Returns
    -------
    Modes
        Up to 1,200 unknowns are left to LAPACK.

    Raises
    ------
    InputError
        If an argument does not fit; BudgetError or DeviceError as for :func:`penstock.solve`.

    Notes
    -----
    Block LOBPCG (Knyazev 2001; Duersch, Shao, Yang and Gu 2018) whose coarse level is treated inside the Rayleigh-Ritz step;
    the explanation "How modes are found" says how.

    Examples
    --------
    >>> import numpy as np, penstock, scipy.sparse
    >>> K = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(50, 50))
    >>> values, vectors = penstock.eigsh(K, 2, device="cpu")
    >>> np.allclose(values, 4 * np.sin(np.pi * np.arange(1, 3) / 102) ** 2), vectors.shape
    (True, (50, 2))
    """
    checked_failure(on_failure)
    _check_numbers(k, tol, maxiter, which, monitor)
    chosen = (
        preconditioner if isinstance(preconditioner, SmoothedAggregationSpec) else "auto"
    )  # others are refused below
    options = checked_options(device, chosen, block_size, folder, near_null_space, coordinates)
    clock = CallClock(RichReporter.on_terminal() if progress else Reporter())
    with clock.running():
        with clock.part("read"):
            refuse_gradients(K, "K", _CALL)
            given, M = as_given_matrix(K), _as_given_mass(M)
            check_square((given.matrix.index if given.kind == "store" else given.matrix).shape, "K")
        if given.kind == "elements":
            options = with_coordinates(given.matrix, "auto", "auto", options)
        if k > given.rows:
            raise InputError(f"k must be at most the {given.rows} unknowns, not {k}")
        search = ModesSearch(int(k), M, float(tol), int(maxiter), monitor, clock)
        if (small := _entries_of_small(given, int(k))) is not None:
            check_numbering(
                MatrixStatistics.of(CsrMatrix.from_csr(small, check=False)), options.get("coordinates"), "K"
            )
            modes = search.densely(small, _unknowns(given, block_size, options))
        else:
            request = _request(given, int(k), M, device, memory, preconditioner, block_size, options)
            with open_system(given, request, folder=folder, reporter=clock) as system:
                modes = search.iteratively(system)
    return _judged(_explained(modes, clock), on_failure)


def eigsh_of_system(
    system: OpenSystem,
    clock: CallClock,
    k: int,
    M: Any,
    *,
    which: str = "SM",
    tol: float = 1e-6,
    maxiter: int = 200,
    monitor: Monitor | None = None,
    on_failure: OnFailure = "warn",
) -> Modes:
    """Return the modes of a system that is open; parameters are those of :func:`eigsh`."""
    checked_failure(on_failure)
    _check_numbers(k, tol, maxiter, which, monitor)
    n = system.A.shape[0]
    if not _LARGE_PART * block_columns(k, "cpu") <= n:
        raise InputError(
            f"k = {k} is too large a part of {n} modes for iterations; penstock.eigsh leaves small problems to LAPACK"
        )
    search = ModesSearch(int(k), _as_given_mass(M), float(tol), int(maxiter), monitor, clock)
    with system.A.device.current():
        modes = search.iteratively(system)
    return _judged(_explained(modes, clock), on_failure)


def _as_given_mass(M: Any) -> Any:
    """Return M as something of NumPy, CuPy, SciPy or penstock."""
    refuse_gradients(M, "M", _CALL)
    return from_elsewhere(M)


def _check_numbers(k: Any, tol: Any, maxiter: Any, which: Any, monitor: Any) -> None:
    if isinstance(k, bool) or not isinstance(k, Integral) or k < 1:
        raise InputError(f"k must be a whole number of modes, 1 or more, not {k!r}")
    if isinstance(tol, bool) or not isinstance(tol, Real) or not 0 < float(tol) < 1:
        raise InputError(f"tol must be a number between 0 and 1, not {tol!r}")
    if isinstance(maxiter, bool) or not isinstance(maxiter, Integral) or maxiter < 1:
        raise InputError(f"maxiter must be a whole number, 1 or more, not {maxiter!r}")
    if not isinstance(which, str) or which not in ("SM", "SA"):
        raise InputError(f"which must be 'SM', the smallest eigenvalues, not {which!r}: others are not looked for")
    if not (monitor is None or callable(monitor)):
        raise InputError(f"monitor must be a function of a ModesRecord, not {monitor!r}")


def _entries_of_small(given: GivenMatrix, k: int) -> Any:
    """Return K in SciPy's CSR if the problem is dense for us, else None."""
    n, block = given.rows, block_columns(k, "cpu")
    dense = n <= _DENSE_ROWS or _LARGE_PART * block > n
    if not dense or given.kind in ("operator", "source"):
        return None
    if n > _MOST_DENSE_ROWS:
        raise InputError(f"k = {k} is too large a part of the {n} modes: at most {n // 6} are found by iterations")
    if given.kind == "store":
        return read_whole(given.matrix)
    if given.kind == "elements":
        return given.matrix.matrix("bsr", device="cpu").to_csr()
    return given.checked(given.matrix.to_device(CPU)).matrix.to_csr() if given.kind == "csr" else given.matrix.to_csr()


def _unknowns(given: GivenMatrix, block_size: int | Literal["auto"], options: dict[str, Any]) -> int:
    """Return the unknowns of a node as far as they are known at once; 1 if not."""
    size = unknowns_of_a_node(given.rows, block_size, options.get("coordinates"))
    if size != "auto":
        return int(size)
    return int(getattr(given.matrix, "row_granularity", 1)) if given.kind == "format" else 1


def _request(
    given: GivenMatrix,
    k: int,
    M: Any,
    device: str,
    memory: int | str | None,
    preconditioner: Any,
    block_size: int | Literal["auto"],
    options: dict[str, Any],
) -> Request:
    """Return what is asked of the opening: a coarse level, and room for M and the vectors of the block."""
    place, rough = given.find_device(device), _is_rough(given, M, _unknowns(given, block_size, options))
    columns = block_columns(k, place.kind, rough=rough)
    if (modes := options.get("near_null_space")) is not None:
        check_shape_of_modes(np.shape(modes), given.rows)
    why = "as requested"
    if isinstance(preconditioner, SmoothedAggregationSpec):
        spec = preconditioner
    elif isinstance(preconditioner, str) and preconditioner in ("auto", "smoothed_aggregation"):
        nodes = _aggregate_nodes(given, columns, block_size, options)
        spec = SmoothedAggregationSpec(aggregate_nodes=nodes, **options)
        why = f"{_WHY}{_ROUGHLY if rough else ''}"
    else:
        raise InputError(
            f"preconditioner must be 'auto' or a SmoothedAggregationSpec, as modes need a coarse level, not {preconditioner!r}"
        )
    spec = with_modes_degree(spec, rough=rough)
    if block_size == "auto" and spec.block_size != 1:
        block_size = spec.block_size
    coordinates = None if callable(spec.coordinates) else spec.coordinates
    block_size = unknowns_of_a_node(given.rows, block_size, coordinates)
    method = modes_method(_mass_nbytes(M, given.rows))
    room = None if memory is None else parse_nbytes(memory)
    return Request(place, columns, room, spec, block_size, options, given.name, method=method, why=why)


def _is_rough(given: GivenMatrix, M: Any, size: int) -> bool:
    """Return whether stiffness jumps between nodes, as far as entries of K are at hand."""
    if given.kind != "csr" or given.rows % size:
        return False
    K = given.matrix
    if K.values.ndim == 3:  # blocks as the caller has them
        K = K.to_device(CPU)
    if M is None:
        return is_rough(K, None, size)
    if np.ndim(M) != 1 and not hasattr(M, "diagonal"):
        return False
    masses = CPU.asarray(M if np.ndim(M) == 1 else M.diagonal())
    # Masses that do not fit are refused later.
    fits = masses.shape == (given.rows,) and masses.dtype.kind in "fiu"
    return fits and is_rough(K, masses, size)


def _mass_nbytes(M: Any, n: int) -> int:
    """Return the bytes of M on the device, about, before it is converted."""
    if hasattr(M, "nnz"):
        return 12 * int(M.nnz)
    return int(getattr(M, "nbytes", 8 * n))


def _aggregate_nodes(
    given: GivenMatrix, columns: int, block_size: int | Literal["auto"], options: dict[str, Any]
) -> int | Literal["auto"]:
    """Return the nodes of an aggregate with which the coarse level has unknowns enough for the block; "auto" of large systems."""
    size = _unknowns(given, block_size, options)
    points, modes = options.get("coordinates"), options.get("near_null_space")
    of_aggregate = size
    if modes is not None:
        of_aggregate = 1 if np.ndim(modes) == 1 else int(np.shape(modes)[1])
    elif points is not None and size > 1:
        of_aggregate = 6 if np.shape(points)[1] == 3 else 3
    shares = {count: given.rows // size // count * of_aggregate / columns for count in _AGGREGATE_NODES}
    *usual, smallest = _AGGREGATE_NODES
    count = next((count for count in usual if shares[count] >= _COARSE_SHARE), usual[-1])
    count = count if shares[count] >= _LEAST_SHARE else smallest
    return "auto" if count == _AGGREGATE_NODES[0] else count


def _judged(modes: Modes, on_failure: str) -> Modes:
    """Warn of modes that have not converged, or raise an error; what the caller's monitor ended is intended."""
    if modes.converged or modes.reason is ModesReason.STOPPED or on_failure == "return":
        return modes
    if on_failure == "raise":
        return modes.check()
    warnings.warn(f"the modes did not converge: {modes.message}", NotConvergedWarning, stacklevel=3)
    return modes


def _explained(modes: Modes, clock: CallClock) -> Modes:
    """Add to the modes what the call has cost."""
    cost, parts = f"found in {clock.seconds:.3g} s", clock.take()
    decisions = "\n".join([modes.decisions, *time_facts(cost, parts)])
    return replace(modes, decisions=decisions, timings={**modes.timings, **parts})
