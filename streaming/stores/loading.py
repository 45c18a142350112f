"""Brings a part of a subdivision to where it stays, on any device, and new values to those of a store."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.spmv import Array, CsrMatrix, Device, SparseMatrix
from penstock.streaming.stores.base import PageLockable, Store
from penstock.streaming.stores.buffers import aligned_buffer
from penstock.streaming.stores.made_store import makes_on
from penstock.streaming.stores.matrix_index import Part


def load_part(store: Store, number: int, buffer: Array, part: Part, device: Device) -> None:
    """Read a part of a subdivision into a byte buffer on a device, or make it there; values may still have to be completed."""
    if device.kind == "cpu":
        store.read_into(number, buffer, part)
    elif makes_on(store, device):
        store.make_into(number, buffer, part)
    elif isinstance(store, PageLockable):
        for offset, piece in store.segments(number, part):
            buffer[offset : offset + piece.nbytes].set(piece)
    else:
        host = aligned_buffer(store.index.subdivisions[number].part_nbytes(part))
        store.read_into(number, host, part)
        buffer[: host.nbytes].set(host)


def refilled_slabs(store: Store, A: CsrMatrix) -> Iterator[SparseMatrix]:
    """Yield the slabs of a store with the values of a matrix on the host, which must have the same pattern."""
    for number, of in enumerate(store.index.subdivisions):
        buffer = aligned_buffer(of.nbytes)
        store.read_into(number, buffer)
        slab = store.index.view(number, buffer)
        slab.refill(A.rows(of.row_start, of.row_stop), of.row_start)
        yield slab
