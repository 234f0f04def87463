"""Caches for a model's layers, from what is asked of them.

Knows: which layers can share a group, which placement and which group serve a request. Does not
know: models, what a step is.

Layers of one kind make one group, in the order in which the layers first name their kinds.
"""

from collections.abc import Callable, Sequence

import torch

from kvbook.cache.blocks import BlockPool
from kvbook.cache.bound import BoundPaged
from kvbook.cache.cache import KVCache
from kvbook.cache.contiguous import Contiguous
from kvbook.cache.group import CacheGroup
from kvbook.cache.layer_kind import LayerKind
from kvbook.cache.paged import Paged
from kvbook.cache.placement import Placement
from kvbook.cache.ring import Ring
from kvbook.cache.store import DenseStore, NewStore, SlotMajorStore
from kvbook.cache.tail import TailedGroup


def new_cache(
    layer_kinds: Sequence[LayerKind],
    batch: int,
    capacity: int,
    store: NewStore = DenseStore,
    tail: int = 0,
    rollback: int | None = None,
    device: torch.device | str = "cpu",
) -> KVCache:
    """An empty cache for ``batch`` sequences of up to ``capacity`` tokens.

    ``store`` makes the store of a group; the last ``tail`` tokens stay as they are. With
    ``rollback``, layers with a window keep no more than they see and so many tokens that may be
    taken back (a ring); without it, every layer keeps the whole text.
    """

    def place(kind: LayerKind) -> Placement:
        if kind.window is not None and rollback is not None:
            return Ring(batch, kind.window, rollback, kind.sinks)
        return Contiguous(batch, capacity)

    placements = [place(kind) for kind in dict.fromkeys(layer_kinds)]
    return cache_of(layer_kinds, placements, store, tail, device)


def new_paged_cache(
    layer_kinds: Sequence[LayerKind],
    batch: int,
    *pools: BlockPool,
    store: NewStore = SlotMajorStore,
    tail: int = 0,
    device: torch.device | str = "cpu",
) -> KVCache:
    """An empty cache for ``batch`` sequences whose tokens lie in the blocks of a pool.

    Each group has a pool of its own. Windowed layers keep the whole text. Raises ``ValueError``
    if the pools are not as many as the groups, or back another cache already.
    """
    _check_pools(layer_kinds, pools)
    placements = [Paged(batch, pool) for pool in pools]
    return cache_of(layer_kinds, placements, store, tail, device)


def new_bound_cache(
    layer_kinds: Sequence[LayerKind],
    *pools: BlockPool,
    store: NewStore = SlotMajorStore,
    device: torch.device | str = "cpu",
) -> KVCache:
    """A cache without rows: ``bind`` says, from step to step, which sequences are the batch.

    The sequences own their block tables, those of a ``PrefixCache`` over the pool, say. Raises
    ``ValueError`` as ``new_paged_cache`` does.
    """
    _check_pools(layer_kinds, pools)
    return cache_of(layer_kinds, [BoundPaged(pool) for pool in pools], store, 0, device)


def cache_of(
    layer_kinds: Sequence[LayerKind],
    placements: Sequence[Placement],
    store: NewStore = DenseStore,
    tail: int = 0,
    device: torch.device | str = "cpu",
    group: Callable[..., CacheGroup] = CacheGroup,
) -> KVCache:
    """A cache with one group for each kind of layer, placed as ``placements`` says."""
    kinds = list(dict.fromkeys(layer_kinds))
    groups = []
    for kind, placement in zip(kinds, placements, strict=True):
        stored = store(kind, list(layer_kinds).count(kind), *placement.store_shape, device)
        if tail == 0 and stored.write_size == 1:
            groups.append(group(placement, stored))
        else:
            groups.append(TailedGroup(placement, stored, tail))
    return KVCache(*groups, pattern=[kinds.index(kind) for kind in layer_kinds])


def _check_pools(layer_kinds: Sequence[LayerKind], pools: Sequence[BlockPool]) -> None:
    kinds = len(set(layer_kinds))
    if len(pools) != kinds:
        raise ValueError(
            f"the model's layers are of {kinds} different kinds and need a pool for each, got "
            f"{len(pools)}; give BlockPool(blocks, block_size) so many times"
        )
    for pool in pools:
        if not isinstance(pool, BlockPool):
            raise ValueError(f"a pool must be a BlockPool(blocks, block_size), got {pool!r:.80}")
        pool.check_unclaimed()
