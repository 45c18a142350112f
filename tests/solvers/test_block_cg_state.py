"""A block solve that stopped goes on as if it had not, and who watches sees what there is."""

import copy

import numpy as np
import pytest
from block_solves import PRECONDITIONERS, check_honest, lengths, mixing, right_hand_sides, same_solve, staggered

from penstock.solvers import StopReason, block_cg, jacobi
from penstock.spmv import FunctionOperator, InputError


class TestState:
    @pytest.mark.parametrize("kind", PRECONDITIONERS)
    def test_a_state_copied_by_the_monitor_goes_on_bit_equal(self, A, hard, kind):
        """From before and after every change of the block, and a restart."""
        B, X0, atol = hard
        M, shapes = PRECONDITIONERS[kind](A), []
        monitor = lambda record: shapes.append((len(record.state.active), record.state.reasons.count(None)))  # noqa: E731
        whole = block_cg(A, B, X0, rtol=0.0, atol=atol, M=M, monitor=monitor)
        assert whole.converged
        changes = [at for at in range(1, len(shapes)) if shapes[at] != shapes[at - 1]]
        assert len(changes) >= 4
        assert any(0 < pending < 5 for _, pending in shapes), "some columns were found solved, others started again"
        stops = sorted({1, 2, *(at + shift for at in changes for shift in (0, 1, 2))} & set(range(1, len(shapes))))[::4]
        checkpoints = {}

        def keep(record):
            if record.iteration in stops:
                checkpoints[record.iteration] = copy.deepcopy(record.state)

        same_solve(block_cg(A, B, X0, rtol=0.0, atol=atol, M=M, monitor=keep), whole)
        assert list(checkpoints) == stops
        for iteration, state in checkpoints.items():
            assert state.iteration == iteration
            result = block_cg(A, B, rtol=0.0, atol=atol, M=M, state=state)
            same_solve(result, whole)
            assert result.state is state

    @pytest.mark.parametrize("kind", PRECONDITIONERS)
    def test_every_single_iteration_may_be_a_call_of_its_own(self, A, kind):
        B, atol = staggered(columns=3)
        arguments = {"rtol": 0.0, "atol": atol, "M": PRECONDITIONERS[kind](A)}
        whole = block_cg(A, B, **arguments)
        result, calls = block_cg(A, B, monitor=lambda record: True, **arguments), 1
        while not result.converged:
            assert StopReason.STOPPED in {of.reason for of in result.columns}
            assert result.info == result.iterations == calls
            state = copy.deepcopy(result.state)
            result, calls = block_cg(A, B, state=state, monitor=lambda record: True, **arguments), calls + 1

        same_solve(result, whole)

    @pytest.mark.parametrize("after", [1, 10, 40])
    def test_a_solve_out_of_iterations_goes_on_bit_equal(self, A, hard, after):
        B, X0, atol = hard
        whole = block_cg(A, B, X0, rtol=0.0, atol=atol, M=jacobi(A))
        part = block_cg(A, B, X0, rtol=0.0, atol=atol, M=jacobi(A), maxiter=after)
        assert StopReason.MAXITER in {of.reason for of in part.columns}

        same_solve(block_cg(A, B, rtol=0.0, atol=atol, M=jacobi(A), state=part.state), whole)

    @pytest.mark.parametrize("loose", [1e-2, 1e-5])
    def test_a_converged_state_goes_on_to_a_tighter_tolerance(self, A, preconditioner, loose):
        B, M = right_hand_sides(252, 4), preconditioner(A)
        direct = block_cg(A, B, M=M, rtol=1e-9).iterations
        state = block_cg(A, B, M=M, rtol=loose).state
        before = state.iteration

        result = block_cg(A, B, M=M, rtol=1e-9, state=state)

        assert result.converged
        check_honest(A, B, result, 1e-9)
        assert 0 < result.iterations - before <= direct * 1.1

    def test_a_stopped_state_goes_on_to_a_tighter_tolerance(self, A, hard):
        """Some columns have left the block by the looser one."""
        B, X0, atol = hard
        part = block_cg(A, B, X0, rtol=0.0, atol=atol, monitor=lambda r: len(r.state.active) == 3)
        assert {of.reason for of in part.columns} >= {StopReason.STOPPED}

        result = block_cg(A, B, rtol=0.0, atol=atol / 100, state=part.state)

        assert result.converged
        check_honest(A, B, result, 0.0, atol / 100)

    def test_a_converged_state_is_not_iterated_again(self, A):
        B = right_hand_sides(252, 4)
        done = block_cg(A, B, rtol=1e-8)
        X = done.x.copy()

        again = block_cg(A, B, rtol=1e-8, state=done.state)

        assert again.converged
        assert again.iterations == done.iterations
        np.testing.assert_array_equal(again.x, X)
        check_honest(A, B, again, 1e-8)

    @pytest.mark.parametrize("rtol", [1e-30, 1e-8])
    def test_a_state_that_ended_at_a_floor_tells_its_true_residual_and_whether_it_meets_a_looser_tolerance(
        self, A, rtol
    ):
        B = right_hand_sides(252, 3)
        floor = block_cg(A, B, rtol=1e-30)
        assert {of.reason for of in floor.columns} == {StopReason.ROUNDING_FLOOR}

        check_honest(A, B, block_cg(A, B, rtol=rtol, state=floor.state), rtol)

    def test_maxiter_counts_the_iterations_before_the_stop(self, A):
        B = right_hand_sides(252, 3)
        state = block_cg(A, B, rtol=1e-9, monitor=lambda record: record.iteration == 5).state

        assert block_cg(A, B, rtol=1e-9, maxiter=5, state=copy.deepcopy(state)).iterations == 5
        assert block_cg(A, B, rtol=1e-9, maxiter=12, state=copy.deepcopy(state)).iterations == 12

    def test_a_state_and_a_first_guess_are_refused_together(self, A):
        B = right_hand_sides(252, 3)
        state = block_cg(A, B, maxiter=2).state

        with pytest.raises(InputError, match="give X0 or state, not both"):
            block_cg(A, B, B, state=state)


class TestMonitorAndCallback:
    def test_are_called_once_an_iteration(self, A, hard):
        B, X0, atol = hard
        records, iterates = [], []

        result = block_cg(
            A, B, X0, rtol=0.0, atol=atol, monitor=records.append, callback=lambda X: iterates.append(X.copy())
        )

        assert [record.iteration for record in records] == list(range(1, result.iterations + 1))
        assert len(iterates) == result.iterations
        np.testing.assert_array_equal(iterates[-1], result.x)
        assert all(record.state is result.state and record.bytes_streamed == 0 for record in records)
        seconds = [record.seconds for record in records]
        assert 0 <= seconds[0] <= seconds[-1] <= result.timings["total"]
        assert seconds == sorted(seconds)

    def test_records_tell_the_largest_residual_of_all_columns(self, A):
        B, told = np.insert(right_hand_sides(252, 3), 1, 0.0, axis=1), []

        result = block_cg(A, B, rtol=1e-8, monitor=lambda record: told.append(record.residual_norm))

        histories = np.array([of.residual_norms for of in result.columns])
        np.testing.assert_array_equal(told, histories.max(axis=0)[1:])

    def test_recursive_residuals_are_those_of_the_iterates(self, A, dense):
        B, iterates = right_hand_sides(252, 4), []

        result = block_cg(A, B, rtol=1e-6, M=mixing(A), callback=lambda X: iterates.append(X.copy()))

        histories = np.array([of.residual_norms for of in result.columns]).T
        np.testing.assert_array_equal(histories[0], 1.0)
        for norms, X in zip(histories[1:], iterates, strict=True):
            active = norms > 1e-6  # those of columns that left the block stay, though their iterates do too
            np.testing.assert_allclose(norms[active], (lengths(B - dense @ X) / lengths(B))[active], rtol=1e-5)

    def test_monitor_does_not_stop_a_solve_that_has_converged(self, A):
        B = right_hand_sides(252, 3)
        wanted = block_cg(A, B).iterations

        assert block_cg(A, B, monitor=lambda record: record.iteration == wanted).converged

    def test_callback_is_not_called_for_an_iteration_that_breaks_down(self):
        A = np.diag([10.0, 9.0, 8.0, 7.0, 6.0, 5.5, 5.2, 5.1, -0.001])
        calls = []

        result = block_cg(A, 1.0 + 0.1 * right_hand_sides(9, 2), rtol=1e-10, callback=calls.append)

        assert {of.reason for of in result.columns} == {StopReason.NOT_POSITIVE_DEFINITE}
        assert len(calls) == result.iterations > 0

    def test_callback_is_called_for_the_iterates_before_a_preconditioner_fails(self, A):
        """As by ``cg``: the iterates moved, and the iteration is counted."""
        count, calls = 0, []

        def precondition(R):
            nonlocal count
            count += 1
            return -R if count == 3 else R.copy()

        M = FunctionOperator(precondition, A.shape, np.float64, blocks=True)
        result = block_cg(A, right_hand_sides(252, 2), M=M, callback=calls.append)

        assert result.info < 0
        assert len(calls) == result.iterations
