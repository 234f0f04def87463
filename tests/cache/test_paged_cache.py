"""A model's paged cache: what ``new_paged_cache`` builds, and that the model feeds on it alike."""

import pytest
import torch
from oracles.toys import batch, toy

from kvbook.cache import BlockPool, CacheGroup, Paged, SlotMajorStore, TailedGroup
from kvbook.cache.codec import INT8
from kvbook.cache.coded import CodedStore, quantized
from kvbook.errors import OutOfBlocksError
from kvbook.generate import generate_cached

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_cache_over_one_pool() -> None:
    model, pool = toy(), BlockPool(6, 4)
    cache = model.new_paged_cache(2, pool)
    [group] = cache.groups
    assert type(group) is CacheGroup
    assert isinstance(group.placement, Paged)
    assert group.placement.pool is pool
    assert type(group.store) is SlotMajorStore
    assert cache.rows == 2
    assert cache.capacity is None  # one row may take the whole pool
    # Keys and values of 2 layers, 6 · 4 slots, 2 heads of width 6, 8 bytes each.
    assert cache.allocated_bytes == 2 * 2 * 24 * 2 * 6 * 8
    assert pool.in_use == 0


def test_a_pool_for_each_window() -> None:
    model = toy(window=(3, None), sinks=1)
    windowed, whole = BlockPool(5, 2), BlockPool(3, 4)
    cache = model.new_paged_cache(1, windowed, whole)
    found = [(group.kind.window, group.kind.sinks) for group in cache.groups]
    assert found == [(3, 1), (None, 0)]
    assert [group.placement.store_shape for group in cache.groups] == [(1, 10), (1, 12)]
    tokens = batch(1, 9)
    out = torch.cat([model(tokens[:, i : i + 1], cache) for i in range(9)], 1)
    torch.testing.assert_close(out, model(tokens), rtol=0, atol=1e-9)
    assert (windowed.in_use, whole.in_use) == (5, 3)  # windowed layers keep the whole text


@pytest.mark.parametrize(("window", "pools"), [(None, 0), (None, 2), ((3, None), 1)])
def test_the_number_of_pools_is_that_of_the_windows(
    window: tuple[int | None, ...] | None, pools: int
) -> None:
    with pytest.raises(ValueError, match=f"need a pool for each, got {pools}; give BlockPool"):
        toy(window=window).new_paged_cache(1, *[BlockPool(4, 4) for _ in range(pools)])


def test_a_coded_store_with_a_tail() -> None:
    model = toy()
    cache = model.new_paged_cache(2, BlockPool(4, 8), store=quantized(INT8.grouped(3)), tail=3)
    [group] = cache.groups
    assert isinstance(group, TailedGroup)
    assert isinstance(group.store, CodedStore)
    assert group.tail == 3
    tokens = batch(2, 3)
    out = model(tokens, cache)  # all of it in the tail, so exact
    torch.testing.assert_close(out, model(tokens), rtol=0, atol=1e-9)


def test_generation_is_the_same_as_in_a_contiguous_cache() -> None:
    model, pool = toy(), BlockPool(12, 4)
    prompts = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5]]
    cache = model.new_paged_cache(3, pool)
    paged = generate_cached(model, prompts, 9, cache=cache)
    assert paged == generate_cached(model, prompts, 9)
    assert cache.lengths == (16, 10, 12)  # prompt and returned tokens
    assert pool.in_use == 4 + 3 + 3


def test_generation_that_does_not_fit_raises_before_the_first_step() -> None:
    model, pool = toy(), BlockPool(9, 4)
    cache = model.new_paged_cache(3, pool)
    with pytest.raises(OutOfBlocksError, match="10 blocks are needed, but 9 of 9"):
        generate_cached(model, [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5]], 9, cache=cache)
    assert cache.lengths == (0, 0, 0)
    assert pool.in_use == 0
