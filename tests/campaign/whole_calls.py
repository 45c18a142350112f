"""Cases that call :func:`penstock.solve`: matrices symmetric to rounding, badly scaled, singular, and memory near a threshold."""

import contextlib
import random
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import scipy.sparse
import scipy.sparse.csgraph
import scipy.spatial
from claims import honest

from penstock import NotConvergedWarning, solve
from penstock.driver.inputs import GivenVectors, as_given_matrix
from penstock.driver.opening import open_system
from penstock.driver.request import Request
from penstock.fem import Cantilever
from penstock.solvers.amg.modes import rigid_body_modes
from penstock.spmv import CPU, PenstockError

NAMES = ("auto", "jacobi", "chebyshev", "smoothed_aggregation", "multigrid", "incomplete_cholesky")
STREAMED_NAMES = NAMES[:4]
FORMATS = ("csr", "bsr", "ell", "sell", "hyb", "sliced_bsr", "sliced_ell", "symmetric_bsr", "coo")
warnings.simplefilter("ignore", NotConvergedWarning)


def _grid(rng: random.Random, most: int) -> scipy.sparse.csr_array:
    lines = [_line(rng.randint(4, most)) for _ in range(2)]
    return scipy.sparse.csr_array(scipy.sparse.kronsum(*lines))


def _line(n: int) -> scipy.sparse.csr_array:
    return scipy.sparse.csr_array(scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n)))


def _size(A: scipy.sparse.csr_array) -> int:
    return 12 * A.nnz + 4 * A.shape[0]


def nearly_symmetric(seed: int, base: Path) -> str:
    """Solve with a matrix that is symmetric to rounding only, resident or streamed: claims are about it."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    if rng.random() < 0.3:
        A = Cantilever(nodes=(rng.randint(5, 20), 4, 4), dof=3).matrix("csr").to_csr()
    else:
        A = _line(rng.randint(200, 8000)) if rng.random() < 0.5 else _grid(rng, 40)
    A = scipy.sparse.csr_array(A)
    A.data = A.data * (1 + rng.choice([1e-16, 1e-15, 1e-14, 1e-13, 4e-13]) * numbers.uniform(-1, 1, A.nnz))
    columns, n = rng.choice([1, 1, 3]), A.shape[0]
    B = numbers.standard_normal((n, columns)) if rng.random() < 0.7 else np.ones((n, columns))
    B = B[:, 0] if columns == 1 else B
    memory = rng.choice([None, _size(A) // 2, _size(A) // 3])
    rtol = rng.choice([1e-6, 1e-8, 1e-10])
    name = rng.choice(STREAMED_NAMES if memory else NAMES[:3])
    request = Request(CPU, columns, memory, name, format=rng.choice(FORMATS))
    with contextlib.ExitStack() as stack:
        try:
            system = stack.enter_context(open_system(as_given_matrix(A), request))
        except PenstockError:  # the format does not suit it, or the memory is too small for that
            system = stack.enter_context(open_system(as_given_matrix(A), replace(request, format=None)))
        return honest(A, B, system.solve(GivenVectors.of(B, "b"), rtol=rtol, maxiter=20_000), rtol)


def scaled(seed: int, base: Path) -> str:
    """Solve with rows and columns scaled over up to 300 decades: any outcome, no false claim, a finite x."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    decades = rng.choice([10, 16, 24, 60, 150, 300])
    L = _line(rng.randint(3, 60))
    D = scipy.sparse.diags_array(10.0 ** numbers.uniform(-decades / 2, decades / 2, L.shape[0]))
    A = scipy.sparse.csr_array(D @ L @ D)
    A = scipy.sparse.csr_array(scipy.sparse.triu(A) + scipy.sparse.triu(A, 1).T)
    b = numbers.standard_normal(L.shape[0]) * 10.0 ** rng.choice([-150, -20, 0, 20, 100])
    result = solve(A, b, device="cpu", preconditioner=rng.choice(NAMES), maxiter=500)
    assert np.isfinite(result.x).all()
    return honest(A, b, result, 1e-8)


def singular(seed: int, base: Path) -> str:
    """Solve a graph's Laplacian or a free body, with a right-hand side that fits or not, and with its null space given."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    options = {}
    if rng.random() < 0.3:
        A, X = _free_body(rng, numbers)
        N = rigid_body_modes(X, 3)
        options = {"coordinates": X} if rng.random() < 0.5 else {"near_null_space": N}
    else:
        W = abs(_grid(rng, 30))
        W.setdiag(0)
        W.eliminate_zeros()
        A = scipy.sparse.csr_array(scipy.sparse.csgraph.laplacian(scipy.sparse.csr_matrix(W)))
        N = np.ones((A.shape[0], 1))
    b = numbers.standard_normal(A.shape[0])
    Q = np.linalg.qr(N)[0]
    how = rng.choice(["fits", "does not fit", "given"])
    if how == "fits":
        b = b - Q @ (Q.T @ b)
    elif how == "given":
        options["null_space"] = N
    name = rng.choice(("auto", "jacobi", "smoothed_aggregation", "multigrid")) if not options else "auto"
    memory = rng.choice([None, None, _size(A) // 2])
    if name == "multigrid":
        memory = None
    result = solve(A, b, device="cpu", preconditioner=name, memory=memory, maxiter=3000, **options)
    assert np.abs(result.x).max() <= 1e12 * np.abs(b).max(), f"x of {np.abs(result.x).max():.1g}, {result.message}"
    assert result.true_residual <= 1.0 + 1e-9, result.message
    if how == "does not fit":
        assert not result.converged
        assert result.reason.name == "INCONSISTENT", result.message
        return "inconsistent"
    target = b if how == "fits" else b - Q @ (Q.T @ b)
    assert result.converged, result.message
    if how == "given":
        assert np.abs(Q.T @ result.x).max() <= 1e-8 * max(1.0, np.abs(result.x).max())
    return honest(A, target, result, 1e-8)


def _free_body(rng: random.Random, numbers: np.random.Generator) -> tuple[scipy.sparse.csr_array, np.ndarray]:
    """Return springs between the points of a shaken lattice, which nothing holds, and the coordinates of the points."""
    counts = (rng.randint(3, 8), 3, 3)
    X = np.stack(np.meshgrid(*map(np.arange, counts), indexing="ij"), axis=-1).reshape(-1, 3).astype(float)
    pairs = np.array(list(scipy.spatial.cKDTree(X).query_pairs(1.8)))
    X += 0.1 * numbers.uniform(-1, 1, X.shape)
    direction = X[pairs[:, 1]] - X[pairs[:, 0]]
    direction /= np.linalg.norm(direction, axis=1)[:, None]
    springs = numbers.uniform(0.5, 2.0, len(pairs))[:, None, None] * direction[:, :, None] * direction[:, None, :]
    K = np.zeros((len(X), 3, len(X), 3))
    for (i, j), k in zip(pairs, springs, strict=True):
        K[i, :, i] += k
        K[j, :, j] += k
        K[i, :, j] -= k
        K[j, :, i] -= k
    return scipy.sparse.csr_array(K.reshape(3 * len(X), -1)), X


def thresholds(seed: int, base: Path) -> str:
    """Solve with a memory within 64 KiB of the size of the matrix, or of its half: every budget is a solve or one error."""
    rng = random.Random(seed)
    A = _grid(rng, 60)
    near = rng.choice([_size(A), _size(A) // 2, 8 * A.nnz, 12 * A.nnz])
    memory = max(1, near + rng.randint(-65536, 65536))
    result = solve(A, np.ones(A.shape[0]), device="cpu", memory=memory, preconditioner=rng.choice(STREAMED_NAMES))
    return honest(A, np.ones(A.shape[0]), result, 1e-8)
