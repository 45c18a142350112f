"""What runs beside its caller gives its result, or its error, and comes after what was launched before."""

import threading

import numpy as np
import pytest
from kernel_targets import ON_GPU

from penstock.spmv import CPU, Device
from penstock.spmv.beside import Beside

GPU = pytest.param("cuda", marks=ON_GPU)


def test_on_a_cpu_the_caller_runs_it():
    assert Beside(CPU, threading.get_ident).result() == threading.get_ident()
    with pytest.raises(ValueError, match="no"):
        Beside(CPU, lambda: int("no"))


@pytest.mark.parametrize("name", [GPU])
def test_on_a_gpu_it_begins_after_what_was_launched_and_ends_before_what_follows(name):
    device = Device.parse(name)
    xp, n = device.xp, 1 << 24
    total = xp.zeros(n)
    for _ in range(200):
        total += 1.0
    twice = Beside(device, lambda: total * 2.0)
    elsewhere = xp.ones(n) * 3.0  # goes on meanwhile

    sums = twice.result() + elsewhere

    assert np.array_equal(device.to_host(sums[[0, n - 1]]), [403.0, 403.0])
    with pytest.raises(ValueError, match="no"):
        Beside(device, lambda: int("no")).result()
