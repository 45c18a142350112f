"""The zoo of systems: what its families are said to be, and that its runner measures, judges and resumes."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(FOLDER))  # scripts import each other from there

pytest.importorskip("skfem")

from zoo import processes, run  # noqa: E402
from zoo.families import FAMILIES, SIZES, build  # noqa: E402
from zoo.summary import geometric_mean, summary  # noqa: E402
from zoo.system import load_system  # noqa: E402

from penstock.solvers import cg, multigrid  # noqa: E402


@pytest.fixture(scope="module")
def tiny():
    """Return a tiny system of a family; each is made once."""
    made = {}

    def system(name):
        if name not in made:
            made[name] = build(name, SIZES["tiny"])
        return made[name]

    return system


def scaled(system):
    """Return A as a dense array, scaled to a diagonal of ones, and by what."""
    A = system.A.toarray()
    by = 1 / np.sqrt(A.diagonal())
    return by[:, None] * A * by, by


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_makes_symmetric_positive_systems(name, tiny):
    system = tiny(name)
    A, by = scaled(system)
    values = np.linalg.eigvalsh(A)
    kernel = system.kernel
    singular = 0 if kernel is None else kernel.shape[1]

    assert abs(system.A - system.A.T).max() <= 1e-14 * abs(system.A).max()
    assert 100 <= system.A.shape[0] <= 2500
    assert values[singular] > 1e-11  # far above rounding, 1e-15
    assert abs(values[:singular]).max(initial=0) < 1e-13
    if kernel is not None:
        assert abs(A @ (kernel / by[:, None])).max() < 1e-12 * abs(kernel / by[:, None]).max()
        assert abs(kernel.T @ system.b).max() < 1e-10 * np.linalg.norm(system.b) * np.linalg.norm(kernel, 2)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_known_fits_the_system(name, tiny):
    system = tiny(name)
    unknowns, modes = system.A.shape[0], system.slow_modes

    assert system.b.shape == (unknowns,)
    assert np.linalg.norm(system.b) > 0
    assert unknowns % system.unknowns_per_node == 0
    if modes is not None:
        # Away from what holds the body, which is most of it, rigid motions are resisted by nothing but its mass.
        resisted = abs(system.A @ modes) / np.maximum(abs(system.A) @ abs(modes), 1e-300)
        assert modes.shape[0] == unknowns
        assert np.median(resisted.max(axis=1)) < (0.1 if name == "elastic_time_step" else 1e-10)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_makes_the_same_system_again(name, tiny):
    first, second = tiny(name), build(name, SIZES["tiny"])

    assert (first.A != second.A).nnz == 0
    np.testing.assert_array_equal(first.b, second.b)
    assert FAMILIES[name].__doc__


@pytest.mark.parametrize("name", ["free_body", "building", "poisson", "resistors", "optical_flow"])
def test_a_saved_system_is_read_as_it_was(name, tiny, tmp_path):
    system = tiny(name)
    system.save(tmp_path)
    read = load_system(tmp_path)

    assert (read.A != system.A).nnz == 0
    assert read.given.keys() == system.given.keys()
    for key, value in system.given.items():
        np.testing.assert_array_equal(read.given[key], value)


def test_the_runner_measures_a_family_and_resumes(tmp_path, monkeypatch, capsys):
    given = ["here", "--size", "tiny", "--family", "truss", "--no-peers", "--output", str(tmp_path)]
    run.main(given)
    path = tmp_path / "zoo-here.json"
    (entry,) = json.loads(path.read_text())["records"]
    monkeypatch.setattr(run.Run, "measure", lambda self, size, name: {**entry, "name": f"zoo/{size}/{name}"})
    run.main([*given, "--family", "poisson", "--resume"])

    assert entry["name"] == "zoo/tiny/truss"
    assert entry["converged"]
    assert 0 < entry["true_residual"] <= run.RTOL
    assert entry["seconds"] == entry["cpu_seconds"] >= 0  # of a clock that ticks a hundred times a second
    assert entry["given"] == ["coordinates"]
    assert entry["peers"] == {}
    assert [of["name"] for of in json.loads(path.read_text())["records"]] == ["zoo/tiny/poisson", "zoo/tiny/truss"]
    assert "2 of 2 systems converged" in capsys.readouterr().out


def test_a_wrong_solution_has_not_converged(tiny, tmp_path, monkeypatch):
    def leave_half(command, core, seconds=None):
        np.save(tmp_path / "x.npy", 0.5 * np.linalg.solve(system.A.toarray(), system.b))
        (tmp_path / "outcome.json").write_text(json.dumps({"cpu_seconds": 1.0, "message": ""}))

    system = tiny("poisson")
    monkeypatch.setattr(processes, "_run", leave_half)
    outcome = processes.measured(system, tmp_path, processes.Limits(1e-8, 1.0, 0), sys.executable)

    processes.judge(outcome, {}, 1e-8)

    assert outcome["true_residual"] == pytest.approx(0.5)
    assert not outcome["converged"]


def test_what_rounding_leaves_is_enough_where_it_is_more_than_the_tolerance():
    own, good = {"true_residual": 4e-7, "rounding_floor": 1e-7}, {"true_residual": 2e-7, "rounding_floor": 1e-7}
    wrong, ended = {"true_residual": 1.0, "rounding_floor": 1.0}, {"message": "ended"}
    processes.judge(own, {"good": good, "wrong": wrong, "ended": ended}, 1e-8)
    exact, updated = {"true_residual": 2e-8, "rounding_floor": 1e-12}, {"true_residual": 2e-8, "rounding_floor": 1e-12}
    processes.judge(exact, {"updated": updated}, 1e-8)

    assert (own["converged"], own["at_rounding_floor"]) == (True, True)
    assert [of["converged"] for of in (good, wrong, ended)] == [True, False, False]
    assert [of["converged"] for of in (exact, updated)] == [False, True]
    assert not updated["at_rounding_floor"]


def test_the_system_ends_what_exceeds_its_cap():
    code = "from zoo.child import cap_cpu\ncap_cpu(0)\nwhile True: pass"
    done = subprocess.run([sys.executable, "-c", code], cwd=FOLDER, capture_output=True, text=True, timeout=60)

    assert done.returncode == -signal.SIGXCPU
    assert processes._cause(done, processes.Limits(1e-8, 7, 0)) == "more than 7 s of CPU time"


def entry(name, seconds, converged=True, **peers):
    solvers = {peer: {"converged": of is not None} for peer, of in peers.items()}
    solved = {peer: of for peer, of in peers.items() if of is not None}
    return {
        "name": name, "seconds": seconds, "converged": converged, "peers": solved, "solvers": solvers, "message": "tired",
        "at_rounding_floor": False,
    }  # fmt: skip


def test_the_summary_compares_with_the_best_peers():
    records = [
        entry("a", 1.0, gamg=2.0, cholmod=0.25),
        entry("b", 8.0, gamg=None, boomeramg=1.0),
        entry("c", 120.0, converged=False, gamg=3.0),
    ]
    text = summary(records)

    assert geometric_mean([0.5, 8.0]) == pytest.approx(2.0)
    assert "2 of 3 systems converged" in text
    assert "gamg: 2 of 3" in text
    assert "the best iterative peer: 2.00 in the geometric mean of 2, faster on 1" in text
    assert "the best of all peers: 5.66 in the geometric mean of 2, faster on 0" in text
    assert "not solved: c (tired); solved by: gamg" in text


def test_a_plate_with_rotations_keeps_its_few_iterations():
    """Most couplings of its nodes are weak, but dropping them would lose the rotations: 72 iterations instead of 24."""
    system = build("mindlin_plate", SIZES["small"])
    M = multigrid(system.A, system.near_null_space, block_size=3)
    result = cg(system.A, system.b, M=M, rtol=1e-8)
    assert result.converged
    assert result.iterations <= 30


def test_coarse_levels_keep_stiff_and_soft_parts_apart():
    """With a lower threshold on coarser levels it took 23 iterations, with four times as many cells 28."""
    system = build("reservoir", 60_000)
    result = cg(system.A, system.b, M=multigrid(system.A), rtol=1e-8)
    assert result.converged
    assert result.iterations <= 20
