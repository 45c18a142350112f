"""The transfer to a coarse level agrees with dense matrices, on every kind of device."""

import numpy as np
import pytest
from kernel_targets import TARGETS

from penstock.solvers.coarse.aggregates import Aggregates
from penstock.solvers.coarse.tentative import Tentative
from penstock.spmv import CPU
from penstock.spmv.compilation.table import find_kernel


def scattered(nodes, count, seed=0):
    """Aggregates of different sizes whose nodes are scattered, among them one of a single node."""
    of_node = np.random.default_rng(seed).integers(1, count, nodes)
    of_node[nodes // 2] = 0
    _, of_node = np.unique(of_node, return_inverse=True)
    return Aggregates(of_node.astype(np.int32))


def transfer(size, modes, nodes=90, count=7):
    rng = np.random.default_rng(size + modes)
    candidates = rng.standard_normal((nodes * size, modes))
    free = rng.random(nodes * size) > 0.1
    return Tentative(candidates, free, scattered(nodes, count), size, CPU), candidates * free[:, None]


def dense(T):
    matrix = np.zeros((len(T.basis), T.unknowns))
    for node, aggregate in enumerate(T.of_node):
        rows = slice(node * T.block_size, (node + 1) * T.block_size)
        matrix[rows, aggregate * T.modes : (aggregate + 1) * T.modes] = T.blocks[node]
    return matrix


def members(T):
    order = np.argsort(T.of_node, kind="stable").astype(np.int32)
    return np.searchsorted(T.of_node[order], np.arange(T.aggregates.count + 1)).astype(np.int64), order


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("size", "modes"), [(1, 1), (3, 6), (6, 6), (2, 3)])
@pytest.mark.parametrize("vectors", [None, 1, 3, 8, 40])
def test_prolongation_and_restriction(target, size, modes, vectors):
    T, _ = transfer(size, modes)
    rng, shape = np.random.default_rng(3), () if vectors is None else (vectors,)
    coarse, fine = rng.standard_normal((T.unknowns, *shape)), rng.standard_normal((len(T.basis), *shape))
    offsets, order = members(T)

    with target.running():
        kind, put = target.device_kind, target.put
        up, down = put(np.full_like(fine, np.nan)), put(np.full_like(coarse, np.nan))
        basis = put(T.basis)
        find_kernel("aggregates", "prolong", kind)(put(T.of_node), basis, put(coarse), up)
        find_kernel("aggregates", "restrict", kind)(put(offsets), put(order), basis, put(fine), down)

    assert np.allclose(target.get(up), dense(T) @ coarse, atol=1e-14)
    assert np.allclose(target.get(down), dense(T).T @ fine, atol=1e-13)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("size", "modes"), [(1, 1), (3, 6), (6, 6), (2, 3)])
def test_a_basis_is_orthonormal_and_spans_what_was_given(target, size, modes):
    T, candidates = transfer(size, modes)
    candidates[:, -1] = candidates[:, 0] * (3.0 if modes > 1 else 1.0)  # a dependent mode adds nothing
    offsets, order = members(T)
    factors = np.zeros((T.aggregates.count, modes, modes))

    with target.running():
        basis, on_target = target.put(candidates.copy()), target.put(factors)
        find_kernel("aggregates", "orthonormalise", target.device_kind)(
            target.put(offsets), target.put(order), basis, on_target
        )
    T.basis, factors = target.get(basis), target.get(on_target)

    matrix = dense(T)
    present = np.einsum("aii->ai", factors).reshape(-1) > 0
    if modes > 1:
        assert not present.reshape(-1, modes)[:, -1].any()
    gram = matrix.T @ matrix
    assert np.allclose(gram, np.diag(present), atol=1e-13)
    assert np.allclose(matrix @ factors.reshape(T.unknowns, modes), candidates, atol=1e-12)
