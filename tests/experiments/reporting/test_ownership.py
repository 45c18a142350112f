"""Two runs at once never share a folder, and a folder of a process that has ended can be had again."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from penstock.commands.terminal import in_free_folder
from penstock.experiments.reporting.base_folder import BaseFolder
from penstock.experiments.reporting.folder import ResultsFolder
from penstock.experiments.reporting.ownership import LOCK_NAME, FolderTakenError
from penstock.spmv import InputError

HOLD = """
import sys, time
from pathlib import Path
from penstock.experiments.reporting.base_folder import BaseFolder
with BaseFolder(Path(sys.argv[1])).made():
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_folder_in_use_is_refused_until_its_owner_has_ended(holder, tmp_path):
    folder = BaseFolder(tmp_path / "run")
    for own in (folder.made, folder.resumed):
        with pytest.raises(FolderTakenError, match=f"is in use by process {holder.pid} on "), own():
            pass

    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()

    with folder.made():
        assert (folder.path / LOCK_NAME).read_text().startswith(f"process {os.getpid()} on ")
    assert not list(folder.path.iterdir())


def test_a_default_name_that_is_taken_gives_way_to_the_next(holder, tmp_path):
    def action(path):
        with BaseFolder(path).made():
            return path

    assert in_free_folder(None, tmp_path / "run", action) == tmp_path / "run-2"
    with pytest.raises(FolderTakenError, match="is in use"):
        in_free_folder(tmp_path / "run", tmp_path / "run", action)


def test_many_that_want_one_name_get_a_folder_each(tmp_path):
    script = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from penstock.experiments.reporting.base_folder import BaseFolder
        from penstock.commands.terminal import in_free_folder
        def action(path):
            with BaseFolder(path).made():
                (path / "mine").touch(exist_ok=False)
                time.sleep(0.05)
            return path
        while time.time() < float(sys.argv[2]):
            pass
        print(in_free_folder(None, Path(sys.argv[1]) / "run", action))
        """
    )
    import time

    command = [sys.executable, "-c", script, str(tmp_path), str(time.time() + 2.0)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(5)]
    taken = [process.communicate(timeout=60)[0].strip() for process in processes]

    assert len(set(taken)) == 5
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run", "run-2", "run-3", "run-4", "run-5"]


def test_there_is_nothing_to_resume_where_there_is_no_folder(tmp_path):
    with (
        pytest.raises(InputError, match="is no folder; there is nothing to resume"),
        BaseFolder(tmp_path / "x").resumed(),
    ):
        pass


def test_what_a_run_did_not_make_stays_when_it_is_removed(tmp_path):
    folder = ResultsFolder(tmp_path / "run")
    with folder.made():
        for name in ("plan.txt", "checkpoint.npz.partial", "mine.txt"):
            (folder.path / name).write_text("text")
        for name in ("matrix.partial-ab", "matrix-of-rank-1", "samples", "pictures"):
            (folder.path / name).mkdir()
        folder.remove()

    assert sorted(entry.name for entry in folder.path.iterdir()) == ["mine.txt", "pictures"]
