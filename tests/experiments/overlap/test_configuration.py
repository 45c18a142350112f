"""Files of the communication-hiding study: what they may say, and what a mistake in one leads to."""

import re

import pytest

from penstock.experiments.overlap.configuration import OverlapStudy, read_overlap_study
from penstock.experiments.overlap.study import study_points
from penstock.spmv import InputError

CASES = "cases: [{dof: 3, nodes: 6}]\n"


def read(text, tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(text)
    return read_overlap_study(path)


def test_matrices_are_all_that_a_file_must_name(tmp_path):
    study = read(CASES, tmp_path)

    assert (study.protocol, study.device, study.values, study.slots, study.budget) == (
        "paper",
        "cpu",
        "float64",
        3,
        None,
    )
    assert (study.subdivisions, study.repeats, study.columns) == ((2, 4, 8, 16, 32, 64), (50,), (1,))


def test_one_number_is_a_list_of_one(tmp_path):
    study = read(CASES + "repeats: 50\ncolumns: 2\nsubdivisions: 4\n", tmp_path)

    assert (study.repeats, study.columns, study.subdivisions) == ((50,), (2,), (4,))


def test_every_combination_is_a_point_with_a_name_of_its_own():
    cases = [{"dof": 1, "nodes": 6}, {"dof": 3, "nodes": [6, 5, 7]}]
    study = OverlapStudy.model_validate({"cases": cases, "subdivisions": [2, 3], "repeats": [1, 8], "columns": [1, 4]})

    names = [point.name("on") for point in study_points(study)]

    assert len(set(names)) == len(names) == 16
    assert names[0] == "overlap/cube6-dof1/on/s2/r1"
    assert names[-1] == "overlap/beam6x5x7-dof3/on/s3/r8/k4"


@pytest.mark.parametrize(("dof", "expected"), [(1, "csr"), (3, "bsr"), (6, "bsr")])
def test_the_format_follows_the_unknowns_of_a_node_unless_it_is_named(dof, expected):
    data = {"cases": [{"dof": dof, "nodes": 6}]}
    automatic, named = (OverlapStudy.model_validate({**data, **more}) for more in ({}, {"format": "sliced_bsr"}))

    assert automatic.format_of(automatic.cases[0]) == expected
    assert named.format_of(named.cases[0]) == "sliced_bsr"


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        (CASES + "slot: 3", r"  slot: unknown key; did you mean 'slots'\?$"),
        ("cases: [{dof: 3, nodes: 6, node: 6}]", r"  cases\.0\.node: unknown key; did you mean 'nodes'\?$"),
        ("cases: [{dof: 2, nodes: 6}]", r"  cases\.0\.dof: .*1, 3 or 6 \(got 2\)$"),
        ("cases: [{dof: 3}]", r"  cases\.0\.nodes: is required$"),
        ("cases: [{dof: 3, nodes: 1}]", r"  cases\.0\.nodes: .*greater than or equal to 2 \(got 1\)$"),
        ("cases: []", r"  cases: .*at least 1 item"),
        ("samples: 3", r"  cases: is required$"),
        (CASES + "material: {sigmma: 1}", r"  material\.sigmma: unknown key; did you mean 'sigma'\?$"),
        (CASES + "repeats: [1, 0]", r"  repeats\.1: .*greater than or equal to 1 \(got 0\)$"),
        (CASES + "subdivisions: []", r"  subdivisions: .*at least 1 item"),
        (CASES + "subdivisions: two", r"  subdivisions: .*'two'\)$"),
        (CASES + "protocol: papers", r"  protocol: .*'paper' or 'engine' \(got 'papers'\)$"),
        (CASES + "device: tpu", r"  device: .*'tpu'\)$"),
        (CASES + "format: coo", r"  format: .*symmetric_bsr.*'coo'$"),
        (CASES + "samples: 0", r"  samples: .*greater than or equal to 1 \(got 0\)$"),
        (CASES + "protocol: engine\nslots: 1", r"  slots: .*greater than or equal to 2 \(got 1\)$"),
        (CASES + "protocol: engine\nbudget: two", r"  budget: cannot read 'two' as a size; write"),
        (
            CASES + "slots: 2\nbudget: 1 MiB",
            r"budget, slots belong to protocol: engine; the paper's protocol has exactly two",
        ),
        ("", r"must hold sections such as 'protocol:'"),
    ],
)
def test_a_mistake_is_named_with_what_to_do(text, advice, tmp_path):
    with pytest.raises(InputError) as caught:
        read(text, tmp_path)

    assert re.search(f"(?m){advice}", str(caught.value)), str(caught.value)


@pytest.mark.parametrize("text", ["cases: [{dof: 2, nodes: 6}]", CASES + "repeats: 0", CASES + "slots: 2"])
def test_a_mistake_takes_one_line_that_begins_with_a_key(text, tmp_path):
    with pytest.raises(InputError) as caught:
        read(text, tmp_path)

    _, *problems = str(caught.value).splitlines()
    assert len(problems) == 1
    assert not problems[0].startswith("  :")
