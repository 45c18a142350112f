"""Checksums of large data are those of zlib, however it is cut."""

import zlib

import numpy as np
import pytest

from penstock.host import checksums


@pytest.mark.parametrize("threads", [None, 1, 3])
@pytest.mark.parametrize("length", [0, 1, 7, 1000, 12_345])
def test_checksums_of_pieces_are_joined_as_zlib_joins_them(monkeypatch, length, threads):
    monkeypatch.setattr(checksums, "PIECE_NBYTES", 1000)
    first, second = np.random.default_rng(0).bytes(333), np.random.default_rng(1).bytes(length)

    found = checksums.checksum_of(np.frombuffer(second, np.uint8), threads)

    assert found == zlib.crc32(second)
    assert checksums.joined([(found, length)], zlib.crc32(first)) == zlib.crc32(first + second)
