"""Vectors in files of ``numpy.save``."""

from __future__ import annotations

from penstock.files.arrays import open_array
from penstock.files.reader import READERS, Reader

READERS.add("npy", Reader("NumPy", "array of numpy.save", (".npy",), vectors=open_array))
