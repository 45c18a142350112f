"""Stores matrices in files, or in another store, without reading them whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, cast

from penstock.files.arrays import failures_named
from penstock.files.registry import is_store, reader_of, reading, slabs_of
from penstock.files.slabs import Slabs, fitting
from penstock.spmv import CPU, InputError, format_named, parse_nbytes
from penstock.streaming import FileStore, StoreBuilder
from penstock.streaming.store_products import complete_slabs
from penstock.streaming.stores.packing import recut, symmetric_slabs


def store_files(
    sources: Sequence[str | Path],
    path: str | Path,
    *,
    format: str = "auto",
    block_size: int | Literal["auto"] = "auto",
    slab: int | str = "16 MiB",
    planes: bool | None = None,
    memory: int | str = "1 GiB",
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> FileStore:
    """Store a matrix in files as a :class:`FileStore`, from which it can be streamed.

    Sources are a file or folder that :func:`penstock.files.registry.read_matrix` reads, or the folder of a store, which is cut
    and converted anew; or several, each with some of the rows, one after the other. Stores and files whose reader has ``slabs``
    are read slab by slab, those whose reader has ``entries``, which may come in any order, in parts that are sorted in
    ``memory``, others whole. Subdivisions have about ``slab`` bytes. A store keeps its format and blocks if ``format`` is
    ``"auto"``. Values are stored in two ``planes`` by default where images in fewer digits are likely to be made of them, half of
    a symmetric matrix, and if they can be. Other options are those of :meth:`FileStore.create`.
    """
    if not sources:
        raise InputError("name a file, or several with some of the rows each")
    if format == "auto":
        format, block_size = _format_of_stores(sources, block_size)
    chosen: bool | Literal["auto"] = planes or False
    if planes is None and format != "auto" and format_named(format).traits.half:
        chosen = "auto"
    files, options = (
        [Path(source) for source in sources],
        {"format": format, "block_size": block_size, "overwrite": overwrite, "planes": chosen},
    )
    if any(not is_store(file) and reader_of(file).entries is not None for file in files):
        return _of_entries(files, Path(path), memory, progress, {"slab": slab, **options})
    with ExitStack() as opened:
        parts = [_slabs(file, opened) for file in files]
        shape = _shape_of([of.shape for of in parts])
        rows, options["block_size"] = recut(_rows_of(files, parts), parse_nbytes(slab), format, block_size)
        rows = symmetric_slabs(map(fitting, rows), shape[0], format)
        return FileStore.create(path, rows, shape=shape, progress=progress, **cast(Any, options))


def _format_of_stores(
    sources: Sequence[str | Path], block_size: int | Literal["auto"]
) -> tuple[str, int | Literal["auto"]]:
    """Return the format and block size of stores that have the same ones; ``"auto"`` if they do not, or for other files."""
    kinds: set[tuple[str, int]] = set()
    for source in sources:
        if not is_store(Path(source)):
            return "auto", block_size
        with FileStore(Path(source)) as store:
            kinds.add((store.index.format_name, store.index.block_size))
    [(name, size), *others] = kinds
    if others:
        return "auto", block_size
    return name, size if block_size == "auto" and format_named(name).traits.blocked else block_size


def _shape_of(parts: list[tuple[int, int]]) -> tuple[int, int]:
    """Return the shape of the matrix whose rows are in several parts."""
    columns = {shape[1] for shape in parts}
    if len(columns) > 1:
        raise InputError(f"the files hold rows of {sorted(columns)} columns; those of one matrix have the same number")
    return sum(shape[0] for shape in parts), columns.pop()


def _rows_of(files: list[Path], parts: list[Slabs]) -> Iterator[Any]:
    for file, slabs in zip(files, parts, strict=True):
        with failures_named(file, "matrix"):
            yield from slabs.rows


def _slabs(file: Path, opened: ExitStack) -> Slabs:
    if is_store(file):
        store = opened.enter_context(FileStore(file))
        return Slabs(store.index.shape, store.index.nnz, (slab.to_csr() for slab in complete_slabs(store, CPU)))
    return slabs_of(file)


def _of_entries(
    files: list[Path], path: Path, memory: int | str, progress: Callable[[int], None] | None, options: dict[str, Any]
) -> FileStore:
    """Build a store of files whose entries come in any order."""
    parts = []
    for file in files:
        reader = None if is_store(file) else reader_of(file)
        if reader is None or reader.entries is None:
            raise InputError(f"{file} lists rows, but others entries in any order; store files of one kind together")
        with reading(file, reader):
            parts.append(reader.entries(file))
    with StoreBuilder(path, _shape_of([shape for shape, _ in parts]), memory=memory, **options) as builder:
        first_row = 0
        for file, (shape, entries) in zip(files, parts, strict=True):
            with reading(file, reader_of(file)):
                for rows, columns, values in entries:
                    builder.add(rows + first_row, columns, values)
            first_row += shape[0]
        return builder.finish(progress)
