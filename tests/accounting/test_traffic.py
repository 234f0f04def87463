"""Bytes that a pass must move: weights once, each sequence's cache on its own."""

from fractions import Fraction
from typing import Any

import pytest
import torch

from kvbook.accounting.flops import step_flops
from kvbook.accounting.traffic import intensity, step_traffic
from kvbook.config import ModelConfig
from kvbook.model.transformer import Transformer

SMALL: dict[str, Any] = {
    "vocab_size": 11, "d_model": 12, "n_layers": 2, "n_heads": 6, "n_kv_heads": 3, "head_dim": 4,
    "d_mlp": 7,
}  # fmt: skip
LLAMA_70B = ModelConfig(
    vocab_size=128_256, d_model=8_192, n_layers=80, n_heads=64, n_kv_heads=8, head_dim=128,
    d_mlp=28_672, max_positions=8_192,
)  # fmt: skip


def test_one_step_of_llama_3_70b_at_4096() -> None:
    """1,342,177,280 B of keys and values; with 64 query heads it would be 8 times as much."""
    traffic = step_traffic(LLAMA_70B, T=1, past=4_095)
    assert traffic.cache_read == 1_342_177_280
    assert traffic.cache_write == 327_680
    # All 70,553,706,496 parameters but the embedding table.
    assert traffic.weights == 2 * (70_553_706_496 - 128_256 * 8_192)
    assert traffic.embedding == 2 * 8_192


def test_a_batch_shares_the_weights_and_not_the_caches() -> None:
    one, eight = (step_traffic(LLAMA_70B, 1, 4_095, batch=n) for n in (1, 8))
    assert eight.weights == one.weights
    assert eight.cache == 8 * one.cache
    assert eight.embedding == 8 * one.embedding


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("options", [{}, {"qkv_bias": True}, {"qk_norm": True}])
@pytest.mark.parametrize(("dtype", "torch_dtype"), [("float32", torch.float32),
                                                    ("bf16", torch.bfloat16)])  # fmt: skip
def test_weights_are_those_of_the_model(
    tied: bool, options: dict[str, Any], dtype: str, torch_dtype: torch.dtype
) -> None:
    """All parameters but the embedding table, of which rows are looked up; tied, it is the head."""
    config = ModelConfig(**SMALL, tied_embeddings=tied, **options)
    model = Transformer(config, torch_dtype)
    stored = sum(parameter.nbytes for parameter in model.parameters())
    traffic = step_traffic(config, 1, weights=dtype)
    assert traffic.weights == (stored if tied else stored - model.embedding.weight.nbytes)
    assert traffic.head == model.head_weight.nbytes
    attention = model.blocks[0].attention
    parts = [*attention.qkv.parameters(), attention.output.weight]
    assert traffic.projections == 2 * sum(part.nbytes for part in parts)


def test_the_cache_is_what_a_cache_holds() -> None:
    config = ModelConfig(**SMALL)
    model = Transformer(config)
    cache = model.new_cache(batch=3, capacity=20)
    model(torch.zeros(3, 9, dtype=torch.long), cache)
    before = cache.used_bytes
    model(torch.zeros(3, 1, dtype=torch.long), cache)
    traffic = step_traffic(config, T=1, past=9, batch=3, cache="float32")
    assert traffic.cache_read == cache.used_bytes
    assert traffic.cache_write == cache.used_bytes - before


@pytest.mark.parametrize(
    ("T", "S", "tokens"), [(1, 3, 4), (1, 4, 5), (1, 5, 5), (1, 90, 5), (3, 90, 7), (3, 0, 3)]
)
def test_a_window_reads_what_its_queries_see(T: int, S: int, tokens: int) -> None:
    """W = 5: the first of T queries sees 4 tokens before it."""
    config = ModelConfig(**SMALL, window=5)
    per_token = 2 * 2 * 3 * 4 * 2  # layers, keys and values, heads, width, bytes
    assert step_traffic(config, T, S).cache_read == tokens * per_token


def test_scales_are_read_too() -> None:
    config = ModelConfig(**{**SMALL, "head_dim": 32})
    sixteen = step_traffic(config, 1, 9).cache_read
    assert step_traffic(config, 1, 9, cache="int4").cache_read * 16 == sixteen * 5
    assert step_traffic(config, 1, 9, cache="int4").weights == step_traffic(config, 1, 9).weights


def test_intensity_of_decoding_and_of_a_prompt() -> None:
    """Decoding alone does about one operation per byte; a prompt of 1,000 about 1,000."""

    def at(T: int, S: int) -> Fraction:
        flops = step_flops(LLAMA_70B, T, S, logits=1)
        return intensity(flops.total, step_traffic(LLAMA_70B, T, S).total)

    assert Fraction(95, 100) < at(1, 1_000) < Fraction(105, 100)
    assert 900 < at(1_000, 0) < 1_100
    assert intensity(3, 2) == Fraction(3, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"T": 0}, "T must be at least 1"),
        ({"T": 1, "past": -1}, "past must be at least 0"),
        ({"T": 1, "batch": 0}, "batch must be at least 1"),
        ({"T": 1, "weights": "fp7"}, "unknown dtype 'fp7'"),
        ({"T": 1, "cache": 16}, "bits or bytes"),
    ],
)
def test_bad_input(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step_traffic(LLAMA_70B, **arguments)


def test_no_bytes_have_no_intensity() -> None:
    with pytest.raises(ValueError, match="moved_bytes must be at least 1, got 0"):
        intensity(1, 0)
