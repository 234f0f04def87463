"""Latent heads: one stored vector per token, two forms of one attention, and one scale.

The formulas, one head at a time, are in ``toys.reference_logits``. SMALL with LATENT stores
5 + 4 elements per token; its heads compare 2 + 4 elements and return 3.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from oracles.toys import LATENT, SMALL, batch, reference_logits, text, toy
from torch import Tensor

from kvbook.accounting import CacheGeometry
from kvbook.cache import KVCache, KVView
from kvbook.config import LatentConfig, ModelConfig
from kvbook.model.attention import attend
from kvbook.model.experiment import attend_with, evaluate_with
from kvbook.model.latent import Evaluate, absorbed, materialized
from kvbook.model.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")

FORMS = [absorbed, materialized]
ONE_PROJECTION = {**LATENT, "latent": replace(LATENT["latent"], q_rank=None)}
KINDS: dict[str, dict[str, Any]] = {
    "two query projections": LATENT,
    "one query projection": ONE_PROJECTION,
    "window": {**LATENT, "window": 3},
    "window in the second layer": {**LATENT, "window": (None, 3)},
    "window and sinks": {**LATENT, "window": 3, "sinks": 2},
}
SCHEDULES = {
    "prefill": [12],
    "prefill, then one at a time": [7, 1, 1, 1, 1, 1],
    "one at a time": [1] * 12,
    "chunks": [1, 4, 2, 5],
}
# DeepSeek-V3's attention with as little as possible around it.
V3 = ModelConfig(
    vocab_size=1, d_model=8, n_layers=1, n_heads=128, n_kv_heads=128, head_dim=192, d_mlp=1,
    latent=LatentConfig(q_rank=4, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
)  # fmt: skip


def model_in(form: Evaluate, **changes: Any) -> Transformer:
    return evaluate_with(deepcopy(toy(**changes)), form)


def latent_layers(model: Transformer) -> list[Any]:
    return [block.attention for block in model.blocks]


def apart(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


# ---- Both forms are the formulas


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_a_pass_without_a_cache_follows_the_formulas(changes: dict, form: Evaluate) -> None:
    logits = model_in(form, **changes)(torch.tensor([text(12)]))
    assert apart(logits[0], reference_logits(toy(**changes), text(12))) < 1e-9


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_any_schedule_over_a_cache_follows_the_formulas(
    changes: dict, sizes: list[int], form: Evaluate
) -> None:
    model, tokens = model_in(form, **changes), batch(2, 12)
    cache = model.new_cache(2, 14)
    logits = torch.cat([model(part, cache) for part in tokens.split(sizes, 1)], 1)
    for row in range(2):
        assert apart(logits[row], reference_logits(model, tokens[row].tolist())) < 1e-9


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_ragged_rows_follow_the_formulas(changes: dict, form: Evaluate) -> None:
    """Rows of 4, 1 and 0 tokens, then 2, 0 and 3, then one each; unused slots hold NaN."""
    model = model_in(form, **changes)
    cache = model.new_cache(3, 16)
    cache.fill_unused(float("nan"))
    texts: list[list[int]] = [[], [], []]
    for turn, counts in enumerate([[4, 1, 0], [2, 0, 3], [1, 1, 1]]):
        T = max(counts)
        tokens = batch(3, T, seed=turn)
        logits = model(tokens, cache, counts)
        for row, count in enumerate(counts):
            texts[row] += tokens[row, T - count :].tolist()
            if count:
                expected = reference_logits(model, texts[row])[-count:]
                assert apart(logits[row, T - count :], expected) < 1e-9


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_absorbed_equals_materialized(changes: dict) -> None:
    """They differ in the order of products only, so not in every bit, but in rounding."""
    models, tokens = [model_in(form, **changes) for form in FORMS], batch(2, 12)
    caches = [model.new_cache(2, 16) for model in models]
    for part in tokens.split([6, 1, 4, 1], 1):
        one, two = (model(part, cache) for model, cache in zip(models, caches, strict=True))
        assert 0 < apart(one, two) < 1e-10


def test_the_absorbed_form_is_the_default() -> None:
    assert {layer.evaluate for layer in latent_layers(Transformer(toy(**LATENT).config))} == {
        absorbed
    }


def test_a_rejected_token_and_a_fork_leave_no_trace() -> None:
    model, tokens = toy(**LATENT), batch(2, 8)
    cache = model.new_cache(3, 12)
    cache.select([0, 1])
    model(tokens, cache)
    cache.truncate([5, 7])
    cache.select([1, 0, 1])
    logits = model(torch.tensor([[3], [4], [5]]), cache)
    for row, kept in enumerate([tokens[1, :7], tokens[0, :5], tokens[1, :7]]):
        expected = reference_logits(model, [*kept.tolist(), 3 + row])[-1]
        assert apart(logits[row, 0], expected) < 1e-9


# ---- The scale


def test_the_scale_comes_from_the_width_that_a_head_compares() -> None:
    """ollama/ollama#13893: 1/√192, not 1/√576 (what is stored) and not from the model's width."""
    assert V3.scale == pytest.approx(0.072169, abs=1e-6)
    assert V3.cached_key_dim**-0.5 == pytest.approx(0.041667, abs=1e-6)
    assert 40**-0.5 / V3.scale == pytest.approx(2.19, abs=5e-3)


@pytest.mark.parametrize("form", FORMS)
def test_both_forms_attend_with_that_scale(form: Evaluate) -> None:
    model, scales = model_in(form, **LATENT), []

    def spy(queries: Tensor, view: KVView, scale: float) -> Tensor:
        scales.append(scale)
        return attend(queries, view, scale)

    attend_with(model, spy)(batch(1, 5))
    assert scales == pytest.approx([6**-0.5, 6**-0.5])


@pytest.mark.parametrize("width", [9, 4, 5, 2, 3])
@pytest.mark.parametrize("form", FORMS)
def test_a_scale_from_another_width_is_seen(form: Evaluate, width: int) -> None:
    """9 is stored, 4 = C / H and rotated, 5 the latent, 2 not rotated, 3 returned."""
    model = model_in(form, **LATENT)
    for layer in latent_layers(model):
        layer.scale = width**-0.5
    logits = model(torch.tensor([text(12)]))[0]
    assert apart(logits, reference_logits(toy(**LATENT), text(12))) > 1e-2


# ---- What is stored


def test_stored_is_the_latent_after_its_norm_then_one_rotated_key() -> None:
    """With one token repeated, layer 0 has one latent, and one key that turns with the position."""
    model = toy(**LATENT)
    cache = model.new_cache(1, 8)
    for _ in range(5):
        model(torch.tensor([[7]]), cache)
    stored, values = cache.entries(0)
    assert stored.shape == (1, 5, 9)
    assert values.shape == (1, 5, 0)
    block = model.blocks[0]
    x = block.attention_norm(model.embedding.weight[7])
    down = block.attention.latent_down.weight @ x
    mean_square = (down[:5] ** 2).mean()
    latent = down[:5] / (mean_square + 3e-2).sqrt() * block.attention.latent_norm.weight
    assert apart(stored[0, :, :5], latent.expand(5, 5)) < 1e-12
    assert apart(stored[0, 0, 5:], down[5:]) < 1e-12  # position 0 is not turned
    pairs = torch.complex(stored[0, :, 5:7], stored[0, :, 7:])
    theta = torch.tensor([1.0, 50.0**-0.5], dtype=torch.float64)
    for before, after in pairwise(range(5)):
        assert apart((pairs[after] / pairs[before]).angle(), theta) < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_no_keys_and_values_of_heads_are_stored(form: Evaluate) -> None:
    """ml-explore/mlx-lm#1509: expanded keys and values in the cache undo the saving."""
    model = model_in(form, **LATENT)
    cache = model.new_cache(3, 10)
    for part in batch(3, 8).split([5, 1, 2], 1):
        model(part, cache)
    (group,) = cache.groups
    assert group.store.keys.shape == (2, 3, 1, 10, 9)
    assert group.store.values.numel() == 0
    assert cache.allocated_bytes == 2 * 3 * 10 * 9 * 8
    assert cache.used_bytes == 2 * 3 * 8 * 9 * 8


def test_the_absorbed_form_reads_the_cache_itself() -> None:
    """One head of keys, where they are stored; the values are the same numbers."""
    model, views = model_in(absorbed, **LATENT), []

    def spy(queries: Tensor, view: KVView, scale: float) -> Tensor:
        views.append(view)
        return attend(queries, view, scale)

    cache = model.new_cache(1, 10)
    attend_with(model, spy)(batch(1, 6), cache)
    for layer, view in enumerate(views):
        assert view.keys.shape == (1, 1, 6, 9)
        address = cache.groups[0].store.keys[layer].data_ptr()
        assert view.keys.data_ptr() == view.values.data_ptr() == address


def test_the_materialized_form_attends_with_keys_and_values_of_every_head() -> None:
    model, shapes = model_in(materialized, **LATENT), []

    def spy(queries: Tensor, view: KVView, scale: float) -> Tensor:
        shapes.append((tuple(queries.shape), tuple(view.keys.shape), tuple(view.values.shape)))
        return attend(queries, view, scale)

    attend_with(model, spy)(batch(2, 5))
    assert shapes == [((2, 4, 5, 6), (2, 4, 5, 6), (2, 4, 5, 3))] * 2


# ---- Bytes


def one_token(config: ModelConfig, dtype: torch.dtype) -> KVCache:
    """A cache for one token; the model itself has no memory behind it."""
    return Transformer(config, dtype, "meta").new_cache(1, 1)


def test_bytes_per_token_and_layer_of_deepseek_v3() -> None:
    """1,152 B in bfloat16; its 128 heads' own keys and values would be 81,920 B, 71.1 times."""
    assert one_token(V3, torch.bfloat16).allocated_bytes == 1_152
    (layer,) = CacheGeometry.from_model(V3).layers
    assert layer.kind == "latent"
    assert [(kept.heads, kept.width) for kept in layer.per_token] == [(1, 576)]
    expanded = 2 * sum(kept.heads * kept.width for kept in layer.expanded)
    assert expanded == 81_920
    assert round(expanded / 1_152, 1) == 71.1


def test_elements_per_token_and_layer_of_deepseek_v2_lite() -> None:
    """16 heads: 576 elements instead of 5,120, 8.9 times."""
    lite = replace(V3, n_heads=16, n_kv_heads=16)
    assert one_token(lite, torch.float32).allocated_bytes == 576 * 4
    (layer,) = CacheGeometry.from_model(lite).layers
    expanded = sum(kept.heads * kept.width for kept in layer.expanded)
    assert expanded == 5_120
    assert round(expanded / 576, 1) == 8.9


def test_the_geometry_of_windows_layer_by_layer() -> None:
    """A window of 3 with 2 sinks keeps 5 tokens."""
    mixed = replace(SMALL, n_layers=3, window=(3, None, 4), sinks=2)
    layers = CacheGeometry.from_model(mixed).layers
    assert [layer.kind for layer in layers] == ["window", "full", "window"]
    assert [layer.window for layer in layers] == [5, None, 6]
    assert {(kept.heads, kept.width) for layer in layers for kept in layer.per_token} == {(2, 6)}
    latent = CacheGeometry.from_model(replace(SMALL, window=(None, 3), **LATENT)).layers
    assert [layer.kind for layer in latent] == ["latent", "latent"]
    assert [layer.window for layer in latent] == [None, 3]


# ---- Wrong variants: each is one mistake of an implementation


def rotate_nothing(q_nope: Tensor, q_rope: Tensor, view: KVView) -> Any:
    return q_nope, torch.zeros_like(q_rope), view


def swap_rotated_halves(q_nope: Tensor, q_rope: Tensor, view: KVView) -> Any:
    return q_nope, q_rope.roll(2, -1), view


def reverse_the_heads(q_nope: Tensor, q_rope: Tensor, view: KVView) -> Any:
    return q_nope.flip(1), q_rope.flip(1), view


def values_from_the_end(q_nope: Tensor, q_rope: Tensor, view: KVView) -> Any:
    return q_nope, q_rope, replace(view, keys=view.keys.roll(4, -1))


@pytest.mark.parametrize(
    "spoil", [rotate_nothing, swap_rotated_halves, reverse_the_heads, values_from_the_end]
)
@pytest.mark.parametrize("form", FORMS)
def test_a_wrong_variant_is_seen(form: Evaluate, spoil: Callable[..., Any]) -> None:
    def wrong(layer: Any, q_nope: Tensor, q_rope: Tensor, view: KVView) -> Tensor:
        return form(layer, *spoil(q_nope, q_rope, view))

    logits = model_in(wrong, **LATENT)(torch.tensor([text(12)]))[0]
    assert apart(logits, reference_logits(toy(**LATENT), text(12))) > 1e-2


def test_a_norm_with_the_model_s_epsilon_is_seen() -> None:
    """The released models give the two inner norms 1e-6, whatever rms_norm_eps says."""
    other = replace(LATENT["latent"], norm_eps=1e-2)
    logits = toy(**{**LATENT, "latent": other})(torch.tensor([text(12)]))[0]
    assert apart(logits, reference_logits(toy(**LATENT), text(12))) > 1e-3
    assert LatentConfig(None, 1, 1, 2, 1).norm_eps == 1e-6


# ---- Refusals


def test_a_cache_of_another_layout_is_refused() -> None:
    model, other = toy(**LATENT), toy()
    with pytest.raises(ValueError, match=r"another model.*kv_heads 2 instead of 1"):
        model(batch(1, 2), other.new_cache(1, 4))
    with pytest.raises(ValueError, match=r"another model.*key_dim 9 instead of 6"):
        other(batch(1, 2), model.new_cache(1, 4))


def test_a_model_without_latents_has_nothing_to_evaluate_another_way() -> None:
    with pytest.raises(ValueError, match="no latent layers"):
        evaluate_with(deepcopy(toy()), materialized)
