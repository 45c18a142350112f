"""Elements of a user's own: quadratic tetrahedra and bars, on every target, in every cut, and solved; and what is refused."""

from dataclasses import replace

import numpy as np
import nvrtc
import pytest
from element_slabs import make
from kernel_targets import DEVICES, TARGETS, gpu_count
from numba import njit

import penstock
from penstock.fem.elasticity import lame_parameters
from penstock.fem.element_rows import ELEMENT_ROW_KERNELS, FORMATS
from penstock.spmv import InputError

#: The corners at the ends of each edge of a tetrahedron, whose midpoints are nodes 4 to 9, and the points of degree 2.
EDGES = np.array([(0, 1), (1, 2), (2, 0), (0, 3), (1, 3), (2, 3)])
NEAR, FAR = 0.5854101966249685, 0.1381966011250105

BAR = """
__device__ void element_row(const double (*x)[3], const double* parameters, int own, double* blocks)
{
    double along[3], length = 0.0;
    for (int c = 0; c < 3; ++c) {
        along[c] = x[1][c] - x[0][c];
        length += along[c] * along[c];
    }
    const double scale = parameters[0] / (length * sqrt(length));
    for (int b = 0; b < 2; ++b)
        for (int r = 0; r < 3; ++r)
            for (int c = 0; c < 3; ++c)
                blocks[b * 9 + r * 3 + c] += (b == own ? scale : -scale) * (along[r] * along[c]);
}
"""

QUADRATIC = """
__constant__ int EDGES[6][2] = {{0, 1}, {1, 2}, {2, 0}, {0, 3}, {1, 3}, {2, 3}};

__device__ void element_row(const double (*x)[3], const double* parameters, int own, double* blocks)
{
    double corner[4][3], volume = 0.0;
    for (int e = 1; e < 4; ++e) {
        const double *u = x[e % 3 + 1], *v = x[(e + 1) % 3 + 1];
        for (int c = 0; c < 3; ++c) {
            const int i = (c + 1) % 3, j = (c + 2) % 3;
            corner[e][c] = (u[i] - x[0][i]) * (v[j] - x[0][j]) - (u[j] - x[0][j]) * (v[i] - x[0][i]);
        }
    }
    for (int c = 0; c < 3; ++c) volume += (x[1][c] - x[0][c]) * corner[1][c];
    for (int c = 0; c < 3; ++c) {
        for (int e = 1; e < 4; ++e) corner[e][c] /= volume;
        corner[0][c] = -(corner[1][c] + corner[2][c] + corner[3][c]);
    }
    for (int point = 0; point < 4; ++point) {
        double g[10][3];
        for (int e = 0; e < 4; ++e)
            for (int c = 0; c < 3; ++c)
                g[e][c] = (4 * (e == point ? 0.5854101966249685 : 0.1381966011250105) - 1) * corner[e][c];
        for (int e = 0; e < 6; ++e) {
            const int i = EDGES[e][0], j = EDGES[e][1];
            const double at_i = i == point ? 0.5854101966249685 : 0.1381966011250105;
            const double at_j = j == point ? 0.5854101966249685 : 0.1381966011250105;
            for (int c = 0; c < 3; ++c) g[4 + e][c] = 4 * (at_i * corner[j][c] + at_j * corner[i][c]);
        }
        const double weight = fabs(volume) / 24;
        for (int b = 0; b < 10; ++b) {
            double dot = 0.0;
            for (int c = 0; c < 3; ++c) dot += g[own][c] * g[b][c];
            for (int r = 0; r < 3; ++r)
                for (int c = 0; c < 3; ++c)
                    blocks[b * 9 + r * 3 + c] += weight * (parameters[0] * g[own][r] * g[b][c] +
                                                           parameters[1] * (g[own][c] * g[b][r] + (r == c ? dot : 0.0)));
        }
    }
}
"""


def bar(x, parameters, own, blocks):
    along = x[1] - x[0]
    scale = parameters[0] / np.sqrt(np.sum(along**2)) ** 3
    for b in range(2):
        for r in range(3):
            for c in range(3):
                blocks[b, r, c] += (scale if b == own else -scale) * along[r] * along[c]


@njit
def _gradients(x, point):
    corner, volume = np.zeros((4, 3)), 0.0
    for e in range(1, 4):
        u, v = x[e % 3 + 1], x[(e + 1) % 3 + 1]
        for c in range(3):
            i, j = (c + 1) % 3, (c + 2) % 3
            corner[e, c] = (u[i] - x[0, i]) * (v[j] - x[0, j]) - (u[j] - x[0, j]) * (v[i] - x[0, i])
    for c in range(3):
        volume += (x[1, c] - x[0, c]) * corner[1, c]
    for e in range(1, 4):
        for c in range(3):
            corner[e, c] /= volume
            corner[0, c] -= corner[e, c]
    at = np.full(4, FAR)
    at[point] = NEAR
    g = np.empty((10, 3))
    for c in range(3):
        for e in range(4):
            g[e, c] = (4 * at[e] - 1) * corner[e, c]
        for e in range(6):
            i, j = EDGES[e]
            g[4 + e, c] = 4 * (at[i] * corner[j, c] + at[j] * corner[i, c])
    return g, abs(volume) / 24


def quadratic(x, parameters, own, blocks):
    for point in range(4):
        g, weight = _gradients(x, point)
        for b in range(10):
            dot = g[own, 0] * g[b, 0] + g[own, 1] * g[b, 1] + g[own, 2] * g[b, 2]
            for r in range(3):
                for c in range(3):
                    shear = g[own, c] * g[b, r] + (dot if r == c else 0.0)
                    blocks[b, r, c] += weight * (parameters[0] * g[own, r] * g[b, c] + parameters[1] * shear)


def quadratic_mesh(counts=(4, 3, 3)):
    skfem = pytest.importorskip("skfem")
    mesh = skfem.MeshTet.init_tensor(*(np.linspace(0, 1, count) for count in counts))
    corners = mesh.t.T
    ends = np.sort(corners[:, EDGES], axis=2).reshape(-1, 2)
    edges, of_element = np.unique(ends, axis=0, return_inverse=True)
    points = np.concatenate([mesh.p.T, mesh.p.T[edges].mean(axis=1)])
    return mesh, points, np.concatenate([corners, len(mesh.p.T) + of_element.reshape(-1, 6)], axis=1), edges


ELEMENTS = {
    "bars": penstock.OwnElement(bar, nodes=2, dof=3, cuda=BAR, parameters=[2.0]),
    "quadratic": penstock.OwnElement(quadratic, nodes=10, dof=3, cuda=QUADRATIC, parameters=lame_parameters(2.0, 0.3)),
}


def body(kind, counts=(4, 3, 3)):
    """A body held on one side, of random material; bars join the nodes of quadratic tetrahedra."""
    _, points, elements, _ = quadratic_mesh(counts)
    rng = np.random.default_rng(3)
    if kind == "bars":
        pairs = np.sort(
            np.concatenate([elements[:, [0, 4 + e]] for e in range(6)] + [elements[:, [4, 5]], elements[:, [6, 7]]])
        )
        elements = np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0)
        used = np.unique(elements)
        points, elements = points[used], np.searchsorted(used, elements)
    fixed = (3 * np.flatnonzero(points[:, 0] == 0)[:, None] + np.arange(3)).reshape(-1)
    factors = np.exp(rng.standard_normal(len(elements)))
    return penstock.ElementMatrix(points, elements, element=ELEMENTS[kind], material=factors, fixed=fixed)


def test_entries_are_those_of_scikit_fem():
    mesh, points, elements, edges = quadratic_mesh()
    import skfem
    from skfem.models.elasticity import lame_parameters as lame
    from skfem.models.elasticity import linear_elasticity

    basis = skfem.Basis(mesh, skfem.ElementVector(skfem.ElementTetP2()), intorder=4)
    there = skfem.asm(linear_elasticity(*lame(2.0, 0.3)), basis).tocsr()
    # Where its unknowns are: three of each vertex, then three of each edge, which is numbered in another order.
    number = {tuple(ends): at for at, ends in enumerate(np.sort(mesh.edges.T, axis=1))}
    of_edges = [basis.dofs.edge_dofs[:, number[tuple(ends)]] for ends in edges]
    unknowns = np.concatenate([basis.dofs.nodal_dofs.T.reshape(-1), np.concatenate(of_edges)])
    expected = there[unknowns][:, unknowns]

    A = penstock.ElementMatrix(points, elements, element=ELEMENTS["quadratic"]).to_csr()

    assert abs(A - expected).max() <= 1e-12 * abs(expected).max()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("name", "kind"), [*((name, "bars") for name in FORMATS), ("symmetric_bsr", "quadratic")])
def test_every_target_makes_the_same_rows_in_any_cut(target, name, kind):
    matrix = body(kind)
    host = matrix.matrix(name)

    [made] = make(target, matrix, name)
    slabs = make(target, matrix, name, count=3)

    assert abs(made["values"] - host.values).max() <= 1e-12 * abs(host.values).max()
    for key in ("column_indices", "values"):
        assert np.concatenate([slab[key] for slab in slabs]).tobytes() == made[key].tobytes()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("share", [None, 0.4])
def test_a_body_is_solved_in_memory_and_on_arrival(device, share):
    matrix = body("quadratic", (9, 4, 4))
    b = np.random.default_rng(0).standard_normal(matrix.shape[0]) * (matrix.fixed == 0)
    memory = None if share is None else int(share * 8 * matrix.nnz)

    result = penstock.solve(matrix, b, device=device, memory=memory)

    assert result.converged
    assert np.linalg.norm(b - matrix.to_csr() @ result.x) <= 1e-8 * np.linalg.norm(b)
    assert ("made        " in result.explain()) == (share is not None)
    with penstock.prepare(matrix, device=device, memory=memory) as system:
        system.update(matrix.with_material(2 * matrix.factors))
        assert np.allclose(2 * system.solve(b).x, result.x, rtol=0, atol=1e-6 * abs(result.x).max())


@pytest.mark.parametrize("kind", ELEMENTS)
def test_the_code_compiles_for_gpus(kind):
    try:
        nvrtc.load_nvrtc()
    except (nvrtc.NvrtcUnavailableError, OSError) as error:
        pytest.skip(str(error))
    source = replace(ELEMENT_ROW_KERNELS, before=ELEMENTS[kind].cuda_text())
    expression = "element_rows<OwnElement, OwnPhysics, long long, CHUNKS, true>"

    assert nvrtc.compile_for("compute_90", source.text(), [expression])


def spring(x, parameters, own, blocks):
    blocks[0, 0, 0], blocks[1, 0, 0] = (parameters[0], -1.0) if own == 0 else (-1.0, parameters[1])


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ((np.inf, 1.0), "one list of finite numbers"),
        ((-1.0, -1.0), "element 0 of OwnElement.spring, nodes=2, dof=1. is not positive semidefinite"),
    ],
)
def test_elements_that_are_no_stiffness_are_refused(parameters, message):
    with pytest.raises(InputError, match=message):
        penstock.ElementMatrix(
            np.eye(3),
            [(0, 1), (1, 2)],
            element=penstock.OwnElement(spring, nodes=2, dof=1, parameters=parameters),
        )


def one_sided(x, parameters, own, blocks):
    blocks[0, 0, 0] = blocks[1, 0, 0] = 1.0 + own


def not_compilable(x, parameters, own, blocks):
    blocks[0] = np.memmap("file")


def undefined(x, parameters, own, blocks):
    blocks[:] = np.nan


def far_away(x, parameters, own, blocks):
    blocks[0, 2, 2] += 1.0


def rebound(x, parameters, own, blocks):
    blocks = np.ones((2, 1, 1))  # noqa: F841 - the mistake that is refused


def raising(x, parameters, own, blocks):
    blocks[0, 0, 0] += 1.0 / parameters.size


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (one_sided, "not symmetric"),
        (not_compilable, "Numba cannot compile"),
        (undefined, "not finite"),
        (far_away, "index out of range"),
        (rebound, "must add to blocks in place"),
        (raising, "raises ZeroDivisionError"),
    ],
)
def test_functions_that_are_none_are_refused(row, message):
    element = penstock.OwnElement(row, nodes=2, dof=1)
    with pytest.raises(InputError, match=message):
        penstock.ElementMatrix(np.eye(3), [(0, 1), (1, 2)], element=element)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"row": "bar"}, "row must be a function"),
        ({"dof": 2}, "dof must be 1, 3 or 6"),
        ({"nodes": 33}, "nodes must be 2 to 32"),
        ({"nodes": 2.0}, "nodes must be a whole number"),
        ({"parameters": ["steel"]}, "parameters must be numbers"),
        ({"parameters": np.eye(2)}, "one list"),
        ({"cuda": 3}, "CUDA C.. as a string"),
    ],
)
def test_arguments_out_of_range_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        penstock.OwnElement(**{"row": bar, "nodes": 2, "dof": 3, **change})


def test_what_the_matrix_cannot_know_is_refused():
    matrix = body("bars")
    with pytest.raises(InputError, match="mass"):
        matrix.mass()
    with pytest.raises(InputError, match=r"shape \(elements, 2\), not"):
        penstock.ElementMatrix(np.eye(3), [(0, 1, 2)], element=ELEMENTS["bars"])
    with pytest.raises(InputError, match="has no CUDA"):
        penstock.OwnElement(bar, nodes=2, dof=3).cuda_text()


@pytest.mark.gpu
@pytest.mark.skipif(gpu_count() == 0, reason="no CUDA device")
def test_other_entries_on_a_gpu_are_refused():
    wrong = penstock.OwnElement(
        bar, nodes=2, dof=3, cuda=BAR.replace("? scale :", "? 1.01 * scale :"), parameters=[2.0]
    )
    matrix = body("bars")
    other = penstock.ElementMatrix(matrix.coordinates, matrix.connectivity, element=wrong)
    with pytest.raises(InputError, match="computes other entries"):
        other.matrix("symmetric_bsr", device="cuda")
    plain = penstock.OwnElement(bar, nodes=2, dof=3, parameters=[2.0])
    other = penstock.ElementMatrix(matrix.coordinates, matrix.connectivity, element=plain)
    with pytest.raises(InputError, match="has no CUDA"):
        other.matrix(device="cuda")
