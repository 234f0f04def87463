"""Layers that differ: heads, widths, chunks, sources, histories and patterns, by hand.

All for 16 bits per element and one sequence. Where a report is public it is named.
"""

from typing import Any

import pytest

from kvbook.accounting.geometry import CacheGeometry
from kvbook.accounting.need import CacheSize, cache_size
from kvbook.errors import UnsupportedModelError

GIB = 1024**3
MODEL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4_096, "num_hidden_layers": 40,
    "num_attention_heads": 32, "head_dim": 128,
}  # fmt: skip


def size(fields: dict[str, Any], tokens: int = 1, **options: Any) -> CacheSize:
    return cache_size(CacheGeometry.from_hf(fields, **options), tokens)


def per_token(fields: dict[str, Any], **options: Any) -> int:
    return size(fields, **options).bytes_per_token


def need(fields: dict[str, Any], tokens: int, **options: Any) -> int:
    return size(fields, tokens, **options).need_bytes


# ---- Kinds of layers that differ in heads or widths


def test_mimo_v2() -> None:
    """MiMo-V2-Flash: 9 full layers of 4 heads, 39 windowed ones of 8; keys 192, values 128 wide."""
    fields = {
        "model_type": "mimo_v2_flash", "num_hidden_layers": 48, "hidden_size": 4_096,
        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128,
        "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_head_dim": 192,
        "swa_v_head_dim": 128, "sliding_window": 128, "sliding_window_size": 128,
        "hybrid_layer_pattern": ([0] + [1] * 4 + [0]) + ([1] * 5 + [0]) * 7,
        "max_position_embeddings": 262_144,
    }  # fmt: skip
    assert need(fields, 10_000) == 2 * 320 * (9 * 4 * 10_000 + 39 * 8 * 129)
    derived = {name: value for name, value in fields.items() if not name.startswith("swa_")}
    assert need(derived, 10_000) == need(fields, 10_000)


GEMMA4 = {
    "model_type": "gemma4_text", "num_hidden_layers": 60, "hidden_size": 5_376,
    "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256,
    "global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": True,
    "sliding_window": 1_024,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
}  # fmt: skip


def test_gemma_4_keys_that_serve_as_values() -> None:
    """10 full layers of 4 heads of 512, 50 windowed ones of 16 of 256; a window of 1,024."""
    windows = 50 * 2 * 16 * 256 * 2 * 1_024
    assert need(GEMMA4, 10_000) == windows + 10 * 2 * 4 * 512 * 2 * 10_000
    geometry = CacheGeometry.from_hf(GEMMA4)
    assert geometry.stored_once is not None
    assert cache_size(geometry.stored_once, 10_000).need_bytes == (
        windows + 10 * 4 * 512 * 2 * 10_000
    )
    assert any("serve as values" in words for words in geometry.assumptions)
    assert CacheGeometry.from_hf(MODEL).stored_once is None


def test_gemma_4_without_shared_keys_has_the_heads_of_all_layers() -> None:
    fields = {**GEMMA4, "attention_k_eq_v": False}
    assert need(fields, 10_000) == 50 * 2 * 16 * 256 * 2 * 1_024 + 10 * 2 * 16 * 512 * 2 * 10_000


def test_sizes_of_single_layers_in_objects_of_their_own() -> None:
    fields = {
        **MODEL, "num_hidden_layers": 3, "num_key_value_heads": 8,
        "per_layer_config": {"1": {"head_dim": 64, "num_key_value_heads": 2}},
    }  # fmt: skip
    assert per_token(fields) == 2 * 2 * (2 * 8 * 128 + 2 * 64)


def test_block_configs() -> None:
    """Nemotron-NAS: 32 heads in groups of 4, a layer without attention, groups of 8."""
    blocks = [
        {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 1.0}},
        {"attention": {"no_op": True}, "ffn": {}},
        {"attention": {"replace_with_linear": True}, "ffn": {}},
        {"attention": {"n_heads_in_group": 8}, "ffn": {}},
    ]
    fields = {**MODEL, "model_type": "nemotron-nas", "num_hidden_layers": 4,
              "block_configs": blocks}  # fmt: skip
    assert per_token(fields) == (8 + 4) * 2 * 128 * 2


def test_step_3_5_windowed_layers_have_groups_of_their_own() -> None:
    fields = {
        "model_type": "step3p5", "num_hidden_layers": 4, "hidden_size": 4_096,
        "num_attention_heads": 64, "num_attention_groups": 8, "head_dim": 128,
        "sliding_window": 512, "layer_types": ["full_attention"] + ["sliding_attention"] * 3,
        "attention_other_setting": {
            "attention_type": "sliding_attention", "num_attention_heads": 96,
            "num_attention_groups": 4, "head_dim": 128,
        },
    }  # fmt: skip
    right = 2 * 128 * 2 * (8 * 1_000 + 3 * 4 * 512)
    assert need(fields, 1_000) == right
    padded = [*fields["layer_types"], "full_attention"]  # type: ignore[misc]
    longer = {**fields, "layer_types": padded, "num_nextn_predict_layers": 1}
    assert need(longer, 1_000) == right


# ---- Chunks


def test_chunked_attention() -> None:
    """Llama 4 Scout: 12 of 48 layers see everything, 36 a chunk of 8,192; 4,096 B each."""
    fields = {
        "model_type": "llama4", "text_config": {
            "model_type": "llama4_text", "num_hidden_layers": 48, "hidden_size": 5_120,
            "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
            "attention_chunk_size": 8_192,
        },
    }  # fmt: skip
    assert need(fields, 100_000) == 4_096 * (12 * 100_000 + 36 * 8_192)
    marks = {**fields["text_config"], "no_rope_layers": [1, 0] * 24}  # type: ignore[dict-item]
    assert need(marks, 100_000) == 4_096 * (24 * 100_000 + 24 * 8_192)


# ---- Sources


def test_an_encoder_decoder_has_a_cache_of_the_source() -> None:
    """Whisper large: 32 layers of 20 heads of 64, and 1,500 frames whatever the answer's length."""
    fields = {
        "model_type": "whisper", "is_encoder_decoder": True, "d_model": 1_280,
        "encoder_layers": 32, "decoder_layers": 32, "encoder_attention_heads": 20,
        "decoder_attention_heads": 20, "max_source_positions": 1_500,
        "max_target_positions": 448, "num_hidden_layers": 32,
    }  # fmt: skip
    source = 32 * 2 * 1_280 * 2 * 1_500
    assert [need(fields, tokens) - source for tokens in (1, 448)] == [163_840, 448 * 163_840]
    assert per_token(fields) == 163_840


def test_a_source_of_unknown_length_is_asked_for() -> None:
    """T5 large: 24 layers of 16 heads of 64 on each side."""
    fields = {
        "model_type": "t5", "is_encoder_decoder": True, "d_model": 1_024, "d_kv": 64,
        "num_layers": 24, "num_decoder_layers": 24, "num_heads": 16,
    }  # fmt: skip
    with pytest.raises(UnsupportedModelError, match=r"cross-attention.*give source_tokens"):
        per_token(fields)
    assert need(fields, 10, source_tokens=100) == (100 + 10) * 24 * 2 * 1_024 * 2
    words = CacheGeometry.from_hf(fields, source_tokens=100).assumptions
    assert "cross-attention reads a source of 100 tokens, as stated by the caller" in words


def test_what_stands_around_a_nested_model_is_read_too() -> None:
    inner = {**MODEL, "num_key_value_heads": 8}
    outer = {"model_type": "t5gemma", "is_encoder_decoder": True, "text_config": inner}
    with pytest.raises(UnsupportedModelError, match="cross-attention"):
        per_token(outer)
    outer = {"model_type": "several", "num_kv_shared_layers": 20, "text_config": inner}
    assert per_token(outer) == 163_840 // 2


def test_layers_that_read_an_image() -> None:
    """Llama 3.2 Vision: 8 of 40 layers keep the image's 6,404 positions and no text."""
    fields = {**MODEL, "model_type": "mllama_text_model", "num_key_value_heads": 8,
              "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38]}  # fmt: skip
    assert need(fields, 1_000, source_tokens=6_404) == 4_096 * (32 * 1_000 + 8 * 6_404)


def test_latents_beside_a_state_in_one_layer_are_refused() -> None:
    fields = {
        "model_type": "falcon_h1", "num_hidden_layers": 2, "hidden_size": 64,
        "num_attention_heads": 8, "num_key_value_heads": 8, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    }  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="kv_lora_rank with windowed layers"):
        CacheGeometry.from_hf(fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"layer_types": ["mamba", "full_attention"], "conv_L_cache": 3},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
        {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
        {"index_head_dim": 8},
    ],
)  # fmt: skip
def test_only_layers_of_keys_and_values_can_read_an_image(fields: dict[str, Any]) -> None:
    fields = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8,
              "cross_attention_layers": [0], **fields}  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="cross_attention_layers names layer 0, which"):
        need(fields, 10, source_tokens=100)


# ---- Compressed histories


def test_deepseek_v4() -> None:
    """Entries of 512 every 4 or 128 tokens beside a window of 128; index keys of 128 every 4."""
    fields = {
        "model_type": "deepseek_v4", "num_hidden_layers": 5, "hidden_size": 4_096,
        "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512,
        "qk_rope_head_dim": 64, "q_lora_rank": 1_024, "o_groups": 8, "o_lora_rank": 1_024,
        "sliding_window": 128, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 512,
        "compress_ratios": [0, 0, 4, 128, 4, 0], "num_nextn_predict_layers": 1,
    }  # fmt: skip
    for tokens in (1_024, 1_025, 1_027):
        windows = 5 * 128 * 512 * 2
        assert need(fields, tokens) == windows + 2 * 256 * (512 + 128) * 2 + 8 * 512 * 2
    assert size(fields).bytes_per_token_beyond_windows == 2 * (512 + 128) * 2 // 4 + 512 * 2 // 128
    with pytest.raises(UnsupportedModelError, match="2 KV heads"):
        need({**fields, "num_key_value_heads": 2}, 1)


# ---- Patterns of windows


def test_an_interval_of_global_layers() -> None:
    """8 layers of 512 B, of which 2 see all 32,768 tokens and 6 the last 2,048."""
    fields = {
        "model_type": "other", "num_hidden_layers": 8, "hidden_size": 1_024,
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 128,
        "sliding_window": 2_048, "global_attn_every_n_layers": 4,
    }  # fmt: skip
    assert need(fields, 32_768) == 39_845_888
    with pytest.raises(UnsupportedModelError, match=r"= 3 does not divide 8 layers"):
        need({**fields, "global_attn_every_n_layers": 3}, 1)


@pytest.mark.parametrize(
    "name",
    ["global_layer_interval", "local_layer_pattern", "every_n_layers_global", "swa_interval",
     "sliding_window_skip"],
)  # fmt: skip
def test_a_pattern_that_nothing_reads_is_refused(name: str) -> None:
    fields = {**MODEL, "model_type": "mistral", "sliding_window": 2_048, name: 4}
    with pytest.raises(UnsupportedModelError, match=rf"{name} = 4 is not known here"):
        per_token(fields)


@pytest.mark.parametrize("family", ["llama", "unheard"])
def test_a_pattern_without_a_window_is_refused(family: str) -> None:
    fields = {**MODEL, "model_type": family, "sliding_window_pattern": 6}
    with pytest.raises(UnsupportedModelError, match="sliding_window_pattern = 6 is not known"):
        per_token(fields)


def test_a_window_in_an_unknown_family_does_not_say_which_layers_have_it() -> None:
    with pytest.raises(UnsupportedModelError, match=r"sliding_window = 2048.*not which.*'unheard'"):
        per_token({**MODEL, "model_type": "unheard", "sliding_window": 2_048})


@pytest.mark.parametrize("pattern", ["LLLG", 4])
def test_a_pattern_of_letters(pattern: str | int) -> None:
    """EXAONE 4: three local layers and a global one."""
    fields = {
        "model_type": "exaone4", "num_hidden_layers": 8, "hidden_size": 1_024,
        "num_attention_heads": 8, "num_key_value_heads": 8, "sliding_window": 4_096,
        "sliding_window_pattern": pattern,
    }  # fmt: skip
    kinds = [layer.kind for layer in CacheGeometry.from_hf(fields).layers]
    assert kinds == ["window", "window", "window", "full"] * 2
