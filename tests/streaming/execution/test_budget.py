"""The budget is kept to the byte."""

import numpy as np
import pytest

from penstock.spmv import CPU, BudgetError, InputError
from penstock.streaming import MemoryBudget
from penstock.streaming.stores.buffers import PAGE_NBYTES, aligned_buffer

HUGE_PAGE = 2 << 20


def test_a_budget_can_be_filled_to_the_last_byte_and_not_one_more():
    budget = MemoryBudget("1 MiB")
    slots = budget.allocate("slots", 600_000, CPU)
    rest = budget.allocate("resident part", (1 << 20) - 600_000, CPU)

    with pytest.raises(BudgetError, match="raise the budget") as caught:
        budget.allocate("one byte", 1, CPU)

    assert (slots.nbytes, rest.nbytes) == (600_000, (1 << 20) - 600_000)
    message = str(caught.value)
    for fact in ("one byte needs 1 B", "budget of 1 MiB has 0 B left", "slots 585.9 KiB", "resident part 438.1 KiB"):
        assert fact in message
    assert isinstance(caught.value, MemoryError)


def test_a_refused_request_takes_nothing():
    budget = MemoryBudget(1000)
    with pytest.raises(BudgetError, match="held: nothing"):
        budget.allocate("slots", 1001, CPU)

    assert (budget.used_nbytes, budget.peak_nbytes) == (0, 0)
    assert budget.allocate("slots", 1000, CPU).nbytes == 1000


def test_a_release_gives_back_all_of_one_purpose_and_nothing_of_another():
    budget = MemoryBudget(1000)
    for purpose, nbytes in (("a", 300), ("b", 400), ("a", 200)):
        budget.allocate(purpose, nbytes, CPU)
    assert budget.used_nbytes == 900

    budget.release("a")

    assert budget.used_nbytes == 400
    assert budget.allocate("c", 600, CPU).nbytes == 600
    with pytest.raises(BudgetError, match="b 400 B, c 600 B"):
        budget.allocate("d", 1, CPU)


def test_releasing_twice_or_what_was_never_held_gives_nothing():
    budget = MemoryBudget(1000)
    budget.allocate("a", 300, CPU)
    budget.allocate("b", 100, CPU)
    for purpose in ("a", "a", "never"):
        budget.release(purpose)

    assert budget.used_nbytes == 100


def test_the_peak_is_the_most_that_was_held_at_once():
    budget = MemoryBudget(1000)
    budget.allocate("a", 700, CPU)
    budget.release("a")
    budget.allocate("b", 200, CPU)

    assert (budget.used_nbytes, budget.peak_nbytes) == (200, 700)


@pytest.mark.parametrize("size", [4096, "4096", "4 KiB", "4kib", " 4 KiB ", "0.004096 MB"])
def test_sizes_are_read_as_people_write_them(size):
    assert MemoryBudget(size).limit_nbytes == 4096


@pytest.mark.parametrize("size", ["-1 GiB", "abc", "", "GiB", "1 GiB 2", "1 parsec", "inf", None, True, [1]])
def test_what_is_no_size_is_refused_with_an_example(size):
    with pytest.raises(InputError, match="write a number of bytes or for example '512 MiB'"):
        MemoryBudget(size)


@pytest.mark.parametrize("size", ["0", 0, -1, "0 GiB", float("nan"), float("inf"), "0.5", 0.5, "1e300 GiB"])
def test_a_size_of_no_whole_byte_or_beyond_all_memory_is_refused(size):
    with pytest.raises(InputError, match="must be positive"):
        MemoryBudget(size)


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 1 << 20, HUGE_PAGE - 1, HUGE_PAGE, HUGE_PAGE + 1])
def test_a_buffer_is_zeroed_writable_and_starts_at_a_page(nbytes):
    buffer = aligned_buffer(nbytes)

    assert (buffer.dtype, buffer.shape) == (np.uint8, (nbytes,))
    assert nbytes == 0 or buffer.ctypes.data % PAGE_NBYTES == 0
    assert not buffer.any()
    buffer[:] = 255
    assert (buffer == 255).all()


def test_a_large_buffer_starts_at_a_huge_page():
    assert aligned_buffer(3 * HUGE_PAGE + 5).ctypes.data % HUGE_PAGE == 0


def test_two_buffers_share_no_memory():
    first, second = aligned_buffer(HUGE_PAGE), aligned_buffer(HUGE_PAGE)
    first[:] = 1

    assert not np.shares_memory(first, second)
    assert not second.any()
