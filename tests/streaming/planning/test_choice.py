"""Of all candidates and rings the plan is taken that is expected to solve fastest. Nothing here moves a byte of a matrix."""

import contextlib
import itertools
import re
import subprocess
import sys

import pytest

from penstock.fem import Cantilever
from penstock.spmv import BudgetError, InputError
from penstock.streaming import CUTS, Candidate, LinkRates, Ring, Workload, choose, index_of, plan_stream

RATES = LinkRates(link=1e9, memory=3e9)
DEGREES = (9, 5, 13, 17, 21, 25, 33)


def smallest_budget(error):
    return int(re.search(r"the smallest that does is (\d+) bytes", str(error))[1])


class TestCuts:
    """A cantilever of 36,000 nodes whose 0.6 GB matrix is never assembled."""

    beam = Cantilever(nodes=33, dof=3)
    limit = 512

    def index_for(self, count):
        self.asked.append(count)
        return index_of(self.beam.symbolic_slabs(count), self.beam.shape)

    @pytest.fixture(autouse=True)
    def _record(self):
        self.asked = []

    def candidates(self, limit, workload):
        for count in sorted({min(count, limit) for count in CUTS}):
            yield Candidate(self.index_for(count), workload)

    def plan(self, budget, limit=limit, workload=None, ring=None, rates=None):
        return choose(self.candidates(limit, workload or Workload()), budget, ring, rates=rates)

    @pytest.mark.parametrize(
        ("budget", "workload", "ring"),
        [
            ("20 MiB", Workload(), {}),
            ("10 MiB", Workload(), {"overlap": False}),
            ("50 MiB", Workload(repeats=5), {"sweeps": "restart"}),
        ],
        ids=["alternate", "no overlap", "restart"],
    )
    def test_a_plan_fits_and_is_the_best_of_the_cuts_and_rings_tried(self, budget, workload, ring):
        plan = self.plan(budget, 128, workload, Ring(**ring), RATES)

        assert plan.storage_nbytes <= plan.budget_nbytes
        assert plan.slots >= 2
        others = []
        for count, slots in itertools.product(set(self.asked), (2, 3, 4)):
            with contextlib.suppress(BudgetError):
                others.append(
                    plan_stream(self.index_for(count), budget, workload, Ring(slots=slots, **ring), rates=RATES)
                )
        assert len(others) > 8

        def cost(plan):
            return plan.estimated_solve_seconds() + 0.3 * plan.link_seconds()

        assert cost(plan) == min(map(cost, others))
        assert plan.predicted_seconds() <= 1.1 * min(other.predicted_seconds() for other in others)

    def test_where_products_bind_they_are_made_in_as_few_sweeps_as_the_ring_has_room_for(self):
        rates = LinkRates(3e8, 1e10, side_by_side=4)
        plan = self.plan("50 MiB", 128, Workload(16, degree=8, iterations=10.0), rates=rates)
        assert plan.slots
        assert plan.powers_per_sweep == 8

    def test_each_subdivision_of_a_slow_start_is_one_too_many(self):
        quick, slow = (self.plan("50 MiB", rates=LinkRates(1e9, 1e11, transfer_start=start)) for start in (0.0, 0.02))

        assert len(slow.index.subdivisions) < len(quick.index.subdivisions)

    def test_without_rates_cuts_are_compared_and_no_time_is_promised(self):
        plan = self.plan("10 MiB")

        assert plan.predicted_seconds() is None
        assert plan.estimate() is None
        assert plan.slots in (2, 3, 4)

    def test_a_matrix_that_fits_is_not_cut(self):
        plan = self.plan("10 GiB")

        assert len(plan.index.subdivisions) == 1
        assert plan.streamed_nbytes == 0
        assert self.asked == [1], "no candidate is looked at after one that fits"

    def test_no_cut_is_finer_than_the_candidates(self):
        plan = self.plan("40 MiB", limit=10)

        assert max(self.asked) == 10
        assert len(plan.index.subdivisions) <= 10

    def test_a_budget_too_small_for_the_finest_cut_is_refused_with_one_that_does(self):
        with pytest.raises(BudgetError, match="the smallest that does is") as caught:
            self.plan("1 KiB")

        needed = smallest_budget(caught.value)
        assert self.plan(needed).storage_nbytes <= needed

    def test_a_refusal_does_not_advise_a_finer_cut_than_the_candidates(self):
        with pytest.raises(BudgetError, match="the smallest that does is") as caught:
            self.plan("1 KiB", limit=8)

        assert "more than 8 subdivisions" not in str(caught.value)

    def test_workload_ring_and_rates_reach_the_plan(self):
        rates, workload = LinkRates(1e9, 1e10), Workload(columns=4, repeats=2, workspace_nbytes=5)
        ring = Ring(slots=5, overlap=False, sweeps="restart", resident_structure=True)

        plan = self.plan("30 MiB", workload=workload, ring=ring, rates=rates)

        assert (plan.workload, plan.ring, plan.rates) == (workload, ring, rates)
        assert plan.slots == plan.schedule.slots == 5
        assert (plan.schedule.overlap, plan.schedule.sweeps) == (False, "restart")
        assert plan.resident_structure

    def test_without_candidates_there_is_no_way_to_cut_the_matrix(self):
        with pytest.raises(InputError, match="no way to cut this matrix; choose another format"):
            choose([], "1 GiB")


class TestDegrees:
    """Consecutive powers of the matrix share sweeps, so their number, the cut and the ring are chosen together."""

    def index(self, count, format_name="bsr"):
        beam = Cantilever(nodes=(24, 5, 5), dof=3)
        return index_of(beam.symbolic_slabs(count, format_name), beam.shape)

    def test_the_cut_is_chosen_for_all_of_them_together(self):
        budget, rates = self.index(1).nbytes // 4, LinkRates(1e9, 1e11, 1e-6, 1e-6, 0.0)
        plain, many = (
            choose((Candidate(self.index(count), Workload(degree=degree)) for count in (4, 8, 24)), budget, rates=rates)
            for degree in (1, 8)
        )

        assert plain.powers_per_sweep == 1
        assert many.powers_per_sweep > 2
        assert many.estimated_solve_seconds() < 8 * plain.estimated_solve_seconds() / 2

    def test_the_degree_is_chosen_by_the_time_of_a_solve(self):
        """A slow link asks for many, a slow memory for few."""
        index = self.index(24)
        budget = 12 * max(s.nbytes for s in index.subdivisions)
        chosen = []
        for memory in (1e12, 2e9):
            rates = LinkRates(1e9, memory, 1e-6, 1e-6, 0.0)
            plan = choose((Candidate(index, Workload(degree=degree)) for degree in DEGREES), budget, rates=rates)
            assert plan.workload.degree % 2
            assert ("a solve     about" in plan.explain()) == (plan.powers_per_sweep > 1)
            assert "a solve     about" in plan_stream(index, budget, plan.workload, rates=rates).explain()
            chosen.append((plan.workload.degree, plan.powers_per_sweep))
        assert chosen[0][0] >= 9 > chosen[1][0]
        assert chosen[0][1] > 1

    def test_in_memory_it_is_the_first(self):
        """There, products cost the same however many of them follow each other."""
        index = self.index(2)
        plan = choose((Candidate(index, Workload(degree=degree)) for degree in DEGREES), index.nbytes)

        assert not plan.slots
        assert plan.workload.degree == DEGREES[0] == 9

    @pytest.mark.parametrize("reach", [1, 2])
    def test_rings_are_tried_that_compute_all_powers_in_few_sweeps(self, reach):
        index = self.index(24)
        plan = choose([Candidate(index, Workload(degree=5), reach)], index.nbytes - 1, rates=LinkRates(1e6, 1e12))

        assert plan.reach == reach
        assert plan.powers_per_sweep == 5
        assert plan.slots == 4 * reach + 2

    @pytest.mark.parametrize("order", [1, -1])
    def test_formats_are_compared_wherever_they_stand(self, order):
        """Half of a symmetric matrix is half as long on a slow link."""
        formats = ("bsr", "symmetric_bsr")[::order]
        candidates = (Candidate(self.index(12, name), Workload()) for name in formats)

        plan = choose(candidates, self.index(12, "symmetric_bsr").nbytes // 2, rates=LinkRates(1e6, 1e12))

        assert plan.index.format_name == "symmetric_bsr"

    def test_the_least_of_all_estimates_is_taken(self):
        rates, budget = LinkRates(1e9, 1e11, 1e-6, 1e-6, 0.0), self.index(1).nbytes // 3
        candidates = [
            Candidate(self.index(count), Workload(degree=degree)) for count in (6, 12, 24) for degree in (1, 5, 9)
        ]

        plan = choose(iter(candidates), budget, rates=rates)

        others, rings = [], {1: (2, 3, 4), 5: (2, 3, 4, 6), 9: (2, 3, 4, 6, 10)}
        for candidate in candidates:
            for slots in rings[candidate.workload.degree]:
                with contextlib.suppress(BudgetError):
                    ring = Ring(slots=slots)
                    others.append(plan_stream(candidate.index, budget, candidate.workload, ring, rates=rates))
        assert len(others) > 10
        assert plan.estimated_solve_seconds() == min(other.estimated_solve_seconds() for other in others)


def test_a_candidate_that_does_not_fit_leaves_the_others():
    beam = Cantilever(nodes=(24, 5, 5), dof=3)
    coarse, fine = (index_of(beam.symbolic_slabs(count, "bsr"), beam.shape) for count in (2, 24))
    budget = 4 * max(subdivision.nbytes for subdivision in fine.subdivisions)

    assert choose([Candidate(coarse, Workload()), Candidate(fine, Workload())], budget).index is fine
    with pytest.raises(BudgetError, match="the smallest that does is"):
        choose([Candidate(coarse, Workload())], budget)


WITHOUT_CUPY = """
import sys

sys.modules["cupy"] = sys.modules["cupyx"] = None  # an import of them is an ImportError from now on
from penstock.streaming import Candidate, LinkRates, MatrixIndex, Ring, Subdivision, Workload, choose, plan_stream

GB, PLANES, ROWS = 10**9, 300, 540_000
rows = [(n * ROWS, (n + 1) * ROWS) for n in range(PLANES)]
subdivisions = tuple(Subdivision(start, stop, 86_000_000, (), 7 * GB // 10) for start, stop in rows)
index = MatrixIndex((PLANES * ROWS,) * 2, "float64", "bsr", {}, subdivisions)
rates, vectors = LinkRates(55e9, 4.4e12, side_by_side=4), 12 * 8 * PLANES * ROWS
workloads = [Workload(degree=degree, workspace_nbytes=vectors) for degree in (9, 17, 33)]
plan = choose((Candidate(index, workload) for workload in workloads), "100 GiB", rates=rates)
assert plan.powers_per_sweep > 9, plan.explain()
assert plan.storage_nbytes <= 100 << 30 < index.nbytes
planned = plan_stream(index, "100 GiB", plan.workload, Ring(slots=plan.slots), rates=rates)
assert planned.predicted_seconds() == plan.predicted_seconds()
assert planned.explain() == plan.explain()
print("planned", sys.modules["cupy"])
"""


def test_a_plan_for_a_gpu_needs_none_and_no_cupy():
    """Both planners are pure: a matrix of 210 GB is planned where it could never be held."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_CUPY], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout == "planned None\n"
