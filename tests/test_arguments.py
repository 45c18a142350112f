"""Arguments that cannot be meant are refused with what was expected, wherever they would be taken or end in another library."""

import numpy as np
import pytest
import scipy.sparse

import penstock
from penstock.distributed import columns_within
from penstock.fem import BoxMesh, Cantilever, face_load
from penstock.solvers import SmoothedAggregationSpec, galerkin, galerkin_pattern, multiply, product_pattern
from penstock.spmv import BsrMatrix, CsrMatrix, Device, InputError, suggest_format
from penstock.streaming import FileStore

MESH = BoxMesh(nodes=3)
LINE = scipy.sparse.diags_array([-1.0, 4.0, -1.0], offsets=[-1, 0, 1], shape=(6, 6)).tocsr()


def traction(points):
    return points[:, :1]


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        (lambda: suggest_format(None), "NoneType is no sparse matrix"),
        (lambda: suggest_format(np.eye(3)), "ndarray is no sparse matrix"),
        (lambda: Device("gpu"), "unknown device 'gpu'"),
        (lambda: Device("cuda", -1), "unknown device"),
        (lambda: face_load(MESH, 5, 0, traction, 1), "axis 5"),
        (lambda: face_load(MESH, 0, 7, traction, 1), "side 7"),
        (lambda: face_load(MESH, 0, 1, traction, 1, order=0), "Gauss points"),
        (lambda: columns_within(Cantilever(nodes=4).matrix(), slice(0, 10**5)), "out of range"),
        (lambda: columns_within(Cantilever(nodes=4).matrix(), slice(1, 10)), "cut blocks of 3"),
    ],
)
def test_it_is_refused(call, advice):
    with pytest.raises(InputError, match=advice):
        call()


def damaged(change):
    """A matrix whose arrays do not fit each other; SciPy would read or write beyond them."""
    A = scipy.sparse.diags_array([-1.0, 4.0, -1.0], offsets=[-1, 0, 1], shape=(24, 24))
    A = A.todia() if change == "diagonals" else A.tolil() if "list" in change else A.tocsr()
    if change == "diagonals":
        A.offsets = A.offsets[:2]
    elif change == "short list":
        A.rows[3] = [2]
    elif change == "few lists":
        A.rows, A.data = A.rows[:5], A.data[:5]
    elif change == "no list":
        A.rows[3] = 7
    elif change == "far list":
        A.rows[3] = [2, 3, 10**8]
    else:
        A.indices[3] = -(10**9)
    return A


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ("diagonals", "2 offsets of diagonals and values of shape"),
        ("short list", "1 columns and 3 values in row 3; it is damaged"),
        ("few lists", "does not have a list of columns and one of values for each of 24 rows"),
        ("no list", "does not have a list of columns and one of values for each of 24 rows"),
        ("far list", "a column index is 100000000, outside 0 to 23"),
        ("indices", "column index"),
    ],
)
def test_a_damaged_matrix_is_refused(change, advice):
    with pytest.raises(InputError, match=advice):
        penstock.solve(damaged(change), np.ones(24), preconditioner="jacobi")
    with pytest.raises(InputError, match=advice):
        penstock.fix(damaged(change), np.ones(24), [1])


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.int32, np.int64])
def test_block_sizes_may_be_integers_of_numpy(kind):
    A = scipy.sparse.kron(LINE, np.eye(2)).tocsr()
    for preconditioner in ("block_jacobi", "gauss_seidel"):
        assert penstock.solve(A, np.ones(12), block_size=kind(2), preconditioner=preconditioner, device="cpu").converged
    assert BsrMatrix.from_csr(A, block_size=kind(2)).shape == (12, 12)


@pytest.mark.parametrize("values_dtype", ["i4", "f2", complex, "x"])
def test_values_are_stored_in_float64_or_float32(values_dtype):
    for stored in (CsrMatrix, BsrMatrix):
        with pytest.raises(InputError, match="values_dtype must be float32 or float64, not"):
            stored.from_csr(LINE, values_dtype=values_dtype)


def test_a_function_that_returns_nothing_is_named():
    for more in ({"b": np.ones((6, 2))}, {"method": "minres"}):
        with pytest.raises(InputError, match="the operator's function returned NoneType"):
            penstock.solve(LINE, **{"b": np.ones(6), "device": "cpu", "preconditioner": lambda r: None, **more})


def test_patterns_of_other_products_are_refused():
    with pytest.raises(InputError, match="pattern must be a ProductPattern"):
        multiply(LINE, LINE, pattern=galerkin_pattern(LINE, LINE))
    with pytest.raises(InputError, match="pattern must be a GalerkinPattern"):
        galerkin(LINE, LINE, pattern=product_pattern(LINE, LINE))


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ({"block_size": "2"}, "block_size must be a whole number of rows, 1 or more, or 'auto', not '2'"),
        ({"block_size": 0}, "block_size must be .* 1 or more, or 'auto', not 0"),
        ({"block_size": 0, "preconditioner": "smoothed_aggregation"}, "block_size must be .* not 0"),
        ({"block_size": 9, "preconditioner": "multigrid"}, "block_size must be a whole number, 1 to 8, not 9"),
        ({"rtol": None}, "rtol must be a number, finite and not negative, not None"),
        ({"rtol": "1e-8"}, "rtol must be a number, finite and not negative, not '1e-8'"),
        ({"rtol": [1e-8, 1e-8]}, "rtol must be a number"),
        ({"atol": None}, "atol must be a number, finite and not negative, not None"),
        ({"maxiter": "x"}, "maxiter must be a whole number and not negative, not 'x'"),
        ({"block_size": [1]}, "block_size must be .* not a list"),
        ({"block_size": 2.0}, "block_size must be .* not 2.0"),
        ({"preconditioner": np.eye(3)}, "the preconditioner has shape"),
        ({"preconditioner": np.ones(6)}, "M is a vector, not an operator"),
        ({"preconditioner": []}, "preconditioner must be 'auto', a registered name .* not a list"),
        ({"device": None}, "device must be 'auto', 'cpu', .* not None"),
        ({"near_null_space": 5}, "near_null_space must be an array of real numbers of shape .* not 5"),
        ({"near_null_space": np.array(["a"] * 6)}, "near_null_space must be .* not a ndarray of shape .* type <U1"),
        ({"near_null_space": [[1.0], [1.0, 2.0]]}, "near_null_space must be"),
        ({"coordinates": 5}, r"coordinates must be .* of shape \(nodes, 2\) or \(nodes, 3\), not 5"),
        ({"coordinates": "x"}, "coordinates must be .* not 'x'"),
        ({"near_null_space": LINE}, "near_null_space must be an array of real numbers .* not a csr_array"),
        ({"preconditioner": SmoothedAggregationSpec(aggregates=(-2, -3))}, "does not have the 6 nodes"),
        ({"folder": 5}, "folder must be the path of a folder, not 5"),
        ({"b": {1: 2}}, "b has type object"),
        ({"b": [[1.0], [1.0, 2.0]]}, "b must be an array of real numbers"),
    ],
)
def test_an_argument_of_solve_is_refused(given, advice):
    with pytest.raises(InputError, match=advice):
        penstock.solve(LINE, **{"b": np.ones(6), "device": "cpu", **given})


@pytest.mark.parametrize("given", [{"rtol": None}, {"atol": "x"}, {"maxiter": -1}])
def test_an_argument_of_a_prepared_solve_is_refused(given):
    with (
        penstock.prepare(LINE, device="cpu") as system,
        pytest.raises(InputError, match=f"{next(iter(given))} must be"),
    ):
        system.solve(np.ones(6), **given)


def test_formats_of_penstock_are_ranked_too():
    A = Cantilever(nodes=5).matrix()
    assert isinstance(A, BsrMatrix)
    assert suggest_format(A)[0].format_name == "bsr"


def test_a_store_is_multiplied_by_its_path(tmp_path):
    A = scipy.sparse.diags_array([1.0, 2.0, 3.0]).tocsr()
    FileStore.create(tmp_path / "a", A).close()
    with penstock.multiply_store(tmp_path / "a", A, tmp_path / "b") as squares:
        assert squares.index.nnz == 3
