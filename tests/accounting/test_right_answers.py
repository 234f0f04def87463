"""Configs that were answered wrong somewhere, with the figure that is right, worked out by hand.

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


# ---- One size under many names


@pytest.mark.parametrize(
    "name",
    ["num_key_value_heads", "kv_n_heads", "n_kv_heads", "num_query_groups", "num_attention_groups",
     "num_kv_groups", "head_count_kv", "num_heads_kv", "multi_query_group_num", "num_kv_heads",
     "n_head_kv"],
)  # fmt: skip
def test_kv_heads_under_any_name(name: str) -> None:
    """40 layers · 2 · 8 heads · 128 · 2 B; with query heads in their place it would be 655,360."""
    assert per_token({**MODEL, name: 8}) == 163_840


@pytest.mark.parametrize("name", ["num_kv_groups", "kv_n_heads", "num_query_groups"])
def test_two_names_that_disagree_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"num_key_value_heads 4 and {name} 8 contradict"):
        per_token({**MODEL, name: 8, "num_key_value_heads": 4})


@pytest.mark.parametrize("name", ["attention_head_dim", "dim_head", "d_kv", "kv_channels"])
def test_head_width_under_any_name(name: str) -> None:
    fields = {key: value for key, value in MODEL.items() if key != "head_dim"}
    assert per_token({**fields, "num_key_value_heads": 8, name: 64}) == 40 * 2 * 8 * 64 * 2
    with pytest.raises(ValueError, match=rf"head_dim 128 and {name} 64 contradict"):
        per_token({**MODEL, name: 64})


@pytest.mark.parametrize("name", ["sliding_window_size", "window_size", "attention_window_size"])
def test_a_window_under_any_name(name: str) -> None:
    fields = {**MODEL, "num_key_value_heads": 8, "layer_types": ["sliding_attention"] * 40}
    assert need({**fields, name: 100}, 1_000) == 100 * 163_840
    with pytest.raises(ValueError, match=rf"sliding_window 50 and {name} 100 contradict"):
        need({**fields, name: 100, "sliding_window": 50}, 1_000)


def test_attention_groups() -> None:
    """mlx-lm#949: 8 layers of 64 query heads over 8 groups: 8 · 2 · 8 · 128 · 2 B."""
    fields = {
        "model_type": "step3_text", "num_hidden_layers": 8, "hidden_size": 8_192,
        "num_attention_heads": 64, "num_attention_groups": 8, "head_dim": 128,
    }  # fmt: skip
    assert per_token(fields) == 32_768


# ---- Vendors' own files

MISTRAL = {
    "dim": 4_096, "n_layers": 32, "head_dim": 128, "hidden_dim": 14_336, "n_heads": 32,
    "n_kv_heads": 8, "norm_eps": 1e-5, "vocab_size": 32_768, "rope_theta": 1e6,
}  # fmt: skip


def test_mistral_s_own_file() -> None:
    """vllm#33521: 32 · 2 · 8 · 128 · 2 B."""
    assert per_token(MISTRAL) == 131_072


def test_a_list_of_windows_is_repeated_over_the_layers() -> None:
    """8 full layers and 24 with 32,768 tokens, each 4,096 B per token."""
    fields = {**MISTRAL, "sliding_window": [None, 32_768, 32_768, 32_768]}
    kinds = [layer.kind for layer in CacheGeometry.from_hf(fields).layers]
    assert kinds == ["full", "window", "window", "window"] * 8
    assert need(fields, 100_000) == 4_096 * (8 * 100_000 + 24 * 32_768)


def test_a_list_of_windows_that_does_not_fit_the_layers() -> None:
    with pytest.raises(ValueError, match=r"sliding_window has 3 items, but num_hidden_layers is"):
        need({**MISTRAL, "sliding_window": [None, 4_096, 4_096]}, 1)


def test_gpt_oss_s_own_file() -> None:
    """vmlx#205: 12 full and 12 windowed layers, 2,048 B each: 12 · 2,048 · (8,192 + 128)."""
    fields = {
        "num_hidden_layers": 24, "num_experts": 32, "experts_per_token": 4, "vocab_size": 201_088,
        "hidden_size": 2_880, "intermediate_size": 2_880, "swiglu_limit": 7.0, "head_dim": 64,
        "num_attention_heads": 64, "num_key_value_heads": 8, "sliding_window": 128,
        "initial_context_length": 4_096, "rope_theta": 150_000, "rope_scaling_factor": 32.0,
        "rope_ntk_alpha": 1, "rope_ntk_beta": 32,
    }  # fmt: skip
    assert need(fields, 8_192) == 204_472_320
    assert CacheGeometry.from_hf(fields).max_positions == 131_072


# ---- Latents that are switched off


def test_null_and_zero_latents_with_a_switch_that_is_off() -> None:
    """DeepSeek-OCR: 12 layers of 10 heads of 128."""
    fields = {
        "model_type": "deepseek_vl_v2",
        "language_config": {
            "model_type": "deepseek_v2", "num_hidden_layers": 12, "hidden_size": 1_280,
            "num_attention_heads": 10, "num_key_value_heads": 10, "use_mla": False,
            "kv_lora_rank": None, "q_lora_rank": None, "qk_nope_head_dim": 0,
            "qk_rope_head_dim": 0, "v_head_dim": 0,
        },
    }  # fmt: skip
    assert per_token(fields) == 61_440


# ---- More caches than layers, and fewer

LONGCAT = {
    "model_type": "longcat_flash", "num_layers": 28, "hidden_size": 6_144,
    "num_attention_heads": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip


def test_two_attention_sublayers_per_layer() -> None:
    """transformers#48899: 28 · 2 · (512 + 64) · 2 B."""
    assert per_token(LONGCAT) == 64_512


LOOP = {
    **MODEL, "model_type": "iquestloopcoder", "num_hidden_layers": 80, "num_key_value_heads": 8,
    "loop_num": 2, "loop_window_size": 64,
}  # fmt: skip


def test_layers_that_run_twice() -> None:
    """llama.cpp#18525: the second pass of 80 layers has caches of its own, with a window of 64.

    4,096 B · 80 · 2 at the first token; 4,096 B · 80 · (4,096 + 64) at 4,096 tokens.
    """
    assert need(LOOP, 1) == per_token(LOOP) == 655_360
    assert need(LOOP, 4_096) == 1_363_148_800
    no_window = {name: value for name, value in LOOP.items() if name != "loop_window_size"}
    assert need(no_window, 4_096) == 4_096 * 655_360


def test_universal_transformers_keep_a_cache_per_step() -> None:
    fields = {**MODEL, "model_type": "ouro", "num_key_value_heads": 32, "total_ut_steps": 4}
    assert per_token(fields) == 4 * 655_360


def test_layers_that_share_in_pairs() -> None:
    """vllm#18212: 64 layers of 8 heads of 80, of which every other keeps: 32 · 2 · 8 · 80 · 2 B."""
    fields = {
        "model_type": "hunyuan", "num_hidden_layers": 64, "hidden_size": 6_400,
        "num_attention_heads": 80, "num_key_value_heads": 8, "use_cla": True,
        "cla_share_factor": 2,
    }  # fmt: skip
    assert per_token(fields) == 81_920
    assert per_token({**fields, "use_cla": False}) == 163_840
    with pytest.raises(UnsupportedModelError, match="cla_share_factor = 2"):
        per_token({name: value for name, value in fields.items() if name != "use_cla"})


def test_the_last_layers_read_an_earlier_cache() -> None:
    """Gemma 3n E4B: 20 of 35 layers keep one, 4 of them full; 2 heads of 256: 2,048 B each."""
    fields = {
        "model_type": "gemma3n",
        "text_config": {
            "model_type": "gemma3n_text", "num_hidden_layers": 35, "hidden_size": 2_048,
            "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
            "num_kv_shared_layers": 15, "sliding_window": 512,
        },
    }  # fmt: skip
    assert per_token(fields) == 20 * 2_048
    assert need(fields, 10_000) == 2_048 * (4 * 10_000 + 16 * 512)
    absent = {name: value for name, value in fields["text_config"].items()
              if name not in ("num_kv_shared_layers", "num_key_value_heads")}  # fmt: skip
    assert need({**fields, "text_config": absent}, 10_000) == need(fields, 10_000)


def test_shared_layers_leave_one_that_keeps() -> None:
    with pytest.raises(ValueError, match=r"num_kv_shared_layers must leave a layer.*got 40 of 40"):
        per_token({**MODEL, "num_kv_shared_layers": 40})


# ---- Layers that predict further tokens


@pytest.mark.parametrize(
    "name",
    ["num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules",
     "mtp_num_layers"],
)  # fmt: skip
def test_prediction_layers_are_named_as_left_out_and_counted_on_demand(name: str) -> None:
    fields = {**MODEL, "num_key_value_heads": 8, name: 2}
    assert per_token(fields) == 163_840
    assert "extra layers that predict further tokens (2 of them)" in " ".join(
        size(fields).exclusions
    )
    assert per_token(fields, mtp=1) == 163_840 + 4_096
    both = CacheGeometry.from_hf(fields, mtp=2)
    assert (both.extra_layers, len(both.layers)) == (0, 42)
    with pytest.raises(ValueError, match=r"mtp must be from 0 to 2, got 3"):
        CacheGeometry.from_hf(fields, mtp=3)


def test_a_list_of_prediction_layers_is_counted_by_its_length() -> None:
    fields = {**MODEL, "mtp_layers_block_type": ["full_attention", "moe"]}
    assert CacheGeometry.from_hf(fields).extra_layers == 1


# ---- Index keys


def test_index_keys_in_some_layers() -> None:
    """rMLX#432: 60 · 2 · 4 · 128 · 2 B of keys and values, and 57 · 128 · 2 B of index keys."""
    fields = {
        "model_type": "minimax_m3_vl", "text_config": {
            "model_type": "minimax_m3_vl_text", "num_hidden_layers": 60, "hidden_size": 6_144,
            "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
            "sparse_attention_config": {
                "use_sparse_attention": True, "sparse_attention_freq": [0] * 3 + [1] * 57,
                "sparse_index_dim": 128, "sparse_num_index_heads": 4, "sparse_block_size": 128,
                "sparse_topk_blocks": 16, "sparse_local_block": 1,
            },
        },
    }  # fmt: skip
    assert per_token(fields) == 137_472
    named = {
        **{key: value for key, value in fields["text_config"].items()  # type: ignore[attr-defined]
           if key != "sparse_attention_config"},
        "layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57, "index_head_dim": 128,
    }  # fmt: skip
    assert per_token(named) == 137_472


@pytest.mark.parametrize(
    ("change", "indexers"),
    [
        ({}, 6),
        ({"index_topk_freq": 1}, 6),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 2}, 4),  # layers 0, 1, 3 and 5
        ({"index_topk_pattern": "FSSFSS"}, 2),
        ({"indexer_types": ["full"] + ["shared"] * 5}, 1),
    ],
)
def test_layers_that_take_their_neighbor_s_choice_keep_no_index_keys(
    change: dict[str, Any], indexers: int
) -> None:
    fields = {**LONGCAT, "model_type": "glm_moe_dsa", "index_head_dim": 128, "index_topk": 2_048}
    fields = {**{k: v for k, v in fields.items() if k != "num_layers"}, "num_hidden_layers": 6}
    assert per_token({**fields, **change}) == 6 * 576 * 2 + indexers * 128 * 2


# ---- Lengths


def test_yarn_lifts_the_usable_length_once() -> None:
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    fields = {**MODEL, "rope_scaling": rope}
    for stated in (32_768, 131_072):
        geometry = CacheGeometry.from_hf({**fields, "max_position_embeddings": stated})
        assert geometry.max_positions == 131_072


def test_a_window_as_long_as_the_positions_is_still_a_window() -> None:
    """32 layers · 2 · 8 · 128 · 2 B · 131,072 of 200,000 tokens: 17.2 GB and not 26.2."""
    fields = {
        **MODEL, "model_type": "mistral", "num_hidden_layers": 32, "num_key_value_heads": 8,
        "sliding_window": 131_072, "max_position_embeddings": 131_072,
    }  # fmt: skip
    assert need(fields, 200_000) == 17_179_869_184


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
        {"attention": {"n_heads_in_group": 8}, "ffn": {}},
    ]
    fields = {**MODEL, "model_type": "nemotron-nas", "num_hidden_layers": 3,
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
    assert need(fields, 1_000) == 2 * 128 * 2 * (8 * 1_000 + 3 * 4 * 512)


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
