"""Arrays of Torch and JAX come in and go out through DLPack; a stand-in where they are not installed."""

import sys
import types

import numpy as np
import pytest
import scipy.sparse
from kernel_targets import gpu_count

import penstock
from penstock.spmv import InputError

LINE = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(60, 60), format="csr")


class Tensor:
    """What DLPack needs of an array, and nothing else."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.fixture(autouse=True)
def other_library(monkeypatch):
    library = types.ModuleType("tensors")
    library.from_dlpack = lambda array: Tensor(np.from_dlpack(array))
    monkeypatch.setitem(sys.modules, "tensors", library)
    monkeypatch.setattr(Tensor, "__module__", "tensors.core")


@pytest.mark.parametrize("shape", [(60,), (60, 3)])
def test_the_solution_is_of_the_library_of_the_right_hand_side(shape):
    b = np.random.default_rng(0).normal(size=shape)
    result = penstock.solve(LINE, Tensor(b), x0=Tensor(np.zeros(shape)))
    assert isinstance(result.x, Tensor)
    np.testing.assert_allclose(LINE @ result.x.array, b, atol=1e-6)
    assert "converged" in result.explain()


def test_a_dense_matrix_of_another_library_is_taken():
    assert penstock.solve(Tensor(LINE.toarray()), np.ones(60)).converged


def test_complex_numbers_are_refused_as_ever():
    with pytest.raises(InputError, match="only real numbers"):
        penstock.solve(LINE, Tensor(np.ones(60, dtype=complex)))


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not gpu_count(), reason="no CUDA device")]),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sparse", [False, True])
def test_torch(device, sparse):
    torch = pytest.importorskip("torch")
    b = torch.arange(60, dtype=torch.float64, device=device)
    A = torch.tensor(LINE.toarray(), device=device)
    result = penstock.solve(A.to_sparse_csr() if sparse else A, b, device=device)
    assert isinstance(result.x, torch.Tensor)
    assert result.x.device == b.device
    assert torch.linalg.norm(A @ result.x - b) <= 1e-7 * torch.linalg.norm(b)


@pytest.mark.parametrize("device", DEVICES)
def test_jax(device):
    jax = pytest.importorskip("jax")
    b = jax.device_put(np.arange(60, dtype=np.float32), jax.devices("cpu" if device == "cpu" else "gpu")[0])
    result = penstock.solve(LINE, b, device=device, rtol=1e-4)
    assert isinstance(result.x, jax.Array)
    np.testing.assert_allclose(LINE @ np.asarray(result.x), np.arange(60), atol=0.2)


class BCSR:
    """What a sparse matrix of JAX has, filled up as ``jit`` leaves it."""

    ndim, n_batch, n_dense, shape = 2, 0, 0, LINE.shape
    data = np.append(LINE.data, [7.0, 7.0])
    indices = np.append(LINE.indices, [60, 60])
    indptr = LINE.indptr

    def __matmul__(self, x):
        raise AssertionError("the matrix is not converted")


BCSR.__module__ = "jax.experimental.sparse.bcsr"


def test_a_sparse_matrix_of_jax_becomes_one_of_numbers():
    result = penstock.solve(BCSR(), np.ones(60), device="cpu")
    np.testing.assert_allclose(LINE @ result.x, np.ones(60), atol=1e-6)


def test_several_matrices_in_one_are_refused():
    batch = BCSR()
    batch.n_batch = 1
    with pytest.raises(InputError, match="1 batch and 0 dense dimensions is no matrix"):
        penstock.solve(batch, np.ones(60))


@pytest.fixture
def recording(monkeypatch):
    """Stand in for Torch, which records or does not."""
    library = types.ModuleType("torch")
    library.is_grad_enabled = lambda: library.records
    library.records = True
    monkeypatch.setitem(sys.modules, "torch", library)
    return library


def test_what_requires_gradients_is_refused(recording):
    b, A = Tensor(np.ones(60)), Tensor(LINE.toarray())
    b.requires_grad = A.requires_grad = True
    system = penstock.prepare(LINE, device="cpu")
    for call in (lambda: penstock.solve(LINE, b), lambda: system.solve(b)):
        with pytest.raises(
            InputError, match=r"b requires gradients, .*penstock\.torch\.solve\(A, b\), or give b\.detach\(\)"
        ):
            call()
    for call in (lambda: penstock.solve(A, np.ones(60)), lambda: system.update(A)):
        with pytest.raises(InputError, match=r"A requires gradients"):
            call()
    recording.records = False
    assert penstock.solve(LINE, b, device="cpu").converged


def test_what_jax_traces_is_refused(monkeypatch):
    library = types.ModuleType("jax")
    library.core = types.SimpleNamespace(Tracer=Tensor)
    monkeypatch.setitem(sys.modules, "jax", library)
    matrix = BCSR()
    matrix.data = Tensor(matrix.data)
    with pytest.raises(InputError, match=r"b is traced by JAX.*penstock\.jax\.solve"):
        penstock.solve(LINE, Tensor(np.ones(60)))
    with pytest.raises(InputError, match=r"A is traced by JAX"):
        penstock.solve(matrix, np.ones(60))


@pytest.mark.parametrize("kind", ["BCSR", "BCOO"])
def test_sparse_jax(kind):
    sparse = pytest.importorskip("jax.experimental.sparse")
    A = getattr(sparse, kind).from_scipy_sparse(LINE.astype(np.float32))
    result = penstock.solve(A, np.ones(60, dtype=np.float32), device="cpu")
    np.testing.assert_allclose(LINE @ result.x, np.ones(60), atol=1e-3)
    if kind == "BCOO":  # entries given twice, and places outside the matrix that fill it up
        data, indices = np.append(LINE.data, [0.5, 0.5, 9.0]), np.concatenate([A.indices, [[3, 3], [3, 3], [60, 60]]])
        B = sparse.BCOO((data.astype(np.float32), indices), shape=LINE.shape)
        expected = LINE + scipy.sparse.csr_array(([1.0], ([3], [3])), shape=LINE.shape)
        np.testing.assert_allclose(expected @ penstock.solve(B, np.ones(60)).x, np.ones(60), atol=1e-6)
