"""A checkpoint is taken whole or not at all, whoever wrote it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from penstock.experiments.reporting import checkpoint as module
from penstock.experiments.reporting.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from penstock.fem import Cantilever
from penstock.solvers import SavedState, block_cg, cg, chebyshev, jacobi, minres, smoothed_aggregation
from penstock.spmv import InputError, StoreError

BEAM = Cantilever(nodes=(9, 4, 4), dof=3)


@pytest.fixture(scope="module")
def A():
    return BEAM.matrix()


def states(A):
    b = BEAM.load()
    B = np.stack([b, b[::-1]], axis=1)
    coarse = smoothed_aggregation(A, coordinates=BEAM.mesh.coordinates(), aggregates=BEAM.mesh.node_counts)
    for solve, rhs in ((cg, b), (block_cg, B)):
        for M in (None, chebyshev(A, 5, block_size=3), coarse):
            yield solve(A, rhs, M=M, rtol=1e-9, maxiter=3).state
    yield minres(A, B, rtol=1e-9, maxiter=3).state


def equal(one, other):
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return one == other and type(one) is type(other)


def test_every_state_is_read_as_it_was_written(A, tmp_path):
    settings = {"model": {"nodes": [9, 4, 4]}, "load": {"magnitude": 0.1}}
    for state in states(A):
        write_checkpoint(tmp_path / "c.npz", Checkpoint(state, 4, 5, 0.25, -1, 2, settings))
        read = read_checkpoint(tmp_path / "c.npz", BEAM.unknowns)

        assert (read.sweeps, read.bytes_streamed, read.seconds, read.direction, read.ranks) == (4, 5, 0.25, -1, 2)
        assert read.settings == settings
        assert type(read.state) is type(state)
        assert all(equal(getattr(read.state, name), value) for name, value in vars(state).items())


@pytest.fixture
def contents(A, tmp_path):
    write_checkpoint(tmp_path / "c.npz", Checkpoint(cg(A, BEAM.load(), M=jacobi(A), maxiter=3).state))
    with np.load(tmp_path / "c.npz") as data:
        return dict(data)


def written(path, contents, *, checksum=True):
    if checksum:
        contents.pop("checksum")
        contents["checksum"] = np.array(module.checksum(contents))
    np.savez(path, **contents)
    return path


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"p": lambda p: p[:-1]}, "p of the state has shape"),
        ({"r": lambda r: r[:1], "p": lambda p: p[:1]}, "r of the state has shape"),
        ({"p": lambda p: p.astype(complex)}, "type complex128"),
        ({"p": lambda p: p.reshape(-1, 1)}, "p of the state has shape"),
        ({"p": lambda p: np.ones(p.size, np.int64)}, "type int64"),
        ({"x": lambda x: x.astype("f4")}, "r of the state has shape .* type float64"),
        ({name: lambda v: np.ones(v.size, "U3") for name in "xrp"}, "iterates of type <U3"),
        ({"x": lambda x: np.r_[x, x]}, "vectors of another length"),
        ({"x": lambda x: x * np.nan}, "holds nan"),
        ({"residual_norms": lambda norms: norms[:0]}, "residual_norms"),
        ({"residual_norms": lambda norms: np.zeros((3, 2))}, "residual_norms"),
        ({"residual_norms": lambda norms: np.array(["a"])}, "residual_norms"),
        ({"rho": lambda _: np.array(-1.0)}, "rho of the state"),
        ({"iteration": lambda _: np.array(1.5)}, "iteration of the state"),
        ({"spent": lambda _: np.array([-1, 5, 1, 1])}, "sweeps of the state cannot be -1"),
        ({"spent": lambda _: np.array([1, 5, 7, 1])}, "direction of 7"),
        ({"spent": lambda _: np.array([1, 2])}, "not enough values"),
        ({"spent_seconds": lambda _: np.array(np.nan)}, "seconds of the state"),
        ({"b_norms": lambda norms: norms[None]}, "norms of its right-hand sides"),
        ({"b_norms": lambda norms: norms[:0]}, "norms of its right-hand sides"),
        ({"solver": lambda _: np.array("sor")}, "unknown solver 'sor'"),
        ({"settings": lambda _: np.array("[" * 100_000)}, "recursion"),
    ],
)  # fmt: skip
def test_contents_that_cannot_be_are_refused_even_with_a_checksum_that_fits(contents, changes, told, tmp_path):
    for name, change in changes.items():
        contents[name] = change(contents[name])

    with pytest.raises(InputError, match=f"cannot be resumed from: .*{told}"):
        read_checkpoint(written(tmp_path / "c.npz", contents), BEAM.unknowns)


def test_a_changed_number_does_not_match_the_checksum(contents, tmp_path):
    contents["p"] = contents["p"] * (1 + 1e-15)

    with pytest.raises(InputError, match="does not match its checksum; start the run anew"):
        read_checkpoint(written(tmp_path / "c.npz", contents, checksum=False), BEAM.unknowns)


def test_python_objects_and_missing_arrays_are_refused(contents, tmp_path):
    whole = dict(contents)
    contents["p"] = np.array([{}])
    np.savez(tmp_path / "objects.npz", **contents)
    del whole["r"]

    with pytest.raises(InputError, match="Python objects, which could run code"):
        read_checkpoint(tmp_path / "objects.npz", BEAM.unknowns)
    with pytest.raises(InputError, match=r"cannot be resumed from: .*'r'"):
        read_checkpoint(written(tmp_path / "c.npz", dict(whole)), BEAM.unknowns)
    whole["r"] = whole["p"]
    del whole["b_norms"]
    with pytest.raises(InputError, match="cannot be resumed from: it does not say which system it is of"):
        read_checkpoint(written(tmp_path / "c.npz", whole), BEAM.unknowns)


#: A solve of three iterations by each method, as the version of 2026-11-22 (188e6db) wrote it.
OLD = Path(__file__).parent / "checkpoints"
OLD_BEAM = Cantilever(nodes=(5, 3, 3), dof=3)


def old_solve(name):
    """Return what solves the system of an old checkpoint: a function of the state to resume from."""
    A = OLD_BEAM.matrix()
    coarse = smoothed_aggregation(A, coordinates=OLD_BEAM.mesh.coordinates(), aggregate_nodes=9)
    M, block = coarse if name.startswith("coarse") else None, name.endswith("block_cg")
    solve, b = (block_cg, OLD_BEAM.load("shear", "axial")) if block else (cg, OLD_BEAM.load())
    return lambda state: solve(A, b, M=M, rtol=1e-10, state=state)


@pytest.mark.parametrize("name", ["cg", "block_cg", "coarse_cg", "coarse_block_cg"])
def test_a_checkpoint_of_an_older_version_is_read_and_resumed_bit_for_bit(name, tmp_path):
    old = read_checkpoint(OLD / f"{name}.npz", OLD_BEAM.unknowns)
    write_checkpoint(tmp_path / "new.npz", old)
    new = read_checkpoint(tmp_path / "new.npz", OLD_BEAM.unknowns)

    with np.load(OLD / f"{name}.npz") as before, np.load(tmp_path / "new.npz") as after:
        assert set(before) == set(after)
        assert all(before[key].dtype == after[key].dtype for key in before)
        assert all(before[key].tobytes() == after[key].tobytes() for key in before)
        assert (str(before["solver"]), old.state.iteration) == (name, 3)
    one, two, whole = (old_solve(name)(state) for state in (old.state, new.state, None))
    assert one.converged
    assert one.iterations == two.iterations == whole.iterations
    np.testing.assert_array_equal(one.x, two.x)
    # The sums of another processor may round otherwise, and a coarse level of today's aggregates goes on from the old iterate.
    noise = 1e-8 * abs(whole.x).max()
    np.testing.assert_allclose(one.x, whole.x, rtol=1e-6, atol=noise)


def test_a_state_that_does_not_say_how_it_is_written_is_refused(A, tmp_path):
    @dataclass
    class Unregistered(SavedState):
        x: np.ndarray

    with pytest.raises(StoreError, match=r"no checkpoint is written of a Unregistered; .* registered Method"):
        write_checkpoint(tmp_path / "c.npz", Checkpoint(Unregistered(np.ones(3))))
    assert not list(tmp_path.iterdir())
