"""The block pool: who owns a block, and which one is reused first."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracles.schedules import SCHEDULES

from kvbook.cache.blocks import BlockPool
from kvbook.errors import BlockNotInUseError, CacheFullError, OutOfBlocksError


def state(pool: BlockPool) -> tuple[int, int, int, list[int]]:
    """Free, evictable, in use, and the owners of every block."""
    counts = (pool.free, pool.evictable, pool.in_use)
    return (*counts, [pool.owners(block) for block in range(pool.blocks)])


def kept(pool: BlockPool, n: int) -> tuple[list[int], list[int]]:
    """n blocks in use that are kept, and the list in which the forgotten ones appear."""
    forgotten: list[int] = []
    blocks = pool.allocate(n)
    pool.keep(blocks, forgotten.append)
    return blocks, forgotten


# ---- Lending and taking back


def test_a_new_pool_is_free() -> None:
    pool = BlockPool(3, 16)
    assert state(pool) == (3, 0, 0, [0, 0, 0])
    assert (pool.blocks, pool.block_size, pool.available) == (3, 16, 3)


def test_every_block_is_lent_once() -> None:
    pool = BlockPool(5, 16)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(3) == [2, 3, 4]
    assert state(pool) == (0, 0, 5, [1, 1, 1, 1, 1])


def test_a_block_is_free_when_its_last_owner_lets_go() -> None:
    pool = BlockPool(3, 16)
    table = pool.allocate(2)
    pool.share(table)
    pool.share(table[:1])
    assert state(pool) == (1, 0, 2, [3, 2, 0])
    pool.release(table)
    assert state(pool) == (1, 0, 2, [2, 1, 0])
    pool.release(table)
    assert state(pool) == (2, 0, 1, [1, 0, 0])
    pool.release(table[:1])
    assert state(pool) == (3, 0, 0, [0, 0, 0])


def test_two_owners_may_let_go_in_one_call() -> None:
    pool = BlockPool(2, 16)
    [block] = pool.allocate(1)
    pool.share([block])
    pool.release([block, block])
    assert state(pool) == (2, 0, 0, [0, 0])


def test_a_pool_of_one() -> None:
    pool = BlockPool(1, 16)
    assert pool.allocate(1) == [0]
    with pytest.raises(OutOfBlocksError):
        pool.allocate(1)
    pool.keep([0], lambda block: None)
    pool.release([0])
    assert state(pool) == (0, 1, 0, [0])
    assert pool.allocate(1) == [0]
    assert state(pool) == (0, 0, 1, [1])
    assert pool.writable(0)  # what it held before is forgotten


# ---- Keeping and evicting


def test_a_kept_block_without_an_owner_is_still_there() -> None:
    pool = BlockPool(3, 16)
    [block], forgotten = kept(pool, 1)
    pool.release([block])
    assert state(pool) == (2, 1, 0, [0, 0, 0])
    pool.share([block])
    assert state(pool) == (2, 0, 1, [1, 0, 0])
    assert forgotten == []


def test_what_is_free_is_lent_before_what_is_kept() -> None:
    pool = BlockPool(3, 16)
    blocks, forgotten = kept(pool, 2)
    pool.release(blocks)
    assert pool.allocate(1) == [2]
    assert (forgotten, pool.available) == ([], 2)


def test_the_one_that_has_been_without_an_owner_for_longest_is_evicted() -> None:
    pool = BlockPool(3, 16)
    _, forgotten = kept(pool, 3)
    for block in (1, 2, 0):
        pool.release([block])
    pool.share([1])  # used once more, so it is the youngest now
    pool.release([1])
    assert [pool.allocate(1) for _ in range(3)] == [[2], [0], [1]]
    assert forgotten == [2, 0, 1]


def test_the_last_block_of_a_sequence_is_evicted_first() -> None:
    """llm-d/llm-d-inference-sim#704: blocks of one chain were let go at the same moment."""
    pool = BlockPool(3, 16)
    table, forgotten = kept(pool, 3)
    pool.release(table)
    pool.allocate(1)
    assert forgotten == [2]
    pool.allocate(2)
    assert forgotten == [2, 1, 0]


def test_eviction_takes_no_more_than_it_needs() -> None:
    """sgl-project/sglang#4987: far more was evicted than was asked for."""
    pool = BlockPool(20, 16)
    table, forgotten = kept(pool, 20)
    pool.release(table)
    pool.allocate(5)
    assert forgotten == [19, 18, 17, 16, 15]
    assert state(pool)[:3] == (0, 15, 5)


def test_a_reused_block_is_forgotten_once_and_starts_anew() -> None:
    pool = BlockPool(1, 16)
    table, forgotten = kept(pool, 1)
    pool.release(table)
    pool.allocate(1)
    pool.release([0])
    assert state(pool) == (1, 0, 0, [0])
    pool.allocate(1)
    assert forgotten == [0]


# ---- Dropping


def test_what_is_dropped_is_free_when_nobody_owns_it() -> None:
    """Blocks 0 and 1 are evictable, 2 and 3 in use, 3 by two."""
    pool = BlockPool(5, 16)
    blocks, forgotten = kept(pool, 4)
    pool.release(blocks[:2])
    pool.share([3])
    pool.drop([3, 0, 2])
    assert forgotten == [3, 0, 2]
    assert state(pool) == (2, 1, 2, [0, 0, 1, 2, 0])
    assert [pool.kept(block) for block in range(5)] == [False, True, False, False, False]
    assert pool.writable(2)
    pool.release([2, 3])
    assert state(pool) == (3, 1, 1, [0, 0, 0, 1, 0])
    pool.release([3])
    assert state(pool) == (4, 1, 0, [0] * 5)
    pool.allocate(5)
    assert forgotten == [3, 0, 2, 1]


def test_what_was_dropped_can_be_kept_again() -> None:
    pool = BlockPool(2, 16)
    blocks, forgotten = kept(pool, 1)
    pool.drop(blocks)
    pool.keep(blocks, forgotten.append)
    pool.release(blocks)
    assert state(pool) == (1, 1, 0, [0, 0])
    pool.allocate(2)
    assert forgotten == [0, 0]


def test_dropping_nothing() -> None:
    pool = BlockPool(2, 16)
    pool.drop([])
    assert state(pool) == (2, 0, 0, [0, 0])


# ---- Writing


def test_a_block_of_one_owner_is_written_in_place() -> None:
    pool = BlockPool(2, 16)
    [block] = pool.allocate(1)
    assert pool.writable(block)
    assert pool.copy_on_write(block) == block
    assert state(pool) == (1, 0, 1, [1, 0])


def test_a_shared_block_is_copied_and_the_other_owner_keeps_it() -> None:
    pool = BlockPool(3, 16)
    [block] = pool.allocate(1)
    pool.share([block])
    assert not pool.writable(block)
    copy = pool.copy_on_write(block)
    assert copy != block
    assert state(pool) == (1, 0, 2, [1, 1, 0])
    assert pool.writable(block)
    assert pool.writable(copy)


def test_a_kept_block_is_copied_even_by_its_only_owner() -> None:
    """Others can still find it, and it must hold what they will look for."""
    pool = BlockPool(3, 16)
    [block], forgotten = kept(pool, 1)
    assert not pool.writable(block)
    copy = pool.copy_on_write(block)
    assert copy != block
    assert state(pool) == (1, 1, 1, [0, 1, 0])
    assert forgotten == []


def test_a_copy_may_evict_and_says_so() -> None:
    """vllm-project/vllm#4761: a block reused outside the prefix cache could still be found."""
    pool = BlockPool(2, 16)
    table, forgotten = kept(pool, 1)
    pool.release(table)
    [block] = pool.allocate(1)
    pool.share([block])
    assert pool.copy_on_write(block) == 0
    assert forgotten == [0]


# ---- Bad input


@pytest.mark.parametrize("blocks", [None, 0, True, 1.5, "01", b"\x00", {0}, {0: 0}, iter([0])])
@pytest.mark.parametrize("name", ["share", "release", "keep", "drop"])
def test_blocks_are_a_list(name: str, blocks: Any) -> None:
    """Text and sets too, and what can be gone through only once: it is checked first."""
    pool = BlockPool(2, 16)
    kept(pool, 2)
    more = [print] if name == "keep" else []
    with pytest.raises(ValueError, match="list of block numbers, got " + re.escape(repr(blocks))):
        getattr(pool, name)(blocks, *more)
    assert state(pool) == (0, 0, 2, [1, 1])


@pytest.mark.parametrize("name", ["blocks", "block_size"])
def test_no_pool_is_larger_than_what_a_block_table_can_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at most 2147483647, got 2147483648"):
        BlockPool(**{"blocks": 4, "block_size": 16, name: 2**31})
    assert BlockPool(1, 2**31 - 1).block_size == 2**31 - 1


@pytest.mark.parametrize("value", [0, -1, 2.0, "3", True, None])
def test_sizes_are_positive_whole_numbers(value: object) -> None:
    with pytest.raises(ValueError, match=f"^blocks must be a positive integer, got {value!r}"):
        BlockPool(value, 16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"^block_size must be a positive integer, got {value!r}"):
        BlockPool(4, value)  # type: ignore[arg-type]


Call = Callable[[BlockPool], object]

# The pool has five blocks: 0 is shared and kept, 1 has one owner, 2 is evictable, 3 and 4 are free.
BAD: dict[str, tuple[Call, type[ValueError], str]] = {
    "drop what is not kept": (lambda p: p.drop([2, 1]), ValueError, "block 1 is not kept"),
    "drop a free block": (lambda p: p.drop([3]), ValueError, "block 3 is not kept; drop.. takes"),
    "drop what is not there": (lambda p: p.drop([2, 5]), ValueError, "block 5 is not kept"),
    "drop half a block": (lambda p: p.drop([2.0]), ValueError, "block 2.0 is not kept"),
    "drop yes": (lambda p: p.drop([2, True]), ValueError, "block True is not kept"),
    "drop twice": (lambda p: p.drop([2, 2]), ValueError, "block 2 is given twice"),
    "keep for nobody": (
        lambda p: p.keep([1], None), ValueError, "a function of a block, got None",
    ),
    "share true": (lambda p: p.share([True]), BlockNotInUseError, "no block True"),
    "no blocks": (lambda p: p.allocate(0), ValueError, "positive number of blocks, got 0"),
    "minus one": (lambda p: p.allocate(-1), ValueError, "positive number of blocks, got -1"),
    "half a block": (lambda p: p.allocate(0.5), ValueError, "got 0.5"),  # type: ignore[arg-type]
    "yes": (lambda p: p.allocate(True), ValueError, "got True"),
    "more than there are": (
        lambda p: p.allocate(4), OutOfBlocksError,
        "4 blocks are needed, but 3 of 5 are available; release blocks first",
    ),
    "release a free block": (lambda p: p.release([3]), BlockNotInUseError, "block 3 has no owner"),
    "release an evictable block": (
        lambda p: p.release([2]), BlockNotInUseError, "block 2 has no owner",
    ),
    "release twice in one call": (
        lambda p: p.release([0, 1, 1]), BlockNotInUseError,
        "block 1 has 1 owner and cannot be released 2 times",
    ),
    "release three times in one call": (
        lambda p: p.release([0, 0, 0]), BlockNotInUseError,
        "block 0 has 2 owners and cannot be released 3 times",
    ),
    "release a good block and a bad one": (
        lambda p: p.release([1, 3]), BlockNotInUseError, "block 3 has no owner",
    ),
    "release a bad block and a good one": (
        lambda p: p.release([3, 1]), BlockNotInUseError, "block 3 has no owner",
    ),
    "release what is not there": (
        lambda p: p.release([5]), BlockNotInUseError, "no block 5; the pool's blocks are 0 to 4",
    ),
    "release minus one": (lambda p: p.release([-5]), BlockNotInUseError, "no block -5"),
    "release a float": (
        lambda p: p.release([1.0]), BlockNotInUseError, "no block 1.0",  # type: ignore[list-item]
    ),
    "release a truth": (lambda p: p.release([True]), BlockNotInUseError, "no block True"),
    "share a free block": (
        lambda p: p.share([1, 3]), BlockNotInUseError, "block 3 is free and holds nothing to share",
    ),
    "share what is not there": (lambda p: p.share([0, 5]), BlockNotInUseError, "no block 5"),
    "share minus one": (lambda p: p.share([2, -4]), BlockNotInUseError, "no block -4"),
    "keep a free block": (
        lambda p: p.keep([1, 3], print), BlockNotInUseError, "block 3 has no owner",
    ),
    "keep a block twice": (
        lambda p: p.keep([1, 0], print), ValueError, "block 0 is kept already",
    ),
    "write to a free block": (lambda p: p.writable(3), BlockNotInUseError, "block 3 has no owner"),
    "write to an evictable block": (
        lambda p: p.copy_on_write(2), BlockNotInUseError, "block 2 has no owner",
    ),
    "the owners of nothing": (lambda p: p.owners(5), BlockNotInUseError, "no block 5"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_call_says_why_and_changes_nothing(name: str) -> None:
    call, error, message = BAD[name]
    pool = BlockPool(5, 16)
    forgotten: list[int] = []
    pool.allocate(3)
    pool.keep([0, 2], forgotten.append)
    pool.share([0])
    pool.release([2])
    before = (2, 1, 2, [2, 1, 0, 0, 0])
    assert state(pool) == before
    with pytest.raises(error, match=message):
        call(pool)
    assert state(pool) == before
    assert [pool.writable(block) for block in (0, 1)] == [False, True]
    assert forgotten == []
    assert pool.allocate(3) == [3, 4, 2]
    assert forgotten == [2]


def test_a_copy_without_room_changes_nothing() -> None:
    pool = BlockPool(2, 16)
    [block, other] = pool.allocate(2)
    pool.share([block])
    with pytest.raises(OutOfBlocksError, match=r"^1 block is needed, but 0 of 2"):
        pool.copy_on_write(block)
    assert state(pool) == (0, 0, 2, [2, 1])
    pool.release([other])
    assert pool.copy_on_write(block) == other


def test_the_errors_can_be_caught_by_the_names_of_the_package() -> None:
    assert issubclass(OutOfBlocksError, CacheFullError)
    assert issubclass(BlockNotInUseError, ValueError)


# ---- Any order of operations


class PoolAndModel(RuleBasedStateMachine):
    """The pool beside the plainest model of one: who owns what, and a list of evictable blocks."""

    @initialize(blocks=st.sampled_from([1, 2, 3, 7]))
    def start(self, blocks: int) -> None:
        self.pool = BlockPool(blocks, 4)
        self.owners = dict.fromkeys(range(blocks), 0)
        self.kept: set[int] = set()
        self.evictable: list[int] = []  # longest without an owner first
        self.forgotten: list[int] = []

    def _free(self) -> set[int]:
        return {b for b, n in self.owners.items() if n == 0} - set(self.evictable)

    def _in_use(self) -> list[int]:
        return [block for block, n in self.owners.items() if n]

    def _lent(self, n: int, blocks: list[int]) -> None:
        """The pool says that it lent these: free ones first, then the oldest evictable ones."""
        free = self._free()
        assert len(set(blocks)) == len(blocks) == n
        assert set(blocks[: len(free)]) <= free
        evicted = blocks[len(free) :]
        assert evicted == self.evictable[: len(evicted)]
        assert self.forgotten == evicted
        self.evictable = self.evictable[len(evicted) :]
        self.kept -= set(evicted)
        for block in blocks:
            self.owners[block] = 1
        self.forgotten.clear()

    def _let_go(self, block: int) -> None:
        self.owners[block] -= 1
        if self.owners[block] == 0 and block in self.kept:
            self.evictable.append(block)

    @rule(n=st.integers(1, 4))
    def allocate(self, n: int) -> None:
        if n > len(self._free()) + len(self.evictable):
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(n)
        else:
            self._lent(n, self.pool.allocate(n))

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(list(self.owners)), max_size=3))
        if self._free() & set(blocks):
            with pytest.raises(BlockNotInUseError):
                self.pool.share(blocks)
            return
        self.pool.share(blocks)
        for block in blocks:
            self.owners[block] += 1
            if block in self.evictable:
                self.evictable.remove(block)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(list(self.owners)), max_size=3))
        if any(blocks.count(block) > self.owners[block] for block in blocks):
            with pytest.raises(BlockNotInUseError):
                self.pool.release(blocks)
            return
        self.pool.release(blocks)
        for block in blocks[::-1]:
            self._let_go(block)

    @rule()
    def release_everything(self) -> None:
        blocks = [block for block, n in self.owners.items() for _ in range(n)]
        self.pool.release(blocks)
        for block in blocks[::-1]:
            self._let_go(block)

    @precondition(lambda self: self._in_use())
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self._in_use()))
        if block in self.kept:
            with pytest.raises(ValueError, match="kept already"):
                self.pool.keep([block], self.forgotten.append)
            return
        self.pool.keep([block], self.forgotten.append)
        self.kept.add(block)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.kept)))
        self.pool.drop([block])
        assert self.forgotten == [block]
        self.forgotten.clear()
        self.kept.remove(block)
        if block in self.evictable:
            self.evictable.remove(block)

    @precondition(lambda self: self._in_use())
    @rule(data=st.data())
    def copy_on_write(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self._in_use()))
        if self.owners[block] == 1 and block not in self.kept:
            assert self.pool.copy_on_write(block) == block
        elif not self._free() and not self.evictable:
            with pytest.raises(OutOfBlocksError):
                self.pool.copy_on_write(block)
        else:
            self._lent(1, [self.pool.copy_on_write(block)])
            self._let_go(block)

    @invariant()
    def the_pool_agrees(self) -> None:
        owners = [self.owners[block] for block in range(self.pool.blocks)]
        free, in_use = len(self._free()), len(self._in_use())
        assert state(self.pool) == (free, len(self.evictable), in_use, owners)
        assert free + len(self.evictable) + in_use == self.pool.blocks
        assert min(owners) >= 0
        assert self.forgotten == []
        for block in self._in_use():
            alone = self.owners[block] == 1 and block not in self.kept
            assert self.pool.writable(block) == alone


TestPoolAndModel = PoolAndModel.TestCase
TestPoolAndModel.settings = SCHEDULES
