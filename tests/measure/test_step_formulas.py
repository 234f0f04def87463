"""Formulas of a step against instruments, for models whose layers are not alike."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbook.accounting import causal_pairs, step_flops, step_traffic
from kvbook.cache import visible
from kvbook.config import LatentConfig, ModelConfig
from kvbook.errors import UnsupportedModelError
from kvbook.measure import (
    count_bytes,
    count_flops,
    count_traffic,
    filled_cache,
    measure_step,
    model_groups,
)
from kvbook.model.transformer import Transformer

SIZES: dict[str, Any] = {
    "vocab_size": 11, "d_model": 12, "n_layers": 3, "n_heads": 6, "n_kv_heads": 3, "head_dim": 4,
    "d_mlp": 7, "max_positions": 64,
}  # fmt: skip
FULL = ModelConfig(**SIZES)
MIXED = ModelConfig(**SIZES, window=(5, None, 2))
SINKS = ModelConfig(**SIZES, window=(5, None, 2), sinks=3)
LATENT = LatentConfig(q_rank=None, kv_rank=6, nope_dim=2, rope_dim=2, value_dim=3)


# ---- Pairs and bytes, written out


def test_each_layer_counts_the_pairs_of_its_own_window() -> None:
    """One query after 9 tokens sees 5, 10 and 2 keys; 6 heads of width 4, two operations each."""
    flops = step_flops(MIXED, T=1, past=9)
    assert flops.scores == flops.values == (5 + 10 + 2) * 6 * 4 * 2
    assert flops.projections == step_flops(FULL, 1, 9).projections


def test_sinks_are_seen_beside_the_window() -> None:
    """After 9 tokens 5 + 3, all 10, and 2 + 3 keys; after 4 tokens 5, 5, and 2 + 3."""
    assert step_flops(SINKS, T=1, past=9).scores == (8 + 10 + 5) * 6 * 4 * 2
    assert step_flops(SINKS, T=1, past=4).scores == (5 + 5 + 5) * 6 * 4 * 2
    assert step_flops(SINKS, T=1, past=3).scores == (4 + 4 + 4) * 6 * 4 * 2


def test_a_layer_reads_what_its_queries_see() -> None:
    """Two queries after 9 tokens: the first sees 4, 9 and 1 of them, and both new ones come on."""
    per_token = 2 * 3 * 4 * 2  # keys and values, heads, width, bytes
    traffic = step_traffic(MIXED, T=2, past=9)
    assert traffic.cache_read == (6 + 11 + 3) * per_token
    assert traffic.cache_write == 3 * 2 * per_token
    assert step_traffic(SINKS, T=2, past=9).cache_read == (9 + 11 + 6) * per_token
    assert traffic.weights == step_traffic(FULL, 2, 9).weights


@given(
    st.integers(1, 12), st.integers(0, 30), st.integers(0, 9),
    st.lists(st.none() | st.integers(1, 20), min_size=3, max_size=3),
)  # fmt: skip
def test_pairs_and_keys_are_those_that_are_visible(
    T: int, S: int, sinks: int, windows: list[int | None]
) -> None:
    """The rule of visibility is the cache's own; one layer at a time."""
    if all(window is None for window in windows):
        sinks = 0
    config = ModelConfig(**SIZES, window=tuple(windows), sinks=sinks)
    queries, keys = torch.arange(S, S + T)[None], torch.arange(S + T)[None]
    seen = [visible(queries, keys, window, sinks)[0] for window in windows]
    assert step_flops(config, T, S).scores == sum(int(s.sum()) for s in seen) * 6 * 4 * 2
    read = sum(int(s.any(0).sum()) for s in seen)
    assert step_traffic(config, T, S).cache_read == read * 2 * 3 * 4 * 2


# ---- Against the instruments


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(0, 9), st.integers(1, 2))
def test_operations_of_mixed_layers_as_counted(T: int, S: int, batch: int) -> None:
    """The counter takes the pairs of new tokens and of what the cache keeps, masked or not."""
    model = Transformer(MIXED)
    cache = model.new_cache(batch, 32, rollback=1)
    if S:
        model(torch.zeros(batch, S, dtype=torch.int64), cache)
    counted = count_flops(lambda: model(torch.zeros(batch, T, dtype=torch.int64), cache))
    formula = step_flops(MIXED, T, S, batch)
    assert (counted.projections, counted.mlp, counted.head) == (
        formula.projections, formula.mlp, formula.head,
    )  # fmt: skip
    assert counted.attention >= formula.attention
    if T == 1 and S >= 4:  # every layer's cache holds exactly what the query sees
        assert counted.attention == formula.attention


def test_bytes_of_mixed_layers_as_counted() -> None:
    model = Transformer(MIXED)
    cache = model.new_cache(2, 32, rollback=1)
    model(torch.zeros(2, 9, dtype=torch.int64), cache)
    new = torch.zeros(2, 1, dtype=torch.int64)
    count = count_traffic(count_bytes(lambda: model(new, cache), model_groups(model, cache)))
    assert count == step_traffic(MIXED, 1, 9, 2, "float32", "float32")


@pytest.mark.parametrize("config", [MIXED, SINKS])
def test_the_step_that_is_timed_is_the_one_that_is_counted(config: ModelConfig) -> None:
    """Layers with a window read their window, not the whole text."""
    model = Transformer(config)
    cache = filled_cache(model, batch=2, length=20, capacity=21)
    new = torch.zeros(2, 1, dtype=torch.int64)
    count = count_bytes(lambda: model(new, cache, last_only=True), model_groups(model, cache))
    step = measure_step(model, T=1, S=20, batch=2, repetitions=1)
    assert count_traffic(count).total == step.moved_bytes
    assert step.flops == step_flops(config, 1, 20, 2, logits=1).total
    assert measure_step(model, T=4, S=20, batch=2, repetitions=2).seconds > 0


# ---- Refused


@pytest.mark.parametrize("formula", [step_flops, step_traffic])
def test_latent_heads_are_refused_and_not_miscounted(formula: Any) -> None:
    config = ModelConfig(**{**SIZES, "n_kv_heads": 6}, latent=LATENT)
    with pytest.raises(UnsupportedModelError, match=r"a latent of rank 6; allowed: latent None"):
        formula(config, 1, 9)


def test_the_weights_of_latent_heads_are_projections() -> None:
    """Of 12 × 24 query, 12 × 8 down, 6 × 30 up and 18 × 12 output, three layers; norms apart."""
    model = Transformer(ModelConfig(**{**SIZES, "n_kv_heads": 6}, latent=LATENT))
    groups = model_groups(model)
    assert sum(w.numel() for w in groups["projections"]) == 3 * (288 + 96 + 180 + 216)
    assert sum(w.numel() for w in groups["norms"]) == 3 * (12 + 12 + 6) + 12


def test_a_window_of_one_for_all_is_the_window_of_each() -> None:
    alike = ModelConfig(**SIZES, window=(4, 4, 4))
    assert step_flops(alike, 3, 7) == step_flops(ModelConfig(**SIZES, window=4), 3, 7)
    assert step_flops(alike, 3, 7).scores == 3 * causal_pairs(3, 7, 4) * 6 * 4 * 2
