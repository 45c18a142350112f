"""What is told of the loaded end: deflection, twist or temperature, and beam theory where it applies."""

import h5py
import numpy as np
import pytest

from penstock.experiments import Experiment, run_experiment
from penstock.experiments.cantilever.tips import beam_theory, quantities
from penstock.fem import Cantilever, LinearElasticity, timoshenko_tip_deflection


def described(**sections):
    return Experiment.model_validate({"model": {"nodes": [25, 4, 4]}, "output": {"figures": False}} | sections)


def test_a_rigid_rotation_of_the_end_is_its_twist():
    body = Cantilever(nodes=(5, 4, 6), dof=6, lengths=(2.0, 0.6, 1.0))
    rotated = np.zeros((body.mesh.node_count, 6))
    _, y, z = (body.mesh.coordinates() - np.array([0, 0.3, 0.5])).T
    rotated[:, 1], rotated[:, 2] = 3.0 - 0.01 * z, 0.01 * y  # and a shift, which is none

    assert body.tip_twist(rotated.ravel()) == pytest.approx(0.01)


def test_each_load_case_has_its_quantity():
    load = described(load={"cases": [{"kind": "shear"}, {"kind": "torsion"}]}).load
    assert quantities(load, 3, 2) == ["tip deflection", "tip twist"]
    assert quantities(described(load={"samples": 2}).load, 3, 2) == ["tip deflection"] * 2
    assert quantities(described().load, 1, 1) == ["tip temperature"]


@pytest.mark.parametrize(
    ("model", "load", "expected"),
    [
        ({}, {"magnitude": 2.0}, -timoshenko_tip_deflection(2.0, 3.0, 0.5, 0.25, 10.0, 0.2)),
        ({}, {"kind": "shear_y"}, timoshenko_tip_deflection(1.0, 3.0, 0.25, 0.5, 10.0, 0.2)),
        ({}, {"kind": "axial"}, None),
        ({}, {"samples": 2}, None),
        ({"lengths": (1.0, 0.25, 0.5)}, {}, None),
    ],
)
def test_beam_theory_stands_beside_a_slender_beam_under_shear(model, load, expected):
    options = {"nodes": (9, 3, 3), "lengths": (3.0, 0.25, 0.5), "element": LinearElasticity(10.0, 0.2)} | model
    found = beam_theory(Cantilever(**options), described(load=load).load)
    assert found is None if expected is None else found == pytest.approx(expected)


def test_a_run_tells_deflection_twist_and_the_names_of_load_cases(tmp_path):
    folder = run_experiment(described(), tmp_path / "shear").folder
    assert "in the model's unit of length; by Timoshenko's beam theory" in folder.summary()
    result = folder.read_json(folder.result)
    assert result["tip_deflection"] == pytest.approx(
        result["beam_theory"], rel=0.2
    )  # of the same sign; the mesh is coarse
    folder = run_experiment(described(load={"kind": "torsion"}), tmp_path / "torsion").folder
    twist = folder.read_json(folder.result)["tip_deflection"]
    # Saint-Venant: G theta k h^4 / L = M for a square section, k = 0.1406; the clamped end and the coarse mesh make it stiffer.
    height, length, shear = 3 / 24, 1.0, 1 / 2.6
    assert twist == pytest.approx(length / (shear * 0.1406 * height**4), rel=0.2)
    assert f"tip twist        {twist:.6g} radians" in folder.summary()


def test_load_cases_stand_under_their_names(tmp_path):
    cases = {"cases": [{"kind": "shear"}, {"kind": "torsion"}]}
    folder = run_experiment(described(load=cases), tmp_path / "cases").folder
    with h5py.File(folder.field) as file:
        assert set(file["VTKHDF/PointData"]) == {"displacement_1_shear", "displacement_2_torsion"}
    assert "2_torsion      tip twist" in folder.summary()
    assert folder.draw(described(load=cases).cantilever())[-1].name == "deformed.png"
