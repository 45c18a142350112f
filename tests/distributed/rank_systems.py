"""The systems of the checks of ranks, and where their vectors are: on the host, or on GPUs with messages of MPI or of NCCL."""

import functools
import sys

import numpy as np

from penstock.distributed import DistributedMatrix, RowPartition, gpu_of_rank
from penstock.fem import Cantilever
from penstock.spmv import CPU, InputError

WAY = sys.argv[2] if len(sys.argv) > 2 else "host"
BEAM = Cantilever(nodes=(13, 5, 4), dof=3)
MATRIX = BEAM.matrix().to_csr()
LOAD = BEAM.load()
NODES = len(LOAD) // 3


def partitions(ranks):
    """Even ones, and random ones in which ranks may have no rows, or all of them."""
    rng = np.random.default_rng(ranks)
    yield RowPartition.even(3 * NODES, ranks, multiple=3)
    yield RowPartition((0,) * ranks + (3 * NODES,))
    for _ in range(4):
        inner = np.sort(rng.integers(0, NODES + 1, ranks - 1)) * 3
        yield RowPartition((0, *map(int, inner), 3 * NODES))


def shared(ranks, partition, matrix=MATRIX, **parameters):
    own = partition.of(ranks.rank)
    return DistributedMatrix.from_rows(matrix[own], partition, ranks, device=device(ranks), **parameters)


@functools.cache
def device(ranks):
    return CPU if WAY == "host" else gpu_of_rank(ranks)


def put(ranks, x):
    """A copy on this rank's device."""
    return device(ranks).asarray(np.array(x))


def get(x):
    return CPU.asarray(x)


def all_rows(ranks, x):
    """The rows of all ranks."""
    return np.concatenate(ranks.exchange_objects([get(x)] * ranks.size))


def even(ranks, **parameters):
    partition = RowPartition.even(3 * NODES, ranks.size, multiple=3)
    return shared(ranks, partition, **parameters), partition.of(ranks.rank)


def message_of(call):
    """The message of the InputError that a call raises; empty if it raises none."""
    try:
        call()
    except InputError as error:
        return str(error)
    return ""
