"""The exceptions that penstock raises.

::

    PenstockError
    ├── InputError          (ValueError)    an invalid matrix, vector, option or file
    ├── BudgetError         (MemoryError)   a request that exceeds its memory budget
    ├── StoreError          (OSError)       a matrix on disk or in host memory that cannot be read or written
    ├── DeviceError         (RuntimeError)  a requested accelerator that is not usable
    └── NotConvergedError   (ArithmeticError)  a solve that ended without meeting its tolerance, where that was to be an error

Each also derives from the matching built-in exception, so ``except ValueError`` keeps working.
"""


class PenstockError(Exception):
    """Base of all errors raised by penstock.

    Examples
    --------
    >>> from penstock.spmv import PenstockError, format_named
    >>> try:
    ...     format_named("cssr")
    ... except PenstockError as error:
    ...     print(type(error).__name__)
    InputError
    """


class InputError(PenstockError, ValueError):
    """An argument or file is invalid; the message says what was expected and what was received.

    Examples
    --------
    >>> from penstock.spmv import InputError, parse_nbytes
    >>> try:
    ...     parse_nbytes("6 gigs")
    ... except InputError as error:
    ...     print(error)
    cannot read '6 gigs' as a size; write a number of bytes or for example '512 MiB' or '2 GiB'
    """


class BudgetError(PenstockError, MemoryError):
    """A request exceeds its memory budget; the message names the smallest sufficient budget.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.spmv import BudgetError
    >>> from penstock.streaming import index_of, plan_stream
    >>> try:
    ...     plan_stream(index_of(Cantilever(nodes=32).symbolic_slabs(64)), "1 MiB")
    ... except BudgetError as error:
    ...     print(str(error).split("; ")[1])
    the smallest that does is 1990656 bytes (1.898 MiB), for 2 slots
    """


class StoreError(PenstockError, OSError):
    """A stored matrix is missing, truncated, altered or cannot be written; the message names the file and the place.

    Examples
    --------
    >>> from penstock.spmv import StoreError
    >>> from penstock.streaming import FileStore
    >>> try:
    ...     FileStore("nowhere")
    ... except StoreError as error:
    ...     print(error)
    nowhere is not a store: it has no index.json; make one with FileStore.create
    """


class DeviceError(PenstockError, RuntimeError):
    """The requested device is not usable; the message says why and how to make it so.

    Examples
    --------
    >>> from penstock.spmv import Device, DeviceError
    >>> try:
    ...     device = Device.parse("cuda:1000")
    ... except DeviceError:
    ...     device = Device("cpu")
    >>> print(device)
    cpu
    """


class NotConvergedError(PenstockError, ArithmeticError):
    """A solve ended without meeting its tolerance; the message says why, and what to do.

    Attributes
    ----------
    result : SolveResult or BlockSolveResult
        With the best iterate.

    Examples
    --------
    >>> import numpy as np, penstock, scipy.sparse
    >>> A = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(50, 50))
    >>> try:
    ...     penstock.solve(A, np.ones(50), device="cpu", maxiter=3, on_failure="raise")
    ... except penstock.NotConvergedError as error:
    ...     print(str(error).split(";")[0])
    stopped at maxiter before the residual met the tolerance
    """

    def __init__(self, message: str, result: object = None) -> None:
        super().__init__(message)
        self.result = result


class NotConvergedWarning(RuntimeWarning):
    """The default warning of :func:`penstock.solve` when a solve ends without meeting its tolerance.

    Examples
    --------
    >>> import warnings, numpy as np, penstock, scipy.sparse
    >>> A = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(50, 50))
    >>> with warnings.catch_warnings(record=True) as seen:
    ...     warnings.simplefilter("always", penstock.NotConvergedWarning)
    ...     result = penstock.solve(A, np.ones(50), device="cpu", maxiter=3)
    >>> seen[0].category.__name__, result.converged
    ('NotConvergedWarning', False)
    """


def advice_on_type(kind: str) -> str:
    """Return what is supported, and what the owner of a complex system can do; ``kind`` is that of NumPy's types."""
    if kind == "f":
        return "real numbers of up to 8 bytes are supported: give them as float64"
    if kind != "c":
        return "only real numbers are supported"
    return (
        "only real numbers are supported: (B + iC)(u + iv) = f + ig is the real system [[B, -C], [C, B]] [u, v] = [f, g] of "
        "twice the size, symmetric positive definite if B + iC is Hermitian positive definite"
    )
