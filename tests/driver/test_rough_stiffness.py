"""``is_rough`` is true where stiffness jumps between nodes, and false for uniform and flat meshes."""

import numpy as np
import pytest
import scipy.sparse
from kernel_targets import gpu_count

from penstock.driver.rough_stiffness import is_rough
from penstock.fem import Cantilever, LognormalMaterial, TwoPhaseMaterial
from penstock.spmv import CsrMatrix


def rough(body):
    return is_rough(CsrMatrix.from_csr(body.matrix().to_csr()), body.mass().diagonal(), body.dof)


@pytest.mark.parametrize(
    ("material", "expected"),
    [
        (None, False),
        (LognormalMaterial(sigma=0.5), False),
        (TwoPhaseMaterial(contrast=1000.0, fraction=0.5), True),
        (TwoPhaseMaterial(contrast=100.0, fraction=0.1), True),
    ],
)
@pytest.mark.parametrize("dof", [1, 3])
def test_materials(material, expected, dof):
    options = {} if material is None else {"material": material}
    assert rough(Cantilever(12, dof=dof, **options)) == expected


def test_flat_elements_and_surfaces_are_smooth():
    assert not rough(Cantilever((20, 20, 3), lengths=(1.0, 1.0, 0.01), dof=3))


def test_without_masses_the_stiffness_alone_counts():
    A = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(500, 500)).tocsr()
    scale = scipy.sparse.diags_array(np.where(np.arange(500) % 2, 1.0, 10.0))
    assert not is_rough(CsrMatrix.from_csr(A), None, 1)
    assert is_rough(CsrMatrix.from_csr((scale @ A @ scale).tocsr()), None, 1)


def test_matrices_without_diagonals_or_entries_are_not_judged():
    off = scipy.sparse.coo_array((np.ones(2), ([0, 1], [1, 0])), shape=(4, 4)).tocsr()
    assert not is_rough(CsrMatrix.from_csr(off), None, 2)
    assert not is_rough(CsrMatrix.from_csr(scipy.sparse.csr_array((6, 6))), None, 3)


@pytest.mark.gpu
@pytest.mark.skipif(not gpu_count(), reason="no CUDA device")
def test_on_a_gpu():
    for contrast, expected in ((1.0, False), (1000.0, True)):
        body = Cantilever(12, material=TwoPhaseMaterial(contrast=contrast, fraction=0.5))
        K = CsrMatrix.from_csr(body.matrix().to_csr()).to_device("cuda")
        assert is_rough(K, body.mass().diagonal(), 3) == expected
