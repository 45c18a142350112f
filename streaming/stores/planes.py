"""Stores float64 values in two planes: float32 numbers, their *high words*, and the *low words* that complete them.

With ``bits(a) = bits(float64(high)) + low``, as integers of 64 bits, both take the bytes of the values and stand for exactly
these. What needs float32 only, such as an image of the matrix, reads half of the bytes, and where such an image lies in memory
the other half gives the matrix itself.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.host.threads import in_pieces, mapped
from penstock.spmv import Array, BudgetError, InputError, SparseMatrix, format_nbytes
from penstock.spmv.compilation.cuda_module import CudaSource, launch
from penstock.spmv.formats.symmetric_image import (
    SymmetricImageMatrix,
    add_block_sums,
    block_ones,
    by_blocks,
    corrections_of,
)
from penstock.spmv.host_memory import available_nbytes
from penstock.streaming.stores.base import PlaneStore, Store
from penstock.streaming.stores.buffers import PAGE_NBYTES, aligned_buffer
from penstock.streaming.stores.matrix_index import ArrayField, Part, Subdivision, round_up

Numbers = np.ndarray[Any, Any]

PLANE_KERNELS = CudaSource("penstock.streaming.kernels", "planes.cu")

# Numbers that are joined at once, so that what is computed between stays in a cache; and those that are copied first, at the
# end of a subdivision, where high words would be written over low words that are still to be read.
_AT_ONCE, _LAST = 1 << 17, 4096


class NoPlanesError(InputError):
    """Values have no planes: some are beyond the range of float32, or they are not of float64."""


def plane_nbytes(subdivision: Subdivision) -> int:
    """Return the bytes of a plane of a subdivision, padded to whole pages."""
    return _half_in_pages(subdivision.part_nbytes("values"))


def _half_in_pages(nbytes: int) -> int:
    return round_up(nbytes // 2, PAGE_NBYTES)


def split(values: Numbers, high: Numbers, low: Numbers) -> None:
    """Write the high words, float32, and the low words, int32, of numbers of float64.

    Raises
    ------
    NoPlanesError
        If a number, other than 0, is beyond the range of float32.
    """

    def split(part: slice) -> None:
        with np.errstate(all="ignore"):
            high[part] = values[part]
        rest = values[part].view(np.int64) - high[part].astype(np.float64).view(np.int64)
        low[part] = rest
        if (low[part] != rest).any():
            beyond = values[part][low[part] != rest][0]
            raise NoPlanesError(
                f"{beyond:g} is beyond the range of float32, so the values have no planes; scale the matrix, or store it "
                "without them (planes=False, --no-planes)"
            )

    in_pieces(split, values.size, _AT_ONCE)


def in_planes(subdivision: Subdivision, piece: Numbers, dtype: Any) -> Numbers:
    """Return the bytes of a subdivision with its values in two planes, each padded to whole pages.

    Raises
    ------
    NoPlanesError
        If values are not of float64, or beyond the range of float32.
    """
    if dtype != np.float64:
        raise NoPlanesError(
            f"values of {dtype} have no planes, which are of float64; store them without (planes=False, --no-planes)"
        )
    start, plane = subdivision.values_start, plane_nbytes(subdivision)
    stored = aligned_buffer(start + 2 * plane)
    stored[:start] = piece[:start]
    high, low = stored[start : start + plane], stored[start + plane :]
    values = piece[start : subdivision.nbytes].view(np.float64)
    split(values, high.view(np.float32)[: values.size], low.view(np.int32)[: values.size])
    return stored


def join_in_place(high: Numbers, values: Numbers, threads: int = 1) -> None:
    """Complete numbers on the host whose low words lie at the end of the bytes in which float64 numbers are written.

    Parameters
    ----------
    high : array of float32
    values : array of bytes
        The values of a subdivision, padded to whole pages; in its last pages, which would hold a plane, are the low words.
        What is written over them has been read: a number takes twice the bytes of a word, and the first half is free.
    threads : int
        That compute.
    """
    low, numbers = low_words(values), values.view(np.int64)
    begin, count = 0, high.size

    def join_words(start: int, stop: int, words: Numbers) -> None:
        numbers[start:stop].view(np.float64)[...] = high[start:stop]
        numbers[start:stop] += words

    def join_from(start: int) -> None:
        stop = min(start + _AT_ONCE, end)
        join_words(start, stop, low[start:stop])

    # What is written up to ``end`` lies before the low words from ``begin`` on.
    while (end := min((first_low(values) // 4 + begin) // 2, count)) - begin >= min(_LAST, count - begin) > 0:
        mapped(join_from, range(begin, end, _AT_ONCE), threads)
        begin = end
    join_words(begin, count, low[begin:count].copy())
    numbers[count:] = 0


def first_low(values: Array) -> int:
    """Return where low words begin in the bytes of the values that they complete: a plane of whole pages ends with these."""
    return int(values.nbytes) - _half_in_pages(values.nbytes)


def low_words(values: Array) -> Array:
    """Return a view of the low words there."""
    return values[first_low(values) :].view(np.int32)


def join_on_device(high: Array, low: Array, values: Array) -> None:
    """Complete numbers on a GPU, in CuPy's current stream, and set those after them to zero.

    ``values`` are float64, and share no memory with the words, float32 and int32. Without low words, these are 0.
    """
    sizes = np.int64(high.size), np.int64(low.size), np.int64(values.size)
    launch(PLANE_KERNELS.function("join_planes"), values.size, 256, (*sizes, high, low, values))


class HighWords:
    """The matrix of a store of two planes rounded to float32: a store that reads half of the bytes of the values.

    Parameters
    ----------
    store : PlaneStore

    Examples
    --------
    >>> import tempfile
    >>> from penstock.fem import Cantilever
    >>> from penstock.streaming import FileStore, StreamedMatrix
    >>> beam = Cantilever(nodes=4, dof=3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with FileStore.create(f"{folder}/A", beam.subdivisions(2), planes=True) as store:
    ...         with StreamedMatrix(HighWords(store), "1 MiB") as A:
    ...             A.store.index.values_dtype.name, bool(abs(A @ beam.load() - beam.matrix() @ beam.load()).max() < 1e-6)
    ('float32', True)
    """

    def __init__(self, store: PlaneStore) -> None:
        self.store = store
        of = store.index
        self.index = replace(of, subdivisions=tuple(_of_high_words(subdivision) for subdivision in of.subdivisions))

    def read_into(self, number: int, buffer: Numbers, part: Part = "whole") -> None:
        """Read a part of a subdivision."""
        start = 0
        if part != "values":
            self.store.read_into(number, buffer, "structure")
            start = self.index.subdivisions[number].values_start
        if part != "structure":
            self.store.read_high(number, buffer[start:])


def _of_high_words(subdivision: Subdivision) -> Subdivision:
    start = subdivision.values_start

    def narrow(field: ArrayField) -> ArrayField:
        return field if field.part == "structure" else replace(
            field, dtype="float32", offset=start + (field.offset - start) // 2
        )  # fmt: skip

    fields = tuple(narrow(field) for field in subdivision.fields)
    return replace(subdivision, fields=fields, nbytes=start + plane_nbytes(subdivision), checksums=None)


class CompletedOnArrival:
    """The matrix of a store of two planes. A GPU receives planes and makes float64 numbers of them; the base of such stores."""

    #: Planes in a buffer of which a GPU has still to make numbers.
    planes_on_arrival = 0

    def __init__(self, store: PlaneStore) -> None:
        self.store, self.index = store, store.index

    @staticmethod
    def underlying(store: Store) -> Store:
        """Return the store of two planes that such a store reads; another one as it is."""
        return store.store if isinstance(store, CompletedOnArrival) else store

    def read_share(self, part: Part) -> float:
        """Return the share of the bytes of a part of the matrix that is read."""
        return 1.0

    def _share_of_a_plane(self, part: Part) -> float:
        if part == "structure":
            return 1.0
        planes = sum(plane_nbytes(subdivision) for subdivision in self.index.subdivisions)
        structure = self.index.part_nbytes("structure") if part == "whole" else 0
        return (structure + planes) / self.index.part_nbytes(part)

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of device memory that :meth:`complete` needs beside the buffer."""
        return self.planes_on_arrival * 4 * max(map(count_of_values, self.index.subdivisions), default=0)

    def complete(self, number: int, buffer: Array, part: Part, scratch: Array) -> None:
        """Complete the values of a subdivision in a byte buffer on a GPU, in CuPy's current stream."""
        if part == "structure":
            return
        of = self.index.subdivisions[number]
        nbytes = of.part_nbytes(part)
        self._complete(number, buffer[nbytes - of.part_nbytes("values") : nbytes], scratch)

    def _complete(self, number: int, values: Array, scratch: Array) -> None:
        """Complete values of float64 in their bytes; here they arrive complete."""


class CompletedStore(CompletedOnArrival):
    """The matrix of a store of two planes whose high words are in memory, as an image: a store that reads the low words.

    Parameters
    ----------
    store : PlaneStore
    image : SparseMatrix
        In float32, on any device.

    Notes
    -----
    On a CPU a read completes the values. On a GPU, to which low words are transferred, :meth:`complete` does it there.
    """

    planes_on_arrival = 1

    def __init__(self, store: PlaneStore, image: SparseMatrix) -> None:
        super().__init__(store)
        self.image = image
        self._bounds = list(itertools.accumulate(map(count_of_values, self.index.subdivisions), initial=0))

    def read_share(self, part: Part) -> float:
        """Return the share of the bytes of a part of the matrix that is read."""
        return self._share_of_a_plane(part)

    @property
    def rounded_matrix(self) -> SparseMatrix:
        """The matrix rounded to float32, which is the image but for corrections."""
        return self.image.uncorrected() if isinstance(self.image, SymmetricImageMatrix) else self.image

    def read_into(self, number: int, buffer: Numbers, part: Part = "whole") -> None:
        """Read a part of a subdivision; on a GPU, values are still to be completed."""
        of = self.index.subdivisions[number]
        if part != "values":
            self.store.read_into(number, buffer, "structure")
        if part != "structure":
            nbytes = of.part_nbytes(part)
            self.store.read_low(number, buffer[nbytes - plane_nbytes(of) : nbytes])
            if self.image.device.kind == "cpu":
                join_in_place(self._high(number), buffer[nbytes - of.part_nbytes("values") : nbytes])

    def _high(self, number: int) -> Array:
        start, stop = self._bounds[number : number + 2]
        return self.image.values.reshape(-1)[start:stop]

    def _complete(self, number: int, values: Array, scratch: Array) -> None:
        high = self._high(number)
        low = scratch[: high.nbytes].view(np.int32)
        low[...] = low_words(values)[: high.size]
        join_on_device(high, low, values.view(np.float64))


class JoinedStore(CompletedOnArrival):
    """The matrix of a store of two planes, of which a sweep may read the high words alone: the matrix rounded to float32.

    Parameters
    ----------
    store : PlaneStore

    Attributes
    ----------
    rounded : bool
        Whether reads leave the low words out, which are 0 then.
    """

    def __init__(self, store: PlaneStore) -> None:
        super().__init__(store)
        self.rounded = False

    def read_share(self, part: Part) -> float:
        """Return the share of the bytes of a part of the matrix that is read."""
        return self._share_of_a_plane(part) if self.rounded else 1.0

    def read_into(self, number: int, buffer: Numbers, part: Part = "whole") -> None:
        """Read a part of a subdivision."""
        if not self.rounded or part == "structure":
            self.store.read_into(number, buffer, part)
            return
        of = self.index.subdivisions[number]
        if part == "whole":
            self.store.read_into(number, buffer, "structure")
        nbytes, high = of.part_nbytes(part), aligned_buffer(plane_nbytes(of))
        self.store.read_high(number, high)
        numbers, count = buffer[nbytes - of.part_nbytes("values") : nbytes].view(np.float64), count_of_values(of)
        numbers[:count] = high.view(np.float32)[:count]
        numbers[count:] = 0


def count_of_values(subdivision: Subdivision) -> int:
    """Return how many values of float64 a subdivision stores, without padding."""
    [values] = [field for field in subdivision.fields if field.part == "values"]
    return values.nbytes // 8


class LostSums:
    """Sums up, slab by slab, what float32 loses of the rows of a matrix of which the upper half is stored.

    Corrections of the image are made of it. This takes 32 bytes for each row of the matrix and each row of a block.

    Raises
    ------
    BudgetError
        If there is no memory for it.
    """

    def __init__(self, slab: SparseMatrix) -> None:
        rows, size = slab.shape[1], slab.block_size  # type: ignore[attr-defined]
        if (needed := 4 * 8 * rows * size) > (room := available_nbytes()):
            raise BudgetError(
                f"sums of what float32 loses of {rows} rows take {format_nbytes(needed)}, but {format_nbytes(room)} of memory "
                "are available; store the matrix without planes (planes=False, --no-planes)"
            )
        self._ones = block_ones(rows, size, slab.device)
        self._sums = np.zeros_like(self._ones)
        self._lost, self._diagonal = (np.zeros((rows // size, size, size)) for _ in range(2))

    @staticmethod
    def has_some(slab: SparseMatrix) -> bool:
        """Return whether the images of a format have corrections."""
        return slab.name == SymmetricImageMatrix.of_format and slab.values_dtype == np.float64

    def add(self, first_row: int, slab: SparseMatrix) -> None:
        """Add the losses of the rows of a slab, and of those that it stores for others."""
        values = np.empty_like(slab.values)

        def lose(part: slice) -> None:
            with np.errstate(all="ignore"):
                values[part] = slab.values[part] - slab.values[part].astype(np.float32)

        in_pieces(lose, values.size, _AT_ONCE)
        lost = replace(slab, values=values)  # type: ignore[type-var]
        add_block_sums(lost, first_row, self._ones, self._sums)
        lost.add_diagonal_blocks(first_row, self._lost)
        slab.add_diagonal_blocks(first_row, self._diagonal)

    def corrections(self) -> Numbers:
        """Return the corrections of the blocks on the diagonal."""
        corrections = np.empty(self._lost.shape, dtype=np.float32)
        count, size = len(corrections), len(self._sums)
        for start in range(0, count, step := max(1, _AT_ONCE // size**2)):
            part = slice(start, min(start + step, count))
            sums = by_blocks(self._sums[:, part.start * size : part.stop * size])
            corrections[part] = corrections_of(sums, self._lost[part], self._diagonal[part])
        return corrections
