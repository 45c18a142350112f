"""Every number of a Matrix Market file is checked before SciPy reads it, wherever the file is cut into pieces."""

import gzip
import io
import random
import re
from pathlib import Path

import numpy as np
import pytest

from penstock.files import matrix_market
from penstock.files.registry import read_matrix
from penstock.spmv import InputError

HEADER = "%%MatrixMarket matrix coordinate real general\n"
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?[nNaAiIfFtTyY]+")


def checked(text, size, field="real"):
    """Return what the reader under us gets of a text, in pieces of some size, and the count of numbers."""
    numbers = len(text.split())
    header = matrix_market._Header(b"", "array", field, "general", (numbers, 1))
    stream = matrix_market._CheckedStream(Path("x.mtx"), header, io.BytesIO(text.encode()))
    stream._header = io.BytesIO(b"")
    pieces = list(iter(lambda: stream.read(size), b""))
    assert all(0 < len(piece) <= size for piece in pieces)
    return b"".join(pieces).decode(), stream.numbers


@pytest.mark.parametrize("size", [1, 7, 64])
def test_words_are_taken_or_refused_as_the_grammar_says(size):
    rng = random.Random(size)
    taken = 0
    for _ in range(4000):
        word = "".join(rng.choice("0123459..eE+-+-nI") for _ in range(rng.randint(1, 7)))
        text = f"1 {word}\n-2.5e-3" + rng.choice(["", "\n"])
        if NUMBER.fullmatch(word):
            read, count = checked(text, size)
            assert (read.split(), count) == (text.replace("+", "").split(), 3), text
            taken += 1
        else:
            with pytest.raises(InputError, match="which is no number"):
                checked(text, size)
    assert 500 < taken < 3500


@pytest.mark.parametrize("text", ["2.5E-", "1e", "-", "1.5e+", ".", "-.", "1e5.", "1.2.3", "3e4e5"])
@pytest.mark.parametrize("end", ["", "\n", " \n"])
@pytest.mark.parametrize("suffix", ["mtx", "mtx.gz"])
def test_a_file_cut_inside_a_number_is_refused_by_name(text, end, suffix, tmp_path):
    content = (HEADER + "2 2 2\n1 1 1.0\n2 2 " + text + end).encode()
    path = tmp_path / f"cut.{suffix}"
    path.write_bytes(gzip.compress(content) if suffix == "mtx.gz" else content)

    with pytest.raises(InputError, match=f"holds '{re.escape(text)}', which is no number"):
        read_matrix(path)


def test_a_whole_file_may_end_without_a_line_end(tmp_path):
    (tmp_path / "a.mtx").write_text(HEADER + "2 2 2\n1 1 1.0\n2 2 +2.5E-3")

    np.testing.assert_array_equal(read_matrix(tmp_path / "a.mtx").matrix.toarray(), [[1, 0], [0, 2.5e-3]])


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("200000000 200000000 1\n1 1 1.0\n", "nearly all rows would be empty"),
        ("10 10 1000000\n1 1 1.0\n", "more than a file of its size can hold"),
        ("10 10 -1\n", "line of sizes"),
        ("1" * 400 + " 10 1\n", "line of sizes"),
        ("1 1 1\n1 1 2.0" + "\n" * (3 << 20), "goes on after the numbers"),
        ("%" * (2 << 20) + "\n1 1 1\n1 1 1\n", "comments of more than"),
        ("% c\n" * (6 << 20) + "1 1 1\n1 1 1\n", "comments of more than"),
    ],
    ids=["rows", "entries", "negative", "long size", "blank lines", "long comment", "many comments"],
)
def test_sizes_that_the_file_does_not_hold_are_refused_before_they_are_taken(content, told, tmp_path):
    for name, opener in (("bomb.mtx", open), ("bomb.mtx.gz", gzip.open)):
        with opener(tmp_path / name, "wt") as file:
            file.write(HEADER + content)
        if name.endswith("gz") and told.startswith("more than a file"):
            continue  # a compressed file may hold more than its size says
        with pytest.raises(InputError, match=told):
            read_matrix(tmp_path / name)


def test_a_matrix_that_does_not_fit_the_memory_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a.mtx").write_text(HEADER + "2 2 2\n1 1 1.0\n2 2 2.5\n")
    monkeypatch.setattr("penstock.files.arrays.available_nbytes", lambda: 50)

    with pytest.raises(InputError, match=r"the matrix in .* takes 112 B, but 50 B of memory are available"):
        read_matrix(tmp_path / "a.mtx")
