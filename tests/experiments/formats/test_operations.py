"""Other operations than products with vectors are timed from the command line, and their records kept."""

import json

import pytest
import scipy.sparse
from typer.testing import CliRunner

from penstock.commands.app import app
from penstock.experiments.formats.operations import OPERATIONS, OperationStudy
from penstock.files.registry import read_matrix
from penstock.spmv import CPU, InputError


@pytest.mark.usefixtures("rendered_pictures")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_is_timed_and_its_records_are_kept(operation, tmp_path):
    arguments = ["bench", "cube8-dof3", "--operation", operation, "--repeats", "2", "--output", str(tmp_path / "out")]

    result = CliRunner().invoke(app, arguments)

    assert result.exit_code == 0, result.output
    records = json.loads((tmp_path / "out" / "operations.json").read_text())["records"]
    assert {entry["operation"] for entry in records} == {operation}
    assert len(records) >= 2
    assert all(len(entry["samples"]) == 2 and entry["seconds"] > 0 for entry in records)
    assert all(seconds > 0 for entry in records for seconds in entry["peers"].values())
    assert "SciPy" in result.output
    assert (tmp_path / "out" / f"{operation}.png").stat().st_size > 10_000


def test_a_study_goes_on_where_it_was_interrupted(tmp_path):
    first, second = read_matrix("cube6-dof1"), read_matrix("cube7-dof1")
    OperationStudy("spgemm", [first], CPU, tmp_path, repeats=1).run()
    study = OperationStudy("spgemm", [first, second], CPU, tmp_path, repeats=1)

    assert study.run()
    assert [entry["matrix"] for entry in study.records] == [first.name] * 2 + [second.name] * 2


def test_refusals(tmp_path):
    unknown = CliRunner().invoke(app, ["bench", "cube6-dof1", "--operation", "fft"])
    assert unknown.exit_code == 2
    scipy.sparse.save_npz(tmp_path / "wide.npz", scipy.sparse.csr_array([[1.0, 2.0]]))
    with pytest.raises(InputError, match="square"):
        OperationStudy("trsv", [read_matrix(str(tmp_path / "wide.npz"))], CPU, tmp_path)
    with pytest.raises(InputError, match="too small"):
        OperationStudy("galerkin", [read_matrix("cube4-dof1")], CPU, tmp_path / "small", repeats=1).run()
