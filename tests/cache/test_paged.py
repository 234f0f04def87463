"""Paging changes where keys and values lie, and nothing else.

Logits are compared with ``ListCache`` from every state that a block table can be in; blocks are
counted by hand. What a pool does on its own is in test_blocks.
"""

import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from oracles.cache_kinds import PLACEMENTS, STORES, Stored, formulas, list_cache, model_of
from oracles.paging import grown, lent, paged, placement, refused, tables
from oracles.toys import batch, text, toy
from oracles.twins import Twins

from kvbook.cache import (
    BlockPool,
    KVCache,
)
from kvbook.errors import OutOfBlocksError
from kvbook.model.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")
NAN = float("nan")
CPU = torch.device("cpu")
TWO_HEADS = "two query heads share one"


# ---- From every state of a block table, each step is that of the plain lists


def blocks_needed(
    held: list[list[int]], lengths: Sequence[int], counts: Sequence[int], size: int
) -> int:
    """Counted by going through it: rows write one after the other."""
    owners = Counter(block for table in held for block in table)
    needed = 0
    for table, n, count in zip(held, lengths, counts, strict=False):
        for position in range(n, n + count):
            if position % size == 0:
                needed += 1
            elif position == n and owners[table[n // size]] > 1:
                owners[table[n // size]] -= 1
                needed += 1
    return needed


class Schedule:
    """A paged cache beside its plain model, and the states that its steps started from."""

    def __init__(
        self, windows: str, stored: Stored, blocks: int, size: int, rnd: random.Random
    ) -> None:
        model = model_of(TWO_HEADS, windows)
        pools = [BlockPool(blocks, size) for _ in set(model.config.windows)]
        cache = model.new_paged_cache(3, *pools, store=stored.make, tail=stored.tail)
        lists = list_cache(PLACEMENTS["paged, blocks of 4"], stored, model, 3)
        self.twins, self.pool, self.size, self.rnd = Twins(model, cache, lists), pools[0], size, rnd
        self.exact = stored.tail == 0 and stored.tile == 1  # blocks follow tokens at once
        self.freed: set[int] = set()
        self.visits: Counter[str] = Counter()
        self.into_shared = False

    @property
    def tables(self) -> list[list[int]]:
        return tables(self.twins.cache)

    def step(self, counts: list[int]) -> bool:
        """Whether there was room; if not, the cache must say what is missing and stay as it is."""
        twins, counts = self.twins, counts[: len(self.twins.texts)]
        T = max(1, *counts)
        tokens = batch(len(counts), T, self.rnd.randrange(1000))
        needed = 0
        if self.exact:
            needed = blocks_needed(self.tables, twins.lengths, counts, self.size)
        if needed > self.pool.available:
            blocks = "block is" if needed == 1 else "blocks are"
            why = f"^{needed} {blocks} needed, but {self.pool.available} of {self.pool.blocks}"
            refused(
                twins.cache, OutOfBlocksError, why,
                lambda: twins.model(tokens, twins.cache, counts=counts),
            )  # fmt: skip
            self.visits["refused"] += 1
            return False
        left = self.pool.available - needed
        self.visits.update(self.states(left))
        twins.cache.fill_unused(self.rnd.choice([NAN, 1e10]))
        twins.step(tokens, counts)
        self.into_shared = False
        assert not self.exact or self.pool.available == left
        self.check_owners()
        return True

    def states(self, left: int) -> set[str]:
        held, lengths = self.tables, self.twins.lengths
        owners = Counter(block for table in held for block in table)
        partial = [
            owners[table[n // self.size]]
            for table, n in zip(held, lengths, strict=False)
            if n % self.size and n // self.size < len(table)
        ]
        found = {
            "mid-block": len(partial) > 0,
            "at a block's edge": any(n and n % self.size == 0 for n in lengths),
            "forked": max(owners.values(), default=0) > 1,
            "shared partial block": max(partial, default=0) > 1,
            "ends in a shared block after a truncation": self.into_shared,
            "a block is used again": bool(self.freed & set(owners)),
            "the last blocks": left == 0,
        }
        return {state for state, here in found.items() if here}

    def truncate(self, lengths: list[int]) -> None:
        full = {block for table in self.tables for block in table}
        if self.twins.truncate(lengths):
            self.freed |= full - {block for table in self.tables for block in table}
            owners = Counter(block for table in self.tables for block in table)
            self.into_shared = any(
                n % self.size and n // self.size < len(table) and owners[table[n // self.size]] > 1
                for n, table in zip(lengths, self.tables, strict=False)
            )
        self.check_owners()

    def select(self, rows: list[int]) -> None:
        full = {block for table in self.tables for block in table}
        self.twins.select(rows)
        self.freed |= full - {block for table in self.tables for block in table}
        self.check_owners()

    def check_owners(self) -> None:
        owners = Counter(block for table in self.tables for block in table)
        assert {b: n for b in range(self.pool.blocks) if (n := self.pool.owners(b))} == owners


def to_mid_block(s: Schedule) -> None:
    s.step([s.size + 1, 1, s.size - 1])


def to_an_edge(s: Schedule) -> None:
    s.step([s.size, 2 * s.size, s.size])


def to_a_fork_at_an_edge(s: Schedule) -> None:
    s.step([2 * s.size, s.size, 1])
    s.select([0, 0, 1])


def to_a_shared_partial_block(s: Schedule) -> None:
    s.step([s.size + s.size // 2, 2, 1])
    s.select([0, 0, s.rnd.randrange(2)])


def to_a_truncation_into_a_shared_block(s: Schedule) -> None:
    s.step([2 * s.size, 1, 1])
    s.select([0, 0, 1])
    s.truncate([2 * s.size, s.size + s.size // 2, s.rnd.randrange(2)])


def to_blocks_used_again(s: Schedule) -> None:
    s.step([s.size, s.size + 1, 2])
    s.truncate([0, s.size + 1, 0])
    s.step([s.size + 1, 0, 3])


def to_dropped_rows(s: Schedule) -> None:
    s.step([s.size, 2 * s.size, 1])
    s.select([2])
    s.step([s.size])
    s.select([0, 0])


def to_the_last_blocks(s: Schedule) -> None:
    while max(s.twins.lengths) < 30 and s.step([s.size, 1, 0]):
        pass
    while max(s.twins.lengths) < 40 and s.step([1, 0, 0]):
        pass


WAYS = [
    to_mid_block, to_an_edge, to_a_fork_at_an_edge, to_a_shared_partial_block,
    to_a_truncation_into_a_shared_block, to_blocks_used_again, to_dropped_rows, to_the_last_blocks,
]  # fmt: skip
PER_TOKEN = ["dense", "dense, slot-major", "int8", "int4", "int4, tail of 2"]
PER_TILE = ["int8 keys per channel, tail of 3", "int4 per channel, no tail"]
WINDOWS_HERE = ["no window", "3", "3 and 2 sinks", "alternating, local first", "8"]


def go_on(s: Schedule) -> None:
    """One random operation, and a step after it."""
    lengths = s.twins.lengths
    operation = s.rnd.randrange(4)
    if operation == 0:
        s.truncate([max(0, n - s.rnd.randint(0, s.size + 1)) for n in lengths])
    elif operation == 1:
        s.select([s.rnd.randrange(len(lengths)) for _ in range(3)])
    if max(s.twins.lengths) <= 40:
        s.step(s.rnd.choice([[1, 1, 1], [4, 4, 4], [s.rnd.randint(0, 3), 1, 0]]))


@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_from_every_state_each_step_is_that_of_the_lists(size: int) -> None:
    visits: Counter[str] = Counter()
    stores = [*PER_TOKEN, *PER_TILE] if size % 2 == 0 else PER_TOKEN
    for i, way in enumerate(WAYS * 3):
        stored = stores[(i + i // len(WAYS)) % len(stores)]
        windows = WINDOWS_HERE[(i + i // len(WINDOWS_HERE)) % len(WINDOWS_HERE)]
        # As many as the longest way needs; more behind a tail, which asks for room ahead of time.
        blocks = max(4, 20 // size) if STORES[stored].tail + STORES[stored].tile == 1 else 50
        schedule = Schedule(windows, STORES[stored], blocks, size, random.Random(i))
        way(schedule)
        for _ in range(3):
            go_on(schedule)
        schedule.twins.check()
        visits += schedule.visits
    needed = {
        "at a block's edge", "forked", "a block is used again", "the last blocks", "refused",
    }  # fmt: skip
    if size > 1:
        needed |= {
            "mid-block", "shared partial block", "ends in a shared block after a truncation",
        }  # fmt: skip
    assert {state for state in needed if visits[state] < 2} == set()


@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_which_blocks_a_row_has_does_not_change_one_bit(size: int) -> None:
    def run(order: list[int]) -> list[torch.Tensor]:
        model, pool = toy(window=(3, None)), BlockPool(30, size)
        other = BlockPool(30, size)
        for one in (pool, other):
            one.allocate(30)
            for block in order:  # the last one released is lent first
                one.release([block])
        cache = model.new_paged_cache(3, pool, other)
        out = [model(batch(3, 4), cache, counts=[4, 1, 2])]
        cache.select([0, 0, 2])
        out += [model(batch(3, 1, seed), cache) for seed in range(5)]
        lately = set(lent(cache))
        assert lately == set(order[-len(lately) :])
        return out

    plain = run(list(range(30))[::-1])
    for seed in range(3):
        order = random.Random(seed).sample(range(30), 30)
        assert all(map(torch.equal, run(order), plain))


@pytest.mark.gpu
def test_on_a_gpu_paged_is_contiguous() -> None:
    model = toy(window=(3, None)).to("cuda")
    pools = [BlockPool(20, 4) for _ in range(2)]
    cache, plain = model.new_paged_cache(3, *pools), model.new_cache(3, 20)
    try:
        for seed, counts in enumerate([[4, 1, 2], [1, 1, 1], [0, 3, 5], [1, 1, 1]]):
            tokens = batch(3, max(counts), seed).cuda()
            cache.fill_unused(NAN)
            found, expected = (model(tokens, one, counts=counts) for one in (cache, plain))
            for row, count in enumerate(counts):
                if count:
                    off = (found - expected)[row, -count:].abs().max()
                    assert off < 1e-9, (seed, row)
            for one in (cache, plain):
                one.select([0, 2, 2])
    finally:
        model.to("cpu")


# ---- The smallest pools


def test_a_pool_of_one_block() -> None:
    model, cache = paged(2, 1, 4)
    out = model(batch(2, 3), cache, counts=[3, 0])
    torch.testing.assert_close(out[0], formulas(model, tuple(text(3, 0))), rtol=0, atol=1e-9)
    why = "^1 block is needed, but 0 of 1 are available"
    refused(cache, OutOfBlocksError, why, lambda: model(batch(2, 1), cache))  # row 1 needs one
    refused(cache, OutOfBlocksError, why, lambda: model(batch(2, 2), cache, counts=[2, 0]))
    model(batch(2, 1), cache, counts=[1, 0])  # the block is full now
    refused(cache, OutOfBlocksError, why, lambda: model(batch(2, 1), cache, counts=[1, 0]))
    cache.truncate([0, 0])
    model(batch(2, 4), cache, counts=[0, 4])  # the other row takes it
    assert tables(cache) == [[], [0]]


def test_a_pool_of_two_blocks() -> None:
    model, cache = grown(2, 2, 2, [1, 0])
    cache.select([0, 0])
    model(batch(2, 1), cache)  # a copy for one of them, and the other keeps the first
    assert lent(cache) == [0, 1]
    why = "^2 blocks are needed, but 0 of 2"
    refused(cache, OutOfBlocksError, why, lambda: model(batch(2, 1), cache))
    cache.select([1])
    model(batch(1, 1), cache)
    assert cache.lengths == (3,)


# ---- How many blocks a step needs: one too few is refused, just enough is used up

# (tokens of one row of 4-token blocks, the rows forked from it, lengths to truncate them to,
#  tokens that each adds, blocks needed)
Need = tuple[int, list[int], list[int], list[int], int]
NEEDS: list[Need] = [
    (3, [0], [3], [1], 0),  # fills its block
    (3, [0], [3], [2], 1),
    (4, [0], [4], [1], 1),
    (4, [0], [4], [9], 3),
    (3, [0, 0], [3, 3], [0, 1], 1),  # a copy
    (3, [0, 0], [3, 3], [1, 1], 1),  # both write: one copies, and the other is alone then
    (3, [0, 0, 0], [3, 3, 3], [1, 1, 1], 2),
    (3, [0, 0, 0], [3, 3, 3], [1, 0, 1], 2),  # the third still reads it
    (3, [0, 0], [3, 3], [2, 2], 3),  # a copy, and one more block each
    (4, [0, 0], [4, 4], [1, 1], 2),  # nothing to copy at an edge
    (8, [0, 0], [8, 6], [1, 1], 2),  # one more block for the first, a copy for the second
    (8, [0, 0], [6, 6], [0, 3], 2),
    (8, [0, 0], [4, 8], [1, 0], 1),
]


@pytest.mark.parametrize("need", NEEDS)
def test_the_blocks_that_a_step_needs(need: Need) -> None:
    start, rows, lengths, counts, needed = need

    def made(spare: int) -> tuple[Transformer, KVCache]:
        model, cache = grown(3, -(-start // 4) + spare, 4, [start, 0, 0])
        cache.select(rows)
        cache.truncate(lengths)
        missing = spare - placement(cache).pool.available  # what truncate gave back is not spare
        assert missing <= 0
        if missing:
            placement(cache).pool.allocate(-missing)
        return model, cache

    T = max(counts)
    model, cache = made(needed)
    out = model(batch(len(rows), T, 5), cache, counts=counts)
    assert placement(cache).pool.available == 0
    for row, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        if count:
            tokens = [*text(start, 0)[:n], *batch(len(rows), T, 5)[row, T - count :].tolist()]
            expected = formulas(model, tuple(tokens))[-count:]
            torch.testing.assert_close(out[row, T - count :], expected, rtol=0, atol=1e-9)
    if needed:
        model, cache = made(needed - 1)
        blocks = "block is" if needed == 1 else "blocks are"
        why = f"^{needed} {blocks} needed, but {needed - 1} of "
        step = batch(len(rows), T, 5)
        refused(cache, OutOfBlocksError, why, lambda: model(step, cache, counts=counts))
        refused(cache, OutOfBlocksError, why, lambda: cache.check_room(counts))


def test_a_block_that_somebody_outside_holds_is_copied_by_every_row() -> None:
    model, cache = grown(2, 3, 4, [3, 0])
    pool = placement(cache).pool
    pool.share([0])
    cache.select([0, 0])
    model(batch(2, 1), cache)
    assert pool.available == 0
    assert pool.owners(0) == 1
    assert lent(cache) == [1, 2]


def test_a_block_that_can_be_found_is_never_written() -> None:
    model, cache = grown(2, 3, 4, [3, 0])
    pool = placement(cache).pool
    pool.keep([0], lambda block: None)
    cache.select([0, 0])
    pool.allocate(1)
    why = "^2 blocks are needed, but 1 of 3"  # the last one has no block to itself either
    refused(cache, OutOfBlocksError, why, lambda: model(batch(2, 1), cache))
    pool.release([1])
    model(batch(2, 1), cache)
    assert lent(cache) == [1, 2]
    assert (pool.free, pool.evictable, pool.in_use) == (0, 1, 2)
