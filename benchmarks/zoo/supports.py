"""Elastic bodies that are held by springs, penalties or ties, or by nothing, and their steps in time."""

from __future__ import annotations

import numpy as np
import scipy.sparse

from penstock.fem import LinearElasticity
from penstock.solvers.amg.modes import rigid_body_modes
from zoo.meshes import body, box, supported, voxel_matrix
from zoo.system import Array, Generator, System, family


def _free_block(size: int, proportions: tuple[float, ...] = (2, 1, 1)) -> tuple[scipy.sparse.csr_array, Array]:
    return voxel_matrix(np.ones([max(3, of - 1) for of in box(size / 3, proportions)]), LinearElasticity())


def _sideways(points: Array) -> Array:
    """Return a force on the upper face."""
    b = np.zeros(points.shape)
    b[points[:, 2] == points[:, 2].max()] = (0.2, 0.1, -1.0)
    return b.ravel()


@family
def free_body(size: int, rng: Generator) -> System:
    """A body that flies freely under forces in balance: A is singular, its rigid motions are known."""
    A, points = _free_block(size)
    motions = np.asarray(rigid_body_modes(points, 3))
    b, Q = rng.standard_normal(len(motions)), np.linalg.qr(motions)[0]
    b -= Q @ (Q.T @ b)
    return System(A, b, coordinates=points, null_space=motions)


@family
def springs_to_ground(size: int, rng: Generator) -> System:
    """A body on soft springs, 1e-4 of its own stiffness, below each node of its lower face."""
    A, points = _free_block(size)
    springs = np.repeat(np.where(points[:, 2] == 0, 1e-4, 0.0), 3)
    return System(A + scipy.sparse.diags_array(springs), _sideways(points), coordinates=points)


@family
def penalty_supports(size: int, rng: Generator) -> System:
    """A body whose clamped nodes stay in the system, held by a penalty of 1e8."""
    A, points = _free_block(size)
    penalty = np.repeat(np.where(points[:, 0] == 0, 1e8, 0.0), 3)
    return System(A + scipy.sparse.diags_array(penalty), _sideways(points), coordinates=points)


@family
def ties(size: int, rng: Generator) -> System:
    """Two bodies, one on the other, whose facing nodes are tied by springs of 1e8 in all directions."""
    A, points = _free_block(size // 2)
    upper = points + np.array([0.0, 0.0, points[:, 2].max()])
    both = scipy.sparse.block_diag([A, 3.0 * A], format="csr")
    first = np.flatnonzero(points[:, 2] == points[:, 2].max())
    second = len(points) + np.flatnonzero(points[:, 2] == 0)  # in the same order
    pairs = (3 * np.stack([first, second], axis=1)[:, None] + np.arange(3)[:, None]).reshape(-1, 2)
    tie = 1e8 * np.array([[1.0, -1.0], [-1.0, 1.0]])
    rows, columns = np.repeat(pairs, 2, axis=1).ravel(), np.tile(pairs, 2).ravel()
    tied = both + scipy.sparse.coo_array((np.tile(tie.ravel(), len(pairs)), (rows, columns)), shape=both.shape)
    points = np.concatenate([points, upper])
    clamped = points[:, 0] == 0
    A, b = supported(tied, _sideways(points), np.repeat(clamped, 3))
    return System(A, b, coordinates=points[~clamped])


@family
def elastic_time_step(size: int, rng: Generator) -> System:
    """An implicit step of structural dynamics, ``M + beta dt^2 K``, ten times as long as a wave takes through an element.

    Newmark's method with beta 1/4 (ASCE J. Eng. Mech. Div. 85, 1959) and a lumped mass matrix.
    """
    system = body(np.exp(0.3 * rng.standard_normal([max(3, of - 1) for of in box(size / 3, (3, 1, 1))])), axis=0)
    A = scipy.sparse.eye_array(system.A.shape[0]) + 0.25 * 10.0**2 * system.A
    return System(A, system.b, coordinates=system.coordinates)
