"""What all tests share."""

import gc
import itertools
import os
from pathlib import Path

import pytest

# Every test has a cache of its own, and so have the commands that it starts: without this, each would list the fonts anew.
_CACHES = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
os.environ.setdefault("MPLCONFIGDIR", str(_CACHES / "matplotlib"))
# Set before NumPy is imported: on busy cores its threads wait for each other longer than these small products take.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Modules that take long start first, so that no process is left with one of them when the others have ended. Before those that
# start processes come those that compile most kernels: processes that start together would each compile the same.
_FIRST = (
    "spmv/formats/test_contract.py",
    "streaming/test_streamed_matrix.py",
    "spmv/compilation/test_cuda_sources.py",
    "solvers/amg/test_random_systems.py",
    "spmv/compilation/test_amd_sources.py",
    "solvers/triangular/test_triangular_solve.py",
    "spmv/formats/test_conversions.py",
    "solvers/test_cg_state.py",
    "solvers/amg/test_method.py",
    "test_examples.py",
    "distributed/test_ranks.py",
    "experiments/cantilever/test_run.py",
    "experiments/cantilever/test_ranked_run.py",
    "experiments/cantilever/test_comparison.py",
    "driver/test_solve.py",
    "test_registries.py",
)

# Modules that run what a user would run.
_AS_FOR_USERS = ("test_direct.py", "test_pages.py", "test_docstrings.py", "test_examples.py", "test_gallery.py")


def pytest_collection_modifyitems(items):
    """Move the modules of that list to the front, in its order; the order inside modules stays."""

    def place(item):
        module = item.path.relative_to(Path(__file__).parent).as_posix()
        return _FIRST.index(module) if module in _FIRST else len(_FIRST)

    items.sort(key=place)


def pytest_collection_finish():
    """Take what lives as long as the session out of the garbage collector's sight: thousands of tests, and all modules."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def small_systems(request):
    """Solve small systems as large ones are, which these tests are about: where users' own code runs they are factorised."""
    from penstock.driver import direct  # not before the settings above

    with pytest.MonkeyPatch.context() as patch:
        if request.path.name not in _AS_FOR_USERS:
            patch.setattr(direct, "LARGEST_ROWS", 0)
        yield


@pytest.fixture(scope="module", autouse=True)
def factorised_by_scipy():
    """Factorise by SuperLU, so that what is chosen does not depend on an optional package."""
    from penstock.solvers import sparse_cholesky

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_cholesky, "_cholmod", lambda: None)
        yield


@pytest.fixture(scope="session")
def caches(tmp_path_factory):
    """Counts up folders. ``mktemp`` would look for a free number among all that it has made: thousands, for every test."""
    folder = tmp_path_factory.mktemp("caches")
    return (folder / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def cache_of_its_own(caches, monkeypatch):
    """Keep measured rates out of the user's cache, and what lies there out of the tests."""
    folder = next(caches)
    folder.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture(scope="module")
def one_thread():
    """Compute in one thread: on busy machines the kernels' threads wait for each other longer than small systems take.

    Of half a matrix the last bits depend on the number of threads, of nothing else.
    """
    import numba  # not before the settings above

    before = numba.get_num_threads()
    numba.set_num_threads(1)
    yield
    numba.set_num_threads(before)
