"""Matrices that do not fit, of which an image in float32 is held in memory: what is solved, explained, updated and given up."""

import numpy as np
import pytest
import scipy.sparse
from random_systems import residual

import penstock
from penstock import BudgetError, InputError, prepare, solve
from penstock.fem import Cantilever, LognormalMaterial
from penstock.solvers import jacobi
from penstock.spmv import CsrMatrix, format_named
from penstock.spmv.formats.partition import row_slabs
from penstock.streaming import FileStore, HostStore

BEAM = Cantilever(nodes=(41, 6, 6), dof=3, material=LognormalMaterial(sigma=0.5))
A, POINTS = BEAM.matrix().to_csr(), BEAM.mesh.coordinates()
HALF = BEAM.matrix("symmetric_bsr").nbytes
B = np.random.default_rng(0).standard_normal((A.shape[0], 3))
# Of the bytes of the stored half: too little for an image, enough for one of 16 bits, for one of 32 bits, and for both matrices.
LITTLE, LESS, ENOUGH, BOTH = (int(share * HALF) for share in (0.3, 0.45, 0.75, 1.75))


def options(memory=ENOUGH, **more):
    return {"device": "cpu", "coordinates": POINTS, "memory": memory, **more}


def definite_by_a_hair(n=3000):
    """A Laplacian with unknowns of either sign: what makes it definite is less than rounding to float32 takes away.

    With one sign, the corrections of an image would keep it definite.
    """
    rng = np.random.default_rng(0)
    weights, signs = rng.uniform(1, 2, n - 1), scipy.sparse.diags_array(rng.choice([-1.0, 1.0], n))
    L = scipy.sparse.diags_array([-weights, -weights], offsets=[-1, 1], shape=(n, n))
    return scipy.sparse.csr_array(signs @ (L + scipy.sparse.diags_array(-L.sum(axis=1) + 1e-10)) @ signs)


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize(("memory", "precision", "most"), [(ENOUGH, "float32", 2), (LESS, "int16", 4)])
def test_a_matrix_that_does_not_fit_is_read_a_few_times(columns, memory, precision, most):
    b = B[:, 0] if columns == 1 else B

    result = solve(A, b, **options(memory))

    assert result.converged
    assert result.sweeps <= most
    assert f"an image of the matrix in {precision}" in result.explain()
    assert "computed with A in float64, streamed in" in result.explain()
    for number in range(columns):
        assert residual(A, B[:, number], result.x if columns == 1 else result.x[:, number]) <= 1e-8
    streamed = solve(A, b, **options(memory, precision="float64"))
    assert streamed.sweeps > 3 * result.sweeps


def test_the_norm_itself_takes_another_sweep():
    bound, norm = (solve(A, B[:, 0], **options(verify=verify)) for verify in ("bound", "norm"))

    assert norm.converged
    assert norm.sweeps == bound.sweeps + 1
    assert bound.bounded
    assert "a bound with A, b and x" in bound.explain()
    assert norm.true_residual == pytest.approx(residual(A, B[:, 0], norm.x), rel=1e-2)
    assert residual(A, B[:, 0], bound.x) <= bound.true_residual
    for call in (lambda: solve(A, B[:, 0], verify="twice"), lambda: prepare(A, verify=True)):
        with pytest.raises(InputError, match="verify must be 'bound' or 'norm'"):
            call()


def test_without_room_for_an_image_it_is_streamed_in_every_iteration():
    result = solve(A, B[:, 0], **options(LITTLE))

    assert result.converged
    assert "image" not in result.explain()


def test_a_matrix_that_fits_has_an_image_on_request():
    result = solve(A, B[:, 0], **options(BOTH, precision="float32"))

    assert result.converged
    assert "which is in memory too" in result.explain()
    assert result.bytes_streamed == 0
    assert "image" not in solve(A, B[:, 0], **options(BOTH)).explain()


@pytest.mark.parametrize("memory", [LESS, ENOUGH])
def test_preconditioners_are_those_of_matrices_in_memory(memory):
    names = ("jacobi", "block_jacobi", "chebyshev", "multigrid", "incomplete_cholesky", "gauss_seidel", "factorisation")
    for preconditioner in (*names, jacobi(BEAM.matrix())):
        result = solve(A, B[:, 0], device="cpu", memory=memory, preconditioner=preconditioner, rtol=1e-6)

        assert result.converged
        assert result.sweeps <= 5
        assert residual(A, B[:, 0], result.x) <= 1e-6


def test_a_choice_that_is_left_open_is_judged_by_iterations(small_matrices_are_worth_it):
    result = solve(A, B[:, 0], device="cpu", memory=ENOUGH)

    assert result.converged
    assert "multigrid: block_jacobi promised more than" in result.explain()
    assert residual(A, B[:, 0], result.x) <= 1e-8


@pytest.mark.parametrize("matrix", [definite_by_a_hair(1500), definite_by_a_hair(1500) * 1e-30])
def test_where_the_image_does_not_stand_for_it_the_matrix_is_streamed(matrix):
    b = np.random.default_rng(1).standard_normal(matrix.shape[0])

    given = {"device": "cpu", "preconditioner": "jacobi", "maxiter": 20_000, "on_failure": "return"}
    result = solve(matrix, b, memory=int(0.9 * 12 * matrix.nnz), **given)

    expected = solve(matrix, b, memory=int(0.9 * 12 * matrix.nnz), precision="float64", **given)
    assert result.converged == expected.converged
    assert "image" in result.explain()
    assert "float64: an image in fewer digits was tried, but" in result.explain()
    if result.converged:
        assert residual(matrix, b, result.x) <= 1e-8


def test_what_is_wrong_with_a_matrix_is_told_as_before():
    indefinite = scipy.sparse.csr_array(A - 0.5 * A.diagonal().min() * scipy.sparse.eye_array(A.shape[0]))
    results = [solve(indefinite, B[:, 0], on_failure="return", device="cpu", memory=m) for m in (None, ENOUGH)]

    assert results[0].reason is results[1].reason


@pytest.mark.parametrize("memory", [LESS, ENOUGH])
def test_a_prepared_system_takes_new_values(memory):
    with prepare(A, **options(memory)) as system:
        first = system.solve(B[:, 0])
        assert system.nbytes <= memory
        assert np.allclose(system.matrix @ B, A @ B)
        for factor, refresh in ((2.0, "auto"), (3.0, "values"), (4.0, "keep")):
            system.update(factor * A, refresh)
            result = system.solve(B[:, 0])
            assert result.converged
            assert residual(factor * A, B[:, 0], result.x) <= 1e-8
    assert first.converged


def test_a_prepared_system_gives_its_image_up_after_an_update():
    A, b = definite_by_a_hair(), np.random.default_rng(1).standard_normal(3000)
    good = scipy.sparse.csr_array(A + scipy.sparse.eye_array(3000))
    with prepare(good, device="cpu", memory=int(0.9 * 12 * A.nnz), preconditioner="jacobi") as system:
        assert "image" in system.explain()
        assert system.solve(b).converged
        system.update(A)
        result = system.solve(b, on_failure="return", maxiter=20_000)
        assert "an image in fewer digits was tried" in result.explain()
        system.update(good)
        assert residual(good, b, system.solve(b).x) <= 1e-8


@pytest.mark.parametrize("name", ["csr", "bsr", "symmetric_bsr"])
def test_stores_and_formats(tmp_path, name):
    matrix = BEAM.matrix() if name == "bsr" else format_named(name).from_csr(A)
    arrays = {**matrix.arrays(), "values": 2.0 * matrix.values}
    stiffer = matrix.from_arrays(matrix.shape, matrix.dtype, arrays, matrix.parameters())
    memory = int(0.8 * matrix.nbytes)
    for folder, of in (("one", matrix), ("two", stiffer)):
        FileStore.create(tmp_path / folder, row_slabs(of, 32), shape=A.shape).close()
    # A matrix in CSR is converted to half of it, which fits.
    for given in (tmp_path / "one", *([matrix] if name != "csr" else [])):
        result = solve(given, B[:, 0], **options(memory))

        assert result.converged
        assert result.sweeps <= 4  # one of a store is for the image
        assert "an image of the matrix in float32" in result.explain()
        assert residual(A, B[:, 0], result.x) <= 1e-8
    with prepare(tmp_path / "one", **options(memory)) as system:
        assert system.solve(B[:, 0]).converged
        system.update(tmp_path / "two")
        assert residual(2.0 * A, B[:, 0], system.solve(B[:, 0]).x) <= 1e-8
    assert np.array_equal(matrix.to_csr().toarray(), A.toarray())


def test_the_arrays_of_a_callers_store_stay_as_they_are():
    mine = CsrMatrix.from_csr(A.copy())
    with prepare(HostStore.from_matrix(mine, 16), **options(int(0.8 * mine.nbytes))) as system:
        assert "image" in system.explain()
        system.update(2.0 * A)
        assert residual(2.0 * A, B[:, 0], system.solve(B[:, 0]).x) <= 1e-8
    assert (mine.values == A.data).all()


def test_values_of_a_store_that_leave_the_range_of_float32(tmp_path):
    tiny = scipy.sparse.csr_array(1e-40 * A)
    FileStore.create(tmp_path / "store", row_slabs(CsrMatrix.from_csr(tiny), 32), shape=A.shape).close()

    result = solve(tmp_path / "store", B[:, 0], device="cpu", memory=int(0.8 * 12 * A.nnz), preconditioner="jacobi")

    assert result.converged
    assert "values leave the range of float32" in result.explain()


def test_the_inverse_is_one_of_the_matrix_itself():
    with prepare(A, **options()) as system:
        x = system.inverse.to(1e-10) @ B[:, 0]
    assert residual(A, B[:, 0], x) <= 1e-10


def test_interrupts_and_limits():
    seen = []
    result = solve(A, B[:, 0], **options(), monitor=lambda record: seen.append(record.iteration) or len(seen) == 4)
    assert result.reason.name == "STOPPED"
    assert seen == [1, 2, 3, 4]
    result = solve(A, B[:, 0], **options(), maxiter=3, on_failure="return")
    assert (result.reason.name, result.iterations) == ("MAXITER", 3)
    assert result.true_residual == pytest.approx(residual(A, B[:, 0], result.x), rel=1e-6)


@pytest.mark.parametrize("precision", ["float16", 32, None, np.float32])
def test_precisions_that_are_none(precision):
    for call in (lambda: solve(A, B[:, 0], precision=precision), lambda: penstock.prepare(A, precision=precision)):
        with pytest.raises(InputError, match="precision must be one of auto, float64, float32, int16"):
            call()


@pytest.mark.parametrize("factor", [1e60, 1e-60, 1e-40])
def test_new_values_beyond_the_range_of_float32(factor):
    for refresh in ("values", "auto", "keep"):
        with prepare(A, **options()) as system:
            system.solve(B[:, 0])
            system.update(factor * A, refresh)
            result = system.solve(B[:, 0])

            assert result.converged
            assert "values leave the range of float32" in result.explain()
            assert residual(factor * A, B[:, 0], result.x) <= 1e-8


def test_numbers_that_are_rounded_up_to_a_power_of_two():
    """Of 16 bits none is clipped: the errors of these blocks are half a unit, too, and two of them add up."""
    J, identity = np.full((3, 3), 1024 * (1 - 2.0**-15 * 0.005)), np.eye(3)
    cell = np.block([[27 * 4.0**10 * identity, J, -J], [J.T, identity, 0 * identity], [-J.T, 0 * identity, identity]])
    S = scipy.sparse.csr_array(scipy.sparse.kron(scipy.sparse.eye_array(100), cell))
    S.eliminate_zeros()
    b = np.tile([1.0, 1, 1, 0, 0, 0, 0, 0, 0], 100)
    given = {"device": "cpu", "memory": "4 MiB", "precision": "int16", "block_size": 3, "preconditioner": "jacobi"}
    for rtol in (1.2e-9, 1.6e-9, 3e-9):
        result = solve(format_named("symmetric_bsr").from_csr(S), b, rtol=rtol, **given)

        assert residual(S, b, result.x) <= (rtol if result.converged else 1.0)
        assert residual(S, b, result.x) <= result.true_residual


def test_refusals_say_what_is_missing():
    with pytest.raises(InputError, match="is for cg, not for minres"):
        solve(A, B[:, 0], method="minres", precision="int16")
    with pytest.raises(InputError, match="stored in dense blocks"):
        solve(definite_by_a_hair(3001), np.ones(3001), device="cpu", precision="int16")
    with pytest.raises(BudgetError, match="KiB and two subdivisions of the matrix do not fit"):
        solve(A, B[:, 0], **options(LITTLE, precision="float32"))


def test_a_small_system_has_the_image_that_is_asked_for():
    S = scipy.sparse.csr_array(np.eye(30) * 4.0 + np.ones((30, 30)))
    assert "image" in solve(S, np.ones(30), device="cpu", precision="float32").explain()


def test_where_there_is_no_way_without_the_image_both_reasons_are_told():
    S = definite_by_a_hair()
    given = {"device": "cpu", "memory": int(0.9 * 12 * S.nnz), "preconditioner": "gauss_seidel"}
    system = prepare(S, **given)
    with pytest.raises(InputError, match=r"an image in fewer digits was tried, but .* without one, .*gauss_seidel"):
        system.solve(np.random.default_rng(1).standard_normal(3000), maxiter=20_000)
    with pytest.raises(InputError, match="closed"):
        system.solve(np.ones(3000))
