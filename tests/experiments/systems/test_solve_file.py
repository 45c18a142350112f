"""``penstock solve``: matrices and right-hand sides of anybody's."""

import json
import re
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import scipy.sparse
from typer.testing import CliRunner

from penstock.commands.app import app
from penstock.driver import open_system as open_system_module
from penstock.driver import opening as system_module
from penstock.driver import predicted
from penstock.experiments import run as run_module
from penstock.experiments.systems import solve_file as module
from penstock.experiments.systems.solve_file import resume_solve, solve_file
from penstock.experiments.systems.solve_request import SolveRequest
from penstock.experiments.systems.system_files import column_ranges, parse_columns
from penstock.fem import Cantilever
from penstock.solvers import PRECONDITIONERS, StopReason
from penstock.spmv import BudgetError, InputError, PenstockError, StoreError
from penstock.streaming import FileStore, LinkRates

BEAM = Cantilever(nodes=(9, 4, 4), dof=3)


@pytest.fixture(scope="module")
def A():
    return scipy.sparse.csr_array(BEAM.matrix().to_csr())


@pytest.fixture(scope="module")
def B(A):
    return np.random.default_rng(3).standard_normal((A.shape[0], 6))


@pytest.fixture(scope="module")
def files(A, B, tmp_path_factory):
    """The matrix and right-hand sides in every form that is read."""
    folder = tmp_path_factory.mktemp("files")
    scipy.io.mmwrite(folder / "A.mtx", A, symmetry="symmetric")
    scipy.sparse.save_npz(folder / "A.npz", A)
    scipy.io.mmwrite(folder / "B.mtx", B)
    np.save(folder / "B.npy", B)
    FileStore.create(folder / "store", BEAM.subdivisions(6, "bsr"), shape=A.shape).close()
    return folder


def solve(directory, *arguments, **options):
    return solve_file(SolveRequest(*map(str, arguments), **options), directory).folder


def result_of(folder):
    return json.loads(folder.result.read_text())


def true_residuals(A, X, B):
    return np.linalg.norm(B - A @ X, axis=0) / np.linalg.norm(B, axis=0)


class TestSolves:
    @pytest.mark.parametrize("matrix", ["A.mtx", "A.npz", "store"])
    @pytest.mark.parametrize("right_hand_sides", ["B.mtx", "B.npy"])
    def test_what_is_in_files(self, matrix, right_hand_sides, files, A, B, tmp_path):
        folder = solve(tmp_path / "run", files / matrix, right_hand_sides=files / right_hand_sides)

        X, result = np.load(folder.solution), result_of(folder)
        assert X.shape == B.shape
        assert true_residuals(A, X, B).max() <= 1e-8
        assert result["converged"]
        assert [of["reason"] for of in result["right_hand_sides"]] == ["converged"] * 6

    @pytest.mark.parametrize("matrix", ["A.mtx", "store"])
    @pytest.mark.parametrize("columns", [None, "4"])
    def test_within_a_budget(self, matrix, columns, files, tmp_path):
        folder = solve(tmp_path / "run", files / matrix, columns=columns, memory="80 KiB")

        result = result_of(folder)
        assert result["converged"]
        assert result["peak_budget_nbytes"] <= result["budget_nbytes"] == 80 << 10
        assert result["bytes_streamed"] > 3 * result["matrix_nbytes"] / 2
        assert (folder.path / "timeline.png").exists()
        assert folder.trace.exists()
        assert not folder.matrix.exists()  # the copy that it streamed from

    @pytest.mark.parametrize("precond", ["auto", *PRECONDITIONERS.keys()])
    @pytest.mark.parametrize("memory", [None, "80 KiB"])
    def test_with_every_preconditioner(self, precond, memory, files, tmp_path):
        if memory and precond != "auto" and PRECONDITIONERS[precond].needs_entries:
            with pytest.raises(InputError, match=f"{precond} needs the whole matrix in memory"):
                solve(tmp_path / "run", files / "A.mtx", preconditioner=precond, memory=memory)
            return
        result = result_of(solve(tmp_path / "run", files / "A.mtx", preconditioner=precond, memory=memory))

        assert result["converged"]
        chosen = {"block_jacobi", "chebyshev"} if memory else {"block_jacobi"}  # streamed, the plan decides
        assert result["preconditioner"] in (chosen if precond == "auto" else {precond})

    def test_for_a_known_solution_when_none_is_asked_for(self, files, tmp_path):
        folder = solve(tmp_path / "run", files / "A.mtx")

        error = np.abs(np.load(folder.solution) - 1).max()
        assert error < 1e-4
        assert result_of(folder)["largest_error"] == error
        assert "against the known solution" in folder.summary()

    @pytest.mark.parametrize(("columns", "chosen"), [("2", [2]), ("0,3-5", [0, 3, 4, 5]), ("5,1,1", [5, 1, 1])])
    def test_columns_of_a_file(self, columns, chosen, files, A, B, tmp_path):
        folder = solve(tmp_path / "run", files / "A.mtx", right_hand_sides=files / "B.npy", columns=columns)

        X = np.load(folder.solution).reshape(A.shape[0], -1)
        assert true_residuals(A, X, B[:, chosen]).max() <= 1e-8

    def test_a_generated_matrix(self, tmp_path):
        assert result_of(solve(tmp_path / "run", "cube6-dof1"))["unknowns"] == 6**3

    def test_more_columns_than_a_block_has(self, files, A, tmp_path):
        folder = solve(tmp_path / "run", files / "A.mtx", columns="70")

        assert np.load(folder.solution).shape == (A.shape[0], 70)
        assert len(result_of(folder)["right_hand_sides"]) == 70
        assert "columns 0-69: converged" in folder.summary()

    @pytest.mark.parametrize(("memory", "together"), [(None, 32), ("80 KiB", 64)])
    def test_the_plan_says_how_many_are_solved_together(self, memory, together, files, tmp_path):
        folder = solve(tmp_path / "run", files / "A.mtx", columns="64", memory=memory)

        assert f"for blocks of {together} right-hand sides" in folder.plan.read_text()

    def test_a_matrix_without_blocks_by_its_diagonal(self, tmp_path):
        matrix = scipy.sparse.diags_array([-1.0, 2.5, -1.0], offsets=[-1, 0, 1], shape=(400, 400))
        scipy.sparse.save_npz(tmp_path / "T.npz", matrix.tocsr())

        assert result_of(solve(tmp_path / "run", tmp_path / "T.npz"))["preconditioner"] == "jacobi"

    def test_a_matrix_symmetric_to_rounding_only(self, A, tmp_path):
        noisy = A.copy()
        noisy.data = noisy.data * (1 + 1e-15 * np.random.default_rng(0).standard_normal(noisy.nnz))
        scipy.sparse.save_npz(tmp_path / "N.npz", noisy)

        folder = solve(tmp_path / "run", tmp_path / "N.npz")

        assert result_of(folder)["converged"]
        assert "to rounding: mirror images differ" in folder.plan.read_text()

    @pytest.mark.parametrize("scale", [1e-170, 1e200])
    def test_symmetry_is_checked_at_any_scale(self, A, scale, tmp_path):
        scipy.sparse.save_npz(tmp_path / "S.npz", A * scale)
        skewed = A * scale + scipy.sparse.csr_array(([scale], ([3], [200])), A.shape)
        scipy.sparse.save_npz(tmp_path / "U.npz", skewed)

        assert solve(tmp_path / "run", tmp_path / "S.npz").result.exists()
        with pytest.raises(InputError, match="is not symmetric"):
            solve(tmp_path / "other", tmp_path / "U.npz")

    def test_for_nothing(self, files, tmp_path, recwarn):
        np.save(tmp_path / "zero.npy", np.zeros(432))

        assert result_of(solve(tmp_path / "run", files / "A.mtx", right_hand_sides=tmp_path / "zero.npy"))["converged"]
        assert not [warning for warning in recwarn if "log-scaled" in str(warning.message)]

    @pytest.mark.parametrize("columns", ["0", "0,2-4"])
    def test_in_another_order_where_that_saves_sweeps(self, columns, tmp_path, monkeypatch):
        """The nodes are shuffled: in the order of the file a sweep makes one product."""
        rates = LinkRates(1e8, 1e11, 1e-6, 1e-6, 0.0)  # starts would take longer than these small pieces
        monkeypatch.setattr(system_module._Opener, "_rates", lambda *arguments: rates)
        beam = Cantilever(nodes=(80, 4, 4), dof=3)
        nodes = np.random.default_rng(0).permutation(beam.unknowns // 3)
        rows = (3 * nodes[:, None] + np.arange(3)).ravel()
        A = scipy.sparse.csr_array(beam.matrix().to_csr())[rows][:, rows]
        B = np.random.default_rng(3).standard_normal((A.shape[0], 6))
        scipy.sparse.save_npz(tmp_path / "A.npz", A)
        np.save(tmp_path / "B.npy", B)

        options = {"columns": columns, "preconditioner": "chebyshev", "memory": "500 KiB", "precision": "float64"}
        folder = solve(tmp_path / "run", tmp_path / "A.npz", right_hand_sides=tmp_path / "B.npy", **options)

        plan, result = folder.plan.read_text(), result_of(folder)
        assert re.search(r"order       by levels .*: a sweep computes [2-9] powers, in the original order 1", plan)
        assert result["converged"]
        X = np.load(folder.solution).reshape(A.shape[0], -1)
        assert true_residuals(A, X, B[:, parse_columns(columns)]).max() <= 1e-8
        a_sweep, products = map(int, re.search(r"powers      (\d+) of (\d+) consecutive", plan).groups())
        assert result["sweeps"] < (-(-products // a_sweep) + 1) * result["iterations"] + 40

    def test_from_a_guess(self, files, A, B, tmp_path):
        arguments = {"right_hand_sides": files / "B.npy", "rtol": 1e-6}
        first = solve(tmp_path / "first", files / "A.mtx", **arguments)

        again = result_of(solve(tmp_path / "again", files / "A.mtx", guess=first.solution, **arguments))

        assert again["converged"]
        assert again["iterations"] == 0


@pytest.mark.parametrize("columns", [None, "3", "70"])
def test_an_interrupted_solve_keeps_its_iterates_and_goes_on_from_them(columns, files, A, tmp_path, monkeypatch):
    whole = result_of(solve(tmp_path / "whole", files / "A.mtx", columns=columns))
    real, seen = open_system_module.solve_progress, []

    def watched(record, *arguments):
        seen.append(record.iteration)
        if len(seen) == 20:
            signal.raise_signal(signal.SIGINT)
        return real(record, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(open_system_module, "solve_progress", watched)
        outcome = solve_file(SolveRequest(str(files / "A.mtx"), columns=columns), tmp_path / "stopped")
    assert outcome.interrupted
    assert result_of(outcome.folder)["iterations"] == 20

    rest = solve(tmp_path / "rest", files / "A.mtx", columns=columns, guess=outcome.folder.solution)

    assert result_of(rest)["converged"]
    if columns is None:
        assert result_of(rest)["iterations"] < whole["iterations"]
    np.testing.assert_allclose(np.load(rest.solution), np.load(tmp_path / "whole" / "solution.npy"), rtol=0, atol=1e-4)


class TestRefusals:
    """Each leaves no folder."""

    def refused(self, tmp_path, told, *arguments, error=InputError, **options):
        with pytest.raises(error, match=told) as caught:
            solve(tmp_path / "run", *arguments, **options)
        assert not (tmp_path / "run").exists()
        return caught.value

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({"columns": "0-99999999999", "right_hand_sides": "missing.npy"}, "more than 1,000,000 columns"),
            ({"preconditioner": "ilu"}, "unknown preconditioner 'ilu'; known: absolute_jacobi, block_jacobi"),
            ({"degree": 9}, "choose --precond chebyshev"),
            ({"preconditioner": "chebyshev", "degree": 4}, "must be odd and positive"),
            ({"rtol": -1.0}, "0 or more and less than 1"),
            ({"rtol": float("nan")}, "0 or more and less than 1"),
            ({"columns": "0-3"}, "number of right-hand sides to make up"),
            ({"columns": "0"}, "1 or more"),
            ({"memory": "much"}, "much"),
            ({"device": "abacus"}, "abacus"),
            ({"right_hand_sides": "missing.npy"}, "does not exist"),
            ({"guess": "missing.npy"}, "does not exist"),
        ],
    )
    def test_options_that_make_no_sense(self, options, told, tmp_path):
        options = {name: tmp_path / of if name in ("right_hand_sides", "guess") else of for name, of in options.items()}
        self.refused(tmp_path, told, "cube5-dof1", **options)

    def test_columns_that_a_file_does_not_have(self, files, tmp_path):
        self.refused(
            tmp_path, "has no column 6: it has 6", files / "A.mtx", right_hand_sides=files / "B.npy", columns="6"
        )

    @pytest.mark.parametrize("columns", ["", "a", "1-", "3-1", "1;2", "-1"])
    def test_columns_that_cannot_be_read(self, columns, files, tmp_path):
        self.refused(tmp_path, "such as 0,2-4", files / "A.mtx", right_hand_sides=files / "B.npy", columns=columns)

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            (lambda A: A[:, :-1], "is 432 x 431"),
            (lambda A: -A, "all diagonal entries .* are positive"),
            (lambda A: A + scipy.sparse.csr_array(([1.0], ([3], [200])), A.shape), r"entry \(3, 200\)"),
            (lambda A: scipy.sparse.tril(A).tocsr(), "only one triangle is stored"),
        ],
    )
    def test_matrices_that_are_none_for_conjugate_gradients(self, change, told, A, tmp_path):
        scipy.sparse.save_npz(tmp_path / "M.npz", scipy.sparse.csr_array(change(A)))

        self.refused(tmp_path, told, tmp_path / "M.npz")

    @pytest.mark.parametrize(
        ("content", "told"),
        [
            (np.ones(431), "B has 431 rows"),
            (np.full(432, np.nan), "holds nan at row 0"),
            (np.ones((432, 0)), "at least one column"),
            (np.ones((2, 432, 1)), "real, of shape"),
            (np.ones(432, dtype=complex), "real, of shape"),
        ],
    )
    def test_right_hand_sides_that_do_not_fit(self, content, told, files, tmp_path):
        np.save(tmp_path / "B.npy", content)

        self.refused(tmp_path, told, files / "A.mtx", right_hand_sides=tmp_path / "B.npy")

    def test_a_damaged_file_of_right_hand_sides(self, files, tmp_path):
        (tmp_path / "B.npy").write_bytes((files / "B.npy").read_bytes()[:300])

        self.refused(tmp_path, "B.npy has 300 bytes instead of", files / "A.mtx", right_hand_sides=tmp_path / "B.npy")

    def test_a_file_of_another_kind(self, files, tmp_path):
        (tmp_path / "B.txt").write_text("1 2 3")

        self.refused(
            tmp_path, "cannot tell what right-hand sides", files / "A.mtx", right_hand_sides=tmp_path / "B.txt"
        )

    def test_a_guess_of_another_shape(self, files, tmp_path):
        np.save(tmp_path / "x.npy", np.ones(7))

        self.refused(tmp_path, "has shape", files / "A.mtx", guess=tmp_path / "x.npy")

    def test_a_budget_too_small(self, files, tmp_path):
        self.refused(tmp_path, "budget", files / "A.mtx", memory="100 B", error=BudgetError)

    def test_blocks_of_a_matrix_that_has_none(self, tmp_path):
        self.refused(tmp_path, "does not consist of dense blocks", "cube5-dof1", preconditioner="block_jacobi")

    def test_a_folder_with_something_in_it(self, tmp_path):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "mine").touch()

        with pytest.raises(InputError, match="not an empty folder"):
            solve(tmp_path / "run", "cube5-dof1")
        assert (tmp_path / "run" / "mine").exists()

    def test_a_disk_that_is_full_when_the_solution_is_written(self, tmp_path, monkeypatch):
        def refuse(*arguments):
            raise StoreError("cannot write it: no space left")

        monkeypatch.setattr(module, "write_solution", refuse)
        self.refused(tmp_path, "no space left", "cube5-dof1", error=StoreError)

    def test_an_error_of_the_report_keeps_the_solution(self, tmp_path, monkeypatch):
        def refuse(*arguments):
            raise StoreError("no")

        monkeypatch.setattr(run_module, "write_json", refuse)
        with pytest.raises(PenstockError) as caught:
            solve(tmp_path / "run", "cube5-dof1")

        assert "the solution is saved in" in "".join(caught.value.__notes__)
        assert np.abs(np.load(tmp_path / "run" / "solution.npy") - 1).max() < 1e-4


class TestFormat:
    @pytest.mark.parametrize("name", ["csr", "symmetric_bsr", "sell"])
    def test_the_one_asked_for_is_used(self, name, tmp_path):
        folder = solve(tmp_path / "run", "cube5-dof3", format=name)
        assert result_of(folder)["format"] == name
        assert "as requested" in folder.plan.read_text()

    def test_one_that_cannot_be_is_refused(self, files, tmp_path):
        for told, matrix, options in (
            ("unknown format", "cube5-dof3", {"format": "no"}),
            ("choose auto or one of", "cube9-dof3", {"format": "sell", "memory": "200 KiB"}),
            ("penstock store .* --format csr", files / "store", {"format": "csr"}),
        ):
            with pytest.raises(InputError, match=told):
                solve(tmp_path / "run", matrix, **options)
            assert not (tmp_path / "run").exists()


class TestCommand:
    def test_a_dry_run_prints_the_plan_and_leaves_nothing(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        command = ["solve", "cube9-dof3", "--dry-run", "--memory", "300 KiB"]
        with_image = CliRunner().invoke(app, command)
        ran = CliRunner().invoke(app, [*command, "--precision", "float64"])

        assert with_image.exit_code == 0, with_image.output
        assert "an image of the matrix in" in with_image.output
        assert ran.exit_code == 0, ran.output
        assert "subdivisions of up to" in ran.output
        assert "right side  A times ones" in ran.output
        assert list(tmp_path.iterdir()) == []

    def test_a_pass_may_compute_the_last_residual(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        command = ["solve", "cube9-dof3", "--memory", "300 KiB", "--output"]
        bounded, computed = (CliRunner().invoke(app, [*command, how, "--verify", how]) for how in ("bound", "norm"))

        assert bounded.exit_code == computed.exit_code == 0, computed.output
        sweeps = [json.loads((tmp_path / how / "result.json").read_text())["sweeps"] for how in ("bound", "norm")]
        assert sweeps[0] < sweeps[1]
        refused = CliRunner().invoke(app, [*command, "no", "--verify", "no"])
        assert "verify must be 'bound' or 'norm'" in refused.output + str(refused.exception)

    @pytest.mark.usefixtures("rendered_pictures")
    def test_solves_and_shows(self, files, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        ran = CliRunner().invoke(app, ["solve", str(files / "A.mtx"), str(files / "B.mtx"), "--columns", "0-1"])

        assert ran.exit_code == 0, ran.output
        assert "Results are in results/solve-A, the solution in results/solve-A/solution.npy" in ran.output
        assert "symmetry    exact" in ran.output
        shown = CliRunner().invoke(app, ["show", "results/solve-A"])
        assert shown.exit_code == 0, shown.output
        assert "columns 0-1: converged" in shown.output
        resumed = CliRunner().invoke(app, ["run", "--resume", "results/solve-A"])
        assert resumed.exit_code
        assert "--guess results/solve-A/solution.npy" in str(resumed.output) + str(resumed.exception)
        again = CliRunner().invoke(app, ["solve", str(files / "A.mtx"), str(files / "B.mtx"), "--columns", "5,2"])
        assert "columns 5,2: converged" in again.output

    def test_says_how_to_go_on_when_it_did_not_converge(self, files, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        ran = CliRunner().invoke(app, ["solve", str(files / "A.mtx"), "--maxiter", "3"])

        assert ran.exit_code == 1
        assert "Resume with: penstock solve --resume results/solve-A --maxiter N" in ran.output


@pytest.mark.parametrize("text", ["0", "0,2-4", "7-9,3"])
def test_columns_are_written_as_they_are_read(text):
    assert column_ranges(parse_columns(text)) == text


@pytest.fixture(scope="module")
def modes(tmp_path_factory):
    """Coordinates of the nodes of the beam, and its rigid motions, in files."""
    folder = tmp_path_factory.mktemp("modes")
    np.save(folder / "X.npy", BEAM.mesh.coordinates())
    np.save(folder / "motions.npy", BEAM.rigid_body_modes())
    return {"coordinates": folder / "X.npy", "near_null_space": folder / "motions.npy"}


class TestSolveWithANearNullSpace:
    @pytest.fixture(autouse=True)
    def not_factorised(self, monkeypatch):
        monkeypatch.setattr(predicted, "_MOST_ROWS", 0)

    @pytest.mark.parametrize("option", ["coordinates", "near_null_space"])
    @pytest.mark.parametrize("matrix", ["A.npz", "store"])
    def test_it_makes_a_coarse_level(self, option, matrix, files, modes, tmp_path):
        result = result_of(
            solve(
                tmp_path / "run",
                files / matrix,
                right_hand_sides=files / "B.npy",
                columns="0",
                **{option: modes[option]},
            )
        )

        assert result["preconditioner"] == ("smoothed_aggregation" if matrix == "store" else "multigrid")
        plain = result_of(
            solve(
                tmp_path / "plain",
                files / matrix,
                right_hand_sides=files / "B.npy",
                columns="0",
                preconditioner="jacobi",
            )
        )
        assert result["iterations"] < plain["iterations"] / 2

    @pytest.mark.parametrize("option", ["coordinates", "near_null_space"])
    def test_it_is_read_again_when_the_solve_is_resumed(self, option, files, modes, tmp_path):
        asked = {"rtol": 1e-10, "preconditioner": "smoothed_aggregation", option: modes[option]}
        whole = solve(tmp_path / "whole", files / "A.npz", right_hand_sides=files / "B.npy", columns="0", **asked)
        folder = solve(
            tmp_path / "run", files / "A.npz", right_hand_sides=files / "B.npy", columns="0", maxiter=4, **asked
        )
        assert not result_of(folder)["converged"]

        resume_solve(folder.path, maxiter=1000)

        assert result_of(folder)["converged"]
        np.testing.assert_array_equal(np.load(folder.solution), np.load(whole.solution))

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            ({"preconditioner": "jacobi"}, "--precond jacobi has no use for --coordinates"),
            ({"near_null_space": "motions.npy"}, "give one or the other"),
            ({"coordinates": "X.txt"}, r"an array of numpy.save \(.npy\), not X.txt"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, change, told, files, modes, tmp_path):
        given = {name: Path(value) if name != "preconditioner" else value for name, value in change.items()}
        with pytest.raises(InputError, match=told):
            solve(tmp_path / "run", files / "A.npz", **{"coordinates": modes["coordinates"], **given})
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize("factorised", [False, True])
    def test_coordinates_of_other_nodes_are_refused(self, factorised, files, tmp_path, monkeypatch):
        monkeypatch.setattr(predicted, "_MOST_ROWS", 10**6 if factorised else 0)
        np.save(tmp_path / "X.npy", BEAM.mesh.coordinates()[:-1])
        with pytest.raises(InputError, match="coordinates"):
            solve(tmp_path / "run", files / "A.npz", coordinates=tmp_path / "X.npy")

    def test_the_command_has_the_options(self, files, modes, tmp_path):
        arguments = ["solve", files / "A.npz", "--coordinates", modes["coordinates"], "--output", tmp_path / "run"]
        assert CliRunner().invoke(app, list(map(str, arguments))).exit_code == 0
        assert json.loads((tmp_path / "run" / "result.json").read_text())["preconditioner"] == "multigrid"


@pytest.mark.parametrize("option", [["--rtol", "1e-3"], ["--device", "cpu"], ["--precond", "jacobi"], ["--dry-run"]])
def test_options_that_resuming_has_no_use_for_are_refused(option, tmp_path):
    ran = CliRunner().invoke(app, ["solve", "--resume", str(tmp_path), *option])
    assert ran.exit_code == 2
    assert f"leave out {option[0]}" in " ".join(ran.output.replace("│", "").split())


class TestResumed:
    """A solve of one's own system goes on from a checkpoint, as a run does."""

    @pytest.mark.parametrize("options", [{}, {"memory": "600 KiB", "preconditioner": "chebyshev"}, {"columns": "3"}])
    def test_one_that_was_stopped_goes_on_to_the_same_bits(self, tmp_path, options):
        request = SolveRequest("cube12-dof3", **options, rtol=1e-9)
        whole = solve_file(request, tmp_path / "whole").folder
        stopped = solve_file(replace(request, maxiter=7), tmp_path / "stopped")
        assert stopped.reason is StopReason.MAXITER
        assert stopped.folder.checkpoint.exists()

        resumed = resume_solve(tmp_path / "stopped", maxiter=5000)
        assert resumed.reason is StopReason.CONVERGED
        assert not resumed.folder.checkpoint.exists()
        np.testing.assert_array_equal(np.load(resumed.folder.solution), np.load(whole.solution))
        with pytest.raises(InputError, match="is finished"):
            resume_solve(tmp_path / "stopped")

    def test_one_that_was_killed_before_its_first_checkpoint_begins_anew(self, tmp_path, monkeypatch):
        monkeypatch.setattr(module.SystemRun, "_report", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            solve_file(SolveRequest("cube8-dof1"), tmp_path / "killed")
        monkeypatch.undo()
        assert (tmp_path / "killed" / "solve.json").exists()
        assert resume_solve(tmp_path / "killed").reason is StopReason.CONVERGED

    def test_other_settings_and_altered_files_are_refused(self, tmp_path):
        folder = solve_file(SolveRequest("cube8-dof3", maxiter=3, preconditioner="jacobi"), tmp_path / "stopped").folder
        settings = json.loads(folder.solve.read_text())
        for change, advice in (
            ({"asked": {**settings["asked"], "columns": "2"}}, "other settings"),
            ({"decided": {**settings["decided"], "preconditioner": "none"}}, "other settings"),
            ({"decided": {**settings["decided"], "preconditioner": "jacoby"}}, "jacoby"),
            ({"asked": {"matrix": 3}}, "altered"),
            ({"asked": None}, "altered"),
        ):
            folder.solve.write_text(json.dumps({**settings, **change}))
            with pytest.raises(InputError, match=advice):
                resume_solve(folder.path)
        with pytest.raises(InputError, match=r"holds no solve\.json"):
            resume_solve(tmp_path)

    def test_a_solution_that_could_not_be_written_leaves_the_checkpoint(self, tmp_path, monkeypatch):
        stopped = solve_file(SolveRequest("cube8-dof3", maxiter=3), tmp_path / "a").folder

        def full(*arguments):
            raise StoreError("No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(module, "write_solution", full)
            with pytest.raises(StoreError):
                resume_solve(stopped.path, maxiter=1000)
        assert stopped.checkpoint.exists()
        resumed = resume_solve(stopped.path, maxiter=1000).folder
        result = result_of(resumed)
        assert result["converged"]
        assert result["sweeps"] >= result["iterations"]  # those before it was stopped among them

    def test_columns_in_several_blocks_have_no_checkpoint(self, tmp_path):
        folder = solve_file(SolveRequest("cube4-dof1", columns="70", maxiter=1), tmp_path / "a").folder
        with pytest.raises(InputError, match="--guess"):
            resume_solve(folder.path)


class TestSolveOfASingularSystem:
    @pytest.fixture
    def files(self, tmp_path):
        grid = scipy.sparse.kronsum(
            *[scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(12, 12))] * 2
        )
        W = abs(grid - scipy.sparse.diags_array(grid.diagonal()))
        A = scipy.sparse.csr_array(scipy.sparse.diags_array(W.sum(axis=1)) - W)
        scipy.sparse.save_npz(tmp_path / "A.npz", A)
        np.save(tmp_path / "b.npy", np.random.default_rng(0).standard_normal(144) + 0.5)
        np.save(tmp_path / "N.npy", np.ones((144, 1)))
        return tmp_path

    @pytest.mark.parametrize("null_space", ["constants", "N.npy"])
    def test_null_space_is_removed_also_when_resumed(self, null_space, files, monkeypatch):
        monkeypatch.chdir(files)
        asked = {"right_hand_sides": files / "b.npy", "null_space": null_space}
        folder = solve(files / "run", files / "A.npz", maxiter=3, **asked)
        assert not result_of(folder)["converged"]

        resume_solve(folder.path, maxiter=1000)

        assert result_of(folder)["converged"]
        x, b = np.load(folder.solution), np.load(files / "b.npy")
        assert abs(x.mean()) < 1e-12
        A = scipy.sparse.load_npz(files / "A.npz")
        assert np.linalg.norm(b - b.mean() - A @ x) <= 1.01e-8 * np.linalg.norm(b - b.mean())

    def test_without_it_the_system_is_inconsistent_at_once(self, files):
        folder = solve(files / "run", files / "A.npz", right_hand_sides=files / "b.npy")

        result = result_of(folder)
        assert (result["converged"], result["iterations"]) == (False, 0)
        assert "null space" in result["message"]
