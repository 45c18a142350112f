"""The registry of readers: the contents of each kind of file, how it is recognized, and the functions that read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.files.slabs import Slabs
from penstock.spmv.registry import Registry

#: Shape of a matrix, and its entries in parts: rows, columns and values, mirror images among them.
Entries = tuple[tuple[int, int], Iterator[tuple[Any, Any, Any]]]


@dataclass(frozen=True)
class Reader:
    """A kind of file, declared beside the functions that read it. What it has no function for, it does not read.

    Whatever these functions raise becomes an ``InputError`` that names the file. What they return is checked as far as SciPy and
    the kernels trust it; a reader checks what a file announces before anything of that size is made.

    Parameters
    ----------
    program : str
        Where such files come from, for the help of commands, such as ``"PETSc"``.
    label : str
        What errors call one, such as ``"MATLAB file"``.
    suffixes : tuple of str
        Endings of names, in lower case, such as ``".mtx.gz"``.
    recognizes : callable, optional
        Whether a path is one, by what is in it, for names that say nothing.
    folder : bool
        Whether it is a folder.
    matrix : callable, optional
        ``matrix(path)``: the matrix as a whole, in any form of SciPy.
    in_file : callable, optional
        ``in_file(path)``: the same, whose large arrays may be those of the file, mapped into memory, from where a GPU takes them.
    slabs : callable, optional
        ``slabs(path)``: the rows of the matrix as :class:`~penstock.files.slabs.Slabs`, read when they are asked for.
    entries : callable, optional
        ``entries(path)``: the entries of the matrix in any order, as :data:`Entries`, for files without an order of rows.
    vectors : callable, optional
        ``vectors(path)``: an array (n,) or (n, columns), or a matrix of SciPy.
    requirement : str
        What pip installs where ``import`` fails, such as ``"penstock[files]"``.
    """

    program: str
    label: str
    suffixes: tuple[str, ...] = ()
    recognizes: Callable[[Path], bool] | None = None
    folder: bool = False
    matrix: Callable[[Path], Any] | None = None
    in_file: Callable[[Path], Any] | None = None
    slabs: Callable[[Path], Slabs] | None = None
    entries: Callable[[Path], Entries] | None = None
    vectors: Callable[[Path], Any] | None = None
    requirement: str = ""

    @property
    def reads_matrix(self) -> bool:
        """Whether it reads a matrix in any way."""
        return self.matrix is not None or self.slabs is not None

    @property
    def described(self) -> str:
        """Its label and the names of its files, for messages."""
        names = [*self.suffixes, *(["any other name"] if self.recognizes else [])]
        return f"{self.label} ({' or '.join(filter(None, (', '.join(names[:-1]), names[-1])))})"

    def knows(self, path: Path) -> bool:
        """Whether a path is one, by what is in it."""
        return self.recognizes is not None and self.recognizes(path)

    def suffix_of(self, name: str) -> str:
        """Return the longest of its suffixes that a name ends with, or an empty text."""
        return max((suffix for suffix in self.suffixes if name.lower().endswith(suffix)), key=len, default="")


#: All readers by name; packages add theirs in the entry point group ``penstock.readers``.
READERS: Registry[str, Reader] = Registry("kind of file", "penstock.readers")
