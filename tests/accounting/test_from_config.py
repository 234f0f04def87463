"""Reading a config.json: every family's spelling, and every way in which one can be wrong."""

from typing import Any

import pytest

from kvbook.accounting.geometry import CacheGeometry
from kvbook.accounting.need import cache_size
from kvbook.errors import UnsupportedModelError

LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4_096,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8_192,
}  # fmt: skip
GEMMA3 = {
    **LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 8, "head_dim": 256,
    "sliding_window": 512, "sliding_window_pattern": 3,
}  # fmt: skip
MLA = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128,
    "hidden_size": 7_168, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}  # fmt: skip
MAMBA = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}


def without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def per_token(fields: dict[str, Any], dtype: str = "bf16") -> int:
    return cache_size(CacheGeometry.from_hf(fields), 1, dtype=dtype).bytes_per_token


def kinds(fields: dict[str, Any]) -> str:
    """The kind of each layer by its first letter: f(ull), w(indow), l(atent), r(ecurrent), n."""
    return "".join(layer.kind[0] for layer in CacheGeometry.from_hf(fields).layers)


# ---- Heads and widths: explicit before derived


def test_llama() -> None:
    geometry = CacheGeometry.from_hf(LLAMA, "Llama-3-8B")
    assert (geometry.name, len(geometry.layers), geometry.max_positions) == (
        "Llama-3-8B", 32, 8_192,
    )  # fmt: skip
    kept = [(item.name, item.heads, item.width) for item in geometry.layers[0].per_token]
    assert kept == [("keys", 8, 128), ("values", 8, 128)]


def test_an_explicit_head_width_wins() -> None:
    """Qwen3-0.6B: 1,024 / 16 = 64 would halve its 114,688 bytes."""
    qwen = {
        "model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1_024,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    }  # fmt: skip
    assert per_token(qwen) == 114_688
    assert per_token({**qwen, "head_dim": None}) == 57_344


def test_a_head_width_that_is_not_whole_is_no_answer() -> None:
    """GLM-4.5: 5,120 / 96 is no integer; with the width stated it is 376,832 B per token."""
    glm = {
        "model_type": "glm4_moe", "num_hidden_layers": 92, "hidden_size": 5_120,
        "num_attention_heads": 96, "num_key_value_heads": 8,
    }  # fmt: skip
    with pytest.raises(
        ValueError, match=r"no head_dim.*hidden_size 5,120 is not a multiple.*96; add head_dim"
    ):
        CacheGeometry.from_hf(glm)
    assert per_token({**glm, "head_dim": 128}) == 376_832


def test_a_family_default_wins_over_a_quotient() -> None:
    """Gemma 3 12B has no head_dim in its file; 3,840 / 16 = 240 is not its width of 256."""
    gemma = {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text", "num_hidden_layers": 48, "hidden_size": 3_840,
            "num_attention_heads": 16, "num_key_value_heads": 8, "sliding_window": 1_024,
        },
    }  # fmt: skip
    assert CacheGeometry.from_hf(gemma).layers[0].per_token[0].width == 256
    assert kinds(gemma) == "wwwwwf" * 8


def test_without_kv_heads_there_is_one_per_query_head() -> None:
    assert per_token(without(LLAMA, "num_key_value_heads")) == 4 * 131_072
    assert per_token({**LLAMA, "num_key_value_heads": None}) == 4 * 131_072


def test_values_may_be_narrower_than_keys() -> None:
    assert per_token({**LLAMA, "head_dim": 192, "v_head_dim": 128}) == 32 * 8 * (192 + 128) * 2


def test_a_list_per_layer() -> None:
    heads = [1, 2, 4, 8] * 8
    assert per_token({**LLAMA, "num_key_value_heads": heads}) == 8 * 15 * 2 * 128 * 2
    layers = CacheGeometry.from_hf({**LLAMA, "num_key_value_heads": heads}).layers
    assert [layer.per_token[0].heads for layer in layers] == heads


@pytest.mark.parametrize(
    "fields",
    [
        {"n_layer": 12, "n_head": 12, "n_embd": 768},
        {"n_layers": 12, "n_heads": 12, "d_model": 768},
        {"num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 768},
    ],
)
def test_other_spellings(fields: dict[str, int]) -> None:
    assert per_token(fields) == 36_864


# ---- Falcon


FALCON7 = {
    "model_type": "falcon", "num_hidden_layers": 32, "num_attention_heads": 71,
    "hidden_size": 4_544,
}  # fmt: skip
FALCON40 = {
    **FALCON7, "num_hidden_layers": 60, "num_attention_heads": 128, "hidden_size": 8_192,
    "new_decoder_architecture": True, "num_kv_heads": 8,
}  # fmt: skip


@pytest.mark.parametrize("stated", [{}, {"multi_query": True}, {"num_kv_heads": 71}])
def test_falcon_7b_has_one_kv_head(stated: dict[str, Any]) -> None:
    assert per_token({**FALCON7, **stated}) == 8_192


def test_falcon_40b_has_eight() -> None:
    """A log of this model says 120 MiB for 512 tokens at 32 bits."""
    assert per_token(FALCON40) == per_token({**FALCON40, "multi_query": True}) == 122_880
    assert 512 * per_token(FALCON40, "fp32") == 120 * 1024**2


def test_falcon_without_multi_query() -> None:
    assert per_token({**FALCON7, "multi_query": False}) == 71 * 8_192


def test_multi_query_with_several_kv_heads_is_a_contradiction() -> None:
    with pytest.raises(ValueError, match=r"multi_query is true.*num_kv_heads is 8"):
        CacheGeometry.from_hf({**FALCON40, "new_decoder_architecture": False})


# ---- Windows


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "wwfwwfww"),
        ({"sliding_window_pattern": 2}, "wfwfwfwf"),
        ({"sliding_window": None}, "ffffffff"),
        ({"sliding_window": 8_192}, "wwfwwfww"),  # as long as the positions, still a window
        ({"layer_types": ["full_attention"] * 4 + ["sliding_attention"] * 4}, "ffffwwww"),
    ],
)
def test_window_patterns(change: dict[str, Any], expected: str) -> None:
    assert kinds({**GEMMA3, **change}) == expected


def test_gemma_3_defaults_to_five_to_one() -> None:
    assert kinds(without(GEMMA3, "sliding_window_pattern")) == "wwwwwfww"


@pytest.mark.parametrize(
    ("kind", "change", "expected"),
    [
        ("gemma2", {}, "wfwf"),
        ("gpt_oss", {}, "wfwf"),
        ("cohere2", {}, "wwwf"),
        ("mistral", {}, "wwww"),
        ("mistral", {"sliding_window": None}, "ffff"),
        ("mixtral", {}, "ffff"),
        ("phi3", {"sliding_window": 2_047}, "wwww"),
        ("llama", {"sliding_window": 2_047}, "ffff"),
        ("qwen2", {"sliding_window": 2_047}, "ffff"),
        ("qwen2", {"sliding_window": 2_047, "use_sliding_window": False}, "ffff"),
        (
            "qwen2",
            {"sliding_window": 2_047, "use_sliding_window": True, "max_window_layers": 3},
            "fffw",
        ),
        ("qwen2", {"sliding_window": 2_047, "use_sliding_window": True}, "ffff"),  # from 28 on
    ],
)
def test_windows_of_families(kind: str, change: dict[str, Any], expected: str) -> None:
    assert kinds({**LLAMA, "model_type": kind, "num_hidden_layers": 4, **change}) == expected


def test_the_window_itself() -> None:
    layers = CacheGeometry.from_hf(GEMMA3).layers
    assert [layer.window for layer in layers] == [512, 512, None, 512, 512, None, 512, 512]


# ---- Latents and index keys


def test_latents_do_not_count_heads() -> None:
    assert per_token(MLA) == per_token({**MLA, "num_attention_heads": 64}) == 61 * 1_152
    assert kinds(MLA) == "l" * 61


def test_deepseek_v3_2_keeps_index_keys() -> None:
    fields = {**MLA, "model_type": "deepseek_v32", "index_head_dim": 128, "index_n_heads": 64}
    assert per_token(fields) == 61 * (576 + 128) * 2
    need = cache_size(CacheGeometry.from_hf(fields), 10).need
    assert need == {"latents": 10 * 61 * 576 * 2, "index keys": 10 * 61 * 128 * 2}


def test_layers_that_share_an_indexer_keep_no_keys_of_their_own() -> None:
    fields = {
        **MLA, "index_head_dim": 128, "num_hidden_layers": 3,
        "indexer_types": ["full", "shared", "full"],
    }  # fmt: skip
    layers = CacheGeometry.from_hf(fields).layers
    assert [len(layer.per_token) for layer in layers] == [2, 1, 2]


def test_prediction_layers_are_apart() -> None:
    geometry = CacheGeometry.from_hf({**MLA, "num_nextn_predict_layers": 1})
    assert (len(geometry.layers), geometry.extra_layers) == (61, 1)
    assert CacheGeometry.from_hf({**MLA, "num_nextn_predict_layers": 0}).extra_layers == 0


# ---- Recurrent layers


HYBRID = {**LLAMA, "num_hidden_layers": 4}


@pytest.mark.parametrize(
    "fields",
    [
        {"layer_types": ["linear_attention", "full_attention"] * 2},
        {"layer_types": ["mamba", "attention"] * 2},
        {"layers_block_type": ["conv", "full_attention"] * 2},
        {"hybrid_override_pattern": "M*M*"},
        {"attn_type_list": [0, 1, 0, 1]},
        {"full_attn_idxs": [1, 3]},
        {"attn_layer_indices": [1, 3]},
        {"linear_attn_config": {"full_attn_layers": [2, 4], "num_heads": 4, "head_dim": 8,
                                "short_conv_kernel_size": 4}},
        {"attn_layer_period": 2, "attn_layer_offset": 1},
        {"full_attention_interval": 2},
    ],
)  # fmt: skip
def test_every_way_to_say_which_layers_attend(fields: dict[str, Any]) -> None:
    assert kinds({**HYBRID, "model_type": "hybrid", **fields}) == "rfrf"


def test_layers_that_mix_no_tokens() -> None:
    fields = {**without(HYBRID, "num_hidden_layers"), "hybrid_override_pattern": "M-*E"}
    assert kinds(fields) == "rnfn"


STATES = [
    # Jamba: 2 · 4,096 channels, 16 numbers and 3 inputs each.
    ({"attn_layer_period": 2, "attn_layer_offset": 1, **MAMBA}, [(8_192, 16), (8_192, 3)]),
    # Qwen3-Next: 32 heads of 128 × 128, convolution over 2 · 16 · 128 + 32 · 128 channels.
    (
        {"full_attention_interval": 2, "linear_num_value_heads": 32, "linear_num_key_heads": 16,
         "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4},
        [(32, 16_384), (8_192, 3)],
    ),
    # LFM2: a convolution over 3 inputs of each of 4,096 channels.
    ({"full_attn_idxs": [1, 3], "conv_L_cache": 3}, [(4_096, 2)]),
    # Bamba: 128 heads of 64 × 256, and groups in the convolution.
    (
        {"attn_layer_indices": [1, 3], "mamba_n_heads": 128, "mamba_d_head": "auto",
         "mamba_expand": 2, "mamba_d_state": 256, "mamba_n_groups": 1, "mamba_d_conv": 4},
        [(128, 64 * 256), (8_192 + 512, 3)],
    ),
    # Nemotron-H, the same kind in other words.
    (
        {"hybrid_override_pattern": "M*M*", "mamba_num_heads": 128, "mamba_head_dim": 64,
         "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4},
        [(128, 64 * 128), (8_192 + 2_048, 3)],
    ),
    # Kimi-Linear.
    (
        {"linear_attn_config": {"full_attn_layers": [2, 4], "num_heads": 32, "head_dim": 128,
                                "short_conv_kernel_size": 4}},
        [(32, 16_384), (12_288, 3)],
    ),
    # MiniMax: a square matrix per query head.
    ({"model_type": "minimax_text_01", "attn_type_list": [0, 1] * 2}, [(32, 16_384)]),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "state"), STATES)
def test_constant_states(fields: dict[str, Any], state: list[tuple[int, int]]) -> None:
    layer = CacheGeometry.from_hf({**HYBRID, "model_type": "hybrid", **fields}).layers[0]
    assert layer.per_token == ()
    assert layer.state is not None
    assert [(kept.heads, kept.width) for kept in layer.state] == state


def test_a_state_that_the_config_does_not_describe_is_unknown() -> None:
    layer = CacheGeometry.from_hf({**HYBRID, "full_attn_idxs": [1]}).layers[0]
    assert layer.state is None


def test_latents_beside_recurrent_layers() -> None:
    fields = {**MLA, "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3
              + ["full_attention"]}  # fmt: skip
    assert kinds(fields) == "rrrl"


# ---- Missing


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_a_missing_size_is_named(name: str) -> None:
    for fields in (without(LLAMA, name), {**LLAMA, name: None}):
        with pytest.raises(ValueError, match=rf"the config has no {name} \(or n_"):
            CacheGeometry.from_hf(fields)


@pytest.mark.parametrize("name", ["qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"])
def test_a_missing_width_of_a_latent_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"the config has no {name}"):
        CacheGeometry.from_hf(without(MLA, name))


def test_windowed_layers_need_a_window() -> None:
    fields = {**LLAMA, "layer_types": ["sliding_attention"] * 32}
    with pytest.raises(ValueError, match="the config has no sliding_window"):
        CacheGeometry.from_hf(fields)


@pytest.mark.parametrize(
    "mark",
    [
        {"mamba_d_ssm": 1_024},  # Falcon-H1: both kinds in every layer
        {"linear_attn_alpha_factor": 1},  # MiniMax, whose class default is another model
        {"lru_width": 2_560},
    ],
)
def test_recurrent_layers_must_be_told_apart(mark: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"has {next(iter(mark))}.*add layer_types"):
        CacheGeometry.from_hf({**LLAMA, **mark})


@pytest.mark.parametrize("name", ["mamba_expand", "mamba_d_conv"])
def test_a_missing_part_of_a_state_is_named(name: str) -> None:
    fields = {**HYBRID, "attn_layer_period": 2, "attn_layer_offset": 1, **without(MAMBA, name)}
    with pytest.raises(ValueError, match=f"the config has no {name}"):
        CacheGeometry.from_hf(fields)


# ---- Contradictory


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_kv_heads": 4}, r"num_key_value_heads 8 and num_kv_heads 4 contradict"),
        ({"attn_config": {"kv_n_heads": 4}}, r"num_key_value_heads 8 and kv_n_heads 4 contradict"),
        ({"n_layer": 33}, r"num_hidden_layers 32 and n_layer 33 contradict"),
        ({"num_key_value_heads": 5}, r"num_attention_heads 32.*num_key_value_heads 5"),
        ({"num_key_value_heads": 64}, r"num_attention_heads 32.*num_key_value_heads 64"),
        ({"layer_types": ["full_attention"] * 31}, r"layer_types has 31 items.*layers is 32"),
        ({"num_key_value_heads": [8] * 31}, r"num_key_value_heads has 31 items.*layers is 32"),
        ({"hybrid_override_pattern": "M*"}, r"hybrid_override_pattern has 2 items"),
        ({"full_attn_idxs": [32]}, r"a layer in full_attn_idxs must be from 0 to 31, got 32"),
        ({"attn_layer_period": 2, "attn_layer_offset": 2}, r"attn_layer_offset must be from 0 to"),
        ({"attn_layer_period": 2}, r"attn_layer_offset must be .*from 0 to 1, got None"),
        (
            {"layer_types": ["sliding_attention"] * 32, "use_sliding_window": False,
             "sliding_window": 4_096},
            r"use_sliding_window is false, but some layers are named sliding",
        ),
    ],
)  # fmt: skip
def test_fields_that_contradict_each_other(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CacheGeometry.from_hf({**LLAMA, **fields})


def test_the_same_value_twice_is_no_contradiction() -> None:
    assert per_token({**LLAMA, "num_kv_heads": 8, "n_layer": 32}) == 131_072


# ---- Not counted here


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["other_attention"] * 32}, r"'other_attention'.*known: full_att"),
        ({"layer_types": ["hybrid"] * 32}, r"'hybrid', which is not counted here"),
        ({"layer_types": [["x"]] * 32}, r"\['x'\], which is not counted here"),
        ({"attention_chunk_size": 8_192}, r"attention_chunk_size = 8192 is not known here"),
        ({"compress_factor": 4}, r"compress_factor = 4 is not known here"),
        ({"is_encoder_decoder": True}, r"cross-attention"),
        ({"swa_num_key_value_heads": 8}, r"swa_num_key_value_heads"),
    ],
)
def test_caches_of_other_kinds_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        CacheGeometry.from_hf({**LLAMA, **fields})


def test_such_a_field_may_be_switched_off() -> None:
    assert per_token({**LLAMA, "num_kv_shared_layers": 0, "is_encoder_decoder": False}) == 131_072


def test_windowed_latents_are_refused() -> None:
    fields = {**MLA, "layer_types": ["sliding_attention"] * 61, "sliding_window": 128}
    with pytest.raises(UnsupportedModelError, match="kv_lora_rank with windowed layers"):
        CacheGeometry.from_hf(fields)
