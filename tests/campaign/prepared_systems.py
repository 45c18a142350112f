"""Cases of prepared systems: solves, blocks and updates in a random sequence; every claim is checked against the values now."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
from claims import honest

import penstock
from penstock.fem import Cantilever
from penstock.solvers import StopReason
from penstock.spmv import InputError, PenstockError
from penstock.streaming import FileStore

__all__ = ["prepared"]

Matrix = scipy.sparse.csr_array
KNOWING = ("auto", "smoothed_aggregation", "multigrid")  # those that have a use for coordinates and near-null spaces
OTHERS = (
    "auto",
    "jacobi",
    "chebyshev",
    "smoothed_aggregation",
    "multigrid",
    "block_jacobi",
    "gauss_seidel",
    "incomplete_cholesky",
)
IN_MEMORY = ("multigrid", "gauss_seidel", "incomplete_cholesky")


def prepared(seed: int, base: Path) -> str:
    """Prepare a random system, resident, streamed or from a store, and use it in a random sequence of ways."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    A, options = _system(rng, numbers)
    where = rng.choice(["memory", "memory", "streamed", "streamed", "store"])
    names = KNOWING if options else OTHERS
    options["preconditioner"] = rng.choice([name for name in names if where == "memory" or name not in IN_MEMORY])
    if where != "memory":
        options["memory"] = max(65536, 12 * A.nnz * rng.choice([1, 2, 3]) // 6)
    if where == "store":
        path = base / f"{seed}-prepared"
        FileStore.create(path, A, slab=16384).close()
    given = path if where == "store" else A
    with penstock.prepare(given, device="cpu", columns=rng.choice([1, 1, 2, 4]), **options) as system:
        use = _Use(system, A, options, rng, numbers, exact=where == "store")
        steps = [rng.choice(STEPS) for _ in range(rng.randint(4, 9))]
        for number, step in enumerate(steps):
            try:
                step(use)
            except PenstockError as error:  # what could be prepared is never refused afterwards
                names = [done.__name__ for done in steps[: number + 1]]
                raise AssertionError(f"{where}, {options}, {names}: {type(error).__name__}: {error}") from error
        return "converged" if use.converged else "not converged"


@dataclass
class _Use:
    """A prepared system, the matrix it stands for now, and how it has done."""

    system: Any
    A: Matrix
    options: dict[str, Any]
    rng: random.Random
    numbers: np.random.Generator
    exact: bool
    refresh: str = "values"
    converged: bool = True
    last: Any = field(default=None)

    def solve(self, columns: int) -> None:
        shape = (self.A.shape[0],) if columns == 1 and self.rng.random() < 0.7 else (self.A.shape[0], columns)
        b = self.numbers.standard_normal(shape) * self.rng.choice([1e-6, 1.0, 1e6])
        if columns > 1 and self.rng.random() < 0.3:
            b[:, 1] = self.rng.choice([0.0, 1.0]) * b[:, 0]
        guess = self.last if self.last is not None and self.last.shape == b.shape and self.rng.random() < 0.5 else None
        rtol, maxiter = self.rng.choice([1e-4, 1e-8, 1e-11]), self.rng.choice([3, 20, *6 * [2000]])
        result = self.system.solve(b, guess, rtol=rtol, maxiter=maxiter, on_failure="return")
        assert result.x.shape == b.shape
        most = max(column.iterations for column in result.columns)
        assert most <= maxiter, f"{most} iterations of {maxiter}"
        if result.columns[0].reason is StopReason.MAXITER and maxiter == 2000 and self.refresh != "keep":
            b = np.ascontiguousarray(b.reshape(len(b), -1)[:, 0])
            fresh = penstock.solve(self.A, b, device="cpu", rtol=rtol, on_failure="return", **self.options)
            quick = fresh.converged and fresh.iterations < 1000
            assert not quick, f"not solved in {most} iterations, anew in {fresh.iterations}"
        self.converged &= honest(self.A, b, result, rtol) == "converged"
        self.last = result.x


def _one(use: _Use) -> None:
    use.solve(1)


def _block(use: _Use) -> None:
    use.solve(use.rng.randint(2, 6))


def _update(use: _Use) -> None:
    """Give new values, which stay the caller's, and solve."""
    new = _other_values(use.A, use.rng, use.numbers, use.exact)
    kept = new.data.copy()
    refresh = use.rng.choice(["auto", "values", "keep"])
    use.system.update(new, refresh)
    use.A, use.refresh = new, refresh
    use.solve(use.rng.choice([1, 1, 3]))
    assert np.array_equal(new.data, kept), "the caller's values were overwritten"


def _wrong_update(use: _Use) -> None:
    """Give what is no update: it is refused, and the values are still there."""
    wrong = use.A.copy()
    wrong.data = wrong.data.copy()
    how = use.rng.choice(["sign", "pattern", "symmetry", "NaN"])
    if how == "sign":
        wrong.data *= -1
    elif how == "NaN":
        wrong.data[use.rng.randrange(wrong.nnz)] = np.nan
    elif how == "symmetry":
        rows = np.repeat(np.arange(wrong.shape[0]), np.diff(wrong.indptr))
        [above] = np.nonzero((rows < wrong.indices) & (wrong.data != 0))
        if not len(above):
            return
        wrong.data[above[use.rng.randrange(len(above))]] *= 3
    else:
        wrong = Matrix(wrong + 1e-3 * scipy.sparse.eye_array(wrong.shape[0], k=wrong.shape[0] - 1))
        wrong = Matrix((wrong + wrong.T) / 2)
    try:
        use.system.update(wrong, use.rng.choice(["auto", "values", "keep"]))
    except InputError:
        use.solve(1)
    else:
        raise AssertionError(f"an update with another {how} was accepted")


def _operators(use: _Use) -> None:
    """Multiply with what the system hands out."""
    X = use.numbers.standard_normal((use.A.shape[0], use.rng.choice([1, 2, 5])))
    X = X[:, 0] if X.shape[1] == 1 else X
    bound = 1e-11 * (abs(use.A) @ np.abs(X))
    assert (np.abs(use.system.matrix @ X - use.A @ X) <= bound).all(), "the product is that of another matrix"
    M = use.system.preconditioner
    if M is not None:
        r, s = use.numbers.standard_normal((2, use.A.shape[0]))
        one, other = s @ (M @ r), r @ (M @ s)
        assert abs(one - other) <= 1e-8 * np.sqrt((r @ (M @ r)) * (s @ (M @ s))), "M is not symmetric"


STEPS: tuple[Callable[[_Use], None], ...] = (_one, _block, _update, _update, _update, _wrong_update, _operators)


def _system(rng: random.Random, numbers: np.random.Generator) -> tuple[Matrix, dict[str, Any]]:
    """Return a matrix and what is known of it: a beam, a grid in order or shuffled, or a graph."""
    kind = rng.choice(["beam", "grid", "shuffled", "graph"])
    if kind == "beam":
        beam = Cantilever(nodes=(rng.randint(3, 30), rng.randint(2, 6), rng.randint(2, 5)), dof=3)
        options = {"coordinates": beam.mesh.coordinates()} if rng.random() < 0.5 else {}
        return Matrix(beam.matrix("csr").to_csr()), options
    if kind == "graph":
        n = rng.randint(2, 2000)
        T = scipy.sparse.random_array((n, n), density=min(1.0, rng.choice([2, 5]) / n), rng=numbers, format="csr")
        A = T + T.T
    else:
        lines = [scipy.sparse.eye_array(n, k=1) for n in (rng.randint(2, 300), rng.randint(2, 30))]
        A = scipy.sparse.csr_array(scipy.sparse.kronsum(*lines))
        A = A + A.T
        if kind == "shuffled":
            order = numbers.permutation(A.shape[0])
            A = A[order][:, order]
    A = Matrix(A + scipy.sparse.eye_array(A.shape[0]))
    A.sort_indices()
    options = {"near_null_space": np.ones((A.shape[0], 1))} if rng.random() < 0.3 else {}
    return _dominant(A, rng, numbers), options


def _other_values(A: Matrix, rng: random.Random, numbers: np.random.Generator, exact: bool) -> Matrix:
    """Return a matrix of the same pattern: the same, in another unit, scaled from both sides, or with values of its own."""
    how = rng.choice(["same", "unit", "scaled", "scaled", "own"])
    if how == "own":
        return _dominant(A, rng, numbers)
    new = A.copy()
    if how == "unit":
        new.data = new.data * 2.0 ** rng.randint(-40, 40)
    elif how == "scaled":
        scales = np.exp2(np.round(rng.choice([0.1, 1, 4]) * numbers.standard_normal(A.shape[0])))  # exact, so symmetric
        rows = np.repeat(np.arange(A.shape[0]), np.diff(A.indptr))
        new.data = new.data * (scales[rows] * scales[A.indices])
    if not exact and rng.random() < 0.2:
        new.data = new.data * (1 + 1e-15 * numbers.uniform(-1, 1, A.nnz))
    return new


def _dominant(A: Matrix, rng: random.Random, numbers: np.random.Generator) -> Matrix:
    """Return random values, some of them stored zeros, in the pattern of A, with a diagonal that dominates."""
    rows = np.repeat(np.arange(A.shape[0]), np.diff(A.indptr))
    low, high = np.minimum(rows, A.indices), np.maximum(rows, A.indices)
    _, entry = np.unique(low.astype(np.int64) * A.shape[0] + high, return_inverse=True)
    strength = np.exp(rng.choice([0, 1, 3]) * numbers.standard_normal(entry.max() + 1))
    strength *= numbers.random(len(strength)) > rng.choice([0.0, 0.0, 0.3])
    signs = -1.0 if rng.random() < 0.6 else numbers.choice([-1.0, 1.0], len(strength))
    values = (signs * strength)[entry]
    diagonal = rows == A.indices
    values[diagonal] = 0.0
    sums = np.bincount(rows, np.abs(values), A.shape[0])
    values[diagonal] = sums + rng.choice([1e-4, 1e-2, 1.0]) * (sums + 1.0)
    return Matrix((values, A.indices, A.indptr), shape=A.shape)
