"""Paged caches in a known state, and what must not change when a call is refused."""

from collections.abc import Callable
from typing import Any

import pytest

from kvbook.cache import (
    BlockPool,
    KVCache,
    Paged,
)
from kvbook.model.transformer import Transformer
from oracles.toys import batch, snapshot, toy, unchanged


def placement(cache: KVCache) -> Paged:
    found = cache.groups[0].placement
    assert isinstance(found, Paged)
    return found


def tables(cache: KVCache) -> list[list[int]]:
    return [list(table) for table in placement(cache).tables]


def lent(cache: KVCache) -> list[int]:
    return sorted(block for table in tables(cache) for block in table)


def paged(rows: int, blocks: int, size: int, **changes: Any) -> tuple[Transformer, KVCache]:
    model = toy(**changes)
    return model, model.new_paged_cache(rows, BlockPool(blocks, size))


def grown(rows: int, blocks: int, size: int, lengths: list[int]) -> tuple[Transformer, KVCache]:
    """A paged cache that holds so many tokens of ``batch(rows, …)`` in each row."""
    model, cache = paged(rows, blocks, size)
    for row, n in enumerate(lengths):
        counts = [n if b == row else 0 for b in range(rows)]
        model(batch(rows, max(1, n)), cache, counts=counts)
    return model, cache


def everything(cache: KVCache) -> list[object]:
    """What an error must leave as it was, beside the storage."""
    pools = [group.placement.pool for group in cache.groups]  # type: ignore[attr-defined]
    owners = [[pool.owners(block) for block in range(pool.blocks)] for pool in pools]
    return [cache.lengths, tables(cache), owners, [(p.free, p.evictable) for p in pools]]


def refused(cache: KVCache, error: type[ValueError], why: str, call: Callable[[], object]) -> None:
    before, counts = snapshot(cache), everything(cache)
    with pytest.raises(error, match=why):
        call()
    assert unchanged(cache, before)
    assert everything(cache) == counts
