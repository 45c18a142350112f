"""The Python on the pages of the site runs as it stands, and a list on a page is complete.

A page leaves the matrix and the vectors of its examples to its reader; the tests give them.
"""

import re
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.fem import Cantilever
from penstock.files.reader import READERS
from penstock.streaming import FileStore

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [
    "explanation/a-call",
    "start/first-solve",
    "how-to/another-program",
    "how-to/choose-a-preconditioner",
    "how-to/choose-memory",
    "how-to/from-disk",
    "how-to/from-elements",
    "how-to/gradients",
    "how-to/it-does-not-converge",
    "how-to/loads-one-after-another",
    "how-to/many-load-cases",
    "how-to/modes",
    "how-to/new-values",
    "how-to/resume",
    "how-to/scikit-fem",
    "how-to/singular-and-free-systems",
    "how-to/time-steps",
]
BEAM = Cantilever(nodes=(33, 5, 5), dof=3)


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(encoding="utf-8"), re.S)


def of_the_reader():
    """Return what a page may take for granted."""
    A, b = BEAM.matrix("csr").to_csr(), BEAM.load("shear")
    n = A.shape[0]
    bar = np.array([[1.0, -1.0], [-1.0, 1.0]])

    def my_elements():
        nodes = np.arange(n - 1)
        yield np.stack([nodes, nodes + 1], axis=1), np.broadcast_to(bar, (n - 1, 2, 2))

    csr = {"values": A.data, "columns": A.indices, "offsets": A.indptr}
    return csr | {"A": A, "b": b, "n": n, "B": np.stack([b, 2.0 * b[::-1]], axis=1), "my_elements": my_elements}


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    space = of_the_reader()
    if page == "how-to/gradients":
        pytest.importorskip("torch")
        pytest.importorskip("jax")
    if page == "how-to/another-program":
        (tmp_path / "results" / "solve-A").mkdir(parents=True)
        np.save(tmp_path / "results" / "solve-A" / "solution.npy", space["b"])
    for code in blocks(page):
        exec(compile(code, page, "exec"), space)
    if page != "how-to/choose-a-preconditioner":
        assert getattr(space.get("result"), "converged", True), space["result"]
    if page == "how-to/gradients":
        assert abs(space["logarithms"].exp() - space["true"]).max() < 0.01
        stiffness = space["jnp"].array([1.0, 2.0])
        np.testing.assert_allclose(space["jax"].grad(space["compliance"])(stiffness), [-1.0, -0.25], rtol=1e-5)
    if page == "how-to/scikit-fem":
        A, b, x = (space[name] for name in ("A", "b", "displacement"))
        for solution in (x[space["unknowns"]], space["result"].x):
            assert np.linalg.norm(b - A @ solution) <= 1e-8 * np.linalg.norm(b)


def test_a_store_that_is_cut_too_coarsely_is_told_to_be_cut_anew(tmp_path):
    FileStore.create(tmp_path / "store", BEAM.subdivisions(1)).close()
    with pytest.raises(penstock.spmv.BudgetError) as caught:
        penstock.solve(tmp_path / "store", BEAM.load(), memory="100 KiB", device="cpu")
    assert "--slab SIZE" in caught.value.__notes__[0]


def test_the_page_on_file_formats_names_all_readers():
    page = (DOCS / "reference" / "file-formats.md").read_text(encoding="utf-8")
    for reader in (READERS[name] for name in READERS.keys()):  # noqa: SIM118 - a registry
        assert reader.program in page
        assert all(f"`{suffix}`" in page for suffix in reader.suffixes), reader.program
