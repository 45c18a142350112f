"""Files are written whole or not at all."""

import errno
import json
import math
import os

import numpy as np
import pytest

from penstock.experiments.reporting.atomic import replacing, write_file, write_json, write_text
from penstock.spmv import StoreError


def test_a_file_is_replaced(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "old")
    write_text(path, "new ä")

    assert path.read_text(encoding="utf-8") == "new ä"
    assert list(tmp_path.iterdir()) == [path]


def test_arrays_are_written_by_a_function(tmp_path):
    write_file(tmp_path / "a.npy", lambda file: np.save(file, np.arange(3)), sync=True)

    assert np.load(tmp_path / "a.npy").tolist() == [0, 1, 2]


def test_numbers_that_json_does_not_have_become_null(tmp_path):
    write_json(tmp_path / "a.json", {"a": [1.5, math.nan], "b": (math.inf, None)})

    assert json.loads((tmp_path / "a.json").read_text()) == {"a": [1.5, None], "b": [None, None]}


def full(file):
    file.write(b"part")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupted(file):
    file.write(b"part")
    raise KeyboardInterrupt


@pytest.mark.parametrize(("write", "error"), [(full, StoreError), (interrupted, KeyboardInterrupt)])
def test_a_failed_write_leaves_the_old_file_and_no_part_of_the_new(write, error, tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "old")

    with pytest.raises(error):
        write_file(path, write)

    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_error_names_the_file_and_the_cause(tmp_path):
    with pytest.raises(StoreError, match=r"cannot write .*a\.txt: No space left on device"):
        write_file(tmp_path / "a.txt", full)


def test_a_library_may_write_to_a_path(tmp_path):
    with replacing(tmp_path / "a.txt") as partial:
        partial.write_text("written elsewhere")
        assert not (tmp_path / "a.txt").exists()

    assert (tmp_path / "a.txt").read_text() == "written elsewhere"
