"""A matrix larger than the memory that computes with it: stores, plans, schedules and the streamed operator."""

from penstock.streaming.budget import MemoryBudget
from penstock.streaming.file_store import FileStore
from penstock.streaming.host_store import HostStore
from penstock.streaming.layout import MatrixIndex, Subdivision, index_of
from penstock.streaming.plan import LinkRates, StreamPlan, plan_stream, plan_subdivisions
from penstock.streaming.schedule import Compute, Copy, HazardError, Release, Schedule, check_hazards
from penstock.streaming.store import PageLockable, Store
from penstock.streaming.streamed_matrix import StreamedMatrix
from penstock.streaming.timeline import Span, Timeline

__all__ = [
    "Compute",
    "Copy",
    "FileStore",
    "HazardError",
    "HostStore",
    "LinkRates",
    "MatrixIndex",
    "MemoryBudget",
    "PageLockable",
    "Release",
    "Schedule",
    "Span",
    "Store",
    "StreamPlan",
    "StreamedMatrix",
    "Subdivision",
    "Timeline",
    "check_hazards",
    "index_of",
    "plan_stream",
    "plan_subdivisions",
]
