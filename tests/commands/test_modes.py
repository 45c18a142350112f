"""``penstock modes``: matrices in files."""

import json

import numpy as np
import pytest
import scipy.sparse
from typer.testing import CliRunner

from penstock.commands.app import app
from penstock.fem import Cantilever


@pytest.fixture
def files(tmp_path, monkeypatch):
    beam = Cantilever(nodes=(17, 6, 6), dof=3, lengths=3.0)
    scipy.sparse.save_npz(tmp_path / "K.npz", scipy.sparse.csr_matrix(beam.matrix().to_csr()))
    scipy.sparse.save_npz(tmp_path / "M.npz", scipy.sparse.csr_matrix(beam.mass().to_csr()))
    np.save(tmp_path / "m.npy", beam.mass(lumped=True).diagonal())
    np.save(tmp_path / "X.npy", beam.mesh.coordinates())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(app, ["modes", *map(str, arguments)])


@pytest.mark.parametrize("mass", ["M.npz", "m.npy"])
def test_modes_of_files_are_written(files, mass):
    result = run("K.npz", mass, "-k", 4, "--coordinates", "X.npy", "--device", "cpu")
    assert result.exit_code == 0, result.output
    folder = files / "results" / "modes-K"
    with np.load(folder / "modes.npz") as found:
        assert found["vectors"].shape == (1836, 4)
        facts = json.loads((folder / "result.json").read_text())
        assert facts["values"] == found["values"].tolist()
    assert facts["converged"]
    assert "frequency" in (folder / "modes.txt").read_text()


def test_modes_that_do_not_converge_end_with_code_1(files):
    result = run("K.npz", "M.npz", "-k", 4, "--coordinates", "X.npy", "--device", "cpu", "--maxiter", 1)
    assert result.exit_code == 1
    assert "maxiter" in (files / "results" / "modes-K" / "modes.txt").read_text()


def test_what_is_no_mass_leaves_no_folder(files):
    result = run("K.npz", "X.npy", "--device", "cpu")
    assert "is the diagonal" in str(result.exception)
    assert not (files / "results" / "modes-K").exists()
