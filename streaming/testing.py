"""For test suites: stores that are slow, fail or count reads, and the tests that every store must pass."""

from penstock.streaming.stores.testing import StoreContract
from penstock.streaming.stores.wrappers import CountingStore, FaultyStore, SlowStore, StoreWrapper

__all__ = ["CountingStore", "FaultyStore", "SlowStore", "StoreContract", "StoreWrapper"]
