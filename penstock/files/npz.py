"""Matrices in files of ``scipy.sparse.save_npz``, whose arrays are checked before SciPy trusts them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import scipy.sparse

from penstock.files.arrays import ArrayArchive, check_fits_memory
from penstock.files.reader import READERS, Reader
from penstock.files.slabs import narrow_offsets
from penstock.spmv import InputError


def _read_npz(path: Path, *, in_file: bool = False) -> Any:
    with ArrayArchive(path) as archive:
        nbytes = {name: archive.nbytes(name) for name in archive.contents}
        held = {name: of for name, of in nbytes.items() if not (in_file and archive.stays_in_file(name))}
        check_fits_memory(sum(held.values()) + held.get("data", 0) * 2, f"the matrix in {path}")
        for name in ("indptr", "indices", "row", "col", "offsets", "shape"):
            if name in nbytes and archive.contents[name][1].kind not in "iu":
                raise InputError(
                    f"{path} is damaged: its {name} are of type {archive.contents[name][1]}, not whole numbers"
                )
        lengths = {archive.contents[name][0] for name in ("data", "indices", "row", "col") if name in nbytes}
        kind = archive.read("format").item() if "format" in nbytes else ""  # SciPy writes bytes, others text
        kind = kind.decode("ascii", "replace") if isinstance(kind, bytes) else str(kind)
        if len(lengths) > 1 and kind not in ("dia", "bsr"):
            raise InputError(f"{path} is damaged: its values and indices have the shapes {sorted(lengths)}")
        if kind in ("csr", "bsr"):  # with all cores
            made: Any = scipy.sparse.csr_array if kind == "csr" else scipy.sparse.bsr_array
            values, columns, offsets = (archive.read(name, in_file=in_file) for name in ("data", "indices", "indptr"))
            arrays = values, columns, narrow_offsets(offsets, columns)
            matrix = made(arrays, shape=tuple(archive.read("shape")))
        else:
            matrix = scipy.sparse.load_npz(path)
    if matrix.ndim != 2:
        raise InputError(f"{path} holds an array of {matrix.ndim} dimension; expected a matrix, which has 2")
    return matrix


READERS.add(
    "npz",
    Reader(
        "SciPy",
        ".npz file of scipy.sparse.save_npz",
        (".npz",),
        matrix=_read_npz,
        in_file=partial(_read_npz, in_file=True),
    ),
)
