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
    assert per_token({**fields, "cla_share_factor": 3}) == 22 * 2_560  # layers 0, 3, … 63
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


def test_each_layer_may_name_the_one_whose_cache_it_reads() -> None:
    """Mistral Large 4's class: layers 0 and 3 of 5 keep a cache, 2 · 8 · 128 · 2 B each."""
    fields = {**MODEL, "num_hidden_layers": 5, "num_key_value_heads": 8}
    assert per_token({**fields, "kv_source_layers": [0, 0, 0, 3, 3]}) == 2 * 4_096
    for sources, message in (
        ([0, 0, 1, 3, 3], r"kv_source_layers\[2\] is 1, which itself reads layer 0"),
        ([0, 2, 2, 3, 3], r"kv_source_layers\[1\] must be from 0 to 1, got 2"),
        ([0, 0, 0, 3], r"kv_source_layers has 4 items"),
    ):
        with pytest.raises(ValueError, match=message):
            per_token({**fields, "kv_source_layers": sources})


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
        ({"index_topk_freq": 3}, 3),  # layers 0, 1 and 4
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, 2),  # layers 0 and 3
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
