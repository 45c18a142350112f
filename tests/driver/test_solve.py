"""``penstock.solve``: any matrix, any right-hand side, one call."""

import subprocess
import sys
import time

import numpy as np
import pytest
import scipy.io
import scipy.sparse
import scipy.sparse.linalg
from kernel_targets import gpu_count
from labelled import Series
from seven_point import seven_point

import penstock
from penstock.driver import predicted, slow_modes
from penstock.fem import Cantilever, LognormalMaterial
from penstock.solvers import SmoothedAggregationSpec
from penstock.solvers.chebyshev import ChebyshevSpec
from penstock.spmv import BsrMatrix, BudgetError, CsrMatrix, InputError, SparseMatrix, SymmetricBsrMatrix
from penstock.spmv.formats import statistics, symmetric_bsr
from penstock.spmv.formats.partition import cut_rows
from penstock.spmv.model.suggestion import Suggestion
from penstock.streaming import FileStore, HostStore, StreamedMatrix

BEAM = Cantilever(nodes=(17, 5, 5), dof=3, material=LognormalMaterial(sigma=0.5, seed=2))
BUDGET = "300 KiB"


@pytest.fixture(scope="module")
def A():
    return scipy.sparse.csr_array(BEAM.matrix().to_csr())


@pytest.fixture(scope="module")
def b():
    return BEAM.load()


@pytest.fixture(scope="module")
def x(A, b):
    return scipy.sparse.linalg.spsolve(A.tocsc(), b)


def solve(A, b, **options):
    return penstock.solve(A, b, device="cpu", **options)


def check(A, b, result, rtol=1e-8):
    """The result converged, and its residual is that of the matrix as the caller has it, or a bound that it says is one."""
    assert result.converged
    residual = np.linalg.norm(b - A @ np.asarray(result.x)) / np.linalg.norm(b)
    assert residual <= rtol * (1 + 1e-6)
    if result.bounded:
        assert residual <= result.true_residual <= rtol
    else:
        assert result.true_residual == pytest.approx(residual, rel=1e-3)


FORMS = {
    "csr array": lambda A: A,
    "csr matrix": scipy.sparse.csr_matrix,
    "coo with duplicates": lambda A: scipy.sparse.coo_array(
        (np.concatenate([A.tocoo().data / 2] * 2), tuple(np.concatenate([c] * 2) for c in A.tocoo().coords)), A.shape
    ),
    "unsorted csr": lambda A: A[::-1][::-1][:, ::-1][:, ::-1],
    "csc": lambda A: A.tocsc(),
    "bsr": lambda A: A.tobsr((3, 3)),
    "lil": lambda A: A.tolil(),
    "penstock csr": CsrMatrix.from_csr,
    "penstock bsr": BsrMatrix.from_csr,
    "half": SymmetricBsrMatrix.from_csr,
    "linear operator": scipy.sparse.linalg.aslinearoperator,
    "dense": lambda A: A.toarray(),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_matrix_in_any_form(form, A, b):
    check(A, b, solve(FORMS[form](A), b))


@pytest.mark.parametrize("form", ["csr array", "coo with duplicates", "bsr", "penstock csr", "penstock bsr", "half"])
def test_one_larger_than_the_memory_is_streamed(form, A, b, tmp_path):
    result = solve(FORMS[form](A), b, memory=BUDGET, folder=tmp_path / "place")

    check(A, b, result)
    assert result.bytes_streamed > 0
    assert list((tmp_path / "place").iterdir()) == [], "the store is removed"


def test_a_path_of_a_file_and_of_a_store(A, b, tmp_path):
    scipy.io.mmwrite(tmp_path / "A.mtx", A, symmetry="symmetric")
    FileStore.create(tmp_path / "store", BEAM.subdivisions(8), shape=A.shape).close()

    check(A, b, solve(tmp_path / "A.mtx", b))
    check(A, b, solve(str(tmp_path / "store"), b))
    streamed = solve(tmp_path / "store", b, memory=BUDGET)
    check(A, b, streamed)
    assert streamed.bytes_streamed > 0


def test_a_store_over_budget_and_a_streamed_matrix(A, b):
    with HostStore.create(BEAM.subdivisions(8)) as store:
        result = solve(store, b, memory=BUDGET)
        check(A, b, result)
        assert result.bytes_streamed > 0
        with StreamedMatrix(store, BUDGET) as streamed:
            check(A, b, solve(streamed, b, preconditioner="block_jacobi", block_size=3))


@pytest.mark.parametrize("kind", ["scipy", "format"])
def test_nodes_without_dense_blocks_are_not_cut(kind):
    """Three fields that do not couple are stored as single entries, of which nodes of three unknowns are made."""
    line = scipy.sparse.diags_array([-1.0, 2.1, -1.0], offsets=[-1, 0, 1], shape=(1501, 1501))
    fields = scipy.sparse.csr_array(scipy.sparse.kron(line, scipy.sparse.eye_array(3)))
    matrix = fields if kind == "scipy" else CsrMatrix.from_csr(fields)

    assert any(row % 3 for row in cut_rows(CsrMatrix.from_csr(fields), 16))  # unless nodes are kept together

    result = solve(matrix, np.ones(4503), memory=40_000, preconditioner="smoothed_aggregation", block_size=3)

    assert result.converged
    assert result.bytes_streamed > 0


def test_an_operator_is_preconditioned_where_it_knows_its_diagonal(A, b):
    plain, known = (
        solve(scipy.sparse.linalg.aslinearoperator(A), b),
        solve(StreamedMatrix(HostStore.create([A]), "1 GiB"), b),
    )

    assert known.iterations < plain.iterations
    assert "applied as it is" in plain.explain()


class TestVectors:
    @pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64, np.int8, ">f8", np.float16, bool])
    def test_of_any_real_type(self, dtype, A):
        b = (np.arange(A.shape[0]) % 2).astype(dtype)

        check(A, b.astype(np.float64), solve(A, b))

    @pytest.mark.parametrize("shape", ["(n,)", "(n, 1)", "(n, 3)"])
    def test_come_back_in_their_shape(self, shape, A):
        n = A.shape[0]
        b = np.random.default_rng(0).random({"(n,)": n, "(n, 1)": (n, 1), "(n, 3)": (n, 3)}[shape])

        result = solve(A, b)

        assert result.x.shape == b.shape
        assert np.linalg.norm(b - A @ result.x) <= 1.1e-8 * np.linalg.norm(b)

    def test_in_any_order(self, A):
        B = np.random.default_rng(0).random((3, A.shape[0]))

        assert np.linalg.norm(B.T - A @ solve(A, B.T).x) <= 1.1e-8 * np.linalg.norm(B)
        wide = np.random.default_rng(0).random(2 * A.shape[0])
        check(A, wide[::2], solve(A, wide[::2]))
        check(A, np.ones(A.shape[0]), solve(A, [1] * A.shape[0]))

    def test_float32_matrix_and_vectors_are_solved_in_float32(self):
        T = scipy.sparse.diags_array([-1.0, 2.5, -1.0], offsets=[-1, 0, 1], shape=(400, 400)).tocsr()

        result = solve(T.astype(np.float32), np.ones(400, dtype=np.float32), rtol=1e-4)

        assert result.x.dtype == np.float32
        assert result.converged

    def test_a_float32_matrix_with_float64_vectors_is_solved_in_float64(self, A, b):
        narrow = A.astype(np.float32)

        result = solve(narrow, b)

        assert result.x.dtype == np.float64
        check(narrow.astype(np.float64), b, result)

    def test_pandas_come_back_with_their_labels(self, A, b):
        result = solve(A, Series(b, index="labels"))

        assert type(result.x) is Series
        assert result.x.index == "labels"
        np.testing.assert_array_equal(result.x.values, solve(A, b).x)

    def test_a_guess_saves_iterations(self, A, b, x):
        assert solve(A, b, x0=x).iterations == 0
        assert solve(A, b.reshape(-1, 1), x0=x).iterations == 0

    def test_the_order_of_the_caller_is_kept_where_another_one_is_solved_in(self, monkeypatch):
        beam = Cantilever(nodes=(80, 4, 4), dof=3)
        nodes = np.random.default_rng(0).permutation(beam.unknowns // 3)
        rows = (3 * nodes[:, None] + np.arange(3)).ravel()
        A = scipy.sparse.csr_array(beam.matrix().to_csr())[rows][:, rows]
        b, guess = np.random.default_rng(3).standard_normal((2, A.shape[0]))

        result = solve(A, b, x0=guess, memory="500 KiB", precision="float64", preconditioner="chebyshev")

        check(A, b, result)
        assert "by levels (reverse Cuthill-McKee)" in result.explain()

    def test_a_store_in_a_bad_order_is_rewritten_and_that_is_said(self, tmp_path):
        beam = Cantilever(nodes=(80, 4, 4), dof=3)
        nodes = np.random.default_rng(0).permutation(beam.unknowns // 3)
        rows = (3 * nodes[:, None] + np.arange(3)).ravel()
        A = scipy.sparse.csr_array(beam.matrix().to_csr())[rows][:, rows]
        A.sort_indices()
        b = np.random.default_rng(3).standard_normal(A.shape[0])
        FileStore.create(tmp_path / "store", (A[i : i + 240] for i in range(0, A.shape[0], 240)), shape=A.shape).close()

        result = solve(tmp_path / "store", b, memory="500 KiB", precision="float64", preconditioner="chebyshev")

        check(A, b, result)
        assert "by levels (reverse Cuthill-McKee)" in result.explain()


class TestDecisions:
    def test_are_explained(self, A, b):
        text = solve(A, b, memory=BUDGET, precision="float64").explain()

        for title in ("matrix", "budget", "ring", "symmetry", "format", "solver", "device", "outcome", "cost"):
            assert f"\n{title:<11} " in f"\n{text}"

    def test_one_conversion_and_one_look_at_the_symmetry(self, A, b, monkeypatch):
        calls = []

        def counted(name, function):
            return lambda *arguments, **options: (calls.append(name), function(*arguments, **options))[1]

        monkeypatch.setattr(Suggestion, "of_statistics", counted("conversion", Suggestion.of_statistics))
        monkeypatch.setattr(statistics, "survey", counted("survey", statistics.survey))
        for module in (
            statistics,
            symmetric_bsr,
        ):  # which search for the mirror images of a matrix that is not symmetric
            monkeypatch.setattr(module, "measure_symmetry", counted("search", module.measure_symmetry))
        for cls in (BsrMatrix, SymmetricBsrMatrix):
            monkeypatch.setattr(cls, "of_statistics", counted("of_statistics", cls.of_statistics))
        for memory in (None, BUDGET):
            calls.clear()
            solve(A, b, memory=memory)
            assert sorted(calls) == ["conversion", "of_statistics", "survey"]

    @pytest.mark.parametrize("memory", [None, BUDGET])
    def test_a_matrix_symmetric_to_rounding_is_streamed_by_half(self, memory, A, b):
        noisy = A.copy()
        noisy.data = noisy.data * (1 + 1e-15 * np.random.default_rng(0).standard_normal(noisy.nnz))

        result = solve(noisy, b, memory=memory)

        check(noisy, b, result)
        assert "to rounding: mirror images differ by up to" in result.explain()
        if memory:
            assert "symmetric BSR of 3 x 3 blocks" in result.explain()
            assert "the upper triangle stands for both" in result.explain()

    def test_the_matrix_of_the_caller_is_left_as_it_was(self, A, b):
        unsorted = FORMS["unsorted csr"](A)
        before = unsorted.copy()

        solve(unsorted, b)

        for name in ("data", "indices", "indptr"):
            np.testing.assert_array_equal(getattr(unsorted, name), getattr(before, name))

    @pytest.mark.parametrize(
        ("options", "choice"),
        [
            ({}, "block_jacobi: a coarse level would need coordinates= or near_null_space="),
            ({"preconditioner": "jacobi"}, "jacobi: as requested"),
            ({"near_null_space": True}, "multigrid: a coarse level, because its near-null space is given"),
            (
                {"coordinates": True},
                "multigrid: a coarse level, because the coordinates of the nodes are given",
            ),
            (
                {"coordinates": True, "memory": "300 KiB", "precision": "float64"},
                "smoothed_aggregation: a coarse level, because the coordinates of the nodes are given",
            ),
            ({"memory": "100 KiB"}, "predicted to be faster here than"),
        ],
    )
    def test_explain_says_why_a_preconditioner_was_chosen(self, options, choice, monkeypatch):
        monkeypatch.setattr(predicted, "_MOST_ROWS", 1000)  # factorisations have tests of their own
        beam = Cantilever(nodes=(17, 5, 5), dof=3)
        given = {"near_null_space": beam.rigid_body_modes(), "coordinates": beam.mesh.coordinates()}
        options = {name: given[name] if value is True else value for name, value in options.items()}
        [line] = [
            line
            for line in solve(beam.matrix("csr").to_csr(), beam.load(), **options).explain().splitlines()
            if line.startswith("choice ")
        ]
        assert choice in line

    def test_block_size_and_preconditioner_are_the_callers_if_given(self, A, b):
        assert "preconditioner jacobi" in solve(A, b, preconditioner="jacobi").explain()
        assert solve(A, b, block_size=1, preconditioner="jacobi").converged
        assert "preconditioner chebyshev of degree 7" in solve(A, b, preconditioner=ChebyshevSpec(degree=7)).explain()

    def test_a_monitor_stops_it(self, A, b):
        result = solve(A, b, monitor=lambda record: record.iteration == 5)

        assert result.iterations == 5
        assert result.reason.name == "STOPPED"

    def test_progress_is_shown_on_request_only(self, A, b, capsys):
        solve(A, b)
        assert capsys.readouterr() == ("", "")
        solve(A, b, progress=True)
        assert "solve" in capsys.readouterr().err

    @pytest.mark.skipif(gpu_count() > 0, reason="there is a GPU")
    def test_without_a_gpu_auto_is_the_cpu(self, A, b):
        assert "\ndevice      cpu" in penstock.solve(A, b).explain()


def diffusion(side, shift):
    """A 7-point Laplacian of a cube with the unknowns of one face fixed, and a shift as of a time step."""
    A = seven_point(side)
    natural = scipy.sparse.diags_array(A.sum(axis=1) * (np.arange(side**3) >= side**2))
    return scipy.sparse.csr_array(A - natural + shift * scipy.sparse.eye_array(side**3))


class TestCoarseLevel:
    """``auto`` chooses a coarse level where constants are slow modes, and says so."""

    @pytest.mark.parametrize("options", [{"memory": "1 MiB"}, {}])
    @pytest.mark.parametrize("shift", [0.0, 1.0])
    def test_is_chosen_where_the_matrix_is_streamed_and_maps_constants_to_zero(self, shift, options):
        A = diffusion(30, shift)
        b = np.random.default_rng(0).standard_normal(A.shape[0])

        result = solve(A, b, precision="float64", **options)

        check(A, b, result)
        chosen = "smoothed_aggregation" in result.explain()
        assert chosen == ("memory" in options and shift == 0.0)
        assert chosen == ("nearly maps constants to zero" in result.explain())

    @pytest.mark.parametrize("options", [{"memory": "1 MiB"}, {}])
    def test_is_not_for_graphs_without_a_band(self, options, monkeypatch):
        monkeypatch.setattr(slow_modes, "_LEAST_RESIDENT_ROWS", 1000)
        rng = np.random.default_rng(0)
        pattern = scipy.sparse.random_array((25_000, 25_000), density=6 / 25_000, rng=rng)
        pattern = pattern + pattern.T
        A = scipy.sparse.csr_array(scipy.sparse.diags_array(pattern.sum(axis=1) + 1e-3) - pattern)

        result = solve(A, rng.standard_normal(25_000), **options)

        assert result.converged
        assert "smoothed_aggregation" not in result.explain()

    def test_is_chosen_for_bodies_that_are_held_all_around(self):
        line = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(30, 30))
        A = scipy.sparse.csr_array(scipy.sparse.kronsum(scipy.sparse.kronsum(line, line), line))
        b = np.random.default_rng(1).standard_normal(A.shape[0])

        result = solve(A, b, precision="float64", memory="1 MiB")

        check(A, b, result)
        assert "nearly maps constants to zero" in result.explain()
        assert result.iterations <= 10

    def test_is_chosen_for_rows_in_random_order(self):
        ordered = diffusion(30, 0.0)
        rows = np.random.default_rng(0).permutation(ordered.shape[0])
        A = scipy.sparse.csr_array(ordered[rows][:, rows])
        b = np.random.default_rng(1).standard_normal(A.shape[0])

        result = solve(A, b, precision="float64", memory="1 MiB")

        check(A, b, result)
        assert "nearly maps constants to zero" in result.explain()
        assert "by levels" in result.explain()
        assert result.iterations <= 15

    def test_where_it_cannot_be_made_another_is_taken(self, monkeypatch):
        monkeypatch.setattr(slow_modes, "_LEAST_RESIDENT_ROWS", 1000)
        A = diffusion(12, 0.0)

        def refuse(*arguments):
            raise InputError("rows are too wide")

        monkeypatch.setattr(SmoothedAggregationSpec, "build", refuse)

        check(A, np.ones(A.shape[0]), solve(A, np.ones(A.shape[0])))
        with pytest.raises(InputError, match="too wide"):
            solve(A, np.ones(A.shape[0]), preconditioner="smoothed_aggregation")

    @pytest.mark.parametrize("options", [{"memory": "1 MiB"}, {}])
    @pytest.mark.parametrize("shuffled", [False, True])
    def test_coordinates_of_the_nodes_are_enough(self, options, shuffled):
        beam = Cantilever(nodes=(25, 7, 7), dof=3)
        A, b, points = beam.matrix("csr").to_csr(), beam.load(), beam.mesh.coordinates()
        if shuffled:
            nodes = np.random.default_rng(0).permutation(len(points))
            rows = (3 * nodes[:, None] + np.arange(3)).reshape(-1)
            A, b, points = scipy.sparse.csr_array(A[rows][:, rows]), b[rows], points[nodes]

        result = solve(A, b, coordinates=points, precision="float64", **options)

        check(A, b, result)
        assert ("smoothed_aggregation" if options else "multigrid") in result.explain()
        assert result.iterations <= 20

    def test_coordinates_that_do_not_fit_are_refused(self):
        beam = Cantilever(nodes=(5, 3, 3), dof=3)
        for count in (44, 40, 5, 0):  # of 45 nodes
            with pytest.raises(InputError, match=f"{count} rows do not fit a matrix of 135 rows"):
                solve(beam.matrix(), beam.load(), coordinates=beam.mesh.coordinates()[:count])
        with pytest.raises(InputError, match="coordinates must be of shape"):
            solve(beam.matrix(), beam.load(), coordinates=beam.mesh.coordinates()[1:], block_size=3)
        with pytest.raises(InputError, match="block_size must divide the rows"):
            solve(beam.matrix(), beam.load(), block_size=7)
        for preconditioner in ("auto", "multigrid"):
            with pytest.raises(InputError, match=r"near_null_space must be of shape \(135, modes\)"):
                solve(beam.matrix(), beam.load(), near_null_space=np.ones((135, 0)), preconditioner=preconditioner)
        with pytest.raises(InputError, match="has no option coordinates"):
            solve(beam.matrix(), beam.load(), preconditioner="jacobi", coordinates=beam.mesh.coordinates())

    def test_the_unknowns_of_a_node_may_stand_in_the_choice(self):
        beam = Cantilever(nodes=(9, 4, 4), dof=3)
        spec = SmoothedAggregationSpec(block_size=3, coordinates=beam.mesh.coordinates())
        A = beam.matrix().to_csr()
        with pytest.raises(InputError, match="block_size must divide the rows"):
            solve(A, beam.load(), preconditioner=SmoothedAggregationSpec(block_size=7))
        assert solve(A, beam.load(), preconditioner=spec).iterations < 20

    @pytest.mark.parametrize("options", [{"coordinates": np.zeros((144, 3))}, {"near_null_space": np.ones(432)}])
    def test_nodes_beside_a_choice_with_options_of_its_own_are_refused(self, options):
        beam = Cantilever(nodes=(9, 4, 4), dof=3)
        with pytest.raises(InputError, match="options of the preconditioner's specification"):
            solve(beam.matrix(), beam.load(), preconditioner=SmoothedAggregationSpec(block_size=3), **options)

    def test_in_memory_it_must_be_large(self, monkeypatch):
        monkeypatch.setattr(slow_modes, "_LEAST_RESIDENT_ROWS", 1000)
        A = diffusion(20, 0.0)

        result = solve(A, np.ones(A.shape[0]))

        assert "multigrid: a coarse level, because A nearly maps constants to zero" in result.explain()
        assert result.iterations <= 10
        assert "multigrid" not in solve(A, np.ones(A.shape[0]), preconditioner="jacobi").explain()


class TestRefused:
    @pytest.mark.parametrize(
        ("change", "told"),
        [
            (lambda A: A[:, :-1], "square matrix"),
            (lambda A: -A, "all diagonal entries"),
            (lambda A: A + scipy.sparse.csr_array(([1.0], ([3], [200])), A.shape), "is not symmetric"),
            (lambda A: A.astype(complex), "complex128"),
            (lambda A: "nothing-there.mtx", "does not exist"),
            (lambda A: None, "cannot use NoneType"),
        ],
    )
    def test_what_is_no_matrix_for_conjugate_gradients(self, change, told, A, b):
        with pytest.raises(InputError, match=told):
            solve(change(A), b)

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            (lambda b: b[:-1], "rows"),
            (lambda b: b + 1j, "only real numbers"),
            (lambda b: b * np.nan, "all entries must be finite"),
            (lambda b: b.reshape(-1, 1, 1), r"must have shape \(n,\)"),
        ],
    )
    def test_what_is_no_right_hand_side(self, change, told, A, b):
        with pytest.raises(InputError, match=told):
            solve(A, change(b))

    def test_options_that_no_preconditioner_has(self, A, b):
        with pytest.raises(InputError, match="has no option near_null_space"):
            solve(A, b, preconditioner="jacobi", near_null_space=np.ones((A.shape[0], 1)))
        with pytest.raises(InputError, match="unknown preconditioner"):
            solve(A, b, preconditioner="ilu")
        with pytest.raises(InputError, match="does not consist of dense blocks"):
            solve(scipy.sparse.eye_array(7, format="csr"), np.ones(7), preconditioner="block_jacobi")

    def test_memory_that_is_too_small(self, A, b):
        with pytest.raises(BudgetError, match="the smallest that does"):
            solve(A, b, memory="4 KiB")

    def test_a_guess_of_another_shape(self, A, b):
        with pytest.raises(InputError, match="x0 must have the shape of b"):
            solve(A, b, x0=b[:-1])


def test_importing_penstock_is_quick_and_offers_its_functions():
    code = (
        "import time; began = time.perf_counter(); import penstock, sys; seconds = time.perf_counter() - began\n"
        "assert not {'numpy', 'numba', 'scipy'} & set(sys.modules)\n"
        "assert dir(penstock) == sorted(penstock.__all__), dir(penstock)\n"
        "assert {'solve', 'multiply_store', '__version__', 'PenstockError', 'BudgetError'} <= set(dir(penstock))\n"
        "assert not any('numba' in name or name == 'penstock.spmv' for name in sys.modules), 'dir loads nothing'\n"
        "assert all(hasattr(penstock, name) for name in dir(penstock))\n"
        "from penstock.spmv import BudgetError; assert penstock.BudgetError is BudgetError\n"
        "from penstock import multiply_store, solve; assert penstock.solve is solve and callable(multiply_store)\n"
        "print(seconds)"
    )

    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert float(ran.stdout) < 0.1


@pytest.mark.gpu
@pytest.mark.skipif(gpu_count() == 0, reason="no CUDA device")
class TestOnAGpu:
    @pytest.mark.parametrize("memory", [None, BUDGET])
    @pytest.mark.parametrize("columns", [1, 4])
    def test_solutions_come_back_where_the_right_hand_sides_live(self, memory, columns, A):
        import cupy
        import cupyx.scipy.sparse

        B = np.random.default_rng(0).random((A.shape[0], columns))
        for matrix in (A, cupyx.scipy.sparse.csr_matrix(scipy.sparse.csr_matrix(A))):
            for rhs in (B, cupy.asarray(B)):
                result = penstock.solve(matrix, rhs, memory=memory)
                assert isinstance(result.x, type(rhs))
                X = cupy.asnumpy(result.x)
                assert np.linalg.norm(B - A @ X) <= 1.1e-8 * np.linalg.norm(B)
                assert "device      cuda:0" in result.explain()
                assert (result.bytes_streamed > 0) == (memory is not None)

    def test_a_store_and_a_penstock_matrix(self, A, b, tmp_path):
        FileStore.create(tmp_path / "store", BEAM.subdivisions(8), shape=A.shape).close()

        check(A, b, penstock.solve(tmp_path / "store", b, memory=BUDGET))
        matrix: SparseMatrix = BsrMatrix.from_csr(A)
        check(A, b, penstock.solve(matrix.to_device("cuda"), b))


def test_several_right_hand_sides_with_a_coarse_level_are_solved():
    beam = Cantilever(nodes=(17, 5, 5), dof=3)
    B = np.stack([beam.load(), 2 * beam.load(), np.ones(beam.unknowns)], axis=1)
    result = penstock.solve(beam.matrix("csr").to_csr(), B, coordinates=beam.mesh.coordinates())
    assert result.converged
    assert "multigrid" in result.explain()


@pytest.mark.parametrize("memory", [None, "1 MiB"])
def test_the_parts_of_a_call_add_up_to_its_time(memory):
    beam = Cantilever(nodes=(25, 7, 7), dof=3)
    A, b, points = beam.matrix("csr").to_csr(), beam.load(), beam.mesh.coordinates()
    options = {"coordinates": points, "memory": memory}
    solve(A, b, **options)

    shares = []
    for _ in range(3):  # other processes may run between two parts
        began = time.perf_counter()
        result = solve(A, b, **options)
        seconds = time.perf_counter() - began
        named = (name for name in result.timings if name.endswith("ing") or name in ("setting up", "rest"))
        parts = {name: result.timings[name] for name in named}
        shares.append(sum(parts.values()) / seconds)
        assert {"reading", "looking", "planning", "converting", "moving", "setting up", "iterating"} <= set(parts)
        assert all(of >= 0 for of in parts.values())
        assert "\nof which    " in result.explain()

    assert 0.95 <= max(shares) <= 1
