"""Torch differentiates through ``penstock.torch.solve``."""

import numpy as np
import pytest
import scipy.sparse
from kernel_targets import gpu_count

import penstock

torch = pytest.importorskip("torch")

import penstock.torch  # noqa: E402 - needs Torch
from penstock.fem import Cantilever  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")  # CSR is called a beta feature

N = 12
LINE = scipy.sparse.diags_array([-1.0, 3.0, -1.0], offsets=[-1, 0, 1], shape=(N, N), format="coo")
PLACES = torch.tensor(np.stack(LINE.coords))
PLACE = {place: number for number, place in enumerate(zip(*LINE.coords, strict=True))}
MIRRORED = torch.tensor([PLACE[j, i] for i, j in zip(*LINE.coords, strict=True)])


def matrix(values, layout="coo"):
    """Return the matrix of these values, made symmetric, as a perturbation of one value alone would not be."""
    A = torch.sparse_coo_tensor(PLACES, (values + values[MIRRORED]) / 2, (N, N))
    return A.to_sparse_csr() if layout == "csr" else A


def values(**options):
    return torch.tensor(LINE.data, **options).requires_grad_()


def right_hand_side(*shape, **options):
    return torch.tensor(np.random.default_rng(0).normal(size=(N, *shape)), **options).requires_grad_()


@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_gradients_are_those_of_finite_differences(layout, shape):
    def solution(v, b):
        return penstock.torch.solve(matrix(v, layout), b, rtol=1e-13, device="cpu")

    assert torch.autograd.gradcheck(solution, (values(), right_hand_side(*shape)))


@pytest.mark.parametrize("is_prepared", [False, True])
def test_other_matrices_give_the_gradient_of_b(is_prepared):
    A = penstock.prepare(LINE, device="cpu") if is_prepared else LINE
    assert torch.autograd.gradcheck(lambda b: penstock.torch.solve(A, b, rtol=1e-13), right_hand_side(2))


def test_a_matrix_that_is_a_leaf_gets_a_symmetric_gradient_of_its_layout():
    for layout in ("coo", "csr"):
        A, b = matrix(values(), layout).detach().requires_grad_(), right_hand_side().detach()
        x = penstock.torch.solve(A, b, rtol=1e-12, device="cpu")
        (x**2).sum().backward()
        adjoint = torch.linalg.solve(A.detach().to_dense(), 2 * x.detach())
        dense = -(torch.outer(adjoint, x.detach()) + torch.outer(x.detach(), adjoint)) / 2
        assert A.grad.layout == A.layout
        torch.testing.assert_close(A.grad.to_dense(), dense * (A.detach().to_dense() != 0), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("types", [("float32", "float32"), ("float32", "float64"), ("float64", "float32")])
def test_gradients_have_the_types_of_what_they_are_of(types):
    of_matrix, of_b = (getattr(torch, name) for name in types)
    v, b = values(dtype=of_matrix), right_hand_side(2, dtype=of_b)
    x = penstock.torch.solve(matrix(v), b, device="cpu")
    x.sum().backward()
    assert (x.dtype, b.grad.dtype, v.grad.dtype) == (of_b, of_b, of_matrix)
    exact = torch.linalg.solve(matrix(values()).detach().to_dense(), torch.ones(N, 2, dtype=torch.float64))
    torch.testing.assert_close(b.grad.double(), exact, rtol=1e-5, atol=1e-6)


def test_second_derivatives_are_refused():
    b = right_hand_side()
    loss = (penstock.torch.solve(matrix(values()), b, device="cpu") ** 2).sum()
    with pytest.raises(penstock.InputError, match="only first derivatives"):
        torch.autograd.grad(loss, b, create_graph=True)


def test_a_system_that_was_updated_before_the_backward_pass_is_refused():
    system = penstock.prepare(LINE, device="cpu")
    x = penstock.torch.solve(system, right_hand_side())
    system.update(2.0 * LINE)
    with pytest.raises(penstock.InputError, match="from version 0 of its values to 1"):
        x.sum().backward()


def test_values_that_were_changed_in_place_before_the_backward_pass_are_refused():
    A = matrix(values(), "csr").detach().requires_grad_()
    x = penstock.torch.solve(A, right_hand_side(), device="cpu")
    with torch.no_grad():
        A.values().mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.sum().backward()


def test_both_solves_must_converge():
    b = torch.zeros(N, dtype=torch.float64, requires_grad=True)  # whose solution needs no iteration
    x = penstock.torch.solve(LINE, b, maxiter=1, device="cpu")
    with pytest.raises(penstock.NotConvergedError):
        (x * right_hand_side().detach()).sum().backward()
    with pytest.raises(penstock.NotConvergedError):
        penstock.torch.solve(LINE, right_hand_side(), maxiter=1, device="cpu")


def test_plain_solves_refuse_what_requires_gradients():
    b = right_hand_side()
    with pytest.raises(penstock.InputError, match=r"penstock\.torch\.solve"):
        penstock.solve(LINE, b)
    with pytest.raises(penstock.InputError, match=r"A requires gradients"):
        penstock.solve(matrix(values()), b.detach())
    with torch.no_grad():
        assert penstock.solve(matrix(values()), b, device="cpu").converged


def test_arguments_that_cannot_pass_gradients_on_are_refused():
    with pytest.raises(penstock.InputError, match=r"has the layout torch\.strided; give A\.to_sparse_csr\(\)"):
        penstock.torch.solve(matrix(values()).to_dense(), right_hand_side())
    with pytest.raises(penstock.InputError, match="shape"):
        penstock.torch.solve(torch.stack([torch.eye(N)] * 2).to_sparse_csr().requires_grad_(), right_hand_side())
    for b in (torch.ones(N, dtype=torch.int64), np.ones(N)):
        with pytest.raises(penstock.InputError, match="b must be a tensor of float64 or float32, not"):
            penstock.torch.solve(LINE, b)


@pytest.mark.gpu
@pytest.mark.skipif(not gpu_count() or not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("of_matrix", ["cpu", "cuda"])
def test_gradients_on_a_gpu(of_matrix):
    v, b = values(device=of_matrix), right_hand_side(3, device="cuda")
    A = torch.sparse_coo_tensor(PLACES.to(of_matrix), v, (N, N))
    penstock.torch.solve(A, b, device="cuda").square().sum().backward()
    gradients = v.grad.cpu(), b.grad.cpu()
    v, b = values(), right_hand_side(3)
    penstock.torch.solve(torch.sparse_coo_tensor(PLACES, v, (N, N)), b, device="cpu").square().sum().backward()
    torch.testing.assert_close(gradients, (v.grad, b.grad), rtol=1e-6, atol=1e-9)


class TestEigsh:
    """Derivatives of eigenvalues; those of each problem are simple."""

    masses = 1.0 + np.random.default_rng(5).random(N)

    @pytest.mark.parametrize("layout", ["coo", "csr"])
    @pytest.mark.parametrize("of_mass", ["diagonal", "matrix"])
    def test_gradients_are_those_of_finite_differences(self, layout, of_mass):
        start = self.masses if of_mass == "diagonal" else LINE.data + 9.0 * (LINE.coords[0] == LINE.coords[1])
        masses = torch.tensor(start).requires_grad_()

        def lowest(v, m):
            M = m if of_mass == "diagonal" else matrix(m, layout)
            return penstock.torch.eigsh(matrix(v, layout), 3, M, device="cpu")[0]

        assert torch.autograd.gradcheck(lowest, (values(), masses), rtol=1e-5, atol=1e-7)

    def test_gradients_of_a_larger_problem_by_iterations(self):
        beam = Cantilever(nodes=(17, 5, 6), dof=3, lengths=(4.0, 1.0, 1.3))
        K, M, X = beam.matrix().to_csr(), beam.mass().to_csr(), beam.mesh.coordinates()
        tensor = torch.sparse_csr_tensor(*map(torch.tensor, (K.indptr, K.indices, K.data)), K.shape).requires_grad_()
        found, vectors = penstock.torch.eigsh(tensor, 3, M, coordinates=X, tol=1e-8, device="cpu")
        found[1].backward()
        x = vectors[:, 1].numpy()
        rows, columns = K.tocoo().coords
        np.testing.assert_allclose(tensor.grad.values().numpy(), x[rows] * x[columns], rtol=1e-12, atol=1e-15)
        assert not vectors.requires_grad

    def test_types_and_devices(self):
        v = values(dtype=torch.float32)
        found, vectors = penstock.torch.eigsh(matrix(v), 2, torch.tensor(self.masses), device="cpu")
        found.sum().backward()
        assert (found.dtype, vectors.dtype, v.grad.dtype) == (torch.float64, torch.float64, torch.float32)

    def test_second_derivatives_are_refused(self):
        found, _ = penstock.torch.eigsh(matrix(v := values()), 2, device="cpu")
        with pytest.raises(penstock.InputError, match="only first derivatives"):
            torch.autograd.grad(found[0], v, create_graph=True)

    def test_plain_eigsh_refuses_what_requires_gradients(self):
        with pytest.raises(penstock.InputError, match=r"K requires gradients, .*penstock\.torch\.eigsh"):
            penstock.eigsh(matrix(values()), 1)
        with pytest.raises(penstock.InputError, match=r"M requires gradients, .*penstock\.torch\.eigsh"):
            penstock.eigsh(LINE, 1, torch.tensor(self.masses).requires_grad_())
        assert penstock.eigsh(LINE, 1, torch.tensor(self.masses), device="cpu").converged

    @pytest.mark.gpu
    @pytest.mark.skipif(not gpu_count() or not torch.cuda.is_available(), reason="no CUDA device")
    def test_gradients_on_a_gpu(self):
        beam = Cantilever(nodes=(17, 5, 6), dof=3, lengths=(4.0, 1.0, 1.3))
        K, M, X = beam.matrix().to_csr(), beam.mass().to_csr(), beam.mesh.coordinates()
        gradients = []
        for device in ("cuda", "cpu"):
            arrays = (torch.tensor(of, device=device) for of in (K.indptr, K.indices, K.data))
            tensor = torch.sparse_csr_tensor(*arrays, K.shape).requires_grad_()
            found, vectors = penstock.torch.eigsh(tensor, 3, M, coordinates=X, tol=1e-8, device=device)
            found[1].backward()
            assert vectors.device.type == device
            gradients.append(tensor.grad.values().cpu())
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-8)
