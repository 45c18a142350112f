"""Share a system out among ranks: each has some rows of the matrix and of every vector, and the solvers stay the same."""

from penstock.distributed.coupling import Coupling, columns_within, split_rows
from penstock.distributed.elements import split_elements
from penstock.distributed.image import DistributedImage
from penstock.distributed.matrix import DistributedMatrix
from penstock.distributed.mpi import MpiCommunicator, gpu_of_rank
from penstock.distributed.nccl import NcclCommunicator
from penstock.distributed.partition import RowPartition
from penstock.distributed.streamed import DistributedStreamedMatrix

__all__ = [
    "Coupling",
    "DistributedImage",
    "DistributedMatrix",
    "DistributedStreamedMatrix",
    "MpiCommunicator",
    "NcclCommunicator",
    "RowPartition",
    "columns_within",
    "gpu_of_rank",
    "split_elements",
    "split_rows",
]
