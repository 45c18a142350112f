"""Several right-hand sides share the passes of CG with a coarse level, each with the iterates of a solve of its own."""

import copy

import numpy as np
import pytest
from kernel_targets import gpu_count

from penstock.fem import Cantilever, LognormalMaterial
from penstock.solvers import CoarseBlockCgState, StopReason, block_cg, cg, smoothed_aggregation, solve_many
from penstock.spmv import Device
from penstock.streaming import HostStore, Ring, StreamedMatrix, Workload

PRODUCTS = 14


def beam_of(nodes, dof=3):
    return Cantilever(nodes=nodes, dof=dof, material=LognormalMaterial(sigma=0.5, seed=1))


def level_for(beam, A):
    coordinates, counts = beam.mesh.coordinates(), beam.mesh.node_counts
    return smoothed_aggregation(A, coordinates=coordinates, aggregates=counts, block_size=beam.dof)


def loads(beam, columns, seed=0):
    B = np.random.default_rng(seed).standard_normal((beam.unknowns, columns))
    B[:, 0] = beam.load()
    return B


def true_residuals(A, X, B):
    return np.linalg.norm(B - A.to_csr() @ X, axis=0) / np.linalg.norm(B, axis=0)


@pytest.mark.parametrize(("dof", "columns"), [(1, 3), (3, 1), (3, 5), (6, 2), (3, 40)])
@pytest.mark.parametrize("name", ["bsr", "symmetric_bsr"])
def test_every_column_has_the_solution_of_its_own_solve(name, dof, columns):
    beam = beam_of((12, 6, 6), dof)
    A, B = beam.matrix(name), loads(beam, columns)
    M = level_for(beam, A)

    result = block_cg(A, B, M=M, rtol=1e-9)

    assert result.converged
    assert (true_residuals(beam.matrix(), result.x, B) <= 1.01e-9).all()
    for column in range(0, columns, 7):
        alone = cg(A, np.ascontiguousarray(B[:, column]), M=M, rtol=1e-9)
        scale = abs(alone.x).max()
        assert np.allclose(result.x[:, column], alone.x, atol=1e-7 * scale)
        # A column that has ended stands still while others go on.
        history = result.columns[column].residual_norms[: len(alone.residual_norms)]
        assert np.allclose(history, alone.residual_norms, rtol=1e-4)


@pytest.mark.parametrize("slots", [PRODUCTS + 1, 6])
def test_streamed_it_has_the_same_bits_in_as_many_sweeps_as_one_vector(slots):
    beam = beam_of((32, 5, 5))
    A, B = beam.matrix(), loads(beam, 4)
    M = level_for(beam, A)
    resident = block_cg(A, B, M=M, rtol=1e-8)
    store = HostStore.create(beam.subdivisions(32, "bsr"))
    budget = slots * max(store.index.sizes["whole"])

    with store, StreamedMatrix(store, budget, workload=Workload(degree=PRODUCTS), ring=Ring(slots=slots)) as S:
        result = block_cg(S, B, M=level_for(beam, S), rtol=1e-8)

    assert np.array_equal(result.x, resident.x)
    an_iteration = -(-PRODUCTS // (slots - 1))
    assert result.sweeps == (result.iterations + 1) * an_iteration + 1


def test_columns_that_are_zero_equal_or_huge_do_not_disturb_others():
    beam = beam_of((10, 5, 5))
    A, B = beam.matrix(), loads(beam, 5)
    B[:, 1], B[:, 2], B[:, 3] = 0.0, B[:, 0], 1e200
    guess = np.ones_like(B)

    result = block_cg(A, B, guess, M=level_for(beam, A), rtol=1e-8)

    reasons = [column.reason for column in result.columns]
    assert reasons == [StopReason.CONVERGED] * 3 + [StopReason.NOT_FINITE, StopReason.CONVERGED]
    assert not result.x[:, 1].any()
    assert np.array_equal(result.x[:, 0], result.x[:, 2])
    assert (guess == 1.0).all()
    good = [0, 2, 4]
    assert (true_residuals(A, result.x[:, good], B[:, good]) <= 1.01e-8).all()


def test_a_solve_resumes_with_the_same_bits_and_to_a_smaller_tolerance():
    beam = beam_of((20, 6, 6))
    A, B = beam.matrix(), loads(beam, 3)
    M = level_for(beam, A)
    whole = block_cg(A, B, M=M, rtol=1e-9)

    first = block_cg(A, B, M=M, rtol=1e-9, maxiter=4)
    second = block_cg(A, B, M=M, rtol=1e-9, state=copy.deepcopy(first.state))
    third = block_cg(A, B, M=M, rtol=1e-11, state=copy.deepcopy(whole.state))

    assert {column.reason for column in first.columns} == {StopReason.MAXITER}
    assert isinstance(first.state, CoarseBlockCgState)
    assert second.iterations == whole.iterations
    assert np.array_equal(second.x, whole.x)
    assert third.converged
    assert (true_residuals(A, third.x, B) <= 1.01e-11).all()


def test_a_monitor_stops_all_columns():
    beam = beam_of(8)
    A, B = beam.matrix(), loads(beam, 3)
    seen = []

    result = block_cg(
        A, B, M=level_for(beam, A), rtol=1e-9, monitor=lambda record: seen.append(record) or len(seen) == 2
    )

    assert {column.reason for column in result.columns} == {StopReason.STOPPED}
    assert result.iterations == 2
    assert seen[-1].residual_norm == pytest.approx(true_residuals(A, result.x, B).max(), rel=1e-6)


def test_an_indefinite_matrix_is_told_for_every_column():
    beam = beam_of(8)
    A = beam.matrix()
    M = level_for(beam, A)
    A.values[...] *= -1.0

    result = block_cg(A, loads(beam, 2), M=M, maxiter=50)

    faults = {StopReason.NOT_POSITIVE_DEFINITE, StopReason.PRECONDITIONER_NOT_POSITIVE_DEFINITE}
    assert {column.reason for column in result.columns} <= faults


def test_solve_many_solves_block_by_block():
    beam = beam_of(9)
    A, B = beam.matrix(), loads(beam, 7)

    result = solve_many(A, B, M=level_for(beam, A), rtol=1e-8, block_size=3)

    assert result.converged
    assert (true_residuals(A, result.x, B) <= 1.01e-8).all()


@pytest.mark.gpu
@pytest.mark.skipif(gpu_count() == 0, reason="no CUDA device")
@pytest.mark.parametrize("name", ["bsr", "symmetric_bsr"])
@pytest.mark.parametrize("dof", [1, 3, 6])
def test_on_a_gpu_resident_and_streamed(name, dof):
    beam, device = beam_of((40, 8, 8), dof), Device("cuda")
    host, B = beam.matrix(name), loads(beam, 5)
    expected = block_cg(host, B, M=level_for(beam, host), rtol=1e-10)
    A, of_b = host.to_device(device), device.asarray(B)
    M = level_for(beam, A)

    for _ in range(2):  # the second solve replays the graphs of the first
        result = block_cg(A, of_b, M=M, rtol=1e-10)
        assert result.iterations == expected.iterations
        assert np.allclose(result.x.get(), expected.x, atol=1e-7 * abs(expected.x).max())
    store = HostStore.create(beam.subdivisions(40, name))
    budget = (PRODUCTS + 2) * max(store.index.sizes["whole"])
    with store, StreamedMatrix(store, budget, device=device, workload=Workload(degree=PRODUCTS)) as S:
        N = level_for(beam, S)
        for _ in range(2):
            result = block_cg(S, of_b, M=N, rtol=1e-10)
            assert result.converged
            assert np.allclose(result.x.get(), expected.x, atol=1e-7 * abs(expected.x).max())
