"""The matrix of a mesh, shared out among ranks: each assembles its own rows, or has them assembled where they are used."""

from __future__ import annotations

import zlib

from penstock.distributed.coupling import Coupling, split_rows
from penstock.distributed.mpi import MpiCommunicator
from penstock.distributed.partition import RowPartition
from penstock.fem.element_matrix import ElementMatrix
from penstock.fem.mesh_parts import coupling_of, square_of
from penstock.spmv import InputError


def split_elements(
    body: ElementMatrix, partition: RowPartition, communicator: MpiCommunicator
) -> tuple[ElementMatrix, list[Coupling]]:
    """Split the matrix of a mesh into this rank's square, which is not assembled, and its couplings, on the host. Collective.

    As :func:`split_rows` does of rows, but no rank ever holds the matrix. Entries are those of the whole matrix, on a CPU bit for
    bit, on a GPU to rounding.

    Parameters
    ----------
    body : ElementMatrix
        Of the whole mesh, on every rank; it can be deleted afterwards. Nodes should be in layers, as of
        :func:`penstock.streaming.layer_order`, so that a rank couples with the one before and the one after only.
    partition : RowPartition
        Of the unknowns, cut at nodes; every rank has some.
    communicator : MpiCommunicator

    Returns
    -------
    ElementMatrix, (own rows, own rows), and list of Coupling
        ``square.matrix(…, device=…)`` assembles it for a :class:`DistributedMatrix`; a :class:`penstock.streaming.MadeStore` of
        its :meth:`~penstock.ElementMatrix.row_maker` lets a :class:`DistributedStreamedMatrix` assemble it on arrival.

    Raises
    ------
    InputError
        On all ranks, if they give different meshes, or the partition is of another number of ranks or rows, cuts nodes, or leaves
        a rank without any.

    Examples
    --------
    >>> import penstock
    >>> from penstock.distributed import DistributedMatrix, MpiCommunicator, RowPartition, split_elements
    >>> from penstock.fem import BoxMesh
    >>> mesh, ranks = BoxMesh(nodes=(9, 3, 3)), MpiCommunicator()
    >>> body = penstock.ElementMatrix(mesh.coordinates(), mesh.connectivity())
    >>> partition = RowPartition.even(body.shape[0], ranks.size, multiple=body.dof)
    >>> square, couplings = split_elements(body, partition, ranks)
    >>> A = DistributedMatrix(square.matrix("symmetric_bsr"), couplings, ranks)
    >>> A.shape[0] <= body.shape[0]
    True
    """
    with communicator.together():
        kinds: list[tuple[object, type]] = [(body, ElementMatrix), (partition, RowPartition)]
        for given, kind in kinds:
            if not isinstance(given, kind):
                raise InputError(
                    f"split_elements takes an ElementMatrix and a RowPartition on every rank, not a {type(given).__name__}"
                )
        dof = body.dof
        if partition.ranks != communicator.size or partition.rows != body.shape[0]:
            raise InputError(
                f"the partition has {partition.rows} rows on {partition.ranks} ranks; the matrix has {body.shape[0]} rows, "
                f"and there are {communicator.size} ranks"
            )
        if any(bound % dof for bound in partition.bounds):
            raise InputError(f"the partition {partition.bounds} cuts nodes of {dof} unknowns; cut at multiples of them")
        checksums = {
            name: zlib.crc32(getattr(body, name)) for name in ("coordinates", "connectivity", "factors", "fixed")
        }
    communicator.check_same(element=repr(body.element), **checksums)
    with communicator.together():
        own = partition.of(communicator.rank)
        nodes = own.start // dof, own.stop // dof
        square, rows = square_of(body, *nodes), coupling_of(body, *nodes)
    _, couplings = split_rows(rows, partition, communicator, block_size=dof)  # the square of these rows is empty
    return square, couplings
