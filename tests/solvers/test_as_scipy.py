"""Scripts written for SciPy work as they are, and solvers of SciPy take operators of penstock, streamed ones too."""

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg

import penstock
from penstock.fem import Cantilever
from penstock.solvers import StopReason, block_cg, cg, jacobi
from penstock.spmv import BsrMatrix, CsrMatrix, InputError, SymmetricBsrMatrix
from penstock.streaming import FileStore, HostStore, StreamedMatrix, plan_stream

BEAM = Cantilever(nodes=(17, 5, 5), dof=3)
LINE = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(40, 40))
GRID = scipy.sparse.kronsum(LINE, LINE, format="csr")
ONES = np.ones(1600)


@pytest.fixture(scope="module")
def stiffness():
    return BEAM.matrix("csr").to_csr()


class TestScripts:
    def test_a_result_is_indexed_like_the_tuple_of_scipy(self):
        result = cg(GRID, ONES)
        assert result[0] is result.x
        assert result[1] == 0
        assert block_cg(GRID, np.eye(1600, 2))[1] == 0

    def test_the_tolerances_of_cupy_are_understood(self):
        result = cg(GRID, ONES, tol=1e-10, atol=None)
        assert result.converged
        assert np.linalg.norm(ONES - GRID @ result.x) <= 1e-10 * np.linalg.norm(ONES)
        assert cg(GRID, ONES, tol=1e-2).iterations < result.iterations

    @pytest.mark.parametrize(
        "A",
        [np.matrix(GRID.toarray()), scipy.sparse.csr_array(GRID.astype(int)), GRID.astype(np.float32)],
        ids=["matrix", "int", "float32"],
    )
    def test_other_kinds_of_matrices_are_converted(self, A):
        result = cg(A, ONES, rtol=1e-10)
        assert result.converged
        np.testing.assert_allclose(GRID @ result.x, ONES, atol=1e-7)

    def test_an_object_with_a_shape_and_a_product_is_an_operator(self):
        class Grid:
            shape = GRID.shape

            def __matmul__(self, x):
                return GRID @ x

        assert cg(Grid(), ONES).converged

    @pytest.mark.parametrize("M", ["jacobi", scipy.sparse.diags_array(1 / GRID.diagonal()).tocsr().astype(np.float32)])
    def test_a_preconditioner_is_a_name_or_has_another_type(self, M):
        result = cg(GRID, ONES, M=M, rtol=1e-10)
        assert result.converged
        assert result.iterations < 1.3 * cg(GRID, ONES, M=jacobi(GRID), rtol=1e-10).iterations

    def test_a_vector_as_preconditioner_is_told_what_to_do(self):
        with pytest.raises(InputError, match="give jacobi"):
            cg(GRID, ONES, M=1 / GRID.diagonal())

    @pytest.mark.parametrize("empty", [np.zeros((0, 0)), scipy.sparse.csr_array((0, 0))], ids=["dense", "sparse"])
    def test_a_system_without_unknowns_is_solved(self, empty):
        assert cg(empty, np.zeros(0)).converged
        assert block_cg(empty, np.zeros((0, 2))).converged
        assert penstock.solve(scipy.sparse.csr_array(empty), np.zeros(0)).x.shape == (0,)
        for name in ("none", "jacobi", "chebyshev", "smoothed_aggregation"):
            assert cg(scipy.sparse.csr_array(empty), np.zeros(0), M=name).converged
        with pytest.raises(InputError, match="no rows"):
            StreamedMatrix(scipy.sparse.csr_array(empty), "1 MiB")

    @pytest.mark.parametrize("M", [None, "jacobi"])
    def test_the_preconditioned_right_hand_side_as_first_guess(self, M):
        preconditioned = ONES if M is None else ONES / GRID.diagonal()
        named, given = cg(GRID, ONES, "Mb", M=M, rtol=1e-10), cg(GRID, ONES, preconditioned, M=M, rtol=1e-10)

        assert named.converged
        assert np.array_equal(named.x, given.x)
        assert ONES.max() == 1
        with pytest.raises(InputError, match="or 'Mb', not 'b'"):
            cg(GRID, ONES, "b")

    def test_a_matrix_given_for_arrays_is_told_what_to_call(self):
        with pytest.raises(InputError, match=r"CsrMatrix\.from_csr\(A\)"):
            CsrMatrix(GRID)


class TestSolversOfScipy:
    def test_they_take_matrices_as_they_are(self):
        A = CsrMatrix.from_csr(GRID)
        x, info = scipy.sparse.linalg.cg(A, ONES, rtol=1e-10)
        assert info == 0
        np.testing.assert_allclose(A.dot(x), ONES, atol=1e-7)

    def test_eigenmodes_of_a_streamed_matrix_are_those_in_memory(self):
        """The highest by eigsh, bit for bit the same products, and the lowest by LOBPCG, which multiplies blocks."""
        small = Cantilever(nodes=(9, 3, 4), dof=3, lengths=(4.0, 1.0, 1.7)).matrix("csr").to_csr()
        start = np.random.default_rng(0).normal(size=(small.shape[0], 4))
        highest, modes = scipy.sparse.linalg.eigsh(small, k=3, v0=start[:, 0])
        lowest = scipy.sparse.linalg.eigsh(small, k=3, sigma=0.0, return_eigenvectors=False)
        with StreamedMatrix(small, small.data.nbytes // 3) as A:
            assert A.plan.slots
            operator, M = A.linear_operator(), jacobi(A).linear_operator()
            streamed_highest, streamed_modes = scipy.sparse.linalg.eigsh(operator, k=3, v0=start[:, 0])
            streamed_lowest, _ = scipy.sparse.linalg.lobpcg(operator, start, M=M, largest=False, maxiter=200, tol=1e-7)
        np.testing.assert_allclose(streamed_highest, highest, rtol=1e-12)
        np.testing.assert_allclose(abs(streamed_modes.T @ modes), np.eye(3), atol=1e-8)
        np.testing.assert_allclose(streamed_lowest[:3], np.sort(lowest), rtol=1e-6)

    def test_operators_add_and_scale(self):
        A = CsrMatrix.from_csr(GRID)
        np.testing.assert_allclose((2 * A) @ ONES, 2 * (GRID @ ONES))
        np.testing.assert_allclose(
            (A.linear_operator() + A.linear_operator()) @ np.eye(1600, 3), 2 * (GRID @ np.eye(1600, 3))
        )
        np.testing.assert_allclose((-A) @ ONES, -(GRID @ ONES))
        np.testing.assert_allclose((A / 4) @ ONES, GRID @ ONES / 4)
        half = SymmetricBsrMatrix.from_csr(GRID, block_size=2)
        assert half.T is half

    def test_operators_add_to_each_other_and_to_matrices(self):
        A, shift = CsrMatrix.from_csr(GRID), scipy.sparse.eye_array(1600, format="csr")
        with StreamedMatrix(GRID, "64 KiB") as streamed:
            np.testing.assert_allclose((A + streamed) @ ONES, 2 * (GRID @ ONES))
            np.testing.assert_allclose((streamed - 0.5 * A) @ ONES, 0.5 * (GRID @ ONES), atol=1e-12)
        for shifted in (A + shift, shift + A, A + np.eye(1600), np.eye(1600) + A):
            np.testing.assert_allclose(shifted @ ONES, GRID @ ONES + 1)
        for shifted in (A - shift, -1.0 * (shift - A), A - np.eye(1600), -1.0 * (np.eye(1600) - A)):
            np.testing.assert_allclose(shifted @ ONES, GRID @ ONES - 1)
        np.testing.assert_allclose(sum([A, A, A]) @ ONES, 3 * (GRID @ ONES))
        assert cg(A + 0.1 * shift, ONES).converged

    def test_products_with_arrays_entry_by_entry_are_refused(self):
        A = CsrMatrix.from_csr(GRID)
        for product in (
            lambda: ONES * A,
            lambda: A * ONES,
            lambda: A / ONES,
            lambda: A + 1,
            lambda: 1j * A,
            lambda: A + "a",
        ):
            with pytest.raises(TypeError, match="operand"):
                product()
        for product in (lambda: A @ A, lambda: A @ GRID):
            with pytest.raises(InputError, match="multiply multiplies sparse matrices"):
                product()
        with pytest.raises(InputError, match="have no sum"):
            A + np.eye(3)
        with pytest.raises(InputError, match="of type complex128 is not supported"):
            A + 1j * GRID

    def test_sums_go_on_with_every_operation(self):
        A, I = CsrMatrix.from_csr(GRID), scipy.sparse.eye_array(1600, format="csr")  # noqa: E741
        with StreamedMatrix(GRID, "64 KiB") as streamed:
            for sum_of, expected in (
                (2 * A + I, 2 * (GRID @ ONES) + 1),
                (A + I + I, GRID @ ONES + 2),
                (-A + I, 1 - GRID @ ONES),
                (I - 2 * A, 1 - 2 * (GRID @ ONES)),
                (I - streamed / 8, 1 - GRID @ ONES / 8),
                (+streamed - A + np.float32(0.5) * I, 0.5 * ONES),
                (sum([A, A, I]), 2 * (GRID @ ONES) + 1),
                (np.array(2.0) * (A - 0), 2 * (GRID @ ONES)),
            ):
                np.testing.assert_allclose(sum_of @ ONES, expected, atol=1e-12)
                out = np.full(1600, 2.0)
                sum_of.apply(ONES, out, alpha=3.0, beta=0.5)
                np.testing.assert_allclose(out, 3 * expected + 1, atol=1e-12)
        lowest = scipy.sparse.linalg.eigsh(A + I, k=1, which="SA", return_eigenvectors=False)
        np.testing.assert_allclose(
            lowest, scipy.sparse.linalg.eigsh(GRID + I, k=1, which="SA", return_eigenvectors=False)
        )

    def test_types_are_those_of_the_parts(self):
        F, I = CsrMatrix.from_csr(GRID.astype(np.float32)), scipy.sparse.eye_array(1600, format="csr")  # noqa: E741
        assert {of.dtype.name for of in (2 * F, F / 3, -F, F - F, np.float64(2) * F, F + I.astype("f"))} == {"float32"}
        for b, A in ((ONES, F + 0.1 * I), (ONES.astype("f"), 2 * F + 0.1 * I.astype("f"))):
            assert A.dtype == b.dtype
            assert cg(A, b, rtol=1e-4).converged
        with (
            StreamedMatrix(GRID.astype(np.float32), "32 KiB") as streamed,
            pytest.raises(InputError, match="sum parts of one type"),
        ):
            streamed + I

    def test_a_streamed_half_is_its_transpose(self):
        with (
            StreamedMatrix(SymmetricBsrMatrix.from_csr(GRID, block_size=2), "64 KiB") as half,
            StreamedMatrix(GRID, "64 KiB") as whole,
        ):
            assert half.T is half
            assert not hasattr(whole, "T")


class TestStreamedMatrix:
    @pytest.mark.parametrize("kind", ["csr", "coo", "bsr", "penstock"])
    def test_a_matrix_is_streamed_from_its_arrays(self, stiffness, kind):
        given = {"penstock": BsrMatrix.from_csr(stiffness, block_size=3), "bsr": stiffness.tobsr((3, 3))}
        x = np.random.default_rng(0).normal(size=stiffness.shape[0])
        with StreamedMatrix(given.get(kind, stiffness.asformat(kind if kind == "coo" else "csr")), "300 KiB") as A:
            assert A.plan.slots
            np.testing.assert_allclose(A @ x, stiffness @ x, atol=1e-12)

    def test_a_folder_is_opened_and_closed(self, stiffness, tmp_path):
        FileStore.create(tmp_path / "store", BEAM.subdivisions(8)).close()
        A = StreamedMatrix(tmp_path / "store", "400 KiB")
        A @ BEAM.load()
        store = A.store
        A.close()
        assert store._file.closed

    def test_what_is_neither_is_refused(self):
        with pytest.raises(InputError, match="cannot stream a ndarray"):
            StreamedMatrix(np.eye(3), "1 MiB")


class TestSymmetry:
    """Conjugate gradients do not notice that an operator is not symmetric: they go on without ever converging."""

    @pytest.mark.parametrize("share", [0.1, 1.0])
    def test_a_matrix_that_is_not_symmetric_is_found_out(self, share):
        flow = scipy.sparse.kron(scipy.sparse.eye_array(40), _upwind(40))
        b = np.random.default_rng(0).normal(size=1600)
        for result in (
            cg(GRID + share * flow, b, rtol=1e-10),
            *block_cg(GRID + share * flow, b[:, None], rtol=1e-10).columns,
        ):
            assert result.reason is StopReason.NOT_SYMMETRIC
            assert result.iterations < 2000
            assert "u.A(Au) differs" in result.message

    @pytest.mark.parametrize("share", [3.0, 30.0])
    def test_so_is_one_that_breaks_down_at_once(self, share):
        """Its products look as if it, or a preconditioner made of it, were not positive definite."""
        scales = scipy.sparse.diags_array(np.random.default_rng(1).uniform(0.1, 10, 1600))
        flow = scipy.sparse.kron(scipy.sparse.eye_array(40), _upwind(40))
        b = np.random.default_rng(0).normal(size=1600)
        for A in (scipy.sparse.csr_array(scales @ GRID), scipy.sparse.csr_array(GRID + share * flow)):
            for M in (None, "jacobi", "chebyshev"):
                for result in (cg(A, b, M=M, rtol=1e-10), *block_cg(A, b[:, None], M=M, rtol=1e-10).columns):
                    assert result.reason in (StopReason.NOT_SYMMETRIC, StopReason.CONVERGED, StopReason.STAGNATED), M

    def test_so_is_a_preconditioner(self):
        M = scipy.sparse.linalg.LinearOperator(GRID.shape, scipy.sparse.linalg.spilu(GRID.tocsc(), drop_tol=0.3).solve)
        result = cg(GRID, np.random.default_rng(0).normal(size=1600), M=M, rtol=1e-10)
        assert result.reason is StopReason.PRECONDITIONER_NOT_SYMMETRIC
        assert result.info < 0

    def test_a_slow_solve_of_a_symmetric_system_goes_on(self):
        """The test costs two products, once, and streamed sweeps keep their direction, so the bits stay the same."""
        scales = scipy.sparse.diags_array(np.exp(4 * np.random.default_rng(2).normal(size=1600)))
        A, b = scales @ GRID @ scales, np.random.default_rng(3).normal(size=1600)
        result = cg(A, b, maxiter=400)
        assert result.reason is StopReason.MAXITER
        assert result.residual_norms[-1] > 0.5 ** (400 / 64)  # slow indeed
        first = cg(A, b, maxiter=30)
        resumed = cg(A, b, maxiter=400, state=first.state)
        np.testing.assert_array_equal(resumed.x, result.x)


def _upwind(n):
    return scipy.sparse.diags_array([-1.0, 1.0], offsets=[-1, 0], shape=(n, n))


def test_objects_tell_what_they_are_in_a_line(stiffness, tmp_path):
    A, store = CsrMatrix.from_csr(stiffness), HostStore.create(stiffness)
    plan = plan_stream(store.index, store.index.nbytes)
    result = cg(A, BEAM.load(), M=jacobi(A))
    assert repr(A) == "<CsrMatrix 1,275 x 1,275, 74,529 entries, 883.4 KiB, float64, cpu>"
    with StreamedMatrix(stiffness, "300 KiB") as streamed, FileStore.create(tmp_path / "a", stiffness) as on_disk:
        for thing in (A, store, on_disk, store.index, plan, result, streamed, jacobi(A), block_cg(A, np.eye(1275, 2))):
            assert "\n" not in repr(thing)
            assert 20 < len(repr(thing)) < 250
            assert repr(thing).startswith(f"<{type(thing).__name__} ")
    assert plan._repr_html_().count("<tr>") == len(plan.explain().splitlines())
    assert "computed from A, b and x" in result._repr_html_()
