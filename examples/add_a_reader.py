"""A kind of file of one's own: lines of row, column and value, and vectors of a number a line, read wherever files are."""

import csv

import numpy as np
import scipy.sparse

from penstock.files.arrays import check_fits_memory
from penstock.files.reader import READERS, Reader


def read_lines(path):
    check_fits_memory(8 * path.stat().st_size, f"the numbers in {path}")
    with open(path, newline="") as file:
        return np.array([[float(number) for number in line] for line in csv.reader(file)])


def read_matrix(path):
    rows, columns, values = read_lines(path).T
    return scipy.sparse.coo_array((values, (rows.astype(np.int64), columns.astype(np.int64))))


def read_vectors(path):
    return read_lines(path)


READERS.add("csv", Reader("CSV", "file of lines of numbers", (".csv",), matrix=read_matrix, vectors=read_vectors))
