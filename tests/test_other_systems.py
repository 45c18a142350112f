"""What only Linux has is asked for nowhere: penstock solves, streams and runs without it, as on Windows and macOS."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SYSTEM = """
import numpy as np, scipy.sparse
line = scipy.sparse.diags_array([-1.0, 2.1, -1.0], offsets=[-1, 0, 1], shape=(60, 60))
A = scipy.sparse.kronsum(line, line, format="csr")
b = np.ones(A.shape[0])
"""


@pytest.fixture
def elsewhere(tmp_path):
    """Runs Python code on a system that has nothing of Linux, and returns what it prints."""

    def run(code):
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "TMPDIR": str(tmp_path / "temporary")}
        (tmp_path / "temporary").mkdir(exist_ok=True)
        ended = subprocess.run(
            [sys.executable, "-c", "import without_linux\n" + SYSTEM + textwrap.dedent(code)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert ended.returncode == 0, ended.stderr[-4000:]
        assert not list((tmp_path / "temporary").glob("*penstock*"))
        return ended.stdout

    return run


def test_systems_are_solved_in_memory_and_streamed(elsewhere):
    elsewhere("""
        import penstock
        for memory in (None, "100 KiB"):
            result = penstock.solve(A, b, memory=memory)
            assert result.converged and np.linalg.norm(b - A @ result.x) <= 1e-5 * np.linalg.norm(b)
            assert (result.bytes_streamed > 0) == (memory is not None)
    """)


def test_stores_are_written_replaced_read_and_streamed(elsewhere):
    elsewhere("""
        import pytest
        from penstock.spmv import InputError, StoreError
        from penstock.streaming import FileStore, StreamedMatrix
        slabs = [A[start:start + 600] for start in range(0, 3600, 600)]
        for overwrite in (False, True):
            FileStore.create("matrix", slabs, overwrite=overwrite).close()
        with pytest.raises(InputError, match="exists"):
            FileStore.create("matrix", slabs)
        with pytest.raises(StoreError, match="cannot bypass the page cache"):
            FileStore("matrix", direct=True)
        with FileStore("matrix") as store, StreamedMatrix(store, budget="100 KiB") as streamed:
            assert not store.direct
            assert np.allclose(streamed @ b, A @ b, rtol=1e-14)
    """)


def test_a_store_does_not_take_a_name_that_another_process_took_meanwhile(elsewhere):
    elsewhere("""
        import os, pytest
        from penstock.spmv import InputError
        from penstock.streaming import FileStore
        def slabs():
            os.mkdir("matrix")
            yield A
        with pytest.raises(InputError, match="made by another process meanwhile"):
            FileStore.create("matrix", slabs())
        assert os.listdir() == ["matrix"] or sorted(os.listdir()) == ["matrix", "temporary"]
    """)


def test_the_command_runs_an_experiment(elsewhere, tmp_path):
    (tmp_path / "beam.yaml").write_text("model: {nodes: [9, 5, 5]}\nmemory: {budget: 150 KiB}\n")
    printed = elsewhere("""
        import sys
        from penstock.commands.app import main
        sys.argv = ["penstock", "run", "beam.yaml", "--output", "out"]
        main()
    """)

    assert "Results are in out" in printed
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["converged"]
    assert result["bytes_streamed"] > 0
    assert not (tmp_path / "out" / ".owner").exists()


def test_info_describes_the_machine(elsewhere):
    printed = elsewhere("""
        import sys
        from penstock.commands.app import main
        sys.argv = ["penstock", "info", "--no-measure"]
        main()
    """)

    assert "memory" in printed
