"""Cases of matrices that others made: altered files of MATLAB and HDF5, altered arrays of SciPy, builders with little memory."""

import random
import resource
from pathlib import Path

import h5py
import mutations
import numpy as np
import scipy.io
import scipy.sparse

from penstock import solve
from penstock.files.registry import read_matrix
from penstock.files.to_store import store_files
from penstock.streaming import StoreBuilder
from penstock.streaming.stores.whole import read_whole

__all__ = ["builder", "hdf5", "indices", "mat", "write_files"]

_ARRAYS = ("data", "indices", "indptr")
# What a builder takes besides the memory it is given: the interpreter's own growth, and slabs of 840 rows or more.
_BESIDE_NBYTES = 256 << 20


def write_files(base: Path, A: scipy.sparse.csr_array) -> None:
    """Write the whole files that cases alter."""
    for packed in (False, True):
        scipy.io.savemat(
            base / f"{'packed' if packed else 'plain'}.mat", {"x": 1.0, "A": A.tocsc()}, do_compression=packed
        )
    scipy.io.savemat(base / "problem.mat", {"Problem": {"name": "beam", "A": A.tocsc()}})
    with h5py.File(base / "plain.h5", "w") as plain, h5py.File(base / "packed.h5", "w") as packed:
        for name in _ARRAYS:
            plain[f"K/{name}"] = getattr(A, name)
            packed.create_dataset(name, data=getattr(A, name), chunks=(500,), compression="gzip", shuffle=True)


def mat(seed: int, base: Path) -> str:
    """Read, or store, an altered MATLAB file."""
    rng, path = random.Random(seed), base / f"{seed}.mat"
    content = (base / rng.choice(["plain.mat", "packed.mat", "problem.mat"])).read_bytes()
    path.write_bytes(mutations.altered_bytes(content, rng))
    return _read_or_stored(path, rng)


def hdf5(seed: int, base: Path) -> str:
    """Read, or store, an HDF5 file with other bytes, or with other arrays."""
    rng, path = random.Random(seed), base / f"{seed}.h5"
    path.write_bytes((base / rng.choice(["plain.h5", "packed.h5"])).read_bytes())
    if rng.random() < 0.5:
        path.write_bytes(mutations.altered_bytes(path.read_bytes(), rng))
    else:
        with h5py.File(path, "a") as file:
            group, name = file.get("K", file), rng.choice(_ARRAYS)
            array = mutations.altered_array(group[name][:], rng)
            del group[name]
            if array.dtype.kind not in "US" and rng.random() < 0.7:
                group[name] = array
            else:
                length = rng.choice([1, 5000, 10**7, 10**12])
                group.create_dataset(name, (length,), "f8", chunks=(min(length, 1 << 16),))
    return _read_or_stored(path, rng)


def indices(seed: int, base: Path) -> str:
    """Solve with a SciPy matrix of which arrays were altered."""
    rng = random.Random(seed)
    A = scipy.sparse.csr_array(scipy.sparse.load_npz(base / "a.npz")).asformat(rng.choice(["csc", "coo", "csr", "bsr"]))
    numbers = np.random.default_rng(seed)
    names = ("row", "col") if A.format == "coo" else ("indices", "indptr")
    array = getattr(A, rng.choice(names))
    places = numbers.integers(0, array.size, rng.choice([1, 1, 20]))
    array[places] = rng.choice([-1, -(2**31), 2**31 - 1, 10**9, A.shape[0], A.shape[0] + 1, 0, int(array[0])])
    result = solve(A, np.ones(A.shape[0]), device="cpu", maxiter=5)
    return "solved" if result.converged else "not converged"


def builder(seed: int, base: Path) -> str:
    """Build a store of random shape in little memory: what is taken stays near it, and the matrix is that of the entries."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    shape = (rng.choice([1, 100, 10**5, 10**7, 10**9, 10**12]), rng.choice([1, 5, 10**5]))
    memory = rng.choice([1 << 16, 1 << 20, 16 << 20] if shape[0] > 10**5 else [1 << 10, 1 << 16, 1 << 20])
    entries = rng.choice([0, 1, 1000, 200_000])
    rows, columns = (numbers.integers(0, size if rng.random() < 0.7 else min(size, 50), entries) for size in shape)
    values = numbers.standard_normal(entries)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with StoreBuilder(base / f"{seed}-built", shape, memory=memory, format=rng.choice(["auto", "csr", "ell"])) as made:
        for part in np.array_split(np.arange(entries), rng.choice([1, 7])):
            made.add(rows[part], columns[part], values[part])
        with made.finish() as store:
            taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
            assert taken < 4 * memory + _BESIDE_NBYTES, f"took {taken >> 20} MiB with memory={memory >> 10} KiB"
            if shape[0] <= 10**5:
                expected = scipy.sparse.coo_array((values, (rows, columns)), shape=shape).tocsr()
                # Sums of many entries in another order differ by more roundings.
                assert abs(read_whole(store) - expected).max() < 1e-12 + 1e-15 * entries
    return "built"


def _read_or_stored(path: Path, rng: random.Random) -> str:
    if rng.random() < 0.5:
        store_files([path], path.parent / f"{path.stem}-stored").close()
        return "stored"
    matrix = read_matrix(path).matrix
    assert np.isfinite(matrix.data).all()
    assert matrix.indices.size == 0 or 0 <= matrix.indices.min() <= matrix.indices.max() < matrix.shape[1]
    return "read"
