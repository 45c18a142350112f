"""The kernel instantiations that the library can ask for, by file: what is compiled for every architecture and emulated."""

from itertools import product

TYPES = ("double, double", "float, double", "float, float")  # stored values, vectors
OFFSETS = ("int", "long long")
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")


def _csr() -> list[str]:
    names = [", ".join(pair) for pair in product(TYPES, OFFSETS)]
    lanes = (1, 2, 4, 8, 16, 32)
    return [
        *(f"csr_spmv<{types}, {count}>" for types, count in product(names, lanes)),
        *(f"{kernel}<{types}>" for kernel, types in product(("csr_spmm", "csr_diagonal_blocks"), names)),
    ]


def _bsr() -> list[str]:
    names = [", ".join(pair) for pair in product(TYPES, OFFSETS)]
    kernels = ("bsr_spmv", "bsr_spmm", "bsr_diagonal_blocks")
    return [f"{kernel}<{types}, {size}>" for kernel, types, size in product(kernels, names, range(1, 9))]


def _vectors() -> list[str]:
    return [f"{kernel}<{type_}>" for kernel, type_ in product(("dot_partial", "combine"), ("double", "float"))]


INSTANCES = {"csr.cu": _csr(), "bsr.cu": _bsr(), "vectors.cu": _vectors()}
