"""The points of the communication-hiding study, and the memory and the time that each of them needs.

After O. A. Fagerlund, T. Kitayama, G. Hashimoto, H. Okuda, "Effect of GPU communication-hiding for SpMV using OpenACC".
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from penstock.experiments.overlap.configuration import OverlapCase, OverlapStudy
from penstock.spmv import BudgetError, Device, InputError, SparseMatrix
from penstock.streaming import LinkRates, MatrixIndex, Ring, StreamPlan, Workload, index_of, plan_stream


@dataclass(frozen=True)
class OverlapPoint:
    """One combination of the study's parameters."""

    case: OverlapCase
    subdivisions: int
    repeats: int
    columns: int

    def name(self, kind: str) -> str:
        """Return the name of a record of this point; ``kind`` is ``"on"`` or ``"off"``."""
        more = "" if self.columns == 1 else f"/k{self.columns}"
        return f"overlap/{self.case.name}/{kind}/s{self.subdivisions}/r{self.repeats}{more}"


def study_points(study: OverlapStudy) -> list[OverlapPoint]:
    """Return all combinations, case by case."""
    combinations = itertools.product(study.cases, study.repeats, study.columns, study.subdivisions)
    return [OverlapPoint(case, count, repeats, columns) for case, repeats, columns, count in combinations]


def host_matrix(study: OverlapStudy, case: OverlapCase) -> SparseMatrix:
    """Assemble the matrix of a case in host memory, in the study's format."""
    return study.cantilever(case).matrix(study.format_of(case), values_dtype=np.dtype(study.values))


def check_study(study: OverlapStudy) -> None:
    """Plan all points, so that a point that cannot be measured is an error before measuring begins."""
    Device.parse(study.device)
    if study.folder is not None and not study.folder.is_dir():
        raise InputError(f"folder: {study.folder} does not exist; make it, or name another folder for the matrices")
    for point in study_points(study):
        beam, name = study.cantilever(point.case), study.format_of(point.case)
        slabs = beam.symbolic_slabs(point.subdivisions, name, values_dtype=np.dtype(study.values))
        try:
            plan_point(study, index_of(slabs, beam.shape), point, LinkRates(1.0, 1.0))
        except BudgetError as error:
            error.add_note(f"in {point.name('on')}")
            raise


def plan_point(study: OverlapStudy, index: MatrixIndex, point: OverlapPoint, rates: LinkRates) -> StreamPlan:
    """Plan a sweep with overlap.

    Each sweep of the study begins with an empty ring: a transfer ahead of the next sweep would not be hidden behind any
    computation.
    """
    workload = Workload(point.columns, point.repeats)
    if study.protocol == "paper":
        ring = Ring(slots=2, sweeps="restart", resident_structure=True)
        return plan_stream(index, None, workload, ring, rates=rates)
    return plan_stream(index, study.budget, workload, Ring(slots=study.slots, sweeps="restart"), rates=rates)
