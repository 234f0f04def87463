"""Caches: a placement (position to slot), a store (slot to bytes), and the lengths over both."""

from kvbook.cache.cache import KVCache
from kvbook.cache.placement import Contiguous
from kvbook.cache.recompute import Recompute
from kvbook.cache.step import Step
from kvbook.cache.store import DenseStore, Layout
from kvbook.cache.view import NOT_A_TOKEN, KVView, visible

__all__ = [
    "NOT_A_TOKEN",
    "Contiguous",
    "DenseStore",
    "KVCache",
    "KVView",
    "Layout",
    "Recompute",
    "Step",
    "visible",
]
