"""Experiments with several right-hand sides, or with several matrices."""

import csv
import json
import re

import h5py
import numpy as np
import pytest
from interrupting import interrupt_at

from penstock.driver import open_system as open_system_module
from penstock.experiments import Experiment, read_experiment, resume_experiment, run_experiment
from penstock.experiments.cantilever import monte_carlo as monte_carlo_module
from penstock.experiments.cantilever import single_run as single_run_module
from penstock.experiments.cantilever.loads import load_names, right_hand_sides
from penstock.experiments.reporting.folder import ResultsFolder
from penstock.spmv import InputError
from penstock.streaming import LinkRates

MODEL = {"nodes": [13, 4, 4]}
CASES = [{"kind": "shear"}, {"kind": "axial", "magnitude": 10.0}, {"kind": "torsion"}, {"kind": "shear"}]
BUDGET = {"budget": "60 KiB", "format": "bsr"}


def experiment(**sections):
    return Experiment.model_validate({"model": MODEL, "output": {"figures": False}, **sections})


def result_of(folder):
    return json.loads(folder.result.read_text())


def fields_of(folder):
    with h5py.File(folder.field) as file:
        return {name: np.asarray(values) for name, values in file["VTKHDF/PointData"].items()}


class TestLoadCases:
    @pytest.mark.parametrize("memory", [{}, BUDGET], ids=["resident", "streamed"])
    def test_each_is_solved_as_it_would_be_alone(self, memory, tmp_path):
        folder = run_experiment(experiment(load={"cases": CASES}, memory=memory), tmp_path / "all").folder

        result, fields = result_of(folder), fields_of(folder)
        assert result["converged"]
        assert [column["name"] for column in result["columns"]] == ["1_shear", "2_axial", "3_torsion", "4_shear"]
        for number, case in enumerate(CASES):
            alone = run_experiment(experiment(load=case, memory=memory), tmp_path / str(number)).folder
            suffix = f"_{result['columns'][number]['name']}"
            expected = fields_of(alone)["displacement"]
            scale = np.abs(expected).max()
            np.testing.assert_allclose(fields["displacement" + suffix], expected, rtol=0, atol=1e-6 * scale)
            assert result["columns"][number]["true_residual"] <= 1e-8
            deflection = result_of(alone)["tip_deflection"]
            assert result["columns"][number]["tip_deflection"] == pytest.approx(deflection, abs=1e-6 * scale)

    @pytest.mark.usefixtures("rendered_pictures")
    def test_the_report_has_all_of_them(self, tmp_path):
        described = Experiment.model_validate({"model": MODEL, "load": {"cases": CASES}})
        folder = run_experiment(described, tmp_path / "run").folder

        assert (folder.path / "tip_deflections.png").stat().st_size > 1000
        assert (folder.path / "convergence.png").exists()
        summary = folder.summary()
        assert all(f"  {name} " in summary for name in load_names(described.load))
        with open(folder.residuals, newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == result_of(folder)["iterations"] + 1
        assert len(rows[0]) == 1 + len(CASES)

    def test_one_sweep_serves_them_all(self, tmp_path):
        folder = run_experiment(experiment(load={"cases": CASES}, memory=BUDGET), tmp_path / "run").folder

        result = result_of(folder)
        assert result["sweeps"] <= result["iterations"] + 5  # two for the diagonal blocks, others for true residuals

    def test_what_was_written_down_is_read_again(self, tmp_path):
        described = experiment(load={"cases": CASES})
        folder = run_experiment(described, tmp_path / "run").folder

        assert read_experiment(folder.configuration) == described

    def test_a_case_without_a_force_is_fine(self, tmp_path):
        cases = [{"magnitude": 0.0}, {"magnitude": 2.0}]
        result = result_of(run_experiment(experiment(load={"cases": cases}), tmp_path / "run").folder)

        assert result["converged"]
        assert result["tip_deflection"] is None, "of load cases a mean says nothing"
        assert result["columns"][0]["tip_deflection"] == 0
        assert result["columns"][1]["tip_deflection"] < 0


class TestRandomLoad:
    def test_mean_and_deviation_are_those_of_the_samples(self, tmp_path):
        described = experiment(load={"samples": 12, "spread": 0.5, "kind": "shear"})
        folder = run_experiment(described, tmp_path / "run").folder

        beam = described.cantilever()
        X = np.linalg.solve(beam.matrix().to_csr().toarray(), right_hand_sides(described, beam))
        tips = [beam.tip_deflection(column) for column in X.T]
        result, fields = result_of(folder), fields_of(folder)
        assert result["tip_deflection"] == pytest.approx(np.mean(tips), rel=1e-6)
        assert result["tip_deflection_deviation"] == pytest.approx(np.std(tips, ddof=1), rel=1e-6)
        for name, expected in (("displacement", X.mean(axis=1)), ("displacement_deviation", X.std(axis=1, ddof=1))):
            scale = np.abs(expected).max()
            on_nodes = np.moveaxis(expected.reshape(13, 4, 4, 3), (0, 1, 2), (2, 1, 0))  # in files x runs fastest
            np.testing.assert_allclose(fields[name], on_nodes, rtol=0, atol=1e-6 * scale)
        assert "standard deviation" in folder.summary()

    def test_a_sample_does_not_depend_on_how_many_there_are(self):
        few, many = (experiment(load={"samples": count}) for count in (2, 9))
        beam = few.cantilever()

        np.testing.assert_array_equal(right_hand_sides(few, beam), right_hand_sides(many, beam)[:, :2])

    def test_has_the_mean_and_the_deviation_that_were_asked_for(self):
        described = experiment(load={"samples": 64, "spread": 0.3, "kind": "body"})
        beam = described.cantilever()
        base = beam.load("body")
        loaded = base != 0
        factors = right_hand_sides(described, beam)[loaded] / base[loaded, None]

        count = factors.size
        assert factors.mean() == pytest.approx(1, abs=5 * 0.3 / count**0.5)
        assert factors.std() == pytest.approx(0.3, rel=5 / (2 * count) ** 0.5)

    def test_one_sample_is_a_block_of_one(self, tmp_path):
        result = result_of(run_experiment(experiment(load={"samples": 1}), tmp_path / "run").folder)

        assert len(result["columns"]) == 1
        assert result["tip_deflection_deviation"] is None

    @pytest.mark.usefixtures("rendered_pictures")
    @pytest.mark.parametrize(("dof", "quantity"), [(1, "tip temperature  mean"), (3, "tip deflection   mean")])
    def test_is_drawn(self, dof, quantity, tmp_path):
        described = Experiment.model_validate({"model": {**MODEL, "dof": dof}, "load": {"samples": 5}})
        folder = run_experiment(described, tmp_path / "run").folder

        assert quantity in folder.summary()

        assert (folder.path / "tip_deflections.png").stat().st_size > 1000

    @pytest.mark.parametrize("memory", [{}, BUDGET], ids=["resident", "streamed"])
    @pytest.mark.parametrize("iteration", [1, 9])
    def test_an_interrupted_block_resumed_is_bit_equal_to_an_uninterrupted_one(
        self, memory, iteration, tmp_path, monkeypatch
    ):
        described = experiment(load={"samples": 5}, memory=memory)
        whole = run_experiment(described, tmp_path / "whole").folder
        with monkeypatch.context() as patch:
            interrupt_at(patch, open_system_module, iteration)
            assert run_experiment(described, tmp_path / "stopped").interrupted

        resumed = resume_experiment(tmp_path / "stopped").folder

        assert all(np.array_equal(values, fields_of(whole)[name]) for name, values in fields_of(resumed).items())
        assert resumed.residuals.read_text() == whole.residuals.read_text()
        assert not resumed.checkpoint.exists()

    @pytest.mark.parametrize("iteration", [1, 12])
    def test_a_column_that_has_ended_does_not_turn_the_sweeps_of_the_others(self, iteration, tmp_path, monkeypatch):
        """Half storage adds in the order of the sweep: one sweep more on going on would change the last digits."""
        described = experiment(
            load={"cases": [{}, {"magnitude": 0.0}, {"kind": "axial"}]},
            memory={"budget": "75 KiB", "format": "symmetric_bsr"},
        )
        whole = run_experiment(described, tmp_path / "whole").folder
        with monkeypatch.context() as patch:
            interrupt_at(patch, open_system_module, iteration)
            assert run_experiment(described, tmp_path / "stopped").interrupted

        resumed = resume_experiment(tmp_path / "stopped").folder

        assert all(np.array_equal(values, fields_of(whole)[name]) for name, values in fields_of(resumed).items())

    def test_an_interrupt_is_one_whatever_else_ended_before(self, tmp_path, monkeypatch):
        """A load whose squares overflow ends at once, with a larger residual than the one that was stopped."""
        described = experiment(load={"cases": [{}, {"magnitude": 1e250}]})
        with monkeypatch.context() as patch:
            interrupt_at(patch, open_system_module, 5)
            outcome = run_experiment(described, tmp_path / "run")

        assert outcome.interrupted
        assert outcome.folder.checkpoint.exists()
        assert not outcome.folder.result.exists()

    def test_samples_that_did_not_converge_are_left_out_of_the_mean(self, tmp_path):
        result = result_of(
            run_experiment(experiment(load={"samples": 3}, solver={"maxiter": 4}), tmp_path / "run").folder
        )

        assert result["tip_deflection"] is result["tip_deflection_deviation"] is None

    def test_a_block_out_of_iterations_goes_on_with_more(self, tmp_path):
        described = experiment(load={"samples": 3}, solver={"maxiter": 4})
        outcome = run_experiment(described, tmp_path / "run")
        assert outcome.reason.name == "MAXITER"

        outcome = resume_experiment(tmp_path / "run", maxiter=1000)

        assert outcome.reason.name == "CONVERGED"
        assert result_of(outcome.folder)["iterations"] > 4


def material(samples, **more):
    return {"kind": "lognormal", "seed": 7, "samples": samples, **more}


class TestRandomStiffness:
    @pytest.mark.parametrize("dof", [1, 3, 6])
    def test_mean_and_deviation_of_the_fields_are_written(self, dof, tmp_path):
        described = experiment(model={"nodes": [5, 4, 3], "dof": dof}, material=material(3))
        folder = run_experiment(described, tmp_path / "run").folder

        samples = [fields_of(ResultsFolder(folder.samples / f"{number:04d}")) for number in (1, 2, 3)]
        found = fields_of(folder)
        assert set(found) == {*samples[0], *(f"{name}_deviation" for name in samples[0])}
        for name in samples[0]:
            of_all = np.stack([fields[name] for fields in samples])
            np.testing.assert_allclose(found[name], of_all.mean(axis=0), rtol=1e-12, atol=1e-12 * np.abs(of_all).max())
            deviation = of_all.std(axis=0, ddof=1)
            np.testing.assert_allclose(
                found[f"{name}_deviation"], deviation, rtol=1e-9, atol=1e-12 * np.abs(of_all).max()
            )

    def test_no_fields_are_written_where_none_are_asked_for(self, tmp_path):
        described = experiment(material=material(2), output={"field": False, "figures": False})
        folder = run_experiment(described, tmp_path / "run").folder
        assert not list(folder.path.rglob("*.vtkhdf"))

    def test_samples_are_those_of_runs_with_their_seeds(self, tmp_path):
        folder = run_experiment(experiment(material=material(3)), tmp_path / "run").folder

        result = result_of(folder)
        tips = []
        for number, sample in enumerate(result["stiffness_samples"]):
            alone = experiment(material={"kind": "lognormal", "seed": 7 + number})
            tips.append(result_of(run_experiment(alone, tmp_path / str(number)).folder)["tip_deflection"])
            assert sample["seed"] == 7 + number
            assert sample["tip_deflection"] == tips[-1]
        assert len(set(tips)) == 3
        assert result["tip_deflection"] == pytest.approx(np.mean(tips), rel=1e-12)
        assert result["tip_deflection_deviation"] == pytest.approx(np.std(tips, ddof=1), rel=1e-12)
        assert result["standard_error"] == pytest.approx(np.std(tips, ddof=1) / 3**0.5, rel=1e-12)

    @pytest.mark.usefixtures("rendered_pictures")
    def test_the_report_shows_how_mean_and_deviation_settle(self, tmp_path):
        described = Experiment.model_validate({"model": MODEL, "material": material(4)})
        folder = run_experiment(described, tmp_path / "run").folder

        assert (folder.path / "monte_carlo.png").stat().st_size > 1000
        assert "4 of 4 samples of the stiffness converged" in folder.summary()
        assert "of 4 samples" in folder.summary().splitlines()[1]
        assert folder.plan.exists()

    @pytest.mark.parametrize("sample", [1, 3])
    def test_an_interrupted_run_goes_on_with_the_sample_it_was_at(self, sample, tmp_path, monkeypatch):
        described = experiment(material=material(3), memory=BUDGET)
        whole = run_experiment(described, tmp_path / "whole").folder
        begun = []
        real = monte_carlo_module._run_sample

        def run_sample(experiment, seed, *rest):
            begun.append(seed)
            with monkeypatch.context() as patch:
                if len(begun) == sample:
                    interrupt_at(patch, open_system_module, 5)
                return real(experiment, seed, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(monte_carlo_module, "_run_sample", run_sample)
            assert run_experiment(described, tmp_path / "stopped").interrupted
        assert len(begun) == sample
        again = []
        monkeypatch.setattr(
            monte_carlo_module, "_run_sample", lambda e, seed, *rest: (again.append(seed), real(e, seed, *rest))[1]
        )

        resumed = resume_experiment(tmp_path / "stopped").folder

        assert again == [7, 8, 9][sample - 1 :]
        of, expected = ([one["tip_deflection"] for one in result_of(f)["stiffness_samples"]] for f in (resumed, whole))
        assert of == expected
        with pytest.raises(InputError, match="finished"):
            resume_experiment(tmp_path / "stopped")

    def test_a_sample_goes_on_as_it_was_planned_whatever_is_measured_then(self, tmp_path, monkeypatch):
        described = experiment(material=material(2), memory={"budget": "60 KiB"})
        whole = run_experiment(described, tmp_path / "whole").folder
        with monkeypatch.context() as patch:
            interrupt_at(patch, open_system_module, 5)
            assert run_experiment(described, tmp_path / "stopped").interrupted
        monkeypatch.setattr(single_run_module, "measure_rates", lambda *arguments: LinkRates(0.3e9, 1e10))

        resumed = resume_experiment(tmp_path / "stopped").folder

        tips = [[one["tip_deflection"] for one in result_of(f)["stiffness_samples"]] for f in (resumed, whole)]
        assert tips[0] == pytest.approx(tips[1], rel=1e-6)

    def test_an_error_in_the_first_sample_leaves_what_was_done(self, tmp_path, monkeypatch):
        described = experiment(material=material(2), output={"checkpoint_seconds": 1e-6, "figures": False})

        def fail(self, *arguments):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(single_run_module.SingleRun, "_report", fail)
            with pytest.raises(KeyboardInterrupt) as caught:
                run_experiment(described, tmp_path / "run")
        assert "penstock run --resume" in "".join(caught.value.__notes__)

        assert resume_experiment(tmp_path / "run").reason.name == "CONVERGED"

    def test_what_a_killed_run_left_of_a_sample_is_made_anew(self, tmp_path):
        described = experiment(material=material(2), memory=BUDGET)
        folder = run_experiment(described, tmp_path / "run").folder
        expected = result_of(folder)["tip_deflection"]
        sample = folder.samples / "0002"
        (sample / "result.json").unlink()
        (sample / "matrix.partial-x").mkdir()
        folder.result.unlink()

        assert result_of(resume_experiment(tmp_path / "run").folder)["tip_deflection"] == expected
        assert not (sample / "matrix.partial-x").exists()

    def test_samples_that_do_not_converge_are_named_and_may_go_on(self, tmp_path):
        described = experiment(material=material(3, sigma=1.0), solver={"maxiter": 5})
        outcome = run_experiment(described, tmp_path / "run")
        assert outcome.reason.name == "MAXITER"
        assert "not those of seeds 7, 8, 9" in outcome.folder.summary()
        assert result_of(outcome.folder)["tip_deflection"] is None

        outcome = resume_experiment(tmp_path / "run", maxiter=1000)

        assert outcome.reason.name == "CONVERGED"
        whole = run_experiment(experiment(material=material(3, sigma=1.0)), tmp_path / "whole").folder
        assert result_of(outcome.folder)["tip_deflection"] == result_of(whole)["tip_deflection"]


class TestPreconditioners:
    def test_a_polynomial_needs_fewer_iterations(self, tmp_path):
        iterations = {}
        for kind in ("block_jacobi", "chebyshev"):
            described = experiment(
                model={"nodes": [33, 5, 5]}, solver={"preconditioner": kind}, memory={"budget": "1 MiB"}
            )
            folder = run_experiment(described, tmp_path / kind).folder
            result = result_of(folder)
            assert result["converged"]
            iterations[kind] = result["iterations"]

        assert 3 * iterations["chebyshev"] < iterations["block_jacobi"]

    def test_a_polynomial_makes_several_products_a_sweep(self, tmp_path, monkeypatch):
        # Of a disk; starting a transfer would take longer than these small ones themselves.
        rates = LinkRates(1e9, 1e11, transfer_start=1e-6, product_start=1e-6)
        monkeypatch.setattr(single_run_module, "measure_rates", lambda *arguments: rates)
        described = experiment(
            model={"nodes": [32, 5, 5]},
            solver={"preconditioner": "chebyshev", "products": 9},
            memory={"budget": "600 KiB", "format": "bsr"},
        )
        folder = run_experiment(described, tmp_path / "run").folder

        result = result_of(folder)
        assert result["converged"]
        assert re.search(r"powers      [4-9] of 9", folder.plan.read_text())
        # Two sweeps or three an application, and one for the product of CG, where one product a sweep would take nine.
        assert result["sweeps"] < 4.5 * result["iterations"] + 20


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"load": {"cases": []}}, "at least 1"),
        ({"load": {"cases": [{}], "samples": 2}}, "give one or the other"),
        ({"load": {"cases": [{}], "kind": "shear"}}, "leave out kind"),
        ({"load": {"samples": 65}}, "less than or equal to 64"),
        ({"load": {"samples": 2, "spread": 0}}, "greater than 0"),
        ({"material": {"samples": 3}}, "all the same"),
        ({"material": material(3), "load": {"samples": 2}}, "one after another"),
        ({"material": material(3), "memory": {"budget": "1 MiB", "store": "kept"}}, "has its own"),
        ({"solver": {"preconditioner": "chebyshev", "products": 4}}, "must be odd"),
        ({"model": {"nodes": 5, "dof": 1}, "load": {"cases": [{"kind": "body"}, {"kind": "axial"}]}}, "takes 'body'"),
    ],
)
def test_what_makes_no_sense_is_refused(sections, told):
    with pytest.raises(ValueError, match=told):
        experiment(**sections)
