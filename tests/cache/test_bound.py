"""Rows that are bound to block tables which sequences own, from step to step.

Logits are compared with the written-out formulas over the sequence's own text, whoever shared a
batch with it before, whichever row it stood in.
"""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles.cache_kinds import formulas
from oracles.toys import snapshot, text, toy, unchanged

from kvbook.cache import BlockPool, BlockTable, KVCache, PrefixCache
from kvbook.cache.prefix import CachedSequence
from kvbook.errors import BlockNotInUseError, OutOfBlocksError
from kvbook.model.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")
NAN = float("nan")


def begun(prompt: int = 9, blocks: int = 8) -> tuple[Transformer, KVCache, PrefixCache]:
    """A bound cache with a prefix cache over its pool, in which a prompt was run and has ended."""
    model, pool = toy(), BlockPool(blocks, 4)
    cache, prefix = model.new_bound_cache(pool), PrefixCache(pool, "toy")
    sequence = prefix.begin(text(prompt))
    cache.bind([sequence], lengths=[0])
    model(torch.tensor([text(prompt)]), cache)
    prefix.commit(sequence, prompt)
    prefix.end(sequence)
    return model, cache, prefix


def owned(blocks: int = 2) -> tuple[Transformer, KVCache, BlockTable]:
    """A bound cache and a table with blocks of its pool."""
    model, pool = toy(), BlockPool(6, 4)
    return model, model.new_bound_cache(pool), BlockTable(pool, pool.allocate(blocks))


def refused(cache: KVCache, error: type[ValueError], why: str, call: Callable[[], object]) -> None:
    """The call raises, and cache and pool are as they were."""
    pools = [pool for group in cache.groups for pool in group.placement.pools]
    before = snapshot(cache), [(pool.free, pool.in_use, pool.evictable) for pool in pools]
    with pytest.raises(error, match=why):
        call()
    assert unchanged(cache, before[0])
    assert [(pool.free, pool.in_use, pool.evictable) for pool in pools] == before[1]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


# ---- What a bound row computes


def test_a_row_that_starts_on_a_found_prefix_is_a_cold_run() -> None:
    model, cache, prefix = begun()
    cache.fill_unused(NAN)
    first = [*text(9), 3, 1]
    second = [*text(8), 5]
    sequences = [prefix.begin(first), prefix.begin(second)]
    assert [s.cached_tokens for s in sequences] == [8, 8]
    cache.bind(sequences, lengths=[8, 8])
    assert cache.lengths == (8, 8)
    out = model(torch.tensor([first[8:], [0, 0, 5]]), cache, counts=[3, 1])
    for row, new in enumerate([first, second]):
        count = len(new) - 8
        close(out[row, -count:], formulas(model, tuple(new))[-count:])


def test_a_row_grows_when_the_owner_appends() -> None:
    model, cache, prefix = begun()
    sequence = prefix.begin(text(4))
    cache.bind([sequence], lengths=[0])
    one = torch.tensor([text(5)[4:]])
    model(torch.tensor([text(4)]), cache)
    why = "row 0 is bound to a table of 1 blocks of 4, which does not take tokens 4 to 4; let its"
    refused(cache, OutOfBlocksError, why, lambda: model(one, cache))
    prefix.append(sequence, text(5)[4:])
    close(model(one, cache)[0, 0], formulas(model, tuple(text(5)))[4])


def test_a_batch_changes_in_one_call() -> None:
    """Two requests wait and return, in other rows, while a third one comes between."""
    model, cache, prefix = begun(blocks=12)
    prompts = [text(5, 1), text(7, 2), text(6, 3)]
    live = [prefix.begin(prompt) for prompt in prompts]
    for batch in ([0], [1, 2], [2, 0, 1], [1], [0, 2]):
        for i in batch:
            if not live[i].new_tokens:
                prompts[i] = [*prompts[i], 3 + i]
                prefix.append(live[i], [3 + i])
        sequences = [live[i] for i in batch]
        cache.bind(sequences, lengths=[s.written for s in sequences])
        new = [prompts[i][s.written :] for i, s in zip(batch, sequences, strict=True)]
        T = max(map(len, new))
        tokens = torch.tensor([[0] * (T - len(row)) + row for row in new])
        out = model(tokens, cache, counts=[len(row) for row in new])
        for row, (i, s) in enumerate(zip(batch, sequences, strict=True)):
            close(out[row, -len(new[row]) :], formulas(model, tuple(prompts[i]))[s.written :])
            prefix.commit(s, len(s.tokens))


def test_each_group_reads_by_its_own_tables() -> None:
    model = toy(window=(3, None))
    pools = BlockPool(8, 4), BlockPool(8, 4)
    pools[1].allocate(3)  # so that the tables of the two groups differ
    cache = model.new_bound_cache(*pools)
    tables = [[BlockTable(pool, pool.allocate(2)) for _ in range(2)] for pool in pools]
    cache.bind(*tables, lengths=[0, 0])
    texts = [text(6, 1), text(6, 2)]
    out = model(torch.tensor(texts), cache)
    for row, one in enumerate(texts):
        close(out[row], formulas(model, tuple(one)))
    swapped = tables[::-1]
    why = "names blocks of another pool"
    refused(cache, ValueError, why, lambda: cache.bind(*swapped, lengths=[6, 6]))
    refused(cache, ValueError, "takes 2 lists", lambda: cache.bind(tables[0], lengths=[6, 6]))


# ---- Tables stay with their owners


def test_lengths_change_and_tables_do_not() -> None:
    _, cache, table = owned()
    held = list(table.blocks)
    cache.bind([table], lengths=[6])
    cache.truncate(3)
    assert (cache.lengths, table.blocks, table.pool.in_use) == ((3,), held, 2)
    cache.reset()
    assert (cache.lengths, cache.rows, table.blocks, table.pool.in_use) == ((), 0, held, 2)
    cache.bind([table], lengths=[6])


@pytest.mark.parametrize("change", ["bind", "reset", "truncate"])
def test_a_step_begun_before_a_table_changed_hands_writes_nothing(change: str) -> None:
    """Its plan names slots that may be somebody else's now."""
    _, cache, table = owned()
    cache.bind([table], lengths=[3])
    cache.reserve([1], 1)
    if change == "bind":
        cache.bind([table], lengths=[3])
    else:
        cache.reset() if change == "reset" else cache.truncate(3)
    new = torch.ones(1, 2, 1, 6, dtype=torch.float64)
    with pytest.raises(ValueError, match="without reserve"):
        cache.update(0, new, new)
    assert not any(tensor.any() for tensor in cache.tensors)


def test_a_sequence_that_has_ended_is_not_read_again() -> None:
    model, cache, prefix = begun()
    sequence = prefix.begin(text(9))
    cache.bind([sequence], lengths=[8])
    prefix.end(sequence)
    step = torch.tensor([text(9)[8:]])
    why = "row 0 has 8 tokens in a table of 0 blocks"
    refused(cache, ValueError, why, lambda: model(step, cache))
    refused(cache, ValueError, "begun and not ended", lambda: cache.bind([sequence], lengths=[8]))


# ---- Bad input


@pytest.mark.parametrize("lengths", [[9], [-1], [2.0], [None], [True], 3, None, [], "1"], ids=str)
def test_lengths_that_the_table_does_not_hold_are_refused(lengths: Any) -> None:
    _, cache, table = owned()
    refused(cache, ValueError, "lengths? of each row|9 tokens in a table of 2 blocks of 4",
            lambda: cache.bind([table], lengths=lengths))


@pytest.mark.parametrize("tables", [[], [[]], 7, [None], "table"], ids=str)
def test_one_table_for_each_row(tables: Any) -> None:
    _, cache, _ = owned()
    refused(cache, ValueError, "lists of tables|no block table|must be a list",
            lambda: cache.bind(tables, lengths=[1]))


@pytest.mark.parametrize(
    ("blocks", "why"),
    [
        ([0, 2, 3], r"blocks \[2, 3\] in the table of row 0 have no owner"),
        ([0, 6], "there is no block 6"),
        ([-1], "there is no block -1"),
    ],
)
def test_blocks_without_an_owner_are_refused(blocks: list[int], why: str) -> None:
    _, cache, table = owned()
    other = BlockTable(table.pool, blocks)
    refused(cache, BlockNotInUseError, why, lambda: cache.bind([other], lengths=[1]))


def test_blocks_that_can_be_found_but_have_no_owner_are_refused() -> None:
    _, cache, prefix = begun()
    assert prefix.pool.evictable == 2
    table = BlockTable(prefix.pool, [0, 1])
    refused(cache, BlockNotInUseError, "no owner", lambda: cache.bind([table], lengths=[8]))


def test_other_placements_have_slots_of_their_own() -> None:
    table = BlockTable(BlockPool(2, 4), [0])
    for cache, kind in ((toy().new_cache(1, 8), "Contiguous"),
                        (toy().new_paged_cache(1, BlockPool(2, 4)), "Paged")):
        with pytest.raises(ValueError, match=rf"a {kind} placement has its own; .*new_bound_cache"):
            cache.bind([table], lengths=[1])
        assert cache.lengths == (0,)


def test_a_tail_and_bound_rows_do_not_go_together() -> None:
    pool = BlockPool(4, 4)
    with pytest.raises(TypeError, match="tail"):
        toy().new_bound_cache(pool, tail=3)
    cache = toy().new_paged_cache(1, pool, tail=3)
    table = BlockTable(pool, pool.allocate(1))
    with pytest.raises(ValueError, match="without a tail"):
        cache.bind([table], lengths=[4])
    assert cache.lengths == (0,)


def test_bound_rows_are_neither_forked_nor_moved() -> None:
    _, cache, table = owned()
    cache.bind([table], lengths=[5])
    for rows in ([0, 0], [0]):
        refused(cache, ValueError, "not forked or moved", lambda rows=rows: cache.select(rows))


def test_a_cache_that_is_bound_to_nothing_takes_no_tokens() -> None:
    model, cache, _ = owned()
    why = "1 rows, but the cache has 0 active rows; .*bind"
    refused(cache, ValueError, why, lambda: model(torch.tensor([[1]]), cache))


# ---- Nobody writes what others read


@pytest.mark.parametrize("start", [4, 6])
def test_what_can_be_found_is_not_written_by_a_row_that_stopped_before(start: int) -> None:
    """The row is bound with less than its blocks hold, and the blocks are final."""
    model, cache, prefix = begun()
    sequence = prefix.begin(text(9))
    cache.bind([sequence], lengths=[start])
    why = rf"tokens {start} to {start} of row 0 would go into blocks \[{sequence.blocks[1]}\]"
    refused(cache, ValueError, why, lambda: model(torch.tensor([[1]]), cache))


def test_blocks_after_the_first_one_are_looked_at_too() -> None:
    model, cache, table = owned(3)
    table.pool.share(table.blocks[2:])
    cache.bind([table], lengths=[2])
    refused(
        cache, ValueError, rf"into blocks \[{table.blocks[2]}\]",
        lambda: model(torch.tensor([text(7)]), cache),
    )  # fmt: skip
    model(torch.tensor([text(6)]), cache)  # up to the edge of the shared one


def test_two_rows_do_not_write_one_block() -> None:
    model, cache, table = owned()
    cache.bind([table, table], lengths=[2, 2])
    step = torch.tensor([[1], [2]])
    refused(cache, ValueError, "written by two rows", lambda: model(step, cache))
    model(step, cache, counts=[1, 0])  # one may


# ---- Poison: every slot without a token, and no slot that somebody else needs


def holes(cache: KVCache) -> list[int]:
    """Slots that are not numbers any more."""
    cache.fill_unused(NAN)
    return cache.tensors[0].isnan()[0, 0, 0, :, 0].nonzero().flatten().tolist()


def test_blocks_that_can_be_found_are_not_unused() -> None:
    model, cache, prefix = begun()  # blocks 0 and 1 are evictable, six are free
    assert holes(cache) == list(range(8, 12)) + list(range(12, 32))
    sequence = prefix.begin([*text(8), 7, 8])
    cache.bind([sequence], lengths=[8])
    cache.truncate(3)  # the row is shorter now, the cached block is what it was
    holes(cache)
    cache.bind([sequence], lengths=[8])
    out = model(torch.tensor([[7, 8]]), cache)
    close(out[0], formulas(model, (*text(8), 7, 8))[-2:])


# ---- Requests that come, wait, return in any row, and go


class Requests:
    """Up to four requests over one pool; a random part of them is the batch of each step."""

    def __init__(self, size: int) -> None:
        self.rnd, self.visits, self.model = random.Random(size), Counter[str](), toy()
        pool = BlockPool(40 // size + 4, size)
        self.cache, self.prefix = self.model.new_bound_cache(pool), PrefixCache(pool, "toy")
        self.live: list[tuple[CachedSequence, list[int]]] = []  # and tokens still to come

    def begin(self) -> None:
        rnd = self.rnd
        prompt = [*text(rnd.choice([3, 5, 8])), *text(rnd.randint(1, 3), rnd.randrange(3))]
        try:
            sequence = self.prefix.begin(prompt)
        except OutOfBlocksError:
            self.visits["no room"] += 1
            return
        self.live.append((sequence, text(rnd.randint(1, 4), rnd.randrange(99))))
        self.visits["found"] += sequence.cached_tokens > 0
        blocks = [set(one.blocks) for one, _ in self.live]
        self.visits["two requests on one block"] += len(set.union(*blocks)) < sum(map(len, blocks))

    def step(self) -> None:
        batch = self.rnd.sample(self.live, self.rnd.randint(1, len(self.live)))
        self.visits["a request waits"] += len(batch) < len(self.live)
        sequences = [sequence for sequence, _ in batch]
        new = [s.tokens[s.written :].tolist() for s in sequences]
        T = max(map(len, new))
        self.cache.bind(sequences, lengths=[s.written for s in sequences])
        self.cache.fill_unused(self.rnd.choice([NAN, 1e10]))
        tokens = torch.tensor([[0] * (T - len(row)) + row for row in new])
        out = self.model(tokens, self.cache, counts=[len(row) for row in new])
        for row, s in enumerate(sequences):
            expected = formulas(self.model, tuple(s.tokens))[s.written :]
            close(out[row, -len(new[row]) :], expected)
            self.prefix.commit(s, len(s.tokens))
        for one in batch:
            self.go_on_or_end(one)

    def go_on_or_end(self, one: tuple[CachedSequence, list[int]]) -> None:
        sequence, more = one
        if more and self.prefix.pool.available:
            self.prefix.append(sequence, [more.pop()])
            return
        self.prefix.end(sequence)
        self.live.remove(one)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_requests_over_a_prefix_cache_are_cold_runs(size: int) -> None:
    requests = Requests(size)
    for _ in range(120):
        if len(requests.live) < 4 and requests.rnd.random() < 0.7:
            requests.begin()
        if requests.live:
            requests.step()
    for state in ("found", "two requests on one block", "a request waits"):
        assert requests.visits[state] > 1, state
    for sequence, _ in requests.live:
        requests.prefix.end(sequence)
    assert requests.prefix.pool.in_use == 0
