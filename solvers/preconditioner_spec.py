"""The registry of preconditioners: how each is built, and the memory that plans reserve for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from penstock.spmv import InputError, Operator
from penstock.spmv.registry import Registry


@dataclass(frozen=True)
class PreconditionerSpec:
    """The name and options of a preconditioner; each subclass is defined next to the preconditioner it builds.

    A subclass is declared as ``class JacobiSpec(PreconditionerSpec, name="jacobi")``, which registers it. Its fields are the
    options for YAML files, the command line and :func:`penstock.solve`, but for those with the metadata ``{"option": False}``.

    Parameters
    ----------
    block_size : int
        Rows of the dense blocks on the diagonal of the matrix, for example the unknowns of a node; 1 without blocks.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import PRECONDITIONERS, PreconditionerSpec
    >>> spec = PRECONDITIONERS["block_jacobi"](block_size=3)
    >>> isinstance(spec, PreconditionerSpec), spec.build(Cantilever(nodes=3, dof=3).matrix()).shape
    (True, (81, 81))
    >>> spec.workspace_nbytes(1_000_000, columns=1)
    24000000
    """

    name: ClassVar[str]
    #: Whether the preconditioner requires a matrix with dense diagonal blocks of more than one row.
    needs_blocks: ClassVar[bool] = False
    #: Whether it has a use for the near-null space of the matrix.
    uses_near_null_space: ClassVar[bool] = False
    #: Whether it needs the entries of the matrix, so that the matrix must be held in memory as a whole.
    needs_entries: ClassVar[bool] = False
    #: Whether its method needs the values of the matrix as they are, so that it must be made again whenever they change.
    follows_values: ClassVar[bool] = False
    #: Whether it works on a matrix whose rows are shared out among ranks.
    works_on_ranks: ClassVar[bool] = False
    #: Whether applying it writes a separate vector; a diagonal is applied inside other passes.
    writes_vector: ClassVar[bool] = True

    block_size: int = 1

    def __init_subclass__(cls, *, name: str, registered: bool = True, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.name = name
        if registered:
            PRECONDITIONERS.add(name, cls)

    def build(self, A: Operator) -> Operator | None:
        """Return the preconditioner of a matrix."""
        raise InputError(f"{type(self).__name__} must define build() for the preconditioner {self.name}")

    def rebuild(self, M: Operator | None, A: Operator) -> Operator | None:
        """Return the preconditioner of a matrix whose values have changed, from that of the old values.

        A subclass reuses what depends on the pattern only; here nothing is reused.
        """
        return self.build(A)

    @property
    def formats(self) -> tuple[str, ...]:
        """Names of the storage formats of which it uses the arrays as they are; none if it does not need the entries."""
        return ()

    def vectors(self, columns: int, *, streamed_to_gpu: bool) -> int:
        """Return the number of vectors the preconditioner stores when ``columns`` right-hand sides are solved together."""
        return 0

    #: How often an iteration reads what every rank holds alike.
    replicated_reads: ClassVar[int] = 0

    def replicated_nbytes(self, n: int) -> int:
        """Return the bytes that every rank holds for a system of n unknowns, however many share it."""
        return 0

    def products_per_iteration(self, *, streamed: bool) -> tuple[int, ...]:
        """Return the numbers of consecutive products per iteration from which a plan may choose."""
        return (1,)

    def iterations(self, products: int) -> float | None:
        """Return the expected iterations of a solve with this number of products each, if they depend on nothing else."""
        return None

    def with_products(self, products: int) -> Self:
        """Return this specification with the products an iteration that a plan has chosen."""
        return self

    @property
    def description(self) -> str:
        """What is built, in words: the name, and the degree of a polynomial."""
        return self.name

    def with_nodes(self, coordinates: Any, node_counts: tuple[int, ...]) -> Self:
        """Return this specification for a structured mesh: its coordinates, or what makes them, and the nodes along each axis."""
        return self

    def in_order(self, reorder: Callable[[Any], Any]) -> Self:
        """Return this specification for a matrix whose unknowns are in another order; ``reorder`` maps vectors to it."""
        return self

    def with_block_size(self, size: int) -> Self:
        """Return this specification for dense blocks of this size."""
        return replace(self, block_size=size)

    def parts(
        self, n: int, columns: int, dtype: Any = np.float64, *, streamed_to_gpu: bool = False
    ) -> tuple[tuple[str, int], ...]:
        """Return names and bytes of what the workspace holds besides vectors, for the report of a plan."""
        return ()

    def workspace_nbytes(self, n: int, columns: int, dtype: Any = np.float64, *, streamed_to_gpu: bool = False) -> int:
        """Return the bytes that the preconditioner needs besides the matrix and the solver's vectors."""
        return self.vectors(columns, streamed_to_gpu=streamed_to_gpu) * n * int(np.dtype(dtype).itemsize)


#: All preconditioners by name; packages add theirs in the entry point group ``penstock.preconditioners``.
PRECONDITIONERS: Registry[str, type[PreconditionerSpec]] = Registry("preconditioner", "penstock.preconditioners")


def preconditioner_spec(name: str, **options: Any) -> PreconditionerSpec:
    """Return the specification of a preconditioner.

    Parameters
    ----------
    name : str
        A key of :data:`PRECONDITIONERS`.
    **options
        Its options, for example ``degree=9`` for ``chebyshev``; None means the default.

    Returns
    -------
    PreconditionerSpec

    Raises
    ------
    InputError
        If there is no such preconditioner or option.

    Examples
    --------
    >>> from penstock.solvers import preconditioner_spec
    >>> preconditioner_spec("chebyshev", degree=9, block_size=3)
    ChebyshevSpec(block_size=3, degree=9)
    """
    cls = PRECONDITIONERS[name]
    known = {entry.name for entry in dataclasses.fields(cls) if entry.metadata.get("option", True)}
    changed = {option: value for option, value in options.items() if value is not None}
    if unknown := sorted(changed.keys() - known):
        raise InputError(
            f"the preconditioner {name} has no option {', '.join(unknown)}; it has {', '.join(sorted(known)) or 'none'}"
        )
    return cls(**changed)


def check_streams(spec: PreconditionerSpec) -> None:
    """Refuse a preconditioner for a matrix that is streamed, if it needs the entries.

    Parameters
    ----------
    spec : PreconditionerSpec

    Raises
    ------
    InputError
        If it does; the message says what to do.

    Examples
    --------
    >>> from penstock.solvers import check_streams, preconditioner_spec
    >>> from penstock.spmv import InputError
    >>> check_streams(preconditioner_spec("chebyshev"))
    >>> try:
    ...     check_streams(preconditioner_spec("incomplete_cholesky"))
    ... except InputError as error:
    ...     print(str(error).split(";")[0])
    the preconditioner incomplete_cholesky needs the whole matrix in memory, which has no room for it
    """
    if spec.needs_entries:
        raise InputError(
            f"the preconditioner {spec.name} needs the whole matrix in memory, which has no room for it; allow more memory, or "
            "choose chebyshev or smoothed_aggregation, which work on a streamed matrix"
        )


@dataclass(frozen=True)
class NoPreconditioner(PreconditionerSpec, name="none"):
    """Plain conjugate gradients."""

    works_on_ranks: ClassVar[bool] = True
    writes_vector: ClassVar[bool] = False

    def build(self, A: Operator) -> Operator | None:
        """Return None."""
        return None
