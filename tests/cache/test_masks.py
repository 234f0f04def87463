"""Who sees whom, in exact fractions: the visibility probe of ``toys`` over every kind of step.

The probe's output is 1/n on exactly the n positions that a query sees and 0 elsewhere.
"""

from fractions import Fraction

import pytest
import torch
from oracles.cache_kinds import PLACEMENTS, STORES, TOGETHER, WINDOWS, fits
from oracles.toys import (
    batch,
    fractions,
    probe_cache,
    recompute,
    reference_logits,
    seen,
    text,
    toy,
    weights_by_position,
)
from torch.nn.functional import scaled_dot_product_attention

from kvbook.cache import NOT_A_TOKEN, KVCache, KVView, visible
from kvbook.model.attention import attend

pytestmark = pytest.mark.usefixtures("one_thread")


def filled(lengths: list[int], capacity: int, window: int | None = None) -> KVCache:
    """A probe cache whose rows hold ``lengths`` tokens."""
    cache = probe_cache(len(lengths), capacity, window)
    if max(lengths):
        weights_by_position(cache, lengths, max(lengths), capacity)
    return cache


# ---- Alignment


def test_two_queries_over_five_keys() -> None:
    """pytorch/pytorch#103082 (also #108108, #144858): a mask anchored at the top left.

    Anchored there, the rows would be 1, 0, 0, 0, 0 and 1/2, 1/2, 0, 0, 0.
    """
    weights = weights_by_position(filled([3], 5), [2], 2, 5)[0]
    fourth, fifth = Fraction(1, 4), Fraction(1, 5)
    assert fractions(weights[0]) == [fourth, fourth, fourth, fourth, 0]
    assert fractions(weights[1]) == [fifth, fifth, fifth, fifth, fifth]


def test_the_last_two_of_five_without_a_cache() -> None:
    weights = weights_by_position(recompute(1), [5], 5, 5)[0]
    assert seen(weights) == [{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 3, 4}]


def test_the_probe_would_show_the_top_left_mask() -> None:
    eye = torch.eye(5, dtype=torch.float64)[None, None]
    zeros = torch.zeros(1, 1, 2, 5, dtype=torch.float64)
    wrong = scaled_dot_product_attention(zeros, eye, eye, is_causal=True)[0, 0]
    assert seen(wrong) == [{0}, {0, 1}]


@pytest.mark.parametrize("start", range(7))
@pytest.mark.parametrize("T", range(1, 6))
def test_a_chunk_at_any_place_sees_the_past_and_itself(start: int, T: int) -> None:
    """One token, several tokens, on an empty and on a filled cache: the same rule."""
    weights = weights_by_position(filled([start], 12), [T], T, 12)[0]
    assert seen(weights) == [set(range(start + i + 1)) for i in range(T)]


@pytest.mark.parametrize("T", range(1, 9))
def test_a_whole_text_without_a_cache_sees_the_same(T: int) -> None:
    weights = weights_by_position(recompute(1), [T], T, 9)[0]
    assert seen(weights) == [set(range(i + 1)) for i in range(T)]


def test_five_tokens_as_two_and_three_equal_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch/pytorch#103082 on a random layer, where the top-left mask is far off."""
    model, tokens = toy(torch.float32, n_layers=1), torch.tensor([text(5)])
    whole = model(tokens)

    def in_two_parts() -> torch.Tensor:
        cache = model.new_cache(1, 5)
        return torch.cat([model(tokens[:, :2], cache), model(tokens[:, 2:], cache)], 1)

    assert (in_two_parts() - whole).abs().max() < 1e-5

    def top_left(q: torch.Tensor, view: KVView, scale: float) -> torch.Tensor:
        return scaled_dot_product_attention(
            q, view.keys, view.values, is_causal=True, scale=scale, enable_gqa=True
        )

    monkeypatch.setattr(model.blocks[0].attention, "attend", top_left)
    assert (in_two_parts() - whole).abs().max() > 0.5


def test_one_query_at_position_99_sees_a_hundred_keys() -> None:
    """meta-pytorch/gpt-fast#233: a mask function that asked for query 0 instead of query 99."""
    weights = weights_by_position(filled([99], 100), [1], 1, 100)[0]
    assert fractions(weights[0]) == [Fraction(1, 100)] * 100


def test_a_chunk_before_position_99_keeps_its_offset() -> None:
    """meta-pytorch/gpt-fast#233, for more than one query."""
    weights = weights_by_position(filled([97], 100), [3], 3, 100)[0]
    assert [len(one) for one in seen(weights)] == [98, 99, 100]


# ---- Rows of different lengths


def test_left_padded_rows_see_their_own_tokens_only() -> None:
    for memory in (probe_cache(2, 5), recompute(2)):
        weights = weights_by_position(memory, [3, 5], 5, 5)
        assert seen(weights[0]) == [set(), set(), {0}, {0, 1}, {0, 1, 2}]
        assert seen(weights[1]) == [{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 3, 4}]


def test_one_more_token_for_rows_of_two_and_five() -> None:
    weights = weights_by_position(filled([2, 5], 8), [1, 1], 1, 8)
    assert seen(weights[0]) == [{0, 1, 2}]
    assert seen(weights[1]) == [{0, 1, 2, 3, 4, 5}]


def test_a_ragged_chunk_on_ragged_rows() -> None:
    weights = weights_by_position(filled([2, 5, 0], 8), [3, 1, 2], 3, 8)
    assert seen(weights[0]) == [{0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 3, 4}]
    assert seen(weights[1]) == [set(), set(), {0, 1, 2, 3, 4, 5}]
    assert seen(weights[2]) == [set(), {0}, {0, 1}]


def test_a_row_may_add_nothing() -> None:
    cache = filled([2, 4], 8)
    weights = weights_by_position(cache, [0, 2], 2, 8)
    assert seen(weights[0]) == [set(), set()]
    assert seen(weights[1]) == [{0, 1, 2, 3, 4}, {0, 1, 2, 3, 4, 5}]
    assert cache.lengths == (2, 6)


def test_uneven_rows_that_become_even_again() -> None:
    cache = filled([2, 4], 8)
    weights_by_position(cache, [2, 0], 2, 8)
    weights = weights_by_position(cache, [2, 2], 2, 8)
    assert seen(weights[0]) == seen(weights[1]) == [{0, 1, 2, 3, 4}, {0, 1, 2, 3, 4, 5}]


# ---- Rows that see nothing


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T", [1, 4])
def test_a_query_that_sees_no_key_gives_zeros(dtype: torch.dtype, T: int) -> None:
    """pytorch/pytorch#103749: a softmax over nothing is NaN, or the mean of all values."""
    keys, values = torch.ones(1, 2, 4, 6, dtype=dtype), torch.ones(1, 2, 4, 6, dtype=dtype)
    nothing = torch.zeros(1, 1, T, 4, dtype=torch.bool)
    positions = torch.full((1, 4), NOT_A_TOKEN)
    out = attend(torch.ones(1, 4, T, 6, dtype=dtype), KVView(keys, values, positions, nothing), 1.0)
    assert out.equal(torch.zeros(1, 4, T, 6, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("cached", [True, False])
def test_a_padding_row_spoils_no_other_row(dtype: torch.dtype, T: int, cached: bool) -> None:
    """pytorch/pytorch#103749 (also #103963, #109517, #110213; allenai/OLMo#322,
    ml-explore/mlx#2608, huggingface/transformers#38690)."""
    model, tokens = toy(dtype), batch(2, T)
    cache = model.new_cache(2, 6) if cached else None
    logits = model(tokens, cache, counts=[T, 0])
    assert logits.isfinite().all()
    alone = model(tokens[:1])[0]
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.3}[dtype]
    assert (logits[0] - alone).abs().max() < tolerance


@pytest.mark.parametrize("cached", [True, False])
def test_a_batch_of_nothing_but_padding_is_finite(cached: bool) -> None:
    model = toy()
    for T in (1, 3):
        cache = model.new_cache(2, 6) if cached else None
        assert model(batch(2, T), cache, counts=[0, 0]).isfinite().all()
        assert cache is None or cache.lengths == (0, 0)


@pytest.mark.parametrize("cached", [True, False])
def test_the_token_under_the_padding_does_not_matter(cached: bool) -> None:
    model, tokens = toy(), batch(2, 5)
    other = tokens.clone()
    other[0, :3] = torch.tensor([28, 0, 13])
    results = []
    for each in (tokens, other):
        cache = model.new_cache(2, 8) if cached else None
        results.append(model(each, cache, counts=[2, 5]))
    assert results[0][0, 3:].equal(results[1][0, 3:])
    assert results[0][1].equal(results[1][1])


# ---- Slots without a token


@pytest.mark.parametrize("last", [1, 3], ids=["decode", "prefill"])
def test_empty_slots_carry_no_weight(last: int) -> None:
    """huggingface/transformers#30400 (PRs #30414, #30437): zeros that were not masked.

    Three slots of eight hold the value 1. With the empty ones, the mean would be 3/8 = 0.375.
    """
    cache = probe_cache(1, 8)
    ones = torch.ones(1, 2, 3, 8, dtype=torch.float64)
    for part in ones.split([3 - last, last] if last < 3 else [3], 2):
        cache.reserve([part.shape[2]], part.shape[2])
        view = cache.update(0, part, part)
    out = attend(torch.zeros(1, 4, last, 8, dtype=torch.float64), view, 1.0)
    assert (out - 1.0).abs().max() < 1e-15


def test_empty_slots_of_a_short_row_carry_no_weight() -> None:
    cache = probe_cache(2, 8)
    cache.reserve([3, 7], 7)
    ones = torch.ones(2, 2, 7, 8, dtype=torch.float64)
    view = cache.update(0, ones, ones)
    out = attend(torch.zeros(2, 4, 7, 8, dtype=torch.float64), view, 1.0)
    assert (out[0, :, 4:] - 1.0).abs().max() < 1e-15
    assert (out[1] - 1.0).abs().max() < 1e-15


def test_logits_do_not_depend_on_the_capacity() -> None:
    """huggingface/transformers#30400: the output changed with ``max_new_tokens``."""
    model, tokens = toy(), text(7)
    expected = reference_logits(model, tokens)
    for capacity in (8, 16, 64):
        cache = model.new_cache(1, capacity)
        parts = [model(part, cache)[0] for part in torch.tensor([tokens]).split([4, 1, 2], 1)]
        assert (torch.cat(parts) - expected).abs().max() < 1e-9, capacity


# ---- Windows


def test_a_window_of_four_shows_four_keys() -> None:
    """huggingface/transformers#39408 (fix #40163; #29623; zml/zml#763; ml-explore/mlx-lm#390).

    A window of W counts the token itself; W keys to the left would show five.
    """
    weights = weights_by_position(recompute(1, 4), [8], 8, 8)[0]
    assert [len(one) for one in seen(weights)] == [1, 2, 3, 4, 4, 4, 4, 4]
    assert fractions(weights[7]) == [0, 0, 0, 0] + [Fraction(1, 4)] * 4


@pytest.mark.parametrize("chunks", [[8], [1] * 8, [3, 5], [5, 3], [6, 1, 1], [4, 4]], ids=str)
def test_a_window_shows_the_same_through_a_cache(chunks: list[int]) -> None:
    cache = probe_cache(1, 8, window=4)
    sets = [one for T in chunks for one in seen(weights_by_position(cache, [T], T, 8)[0])]
    assert sets == [
        {0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {1, 2, 3, 4}, {2, 3, 4, 5}, {3, 4, 5, 6},
        {4, 5, 6, 7},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (7, {0, 1, 2, 3, 4, 5, 6}),
        (8, {0, 1, 2, 3, 4, 5, 6, 7}),
        (9, {1, 2, 3, 4, 5, 6, 7, 8}),
        (16, {8, 9, 10, 11, 12, 13, 14, 15}),
        (17, {9, 10, 11, 12, 13, 14, 15, 16}),
    ],
)
@pytest.mark.parametrize("first", [6, 1])
def test_the_window_moves_when_it_is_exceeded(
    length: int, expected: set[int], first: int
) -> None:
    """huggingface/transformers#37574 (fix #38046): it moved when it was reached. W = 8."""
    cache = filled([first], 20, window=8)
    while cache.lengths[0] < length:
        weights = weights_by_position(cache, [1], 1, 20)[0]
    assert seen(weights) == [expected]


def test_a_window_on_ragged_rows() -> None:
    for memory in (probe_cache(2, 6, 3), recompute(2, 3)):
        weights = weights_by_position(memory, [2, 6], 6, 6)
        assert seen(weights[0]) == [set(), set(), set(), set(), {0}, {0, 1}]
        assert seen(weights[1])[3:] == [{1, 2, 3}, {2, 3, 4}, {3, 4, 5}]


def test_a_window_of_one_shows_the_token_itself() -> None:
    cache = probe_cache(1, 4, window=1)
    assert seen(weights_by_position(cache, [2], 2, 4)[0]) == [{0}, {1}]
    assert seen(weights_by_position(cache, [1], 1, 4)[0]) == [{2}]


def test_a_window_wider_than_the_text_changes_nothing() -> None:
    for chunks in ([5], [2, 3], [1] * 5):
        cache = probe_cache(1, 5, window=5)
        sets = [one for T in chunks for one in seen(weights_by_position(cache, [T], T, 5)[0])]
        assert sets == [{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 3, 4}]


# ---- The rule itself, and the form in which a view states it


def test_the_rule_of_who_sees_whom() -> None:
    queries = torch.tensor([[-1, 0, 2]])
    keys = torch.tensor([[0, 1, 2, 3, -1]])
    assert visible(queries, keys).int().tolist() == [
        [[0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 0, 0]]
    ]
    assert visible(queries, keys, window=2).int().tolist() == [
        [[0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 1, 1, 0, 0]]
    ]


def test_physical_order_does_not_matter_to_the_rule() -> None:
    assert visible(torch.tensor([[2]]), torch.tensor([[3, 0, -1, 2, 1]])).int().tolist() == [
        [[0, 1, 0, 1, 1]]
    ]


STEPS = {
    "first tokens": ([0, 0], [4, 4], 4, None),
    "one more": ([4, 4], [1, 1], 1, None),
    "one first": ([0, 0], [1, 1], 1, None),
    "a chunk": ([4, 4], [3, 3], 3, None),
    "ragged": ([4, 2], [1, 3], 3, None),
    "ragged decode": ([4, 2], [1, 1], 1, None),
    "padding row": ([4, 4], [2, 0], 2, None),
    "window, first tokens": ([0, 0], [6, 6], 6, 3),
    "window, one more": ([5, 5], [1, 1], 1, 3),
    "window, ragged": ([5, 1], [2, 1], 2, 3),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_mask_is_as_wide_as_the_keys_that_are_returned(name: str) -> None:
    """huggingface/transformers#48280: more keys came back than the mask had columns."""
    lengths, counts, T, window = STEPS[name]
    cache = filled(lengths, 12, window)
    queries = cache.reserve(counts, T)
    new = torch.ones(2, 2, T, 12, dtype=torch.float64)
    view = cache.update(0, new, new)
    S = max(n + count for n, count in zip(lengths, counts, strict=True))
    assert view.keys.shape == view.values.shape == (2, 2, S, 12)
    assert view.positions.shape in [(1, S), (2, S)]
    assert queries.shape in [(1, T), (2, T)]
    if view.mask is not None:
        assert view.mask.dtype == torch.bool
        assert view.mask.shape in [(1, 1, T, S), (2, 1, T, S)]
        assert not view.is_causal
    if view.is_causal:
        assert T == S


@pytest.mark.parametrize(("placed", "stored"), TOGETHER)
@pytest.mark.parametrize("windows", ["2 and 2 sinks", "3", "alternating, global first"])
def test_so_it_is_in_every_kind_of_cache(placed: str, stored: str, windows: str) -> None:
    """huggingface/transformers#48280, for every cache type and step: one width throughout, and
    the mask is the rule over the stated positions."""
    model = toy(**WINDOWS[windows])
    if not fits(PLACEMENTS[placed], STORES[stored], model):
        pytest.skip("a ring of half a tile is refused")
    cache = PLACEMENTS[placed].new(model, 2, 30, STORES[stored])
    for counts, T in (
        ([5, 5], 5), ([1, 1], 1), ([9, 2], 9), ([1, 1], 1), ([0, 3], 3), ([2, 2], 2), ([6, 9], 9),
    ):  # fmt: skip
        queries = cache.reserve(counts, T)
        new = torch.randn(2, 2, T, 6, dtype=torch.float64)
        for layer, window in enumerate(model.config.windows):
            view = cache.update(layer, new, new)
            S = view.keys.shape[2]
            assert view.keys.shape == view.values.shape == (2, 2, S, 6)
            assert view.positions.shape in [(1, S), (2, S)]
            rule = visible(queries, view.positions, window, model.config.sinks)
            if view.mask is not None:
                assert view.mask.shape in [(1, 1, T, S), (2, 1, T, S)]
                assert view.mask[:, 0].equal(rule)
            elif view.is_causal:
                assert rule.equal(torch.ones(1, T, T, dtype=torch.bool).tril())
            else:
                assert rule.all()


@pytest.mark.parametrize("name", STEPS)
def test_the_stated_mask_is_the_rule_over_the_stated_positions(name: str) -> None:
    lengths, counts, T, window = STEPS[name]
    cache = filled(lengths, 12, window)
    queries = cache.reserve(counts, T).tolist()
    new = torch.ones(2, 2, T, 12, dtype=torch.float64)
    view = cache.update(0, new, new)
    keys = view.positions.tolist()
    expected = [
        [[0 <= k <= q and (window is None or k > q - window) for k in key_row] for q in query_row]
        for query_row, key_row in zip(queries, keys, strict=True)
    ]
    shown = torch.ones(1, 1, T, len(keys[0]), dtype=torch.bool)
    if view.is_causal:
        shown = shown.tril()
    if view.mask is not None:
        shown = view.mask
    assert shown[:, 0].tolist() == expected


def test_common_steps_need_no_mask_at_all() -> None:
    """Prefill and decode of an even batch: the fused kernels take no mask then."""
    cache = filled([0, 0], 12)
    for T, is_causal in ((4, True), (1, False)):
        cache.reserve([T, T], T)
        new = torch.ones(2, 2, T, 12, dtype=torch.float64)
        view = cache.update(0, new, new)
        assert (view.mask, view.is_causal) == (None, is_causal)
