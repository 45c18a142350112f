"""The fused passes of CG do what the textbook's three recurrences do, and stop where they should, on every kind of device."""

import math
import re

import numpy as np
import pytest
from kernel_targets import TARGETS

from penstock.solvers import block_jacobi, chebyshev, jacobi
from penstock.solvers.cg_iteration import CgRecurrence
from penstock.solvers.cg_kernels import CG_KERNELS, CpuPasses, CudaPasses, Halt, Scalar, Sum
from penstock.spmv import Device

EPS = np.finfo(np.float64).eps


class Passes:
    """One iteration on a target, beside the same in NumPy: q is given instead of a matrix."""

    def __init__(self, target, n, dtype, size, seed=0):
        rng = np.random.default_rng(seed)
        self.target, self.dtype, self.size = target, dtype, size
        self.x, self.r, self.p = rng.uniform(-1, 1, (3, n)).astype(dtype)
        self.q = (rng.uniform(0.5, 2, n) * self.p).astype(dtype)  # p.q > 0
        self.blocks = None
        if size:
            half = rng.uniform(-1, 1, (n // size, size, size))
            self.blocks = (half @ half.swapaxes(1, 2) + np.eye(size)).astype(dtype)
        self.numbers, self.norms = np.zeros(len(Scalar)), np.full(4, np.nan)
        self.numbers[[Scalar.NEXT_RHO, Scalar.UNIT]] = [3.0, np.finfo(dtype).eps / 2]

    def run(self, times=1, other_preconditioner=None, image_of_it=None):
        """Run and return what the target's memory holds, and close the iteration."""
        put = self.target.put
        z = self.r if self.size == 0 and other_preconditioner is None else np.full_like(self.r, np.nan)
        device_r = put(self.r.copy())
        device_z = device_r if z is self.r else put(z)
        arrays = [put(a.copy()) for a in (self.x, self.p, self.q)]
        numbers, norms = put(self.numbers.copy()), put(self.norms.copy())
        blocks = None if self.blocks is None else put(self.blocks.copy())
        w = device_z if image_of_it is None else put(image_of_it.copy())
        vectors = (arrays[0], device_r, arrays[1], arrays[2], device_z, w)
        kind = self.target.device_kind
        with self.target.running():
            device = Device("cuda") if self.target.name == "gpu" else Device("cpu")
            passes = (CudaPasses if kind == "cuda" else CpuPasses)(*vectors, blocks, numbers, norms, device)
            for _ in range(times):
                passes.curvature()
                passes.descend()
                if other_preconditioner is not None:
                    device_z[...] = other_preconditioner * device_r
                    passes.residual_product()
                passes.extend()
                if image_of_it is not None:
                    passes.extend_image()
            passes.close()
        get = self.target.get
        return {
            "x": get(passes.x), "r": get(passes.r), "p": get(passes.p), "z": get(passes.z),
            "q": get(passes.q), "numbers": get(numbers), "norms": get(norms),
        }  # fmt: skip


SIZES = (1, 31, 257, 1025, 20_011)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("size", [0, 1, 3])
def test_an_iteration_is_that_of_the_textbook(target, dtype, size):
    unit = float(np.finfo(dtype).eps)
    for n in (3 * max(size - 2, 1) * count for count in SIZES) if size == 3 else SIZES:
        system = Passes(target, n, dtype, size, seed=n)
        found, numbers = (result := system.run()), result["numbers"]

        x, r, p, q = (a.astype(np.float64) for a in (system.x, system.r, system.p, system.q))
        curvature = math.fsum(p * q)
        alpha = 3.0 / curvature
        r_new = r - alpha * q
        z = r_new
        if size:
            z = np.einsum("kij,kj->ki", system.blocks.astype(np.float64), r_new.reshape(-1, size)).ravel()
        rho = math.fsum(r_new * z)
        scale = 1 + abs(alpha)
        # Sums of n terms each rounded in double, and vectors rounded to their type.
        sums = n * EPS * (np.abs(p) @ np.abs(q)) / curvature
        bound = 4 * scale * (unit + sums)
        np.testing.assert_allclose(found["x"], x + alpha * p, rtol=0, atol=bound)
        np.testing.assert_allclose(found["r"], r_new, rtol=0, atol=2 * bound)
        grown = 1.0 if size == 0 else float(np.abs(system.blocks).sum(axis=2).max())
        if size:
            np.testing.assert_allclose(found["z"], z, rtol=0, atol=4 * grown * bound)
        beta = rho / 3.0
        np.testing.assert_allclose(found["p"], z + beta * p, rtol=0, atol=20 * grown * bound * (1 + n * grown * scale))
        assert numbers[Scalar.CURVATURE] == pytest.approx(curvature, rel=sums + 1e-15)
        assert numbers[Scalar.RHO] == numbers[Scalar.NEXT_RHO] == pytest.approx(rho, rel=8 * n * unit)
        assert numbers[Scalar.RESIDUAL_SQUARED] == found["norms"][0] == pytest.approx(r_new @ r_new, rel=8 * n * unit)
        assert numbers[Scalar.MATRIX_NORM] == pytest.approx(np.linalg.norm(q) / np.linalg.norm(p), rel=n * EPS + 1e-14)
        assert (numbers[Scalar.ITERATION], numbers[Scalar.HALT]) == (1, Halt.NO_HALT)
        expected = (
            unit
            / 2
            * (
                numbers[Scalar.MATRIX_NORM] * np.linalg.norm(x + alpha * p)
                + math.sqrt(numbers[Scalar.RESIDUAL_SQUARED])
            )
        )
        assert numbers[Scalar.DRIFT] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_the_image_of_the_next_direction_follows_from_that_of_the_residual(dtype, target):
    for n in SIZES:
        system, w = Passes(target, n, dtype, 0), np.random.default_rng(n).uniform(-1, 1, n).astype(dtype)
        found = system.run(other_preconditioner=dtype(2), image_of_it=w)

        beta = found["numbers"][Scalar.RHO] / 3.0
        expected = w.astype(float) + beta * system.q.astype(float)
        np.testing.assert_allclose(found["q"], expected, rtol=0, atol=4 * np.finfo(dtype).eps * (1 + beta * 2))

        system.numbers[Scalar.THRESHOLD_SQUARED] = math.inf  # halted, everything stays
        found = system.run(times=2, other_preconditioner=dtype(2), image_of_it=w)
        np.testing.assert_array_equal(found["q"], system.q)


@pytest.mark.parametrize("target", TARGETS)
def test_another_preconditioner_comes_between_the_passes(target):
    fused, plain = Passes(target, 2000, np.float64, 1), Passes(target, 2000, np.float64, 0)

    one = fused.run(times=2)
    other = plain.run(times=2, other_preconditioner=target.put(fused.blocks.reshape(-1)))

    for name in ("x", "r", "p", "z"):
        np.testing.assert_allclose(one[name], other[name], rtol=1e-10, atol=1e-10)


def expect_halt(target, system, halt, *, changed=(), times=3):
    """Several iterations are started, as between two looks; only the first may change anything."""
    once, more = system.run(times=1), system.run(times=times)
    assert once["numbers"][Scalar.HALT] == halt
    for name in ("x", "r", "p", "numbers", "norms"):
        np.testing.assert_array_equal(more[name], once[name])
    for name in ("x", "r", "p"):
        same = np.array_equal(once[name], getattr(system, name))
        assert same == (name not in changed), name
    return once["numbers"]


@pytest.mark.parametrize("target", TARGETS)
class TestHalts:
    @pytest.mark.parametrize("n", [100, 40_000])
    def test_at_a_small_residual_with_the_iterate_but_without_a_new_direction(self, target, n):
        system = Passes(target, n, np.float64, 1)
        system.numbers[Scalar.THRESHOLD_SQUARED] = 1e12

        numbers = expect_halt(target, system, Halt.SMALL, changed="xr")

        assert numbers[Scalar.ITERATION] == 1
        assert numbers[Scalar.RHO] == 3.0, "that of the residual at which the direction was made"

    @pytest.mark.parametrize("curvature", [-1.0, 0.0, np.nan, np.inf])
    def test_at_a_curvature_that_is_no_positive_number_before_anything_changes(self, target, curvature):
        system = Passes(target, 3000, np.float64, 0)
        system.q[:] = {-1.0: -system.q, 0.0: 0.0}.get(curvature, system.q)
        if not math.isfinite(curvature):
            system.q[1234] = curvature * system.p[1234]

        numbers = expect_halt(target, system, Halt.BAD_CURVATURE)

        assert numbers[Scalar.ITERATION] == 0
        assert not numbers[Scalar.CURVATURE] > 0 or numbers[Scalar.CURVATURE] == np.inf

    def test_at_a_preconditioner_that_is_not_positive(self, target):
        system = Passes(target, 3000, np.float64, 1)
        system.blocks *= -1

        expect_halt(target, system, Halt.BAD_PRECONDITIONER, changed="xr")

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_at_a_preconditioner_that_returns_no_number(self, target, value):
        system = Passes(target, 3000, np.float64, 1)
        system.blocks[77] = value

        expect_halt(target, system, Halt.NOT_FINITE, changed="xr")

    def test_when_rounding_may_have_cost_half_of_the_digits(self, target):
        system = Passes(target, 3000, np.float64, 1)
        system.numbers[Scalar.DRIFT] = 1e-6  # of a residual of about 30
        system.numbers[Scalar.FIRST_DRIFT] = 1e-9

        expect_halt(target, system, Halt.DRIFTED, changed="xrp")

    @pytest.mark.parametrize(("first", "drift"), [(1e-6, 1e-6), (1e-6, 1e-4), (2e-7, 1e-6)])
    def test_not_for_a_drift_that_a_new_residual_would_have_too(self, target, first, drift):
        system = Passes(target, 3000, np.float64, 1)
        system.numbers[[Scalar.FIRST_DRIFT, Scalar.DRIFT]] = first, drift

        assert system.run()["numbers"][Scalar.HALT] == Halt.NO_HALT


def test_the_kernel_file_begins_with_the_enums_of_python():
    source = CG_KERNELS.text()

    for enum in (Scalar, Sum, Halt):
        written = re.findall(rf"enum {enum.__name__} {{([^}}]*)}}", source)
        assert written == [" " + ", ".join(f"{member.name} = {member.value}" for member in enum) + " "]
        assert [member.value for member in enum] == list(range(len(enum)))


@pytest.mark.parametrize(
    ("preconditioner", "extra"),
    [(lambda A: None, []), (jacobi, []), (lambda A: block_jacobi(A, 3), []), (chebyshev, ["M", "residual_product"])],
    ids=["none", "jacobi", "block jacobi", "other"],
)
def test_an_iteration_starts_one_product_and_three_passes(A, b, preconditioner, extra):
    """And for a preconditioner that is not part of a pass, its application and a fourth one."""
    started = []

    def counted(name, action):
        return lambda *arguments: (started.append(name), action(*arguments))[1]

    M = preconditioner(A)
    x, r, p, q = np.zeros(b.size), b.copy(), b.copy(), np.empty(b.size)
    recurrence = CgRecurrence(A, M, x, r, p, q, None if M is None else np.empty(b.size))
    recurrence._multiply = counted("A", recurrence._multiply)
    if recurrence._precondition is not None:
        recurrence._precondition = counted("M", recurrence._precondition)
    for name in ("curvature", "descend", "residual_product", "extend", "close"):
        setattr(recurrence._passes, name, counted(name, getattr(recurrence._passes, name)))

    recurrence.put(next_rho=1.0, unit=EPS / 2)
    recurrence.advance(4)

    assert started == 4 * ["A", "curvature", "descend", *extra, "extend"]
    recurrence.look()
    assert started[-1] == "close"
    assert len(recurrence.norms(0)) == 4
