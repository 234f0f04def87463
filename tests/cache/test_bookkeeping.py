"""Lengths, rollback, reset, reordering and sizes: what the cache promises beside the numbers."""

import pytest
import torch
from oracles.cache_kinds import PLACEMENTS, STORES, TOGETHER, WINDOWS, fits
from oracles.toys import batch, reference_logits, snapshot, text, toy, unchanged
from torch import Tensor

from kvbook.cache import CacheGroup, Contiguous, DenseStore, KVCache, LayerKind
from kvbook.errors import CacheFullError
from kvbook.model.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")


def constant_cache(rows: list[float], capacity: int, n: int, spare: int = 0) -> KVCache:
    """Three layers; every key of row b in layer l is ``rows[b] + 100 l``, every value minus it."""
    store = DenseStore(LayerKind(2, 4, 5, torch.float64), 3, len(rows) + spare, capacity)
    cache = KVCache(CacheGroup(Contiguous(len(rows) + spare, capacity), store))
    if spare:
        cache.select(range(len(rows)))
    append_constants(cache, rows, n)
    return cache


def append_constants(cache: KVCache, rows: list[float], n: int) -> None:
    cache.reserve([n] * len(rows), n)
    for layer in range(3):
        row = torch.tensor(rows, dtype=torch.float64)[:, None, None, None] + 100 * layer
        cache.update(layer, row.expand(-1, 2, n, 4), -row.expand(-1, 2, n, 5))


def constants(cache: KVCache, layer: int) -> list[list[float]]:
    """Per row, the distinct keys that a layer holds; values must be minus the keys."""
    result = []
    for row in range(len(cache.lengths)):
        keys, values = cache.entries(layer, row)
        assert keys.unique().tolist() == sorted((-values).unique().tolist())
        result.append(keys.unique().tolist())
    return result


def logits_of_last(model: Transformer, cache: KVCache, tokens: list[int]) -> Tensor:
    return model(torch.tensor([tokens]), cache, last_only=True)[0, 0]


# ---- Lengths


def test_length_is_what_was_appended_and_capacity_is_not() -> None:
    """nicedreamzapp/claude-code-local#47: an allocation step of 256 was read as the length."""
    cache = constant_cache([1.0], 512, 1)
    for _ in range(299):
        append_constants(cache, [1.0], 1)
    assert cache.lengths == (300,)
    assert cache.capacity == 512


def test_a_forward_adds_its_tokens_once() -> None:
    """ml-explore/mlx-swift-lm#457: L tokens and one step left 2 L + 1."""
    model = toy(n_layers=3)
    cache = model.new_cache(2, 16)
    model(batch(2, 7), cache)
    model(batch(2, 1), cache)
    assert cache.lengths == (8, 8)
    for layer in range(3):
        keys, values = cache.entries(layer, 1)
        assert keys.shape[1] == values.shape[1] == 8


@pytest.mark.parametrize(("placed", "stored"), TOGETHER)
def test_updating_a_layer_twice_is_refused(placed: str, stored: str) -> None:
    """ml-explore/mlx-swift-lm#457: the layer was updated twice in one forward pass."""
    model = toy(n_layers=3, **WINDOWS["2 and 2 sinks"])
    if not fits(PLACEMENTS[placed], STORES[stored], model):
        model = toy(n_layers=3, **WINDOWS["3 and 2 sinks"])
    caches = [PLACEMENTS[placed].new(model, 2, 24, STORES[stored]) for _ in range(2)]
    new = torch.randn(2, 2, 7, 6, dtype=torch.float64)
    for cache in caches:
        model(batch(2, 3), cache)
        cache.reserve([7, 7], 7)
        cache.update(0, new, new)
        cache.update(1, new, new)
    before = snapshot(caches[0])
    with pytest.raises(ValueError, match=r"second time.*reserve\(\) once per forward pass"):
        caches[0].update(1, new, new)
    assert unchanged(caches[0], before)
    for cache in caches:
        cache.update(2, new, new)
    assert model(batch(2, 1), caches[0]).equal(model(batch(2, 1), caches[1]))


def test_ragged_rows_have_their_own_lengths() -> None:
    model = toy()
    cache = model.new_cache(3, 16)
    model(batch(3, 5), cache, counts=[3, 5, 0])
    assert cache.lengths == (3, 5, 0)
    model(batch(3, 2), cache, counts=[2, 0, 1])
    assert cache.lengths == (5, 5, 1)


def test_update_needs_a_reservation() -> None:
    cache = toy().new_cache(1, 8)
    new = torch.zeros(1, 2, 1, 6, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"reserve\(\) once per forward pass"):
        cache.update(0, new, new)
    cache.reserve([1], 1)
    cache.update(0, new, new)
    cache.truncate(0)
    with pytest.raises(ValueError, match=r"reserve\(\) once per forward pass"):
        cache.update(0, new, new)


# ---- Rollback


@pytest.mark.parametrize("wanted", [-5, 11, -1])
def test_truncating_to_an_impossible_length_is_refused(wanted: int) -> None:
    """ml-explore/mlx-lm#1868: trimming by -5 grew a cache of 10 to 15."""
    cache = constant_cache([1.0], 16, 10)
    before = snapshot(cache)
    with pytest.raises(ValueError, match=rf"from 0 to the present one, got \[{wanted}\].*\[10\]"):
        cache.truncate(wanted)
    assert unchanged(cache, before)


@pytest.mark.parametrize("wanted", [[3], [3, 3, 3], [3, 6], [-1, 3], [2.0, 2.0]])
def test_truncating_takes_one_possible_length_per_row(wanted: list[int]) -> None:
    cache = constant_cache([1.0, 2.0], 16, 5)
    before = snapshot(cache)
    with pytest.raises(ValueError, match="one length per row"):
        cache.truncate(wanted)
    assert unchanged(cache, before)


def test_rollback_keeps_storage_address_and_capacity() -> None:
    """huggingface/transformers#30312: a static cache was replaced by shorter tensors."""
    model, tokens = toy(), text(12)
    cache = model.new_cache(1, 16)
    model(torch.tensor([tokens[:10]]), cache)
    keys, values = cache.groups[0].store.keys, cache.groups[0].store.values
    addresses = keys.data_ptr(), values.data_ptr()
    shapes, size = (keys.shape, values.shape), cache.allocated_bytes
    cache.truncate(6)
    assert cache.lengths == (6,)
    assert cache.capacity == 16
    assert cache.allocated_bytes == size
    model(torch.tensor([[1]]), cache)
    keys, values = cache.groups[0].store.keys, cache.groups[0].store.values
    assert (keys.data_ptr(), values.data_ptr()) == addresses
    assert (keys.shape, values.shape) == shapes


@pytest.mark.parametrize(("placed", "stored"), TOGETHER)
def test_every_storage_stays_where_it_is(placed: str, stored: str) -> None:
    """huggingface/transformers#30312, for rollback, reset and reordering of every kind."""
    model = toy(**WINDOWS["2 and 2 sinks"])
    if not fits(PLACEMENTS[placed], STORES[stored], model):
        model = toy(**WINDOWS["3 and 2 sinks"])
    cache = PLACEMENTS[placed].new(model, 3, 24, STORES[stored])

    def places() -> list[tuple[int, torch.Size]]:
        return [(x.data_ptr(), x.shape) for x in cache.tensors]

    before, size, capacity = places(), cache.allocated_bytes, cache.capacity
    assert size == sum(x.untyped_storage().nbytes() for x in cache.tensors)
    for operation in (
        lambda: model(batch(3, 12), cache),
        lambda: model(batch(3, 1), cache),
        lambda: cache.truncate(12),
        lambda: model(batch(3, 2), cache, counts=[2, 0, 1]),
        lambda: cache.select([2, 0, 0]),
        lambda: model(batch(3, 3), cache),
        lambda: cache.select([1]),
        lambda: cache.fill_unused(1e10),
        lambda: cache.reset(),
        lambda: model(batch(3, 5), cache),
    ):
        operation()
        assert places() == before
        assert (cache.allocated_bytes, cache.capacity) == (size, capacity)


@pytest.mark.parametrize("poison", [1e10, float("nan")])
@pytest.mark.parametrize("T", [1, 3])
def test_a_rejected_tail_does_not_matter(poison: float, T: int) -> None:
    """huggingface/transformers#30312, the kind: what lies behind the length after a rollback."""
    model, tokens = toy(), text(12)
    results = []
    for value in (0.0, poison):
        cache = model.new_cache(1, 16)
        model(torch.tensor([tokens[:10]]), cache)
        cache.truncate(6)
        cache.fill_unused(value)
        results.append(model(torch.tensor([tokens[6 : 6 + T]]), cache)[0])
    assert results[0].equal(results[1])
    assert (results[0] - reference_logits(model, tokens)[6 : 6 + T]).abs().max() < 1e-9


@pytest.mark.parametrize("kept", range(5))
def test_after_rejected_drafts_all_is_as_if_they_had_not_been(kept: int) -> None:
    """paiml/aprender#2014: the cache was reset to 0 instead of rolled back to the snapshot.

    Four drafts are read, ``kept`` of them stay; ``kept = 0`` is the fully rejected round.
    """
    model, tokens, drafts = toy(), text(7), text(4, seed=9)
    plain, speculated = model.new_cache(1, 16), model.new_cache(1, 16)
    model(torch.tensor([tokens]), plain)
    for token in drafts[:kept]:
        model(torch.tensor([[token]]), plain)
    model(torch.tensor([tokens]), speculated)
    model(torch.tensor([drafts]), speculated)
    speculated.truncate(7 + kept)
    assert speculated.lengths == plain.lengths == (7 + kept,)
    step = logits_of_last(model, speculated, [3])
    assert (step - logits_of_last(model, plain, [3])).abs().max() < 1e-12
    expected = reference_logits(model, [*tokens, *drafts[:kept], 3])[-1]
    assert (step - expected).abs().max() < 1e-9


def test_rows_roll_back_to_lengths_of_their_own() -> None:
    model, texts = toy(), [text(9, seed=s) for s in (1, 2, 3)]
    cache = model.new_cache(3, 16)
    model(torch.tensor([one[:6] for one in texts]), cache)
    cache.truncate([2, 6, 0])
    assert cache.lengths == (2, 6, 0)
    tokens = torch.tensor([texts[0][2:4], texts[1][6:8], texts[2][0:2]])
    logits = model(tokens, cache)
    for row, end in enumerate([4, 8, 2]):
        expected = reference_logits(model, texts[row][:end])[-2:]
        assert (logits[row] - expected).abs().max() < 1e-9


# ---- Reset


@pytest.mark.parametrize("window", [None, 3, 99])
def test_a_second_use_after_reset_is_as_the_first(window: int | None) -> None:
    """rasbt/LLMs-from-scratch#925: the write pointer and the position survived the reset."""
    model, tokens = toy(window=window), torch.tensor([text(6), text(6, seed=1)])
    cache = model.new_cache(2, 9)
    first = [model(tokens, cache), model(tokens[:, :2], cache), model(tokens[:, :1], cache)]
    cache.reset()
    assert cache.lengths == (0, 0)
    assert cache.used_bytes == 0
    second = [model(tokens, cache), model(tokens[:, :2], cache), model(tokens[:, :1], cache)]
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))


def test_reset_makes_all_rows_active_again() -> None:
    cache = constant_cache([1.0, 2.0, 3.0], 8, 2)
    cache.select([1])
    cache.reset()
    assert cache.lengths == (0, 0, 0)
    append_constants(cache, [5.0, 6.0, 7.0], 2)
    assert constants(cache, 0) == [[5.0], [6.0], [7.0]]


# ---- Reordering, dropping and forking rows


@pytest.mark.parametrize("rows", [[2, 0, 0], [0, 1, 2], [1, 2, 0], [2, 2, 2]])
def test_rows_are_reordered_in_every_layer_in_keys_and_values(rows: list[int]) -> None:
    """huggingface/transformers#46612, PaddlePaddle/PaddleNLP#6672: beams kept others' state."""
    cache = constant_cache([10.0, 20.0, 30.0], 8, 4)
    cache.select(rows)
    for layer in range(3):
        expected = [[10.0 * (row + 1) + 100 * layer] for row in rows]
        assert constants(cache, layer) == expected
    assert cache.lengths == (4, 4, 4)


@pytest.mark.parametrize(("placed", "stored"), TOGETHER)
@pytest.mark.parametrize("rows", [[2, 0, 0], [1, 2, 0], [1], [2, 0, 2]], ids=str)
def test_rows_are_reordered_in_every_placement_and_store(
    placed: str, stored: str, rows: list[int]
) -> None:
    """huggingface/transformers#46612: reordering looked up one attribute name and skipped others.

    All vectors of a row are one constant, which every store gives back exactly, and the rows
    have different lengths. Row i is then the row of that constant in every layer, goes on with
    a constant of its own, and leaves its siblings alone.
    """
    model = toy(n_layers=3, **WINDOWS["2 and 2 sinks"])
    if not fits(PLACEMENTS[placed], STORES[stored], model):
        model = toy(n_layers=3, **WINDOWS["3 and 2 sinks"])
    cache = PLACEMENTS[placed].new(model, 3, 24, STORES[stored])

    def append_rows(constants: list[float], counts: list[int]) -> None:
        cache.reserve(counts, max(counts))
        for layer in range(3):
            row = (layer + 1) * torch.tensor(constants, dtype=torch.float64)[:, None, None, None]
            new = row.expand(-1, 2, max(counts), 6)
            cache.update(layer, new, -new)

    def found(row: int, layer: int) -> list[float]:
        keys, values = cache.entries(layer, row)
        assert keys.equal(-values)
        assert keys.amin((0, 2)).equal(keys.amax((0, 2)))
        return keys[0, :, 0].unique().tolist()

    append_rows([1.0, 4.0, -2.0], [9, 5, 8])
    cache.select(rows)
    assert cache.lengths == tuple([9, 5, 8][r] for r in rows)
    for layer in range(3):
        expected = [[(layer + 1) * [1.0, 4.0, -2.0][r]] for r in rows]
        assert [found(row, layer) for row in range(len(rows))] == expected
    new = [8.0, 16.0, 32.0][: len(rows)]
    append_rows(new, [1] * len(rows))
    if STORES[stored].tile == 1:  # else the new token may share a tile with the old ones
        for row, r in enumerate(rows):
            old = [1.0, 4.0, -2.0][r]
            assert found(row, 2) == sorted({3 * old, 3 * new[row]})


def test_beams_go_on_from_the_row_they_were_copied_from() -> None:
    """huggingface/transformers#46612, through the model."""
    model, texts = toy(), [text(5, seed=s) for s in (1, 2, 3)]
    cache = model.new_cache(3, 9)
    model(torch.tensor(texts), cache)
    cache.select([2, 0, 0])
    logits = model(torch.tensor([[4], [5], [6]]), cache)[:, 0]
    for row, (source, token) in enumerate([(2, 4), (0, 5), (0, 6)]):
        expected = reference_logits(model, [*texts[source], token])[-1]
        assert (logits[row] - expected).abs().max() < 1e-9


def test_selecting_carries_each_row_s_length() -> None:
    model, texts = toy(), [text(2, seed=1), text(5, seed=2)]
    cache = model.new_cache(3, 9)
    cache.select([0, 1])
    model(torch.tensor([[0, 0, 0, *texts[0]], texts[1]]), cache, counts=[2, 5])
    cache.select([1, 0, 1])
    assert cache.lengths == (5, 2, 5)
    logits = model(torch.tensor([[4], [5], [6]]), cache)[:, 0]
    for row, (source, token) in enumerate([(1, 4), (0, 5), (1, 6)]):
        expected = reference_logits(model, [*texts[source], token])[-1]
        assert (logits[row] - expected).abs().max() < 1e-9


def test_a_fork_does_not_touch_its_sibling() -> None:
    cache = constant_cache([1.0], 8, 2, spare=1)
    cache.select([0, 0])
    append_constants(cache, [7.0, 8.0], 1)
    assert constants(cache, 2) == [[201.0, 207.0], [201.0, 208.0]]


def test_rows_can_be_dropped_and_grown_again() -> None:
    cache = constant_cache([1.0, 2.0, 3.0], 8, 4)
    cache.select([2])
    assert cache.lengths == (4,)
    assert constants(cache, 1) == [[103.0]]
    cache.select([0, 0, 0])
    assert constants(cache, 1) == [[103.0], [103.0], [103.0]]


@pytest.mark.parametrize("rows", [[], [3], [-1], [0, 1.0], [0, 5]])
def test_selecting_an_unknown_row_is_refused(rows: list[int]) -> None:
    cache = constant_cache([1.0, 2.0, 3.0], 8, 4)
    before = snapshot(cache)
    with pytest.raises(ValueError, match="active rows from 0 to 2, got"):
        cache.select(rows)
    assert unchanged(cache, before)


def test_selecting_a_dropped_row_is_refused() -> None:
    cache = constant_cache([1.0, 2.0, 3.0], 8, 4)
    cache.select([0])
    with pytest.raises(ValueError, match=r"active rows from 0 to 0, got \[1\]"):
        cache.select([1])


def test_selecting_more_rows_than_there_are_is_refused() -> None:
    cache = constant_cache([1.0, 2.0], 8, 4)
    before = snapshot(cache)
    with pytest.raises(CacheFullError, match=r"given 3 rows.*has 2; make a cache with a larger"):
        cache.select([0, 1, 0])
    assert unchanged(cache, before)


# ---- Sizes


def test_bytes_are_two_tensors_of_layers_rows_heads_slots_width() -> None:
    """2 layers, 3 rows, 2 heads, 10 slots, width 6, K and V, 8 bytes: 11,520."""
    cache = toy().new_cache(3, 10)
    assert cache.allocated_bytes == 11_520
    assert cache.used_bytes == 0


def test_used_bytes_follow_the_tokens() -> None:
    """One token takes 2 layers · 2 heads · 6 · 2 · 8 bytes = 384."""
    model = toy()
    cache = model.new_cache(3, 10)
    model(batch(3, 5), cache, counts=[3, 5, 0])
    assert cache.used_bytes == 8 * 384
    cache.truncate([1, 5, 0])
    assert cache.used_bytes == 6 * 384
    cache.select([1, 1])
    assert cache.used_bytes == 10 * 384
    assert cache.allocated_bytes == 11_520


@pytest.mark.parametrize(
    ("dtype", "allocated", "used"),
    [(torch.float64, 11_520, 1_536), (torch.float32, 5_760, 768), (torch.bfloat16, 2_880, 384)],
)
def test_a_smaller_element_is_a_smaller_cache(
    dtype: torch.dtype, allocated: int, used: int
) -> None:
    """abetlen/llama-cpp-python#66: 4 bytes by default where the core program used 2."""
    model = toy(dtype)
    cache = model.new_cache(3, 10)
    model(batch(3, 2), cache, counts=[2, 2, 0])
    assert cache.groups[0].store.keys.dtype == cache.groups[0].store.values.dtype == dtype
    assert (cache.allocated_bytes, cache.used_bytes) == (allocated, used)


@pytest.mark.parametrize(("dtype", "mib"), [(torch.bfloat16, 780), (torch.float32, 1_560)])
def test_a_published_size(dtype: torch.dtype, mib: int) -> None:
    """abetlen/llama-cpp-python#66: 60 layers of width 6,656 at 512 tokens."""
    store = DenseStore(LayerKind(52, 128, 128, dtype), 60, 1, 512, "meta")
    assert store.allocated_bytes == mib * 1_048_576


def test_keys_and_values_may_differ_in_width() -> None:
    """2 layers · 1 row · 3 heads · 4 slots · (5 + 7) · 4 bytes = 1,152, a slot 288."""
    store = DenseStore(LayerKind(3, 5, 7), 2, 1, 4)
    cache = KVCache(CacheGroup(Contiguous(1, 4), store))
    assert cache.allocated_bytes == 1_152
    cache.reserve([1], 1)
    assert cache.used_bytes == 288


@pytest.mark.parametrize("wrong", [2.5, None, "3"])
def test_lengths_and_rows_of_another_type_are_refused(wrong: object) -> None:
    cache = toy().new_cache(2, 8)
    for call in (cache.truncate, cache.select):
        with pytest.raises(ValueError, match=f"got {wrong!r}"):
            call(wrong)  # type: ignore[arg-type]


def test_entries_of_an_unknown_row_are_refused() -> None:
    with pytest.raises(ValueError, match="row must be from 0 to 1, got 2"):
        toy().new_cache(2, 8).entries(0, 2)


def test_a_placement_and_a_store_of_other_sizes_are_refused() -> None:
    store = DenseStore(LayerKind(1, 4, 4), 1, 2, 8)
    with pytest.raises(ValueError, match=r"2 rows of 9 slots, the store 2 rows of 8"):
        KVCache(CacheGroup(Contiguous(2, 9), store))
