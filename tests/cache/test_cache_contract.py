"""The contract of the cache: whatever happens to it, the logits are those of a recompute.

How the product of placements, stores, windows, heads, chunkings and raggedness is covered: every
placement × store × window that can be built runs once, and heads × chunking × raggedness rotate
underneath, so that every pair of values of any two of the six occurs
(``test_every_pair_of_two_choices_occurs``). ``test_random_schedules`` adds states and rollbacks,
and the state machines below add any order of operations.
"""

from collections.abc import Callable
from contextlib import suppress
from itertools import combinations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.cache_kinds import (
    HEADS,
    PLACEMENTS,
    STORES,
    TOGETHER,
    WINDOWS,
    fits,
    formulas,
    list_cache,
    model_of,
)
from oracles.toys import batch, reference_logits, snapshot, text, toy, unchanged
from oracles.twins import CrashError, crash
from torch import Tensor

from kvbook.cache import KVCache
from kvbook.errors import CacheFullError
from kvbook.model.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")
NAN = float("nan")


def write_nan(cache: KVCache, counts: list[int], T: int) -> None:
    """A step whose keys and values are not numbers, and its rollback."""
    before = cache.lengths
    cache.reserve(counts, T)
    layers, _, heads, _, D = cache.groups[0].store.keys.shape
    new = torch.full((len(counts), heads, T, D), NAN, dtype=cache.groups[0].kind.dtype)
    for layer in range(layers):
        cache.update(layer, new, new)
    cache.truncate(before)


# ---- Every kind of cache

N = 22  # tokens of the longest row: a ring of 8 is overwritten twice
CHUNKS = {
    "one pass": [22],
    "one by one": [1] * 22,
    "prompt and steps": [9] + [1] * 13,
    "small chunks": [2, 3, 1, 2, 3, 1, 4, 2, 3, 1],
    "large chunks": [5, 1, 9, 7],
}
EVEN = {"even": True, "ragged": False}
AXES = (PLACEMENTS, STORES, WINDOWS, HEADS, CHUNKS, EVEN)
UNDERNEATH = list(product(HEADS, CHUNKS, EVEN))
Case = tuple[str, str, str, str, str, str]


def cases() -> list[Case]:
    tops = [
        (placed, stored, windows)
        for placed, stored, windows in product(PLACEMENTS, STORES, WINDOWS)
        if fits(PLACEMENTS[placed], STORES[stored], model_of("one KV head for all", windows))
    ]
    # 40 combinations underneath, each in turn; the second term keeps them from falling into step
    # with the windows.
    return [(*top, *UNDERNEATH[(7 * i + i // 12) % 40]) for i, top in enumerate(tops)]


CASES = cases()


def test_every_pair_of_two_choices_occurs() -> None:
    """Tiles of two tokens only in rings of an even number of slots, and where a placement takes
    them at all.
    """
    missing = []
    for first, second in combinations(range(6), 2):
        found = {(case[first], case[second]) for case in CASES}
        missing += [pair for pair in product(AXES[first], AXES[second]) if pair not in found]
    assert missing == [pair for pair in product(PLACEMENTS, STORES) if pair not in TOGETHER]


def steps_of(chunks: list[int], even: bool) -> list[list[int]]:
    """New tokens per step of three rows; ragged ones are from none of the chunk to all of it."""
    if even:
        return [[T, T, T] for T in chunks]
    return [[T, (5 * i + 3) % (T + 1), (3 * i + 1) % (T + 1)] for i, T in enumerate(chunks)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " / ".join(case))
def test_logits_are_those_of_a_recompute(case: Case) -> None:
    """Exactly those where a store is exact, and those of round-tripped vectors elsewhere.

    With a tail they depend on which tokens had settled at each step, so the recompute is
    ``ListCache``, which follows the steps; otherwise it is one pass over the formulas.
    """
    placed, stored = PLACEMENTS[case[0]], STORES[case[1]]
    model = model_of(case[3], case[2])
    steps = steps_of(CHUNKS[case[4]], EVEN[case[5]])
    texts = [text(N, seed=row) for row in range(3)]
    cache, lists = placed.new(model, 3, N, stored), list_cache(placed, stored, model, 3)
    follows_steps = not stored.is_exact and stored.tail + stored.tile > 1
    done = [0, 0, 0]
    for counts in steps:
        T = max(counts)
        tokens = torch.zeros(3, T, dtype=torch.long)
        for row, (n, count) in enumerate(zip(done, counts, strict=True)):
            tokens[row, T - count :] = torch.tensor(texts[row][n : n + count])
        logits = model(tokens, cache, counts=counts)
        in_steps = model(tokens, lists, counts=counts) if follows_steps else None
        for row, (n, count) in enumerate(zip(done, counts, strict=True)):
            if in_steps is None:
                expected = formulas(model, tuple(texts[row]), stored.keys)[n : n + count]
            else:
                expected = in_steps[row, T - count :]
            off = (logits[row, T - count :] - expected).abs()
            assert not count or off.max() < 1e-9, (row, n, counts)
        done = [n + count for n, count in zip(done, counts, strict=True)]
    assert cache.lengths == tuple(done)


def test_round_trips_change_the_logits() -> None:
    """So that the test above shows something: no store passes for another."""
    model, tokens = toy(), tuple(text(N))
    trips = [STORES[name].keys for name in ("dense", "int8", "int4", "float8", "float4")]
    for one, other in combinations(trips, 2):
        assert (formulas(model, tokens, one) - formulas(model, tokens, other)).abs().max() > 0.01


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=6),
    st.sampled_from([None, 1, 3, 8]),
    st.integers(0, 3),
)
@settings(max_examples=60)
def test_any_chunking_gives_the_logits_of_one_pass(
    chunks: list[int], window: int | None, spare: int
) -> None:
    n = sum(chunks)
    model, texts = toy(window=window), [text(n, seed=1), text(n, seed=2)]
    cache = model.new_cache(2, n + spare)
    tokens = torch.tensor(texts)
    logits = torch.cat([model(part, cache) for part in tokens.split(chunks, 1)], 1)
    for row in range(2):
        assert (logits[row] - reference_logits(model, texts[row])).abs().max() < 1e-9


# ---- The poison probe: slots that must not matter


def fresh(model: Transformer) -> KVCache:
    return model.new_cache(3, 16)


def even(model: Transformer) -> KVCache:
    cache = fresh(model)
    model(batch(3, 5), cache)
    return cache


def empty_row(model: Transformer) -> KVCache:
    cache = fresh(model)
    model(batch(3, 5), cache, counts=[5, 0, 3])
    return cache


def ragged(model: Transformer) -> KVCache:
    cache = even(model)
    model(batch(3, 4), cache, counts=[1, 4, 2])
    return cache


def truncated(model: Transformer) -> KVCache:
    cache = even(model)
    cache.truncate(2)
    return cache


def truncated_unevenly(model: Transformer) -> KVCache:
    cache = even(model)
    cache.truncate([4, 1, 5])
    return cache


def reordered(model: Transformer) -> KVCache:
    cache = ragged(model)
    cache.select([2, 0, 0])
    return cache


def shrunk(model: Transformer) -> KVCache:
    cache = ragged(model)
    cache.select([1])
    return cache


def grown(model: Transformer) -> KVCache:
    cache = shrunk(model)
    cache.truncate(3)
    cache.select([0, 0, 0])
    cache.truncate([1, 3, 2])
    return cache


def emptied(model: Transformer) -> KVCache:
    cache = ragged(model)
    cache.reset()
    return cache


def failed_midway(model: Transformer) -> KVCache:
    cache = ragged(model)
    lengths = cache.lengths
    crash(model, batch(3, 3, 5), cache, [3, 1, 2])
    cache.truncate(lengths)
    return cache


STATES: list[Callable[[Transformer], KVCache]] = [
    fresh, even, empty_row, ragged, truncated, truncated_unevenly, reordered, shrunk, grown,
    emptied, failed_midway,
]  # fmt: skip
states = pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)


def go_on(model: Transformer, cache: KVCache, shape: str) -> list[Tensor]:
    """Several steps of one shape; the logits of real tokens only."""
    rows = len(cache.lengths)
    counts = {
        "chunk": [[3] * rows],
        "decode": [[1] * rows] * 3,
        "ragged": [[3, 1, 2][:rows], [1, 2, 0][:rows], [1] * rows],
    }[shape]
    result = []
    for seed, step in enumerate(counts):
        T = max(step)
        logits = model(batch(rows, T, seed), cache, counts=step)
        result += [logits[row, T - count :] for row, count in enumerate(step)]
    return result


@states
@pytest.mark.parametrize("shape", ["chunk", "decode", "ragged"])
@pytest.mark.parametrize("window", [None, 3])
def test_slots_without_a_token_do_not_matter(
    state: Callable[[Transformer], KVCache], shape: str, window: int | None
) -> None:
    """Bit for bit the same, whether they hold zeros, 1e10 or NaN."""
    model, results = toy(window=window), []
    for value in (0.0, 1e10, NAN):
        cache = state(model)
        cache.fill_unused(value)
        results.append(go_on(model, cache, shape))
    for poisoned in results[1:]:
        assert all(a.equal(b) for a, b in zip(results[0], poisoned, strict=True))


@states
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nor_in_other_dtypes(
    state: Callable[[Transformer], KVCache], dtype: torch.dtype
) -> None:
    model, results = toy(dtype), []
    for value in (0.0, NAN):
        cache = state(model)
        cache.fill_unused(value)
        results.append(go_on(model, cache, "ragged"))
    assert all(a.equal(b) for a, b in zip(*results, strict=True))


@states
def test_poison_reaches_every_slot_without_a_token_and_no_other(
    state: Callable[[Transformer], KVCache],
) -> None:
    """Otherwise the test above would show nothing."""
    cache = state(toy())
    held = [cache.entries(layer, row) for layer in range(2) for row in range(len(cache.lengths))]
    copies = [(keys.clone(), values.clone()) for keys, values in held]
    cache.fill_unused(1e10)
    free = 3 * 16 - sum(cache.lengths)
    assert (cache.groups[0].store.keys == 1e10).sum() == free * 24
    assert (cache.groups[0].store.values == 1e10).sum() == free * 24
    for (keys, values), (old_keys, old_values) in zip(held, copies, strict=True):
        assert keys.equal(old_keys)
        assert values.equal(old_values)


@states
@pytest.mark.parametrize("counts", [[2, 2, 2], [2, 0, 1]], ids=["uniform", "ragged"])
def test_not_numbers_that_were_rolled_back_do_not_matter(
    state: Callable[[Transformer], KVCache], counts: list[int]
) -> None:
    """A real step left them, not ``fill_unused``: the cache must know where it has written."""
    model, results = toy(), []
    for spoiled in (False, True):
        cache = state(model)
        if spoiled:
            write_nan(cache, counts[: len(cache.lengths)], 2)
        results.append(go_on(model, cache, "ragged"))
    assert all(a.equal(b) for a, b in zip(*results, strict=True))


def test_not_numbers_do_not_travel_with_a_copied_row() -> None:
    """A short row copied beside a long one brings along what lay behind its end."""
    model = toy()
    cache = model.new_cache(3, 16)
    cache.select([0, 1])
    model(batch(2, 2), cache)
    write_nan(cache, [4, 0], 4)
    model(batch(2, 4), cache, counts=[0, 4])
    write_nan(cache, [3, 0], 3)
    cache.select([1, 0, 0])
    logits = model(batch(3, 2), cache, counts=[2, 1, 2])
    assert logits.isfinite().all()


def test_padding_is_not_stored() -> None:
    cache = toy().new_cache(2, 8)
    cache.reserve([1, 3], 3)
    new = torch.ones(2, 2, 3, 6, dtype=torch.float64)
    new[0, :, :2] = NAN
    for layer in range(2):
        view = cache.update(layer, new, new)
        assert view.keys.isfinite().all()
        assert view.values.isfinite().all()
    assert cache.groups[0].store.keys.sum() == cache.groups[0].store.values.sum() == 4 * 24


# ---- Errors leave everything as it was


@states
def test_a_full_cache_is_left_as_it_was(state: Callable[[Transformer], KVCache]) -> None:
    model = toy()
    cache, untouched = state(model), state(model)
    before = snapshot(cache)
    rows, longest = len(cache.lengths), max(cache.lengths)
    with pytest.raises(CacheFullError, match=r"row \d would hold 17 tokens.*has 16 slots per row"):
        model(batch(rows, 17 - longest), cache)
    assert unchanged(cache, before)
    after = go_on(model, cache, "ragged")
    assert all(a.equal(b) for a, b in zip(after, go_on(model, untouched, "ragged"), strict=True))


def test_one_row_without_room_stops_them_all() -> None:
    model = toy()
    cache = model.new_cache(2, 8)
    model(batch(2, 7), cache, counts=[2, 7])
    before = snapshot(cache)
    with pytest.raises(CacheFullError, match=r"row 1 would hold 9 tokens, but the cache has 8"):
        model(batch(2, 2), cache)
    assert unchanged(cache, before)
    model(batch(2, 6), cache, counts=[6, 1])
    assert cache.lengths == (8, 8)


@pytest.mark.parametrize("counts", [[3, 3], [3, 1]], ids=["uniform", "ragged"])
def test_a_forward_that_fails_midway_is_undone_by_truncate(counts: list[int]) -> None:
    model = toy()
    failed, untouched = model.new_cache(2, 12), model.new_cache(2, 12)
    for cache in (failed, untouched):
        model(batch(2, 4), cache, counts=[2, 4])
    crash(model, batch(2, 3, 5), failed, counts)
    failed.truncate([2, 4])
    for step in ([1, 0], [2, 3], [1, 1]):
        tokens = batch(2, max(step))
        a, b = model(tokens, failed, counts=step), model(tokens, untouched, counts=step)
        assert a.equal(b)


def test_a_crash_without_truncate_is_visible() -> None:
    """So that the test above cannot pass by luck: the lengths were settled before the layers."""
    model = toy()
    cache = model.new_cache(2, 12)
    with suppress(CrashError):
        crash(model, batch(2, 3), cache, [3, 3])
    assert cache.lengths == (3, 3)


# ---- What a layer reads


def storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


@pytest.mark.parametrize("T", [1, 3])
def test_reads_are_views_of_the_storage(T: int) -> None:
    """No key is copied to be read."""
    model = toy()
    cache = model.new_cache(2, 16)
    model(batch(2, 5), cache)
    cache.reserve([T, T], T)
    new = torch.ones(2, 2, T, 6, dtype=torch.float64)
    for layer in range(2):
        view = cache.update(layer, new, new)
        assert storage(view.keys) == storage(cache.groups[0].store.keys)
        assert storage(view.values) == storage(cache.groups[0].store.values)
        assert view.keys.data_ptr() == cache.groups[0].store.keys[layer].data_ptr()
        assert view.keys.shape == (2, 2, 5 + T, 6)


def test_new_keys_are_in_the_view_that_reads_them() -> None:
    """A token sees itself: layer, head, row and slot of every key, in order."""
    cache = toy().new_cache(2, 8)
    written = torch.randn(2, 2, 6, 6, dtype=torch.float64)
    for start, T in ((0, 3), (3, 1), (4, 2)):
        cache.reserve([T, T], T)
        new = written[:, :, start : start + T]
        for layer in range(2):
            view = cache.update(layer, new + layer, new - layer)
            assert view.keys.equal(written[:, :, : start + T] + layer)
            assert view.values.equal(written[:, :, : start + T] - layer)
            keys, values = cache.entries(layer, 1)
            assert keys.equal(written[1, :, : start + T] + layer)
            assert values.equal(written[1, :, : start + T] - layer)


def test_ragged_keys_land_at_their_positions() -> None:
    cache = toy().new_cache(2, 8)
    written = torch.randn(2, 2, 5, 6, dtype=torch.float64)
    cache.reserve([2, 5], 5)
    view = cache.update(0, written, written)
    assert view.keys[0, :, :2].equal(written[0, :, 3:])
    assert view.keys[1].equal(written[1])
    assert view.positions.tolist() == [[0, 1, -1, -1, -1], [0, 1, 2, 3, 4]]


def test_a_batch_is_its_rows() -> None:
    model, tokens = toy(), batch(4, 6)
    cache = model.new_cache(4, 8)
    together = torch.cat([model(tokens[:, :4], cache), model(tokens[:, 4:], cache)], 1)
    for row in range(4):
        expected = reference_logits(model, tokens[row].tolist())
        assert (together[row] - expected).abs().max() < 1e-9


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4), (torch.bfloat16, 0.25)]
)
def test_every_dtype_stays_as_near_to_the_exact_logits_as_a_recompute(
    dtype: torch.dtype, tolerance: float
) -> None:
    """huggingface/transformers#25420: in 16 bits the two differ by rounding, so both are compared
    with the exact logits of the same weights."""
    model, tokens = toy(dtype), text(12)
    exact = reference_logits(model, tokens)
    cache = model.new_cache(1, 12)
    parts = [model(part, cache)[0] for part in torch.tensor([tokens]).split([5, 1, 1, 3, 2], 1)]
    cached, recomputed = torch.cat(parts), model(torch.tensor([tokens]))[0]
    assert cached.dtype == recomputed.dtype == dtype
    assert (cached.double() - exact).abs().max() < tolerance
    assert (recomputed.double() - exact).abs().max() < tolerance
