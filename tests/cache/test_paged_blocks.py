"""Which blocks a paged cache takes, shares, copies and gives back, and what is in their slots."""


import pytest
import torch
from oracles.cache_kinds import formulas
from oracles.paging import grown, paged, placement, refused, tables
from oracles.toys import batch, snapshot, text, toy

from kvbook.cache import (
    BlockPool,
    CacheGroup,
    DenseStore,
    KVCache,
    LayerKind,
    Paged,
    Step,
)
from kvbook.errors import BlockNotInUseError, OutOfBlocksError
from kvbook.model.attention import attend

pytestmark = pytest.mark.usefixtures("one_thread")
NAN = float("nan")
CPU = torch.device("cpu")


# ---- Forks


def test_a_fork_copies_nothing() -> None:
    _, cache = grown(3, 6, 4, [6, 0, 0])
    before, where = snapshot(cache), [x.data_ptr() for x in cache.tensors]
    cache.select([0, 0, 0])
    assert cache.lengths == (6, 6, 6)
    assert tables(cache) == [[0, 1]] * 3
    assert placement(cache).pool.in_use == 2
    assert all(map(torch.equal, snapshot(cache)[1], before[1]))
    assert [x.data_ptr() for x in cache.tensors] == where


@pytest.mark.parametrize(
    ("length", "copied"),
    [
        (6, [([4, 5], [8, 9])]),  # two of the four slots of block 1 hold a token
        (5, [([4], [8])]),
        (7, [([4, 5, 6], [8, 9, 10])]),
        (8, []),  # a full block is never written again
        (4, []),
    ],
)
def test_the_first_write_copies_one_partial_block(
    length: int, copied: list[tuple[list[int], list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cache = grown(3, 8, 4, [length, 0, 0])
    store, seen = cache.groups[0].store, []
    copy = store.copy_slots

    def note(row: int, source: list[int], target: list[int]) -> None:
        seen.append((source, target))
        copy(row, source, target)

    monkeypatch.setattr(store, "copy_slots", note)
    cache.select([0, 0])
    model(batch(2, 1), cache, counts=[1, 0])
    assert seen == copied
    model(batch(2, 2), cache)  # no block is shared in its middle any more
    assert seen == copied


def test_a_fork_keeps_its_past_when_the_other_row_goes_back_and_on() -> None:
    model, cache = grown(2, 8, 4, [7, 0])
    cache.select([0, 0])
    cache.truncate([7, 5])
    model(batch(2, 4, 3), cache, counts=[0, 4])
    out = model(batch(2, 1, 4), cache)
    kept = [*text(7, 0), *text(1, 400)]
    other = [*text(5, 0), *text(4, 301), *text(1, 401)]
    for row, tokens in enumerate([kept, other]):
        expected = formulas(model, tuple(tokens))[-1]
        torch.testing.assert_close(out[row, 0], expected, rtol=0, atol=1e-9)


# ---- Blocks go back


def test_a_shorter_row_gives_blocks_back_and_keeps_the_one_it_ends_in() -> None:
    _, cache = grown(1, 4, 4, [13])
    pool = placement(cache).pool
    for length, held in [(13, 4), (12, 3), (9, 3), (5, 2), (4, 1), (1, 1), (0, 0)]:
        cache.truncate(length)
        assert (len(tables(cache)[0]), pool.in_use) == (held, held)


def test_what_is_forgotten_twice_is_released_once() -> None:
    _, cache = grown(2, 4, 4, [5, 2])
    pool = placement(cache).pool
    for _ in range(2):
        cache.truncate(0)
        cache.reset()
        assert (pool.free, pool.in_use) == (4, 0)
    with pytest.raises(BlockNotInUseError, match="block 0 has no owner"):
        pool.release([0])


def test_a_forward_that_ran_out_can_be_made_again_when_there_is_room() -> None:
    model, cache = grown(2, 2, 4, [4, 3])
    step = batch(2, 1, 9)
    refused(cache, OutOfBlocksError, "^1 block is", lambda: model(step, cache))
    cache.select([0])
    out = model(step[:1], cache)
    expected = formulas(model, (*text(4, 0), *step[0].tolist()))[-1]
    torch.testing.assert_close(out[0, 0], expected, rtol=0, atol=1e-9)


# ---- What is in the slots


def test_slots_and_positions_of_scattered_blocks() -> None:
    pool = BlockPool(5, 3)
    pool.allocate(5)
    for block in (0, 4, 2, 1, 3):
        pool.release([block])
    place = Paged(2, pool)
    plan = place.plan(Step((0, 0), (4, 2), 4))
    assert place.tables == [[3, 1], [2]]
    rows, slots = plan.read
    assert rows == 0
    # Block b owns slots 3b, 3b + 1 and 3b + 2. Beyond its end a row reads its first token again.
    assert slots.tolist() == [[9, 10, 11, 3], [6, 7, 6, 6]]
    assert plan.positions.tolist() == [[0, 1, 2, 3], [0, 1, -1, -1]]
    assert plan.target[1].tolist() == [9, 10, 11, 3, 6, 7]
    assert [x.tolist() for x in plan.source] == [[0, 0, 0, 0, 1, 1], [0, 1, 2, 3, 2, 3]]
    assert place.slots_of(0, 4, CPU)[1].tolist() == [[9, 10, 11, 3]]
    assert place.slots_of(1, 2, CPU)[1].tolist() == [[6, 7]]


def test_entries_are_in_the_order_of_positions() -> None:
    store = DenseStore(LayerKind(1, 2, 2, torch.float64), 1, 1, 15)
    pool = BlockPool(5, 3)
    pool.allocate(5)
    for block in (0, 4, 2, 1, 3):
        pool.release([block])
    cache = KVCache(CacheGroup(Paged(2, pool), store))
    for start in (0, 4):
        cache.reserve([4, 2], 4)
        new = torch.arange(16.0, dtype=torch.float64).view(2, 1, 4, 2) + 100 * start
        cache.update(0, new, -new)
    # The second row adds the last two of four tokens, twice.
    keys, values = cache.entries(0, 1)
    assert keys.tolist() == [[[12, 13], [14, 15], [412, 413], [414, 415]]]
    assert torch.equal(values, -keys)


def test_slots_of_a_huge_pool_are_not_cut_off() -> None:
    """Block 32,768 of 65,536 tokens starts at slot 2 ** 31: too large for 32 bits."""
    pool = BlockPool(32_770, 65_536)
    before = pool.allocate(32_768)
    place = Paged(1, pool)
    plan = place.plan(Step((0,), (2,), 2))
    assert place.tables == [[32_768]]
    pool.release(before)
    for slots in (plan.read[1], plan.target[1], place.slots_of(0, 2, CPU)[1]):
        assert slots.dtype == torch.int64
        assert slots.flatten().tolist() == [2_147_483_648, 2_147_483_649]
    assert place.unused_runs([2])[-2:] == [
        (0, 2_147_483_650, 2_147_549_184),
        (0, 2_147_549_184, 2_147_614_720),
    ]


def test_what_is_not_a_number_in_one_row_stays_there() -> None:
    _, cache = paged(2, 6, 4)
    cache.reserve([1, 5], 5)
    keys = torch.randn(2, 2, 5, 6, dtype=torch.float64)
    keys[1] = NAN
    out = attend(torch.randn(2, 4, 5, 6, dtype=torch.float64), cache.update(0, keys, keys), 1.0)
    assert not out[0, :, -1].isnan().any()
    assert out[1].isnan().all()


def test_an_empty_row_beside_others_reads_what_is_there() -> None:
    model, cache = grown(2, 6, 4, [2, 1])
    cache.truncate([0, 1])
    cache.fill_unused(NAN)  # block 0, which the first row had, too
    assert not model(batch(2, 3), cache, counts=[0, 3]).isnan().any()


def test_no_row_with_a_token() -> None:
    model, cache = paged(2, 6, 4)
    cache.fill_unused(NAN)
    assert not model(batch(2, 1), cache, counts=[0, 0]).isnan().any()
    assert cache.lengths == (0, 0)


# ---- Sizes

# Keys and values of 2 layers, 2 heads of width 6, 8 bytes each.
BYTES_PER_TOKEN = 2 * 2 * 2 * 6 * 8


def test_a_slot_that_rows_share_counts_once() -> None:
    model, cache = grown(3, 6, 4, [6, 1, 0])
    assert cache.used_bytes == 7 * BYTES_PER_TOKEN
    cache.select([0, 0, 1])
    assert cache.used_bytes == 7 * BYTES_PER_TOKEN
    cache.truncate([6, 5, 1])  # position 5 is still the first row's
    assert cache.used_bytes == 7 * BYTES_PER_TOKEN
    model(batch(3, 1), cache, counts=[0, 1, 0])  # copies position 4 and writes position 5
    assert cache.used_bytes == 9 * BYTES_PER_TOKEN
    cache.select([2])
    assert cache.used_bytes == 1 * BYTES_PER_TOKEN
    assert cache.allocated_bytes == 24 * BYTES_PER_TOKEN


# ---- One pool, one storage


def test_two_groups_need_two_pools() -> None:
    pool = BlockPool(4, 4)
    with pytest.raises(ValueError, match="BlockPool of its own"):
        toy(window=(3, None)).new_paged_cache(1, pool, pool)
    assert pool.in_use == 0


def test_a_pool_stands_for_one_storage() -> None:
    """A block number would mean two things, and a prefix index over the pool would read both."""
    pool = BlockPool(4, 4)
    cache = toy().new_paged_cache(1, pool)
    for again in (toy().new_bound_cache, lambda pool: toy().new_paged_cache(1, pool)):
        with pytest.raises(ValueError, match="slots of another cache's storage"):
            again(pool)
    toy()(batch(1, 16), cache)


def test_a_cache_that_could_not_be_made_leaves_its_pools_free() -> None:
    first, second = BlockPool(4, 4), BlockPool(4, 4)
    model = toy(window=(3, None))
    model.new_paged_cache(1, first, BlockPool(4, 4))
    with pytest.raises(ValueError, match="another cache"):
        model.new_paged_cache(1, second, first)
    model.new_paged_cache(1, second, BlockPool(4, 4))


# ---- Poison: every slot without a token, and no slot that somebody else needs


def holes(cache: KVCache) -> list[int]:
    """Slots that are not numbers any more, the same in all layers and heads."""
    cache.fill_unused(NAN)
    keys = cache.tensors[0].isnan()
    assert all(x.isnan().equal(keys) for x in cache.tensors)
    assert (keys == keys[:1, :, :1, :, :1]).all()
    return keys[0, 0, 0, :, 0].nonzero().flatten().tolist()


def test_unused_are_free_blocks_and_the_rest_of_the_last_ones() -> None:
    _, cache = grown(2, 4, 4, [6, 1])
    # Block 0 is full, block 1 holds two tokens, block 2 one, block 3 is free.
    assert holes(cache) == [6, 7, 9, 10, 11, 12, 13, 14, 15]


def test_a_shared_block_is_used_as_far_as_the_longest_row_goes() -> None:
    _, cache = grown(2, 4, 4, [7, 0])
    cache.select([0, 0])
    cache.truncate([5, 7])
    assert holes(cache) == [7, 8, 9, 10, 11, 12, 13, 14, 15]


def test_blocks_of_others_are_not_unused() -> None:
    _, cache = grown(2, 4, 4, [2, 0])
    placement(cache).pool.allocate(2)  # blocks 1 and 2
    assert holes(cache) == [2, 3, 12, 13, 14, 15]
    placement(cache).pool.share([0])  # whoever it is may have written more than the row
    assert holes(cache) == [2, 3, 12, 13, 14, 15]  # still, from before
    cache.fill_unused(0.0)
    assert cache.tensors[0][0, 0, 0, :, 0].isnan().nonzero().flatten().tolist() == [2, 3]
