"""Kernels ask the processor for what they need soon."""

from __future__ import annotations

import numpy as np
from numba import njit

from penstock.spmv.prefetch import prefetch


@njit
def _last_after_asking_ahead(x):
    prefetch(x, x.shape[0] + 10_000_000)
    prefetch(x, -1)
    return x[x.shape[0] - 1]


def test_it_becomes_an_instruction_that_reads_nothing() -> None:
    for dtype in (np.float64, np.float32, np.int32):
        assert _last_after_asking_ahead(np.arange(5, dtype=dtype)) == 4
    for signature in _last_after_asking_ahead.signatures:
        assert "llvm.prefetch" in _last_after_asking_ahead.inspect_llvm(signature)
