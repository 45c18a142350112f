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
