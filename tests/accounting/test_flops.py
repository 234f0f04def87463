"""Operations of a pass: pairs counted one by one, parts against PyTorch's own counter."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from kvbook.accounting.flops import Flops, attention_flops, causal_pairs, step_flops
from kvbook.config import ModelConfig
from kvbook.model.transformer import Transformer

LLAMA_8B = ModelConfig(
    vocab_size=128_256, d_model=4_096, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128,
    d_mlp=14_336, max_positions=8_192,
)  # fmt: skip
SMALL = ModelConfig(
    vocab_size=11, d_model=12, n_layers=2, n_heads=6, n_kv_heads=3, head_dim=4, d_mlp=7,
    max_positions=64,
)  # fmt: skip


# ---- Pairs


def test_four_tokens_see_ten_pairs() -> None:
    """Not 16, which forgets the mask, and not 8, which halves it."""
    assert causal_pairs(4) == 1 + 2 + 3 + 4 == 10


@pytest.mark.parametrize(
    ("T", "S", "window", "pairs"),
    [
        (1, 0, None, 1),
        (1, 9, None, 10),
        (3, 2, None, 3 + 4 + 5),
        (4, 0, 2, 1 + 2 + 2 + 2),
        (3, 1, 3, 2 + 3 + 3),
        (3, 9, 3, 9),
        (2, 0, 100, 3),
        (5, 0, 1, 5),
    ],
)
def test_pairs(T: int, S: int, window: int | None, pairs: int) -> None:
    assert causal_pairs(T, S, window) == pairs


@given(st.integers(1, 40), st.integers(0, 40), st.none() | st.integers(1, 50))
def test_pairs_counted_one_by_one(T: int, S: int, window: int | None) -> None:
    seen = 0
    for query in range(S, S + T):
        for key in range(query + 1):
            seen += window is None or key > query - window
    assert causal_pairs(T, S, window) == seen


# ---- Parts


def test_a_token_of_llama_3_8b() -> None:
    """After 4,095 others. Two operations per weight, and 2 · 4,096 · 4,096 per layer and product.

    The weights of the products are 7,504,658,432: all but the embedding and the norms.
    """
    flops = step_flops(LLAMA_8B, T=1, past=4_095)
    assert flops.projections == 32 * 2 * 4_096 * (4_096 + 1_024 + 1_024 + 4_096)
    assert flops.mlp == 32 * 2 * 3 * 4_096 * 14_336
    assert flops.head == 2 * 4_096 * 128_256
    assert flops.projections + flops.mlp + flops.head == 2 * 7_504_658_432
    assert flops.scores == flops.values == 32 * 2 * 4_096 * 4_096
    assert flops.attention == 2_147_483_648
    assert flops.total == 2 * 7_504_658_432 + 2_147_483_648


def test_a_prompt_is_its_tokens_one_after_the_other() -> None:
    steps = sum((step_flops(LLAMA_8B, 1, n) for n in range(100)), Flops())
    assert step_flops(LLAMA_8B, 100) == steps


def test_chunks_add_up_to_the_prompt() -> None:
    chunks = step_flops(SMALL, 7) + step_flops(SMALL, 5, 7) + step_flops(SMALL, 8, 12)
    assert chunks == step_flops(SMALL, 20)


def test_a_batch_multiplies_everything() -> None:
    assert step_flops(SMALL, 5, 3, batch=4) == sum([step_flops(SMALL, 5, 3)] * 4, Flops())


def test_the_head_is_asked_for_as_many_positions_as_wanted() -> None:
    last, none, every = (step_flops(SMALL, 5, logits=n) for n in (1, 0, None))
    assert (none.head, last.head, every.head) == (0, 2 * 12 * 11, 5 * 2 * 12 * 11)
    assert last.projections == none.projections == every.projections


def test_a_window_caps_the_pairs() -> None:
    config = ModelConfig(**{**vars(SMALL), "window": 4})
    assert step_flops(config, 1, 50).scores == 2 * 2 * 6 * 4 * 4
    assert step_flops(config, 1, 50).projections == step_flops(SMALL, 1, 50).projections


def test_the_widths_of_keys_and_values_enter_apart() -> None:
    """Materialized MLA: 128 heads, keys of 192, values of 128."""
    assert attention_flops(10, heads=128, key_width=192, value_width=128) == (
        2 * 10 * 128 * 192, 2 * 10 * 128 * 128,
    )  # fmt: skip


def test_absorbed_mla_is_no_light_work() -> None:
    """One new token: 242 operations for each byte of the latents that it reads."""
    scores, values = attention_flops(4_096, heads=128, key_width=576, value_width=512)
    assert round((scores + values) / (4_096 * 576 * 2)) == 242


# ---- Against the counter


def counted(config: ModelConfig, T: int, S: int, batch: int, last_only: bool) -> int:
    """Operations that PyTorch counts. Its attention, taken apart, computes every pair."""
    model = Transformer(config)
    cache = model.new_cache(batch, S + T)
    if S:
        model(torch.zeros(batch, S, dtype=torch.long), cache)
    tokens = torch.zeros(batch, T, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, cache, last_only=last_only)
    return counter.get_total_flops()


SIZES = st.fixed_dictionaries({
    "d_model": st.integers(1, 20), "d_mlp": st.integers(1, 20), "n_layers": st.integers(1, 3),
    "vocab_size": st.integers(1, 20), "n_kv_heads": st.integers(1, 3),
    "group": st.integers(1, 3), "half": st.integers(1, 4), "qkv_bias": st.booleans(),
    "tied_embeddings": st.booleans(),
})  # fmt: skip


@settings(max_examples=40)
@given(SIZES, st.integers(1, 9), st.integers(0, 9), st.integers(1, 3), st.booleans())
def test_as_pytorch_counts(
    sizes: dict[str, Any], T: int, S: int, batch: int, last_only: bool
) -> None:
    """The counter takes all T · (S + T) pairs; what the mask spares is the difference."""
    heads = sizes["n_kv_heads"] * sizes.pop("group")
    config = ModelConfig(**sizes_of(sizes), n_heads=heads, max_positions=32)
    ours = step_flops(config, T, S, batch, logits=1 if last_only else None)
    spared = batch * (T * (S + T) - causal_pairs(T, S))
    scores, values = attention_flops(max(spared, 1), heads, config.head_dim, config.head_dim)
    masked = config.n_layers * (scores + values) if spared else 0
    assert counted(config, T, S, batch, last_only) == ours.total + masked


def sizes_of(drawn: dict[str, Any]) -> dict[str, Any]:
    return {**{k: v for k, v in drawn.items() if k != "half"}, "head_dim": 2 * drawn["half"]}


# ---- Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"T": 0}, "T must be at least 1, got 0"),
        ({"T": 1, "past": -1}, "past must be at least 0, got -1"),
        ({"T": 1.0}, "T must be a whole number"),
        ({"T": 1, "batch": 0}, "batch must be at least 1"),
        ({"T": 2, "logits": 3}, "logits must be from 0 to 2, got 3"),
    ],
)
def test_counts_that_make_no_sense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step_flops(SMALL, **arguments)


def test_a_window_of_nothing() -> None:
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        causal_pairs(3, 0, 0)
