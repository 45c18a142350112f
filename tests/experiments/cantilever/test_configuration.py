"""Experiment files: what they may say, and what a mistake in one leads to."""

import json
import re

import pytest
import yaml
from pydantic import ValidationError
from typer.testing import CliRunner

from penstock.commands.app import app
from penstock.experiments import Experiment, plan_experiment, read_experiment
from penstock.experiments.cantilever.template import experiment_template
from penstock.spmv import BudgetError, InputError


def write(tmp_path, text):
    path = tmp_path / "experiment.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("model: {nodes: 9}\nmemroy: {}", r"memroy: unknown key; did you mean 'memory'"),
        ("model: {nodes: 9, dofs: 3}", r"model\.dofs: unknown key; did you mean 'dof'"),
        ("model: {nodes: 9}\nsolver: {xyzzy: 1}", r"solver\.xyzzy: unknown key; valid keys: rtol, maxiter"),
        (
            "model: {nodes: 9}\nsolver: {preconditioner: gauss_seidel, options: {swops: 2}}",
            r"gauss_seidel has no option swops; it has block_size, omega, order, sweeps",
        ),
        ("material: {}", r"model: is required"),
        ("model: {}", r"model\.nodes: is required"),
        ("model: {nodes: -4}", r"model\.nodes: .*greater than or equal to 2 \(got -4\)"),
        ("model: {nodes: [9, 9]}", r"model\.nodes"),
        ("model: {nodes: 9, dof: 2}", r"model\.dof: .*1, 3 or 6 \(got 2\)"),
        ("model: {nodes: 9, lengths: -1.0}", r"model\.lengths: .*greater than 0"),
        ("model: {nodes: 9, lengths: 1.0e-300}", r"model\.lengths: 1e-300 is outside 1e-30 to 1e30"),
        (
            "model: {nodes: 9}\nmaterial: {kind: lognormal, samples: 1000000000}",
            r"material\.samples: .*less than or equal to 100000",
        ),
        ("model: {nodes: 9}\nmemory: {budget: -2 GiB}", r"memory\.budget: cannot read '-2 GiB' as a size; write"),
        ("model: {nodes: 9}\nmemory: {budget: two}", r"memory\.budget: cannot read 'two' as a size; write"),
        ("model: {nodes: 9}\nmemory: {budget: 0}", r"memory\.budget: a size must be positive"),
        ("model: {nodes: 9}\nmemory: {device: tpu}", r"memory\.device"),
        (
            "model: {nodes: 9}\nmemory: {budget: 1 GiB, devices: [cuda:0, cuda:1]}",
            r"one GPU and cpu, such as \[cuda:0, cpu\]",
        ),
        ("model: {nodes: 9}\nmemory: {budget: 1 GiB, devices: cuda}", r"memory: devices are one GPU and cpu"),
        ("model: {nodes: 9}\nmemory: {devices: [cuda, cpu]}", r"devices say how to stream; that takes a budget"),
        (
            "model: {nodes: 9}\nmemory: {budget: 1 GiB, device: cpu, devices: [cuda, cpu]}",
            r"device cpu contradicts devices",
        ),
        ("model: {nodes: 9}\nmemory: {budget: 1 GiB, gpu_subdivisions: 3}", r"give devices: \[cuda:0, cpu\]"),
        (
            "model: {nodes: 9}\nsolver: {preconditioner: chebyshev}\nmemory: {budget: 1 GiB, devices: [cuda, cpu]}",
            r"many products of chebyshev follow every transfer.*take solver.preconditioner: block_jacobi",
        ),
        ("model: {nodes: 9}\nmemory: {slots: 1}", r"memory\.slots: .*greater than or equal to 2"),
        ("model: {nodes: 9}\nsolver: {rtol: -1}", r"solver\.rtol: .*greater than or equal to 0"),
        ("model: {nodes: 9}\nsolver: {rtol: .nan}", r"solver\.rtol"),
        ("model: {nodes: 9}\nmaterial: {poisson: 0.5}", r"material\.poisson: .*less than 0\.5"),
        ("model: {nodes: 9}\nmaterial: {sigma: .inf}", r"material\.sigma"),
        ("model: {nodes: 9}\nload: {magnitude: .nan}", r"load\.magnitude"),
        ("model: {nodes: 9, dof: 1}\nload: {kind: shear}", r"heat conduction\) takes 'body'"),
        ("model: {nodes: 9", r"is not valid YAML"),
        ("- 1\n- 2", r"must hold sections such as 'model:'; 'penstock init' writes an example"),
        ("", r"must hold sections such as 'model:'"),
        ("model: !!python/object/apply:os.getcwd []", r"is not valid YAML"),
    ],
)
def test_a_mistake_is_named_with_what_to_do(text, advice, tmp_path):
    path = write(tmp_path, text)

    with pytest.raises(InputError, match=advice):
        read_experiment(path)


def test_several_mistakes_are_reported_together(tmp_path):
    path = write(tmp_path, "model: {nodes: 9, dofs: 3}\nsolver: {rtoll: 1}")

    with pytest.raises(InputError, match=r"(?s)did you mean 'dof'.*did you mean 'rtol'"):
        read_experiment(path)


def test_a_missing_or_unreadable_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"cannot read .*nothing\.yaml"):
        read_experiment(tmp_path / "nothing.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(InputError, match="cannot read"):
        read_experiment(tmp_path / "binary.yaml")


@pytest.mark.parametrize(("text", "nbytes"), [("2 GiB", 2**31), ("1.5MB", 1_500_000), ("4096", 4096), ("3 kib", 3072)])
def test_sizes_are_understood(text, nbytes, tmp_path):
    assert read_experiment(write(tmp_path, f"model: {{nodes: 9}}\nmemory: {{budget: {text}}}")).memory.budget == nbytes


def test_numbers_without_a_dot_before_the_exponent_are_numbers(tmp_path):
    assert read_experiment(write(tmp_path, "model: {nodes: 9}\nsolver: {rtol: 1e-6}")).solver.rtol == 1e-6


def test_the_template_is_valid_and_names_every_key_of_the_schema():
    text = experiment_template()

    data = Experiment.model_validate(yaml.safe_load(text))
    uncommented = yaml.safe_load(re.sub(r"(?m)^  # (\w+:)", r"  \1", text))
    sections = {name: info for name, info in Experiment.model_fields.items() if name != "parallel"}
    for section, info in sections.items():
        assert set(uncommented[section]) >= set(info.annotation.model_fields)
    assert "# parallel: null" in text
    assert data.memory.budget < data.cantilever().matrix().nbytes


def test_the_schema_is_json_and_describes_the_sections():
    result = CliRunner().invoke(app, ["schema"])

    assert set(json.loads(result.stdout)["properties"]) == set(Experiment.model_fields)


def test_a_budget_too_small_is_refused_with_one_that_would_do(tmp_path):
    path = write(tmp_path, "model: {nodes: 9}\nmemory: {budget: 10 KiB, subdivisions: 4}")

    with pytest.raises(BudgetError, match=r"smallest that does is (\d+) bytes") as caught:
        plan_experiment(read_experiment(path))

    smallest = int(str(caught.value).split("smallest that does is ")[1].split()[0])
    path = write(tmp_path, f"model: {{nodes: 9}}\nmemory: {{budget: {smallest}, subdivisions: 4}}")
    assert plan_experiment(read_experiment(path)).slots == 2


def test_a_plan_needs_no_memory_of_the_size_of_the_matrix():
    import tracemalloc

    experiment = Experiment.model_validate({"model": {"nodes": 256}, "memory": {"budget": "2 GiB", "format": "bsr"}})

    tracemalloc.start()
    plan = plan_experiment(experiment)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert plan.index.nnz == 449_455_096 * 9
    assert peak < 2**24


@pytest.mark.parametrize("format_name", ["bsr", "symmetric_bsr"])
def test_a_number_of_subdivisions_is_kept_or_refused(format_name, tmp_path):
    memory = f"{{budget: 60 KiB, format: {format_name}, subdivisions: 400}}"
    path = write(tmp_path, f"model: {{nodes: 7}}\nmemory: {memory}")

    with pytest.raises(InputError, match=r"can be cut into (343|11) subdivisions at most, not 400"):
        plan_experiment(read_experiment(path))


def test_the_file_that_init_writes_takes_the_preconditioner_that_knows_the_body():
    content = yaml.safe_load(experiment_template())

    assert Experiment.model_validate(content).preconditioner.name == "smoothed_aggregation"


@pytest.mark.parametrize("budget", ["60 KiB", "100 MiB"])
@pytest.mark.parametrize("name", ["factorisation", "multigrid", "gauss_seidel", "incomplete_cholesky"])
def test_what_needs_the_whole_matrix_is_refused_with_any_budget(name, budget):
    described = Experiment(
        model={"nodes": [13, 6, 5], "dof": 3},
        solver={"preconditioner": name},
        memory={"budget": budget, "matrix": "stored", "precision": "float64"},
    )

    with pytest.raises(InputError, match=r"one with a budget is streamed; leave out memory.budget"):
        plan_experiment(described)


@pytest.mark.parametrize("name", ["degree", "aggregate_nodes", "block_size"])
def test_an_option_that_the_solver_has_as_a_key_is_refused(name):
    with pytest.raises(ValidationError, match=f"{name} cannot be among the options"):
        Experiment(solver={"preconditioner": "auto", "options": {name: 5}})
