"""Rows of a matrix of elements as a target of kernels makes them."""

import numpy as np

from penstock.spmv import Device
from penstock.spmv.compilation.table import find_kernel


def make(target, matrix, name, count=1, parts=("structure", "values")):
    """Return the arrays of slabs that a target makes, on the host."""
    maker = matrix.row_maker(name, Device("cuda") if target.name == "gpu" else Device("cpu"))
    fill = find_kernel("element_rows", "fill", target.device_kind)
    made, row = [], 0
    for slab in matrix.symbolic_slabs(count, name):
        arrays = {
            key: target.put(np.full(array.shape, 77, array.dtype))
            for key, array in slab.arrays().items()
            if ("values" if key == "values" else "structure") in parts and key != "permutation"
        }
        nodes = row // matrix.dof, (row + slab.shape[0]) // matrix.dof
        with target.running():
            fill(maker.elements, maker.pattern, name, *nodes, arrays)
        made.append({key: target.get(array) for key, array in arrays.items()})
        row += slab.shape[0]
    return made
