"""The example of a format of one's own keeps the contract of formats, is short, and streams."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from format_contract import PRECISIONS, awkward_patterns, build, check_products, check_special_values
from kernel_targets import TARGETS

from penstock.spmv.compilation.table import KERNELS
from penstock.spmv.formats.base import FORMATS
from penstock.streaming import HostStore, StreamedMatrix

EXAMPLE = Path(__file__).parents[3] / "examples" / "add_a_format.py"


@pytest.fixture(autouse=True)
def _registered():
    """Register the example's format for the length of a test."""
    spec = importlib.util.spec_from_file_location("add_a_format", EXAMPLE)
    sys.modules["add_a_format"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["add_a_format"])
    yield
    FORMATS.remove("dia")
    for device in ("cpu", "cuda"):
        KERNELS.remove(("dia", "spmv", device))
    del sys.modules["add_a_format"]


def test_it_has_at_most_60_lines():
    assert len(EXAMPLE.read_text().splitlines()) <= 60


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("values_dtype", "dtype"), PRECISIONS)
def test_its_products_keep_the_contract(values_dtype, dtype, target):
    check_products("dia", {}, values_dtype, dtype, target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_special_values_reach_the_rows_that_read_them(special, target):
    check_special_values("dia", {}, special, target)


def test_it_streams_and_multiplies_blocks_and_knows_its_diagonal():
    matrix, A = build("dia", {}, awkward_patterns(1)["just over a block"], np.float64, np.float64)
    X = np.random.default_rng(0).uniform(-1, 1, (A.shape[1], 3))
    slabs = [matrix.rows(start, min(start + 60, A.shape[0])) for start in range(0, A.shape[0], 60)]
    largest = max(slab.nbytes for slab in slabs) + (64 << 10)

    with StreamedMatrix(HostStore.create(slabs), budget=3 * largest) as streamed:
        np.testing.assert_array_equal(streamed @ X, matrix @ X)
    np.testing.assert_allclose(matrix @ X, A @ X, rtol=1e-12, atol=1e-13)
    np.testing.assert_array_equal(matrix.diagonal_blocks(1).ravel(), A.diagonal())
