"""Caches: a placement (position to slot), a store (slot to bytes), and the lengths over both."""

from kvbook.cache.blocks import BlockPool
from kvbook.cache.cache import KVCache
from kvbook.cache.codec import FLOAT4, FLOAT8, INT4, INT8, Codec
from kvbook.cache.coded import CodedStore, quantized
from kvbook.cache.direct import DirectGroup, DirectView
from kvbook.cache.group import CacheGroup
from kvbook.cache.paged import Paged
from kvbook.cache.placement import Contiguous, Placement
from kvbook.cache.prefix import PrefixCache
from kvbook.cache.recompute import Recompute
from kvbook.cache.ring import Ring
from kvbook.cache.store import DenseStore, Layout, SlotMajorStore, Store, new_store
from kvbook.cache.tail import TailedGroup
from kvbook.cache.view import NOT_A_TOKEN, KVView, View, visible, visible_count

__all__ = [
    "FLOAT4",
    "FLOAT8",
    "INT4",
    "INT8",
    "NOT_A_TOKEN",
    "BlockPool",
    "CacheGroup",
    "Codec",
    "CodedStore",
    "Contiguous",
    "DenseStore",
    "DirectGroup",
    "DirectView",
    "KVCache",
    "KVView",
    "Layout",
    "Paged",
    "Placement",
    "PrefixCache",
    "Recompute",
    "Ring",
    "SlotMajorStore",
    "Store",
    "TailedGroup",
    "View",
    "new_store",
    "quantized",
    "visible",
    "visible_count",
]
