"""Caches: a placement (position to slot), a store (slot to bytes), and the lengths over both."""

from kvbook.cache.blocks import BlockPool
from kvbook.cache.bound import BoundPaged
from kvbook.cache.bound_table import BlockTable
from kvbook.cache.build import new_bound_cache, new_cache, new_paged_cache
from kvbook.cache.cache import KVCache
from kvbook.cache.codec import FLOAT4, FLOAT8, INT4, INT8, Codec
from kvbook.cache.coded import CodedStore, quantized
from kvbook.cache.contiguous import Contiguous
from kvbook.cache.direct import DirectGroup, DirectView
from kvbook.cache.group import CacheGroup
from kvbook.cache.layer_kind import LayerKind
from kvbook.cache.memory import Memory
from kvbook.cache.paged import Paged
from kvbook.cache.placement import Placement, Plan
from kvbook.cache.prefix import PrefixCache
from kvbook.cache.recompute import Recompute
from kvbook.cache.ring import Ring
from kvbook.cache.step import Step
from kvbook.cache.store import DenseStore, SlotMajorStore, Store
from kvbook.cache.tail import TailedGroup
from kvbook.cache.view import NOT_A_TOKEN, KVView, View, visible, visible_count

__all__ = [
    "FLOAT4",
    "FLOAT8",
    "INT4",
    "INT8",
    "NOT_A_TOKEN",
    "BlockPool",
    "BlockTable",
    "BoundPaged",
    "CacheGroup",
    "Codec",
    "CodedStore",
    "Contiguous",
    "DenseStore",
    "DirectGroup",
    "DirectView",
    "KVCache",
    "KVView",
    "LayerKind",
    "Memory",
    "Paged",
    "Placement",
    "Plan",
    "PrefixCache",
    "Recompute",
    "Ring",
    "SlotMajorStore",
    "Step",
    "Store",
    "TailedGroup",
    "View",
    "new_bound_cache",
    "new_cache",
    "new_paged_cache",
    "quantized",
    "visible",
    "visible_count",
]
