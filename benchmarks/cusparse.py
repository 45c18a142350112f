"""NVIDIA's sparse triangular solve (``cusparseSpSV``), which CuPy does not offer, called in the library that CuPy loads."""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Any, Self

from penstock.spmv import Array

_INT32, _BASE_ZERO, _FLOAT64, _NOT_TRANSPOSED, _DEFAULT = 2, 0, 1, 0, 0
_FILL_MODE, _DIAGONAL_TYPE = 0, 1


class TriangularPeer:
    """``cusparseSpSV`` with a lower triangle in CSR.

    Parameters
    ----------
    offsets, columns : int32 array
    values : float64 array
        On the GPU.
    b, x : float64 array, (n,)
        Right-hand side and solution of every solve.
    """

    def __init__(self, offsets: Array, columns: Array, values: Array, b: Array, x: Array) -> None:
        import cupy
        import cupyx.cusparse  # noqa: F401 - loads the library

        with open("/proc/self/maps", encoding="utf-8") as maps:
            path = next(line.split()[-1] for line in maps if "libcusparse.so" in line)
        self._library, self._kept = ctypes.CDLL(path), (offsets, columns, values, b, x)
        names = ("handle", "matrix", "b", "x", "analysis")
        self._objects = {name: ctypes.c_void_p() for name in names}
        made, rows = {name: ctypes.byref(value) for name, value in self._objects.items()}, ctypes.c_int64(b.size)
        self._call("cusparseCreate", made["handle"])
        arrays = [ctypes.c_void_p(array.data.ptr) for array in (offsets, columns, values)]
        types = [ctypes.c_int(value) for value in (_INT32, _INT32, _BASE_ZERO, _FLOAT64)]
        self._call("cusparseCreateCsr", made["matrix"], rows, rows, ctypes.c_int64(columns.size), *arrays, *types)
        zero = ctypes.c_int(0)  # a lower triangle, whose diagonal is stored
        for attribute in (_FILL_MODE, _DIAGONAL_TYPE):
            given = (ctypes.c_int(attribute), ctypes.byref(zero), ctypes.c_size_t(4))
            self._call("cusparseSpMatSetAttribute", self._objects["matrix"], *given)
        for name, vector in (("b", b), ("x", x)):
            self._call("cusparseCreateDnVec", made[name], rows, ctypes.c_void_p(vector.data.ptr), types[-1])
        self._call("cusparseSpSV_createDescr", made["analysis"])
        self._one, objects = ctypes.c_double(1.0), self._objects
        self._given: tuple[Any, ...] = (objects["handle"], ctypes.c_int(_NOT_TRANSPOSED), ctypes.byref(self._one))
        self._given += (
            objects["matrix"],
            objects["b"],
            objects["x"],
            types[-1],
            ctypes.c_int(_DEFAULT),
            objects["analysis"],
        )
        nbytes = ctypes.c_size_t()
        self._call("cusparseSpSV_bufferSize", *self._given, ctypes.byref(nbytes))
        #: Bytes of its workspace.
        self.workspace_nbytes = int(nbytes.value)
        self._workspace = cupy.empty(max(1, self.workspace_nbytes), dtype=cupy.uint8)

    def analyse(self) -> None:
        """Analyse the pattern."""
        self._call("cusparseSpSV_analysis", *self._given, ctypes.c_void_p(self._workspace.data.ptr))

    def solve(self) -> None:
        """Solve."""
        self._call("cusparseSpSV_solve", *self._given)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for name, what in (
            ("cusparseSpSV_destroyDescr", "analysis"),
            ("cusparseDestroySpMat", "matrix"),
            ("cusparseDestroyDnVec", "b"),
            ("cusparseDestroyDnVec", "x"),
            ("cusparseDestroy", "handle"),
        ):
            self._call(name, self._objects[what])

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise OSError(f"{name} returned status {status}")
