"""Ranks of MPI: 2 and 3 of them run all checks of ``rank_checks.py`` once, in this order."""

import json
import re
import sys
import time
from pathlib import Path

import pytest
from kernel_targets import gpu_count
from launching import launch

SCRIPT = Path(__file__).with_name("rank_checks.py")
CHECKS = re.findall(r"\w+", re.search(r"^CHECKS = \((.*?)\)", SCRIPT.read_text(), re.S | re.M)[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds the state that ranks leave to those of the next run."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module", params=[2, 3])
def found(request, folder):
    """The claims of all checks, by rank."""
    results = folder / f"{request.param}.json"
    run = launch(request.param, sys.executable, SCRIPT, results)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(results.read_text())


@pytest.mark.parametrize("check", CHECKS)
def test_all_claims_hold_on_all_ranks(found, check):
    for rank, claims in enumerate(found[check]):
        assert claims
        assert [(rank, claim) for claim, holds in claims if not holds] == []


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["gpu", "nccl"])
@pytest.mark.skipif(gpu_count() < 2, reason="fewer than two GPUs")
def test_all_claims_hold_on_gpus(way, tmp_path):
    run = launch(2, sys.executable, SCRIPT, tmp_path / "found.json", way)

    assert run.returncode == 0, run.stderr[-3000:]
    for check, claims_of_ranks in json.loads((tmp_path / "found.json").read_text()).items():
        assert [(check, claim) for claims in claims_of_ranks for claim, holds in claims if not holds] == []


def test_an_error_of_one_rank_in_the_middle_ends_all_at_once(tmp_path):
    program = tmp_path / "fails.py"
    program.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        "from rank_checks import *\n"
        "with MpiCommunicator() as ranks:\n"
        "    A, own = even(ranks)\n"
        "    calls = []\n"
        "    def M(r):\n"
        "        calls.append(r)\n"
        "        if ranks.rank == 1 and len(calls) == 4:\n"
        "            raise OSError('the disk of this rank has gone')\n"
        "        return r\n"
        "    cg(A, LOAD[own].copy(), M=M)\n"
    )
    began = time.monotonic()

    run = launch(3, sys.executable, program)

    assert run.returncode != 0
    assert "rank 1 of 3 failed, so all are stopped: the disk of this rank has gone" in run.stderr
    assert time.monotonic() - began < 60


def test_a_rank_that_exits_with_an_error_ends_all(tmp_path):
    program = tmp_path / "exits.py"
    program.write_text(
        "import sys\n"
        "from penstock.distributed import MpiCommunicator\n"
        "with MpiCommunicator() as ranks:\n"
        "    if ranks.rank == 1:\n"
        "        sys.exit('no such file')\n"
        "    ranks.barrier()\n"
    )

    run = launch(2, sys.executable, program, timeout=60)

    assert run.returncode != 0
    assert "no such file" in run.stderr
