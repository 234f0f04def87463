"""Attention over one tile at a time: the same numbers, and never more than one tile in hand."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles.cache_kinds import HEADS, STORES
from oracles.toys import batch, text, toy
from torch import Tensor

from kvbook.cache import (
    BlockPool,
    BoundPaged,
    CacheGroup,
    Contiguous,
    DenseStore,
    DirectGroup,
    DirectView,
    KVCache,
    KVView,
    LayerKind,
    Paged,
    PrefixCache,
    SlotMajorStore,
)
from kvbook.cache.build import cache_of
from kvbook.model.attention import attend
from kvbook.model.experiment import attend_with
from kvbook.model.tiles import attend_by_tiles
from kvbook.model.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")
NAN, INF = float("nan"), float("inf")
SIZES = [1, 3, 4, 100]


def close(found: Tensor, expected: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


# ---- On a view with all its tensors


def view_of(S: int, T: int, kind: str, seed: int = 0) -> tuple[Tensor, KVView]:
    """Queries (2, 4, T, 6) of the last T positions, and what they read of S tokens."""
    generator = torch.Generator().manual_seed(seed)
    queries, keys, values = (
        torch.randn(2, heads, n, width, generator=generator, dtype=torch.float64)
        for heads, n, width in ((4, T, 6), (2, S, 6), (2, S, 3))
    )
    positions = torch.arange(S)[None]
    if kind == "everything":
        return queries, KVView(keys, values, positions)
    if kind == "causal":
        return queries, KVView(keys, values, positions, is_causal=True)
    asking = torch.arange(S - T, S)[:, None]
    seen = {
        "offset": positions <= asking,
        "window of 2": (positions <= asking) & (positions > asking - 2),
        "only the first": (positions < 1).expand(T, S),
        "only the last": (positions == S - 1).expand(T, S),
    }[kind]
    mask = seen[None, None]
    if kind == "offset":  # and the rows of the batch differ
        mask = torch.cat([mask, mask & (positions >= 2)])
    return queries, KVView(keys, values, positions, mask)


KINDS = [
    ("everything", 9, 1), ("everything", 9, 3), ("causal", 1, 1), ("causal", 7, 7),
    ("offset", 9, 3), ("window of 2", 9, 4), ("only the first", 9, 2), ("only the last", 9, 2),
]  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("kind", "S", "T"), KINDS)
def test_tiles_give_what_one_look_gives(kind: str, S: int, T: int, size: int) -> None:
    queries, view = view_of(S, T, kind)
    out = attend_by_tiles(size)(queries, view, 0.7)
    assert out.shape == (2, 4, T, 3)
    close(out, attend(queries, view, 0.7))


@pytest.mark.parametrize("size", SIZES)
def test_against_a_sum_over_keys(size: int) -> None:
    """softmax(scale · Q Kᵀ) V written out: query head h reads KV head h // 2."""
    queries, view = view_of(5, 2, "offset")
    out = attend_by_tiles(size)(queries, view, 0.7)
    assert view.mask is not None
    for b, h, t in torch.cartesian_prod(*map(torch.arange, (2, 4, 2))).tolist():
        seen = [s for s in range(5) if view.mask[b, 0, t, s]]
        weights = [(0.7 * queries[b, h, t] @ view.keys[b, h // 2, s]).exp() for s in seen]
        values = [w * view.values[b, h // 2, s] for w, s in zip(weights, seen, strict=True)]
        close(out[b, h, t], torch.stack(values).sum(0) / sum(weights))


@pytest.mark.parametrize("size", SIZES)
def test_a_query_that_sees_nothing_gives_zeros(size: int) -> None:
    queries, view = view_of(9, 3, "offset")
    assert view.mask is not None
    mask = view.mask.clone()
    mask[1] = False
    mask[0, :, 1] = False
    blind = KVView(view.keys, view.values, view.positions, mask)
    out = attend_by_tiles(size)(queries, blind, 1.0)
    assert out[1].eq(0).all()
    assert out[0, :, 1].eq(0).all()
    close(out, attend(queries, blind, 1.0))


def test_nothing_to_read_gives_zeros() -> None:
    queries, view = view_of(9, 2, "everything")
    nothing = KVView(view.keys[:, :, :0], view.values[:, :, :0], view.positions[:, :0])
    out = attend_by_tiles(3)(queries, nothing, 1.0)
    assert out.shape == (2, 4, 2, 3)
    assert out.eq(0).all()


# Scores of one query over six keys. A plain exp() of 1,000 is infinite.
SCORES = {
    "rising": [-1000.0, -500.0, 0.0, 1.0, 500.0, 1000.0],
    "falling": [1000.0, 500.0, 1.0, 0.0, -500.0, -1000.0],
    "all far below zero": [-1001.0, -1000.0, -1002.0, -1000.5, -1003.0, -1000.0],
    "all alike": [0.0] * 6,
    "the largest twice, in two tiles": [700.0, 3.0, -700.0, 3.0, 700.0, 1.0],
    "nearly alike": [1000.0, 1000.0 - 1e-9, 1000.0, 999.0, 1000.0 + 1e-9, 999.5],
    "some are minus infinity": [-INF, -INF, -INF, 2.0, -INF, 3.0],
    "minus infinity last": [2.0, 3.0, -INF, -INF, -INF, -INF],
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SCORES)
def test_scores_of_any_size(name: str, size: int) -> None:
    scores = torch.tensor(SCORES[name], dtype=torch.float64)
    values = torch.randn(6, 3, dtype=torch.float64)
    view = KVView(scores.view(1, 1, 6, 1), values[None, None], torch.arange(6)[None])
    out = attend_by_tiles(size)(torch.ones(1, 1, 1, 1, dtype=torch.float64), view, 1.0)
    close(out[0, 0, 0], scores.softmax(0) @ values)


@pytest.mark.parametrize("size", SIZES)
def test_what_is_masked_has_no_say_in_the_largest_score(size: int) -> None:
    """Were the masked 1,000 taken for the largest, all that is visible would vanish."""
    scores = torch.tensor([1.0, 1000.0, 2.0, 0.0], dtype=torch.float64)
    values = torch.randn(4, 3, dtype=torch.float64)
    mask = torch.tensor([True, False, True, True])
    view = KVView(
        scores.view(1, 1, 4, 1), values[None, None], torch.arange(4)[None], mask[None, None, None]
    )
    out = attend_by_tiles(size)(torch.ones(1, 1, 1, 1, dtype=torch.float64), view, 1.0)
    close(out[0, 0, 0], scores[mask].softmax(0) @ values[mask])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes_stay_what_they_are(dtype: torch.dtype) -> None:
    queries, view = view_of(9, 3, "offset")
    low = KVView(view.keys.to(dtype), view.values.to(dtype), view.positions, view.mask)
    out = attend_by_tiles(4)(queries.to(dtype), low, 0.7)
    assert out.dtype == dtype
    close(out.double(), attend(queries, view, 0.7), atol=20 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("size", [0, -1, 2.0, True, None])
def test_a_tile_has_a_positive_number_of_keys(size: Any) -> None:
    with pytest.raises(ValueError, match=f"a tile has a positive number of keys, got {size!r}"):
        attend_by_tiles(size)


def test_tiles_of_a_view() -> None:
    _, view = view_of(7, 7, "causal")
    tiles = list(view.tiles(3))
    assert [tile.positions.tolist() for tile in tiles] == [[[0, 1, 2]], [[3, 4, 5]], [[6]]]
    close(torch.cat([tile.keys for tile in tiles], 2), view.keys, 0)
    close(torch.cat([tile.values for tile in tiles], 2), view.values, 0)
    for tile in tiles:
        assert not tile.is_causal
        assert tile.mask is not None
        for query in range(7):
            for column, key in enumerate(tile.positions[0].tolist()):
                assert tile.mask[0, 0, query, column] == (key <= query)
    assert [tile.mask for tile in view_of(7, 1, "everything")[1].tiles(3)] == [None] * 3


# ---- On blocks where they are

Make = Callable[..., Any]


def over_blocks(
    group: type[CacheGroup], model: Transformer, size: int, make: Make = SlotMajorStore
) -> KVCache:
    """Three rows over 30 blocks; the layers of ``model`` have one window."""
    place = Paged(3, BlockPool(-(-90 // size), size))
    return cache_of(model.layer_kinds, [place], make, device=model.device, group=group)


WINDOWS: list[dict[str, Any]] = [
    {}, {"window": 1}, {"window": 3}, {"window": 3, "sinks": 2}, {"window": 8},
]  # fmt: skip


def compare(
    model: Transformer, tiled: Transformer, caches: list[KVCache], rnd: random.Random, steps: int
) -> None:
    """Random steps, forks and rollbacks: the same logits to 1e-12."""
    for seed in range(steps):
        rows = len(caches[0].lengths)
        shape = rnd.choice(["decode", "chunk", "ragged"])
        T = 1 if shape == "decode" else rnd.randint(2, 5)
        counts = [rnd.randint(0, T) if shape == "ragged" else T for _ in range(rows)]
        if max(caches[0].lengths) + T > 25:
            for cache in caches:
                cache.reset()
            continue
        tokens = batch(rows, T, seed).to(model.device)
        poison = rnd.choice([NAN, 1e10])
        for cache in caches:
            cache.fill_unused(poison)
        expected, found = model(tokens, caches[0], counts=counts), tiled(
            tokens, caches[1], counts=counts
        )
        for row, count in enumerate(counts):
            if count:
                close(found[row, T - count :], expected[row, T - count :])
        chosen = [rnd.randrange(rows) for _ in range(3)]
        back = [max(0, n - rnd.randint(0, 4)) for n in caches[0].lengths]
        for cache in caches:
            if seed % 3 == 1:
                cache.truncate(back)
            if seed % 3 == 2:
                cache.select(chosen)


def by_tiles(size: int, **changes: Any) -> Transformer:
    """A model of its own: the one in ``toy`` is everybody's."""
    model = Transformer(toy(**changes).config, torch.float64)
    model.load_state_dict(toy(**changes).state_dict())
    return attend_with(model, attend_by_tiles(size))


@pytest.mark.parametrize("size", [1, 3, 4, 7, 100])
@pytest.mark.parametrize("changes", WINDOWS)
def test_the_direct_path_is_the_gathered_one(changes: dict[str, Any], size: int) -> None:
    model, tiled = toy(**changes), by_tiles(size, **changes)
    for block_size in (1, 4):
        caches = [over_blocks(group, model, block_size) for group in (CacheGroup, DirectGroup)]
        compare(model, tiled, caches, random.Random(size), 9)


@pytest.mark.parametrize("heads", HEADS)
def test_for_any_heads(heads: str) -> None:
    model, tiled = toy(**HEADS[heads]), by_tiles(3, **HEADS[heads])
    caches = [over_blocks(group, model, 4) for group in (CacheGroup, DirectGroup)]
    compare(model, tiled, caches, random.Random(0), 9)


@pytest.mark.parametrize("stored", ["dense", "int8", "int4", "float8"])
def test_for_any_store_of_single_tokens(stored: str) -> None:
    model, tiled, make = toy(), by_tiles(3), STORES[stored].make
    caches = [over_blocks(group, model, 4, make) for group in (CacheGroup, DirectGroup)]
    compare(model, tiled, caches, random.Random(0), 9)


def test_a_direct_view_is_read_by_ordinary_attention_too() -> None:
    model = toy(window=3)
    caches = [over_blocks(group, model, 4) for group in (CacheGroup, DirectGroup)]
    compare(model, model, caches, random.Random(0), 9)


@pytest.mark.gpu
def test_on_a_gpu_the_direct_path_is_the_gathered_one() -> None:
    model, tiled = toy(window=3, seed=5).to("cuda"), by_tiles(3, window=3, seed=5).to("cuda")
    caches = [over_blocks(group, model, 4) for group in (CacheGroup, DirectGroup)]
    compare(model, tiled, caches, random.Random(0), 12)


def test_on_a_table_that_a_row_is_bound_to() -> None:
    tiled, pool = by_tiles(3), BlockPool(23, 4)
    cache = cache_of(tiled.layer_kinds, [BoundPaged(pool)], SlotMajorStore, group=DirectGroup)
    prefix = PrefixCache(pool, "toy")
    for found in (0, 8):
        sequence = prefix.begin(text(10))
        assert sequence.cached_tokens == found
        cache.bind([sequence], lengths=[found])
        out = tiled(torch.tensor([text(10)[found:]]), cache)
        prefix.commit(sequence, 10)
        close(out[0], toy()(torch.tensor([text(10)]))[0, found:], 1e-9)
        prefix.end(sequence)


def test_a_row_without_a_token_gives_zeros() -> None:
    model = toy()
    cache = over_blocks(DirectGroup, model, 4)
    cache.fill_unused(NAN)
    cache.reserve([0, 2, 5], 5)
    new = torch.randn(3, 2, 5, 6, dtype=torch.float64)
    view = cache.update(0, new, new)
    out = attend_by_tiles(3)(torch.randn(3, 4, 5, 6, dtype=torch.float64), view, 1.0)
    assert out[0].eq(0).all()
    assert out[1, :, :3].eq(0).all()  # padding
    assert not out.isnan().any()


def test_no_row_with_a_token() -> None:
    tiled = by_tiles(3)
    cache = over_blocks(DirectGroup, tiled, 4)
    assert not tiled(batch(3, 1), cache, counts=[0, 0, 0]).isnan().any()


class Counted(SlotMajorStore):
    """A store that notes how many tokens of how many rows each read copies."""

    def __init__(self, *sizes: Any) -> None:
        super().__init__(*sizes)
        self.reads: list[tuple[int, ...]] = []

    def read(self, layer: int, where: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().read(layer, where)
        self.reads.append(tuple(keys.shape[:2]))
        return keys, values


def test_one_tile_is_copied_at_a_time() -> None:
    seen = []
    for group, model in ((CacheGroup, toy()), (DirectGroup, by_tiles(4))):
        cache = over_blocks(group, model, 4, Counted)
        model(batch(3, 10), cache, counts=[10, 3, 0])
        store = cache.groups[0].store
        assert isinstance(store, Counted)
        seen.append(store.reads)
    gathered, direct = seen
    assert gathered == [(3, 10)] * 2  # each of two layers
    assert direct == [(3, 4), (3, 4), (3, 2)] * 2


def test_tiles_of_a_direct_view_are_those_of_the_gathered_one() -> None:
    views = []
    for group in (CacheGroup, DirectGroup):
        cache = over_blocks(group, toy(window=3), 4)
        cache.reserve([6, 2, 0], 6)
        new = torch.randn(3, 2, 6, 6, generator=torch.Generator().manual_seed(0)).double()
        views.append(cache.update(0, new, -new))
    gathered, direct = views
    assert isinstance(direct, DirectView)
    for one, other in zip(direct.read(), gathered.read(), strict=True):
        close(one, other, 0)
    close(direct.positions, gathered.positions, 0)
    close(direct.mask, gathered.mask, 0)
    assert direct.is_causal == gathered.is_causal
    pairs = list(zip(direct.tiles(4), gathered.tiles(4), strict=True))
    assert len(pairs) == 2
    for one, other in pairs:
        for name in ("keys", "values", "positions", "mask"):
            close(getattr(one, name), getattr(other, name), 0)
        assert not one.is_causal


@pytest.mark.parametrize("group", [CacheGroup, DirectGroup])
def test_a_layer_is_updated_once_after_each_reserve(group: type[CacheGroup]) -> None:
    cache = over_blocks(group, toy(), 4)
    new = torch.ones(3, 2, 1, 6, dtype=torch.float64)
    why = r"without reserve\(\), or a second time"
    with pytest.raises(ValueError, match=why):
        cache.update(0, new, new)
    cache.reserve([1, 1, 1], 1)
    cache.update(0, new, new)
    with pytest.raises(ValueError, match=why):
        cache.update(0, -new, -new)
    assert cache.entries(0)[0].eq(1).all()
    cache.update(1, new, new)
    cache.truncate(0)
    with pytest.raises(ValueError, match=why):
        cache.update(1, new, new)


def test_a_direct_group_needs_blocks() -> None:
    store = DenseStore(LayerKind(2, 6, 6), 2, 1, 8)
    with pytest.raises(ValueError, match="slots in blocks, got a Contiguous placement; use"):
        DirectGroup(Contiguous(1, 8), store)
