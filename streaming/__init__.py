"""Streams matrices larger than device memory: stores, plans, schedules and the streamed operator."""

from penstock.spmv import SweptOperator
from penstock.streaming.execution.budget import MemoryBudget
from penstock.streaming.execution.executor import Executor, ExecutorSetup, SweepKey
from penstock.streaming.heterogeneous_matrix import HeterogeneousMatrix
from penstock.streaming.planning.choice import CUTS, Candidate, choose
from penstock.streaming.planning.division import Division, divide
from penstock.streaming.planning.estimate import LinkRates, SweepEstimate
from penstock.streaming.planning.ordering import (
    ColumnExtents,
    LevelOrder,
    layer_order,
    level_order,
    reach_of,
    reach_of_store,
)
from penstock.streaming.planning.plan import StreamPlan, plan_stream
from penstock.streaming.planning.schedule import Compute, Copy, HazardError, Release, Schedule, check_hazards
from penstock.streaming.planning.simulate import simulate
from penstock.streaming.planning.timeline import Span, Timeline
from penstock.streaming.planning.workload import Ring, Workload
from penstock.streaming.stores.base import PageLockable, Store
from penstock.streaming.stores.file_store import FileStore
from penstock.streaming.stores.host_planes import HostPlaneStore
from penstock.streaming.stores.host_store import HostStore
from penstock.streaming.stores.made_store import MadeStore, SlabMaker
from penstock.streaming.stores.matrix_index import MatrixIndex, Subdivision
from penstock.streaming.stores.packing import index_of
from penstock.streaming.stores.store_builder import StoreBuilder
from penstock.streaming.streamed_matrix import StreamedMatrix
from penstock.streaming.swept_matrix import SweptMatrix

# An earlier name of it.
Sweeps = SweptOperator

__all__ = [
    "CUTS",
    "Candidate",
    "ColumnExtents",
    "Compute",
    "Copy",
    "Division",
    "Executor",
    "ExecutorSetup",
    "FileStore",
    "HazardError",
    "HeterogeneousMatrix",
    "HostPlaneStore",
    "HostStore",
    "LevelOrder",
    "LinkRates",
    "MadeStore",
    "MatrixIndex",
    "MemoryBudget",
    "PageLockable",
    "Release",
    "Ring",
    "Schedule",
    "SlabMaker",
    "Span",
    "Store",
    "StoreBuilder",
    "StreamPlan",
    "StreamedMatrix",
    "Subdivision",
    "SweepEstimate",
    "SweepKey",
    "SweptMatrix",
    "Timeline",
    "Workload",
    "check_hazards",
    "choose",
    "divide",
    "index_of",
    "layer_order",
    "level_order",
    "plan_stream",
    "reach_of",
    "reach_of_store",
    "simulate",
]
