"""The right-hand sides of an experiment: one load, several load cases, or samples of a random load."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.experiments.cantilever.configuration import Experiment, LoadSection
from penstock.fem import Cantilever


def load_names(load: LoadSection) -> list[str]:
    """Return a name for each right-hand side."""
    if load.cases is not None:
        return [f"{number}_{case.kind}" for number, case in enumerate(load.cases, 1)]
    if load.samples is not None:
        return [f"sample {number}" for number in range(1, load.samples + 1)]
    return [load.kind]


def right_hand_sides(experiment: Experiment, cantilever: Cantilever) -> np.ndarray[Any, Any]:
    """Return the load ``(n,)``, or ``(n, k)`` for k load cases or samples.

    In a sample, each entry of the load is multiplied by a random number with mean 1 and standard deviation ``load.spread``.
    The k-th sample does not depend on the number of samples.
    """
    load = experiment.load
    if load.cases is not None:
        columns = [cantilever.load(*case.kinds(), magnitude=case.magnitude) for case in load.cases]
        return np.stack(columns, axis=1)
    base = cantilever.load(*load.kinds(), magnitude=load.magnitude)
    if load.samples is None:
        return base
    factors = [
        1 + load.spread * np.random.default_rng([load.seed, number]).standard_normal(base.size)
        for number in range(load.samples)
    ]
    return base[:, None] * np.stack(factors, axis=1)
