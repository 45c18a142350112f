"""Small systems are factorised by LAPACK: the same claims as iterations, and whatever they cannot take is left to these."""

import os
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from labelled import Series

import penstock
from penstock.driver import direct
from penstock.fem import Cantilever
from penstock.spmv import BsrMatrix, CsrMatrix, InputError
from penstock.spmv.compilation.watch import compile_seconds
from penstock.streaming import FileStore

BEAM = Cantilever(nodes=(9, 4, 4), dof=3)


@pytest.fixture(scope="module")
def A():
    return scipy.sparse.csr_array(BEAM.matrix().to_csr())


@pytest.fixture(scope="module")
def b():
    return BEAM.load()


def solve(A, b, **options):
    return penstock.solve(A, b, device="cpu", **options)


def is_direct(result):
    return "LAPACK" in result.explain()


def residuals(A, b, x):
    """Return ``||b - A x|| / ||b||`` of each column in extended precision; of A as it is, entry by entry."""
    entries = scipy.sparse.coo_array(A)
    x, b = (np.asarray(of, dtype=np.longdouble).reshape(len(of), -1) for of in (x, b))
    left = b.copy()
    np.subtract.at(left, entries.coords[0], entries.data.astype(np.longdouble)[:, None] * x[entries.coords[1]])
    return np.sqrt((left**2).sum(axis=0)) / np.sqrt((b**2).sum(axis=0))


def path(weights, ends=0.0):
    """Return the Laplacian of a path, with something on its ends."""
    n = len(weights) + 1
    diagonal = np.zeros(n)
    diagonal[:-1] += weights
    diagonal[1:] += weights
    diagonal[[0, -1]] += ends
    return scipy.sparse.diags_array([-weights, diagonal, -weights], offsets=[-1, 0, 1], shape=(n, n)).tocsr()


FORMS = {
    "csr array": lambda A: A,
    "csr matrix": scipy.sparse.csr_matrix,
    "wide indices": lambda A: _with_wide_indices(A),
    "coo with duplicates": lambda A: scipy.sparse.coo_array(
        (np.concatenate([A.tocoo().data / 2] * 2), tuple(np.concatenate([c] * 2) for c in A.tocoo().coords)), A.shape
    ),
    "csr with duplicates": lambda A: scipy.sparse.csr_array(
        (np.repeat(A.data / 2, 2), np.repeat(A.indices, 2), 2 * A.indptr), A.shape
    ),
    "unsorted csr": lambda A: A[::-1][::-1][:, ::-1][:, ::-1],
    "longer arrays": lambda A: scipy.sparse.csr_array(
        (np.append(A.data, np.nan), np.append(A.indices, 10**6), A.indptr), A.shape
    ),
    "csc": lambda A: A.tocsc(),
    "bsr": lambda A: A.tobsr((3, 3)),
    "lil": lambda A: A.tolil(),
    "dia": lambda A: A.todia(),
    "float32": lambda A: A.astype(np.float32),
    "penstock csr": CsrMatrix.from_csr,
}


def _with_wide_indices(A):
    A = A.copy()
    A.indices, A.indptr = A.indices.astype(np.int64), A.indptr.astype(np.int64)
    return A


class TestAnswers:
    @pytest.mark.parametrize("form", FORMS)
    def test_a_matrix_in_any_form_of_entries(self, form, A, b):
        given = FORMS[form](A)
        result = solve(given, b)

        assert is_direct(result)
        assert result.converged
        entries = A.astype(np.float32).astype(np.float64) if form == "float32" else A
        np.testing.assert_allclose(result.x, np.linalg.solve(entries.toarray(), b), rtol=1e-9)
        assert max(residuals(entries, b, result.x)) <= 1e-8

    def test_the_callers_arrays_stay_as_they_are(self, A, b):
        for form in ("csr array", "csr with duplicates", "unsorted csr"):
            given, right = FORMS[form](A), b.copy()
            before = [of.copy() for of in (given.data, given.indices, given.indptr)]
            solve(given, right)
            for now, of in zip((given.data, given.indices, given.indptr), before, strict=True):
                np.testing.assert_array_equal(now, of)
            np.testing.assert_array_equal(right, b)

    def test_columns_each_meet_their_own_tolerance(self, A, b):
        rng = np.random.default_rng(1)
        B = np.stack([b, 1e-30 * rng.standard_normal(len(b)), np.zeros(len(b)), 1e30 * rng.standard_normal(len(b))], 1)
        result = solve(A, B)

        assert is_direct(result)
        assert [column.iterations for column in result.columns] == [1, 1, 0, 1]
        assert not result.x[:, 2].any()
        assert result.columns[2].residual_norms == [0.0]
        assert max(residuals(A, B[:, [0, 1, 3]], result.x[:, [0, 1, 3]])) <= 1e-8
        for number, column in enumerate(result.columns):
            np.testing.assert_array_equal(column.x, result.x[:, number])
            assert column.true_residual == column.residual_norms[-1]
            assert len(column.residual_norms) == column.iterations + 1

    def test_zero_and_what_is_within_the_tolerance_take_no_iteration(self, A, b):
        for result in (solve(A, np.zeros(len(b))), solve(A, b, atol=3 * np.linalg.norm(b)), solve(A, b, rtol=2.0)):
            assert (result.converged, result.iterations, result.sweeps) == (True, 0, 0)
            assert not result.x.any()

    def test_a_residual_above_the_tolerance_is_refined(self, A, b, monkeypatch):
        of = direct._Factor.solve
        monkeypatch.setattr(direct._Factor, "solve", lambda self, right: 0.99 * of(self, right))
        result = solve(A, b)

        assert is_direct(result)
        assert result.iterations == result.sweeps == len(result.residual_norms) - 1 == 5
        np.testing.assert_allclose(result.residual_norms, 0.01 ** np.arange(6), rtol=1e-2)
        assert max(residuals(A, b, result.x)) <= 1e-8

    @pytest.mark.parametrize("shape", [lambda n: (n,), lambda n: (n, 1), lambda n: (n, 3)])
    def test_the_solution_has_the_shape_of_the_right_hand_side(self, shape, A, b):
        given = np.resize(b, shape(len(b)))
        result = solve(A, given)
        assert is_direct(result)
        assert result.x.shape == given.shape

    def test_pandas_is_given_back(self, A, b):
        result = solve(A, Series(b, index="labels"))
        assert is_direct(result)
        assert type(result.x) is Series
        assert result.x.index == "labels"
        np.testing.assert_array_equal(result.x.values, solve(A, b).x)

    def test_torch_is_given_back(self, A, b):
        torch = pytest.importorskip("torch")
        arrays = (torch.from_numpy(A.indptr), torch.from_numpy(A.indices), torch.from_numpy(A.data))
        result = solve(torch.sparse_csr_tensor(*arrays, size=A.shape), torch.from_numpy(b))
        assert is_direct(result)
        assert isinstance(result.x, torch.Tensor)
        assert max(residuals(A, b, result.x.numpy())) <= 1e-8

    def test_rows_are_put_into_an_order_with_a_narrow_band(self):
        plain = path(np.ones(999), ends=1.0)
        shuffled = np.random.default_rng(0).permutation(1000)
        results = [solve(A, np.ones(1000)) for A in (plain, plain[shuffled][:, shuffled])]
        assert "bandwidth 1 in the given order" in results[0].explain()
        assert "bandwidth 1 in the order of reverse Cuthill-McKee" in results[1].explain()
        np.testing.assert_allclose(results[1].x, results[0].x[shuffled], rtol=1e-9)

    def test_bits_do_not_depend_on_the_run(self, A, b):
        np.testing.assert_array_equal(solve(A, b).x, solve(A, b).x)

    def test_symmetry_to_rounding_is_told(self, A, b):
        other = A.copy()
        other.data[np.abs(other.data).argsort()[-A.shape[0] - 1]] *= 1 + 4e-16  # beside the diagonal
        result = solve(other, b)
        assert is_direct(result)
        assert "symmetry    to rounding: mirror images differ by up to" in result.explain()
        assert "symmetry    exact" in solve(A, b).explain()


class TestReports:
    def test_explain_says_why(self, A, b):
        lines = dict(line.split(maxsplit=1) for line in solve(A, b).explain().splitlines())
        assert {"matrix", "memory", "symmetry", "solver", "choice", "device", "time", "of", "outcome"} <= lines.keys()
        assert "no kernel has to be compiled" in lines["choice"]

    def test_the_parts_of_a_call_add_up_to_its_time(self):
        n = 2000
        A = scipy.sparse.csr_array(np.ones((n, n)) + n * np.eye(n))
        solve(A, np.ones(n))
        began = time.perf_counter()
        result = solve(A, np.ones(n))
        seconds = time.perf_counter() - began

        parts = {name: of for name, of in result.timings.items() if name != "total"}
        assert {"reading", "looking", "setting up", "iterating", "compiling", "rest"} == parts.keys()
        assert 0.95 * seconds <= sum(parts.values()) <= seconds
        assert parts["compiling"] == 0.0
        assert 0 < result.timings["total"] <= seconds

    def test_progress_is_shown(self, A, b, capsys):
        assert is_direct(solve(A, b, progress=True))
        assert "solve" in capsys.readouterr().err


def both_ways(A, b, monkeypatch, **options):
    """Return what a call returns, warns of or raises, as it is and where small systems are iterated too."""
    outcomes = []
    for most in (direct.LARGEST_ROWS, 0):
        monkeypatch.setattr(direct, "LARGEST_ROWS", most)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                result = solve(A, b, **options)
                outcome = (
                    result.iterations,
                    [column.message for column in result.columns],
                    np.asarray(result.x).tolist(),
                )
            except penstock.PenstockError as error:
                outcome = (type(error), str(error))
        outcomes.append((outcome, [str(one.message) for one in warned]))
    return outcomes


def changed(A, row, column, value):
    A = A.tolil()
    A[row, column] = value
    return A.tocsr()


def damaged(A, name, place, value):
    A = A.copy()
    getattr(A, name)[place] = value
    return A


#: Systems that are refused or fail.
REFUSED = {
    "not symmetric": lambda A, b: (changed(A, 3, 4, 7.0), b),
    "a little more than rounding": lambda A, b: (A + scipy.sparse.csr_array(([1e-9], ([3], [4])), A.shape), b),
    "one triangle": lambda A, b: (scipy.sparse.triu(A).tocsr(), b),
    "negative": lambda A, b: (-A, -b),
    "zero on the diagonal": lambda A, b: (changed(A, 5, 5, 0.0), b),
    "indefinite": lambda A, b: (A - 0.5 * A.diagonal().max() * scipy.sparse.eye_array(len(b)), b),
    "entry not finite": lambda A, b: (damaged(A, "data", 7, np.nan), b),
    "column out of range": lambda A, b: (damaged(A, "indices", 7, 10**6), b),
    "negative column": lambda A, b: (damaged(A, "indices", 7, -1), b),
    "offsets descend": lambda A, b: (damaged(A, "indptr", 7, 10**6), b),
    "complex": lambda A, b: (A * 1j, b),
    "not square": lambda A, b: (A[:, :-1], b),
    "no rows": lambda A, b: (scipy.sparse.csr_array((0, 0)), np.empty(0)),
    "b not finite": lambda A, b: (A, damaged_vector(b)),
    "b too short": lambda A, b: (A, b[:-1]),
    "singular, without a solution": lambda A, b: (path(np.ones(99)), np.ones(100)),
    "singular with weights, without a solution": lambda A, b: (path(np.linspace(0.1, 3.3, 99)), np.arange(100.0)),
    "singular, with a solution": lambda A, b: (path(np.linspace(0.1, 3.3, 99)), np.linspace(-1.0, 1.0, 100)),
}
#: Arguments with which a caller decides something.
DECIDED = {
    "maxiter": {"maxiter": 5},
    "preconditioner": {"preconditioner": "jacobi"},
    "block_size": {"block_size": 3},
    "method": {"method": "cg"},
    "minres": {"method": "minres"},
    "memory": {"memory": "1 GiB"},
    "monitor": {"monitor": lambda record: record.iteration == 3},
    "x0": {"x0": np.ones(BEAM.unknowns)},
    "coordinates of other nodes": {"coordinates": BEAM.mesh.coordinates()[1:]},
    "coordinates in one dimension": {"coordinates": BEAM.mesh.coordinates()[:, :1]},
    "coordinates that are not finite": {"coordinates": np.full_like(BEAM.mesh.coordinates(), np.nan)},
    "unknown motions": {"coordinates": BEAM.mesh.coordinates()[:108]},  # of four unknowns a node
    "a longer near-null space": {"near_null_space": np.ones(BEAM.unknowns + 1)},
    "no tolerance": {"rtol": 0.0},
    "a negative tolerance": {"rtol": -1.0},
    "a tolerance that is no number": {"atol": "1"},
}


def damaged_vector(b):
    b = b.copy()
    b[3] = np.inf
    return b


class TestTheRestIsIterated:
    @pytest.mark.parametrize("case", REFUSED)
    def test_refusals_and_failures_are_the_same(self, case, A, b, monkeypatch):
        direct_way, iterated = both_ways(*REFUSED[case](A, b), monkeypatch)
        assert direct_way == iterated

    @pytest.mark.parametrize("case", DECIDED)
    def test_where_the_caller_decides_something(self, case, A, b, monkeypatch):
        direct_way, iterated = both_ways(A, b, monkeypatch, **DECIDED[case])
        assert direct_way == iterated

    def test_float32_is_solved_to_what_it_can_mean(self, A, b, monkeypatch):
        direct_way, iterated = both_ways(A.astype(np.float32), b.astype(np.float32), monkeypatch)
        assert direct_way == iterated

    def test_other_kinds_of_matrices(self, A, b, tmp_path):
        FileStore.create(tmp_path / "store", BEAM.subdivisions(2), shape=A.shape).close()
        others = (BsrMatrix.from_csr(A), scipy.sparse.linalg.aslinearoperator(A), A.toarray(), tmp_path / "store")
        for other in others:
            result = solve(other, b)
            assert result.converged
            assert not is_direct(result)

    def test_larger_and_wider_ones(self, monkeypatch):
        n = direct.LARGEST_ROWS
        assert is_direct(solve(path(np.ones(n - 1), ends=1.0), np.ones(n)))
        assert not is_direct(solve(path(np.ones(n), ends=1.0), np.ones(n + 1), rtol=0.5))
        full = scipy.sparse.csr_array(np.ones((50, 50)) + 50 * np.eye(50))
        assert is_direct(solve(full, np.ones(50)))
        monkeypatch.setattr(direct, "_MOST_WORK", 50 * 49**2 - 1)
        assert not is_direct(solve(full, np.ones(50)))

    def test_norms_whose_squares_are_no_numbers(self, A, b):
        for scale in (1e-200, 1e160):
            result = penstock.solve(A, scale / np.abs(b).max() * b, device="cpu", on_failure="return")
            assert not is_direct(result)

    def test_a_system_prepared_for_more_than_one_solve(self, A, b):
        with penstock.prepare(A, device="cpu") as system:
            assert not is_direct(system.solve(b))


def test_ill_conditioned_systems_never_claim_falsely():
    for size in range(2, 15):
        hilbert = scipy.sparse.csr_array(1.0 / (np.arange(size)[:, None] + np.arange(size) + 1.0))
        for rtol in (1e-6, 1e-10, 1e-14):
            try:
                result = solve(hilbert, np.arange(1.0, size + 1), rtol=rtol, on_failure="return")
            except InputError:
                continue
            if result.converged:  # as far as the products of this test's doubles can tell
                x = np.asarray(result.x)
                noise = 4e-16 * size * np.linalg.norm(abs(hilbert) @ abs(x)) / np.linalg.norm(np.arange(1.0, size + 1))
                assert max(residuals(hilbert, np.arange(1.0, size + 1), x)) <= rtol + noise


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 60),
    density=st.floats(0.0, 0.5),
    columns=st.integers(1, 4),
    spread=st.floats(0.0, 6.0),
    shift=st.floats(1e-6, 10.0),
    rtol=st.sampled_from([1e-4, 1e-8, 1e-12]),
)
def test_random_systems(seed, n, density, columns, spread, shift, rtol):
    rng = np.random.default_rng(seed)
    factor = scipy.sparse.random_array((n, n), density=density, rng=rng)
    scales = scipy.sparse.diags_array(10.0 ** rng.uniform(-spread, spread, n))
    A = scipy.sparse.csr_array(scales @ (factor @ factor.T + shift * scipy.sparse.eye_array(n)) @ scales)
    exact = rng.standard_normal((n, columns))
    B = A @ exact
    result = solve(A, B, rtol=rtol, on_failure="return")

    if is_direct(result):
        assert result.converged
        x = np.asarray(result.x).reshape(n, columns)
        noise = 4e-16 * (n + 1) * np.linalg.norm(abs(A) @ abs(x), axis=0) / np.linalg.norm(B, axis=0)
        assert (residuals(A, B, x) <= rtol + noise).all()


FIRST_SOLVE = """
from numba.core import event

compiled = []

class Heard(event.Listener):
    def on_start(self, event):
        compiled.append(event.data["dispatcher"])

    def on_end(self, event):
        pass

event.register("numba:compile", Heard())

import sys
import numpy as np
import scipy.sparse
import penstock

for n in (100, 2000):
    A = scipy.sparse.diags_array([-1.0, -1.0, 4.0, -1.0, -1.0], offsets=[-40, -1, 0, 1, 40], shape=(n, n))
    for b in (np.ones(n), np.ones((n, 3))):
        result = penstock.solve(A, b, device="cpu")
        assert result.converged and "LAPACK" in result.explain(), result.explain()
assert not compiled, compiled
"""


def test_the_first_solves_on_a_machine_compile_nothing(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kernels")}
    subprocess.run([sys.executable, "-c", FIRST_SOLVE], check=True, env=environment, timeout=120)
    assert not list(tmp_path.rglob("*.nbc"))


@pytest.mark.parametrize(
    "hints",
    [
        {},
        {"coordinates": BEAM.mesh.coordinates()},
        {"near_null_space": np.ones(BEAM.unknowns)},
        {"near_null_space": np.ones((BEAM.unknowns, 2)), "coordinates": BEAM.mesh.coordinates()},
    ],
)
def test_nothing_is_compiled_in_this_process_either(hints, A, b):
    """Nor where the nodes are known, which a factorisation does not need."""
    before = compile_seconds()
    assert is_direct(solve(A, b, **hints))
    assert compile_seconds() == before
