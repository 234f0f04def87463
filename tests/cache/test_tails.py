"""Tails: the newest tokens as they are, older ones in code, a tile at a time."""

import pytest
import torch
from oracles.cache_kinds import (
    PLACEMENTS,
    STORES,
    WINDOWS,
    Stored,
    fits,
    int4,
    int8_per_channel,
    list_cache,
)
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
from oracles.twins import Twins, crash

from kvbook.cache import (
    CacheGroup,
    Contiguous,
    DenseStore,
    KVCache,
    LayerKind,
    Ring,
    TailedGroup,
)
from kvbook.cache.codec import FLOAT4, FLOAT8, INT4, INT8
from kvbook.cache.coded import quantized
from kvbook.cache.store import NewStore

pytestmark = pytest.mark.usefixtures("one_thread")
IN_THREES = quantized(INT4.grouped(3))
IN_TILES = quantized(INT8.per_channel(4))
KIND = LayerKind(2, 6, 6, torch.float64)


def tailed(make: NewStore, tail: int, slots: int = 16, rows: int = 1) -> KVCache:
    """One layer, two KV heads of width 6."""
    store = make(KIND, 1, rows, slots)
    return KVCache(TailedGroup(Contiguous(rows, slots), store, tail))


def settled(cache: KVCache) -> list[int]:
    group = cache.groups[0]
    assert isinstance(group, TailedGroup)
    return group.settled


def append(cache: KVCache, new: torch.Tensor) -> torch.Tensor:
    """Keys (B, 2, T, 6), values minus them; the keys that the step reads."""
    B, _, T, _ = new.shape
    cache.reserve([T] * B, T)
    view = cache.update(0, new, -new)
    assert view.values.shape == view.keys.shape
    return view.keys


# ---- When a token settles


@pytest.mark.parametrize(
    ("tail", "tile", "expected"),
    [
        (3, 1, [0, 0, 0, 1, 2, 3, 4, 5, 6]),
        (1, 1, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (0, 4, [0, 0, 0, 4, 4, 4, 4, 8, 8]),
        (3, 4, [0, 0, 0, 0, 0, 0, 4, 4, 4]),
        (5, 4, [0, 0, 0, 0, 0, 0, 0, 0, 4]),
        (1, 2, [0, 0, 2, 2, 4, 4, 6, 6, 8]),
    ],
)
def test_the_oldest_beyond_the_tail_settle_in_whole_tiles(
    tail: int, tile: int, expected: list[int]
) -> None:
    """Tokens settled after 1, 2, … 9 tokens, one by one and in one pass."""
    make = DenseStore if tile == 1 else quantized(INT8.per_channel(tile))
    cache = tailed(make, tail)
    for n, after in enumerate(expected):
        append(cache, torch.randn(1, 2, 1, 6, dtype=torch.float64))
        assert settled(cache) == [after], n + 1
        whole = tailed(make, tail)
        append(whole, torch.randn(1, 2, n + 1, 6, dtype=torch.float64))
        assert settled(whole) == [after], n + 1


def test_a_step_reads_settled_tokens_in_code_and_the_others_as_they_are() -> None:
    """Tail of 2: of five tokens three have settled, of six four."""
    cache, new = tailed(IN_THREES, 2), torch.randn(1, 2, 6, 6, dtype=torch.float64)
    coded = int4(new[0].transpose(0, 1)).transpose(0, 1)
    first = append(cache, new[:, :, :5])[0]
    assert (first[:, :3] - coded[:, :3]).abs().max() < 1e-12
    assert first[:, 3:].equal(new[0, :, 3:5])
    second = append(cache, new[:, :, 5:])[0]
    assert (second[:, :4] - coded[:, :4]).abs().max() < 1e-12
    assert second[:, 4:].equal(new[0, :, 4:])
    assert (coded - new[0]).abs().max() > 0.01
    keys, values = cache.entries(0)
    assert keys.equal(second)
    of_values = int4(-new[0].transpose(0, 1)).transpose(0, 1)
    assert (values[:, :4] - of_values[:, :4]).abs().max() < 1e-12
    assert values[:, 4:].equal(-new[0, :, 4:])


def test_a_tile_settles_with_one_scale_per_channel() -> None:
    cache, new = tailed(IN_TILES, 1), torch.randn(1, 2, 9, 6, dtype=torch.float64)
    for part in new.split([4, 1, 4], 2):
        read = append(cache, part)[0]
    for start in (0, 4):
        tile = int8_per_channel(new[0, :, start : start + 4].transpose(0, 1)).transpose(0, 1)
        assert (read[:, start : start + 4] - tile).abs().max() < 1e-12
    assert read[:, 8:].equal(new[0, :, 8:])


def test_positions_go_through_settled_tokens_and_tail() -> None:
    cache = tailed(IN_TILES, 1, rows=2)
    cache.reserve([1, 6], 6)
    new = torch.randn(2, 2, 6, 6, dtype=torch.float64)
    view = cache.update(0, new, new)
    # Four slots of code for the longer row alone, then the two tails.
    assert view.positions.tolist() == [[-1, -1, -1, -1, 0, -1], [0, 1, 2, 3, 4, 5]]
    assert view.keys[0, :, 4].equal(new[0, :, 5])


@pytest.mark.parametrize("chunks", [[12], [1] * 12, [5, 1, 6], [2, 7, 3]], ids=str)
@pytest.mark.parametrize("rollback", [None, 1])
def test_windows_and_sinks_pass_through_a_tail(chunks: list[int], rollback: int | None) -> None:
    place = Contiguous(1, 12) if rollback is None else Ring(1, 4, rollback, 2)
    store = DenseStore(LayerKind(2, 12, 12, torch.float64, 4, 2), 1, *place.store_shape)
    cache = KVCache(TailedGroup(place, store, 3))
    found = [one for T in chunks for one in seen(weights_by_position(cache, [T], T, 12)[0])]
    assert found == [{*range(min(2, q + 1)), *range(max(0, q - 3), q + 1)} for q in range(12)]


@pytest.mark.parametrize("tail", [1, 3, 8, 40])
@pytest.mark.parametrize("windows", ["no window", "3 and 2 sinks", "2 local : 1 global"])
@pytest.mark.parametrize("placed", ["contiguous", "ring, 2 back"])
def test_an_exact_store_behind_a_tail_is_exact(tail: int, windows: str, placed: str) -> None:
    model, texts = toy(**WINDOWS[windows]), [text(16, seed=1), text(16, seed=2)]
    cache = PLACEMENTS[placed].new(model, 2, 16, Stored(DenseStore, tail))
    parts = torch.tensor(texts).split([3, 1, 1, 6, 2, 3], 1)
    logits = torch.cat([model(part, cache) for part in parts], 1)
    for row in range(2):
        assert (logits[row] - reference_logits(model, texts[row])).abs().max() < 1e-9


def test_chunking_matters_within_the_error_of_the_code() -> None:
    """Said in the docstring: a chunk's queries see what its step leaves, not what was before."""
    model, tokens = toy(), torch.tensor([text(12)])
    logits = []
    for chunks in ([12], [1] * 12):
        cache = model.new_cache(1, 12, store=IN_THREES, tail=4)
        logits.append(torch.cat([model(part, cache) for part in tokens.split(chunks, 1)], 1))
    assert (logits[0] - logits[1]).abs().max() > 1e-3


# ---- Rollback, failure, reset, reorder


@pytest.mark.parametrize("stored", ["int4, tail of 2", "int8 keys per channel, tail of 3"])
@pytest.mark.parametrize("layer", [0, -1])
@pytest.mark.parametrize("counts", [[1, 1], [2, 0]], ids=["uniform", "ragged"])
def test_a_forward_that_fails_midway_is_undone_by_truncate(
    stored: str, layer: int, counts: list[int]
) -> None:
    """Up to ``tail`` tokens. The layers that the pass did not reach settle the same tokens."""
    model, kind = toy(n_layers=3), STORES[stored]
    twins = Twins(
        model, PLACEMENTS["contiguous"].new(model, 2, 24, kind),
        list_cache(PLACEMENTS["contiguous"], kind, model, 2),
    )  # fmt: skip
    twins.step(batch(2, 7))
    assert twins.fail(batch(2, max(counts), 3), counts, layer)
    twins.check()
    twins.step(batch(2, 1, 4))
    twins.step(batch(2, 5, 5))


def test_a_failed_pass_can_be_followed_by_reset() -> None:
    model = toy()
    cache = model.new_cache(1, 16, store=IN_THREES, tail=2)
    first = model(batch(1, 7), cache)
    crash(model, batch(1, 3), cache, [3], 0)
    cache.reset()
    assert model(batch(1, 7), cache).equal(first)


def test_up_to_the_tail_can_always_be_taken_back() -> None:
    cache = tailed(IN_TILES, 3)
    new = torch.randn(1, 2, 11, 6, dtype=torch.float64)
    append(cache, new)
    assert settled(cache) == [8]
    cache.truncate(8)
    assert settled(cache) == [8]
    assert append(cache, new[:, :, 8:9])[0, :, 8:].equal(new[0, :, 8:9])


def test_going_back_into_a_tile_is_refused_and_changes_nothing() -> None:
    model = toy()
    caches = [model.new_cache(2, 16, store=IN_TILES, tail=3) for _ in range(2)]
    for cache in caches:
        model(batch(2, 9), cache, counts=[9, 5])
    refused, untouched = caches
    before = snapshot(refused)
    for n in (1, 2, 3):
        with pytest.raises(
            ValueError,
            match=rf"row 0 cannot go back to {n} tokens.*up to 4 .*groups of 4; .*longer than 3",
        ):
            refused.truncate([n, 5])
    assert unchanged(refused, before)
    assert settled(refused) == [4, 0]
    assert model(batch(2, 3), refused).equal(model(batch(2, 3), untouched))


def test_going_back_to_a_tile_s_edge_goes_on_in_a_new_tile() -> None:
    cache = tailed(IN_TILES, 1)
    new = torch.randn(1, 2, 9, 6, dtype=torch.float64)
    append(cache, new)
    assert settled(cache) == [8]
    cache.truncate(4)
    assert settled(cache) == [4]
    read = append(cache, new[:, :, :5])[0]
    tile = int8_per_channel(new[0, :, :4].transpose(0, 1)).transpose(0, 1)
    assert (read[:, 4:8] - tile).abs().max() < 1e-12


def test_what_has_settled_stays_in_code_after_a_rollback() -> None:
    cache, new = tailed(IN_THREES, 2), torch.randn(1, 2, 6, 6, dtype=torch.float64)
    coded = int4(new[0].transpose(0, 1)).transpose(0, 1)
    append(cache, new)
    cache.truncate(5)
    assert settled(cache) == [4]
    assert (cache.entries(0)[0][:, :4] - coded[:, :4]).abs().max() < 1e-12
    cache.truncate(2)
    assert settled(cache) == [2]


@pytest.mark.parametrize("stored", ["dense, tail of 3", "int8 keys per channel, tail of 3"])
def test_a_second_use_after_reset_is_as_the_first(stored: str) -> None:
    """rasbt/LLMs-from-scratch#925, the kind: state that survives the reset."""
    model, kind = toy(), STORES[stored]
    cache = model.new_cache(2, 24, store=kind.make, tail=kind.tail)
    runs = []
    for _ in range(2):
        runs.append([model(batch(2, T), cache) for T in (6, 1, 5, 1)])
        cache.reset()
        assert cache.used_bytes == 0
    assert all(a.equal(b) for a, b in zip(*runs, strict=True))


def test_idle_rows_hold_nothing() -> None:
    """Poison must reach what rows held that were dropped, codes and tail."""
    model = toy()
    cache = model.new_cache(3, 16, store=DenseStore, tail=3)
    model(batch(3, 9), cache)
    cache.select([1])
    cache.fill_unused(1e10)
    filled = sum(int((x == 1e10).sum()) for x in cache.tensors)
    # 2 layers, 2 heads, width 6, keys and values: 48 numbers. 16 + 3 slots per row, 9 used.
    assert filled == (3 * (16 + 3) - 9) * 48


# ---- Sizes. A token as it is: 2 layers · 2 heads · (6 + 6) · 8 bytes = 384


def test_bytes_of_codes_and_tail() -> None:
    """int4 in threes: 2 · 2 · (3 bytes of codes + 2 · 2 numbers of 8 bytes) · 2 = 280 a token."""
    model = toy()
    cache = model.new_cache(3, 10, store=IN_THREES, tail=2)
    assert cache.allocated_bytes == 3 * 10 * 280 + 3 * 2 * 384
    model(batch(3, 5), cache, counts=[5, 1, 2])
    assert cache.used_bytes == 3 * 280 + (2 + 1 + 2) * 384
    cache.truncate([4, 1, 0])
    assert cache.used_bytes == 3 * 280 + (1 + 1) * 384
    cache.select([0, 0])
    assert cache.used_bytes == 6 * 280 + 2 * 384
    assert cache.allocated_bytes == 3 * 10 * 280 + 3 * 2 * 384


def test_bytes_of_tiles_in_a_ring() -> None:
    """int8 per 2 tokens and channel: 2 · 2 · 6 · (2 + 8) · 2 = 480 bytes a tile of 2 tokens.

    The ring has 3 - 1 + 2 slots and 2 sinks, the tail 3 + 1 (an unfinished tile).
    """
    model = toy(window=3, sinks=2)
    cache = model.new_cache(2, 40, store=quantized(INT8.per_channel(2)), tail=3, rollback=2)
    assert cache.allocated_bytes == 2 * 3 * 480 + 2 * 4 * 384
    model(batch(2, 14), cache, counts=[14, 4])
    assert settled(cache) == [10, 0]
    assert cache.used_bytes == 3 * 480 + (4 + 4) * 384


def test_bytes_where_no_token_has_a_whole_number_of_them() -> None:
    """One layer, one head, width 5: 4 tokens of 3 bytes and 5 scales of 1 byte are 17 bytes."""
    store = quantized(FLOAT4.per_channel(4))(LayerKind(1, 5, 0), 1, 1, 8)
    cache = KVCache(TailedGroup(Contiguous(1, 8), store, 1))
    cache.reserve([6], 6)
    assert cache.used_bytes == 17 + 2 * 5 * 4


# ---- Bad input


@pytest.mark.parametrize("tail", [-1, 1.5, True, None, "2"])
def test_a_tail_is_a_number_of_tokens(tail: object) -> None:
    store = DenseStore(KIND, 1, 1, 8)
    with pytest.raises(ValueError, match=f"tail must be an integer from 0 on, got {tail!r}"):
        TailedGroup(Contiguous(1, 8), store, tail)  # type: ignore[arg-type]


def test_no_tail_before_single_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tail of 0 tokens.*use CacheGroup"):
        TailedGroup(Contiguous(1, 8), DenseStore(KIND, 1, 1, 8), 0)


def test_tiles_without_a_tail_are_refused() -> None:
    with pytest.raises(ValueError, match=r"writes 4 tokens at a time.*TailedGroup"):
        CacheGroup(Contiguous(1, 8), IN_TILES(KIND, 1, 1, 8))


def test_the_capacity_must_be_whole_tiles() -> None:
    with pytest.raises(ValueError, match=r"groups of 4 tokens.*10 slots.*multiple of 4"):
        toy().new_cache(1, 10, store=IN_TILES, tail=2)
    with pytest.raises(ValueError, match=r"4 tokens together, but a row has 10.*multiple of 4"):
        Contiguous(1, 10).check_write_size(4)


def test_groups_of_channels_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match=r"groups of 4 channels.*width of 6.*from \[1, 2, 3, 6\]"):
        toy().new_cache(1, 8, store=quantized(FLOAT8.grouped(4)))


def test_rings_of_whole_tiles_alone_fit() -> None:
    """What ``cache_kinds.fits`` leaves out of the contract is what is refused here."""
    for placed in PLACEMENTS.values():
        for windows in WINDOWS.values():
            model, kind = toy(**windows), STORES["int4 per channel, no tail"]
            if fits(placed, kind, model):
                placed.new(model, 1, 8, kind)
            else:
                why = "multiple" if placed.takes(kind) else "neighbors stay together"
                with pytest.raises(ValueError, match=why):
                    placed.new(model, 1, 8, kind)
