"""Whatever a YAML file holds, the answer is a configuration or one error that names the file, in no time."""

import random
import time

import pytest

from penstock.experiments import read_experiment
from penstock.experiments.overlap.configuration import read_overlap_study
from penstock.spmv import InputError

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("model: {nodes: 2020-13-45}", "not valid YAML: month must be"),
        ("model: {nodes: !!int abc}", "not valid YAML: invalid literal"),
        ("model: {nodes: !!int ''}", "not valid YAML"),
        ("model: {nodes: !!python/object/apply:os.system [ls]}", "not valid YAML"),
        ("model: {nodes: 0x}", r"got '0x'"),
        ("model: {nodes: " + "9" * 5000 + "}", "a value of 5000 characters in line 1"),
        ("model: " + "[" * 1000, "not valid YAML|nested"),
        ("model: " + "[" * 40 + "]" * 40, "nested more than 30 levels"),
        ("model: " + "[" * 100_000, "nested too deeply|not valid"),
        ("a: &a [*a]", "nested more than|not valid|cannot be used"),
        (LAUGHS + "model: {nodes: *a9}", "more than 10,000 values, its aliases written out"),
        ("x" * (2 << 20), "larger than 1 MiB"),
        (
            "model: {nodes: 3}\nload: {cases: [{kindd: shear}]}",
            r"load\.cases\.0\.kindd: unknown key; did you mean 'kind'",
        ),
        ("model: {nodes: 18446744073709551616}", "which no machine could hold"),
        ("model: {nodes: [3000000, 3000000, 3000000]}", r"2\.7e\+19 nodes are more than 1e\+12"),
        ("model: {nodes: 3}\noutput: {directory: 'a\\0b'}".replace("'", '"'), "directory holds a NUL"),
        (
            "model: {nodes: 3}\nmemory: {budget: 1 MiB, subdivisions: 8000000}",
            "subdivisions: .*less than or equal to 16384",
        ),
        ("model: {nodes: 3}\nsolver: {preconditioner: chebyshev, degree: 100000001}", "more than 999"),
        ("model: {nodes: {a: " + "b" * 3000 + "}}", r"b\.\.\.\)"),
        ("", "must hold sections"),
        ("\xff", "must hold sections"),
        ("a: \x01", "not valid YAML"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else None,
)
def test_what_cannot_be_used_is_one_error(text, told, tmp_path):
    (tmp_path / "x.yaml").write_text(text)
    began = time.process_time()

    with pytest.raises(InputError, match=told) as caught:
        read_experiment(tmp_path / "x.yaml")

    assert len(str(caught.value)) < 2000
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("cases: [{dof: 3, nodes: 2020-13-45}]", "not valid YAML"),
        ("cases: [{dof: 3, nodes: 1000000}]", "nodes are more than"),
        ("cases: [{dof: 1, nodes: 4}]\nrepeats: 1000000000", "less than or equal to 10000"),
    ],
)
def test_a_study_that_cannot_be_used_is_one_error(text, told, tmp_path):
    (tmp_path / "x.yaml").write_text(text)

    with pytest.raises(InputError, match=told):
        read_overlap_study(tmp_path / "x.yaml")


def test_an_alias_may_save_writing(tmp_path):
    (tmp_path / "x.yaml").write_text(
        "model: {nodes: &n [9, 3, 3], lengths: 2}\nload: {cases: [&c {kind: axial}, *c]}\n"
    )

    assert len(read_experiment(tmp_path / "x.yaml").load.cases) == 2


PIECES = ["", "-", ":", "[", "}", "!!int ", "0x", "\t", "1e999", "&a ", "*a"]


def test_mutated_files_are_read_or_refused(tmp_path):
    whole = (
        "model: {nodes: [9, 5, 5], dof: 3}\nmaterial: {kind: lognormal, sigma: 0.3}\nload: {cases: [{kind: shear}]}\n"
    )
    rng = random.Random(0)
    for _ in range(300):
        text = list(whole)
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(text))
            text[place : place + rng.randint(0, 3)] = rng.choice(
                ["", "-", ":", "[", "}", "!!int ", "0x", "\t", "1e999", "&a ", "*a"]
            )
        (tmp_path / "x.yaml").write_text("".join(text))
        try:
            read_experiment(tmp_path / "x.yaml")
        except InputError as error:
            assert "x.yaml" in str(error)  # noqa: PT017 - most are refused
