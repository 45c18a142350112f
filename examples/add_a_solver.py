"""A solver of one's own: steepest descent, with the tolerances, true residuals, counters and results of all solvers."""

from dataclasses import dataclass, field

import numpy as np

from penstock.fem import Cantilever
from penstock.solvers import LinearProblem, Method, StopReason, block_jacobi


@dataclass
class DescentState:
    x: np.ndarray
    r: np.ndarray
    iteration: int = 0
    residual_norms: list = field(default_factory=list)


class SteepestDescent(Method, name="steepest_descent"):
    """``z = M r;  alpha = r.z / z.A z;  x += alpha z;  r -= alpha A z``: reads 6 n values an iteration, writes 2 n."""

    State = DescentState

    def __init__(self, problem):
        self.problem = problem
        problem.set_norms(np.array([problem.space.norm(problem.b)]))
        self.q, self.z = np.empty_like(problem.b), np.empty_like(problem.b)

    def start(self, x0):
        x = np.zeros_like(self.problem.b) if x0 is None else x0.copy()
        r = self.problem.true_residual(x, np.empty_like(x))
        return DescentState(x, r, residual_norms=[self.problem.relative(self.problem.space.norm(r))])

    def advance(self, state, iterations):
        self.problem.M.apply(state.r, self.z)
        self.problem.product(self.z, self.q)
        alpha = self.problem.space.dot(state.r, self.z) / self.problem.space.dot(self.z, self.q)
        state.x += alpha * self.z
        state.r -= alpha * self.q
        state.iteration += 1
        norm = self.problem.space.norm(state.r)
        state.residual_norms.append(self.problem.relative(norm))
        return StopReason.STAGNATED if norm <= self.problem.tolerances[0] else None  # end() tests the true residual


def steepest_descent(A, b, M, *, rtol=1e-5, maxiter=None):
    problem = LinearProblem(A, b, M, rtol=rtol, atol=0.0)
    method = SteepestDescent(problem)
    state = method.start(None)
    method.run(state, maxiter=maxiter)
    return problem.column_result(state.x, method.reason, state.residual_norms, method.residual, **problem.spent())


if __name__ == "__main__":
    beam = Cantilever(nodes=(5, 3, 3), dof=3)
    A = beam.matrix()
    print(steepest_descent(A, beam.load(), block_jacobi(A, 3), rtol=1e-6, maxiter=50_000).explain())
