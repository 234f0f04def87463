"""Every way in which a published model says which of its layers do what, with that model's fields.

f(ull), w(indow), c(hunk), l(atent), r(ecurrent), n(one), s(hared). Bytes are for 16 bits.
"""

from typing import Any

import pytest

from kvbook.accounting.geometry import CacheGeometry
from kvbook.accounting.need import cache_size

PUBLISHED: dict[str, tuple[dict[str, Any], str, int]] = {
    # model: fields, kinds of its layers, bytes needed for 100,000 tokens
    "LFM2-1.2B": (
        {"model_type": "lfm2", "num_hidden_layers": 16, "hidden_size": 2_048,
         "num_attention_heads": 32, "num_key_value_heads": 8, "conv_L_cache": 3,
         "full_attn_idxs": [2, 5, 8, 10, 12, 14], "block_dim": 2_048, "conv_dim": 2_048},
        "rrfrrfrrfrfrfrfr", 6 * 2 * 8 * 64 * 2 * 100_000,
    ),
    "Bamba-9B": (
        {"model_type": "bamba", "num_hidden_layers": 32, "hidden_size": 4_096,
         "num_attention_heads": 32, "num_key_value_heads": 8, "attn_layer_indices": [9, 18, 27],
         "attn_rotary_emb": 64, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128,
         "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 256},
        "rrrrrrrrrfrrrrrrrrfrrrrrrrrfrrrr", 3 * 2 * 8 * 128 * 2 * 100_000,
    ),
    "Kimi-Linear-48B": (
        {"model_type": "kimi_linear", "num_hidden_layers": 27, "hidden_size": 2_304,
         "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 72,
         "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
         "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True,
         "num_nextn_predict_layers": 0, "moe_layer_freq": 1, "num_expert_group": 1,
         "linear_attn_config": {
             "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
             "kda_layers": [n for n in range(1, 27) if n % 4], "short_conv_kernel_size": 4}},
        "rrrl" * 6 + "rrl", 7 * 576 * 2 * 100_000,
    ),
    "Qwen3-Next-80B": (
        {"model_type": "qwen3_next", "num_hidden_layers": 48, "hidden_size": 2_048,
         "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
         "full_attention_interval": 4, "linear_num_value_heads": 32, "linear_num_key_heads": 16,
         "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
         "partial_rotary_factor": 0.25, "decoder_sparse_step": 1, "mlp_only_layers": []},
        "rrrf" * 12, 12 * 2 * 2 * 256 * 2 * 100_000,
    ),
    "Nemotron-H-8B": (
        {"model_type": "nemotron_h", "num_hidden_layers": 52, "hidden_size": 4_096,
         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
         "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
         "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
         "conv_kernel": 4, "expand": 2, "chunk_size": 128},
        "rnrnrnrfnrnrnrnrnrfnrnrnrnrnrfnrnrnrnrnrfnrnrnrnrnrn", 4 * 2 * 8 * 128 * 2 * 100_000,
    ),
    "MiniMax-Text-01, 8 layers": (
        {"model_type": "minimax_text_01", "num_hidden_layers": 8, "hidden_size": 6_144,
         "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
         "attn_type_list": [0] * 7 + [1], "rotary_dim": 64, "shared_intermediate_size": 0},
        "rrrrrrrf", 2 * 8 * 128 * 2 * 100_000,
    ),
    "Jamba-v0.1": (
        {"model_type": "jamba", "num_hidden_layers": 32, "hidden_size": 4_096,
         "num_attention_heads": 32, "num_key_value_heads": 8, "attn_layer_period": 8,
         "attn_layer_offset": 4, "expert_layer_period": 2, "expert_layer_offset": 1,
         "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 256},
        "rrrrfrrr" * 4, 4 * 2 * 8 * 128 * 2 * 100_000,
    ),
    "RecurrentGemma-2B": (
        {"model_type": "recurrent_gemma", "num_hidden_layers": 26, "hidden_size": 2_560,
         "num_attention_heads": 10, "num_key_value_heads": 1, "lru_width": 2_560,
         "conv1d_width": 4, "attention_window_size": 2_048, "head_dim": 256,
         "block_types": ["recurrent", "recurrent", "attention"]},
        "rrw" * 8 + "rr", 8 * 2 * 256 * 2 * 2_048,
    ),
    "GPT-Neo-1.3B": (
        {"model_type": "gpt_neo", "num_layers": 24, "hidden_size": 2_048, "num_heads": 16,
         "attention_types": [[["global", "local"], 12]], "window_size": 256},
        "fw" * 12, 12 * 2 * 2_048 * 2 * (100_000 + 256),
    ),
    "Ring-2.5, 12 layers": (
        {"model_type": "bailing_hybrid", "num_hidden_layers": 12, "hidden_size": 4_096,
         "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128,
         "layer_group_size": 6, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
         "qk_nope_head_dim": 128, "v_head_dim": 128, "short_conv_kernel_size": 4},
        "rrrrrl" * 2, 2 * 576 * 2 * 100_000,
    ),
    "Falcon-H1-0.5B, 4 layers": (
        {"model_type": "falcon_h1", "num_hidden_layers": 4, "hidden_size": 1_024,
         "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "mamba_d_ssm": 1_536,
         "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
         "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 128},
        "fr" * 4, 4 * 2 * 2 * 64 * 2 * 100_000,
    ),
    "Granite-4.0-H-Tiny, 10 layers": (
        {"model_type": "granitemoehybrid", "num_hidden_layers": 10, "hidden_size": 1_536,
         "num_attention_heads": 12, "num_key_value_heads": 4,
         "layer_types": ["mamba"] * 5 + ["attention"] + ["mamba"] * 4, "mamba_n_heads": 48,
         "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4,
         "mamba_expand": 2, "attention_multiplier": 0.0078125, "shared_intermediate_size": 1_024},
        "rrrrrfrrrr", 2 * 4 * 128 * 2 * 100_000,
    ),
    "CWM, 8 layers": (
        {"model_type": "cwm", "num_hidden_layers": 8, "hidden_size": 6_144,
         "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
         "sliding_window": 8_192},
        "fwww" * 2, 4_096 * (2 * 100_000 + 6 * 8_192),
    ),
    "Ettin decoder, 6 layers": (
        {"model_type": "modernbert-decoder", "num_hidden_layers": 6, "hidden_size": 768,
         "num_attention_heads": 12, "local_attention": 128, "global_attn_every_n_layers": 3},
        "fww" * 2, 2 * 768 * 2 * (2 * 100_000 + 4 * 64),
    ),
}  # fmt: skip


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_published_model_says_which_layers_do_what(model: str) -> None:
    fields, kinds, need = PUBLISHED[model]
    geometry = CacheGeometry.from_hf(fields)
    assert "".join(layer.kind[0] for layer in geometry.layers) == kinds
    assert cache_size(geometry, 100_000).need_bytes == need


def test_recurrent_gemma_s_state() -> None:
    """2,560 channels, of which a number and three inputs are kept each."""
    layer = CacheGeometry.from_hf(PUBLISHED["RecurrentGemma-2B"][0]).layers[0]
    assert layer.state is not None
    assert sum(kept.heads * kept.width for kept in layer.state) == 2_560 * (1 + 3)


@pytest.mark.parametrize(("kernel", "inputs"), [(4, 3), (2, 1), (1, 0)])
def test_kimi_s_state(kernel: int, inputs: int) -> None:
    """32 heads of 128 × 128, and the last inputs of q, k and v: 3 · 32 · 128 channels."""
    fields = PUBLISHED["Kimi-Linear-48B"][0]
    linear = {**fields["linear_attn_config"], "short_conv_kernel_size": kernel}
    geometry = CacheGeometry.from_hf({**fields, "linear_attn_config": linear})
    per_layer = 4 * (32 * 128 * 128 + 12_288 * inputs)
    assert cache_size(geometry, 1).constant_state_bytes == 20 * per_layer


def test_kimi_s_convolutions_must_be_stated() -> None:
    fields = PUBLISHED["Kimi-Linear-48B"][0]
    linear = {**fields["linear_attn_config"], "short_conv_kernel_size": None}
    with pytest.raises(ValueError, match="the config has no short_conv_kernel_size"):
        CacheGeometry.from_hf({**fields, "linear_attn_config": linear})


def test_full_and_linear_layers_together_are_all_layers() -> None:
    fields = PUBLISHED["Kimi-Linear-48B"][0]
    linear = {**fields["linear_attn_config"], "kda_layers": [1, 2]}
    with pytest.raises(ValueError, match=r"full_attn_layers and kda_layers together"):
        CacheGeometry.from_hf({**fields, "linear_attn_config": linear})


def test_chatglm_may_leave_its_groups_unused() -> None:
    fields = {
        "model_type": "chatglm", "num_layers": 28, "hidden_size": 4_096, "head_dim": 128,
        "num_attention_heads": 32, "multi_query_group_num": 2, "multi_query_attention": True,
    }  # fmt: skip
    for used, heads in ((True, 2), (False, 32)):
        geometry = CacheGeometry.from_hf({**fields, "multi_query_attention": used})
        assert geometry.layers[0].per_token[0].heads == heads
