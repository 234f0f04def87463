"""Every kind of cache, and what each promises, stated by hand.

A kind is a placement of ``PLACED`` and a store of ``cache_kinds.STORES``. What a store leaves of a
vector is written out there, from the definitions of the formats.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from oracles.cache_kinds import STORES, Stored

from fuzz.written_out import Promise
from kvbook.cache import (
    BlockPool,
    DirectGroup,
    KVCache,
    Paged,
    PrefixCache,
)
from kvbook.cache.build import cache_of
from kvbook.config import ModelConfig
from kvbook.model.transformer import Transformer

Sizes = dict[str, int]


class LastToken:
    """So weak a digest that blocks share a key whatever stands before their last token."""

    def __init__(self) -> None:
        self.end = b""

    def update(self, text: bytes) -> None:
        self.end = (self.end + text)[-8:]

    def digest(self) -> bytes:
        return self.end


@dataclass(frozen=True)
class Placed:
    """How a cache is made of sizes; ``rollback`` is that of its rings."""

    new: Callable[[Transformer, Sizes, Stored], KVCache]
    sizes: Callable[[random.Random, int], Sizes]  # what is drawn for a store's tile
    rollback: int | None = None
    owned: bool = False  # whether sequences own the blocks, and rows are bound to them
    digest: Callable[[], Any] | None = None  # of a prefix cache over the blocks
    single: bool = False  # whether only single tokens are written, without a tail

    def takes(self, stored: Stored) -> bool:
        return not self.single or stored.tail + stored.tile == 1


def row_sizes(rnd: random.Random, tile: int) -> Sizes:
    return {"rows": rnd.randint(1, 3), "capacity": tile * (rnd.randint(6, 24) // tile)}


def pool_sizes(rnd: random.Random, tile: int) -> Sizes:
    block = rnd.choice([2, 4, 6] if tile == 2 else [1, 2, 3, 4, 5])
    blocks = max(3, rnd.randint(12, 50) // block)
    return {"rows": rnd.randint(1, 3), "block": block, "blocks": blocks}


def rows_of_slots(rollback: int | None) -> Placed:
    def new(model: Transformer, sizes: Sizes, stored: Stored) -> KVCache:
        return model.new_cache(
            sizes["rows"], sizes["capacity"], store=stored.make, tail=stored.tail, rollback=rollback
        )

    return Placed(new, row_sizes, rollback)


def pools_for(model: Transformer, sizes: Sizes) -> list[BlockPool]:
    """One for each kind of layer."""
    return [BlockPool(sizes["blocks"], sizes["block"]) for _ in set(model.layer_kinds)]


def paged(model: Transformer, sizes: Sizes, stored: Stored) -> KVCache:
    pools = pools_for(model, sizes)
    return model.new_paged_cache(sizes["rows"], *pools, store=stored.make, tail=stored.tail)


def paged_by_tiles(model: Transformer, sizes: Sizes, stored: Stored) -> KVCache:
    placements = [Paged(sizes["rows"], pool) for pool in pools_for(model, sizes)]
    return cache_of(model.layer_kinds, placements, stored.make, group=DirectGroup)


def bound(model: Transformer, sizes: Sizes, stored: Stored) -> KVCache:
    return model.new_bound_cache(*pools_for(model, sizes), store=stored.make)


PLACED = {
    "contiguous": rows_of_slots(None),
    "ring, 1 back": rows_of_slots(1),
    "ring, 2 back": rows_of_slots(2),
    "ring, 3 back": rows_of_slots(3),
    "paged": Placed(paged, pool_sizes),
    "paged, read by tiles": Placed(paged_by_tiles, pool_sizes, single=True),
    "bound": Placed(bound, pool_sizes, owned=True, single=True),
    "prefix": Placed(bound, pool_sizes, owned=True, single=True, digest=hashlib.sha256),
    "prefix, weak keys": Placed(bound, pool_sizes, owned=True, single=True, digest=LastToken),
}
KINDS = [
    (placed, stored)
    for placed, place in PLACED.items()
    for stored, store in STORES.items()
    if place.takes(store)
]


def promise(placed: str, stored: str) -> Promise:
    """What such a cache keeps of a text."""
    store = STORES[stored]
    return Promise(
        store.keys, store.values, store.tail, store.tile, PLACED[placed].rollback, store.is_exact
    )


def fits(placed: str, stored: str, config: ModelConfig) -> bool:
    """A ring has a window and whole tiles; a prefix cache finds blocks of one kind of layer."""
    place, store = PLACED[placed], STORES[stored]
    if place.digest is not None:
        return len(set(config.windows)) == 1
    if place.rollback is None:
        return True
    rings = [w - 1 + place.rollback for w in config.windows if w is not None]
    return bool(rings) and not any(slots % store.tile for slots in [*rings, config.sinks])


def prefix_over(cache: KVCache, placed: str) -> PrefixCache | None:
    digest = PLACED[placed].digest
    if digest is None:
        return None
    [pool] = cache.groups[0].placement.pools
    return PrefixCache(pool, "the fuzz", digest)
