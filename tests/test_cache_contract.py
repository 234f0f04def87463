"""The contract of the cache: whatever happens to it, the logits are those of a recompute.

A cache is compared with the plainest model of one, a list of tokens per row. The same file is
meant for every kind of cache.
"""

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor
from toys import batch, reference_logits, snapshot, text, toy, unchanged

from kvbook.cache import KVCache, KVView
from kvbook.errors import CacheFullError
from kvbook.model.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")
NAN = float("nan")


class Crash(RuntimeError):
    """Something that goes wrong in the middle of a forward pass."""


def crash(model: Transformer, tokens: Tensor, cache: KVCache, counts: list[int]) -> None:
    """A forward pass that fails in the last layer, after its keys were written."""

    def fail(queries: Tensor, view: KVView, scale: float) -> Tensor:
        raise Crash

    attention = model.blocks[-1].attention
    working, attention.attend = attention.attend, fail
    try:
        with pytest.raises(Crash):
            model(tokens, cache, counts=counts)
    finally:
        attention.attend = working


def write_nan(cache: KVCache, counts: list[int], T: int) -> None:
    """A step whose keys and values are not numbers, and its rollback."""
    before = cache.lengths
    cache.reserve(counts, T)
    layers, _, heads, _, D = cache.store.keys.shape
    new = torch.full((len(counts), heads, T, D), NAN, dtype=cache.store.layout.dtype)
    for layer in range(layers):
        cache.update(layer, new, new)
    cache.truncate(before)


# ---- Any chunking


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


ROWS, CAPACITY, VOCAB = 3, 14, 29


class ListOfTokens(RuleBasedStateMachine):
    """A cache and the texts that it should hold, through any order of operations."""

    window: int | None = None

    @initialize()
    def start(self) -> None:
        self.model = toy(window=self.window)
        self.cache = self.model.new_cache(ROWS, CAPACITY)
        self.texts: list[list[int]] = [[] for _ in range(ROWS)]

    def _counts(self, data: st.DataObject, T: int) -> list[int]:
        if data.draw(st.booleans(), label="uniform"):
            return [T] * len(self.texts)
        return data.draw(
            st.lists(st.integers(0, T), min_size=len(self.texts), max_size=len(self.texts)),
            label="counts",
        )

    def _fits(self, counts: list[int]) -> bool:
        ends = [len(one) + count for one, count in zip(self.texts, counts, strict=True)]
        return max(ends) <= CAPACITY

    @rule(data=st.data(), T=st.sampled_from([1, 1, 2, 3, 5]), seed=st.integers(0, 999))
    def forward(self, data: st.DataObject, T: int, seed: int) -> None:
        counts, tokens = self._counts(data, T), batch(len(self.texts), T, seed)
        if not self._fits(counts):
            with pytest.raises(CacheFullError):
                self.model(tokens, self.cache, counts=counts)
            return
        logits = self.model(tokens, self.cache, counts=counts)
        assert logits.isfinite().all()
        for row, count in enumerate(counts):
            self.texts[row] += tokens[row, T - count :].tolist()
            if count:
                expected = reference_logits(self.model, self.texts[row])[-count:]
                assert (logits[row, T - count :] - expected).abs().max() < 1e-9

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        lengths = [data.draw(st.integers(0, len(one))) for one in self.texts]
        self.cache.truncate(lengths)
        self.texts = [one[:n] for one, n in zip(self.texts, lengths, strict=True)]

    @rule(data=st.data())
    def truncate_all(self, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, min(map(len, self.texts))))
        self.cache.truncate(length)
        self.texts = [one[:length] for one in self.texts]

    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        row = st.integers(0, len(self.texts) - 1)
        rows = data.draw(st.lists(row, min_size=1, max_size=ROWS), label="rows")
        self.cache.select(rows)
        self.texts = [list(self.texts[r]) for r in rows]

    @precondition(lambda self: any(self.texts))
    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.texts = [[] for _ in range(ROWS)]

    @rule(value=st.sampled_from([NAN, 1e10]))
    def poison(self, value: float) -> None:
        self.cache.fill_unused(value)

    @rule(data=st.data(), T=st.integers(1, 4))
    def not_numbers_rolled_back(self, data: st.DataObject, T: int) -> None:
        counts = self._counts(data, T)
        if self._fits(counts):
            write_nan(self.cache, counts, T)

    @rule(data=st.data(), T=st.integers(1, 4))
    def fail_midway(self, data: st.DataObject, T: int) -> None:
        counts, before = self._counts(data, T), self.cache.lengths
        if self._fits(counts):
            crash(self.model, batch(len(self.texts), T, 7), self.cache, counts)
            self.cache.truncate(before)

    @invariant()
    def lengths_agree(self) -> None:
        lengths = tuple(len(one) for one in self.texts)
        assert self.cache.lengths == lengths
        assert self.cache.used_bytes == sum(lengths) * 384
        assert self.cache.allocated_bytes == ROWS * CAPACITY * 384


class ListOfTokensWindow(ListOfTokens):
    window = 3


TestListOfTokens = ListOfTokens.TestCase
TestListOfTokensWindow = ListOfTokensWindow.TestCase
TestListOfTokens.settings = settings(max_examples=120, stateful_step_count=14)
TestListOfTokensWindow.settings = settings(max_examples=60, stateful_step_count=14)


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
    assert (cache.store.keys == 1e10).sum() == free * 24
    assert (cache.store.values == 1e10).sum() == free * 24
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
    assert cache.store.keys.sum() == cache.store.values.sum() == 4 * 24


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
    with suppress(Crash):
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
        assert storage(view.keys) == storage(cache.store.keys)
        assert storage(view.values) == storage(cache.store.values)
        assert view.keys.data_ptr() == cache.store.keys[layer].data_ptr()
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
