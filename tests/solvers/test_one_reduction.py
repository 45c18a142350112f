"""Conjugate gradients with one sum over ranks an iteration find what those with two find, as accurately."""

import numpy as np
import pytest
from kernel_targets import TARGETS

from penstock.fem import Cantilever
from penstock.solvers import StopReason, block_jacobi, cg, chebyshev, jacobi, smoothed_aggregation
from penstock.solvers.cg_kernels import CpuPasses, CudaPasses, Halt, Scalar
from penstock.spmv import Device, InputError

BEAM = Cantilever(nodes=(21, 5, 5), dof=3)
PRECONDITIONERS = {
    "none": lambda A: None,
    "jacobi": jacobi,
    "block jacobi": lambda A: block_jacobi(A, 3),
    "chebyshev": lambda A: chebyshev(A, 5, block_size=3),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("n", [7, 1500])
def test_passes_make_the_steps_of_the_textbook(target, n):
    rng = np.random.default_rng(n)
    A, b = np.diag(np.linspace(1.0, 50.0, n)), rng.normal(size=n)
    x, r, p, norms = np.zeros(n), b.copy(), b.copy(), []
    for _ in range(6):  # Hestenes and Stiefel's algorithm
        q, rho = A @ p, r @ r
        alpha = rho / (p @ q)
        x, r = x + alpha * p, r - alpha * q
        p = r + (r @ r) / rho * p
        norms.append(r @ r)

    put, get, at = target.put, target.get, target.running
    numbers = np.zeros(len(Scalar))
    numbers[[Scalar.NEXT_RHO, Scalar.UNIT]] = [b @ b, np.finfo(float).eps / 2]
    of_x, of_r, of_p, of_q, of_w = map(put, (np.zeros(n), b.copy(), b.copy(), A @ b, np.zeros(n)))
    vectors, ledger = (of_x, of_r, of_p, of_q, of_r, of_w), (put(numbers), put(np.zeros(8)))
    with at():
        device = Device("cuda") if target.name == "gpu" else Device("cpu")
        passes = (CudaPasses if target.device_kind == "cuda" else CpuPasses)(
            *vectors, None, *ledger, device, at_once=True
        )
        passes.curvature()
        passes.add_up()
        for _ in range(6):
            passes.close()
            passes.descend()
            of_w[...] = put(A @ get(of_r))
            passes.image_product()
            passes.add_up()
            passes.foresee()
            passes.extend()
            passes.extend_image()
            passes.curvature()
        passes.close()

    assert np.allclose(get(of_x), x, rtol=0, atol=1e-13 * abs(x).max())
    assert np.allclose(get(passes.norms_squared)[:6], norms, rtol=1e-11)
    found = get(passes.numbers)
    assert (found[Scalar.ITERATION], found[Scalar.HALT]) == (6, Halt.NO_HALT)
    assert np.allclose(get(of_q), A @ get(of_p), rtol=0, atol=1e-11 * abs(A @ p).max())


@pytest.mark.parametrize("name", PRECONDITIONERS)
def test_solves_need_as_many_iterations_and_reach_as_small_a_residual(name):
    A, b = BEAM.matrix(), BEAM.load()
    M = PRECONDITIONERS[name](A)

    one, two = (cg(A, b, M=M, rtol=1e-9, reductions=reductions) for reductions in (1, 2))

    assert one.converged
    assert one.true_residual <= 1e-9
    assert abs(one.iterations - two.iterations) <= max(1, two.iterations // 50)
    one, two = (cg(A, b, M=M, rtol=1e-17, reductions=reductions) for reductions in (1, 2))
    assert one.reason is two.reason is StopReason.ROUNDING_FLOOR
    assert one.true_residual <= 3 * two.true_residual


def test_a_solve_goes_on_from_its_state_and_counts_its_products():
    A, b = BEAM.matrix(), BEAM.load()
    M = block_jacobi(A, 3)
    whole = cg(A, b, M=M, rtol=1e-9, reductions=1)

    begun = cg(A, b, M=M, rtol=1e-9, maxiter=20, reductions=1)
    ended = cg(A, b, M=M, rtol=1e-9, state=begun.state, reductions=1)

    assert begun.reason is StopReason.MAXITER
    assert ended.converged
    assert abs(ended.state.iteration - whole.iterations) <= 2


def test_other_numbers_and_methods_are_refused():
    A, b = BEAM.matrix(), BEAM.load()
    with pytest.raises(InputError, match="reductions must be 1 or 2"):
        cg(A, b, reductions=3)
    M = smoothed_aggregation(A, BEAM.rigid_body_modes())
    with pytest.raises(InputError, match="reductions=1"):
        cg(A, b, M=M, reductions=1)
