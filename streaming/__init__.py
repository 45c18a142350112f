"""A matrix larger than the memory that computes with it: stores, plans, schedules and the streamed operator."""

from penstock.streaming.budget import MemoryBudget
from penstock.streaming.file_store import FileStore
from penstock.streaming.forecast import Forecast, LinkRates
from penstock.streaming.host_store import HostStore
from penstock.streaming.layout import MatrixIndex, Subdivision, index_of
from penstock.streaming.level_order import Couplings, LevelOrder, level_order, reach_of, reach_of_store
from penstock.streaming.plan import StreamPlan
from penstock.streaming.planning import CUTS, plan_products, plan_stream, plan_subdivisions
from penstock.streaming.schedule import Compute, Copy, HazardError, Release, Schedule, check_hazards
from penstock.streaming.store import PageLockable, Store
from penstock.streaming.store_wrappers import CountingStore, FaultyStore, SlowStore, StoreWrapper
from penstock.streaming.streamed_matrix import StreamedMatrix
from penstock.streaming.timeline import Span, Timeline, foretell

__all__ = [
    "CUTS",
    "Compute",
    "Copy",
    "CountingStore",
    "Couplings",
    "FaultyStore",
    "FileStore",
    "Forecast",
    "HazardError",
    "HostStore",
    "LevelOrder",
    "LinkRates",
    "MatrixIndex",
    "MemoryBudget",
    "PageLockable",
    "Release",
    "Schedule",
    "SlowStore",
    "Span",
    "Store",
    "StoreWrapper",
    "StreamPlan",
    "StreamedMatrix",
    "Subdivision",
    "Timeline",
    "check_hazards",
    "foretell",
    "index_of",
    "level_order",
    "plan_products",
    "plan_stream",
    "plan_subdivisions",
    "reach_of",
    "reach_of_store",
]
