"""A method of one's own: steepest descent, chosen by name, with true residuals, counters and checkpoints as all have them."""

from dataclasses import dataclass, field

import numpy as np

from penstock.fem import Cantilever
from penstock.solvers import METHODS, LinearProblem, Method, MethodChoice, SavedState, StopReason
from penstock.spmv import InputError


@dataclass
class DescentState(SavedState):
    vectors = ("x", "r")
    x: np.ndarray
    r: np.ndarray
    iteration: int = 0
    residual_norms: list = field(default_factory=list)


class SteepestDescent(Method, name="steepest_descent"):
    """``z = M r;  alpha = r.z / z.A z;  x += alpha z;  r -= alpha A z``: reads 6 n values an iteration, writes 2 n."""

    State = DescentState

    def __init__(self, problem):
        if problem.columns > 1:
            raise InputError(f"steepest_descent solves for one right-hand side, not {problem.columns}; choose cg")
        super().__init__(problem)
        self.q, self.z = np.empty_like(problem.b), np.empty_like(problem.b)

    def start(self, x0):
        x = np.zeros_like(self.problem.b) if x0 is None else x0.copy()
        r = self.problem.true_residual(x, np.empty_like(x))
        return DescentState(x, r, residual_norms=[self.problem.relative(self.problem.space.norm(r))])

    def advance(self, state, iterations):
        z = state.r if self.problem.M is None else self.problem.M.apply(state.r, self.z)
        self.problem.product(z, self.q)
        alpha = self.problem.space.dot(state.r, z) / self.problem.space.dot(z, self.q)
        state.x += alpha * z
        state.r -= alpha * self.q
        state.iteration += 1
        state.residual_norms.append(self.problem.relative(norm := self.problem.space.norm(state.r)))
        # end() tests the true residual, which may be a little larger than this one.
        return StopReason.STAGNATED if norm <= 0.5 * self.problem.tolerances[0] else None


def steepest_descent(A, b, x0=None, *, M=None, rtol=1e-5, atol=0.0, maxiter=None, monitor=None, state=None):
    problem = LinearProblem(A, b, M, rtol=rtol, atol=atol)
    method, x0 = SteepestDescent(problem), problem.guess(x0, state, "x0")
    return method.solve(x0, state, shape=problem.b.shape, maxiter=maxiter, monitor=monitor)


METHODS.add("steepest_descent", MethodChoice("steepest descent", steepest_descent, lambda n, columns, dtype: 32 * n))

if __name__ == "__main__":
    beam = Cantilever(nodes=(5, 3, 3), dof=3)
    print(steepest_descent(beam.matrix(), beam.load(), rtol=1e-4, maxiter=50_000).explain())
