"""An element of a user's own: a function that computes its stiffness, in Python for CPUs and in CUDA C++ for GPUs."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np

from penstock.spmv import Array, InputError
from penstock.spmv.compilation.jit import compiled_anew

#: Unknowns of a node of which a coarse level knows the rigid motions, or constants.
UNKNOWNS = (1, 3, 6)
MOST_NODES = 32
# Elements of a mesh that are looked at, and the asymmetry and the negative eigenvalue that rounding may leave in them.
_LOOKED_AT, _ROUNDING = 16, 1e-8


@dataclass(frozen=True)
class OwnElement:
    """An element that the caller defines, for :class:`penstock.ElementMatrix`.

    Its stiffness matrix is computed one node at a time: the row of blocks that couples a node with every node of the element.

    Parameters
    ----------
    row : function ``row(x, parameters, own, blocks)``
        Adds to ``blocks[b, r, c]``, which are zero, the entry of unknown r of node ``own`` and unknown c of node b. ``x`` are the
        corners, (nodes, 3), ``parameters`` an array. Numba compiles it, so it may only use what Numba knows; functions that it
        calls are decorated with ``numba.njit``.
    nodes : int
        Of an element, 2 to 32.
    dof : int
        Unknowns of a node: 1, of which constants are the slow modes, 3 displacements, or 6 displacements and rotations.
    cuda : str, optional
        The same in CUDA C++, for GPUs: ``__device__ void element_row(const double (*x)[3], const double* parameters, int own,
        double* blocks)``, where the entry is ``blocks[(b * dof + r) * dof + c]``.
    parameters : sequence of float
        Numbers that both get.

    Raises
    ------
    InputError
        If a number is out of range, or ``row`` is no function.

    Notes
    -----
    Elements of a mesh are spot-checked when a matrix is made of them: they must be finite, symmetric and positive semidefinite,
    and indices in range. What a GPU makes of the first rows is compared with what the CPU does. The function is compiled anew in
    each process, for the check and for the matrix. Nodes in a plane need a third coordinate, too. Without ``cuda``, a machine
    with a GPU needs ``device="cpu"``. The code for a GPU must not define macros named as those of the kernels, such as NODES.

    Examples
    --------
    Bars that only resist being stretched, with stiffness ``EA``, three displacements a node:

    >>> import numpy as np, penstock
    >>> def bar(x, parameters, own, blocks):
    ...     along = x[1] - x[0]
    ...     length = np.sqrt(np.sum(along**2))
    ...     for b in range(2):
    ...         sign = 1.0 if b == own else -1.0
    ...         for r in range(3):
    ...             for c in range(3):
    ...                 blocks[b, r, c] += sign * parameters[0] * along[r] * along[c] / length**3
    >>> element = penstock.OwnElement(bar, nodes=2, dof=3, parameters=[2.0])
    >>> points = np.array([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]])
    >>> bars = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    >>> truss = penstock.ElementMatrix(points, bars, element=element, fixed=range(6))
    >>> truss.shape, float(truss.to_csr()[6, 6]) > 0
    ((12, 12), True)
    """

    row: Callable[..., Any]
    nodes: int
    dof: int
    cuda: str = ""
    parameters: Any = ()

    def __post_init__(self) -> None:
        if not (inspect.isfunction(self.row) or hasattr(self.row, "py_func")):
            raise InputError(f"row must be a function row(x, parameters, own, blocks), not {type(self.row).__name__}")
        if not isinstance(self.cuda, str):
            raise InputError(f"cuda must be CUDA C++ as a string, not {type(self.cuda).__name__}")
        object.__setattr__(self, "dof", _whole(self.dof, "dof"))
        object.__setattr__(self, "nodes", _whole(self.nodes, "nodes"))
        if self.dof not in UNKNOWNS:
            raise InputError(f"dof must be 1, 3 or 6 unknowns a node, not {self.dof}")
        if not 2 <= self.nodes <= MOST_NODES:
            raise InputError(f"nodes must be 2 to {MOST_NODES} of an element, not {self.nodes}")
        try:
            numbers = np.asarray(() if self.parameters is None else self.parameters, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise InputError(f"parameters must be numbers, not {self.parameters!r}") from error
        if numbers.ndim > 1 or not np.isfinite(numbers).all():
            raise InputError("parameters must be one list of finite numbers")
        object.__setattr__(self, "parameters", tuple(numbers.reshape(-1).tolist()))

    def __repr__(self) -> str:
        name = getattr(self.row, "__name__", "function")
        return f"OwnElement({name}, nodes={self.nodes}, dof={self.dof})"

    def compiled(self) -> Any:
        """Return the function, compiled by Numba when it is called first, once in a process."""
        return _compiled(self.row)

    def cuda_text(self) -> str:
        """Return what stands before the kernels: the code, and the numbers of nodes and unknowns."""
        if not self.cuda:
            raise InputError(f"{self!r} has no CUDA C++ code; give cuda=, or use device='cpu'")
        return f'#define OWN_NODES {self.nodes}\n#define OWN_DOF {self.dof}\n#line 1 "own element"\n{self.cuda}'

    def matrix(self, x: Array) -> Array:
        """Return the stiffness matrix (nodes dof, nodes dof) of the element with some corners; indices are checked."""
        row, size = _with_checked_indices(self.row), self.nodes * self.dof
        parameters = np.array(self.parameters, dtype=np.float64)
        whole = np.zeros((self.nodes, self.nodes, self.dof, self.dof))
        try:
            for own in range(self.nodes):
                row(x, parameters, own, whole[own])
        except numba.core.errors.NumbaError as error:
            raise InputError(f"Numba cannot compile the function of {self!r}: {error}") from error
        except IndexError as error:
            shapes = f"x {x.shape}, {len(self.parameters)} parameters, blocks {whole[0].shape}"
            raise InputError(f"the function of {self!r} uses an index out of range: {shapes}") from error
        except Exception as error:
            raise InputError(f"the function of {self!r} raises {type(error).__name__}: {error}") from error
        return whole.transpose(0, 2, 1, 3).reshape(size, size)

    def check(self, coordinates: Array, connectivity: Array) -> None:
        """Refuse elements of which some that are looked at are not finite, symmetric and positive semidefinite."""
        some = np.unique(np.linspace(0, len(connectivity) - 1, _LOOKED_AT).astype(np.int64))
        for number in some:
            K = self.matrix(coordinates[connectivity[number]])
            largest = abs(K).max()
            if not np.isfinite(K).all():
                raise InputError(f"element {number} of {self!r} has entries that are not finite")
            if largest == 0.0:
                raise InputError(
                    f"element {number} of {self!r} is zero; its function must add to blocks in place: blocks[b, r, c] += ..."
                )
            if abs(K - K.T).max() > _ROUNDING * largest:
                raise InputError(f"element {number} of {self!r} is not symmetric")
            if np.linalg.eigvalsh(K)[0] < -_ROUNDING * largest * len(K):
                raise InputError(f"element {number} of {self!r} is not positive semidefinite")


def _whole(number: Any, name: str) -> int:
    try:
        return operator.index(number)
    except TypeError as error:
        raise InputError(f"{name} must be a whole number, not {number!r}") from error


@functools.lru_cache(maxsize=16)
def _compiled(row: Any) -> Any:
    return row if hasattr(row, "py_func") else compiled_anew(row)


@functools.lru_cache(maxsize=16)
def _with_checked_indices(row: Any) -> Any:
    return numba.njit(boundscheck=True, nogil=True)(getattr(row, "py_func", row))
