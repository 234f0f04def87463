"""Formulas meet the instrument: operations that PyTorch counts while the model runs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvbook.accounting import causal_pairs, step_flops
from kvbook.config import ModelConfig
from kvbook.measure import count_flops
from kvbook.measure.flops import cpu_attention_flops
from kvbook.model.toy import toy_model
from kvbook.model.transformer import Transformer

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def tokens(model: Transformer, batch: int, T: int) -> torch.Tensor:
    return torch.randint(0, model.config.vocab_size, (batch, T))


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    small = st.integers(1, 6)
    kv_heads = draw(st.integers(1, 3))
    return ModelConfig(
        vocab_size=draw(st.integers(2, 50)),
        d_model=draw(st.integers(1, 24)),
        n_layers=draw(st.integers(1, 3)),
        n_heads=kv_heads * draw(st.integers(1, 3)),
        n_kv_heads=kv_heads,
        head_dim=2 * draw(small),
        d_mlp=draw(st.integers(1, 30)),
        tied_embeddings=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        window=draw(st.none() | st.integers(1, 12)),
    )


def test_the_toy_prefills_five_tokens_and_decodes_one() -> None:
    """By hand, for 4 layers, C 32, 6 query heads over 3 KV heads of width 8, F 64, V 64."""
    model = toy_model()
    cache = model.new_cache(1, 6)
    prefill = count_flops(lambda: model(tokens(model, 1, 5), cache, last_only=True))
    decode = count_flops(lambda: model(tokens(model, 1, 1), cache, last_only=True))
    # q and output are 32 × 48, k and v 32 × 24: 4,608 weights a layer, two operations each.
    assert prefill.projections == 4 * 5 * 2 * 4608 == 184_320
    assert decode.projections == 4 * 2 * 4608 == 36_864
    # 5 × 5 pairs, and 1 × 6; six heads of width 8; two products of two operations.
    assert prefill.attention == 4 * 25 * 6 * 8 * 4 == 19_200
    assert decode.attention == 4 * 6 * 6 * 8 * 4 == 4_608
    # gate, up and down: three matrices of 32 × 64.
    assert prefill.mlp == 4 * 5 * 2 * 6144 == 245_760
    assert decode.mlp == 4 * 2 * 6144 == 49_152
    assert prefill.head == decode.head == 2 * 32 * 64 == 4_096
    assert prefill.total == 184_320 + 19_200 + 245_760 + 4_096
    assert prefill.other == decode.other == 0


@settings(max_examples=25)
@given(config=configs(), batch=st.integers(1, 3), P=st.integers(1, 12), T=st.integers(1, 4))
def test_formulas_are_the_counter(config: ModelConfig, batch: int, P: int, T: int) -> None:
    """Without a cache, at prefill, and for T more tokens after P."""
    model = Transformer(config)
    cache = model.new_cache(batch, P + T)
    passes = [
        (count_flops(lambda: model(tokens(model, batch, P))), P, 0, P),
        (count_flops(lambda: model(tokens(model, batch, P), cache, last_only=True)), P, 0, 1),
        (count_flops(lambda: model(tokens(model, batch, T), cache)), T, P, T),
    ]
    for counted, new, past, logits in passes:
        formula = step_flops(config, new, past, batch, logits)
        assert counted.projections == formula.projections
        assert counted.mlp == formula.mlp
        assert counted.head == formula.head
        assert counted.other == 0
        # The counter sees all T·S pairs; the formula those that the mask leaves.
        hidden = new * (past + new) - causal_pairs(new, past, config.window)
        per_pair = 4 * config.n_layers * config.n_heads * config.head_dim
        assert counted.attention - formula.attention == batch * hidden * per_pair


def test_the_counter_sees_16_pairs_where_10_are_visible() -> None:
    """verl-project/verl#4959: four tokens make 10 pairs; 16 ignores the mask, 8 halves it."""
    model = toy_model(n_layers=1, n_heads=1, n_kv_heads=1)
    counted = count_flops(lambda: model(tokens(model, 1, 4)))
    per_pair = 2 * 2 * 8  # scores and values, two operations each, width 8
    assert counted.attention == 16 * per_pair
    assert step_flops(model.config, 4).attention == 10 * per_pair


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [1, 5])
def test_the_added_formula_is_what_pytorch_counts_in_separate_products(
    dtype: torch.dtype, T: int
) -> None:
    """Without a fused operator attention is two batched products that PyTorch knows itself."""
    model = toy_model(dtype=dtype)
    inputs = tokens(model, 2, T)
    fused = count_flops(lambda: model(inputs))
    with sdpa_kernel(SDPBackend.MATH):
        separate = count_flops(lambda: model(inputs))
    assert fused == separate


def test_keys_and_values_enter_with_their_own_widths() -> None:
    """AI-Hypercomputer/maxtext#1972: 192 for keys and 128 for values."""
    q, k, v = torch.ones(1, 2, 4, 192), torch.ones(1, 2, 4, 192), torch.ones(1, 2, 4, 128)
    counted = count_flops(lambda: scaled_dot_product_attention(q, k, v))
    assert counted.total == 2 * 2 * 16 * (192 + 128) == 20_480
    assert counted.other == counted.total  # in no module
    # A kernel that takes two widths at once is charged for both.
    assert cpu_attention_flops(tuple(q.shape), tuple(k.shape), tuple(v.shape)) == 20_480


def test_every_module_has_its_share() -> None:
    model = toy_model()
    shares = count_flops(lambda: model(tokens(model, 1, 1))).by_module
    assert shares["Transformer.blocks.2.attention.qkv"] == 2 * 32 * 96
    assert shares["Transformer.blocks.2.mlp"] == 2 * 6144
    blocks = sum(shares[f"Transformer.blocks.{layer}"] for layer in range(4))
    assert shares["Transformer"] == blocks + 2 * 32 * 64


def test_inference_mode_counts_the_same() -> None:
    model = toy_model()
    inputs = tokens(model, 1, 3)
    plain = count_flops(lambda: model(inputs))
    with torch.inference_mode():
        assert count_flops(lambda: model(inputs)) == plain


def test_work_outside_a_model_is_other() -> None:
    model = toy_model()
    inputs = tokens(model, 1, 3)

    def run() -> None:
        model(inputs)
        torch.ones(2, 3) @ torch.ones(3, 5)

    assert count_flops(run).other == 2 * 2 * 3 * 5
