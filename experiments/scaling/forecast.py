"""Forecasts an experiment on several GPUs: memory, seconds of an iteration and of a solve, and efficiency."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.experiments.cantilever.configuration import Experiment
from penstock.experiments.cantilever.matrix_storage import plan_experiment, workspace_nbytes
from penstock.spmv import BudgetError, InputError, PenstockError, format_nbytes
from penstock.streaming import LinkRates, StreamPlan
from penstock.streaming.planning.estimate import EFFICIENCY

_VALUE_NBYTES = 8
# Passes over vectors in an iteration of cg, and in one with a coarse level.
_PASSES, _PASSES_WITH_LEVEL = 14, 45
# A step of a polynomial in memory reads five vectors, writes one, and reads the diagonal blocks.
_STEP_PASSES = 6
# Kernels of an iteration beside the products, and the blocks in a row of a coupling with one neighbour.
_KERNELS, _COUPLED_BLOCKS = 9, 9
# Sweeps of many products took 1.1 to 1.3 times as long on H200s as planned: where they turn, the link waits for kernels.
_TURNS = 1.2
# Seconds in an iteration with a coarse level for which the GPU waits for the host.
_HOST_SECONDS = 3e-4
# Sums over all ranks in an iteration.
_SUMS = 2


@dataclass(frozen=True)
class Wires:
    """The network between ranks.

    Parameters
    ----------
    gpus_a_host : int
    peer, network : float
        Bytes a second, each way, between GPUs of a host and between hosts.
    message, reduction : float
        Seconds of a short message to neighbours and of a sum over the ranks of a host, as parts of a CUDA graph. The defaults fit
        iterations of ``cg`` on two H200s through NCCL (``benchmarks/results/distributed-h200x2.json``).
    reduction_a_doubling : float
        More seconds of a sum for each doubling of the hosts. This and the network's rate are typical of InfiniBand of 400 Gbit/s;
        they have not been measured.
    """

    gpus_a_host: int = 8
    peer: float = 247e9
    network: float = 50e9
    message: float = 8e-6
    reduction: float = 6e-6
    reduction_a_doubling: float = 6e-6

    def sum_seconds(self, ranks: int) -> float:
        """Return the seconds of a sum over all ranks."""
        hosts = -(-ranks // self.gpus_a_host)
        return 0.0 if ranks == 1 else self.reduction + self.reduction_a_doubling * math.log2(hosts)

    def exchange_seconds(self, ranks: int, nbytes: float) -> float:
        """Return the seconds in which all ranks exchange ``nbytes`` bytes with each neighbour in a chain."""
        rate = self.network if ranks > self.gpus_a_host else self.peer
        return 0.0 if ranks == 1 else self.message + min(ranks - 1, 2) * nbytes / rate


@dataclass(frozen=True)
class Forecast:
    """Time and memory of a number of ranks, those of the one with the most planes.

    Parameters
    ----------
    ranks, planes : int
        Planes of nodes of a rank.
    streamed : bool
        Whether the matrix of a rank exceeds the memory that its vectors leave.
    matrix_nbytes, vector_nbytes : int
        Of a rank.
    products : int
        In an iteration.
    sweep_seconds : float
        Of all products of an iteration, which share one sweep or few if streamed.
    shared_seconds : float
        Of what every rank does alike, such as coarse solves.
    rank_seconds : float
        Of sums and of messages that nothing hides.
    vector_seconds : float
        Of the other passes over vectors.
    iterations : float or None
        For eight digits, if they are known without a solve.
    """

    ranks: int
    planes: int
    streamed: bool
    matrix_nbytes: int
    vector_nbytes: int
    products: int
    sweep_seconds: float
    shared_seconds: float
    rank_seconds: float
    vector_seconds: float
    iterations: float | None

    @property
    def seconds(self) -> float:
        """Seconds of an iteration."""
        return self.sweep_seconds + self.shared_seconds + self.rank_seconds + self.vector_seconds

    def efficiency_against(self, other: Forecast) -> float:
        """Return how well further ranks are used, 1 if they shorten an iteration in proportion."""
        return other.seconds * other.ranks / (self.seconds * self.ranks)

    @property
    def solve_seconds(self) -> float | None:
        """Seconds of a solve, if the iterations are known."""
        return None if self.iterations is None else self.iterations * self.seconds


def forecast(experiment: Experiment, ranks: int, gpu_nbytes: int, rates: LinkRates, wires: Wires) -> Forecast:
    """Forecast an experiment whose planes of nodes are split among ranks, with a GPU of ``gpu_nbytes`` and these rates each.

    A rank's sweep is planned like an experiment with its planes. Raises a BudgetError if the vectors of a rank do not fit, or
    leave too little memory for a ring.
    """
    along, *across = experiment.cantilever().mesh.node_counts
    planes = -(-along // ranks)
    if planes < 2:
        raise InputError(f"{ranks} ranks are too many for {along} planes of nodes; each needs two or more")
    spec, dof = experiment.preconditioner, experiment.model.dof
    plane = dof * math.prod(across)  # unknowns
    vectors, plan = _plan_of_rank(experiment, (planes, *across), gpu_nbytes, rates)
    predicted, degree, unknowns = plan.predicted_seconds(), plan.workload.degree, planes * plane
    assert predicted is not None, "rates are known"
    shares_sweep = plan.slots > 0 and plan.powers_per_sweep > 1
    sweep = predicted * -(-degree // plan.powers_per_sweep) * (_TURNS if shares_sweep else 1.0)
    memory, value = EFFICIENCY * rates.memory, _VALUE_NBYTES * experiment.columns
    if degree > 1 and not plan.slots:
        sweep += degree * unknowns * (_STEP_PASSES * value + _VALUE_NBYTES * dof) / memory
    shared = spec.replicated_reads * spec.replicated_nbytes(along * plane) / memory
    coupling = plane // dof * _COUPLED_BLOCKS * (_VALUE_NBYTES * dof**2 + 4) / memory + 2 * rates.product_gap
    exchange = wires.exchange_seconds(ranks, value * plane) + (coupling if ranks > 1 else 0.0)
    # Beside a sweep of many products, a message has the time of a transfer.
    hidden = sweep / (degree + len(plan.index.subdivisions)) if shares_sweep else 0.0
    passes = _PASSES_WITH_LEVEL if shared else _PASSES
    return Forecast(
        ranks,
        planes,
        plan.slots > 0,
        plan.index.nbytes,
        vectors,
        degree,
        sweep_seconds=sweep,
        shared_seconds=shared + (_HOST_SECONDS if shared else 0.0),
        rank_seconds=degree * max(0.0, exchange - hidden) + _SUMS * wires.sum_seconds(ranks),
        vector_seconds=passes * value * unknowns / memory + _KERNELS * rates.product_gap,
        iterations=plan.workload.iterations,
    )


def _plan_of_rank(
    experiment: Experiment, nodes: tuple[int, ...], gpu_nbytes: int, rates: LinkRates
) -> tuple[int, StreamPlan]:
    """Return the bytes of a rank's vectors, and the plan of its planes in the memory that they leave, or in ``memory.budget``."""
    whole = experiment.cantilever().mesh.node_counts

    def within(nbytes: int) -> Experiment:
        return experiment.of_planes(nodes[0]).changed(memory={"device": "cuda", "budget": nbytes, "store": None})

    spec = experiment.preconditioner
    unknowns, of_rank = (experiment.model.dof * math.prod(each) for each in (whole, nodes))
    vectors = workspace_nbytes(within(gpu_nbytes), spec, of_rank)
    vectors += spec.replicated_nbytes(unknowns) - spec.replicated_nbytes(of_rank)
    if vectors >= gpu_nbytes:
        raise BudgetError(
            f"the vectors and coarse levels of a rank take {format_nbytes(vectors)} of {format_nbytes(gpu_nbytes)}"
        )
    room = gpu_nbytes - vectors
    return vectors, plan_experiment(within(min(room, experiment.memory.budget or room)), rates)


def forecasts(
    experiment: Experiment, counts: Sequence[int], gpu_nbytes: int, rates: LinkRates, wires: Wires
) -> Iterator[tuple[int, Forecast | PenstockError]]:
    """Yield a forecast for each number of ranks, or why there is none."""
    for ranks in counts:
        try:
            yield ranks, forecast(experiment, ranks, gpu_nbytes, rates, wires)
        except PenstockError as error:
            yield ranks, error


def default_ranks(experiment: Experiment, most: int) -> list[int]:
    """Return the powers of two up to the most ranks, and these, as far as each gets two planes of nodes."""
    most = min(most, experiment.cantilever().mesh.node_counts[0] // 2)
    return sorted({*(2**k for k in range(most.bit_length()) if 2**k <= most), most}) if most else [1]
