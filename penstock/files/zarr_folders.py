"""Groups of arrays in Zarr folders, which may come from anywhere: nothing is run, and no lost chunk is taken for zeros."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.files.csr_groups import group_slabs
from penstock.files.reader import READERS, Reader
from penstock.files.slabs import Slabs
from penstock.spmv import InputError

_REQUIREMENT = "penstock[files]"
_NAMES = ("data", "indices", "indptr")
# Names of the chunks of an array of one dimension, in folders of either version.
_CHUNK = re.compile(r"(?:c[/.])?(0|[1-9]\d*)")
_DEEPEST = 4  # groups inside groups; a folder may hold a link to itself
_COMPRESSORS = {"blosc", "bz2", "gzip", "lz4", "lzma", "zlib", "zstd"}
# Codecs of numbers and bytes, by the names that Zarr 2 and 3 give them; others, such as pickle, could run code.
_CODECS = {
    "adler32", "bitround", "blosc", "bytes", "bz2", "crc32", "crc32c", "delta", "fletcher32", "gzip", "jenkins_lookup3", "lz4",
    "lzma", "packbits", "sharding_indexed", "shuffle", "transpose", "zlib", "zstd",
}  # fmt: skip


def is_zarr(path: Path) -> bool:
    """Return whether a path is the folder of a Zarr group, of version 2 or 3."""
    try:
        return any((path / name).is_file() for name in (".zgroup", "zarr.json"))
    except OSError:  # such as a name that is too long
        return False


@contextmanager
def zarr_group(path: Path) -> Iterator[Any]:
    """Open the group with the arrays of a matrix in CSR: the folder itself, or the only one inside that has them.

    Arrays with missing chunks or a codec that could run code are refused.
    """
    _check_entries(path)
    groups = dict(_matrices(_import_zarr(path).open_group(path, mode="r", use_consolidated=False), ""))
    if not groups:
        raise InputError(f"{path} holds no group with data, indices and indptr, the arrays of a matrix in CSR")
    if len(groups) > 1:
        raise InputError(
            f"{path} holds {len(groups)} matrices: {', '.join(sorted(groups))}; add one of them to the path"
        )
    (group,) = groups.values()
    for name in (*_NAMES, *({"shape"} & set(group.array_keys()))):
        _check(path, name, group[name])
    yield group


def _import_zarr(path: Path) -> Any:
    import zarr

    if [int(part) for part in re.findall(r"\d+", zarr.__version__)[:3]] < [3, 1, 4]:
        raise InputError(
            f"{path} is read with zarr 3.1.4 or later, which is of version {zarr.__version__}: pip install '{_REQUIREMENT}'"
        )
    return zarr


def _matrices(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield names and groups that have the arrays of a matrix."""
    if set(_NAMES) <= set(group.array_keys()):
        yield name or ".", group
    elif name.count("/") < _DEEPEST:
        for inside, of in group.groups():
            yield from _matrices(of, f"{name}/{inside}".lstrip("/"))


def _check_entries(path: Path) -> None:
    """Refuse links that lead out of the folder, and what is neither file nor folder, such as a pipe, on which reads wait."""
    home, folders = path.resolve(), [path]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_symlink() and not Path(entry.path).resolve().is_relative_to(home):
                    raise InputError(
                        f"{entry.path} is a link to a file outside {path}; copy the folder with what it links to"
                    )
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                elif not entry.is_file() and not entry.is_dir():
                    raise InputError(f"{entry.path} is neither a file nor a folder; remove it, or copy the data anew")


def _check(path: Path, name: str, array: Any) -> None:
    described = array.metadata.to_dict()
    codecs = [described.get(key) for key in ("codecs", "filters", "compressor")]
    names = list(_codec_names(codecs))
    if sum(of in _COMPRESSORS for of in names) > 1:  # compressed twice, data may expand a millionfold
        raise InputError(f"{path} has {name} compressed several times; write it with zstd, gzip or blosc once")
    if refused := sorted(set(names) - _CODECS):
        raise InputError(f"{path} has {name} with the codec {', '.join(refused)}; write it with zstd, gzip or blosc")
    folder, chunks = path / array.path, math.ceil(array.shape[0] / (array.shards or array.chunks)[0])
    numbers = (_CHUNK.fullmatch(file.relative_to(folder).as_posix()) for file in folder.rglob("*") if file.is_file())
    there = sum(number < chunks for number in {int(match[1]) for match in numbers if match})
    if there < chunks:
        raise InputError(
            f"{path} has {there} of {chunks} chunks of {name}, and Zarr takes missing ones for zeros; copy it whole, or write it "
            "with write_empty_chunks"
        )


def _codec_names(described: Any) -> Iterator[str]:
    """Yield the names in the description of codecs, of those inside others too."""
    if isinstance(described, dict):
        for key, value in described.items():
            if key in ("id", "name"):
                yield str(value).removeprefix("numcodecs.")
            elif isinstance(value, dict | list | tuple):
                yield from _codec_names(value)
    elif isinstance(described, list | tuple):
        for value in described:
            yield from _codec_names(value)


def _slabs(path: Path) -> Slabs:
    return group_slabs(path, zarr_group)


READERS.add(
    "zarr",
    Reader(
        "Zarr",
        "matrix in Zarr",
        (".zarr",),
        recognizes=is_zarr,
        folder=True,
        slabs=_slabs,
        requirement=_REQUIREMENT,
    ),
)
