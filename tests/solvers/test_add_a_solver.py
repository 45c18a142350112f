"""The examples of a solver and of a preconditioner of one's own are short, right, and known by name."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.fem import Cantilever
from penstock.solvers import (
    METHODS,
    PRECONDITIONERS,
    SOLVERS,
    LinearProblem,
    Method,
    PreconditionerSpec,
    StopReason,
    cg,
    jacobi,
)
from penstock.spmv import InputError

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(request):
    """Load an example for the length of a test."""
    name, registries, entry = request.param
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    yield sys.modules[name]
    for each in registries:
        each.remove(entry)
    del sys.modules[name]


solver = pytest.mark.parametrize("example", [("add_a_solver", (SOLVERS, METHODS), "steepest_descent")], indirect=True)
preconditioner = pytest.mark.parametrize(
    "example", [("add_a_preconditioner", (PRECONDITIONERS,), "ssor")], indirect=True
)


@pytest.mark.parametrize("name", ["add_a_solver", "add_a_preconditioner"])
def test_they_have_at_most_60_lines(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 60


class TestSolver:
    @solver
    def test_it_solves_and_says_the_true_residual(self, example, A, b):
        result = example.steepest_descent(A, b, M=jacobi(A), rtol=1e-4, maxiter=100_000)

        residual = np.linalg.norm(b - A @ result.x) / np.linalg.norm(b)
        assert result.converged
        assert result.true_residual == pytest.approx(residual, rel=1e-9)
        tested = 2  # whether A is symmetric, once, because it takes so many iterations
        assert result.sweeps == result.iterations + 2 + tested
        assert len(result.residual_norms) == result.iterations + 1

    @solver
    def test_it_ends_as_others_do(self, example, A, b):
        result = example.steepest_descent(A, b, M=jacobi(A), rtol=1e-12, maxiter=7)

        assert (result.reason, result.iterations) == (StopReason.MAXITER, 7)
        with pytest.raises(InputError, match="square matrix"):
            example.steepest_descent(A.rows(0, 6), b[:6])

    @solver
    def test_a_method_for_matrices_that_are_not_symmetric_names_no_check_of_symmetry(self, example):
        n = 60
        line = np.diag(np.full(n, 2.0)) - np.diag(np.full(n - 1, 1.3), 1) - np.diag(np.full(n - 1, 0.6), -1)
        kept = SOLVERS.keys()

        class Richardson(example.SteepestDescent, name="richardson"):
            checks = ()

            def advance(self, state, iterations):
                state.x += 0.02 * state.r
                self.problem.true_residual(state.x, state.r)
                state.iteration += 1
                norm = self.problem.space.norm(state.r)
                state.residual_norms.append(self.problem.relative(norm))
                return StopReason.STAGNATED if norm <= self.problem.tolerances[0] else None

        class Checked(Richardson, name="checked"):
            checks = example.SteepestDescent.checks

        try:
            reasons = []
            for method in (Richardson, Checked):
                made = method(LinearProblem(line, np.ones(n), rtol=1e-6, atol=0.0))
                made.run(made.start(None), maxiter=50_000)
                reasons += made.columns.reasons
        finally:
            for name in set(SOLVERS.keys()) - set(kept):
                SOLVERS.remove(name)
        assert reasons == [StopReason.CONVERGED, StopReason.NOT_SYMMETRIC]

    @solver
    def test_it_is_known_by_name_and_refused_twice(self, example):
        assert SOLVERS["steepest_descent"] is example.SteepestDescent
        with pytest.raises(InputError, match="a solver 'cg' exists already"):

            class Another(Method, name="cg"):
                pass


class TestPreconditioner:
    @preconditioner
    def test_it_is_symmetric_positive_definite_and_saves_iterations(self, example, A, b):
        M = example.Ssor(A.to_csr(), 1.5)
        dense = M @ np.eye(A.shape[0])

        np.testing.assert_allclose(dense, dense.T, rtol=0, atol=1e-10 * abs(dense).max())
        assert np.linalg.eigvalsh((dense + dense.T) / 2).min() > 0
        ours, plain = (cg(A, b, M=preconditioner, rtol=1e-8) for preconditioner in (M, jacobi(A)))
        assert ours.converged
        assert ours.iterations < 0.8 * plain.iterations

    @preconditioner
    def test_it_is_chosen_by_name(self, example):
        beam = Cantilever(nodes=(9, 4, 4), dof=3)

        result = penstock.solve(beam.matrix().to_csr(), beam.load(), preconditioner="ssor", device="cpu")

        assert result.converged
        assert "preconditioner ssor" in result.explain()

    def test_a_name_that_is_taken_is_refused(self):
        with pytest.raises(InputError, match="a preconditioner 'jacobi' exists already"):

            class Another(PreconditionerSpec, name="jacobi"):
                pass
