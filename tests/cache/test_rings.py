"""Rings: what a windowed layer keeps, in which slots, and what can be taken back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.cache_kinds import STORES
from oracles.toys import (
    batch,
    reference_logits,
    seen,
    snapshot,
    text,
    toy,
    unchanged,
    weights_by_position,
)

from kvbook.cache import CacheGroup, Contiguous, DenseStore, KVCache, LayerKind, Ring
from kvbook.cache.step import Step
from kvbook.model.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")


def ring_cache(window: int, rollback: int = 1, sinks: int = 0, rows: int = 1) -> KVCache:
    """One layer, two KV heads of width 40: room for the probe's positions 0 … 39."""
    ring = Ring(rows, window, rollback, sinks)
    kind = LayerKind(2, 40, 40, torch.float64, window, sinks)
    return KVCache(CacheGroup(ring, DenseStore(kind, 1, *ring.store_shape)))


def append(cache: KVCache, T: int) -> None:
    """T tokens per row whose keys and values are their positions."""
    starts = cache.lengths
    cache.reserve([T] * len(starts), T)
    positions = torch.tensor([[float(n + i) for i in range(T)] for n in starts]).double()
    new = positions[:, None, :, None].expand(-1, 2, -1, 40)
    cache.update(0, new, new)


def contents(cache: KVCache, row: int = 0) -> list[int]:
    """The positions that a row holds, in the order that ``entries`` gives."""
    keys, values = cache.entries(0, row)
    assert keys.equal(values)
    assert keys.std((0, 2), correction=0).max() == 0 if keys.numel() else True
    return keys[0, :, 0].int().tolist()


def slots(cache: KVCache, row: int = 0) -> list[int]:
    """What stands in each slot of the storage."""
    store = cache.groups[0].store
    assert isinstance(store, DenseStore)
    return store.keys[0, row, 0, :, 0].int().tolist()


# ---- What a ring holds


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (7, [0, 1, 2, 3, 4, 5, 6]),
        (8, [0, 1, 2, 3, 4, 5, 6, 7]),
        (9, [1, 2, 3, 4, 5, 6, 7, 8]),
        (16, [8, 9, 10, 11, 12, 13, 14, 15]),
        (17, [9, 10, 11, 12, 13, 14, 15, 16]),
    ],
)
@pytest.mark.parametrize("first", [1, 6])
def test_the_oldest_token_goes_when_the_window_is_exceeded(
    length: int, expected: list[int], first: int
) -> None:
    """huggingface/transformers#37574 (fix #38046): it went when the window was reached. W = 8."""
    cache = ring_cache(window=8)
    append(cache, first)
    while cache.lengths[0] < length:
        append(cache, 1)
    assert contents(cache) == expected
    assert cache.lengths == (length,)


@pytest.mark.parametrize("length", [7, 8, 9, 16, 17, 18])
def test_so_it_is_in_one_pass(length: int) -> None:
    cache = ring_cache(window=8)
    append(cache, length)
    assert contents(cache) == list(range(max(0, length - 8), length))


def test_a_ring_has_room_for_what_may_be_taken_back() -> None:
    """W - 1 + r = 2 + 3 slots."""
    cache = ring_cache(window=3, rollback=3)
    append(cache, 4)
    assert contents(cache) == [0, 1, 2, 3]
    append(cache, 3)
    assert contents(cache) == [2, 3, 4, 5, 6]
    assert slots(cache) == [5, 6, 2, 3, 4]


def test_sinks_stay_in_front_of_the_ring() -> None:
    """Position p behind 2 sinks lies in slot 2 + (p - 2) mod 3."""
    cache = ring_cache(window=3, rollback=1, sinks=2)
    append(cache, 1)
    assert contents(cache) == [0]
    append(cache, 6)
    assert contents(cache) == [0, 1, 4, 5, 6]
    assert slots(cache) == [0, 1, 5, 6, 4]
    append(cache, 1)
    assert contents(cache) == [0, 1, 5, 6, 7]
    assert slots(cache) == [0, 1, 5, 6, 7]


def test_positions_say_which_token_stands_where() -> None:
    cache = ring_cache(window=3, rollback=1, sinks=2)
    append(cache, 6)
    cache.reserve([1], 1)
    new = torch.zeros(1, 2, 1, 40, dtype=torch.float64)
    assert cache.update(0, new, new).positions.tolist() == [[0, 1, 5, 6, 4]]
    cache.reserve([2], 2)
    new = torch.zeros(1, 2, 2, 40, dtype=torch.float64)
    view = cache.update(0, new, new)
    assert view.positions.tolist() == [[0, 1, 5, 6, 4, 7, 8]]  # what was there, then what is new


def test_an_unfilled_slot_is_no_token() -> None:
    cache = ring_cache(window=4, rows=2)
    cache.reserve([1, 3], 3)
    new = torch.ones(2, 2, 3, 40, dtype=torch.float64)
    assert cache.update(0, new, new).positions.tolist() == [[0, -1, -1], [0, 1, 2]]


def test_what_one_row_lost_is_stated_for_no_row() -> None:
    """A ring of 5; both rows hold 7 tokens, but row 0 had 9 before and lost positions up to 3."""
    cache = ring_cache(window=3, rollback=3, rows=2)
    cache.reserve([9, 7], 9)
    new = torch.zeros(2, 2, 9, 40, dtype=torch.float64)
    cache.update(0, new, new)
    cache.truncate(7)
    cache.reserve([1, 1], 1)
    assert cache.update(0, new[:, :, :1], new[:, :, :1]).positions.tolist() == [[5, 6, 7, -1, 4]]


@pytest.mark.parametrize("T", [1, 2, 5, 6, 7, 20])
def test_no_slot_is_written_twice_in_one_step(T: int) -> None:
    """Which of two writes to one slot wins is not defined; on a CPU it often is the right one."""
    for sinks, rollback, counts in ((0, 1, [T, T]), (2, 3, [T, T]), (2, 1, [T, T // 2])):
        ring = Ring(2, 4, rollback, sinks)
        starts = [3, 7] if counts[0] != counts[1] else [5, 5]
        plan = ring.plan(Step(tuple(starts), tuple(counts), T))
        rows, where = plan.target
        numbers = torch.arange(2 * ring.store_shape[1]).view(2, -1)[rows, where].flatten()
        assert numbers.unique().numel() == numbers.numel() > 0


# ---- Windows through a ring


@pytest.mark.parametrize("rollback", [1, 3])
@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("chunks", [[12], [1] * 12, [3, 9], [5, 1, 6], [2] * 6, [4, 3, 5]], ids=str)
def test_each_token_sees_its_window_and_the_sinks(
    chunks: list[int], sinks: int, rollback: int
) -> None:
    """W = 4. A chunk longer than the ring would overwrite what its first tokens see."""
    cache = ring_cache(4, rollback, sinks)
    found = [one for T in chunks for one in seen(weights_by_position(cache, [T], T, 40)[0])]
    assert found == [
        {*range(min(sinks, q + 1)), *range(max(0, q - 3), q + 1)} for q in range(12)
    ]


@pytest.mark.parametrize("rollback", [1, 2])
def test_ragged_rows_see_their_own_windows(rollback: int) -> None:
    cache = ring_cache(3, rollback, rows=2)
    weights_by_position(cache, [7, 1], 7, 40)
    weights = weights_by_position(cache, [1, 4], 4, 40)
    assert seen(weights[0]) == [set(), set(), set(), {5, 6, 7}]
    assert seen(weights[1]) == [{0, 1}, {0, 1, 2}, {1, 2, 3}, {2, 3, 4}]
    weights = weights_by_position(cache, [1, 1], 1, 40)
    assert (seen(weights[0]), seen(weights[1])) == ([{6, 7, 8}], [{3, 4, 5}])


def test_a_window_smaller_than_the_ring_s_is_served() -> None:
    ring = Ring(1, 6)
    store = DenseStore(LayerKind(2, 40, 40, torch.float64, window=2), 1, 1, 6)
    cache = KVCache(CacheGroup(ring, store))
    weights_by_position(cache, [9], 9, 40)
    assert seen(weights_by_position(cache, [1], 1, 40)[0]) == [{8, 9}]


@given(
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    window=st.sampled_from([1, 2, 3, 8]),
    sinks=st.sampled_from([0, 1, 2, 5]),
    rollback=st.sampled_from([1, 2, 4]),
)
@settings(max_examples=60)
def test_any_chunk_schedule_equals_the_full_run(
    chunks: list[int], window: int, sinks: int, rollback: int
) -> None:
    model, tokens = toy(window=window, sinks=sinks, max_positions=128), text(sum(chunks))
    cache = model.new_cache(1, len(tokens), rollback=rollback)
    logits = [model(part, cache)[0] for part in torch.tensor([tokens]).split(chunks, 1)]
    assert (torch.cat(logits) - reference_logits(model, tokens)).abs().max() < 1e-9


def test_decode_through_a_full_ring_needs_no_mask() -> None:
    """With r = 1 a full ring holds the window and nothing else."""
    cache = ring_cache(window=4, sinks=1)
    for T in (3, 6, 1, 1):
        cache.reserve([T], T)
        new = torch.ones(1, 2, T, 40, dtype=torch.float64)
        view = cache.update(0, new, new)
    assert (view.mask, view.is_causal, view.keys.shape[2]) == (None, False, 5)


# ---- Patterns: the length is the sequence's


@pytest.mark.parametrize("window", [(3, None, 3), (None, 3, None), (3, 3, 3)], ids=str)
def test_the_length_is_the_sequence_s_whichever_layer_is_asked(
    window: tuple[int | None, ...],
) -> None:
    model = toy(n_layers=3, window=window)
    cache = model.new_cache(2, 20, rollback=2)
    model(batch(2, 5), cache)
    model(batch(2, 7), cache, counts=[7, 4])
    assert cache.lengths == (12, 9)
    for layer, one in enumerate(window):
        kept = (12, 9) if one is None else (4, 4)  # W - 1 + r
        assert tuple(cache.entries(layer, row)[0].shape[1] for row in (0, 1)) == kept


def test_layers_of_one_window_share_a_group() -> None:
    cache = toy(n_layers=4, window=(3, None, 3, 8)).new_cache(1, 20, rollback=1)
    assert [group.kind.window for group in cache.groups] == [3, None, 8]
    assert [group.layers for group in cache.groups] == [2, 1, 1]
    assert [type(group.placement) for group in cache.groups] == [Ring, Contiguous, Ring]
    assert [kind.window for kind in cache.layer_kinds] == [3, None, 3, 8]


def test_a_global_layer_keeps_its_capacity_a_ring_has_none() -> None:
    assert toy(window=3).new_cache(1, 9, rollback=1).capacity is None
    assert toy(n_layers=3, window=(3, None, 3)).new_cache(1, 9, rollback=1).capacity == 9
    model = toy(window=3)
    cache = model.new_cache(1, 4, rollback=1)
    model(batch(1, 40), cache)
    assert cache.lengths == (40,)


# ---- Rollback


@pytest.mark.parametrize("rollback", [1, 3])
@pytest.mark.parametrize("sinks", [0, 2])
def test_up_to_r_tokens_can_be_taken_back_exactly(rollback: int, sinks: int) -> None:
    model, tokens, other = toy(window=4, sinks=sinks), text(11), text(9, seed=5)
    for back in range(1, rollback + 1):
        cache = model.new_cache(1, 40, rollback=rollback)
        for part in torch.tensor([tokens]).split([8, 3], 1):
            model(part, cache)
        model(torch.tensor([[7]]), cache)
        cache.truncate(12 - back)
        cache.fill_unused(float("nan"))
        kept = [*tokens, 7][: 12 - back]
        parts = torch.tensor([other]).split([1, 1, 7], 1)
        logits = torch.cat([model(part, cache)[0] for part in parts])
        expected = reference_logits(model, [*kept, *other])[len(kept) :]
        assert (logits - expected).abs().max() < 1e-9


@pytest.mark.parametrize("stored", ["dense", "int4", "dense, tail of 3"])
@pytest.mark.parametrize("window", [3, (None, 3, 3)], ids=str)
def test_truncating_past_lost_history_is_refused_and_changes_nothing(
    stored: str, window: int | tuple[int | None, ...]
) -> None:
    model = toy(window=window, n_layers=3)
    kind = STORES[stored]
    caches = [
        model.new_cache(2, 40, store=kind.make, tail=kind.tail, rollback=2) for _ in range(2)
    ]
    for cache in caches:
        model(batch(2, 9), cache, counts=[9, 4])
        model(batch(2, 2), cache)
    refused, untouched = caches
    before = snapshot(refused)
    lengths, back = refused.lengths, 3 + kind.tail
    with pytest.raises(
        ValueError,
        match=r"row 0 cannot go back to \d+ tokens: a window of 3.*\(it has 2\), or reset\(\)",
    ):
        refused.truncate([lengths[0] - back, lengths[1]])
    assert unchanged(refused, before)
    assert refused.lengths == lengths == (11, 6)
    for T in (1, 4):
        assert model(batch(2, T), refused).equal(model(batch(2, T), untouched))


def test_the_message_names_the_lost_position() -> None:
    """Ring of 2 + 1 slots after 8 tokens: 5, 6, 7. Back at 6, the next token would see 4."""
    cache = ring_cache(window=3)
    append(cache, 8)
    with pytest.raises(
        ValueError, match=r"row 0 cannot go back to 6 tokens.*needs position 4.*everything before 5"
    ):
        cache.truncate(6)
    cache.truncate(7)
    assert contents(cache) == [5, 6]


def test_what_was_lost_stays_lost_after_a_rollback() -> None:
    """One token at a time, each of the two allowed by itself."""
    cache = ring_cache(window=3)
    append(cache, 8)
    cache.truncate(7)
    with pytest.raises(ValueError, match="cannot go back to 6"):
        cache.truncate(6)
    append(cache, 1)
    with pytest.raises(ValueError, match="cannot go back to 6"):
        cache.truncate(6)


@pytest.mark.parametrize("length", [0, 1, 2])
def test_the_sinks_alone_can_always_be_gone_back_to(length: int) -> None:
    """The next token then sees no position that was lost."""
    model, tokens = toy(window=3, sinks=2), text(12)
    cache = model.new_cache(1, 40, rollback=1)
    model(torch.tensor([tokens]), cache)
    cache.truncate(length)
    logits = model(torch.tensor([tokens[length:]]), cache)[0]
    assert (logits - reference_logits(model, tokens)[length:]).abs().max() < 1e-9


def test_rows_lose_history_each_for_itself() -> None:
    cache = ring_cache(window=3, rows=2)
    cache.reserve([2, 9], 9)
    new = torch.ones(2, 2, 9, 40, dtype=torch.float64)
    cache.update(0, new, new)
    cache.truncate([1, 9])
    with pytest.raises(ValueError, match="row 1 cannot go back to 7 tokens"):
        cache.truncate([1, 7])


@pytest.mark.parametrize("kept", range(4))
def test_after_rejected_drafts_a_ring_is_as_if_they_had_not_been(kept: int) -> None:
    """paiml/aprender#2014: reset instead of rollback. Three drafts are read, ``kept`` stay."""
    model, tokens, drafts = toy(window=4), text(11), text(3, seed=9)
    cache = model.new_cache(1, 40, rollback=3)
    model(torch.tensor([tokens]), cache)
    model(torch.tensor([drafts]), cache)
    cache.truncate(11 + kept)
    step = model(torch.tensor([[3]]), cache)[0, 0]
    expected = reference_logits(model, [*tokens, *drafts[:kept], 3])[-1]
    assert (step - expected).abs().max() < 1e-9


def test_a_short_ring_is_not_told_by_its_length() -> None:
    """After a rollback of W = 1 the ring holds nothing that is behind the length."""
    cache = ring_cache(window=1, rollback=2)
    append(cache, 9)
    assert contents(cache) == [7, 8]
    cache.truncate(8)
    assert contents(cache) == [7]
    cache.truncate(3)  # a window of 1 needs nothing of the past
    assert contents(cache) == []
    append(cache, 1)
    assert contents(cache) == [3]


# ---- Reset and reorder


def test_a_copied_row_does_not_forget_what_stood_in_its_slots() -> None:
    """Row 1 holds not-a-number behind its end; then it becomes a copy of row 0, which does not."""
    model, one = toy(window=4), text(4)
    cache = model.new_cache(2, 20, rollback=1)
    model(torch.tensor([one[:1], [5]]), cache)
    cache.reserve([0, 2], 2)
    new = torch.full((2, 2, 2, 6), float("nan"), dtype=torch.float64)
    for layer in range(2):
        cache.update(layer, new, new)
    cache.truncate(1)
    cache.select([0, 0])
    model(torch.tensor([one[1:], [0, 0, 0]]), cache, counts=[3, 0])
    logits = model(torch.tensor([[7], [one[1]]]), cache)[:, 0]
    assert (logits[0] - reference_logits(model, [*one, 7])[-1]).abs().max() < 1e-9
    assert (logits[1] - reference_logits(model, one[:2])[-1]).abs().max() < 1e-9


def run(model: Transformer, cache: KVCache) -> list[torch.Tensor]:
    return [model(batch(2, T), cache, counts=counts) for T, counts in (
        (6, None), (1, None), (3, [3, 1]), (1, None))]  # fmt: skip


@pytest.mark.parametrize("window", [3, 99, (3, None, 3)], ids=str)
def test_a_second_use_after_reset_is_as_the_first(window: int | tuple[int | None, ...]) -> None:
    """rasbt/LLMs-from-scratch#925: the write pointer and the position survived the reset."""
    model = toy(n_layers=3, window=window)
    cache = model.new_cache(2, 16, rollback=2)
    first = run(model, cache)
    for rows in ([0, 1], [1]):  # with all rows active, and with one dropped before the reset
        cache.select(rows)
        cache.reset()
        assert cache.used_bytes == 0
        assert all(a.equal(b) for a, b in zip(first, run(model, cache), strict=True))
