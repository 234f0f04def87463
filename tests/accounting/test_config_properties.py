"""What holds for any config: nothing is passed over, order is no matter, sizes scale exactly.

And one reading: a config that can be built as a model has the same cache in both readers.
"""

from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvbook.accounting.geometry import CacheGeometry
from kvbook.accounting.need import cache_size
from kvbook.config import ModelConfig
from kvbook.errors import UnsupportedModelError

LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 8_192,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gemma3": {**LLAMA, "model_type": "gemma3_text", "head_dim": 32, "sliding_window": 100},
    "deepseek": {
        **LLAMA, "model_type": "deepseek_v32", "kv_lora_rank": 64, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "index_head_dim": 32,
    },
    "jamba": {
        **LLAMA, "model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": 1,
        "mamba_d_state": 4, "mamba_d_conv": 4, "mamba_expand": 2,
    },
    "nested": {"model_type": "gemma3", "text_config": {**LLAMA, "model_type": "gemma3_text"}},
    "whisper": {
        "model_type": "whisper", "d_model": 64, "decoder_layers": 3, "encoder_layers": 2,
        "decoder_attention_heads": 4, "encoder_attention_heads": 8, "max_source_positions": 50,
    },
    "deepseek-v4": {
        **LLAMA, "model_type": "deepseek_v4", "num_key_value_heads": 1, "head_dim": 64,
        "sliding_window": 16, "index_head_dim": 8, "compress_ratios": [0, 4, 128, 4],
    },
}  # fmt: skip
FEW = settings(max_examples=25)
EACH = pytest.mark.parametrize("name", MODELS)


def read(fields: dict[str, Any]) -> CacheGeometry:
    return CacheGeometry.from_hf(fields, "model")


# ---- Nothing is passed over

WORDS = st.sampled_from(
    ["kv", "head", "group", "window", "layer", "pattern", "interval", "loop", "share", "reuse",
     "source", "compress", "index", "latent", "state", "depth", "cache"]
)  # fmt: skip
OTHERS = st.sampled_from(["foo", "quux", "zork", "blip", "n", "num", "is"])


@EACH
@FEW
@given(word=WORDS, before=OTHERS, after=OTHERS, value=st.sampled_from([1, 2, 7, "x", True, [3]]))
def test_an_unknown_field_that_speaks_of_the_cache_is_refused(
    name: str, word: str, before: str, after: str, value: object
) -> None:
    field = f"{before}_{word}_{after}"
    with pytest.raises(UnsupportedModelError, match=rf"{field} = .* is not known here"):
        read({**MODELS[name], field: value})


@EACH
@FEW
@given(word=WORDS, off=st.sampled_from([None, False, 0, [], {}, ""]))
def test_one_that_is_off_says_nothing(name: str, word: str, off: object) -> None:
    assert read({**MODELS[name], f"foo_{word}": off}) == read(MODELS[name])


def test_it_is_refused_inside_an_object_too() -> None:
    for fields in ({**LLAMA, "foo": {"kv_bar": 3}}, {**LLAMA, "kv_config": {"bar": 3}}):
        with pytest.raises(UnsupportedModelError, match=r"(foo\.kv_bar|kv_config) = .*not known"):
            read(fields)
    linear = {"full_attn_layers": [2, 4], "kda_layers": [1, 3], "num_heads": 2, "head_dim": 8,
              "short_conv_kernel_size": 4, "head_groups": 2}  # fmt: skip
    with pytest.raises(UnsupportedModelError, match=r"linear_attn_config\.head_groups = 2"):
        read({**LLAMA, "linear_attn_config": linear})


def test_the_language_model_inside_is_refused_for_what_stands_around_it() -> None:
    with pytest.raises(UnsupportedModelError, match="kv_reuse_depth = 2"):
        read({**MODELS["nested"], "kv_reuse_depth": 2})


def test_a_default_that_nothing_asks_for_is_no_field() -> None:
    """Kimi-Linear's class has two spellings for its states, of which files state one."""
    fields = {
        "model_type": "kimi_linear", "num_hidden_layers": 2, "hidden_size": 64,
        "num_attention_heads": 2, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4, "v_head_dim": 4,
        "linear_attn_config": {"full_attn_layers": [2], "num_heads": 2, "head_dim": 8,
                               "short_conv_kernel_size": 4},
    }  # fmt: skip
    assert [layer.kind for layer in read(fields).layers] == ["recurrent", "latent"]
    with pytest.raises(UnsupportedModelError, match="linear_head_dim = 8 is not known here"):
        read({**fields, "linear_head_dim": 8})


# ---- What is meant can be said


def test_an_override_takes_the_place_of_a_field() -> None:
    found = CacheGeometry.from_hf(LLAMA, overrides={"num_key_value_heads": 4})
    assert found.layers[0].per_token[0].heads == 4
    assert found.assumptions == ("num_key_value_heads = 4, stated by the caller in place of 2",)
    assert read(LLAMA).assumptions == ()


def test_an_override_of_null_says_that_a_field_means_nothing() -> None:
    fields = {**LLAMA, "foo_kv_bar": 3}
    found = CacheGeometry.from_hf(fields, "model", overrides={"foo_kv_bar": None})
    assert found.layers == read(LLAMA).layers
    assert found.assumptions == ("foo_kv_bar = None, stated by the caller in place of 3",)


@pytest.mark.parametrize("name", ["nmu_key_value_heads", "hybrid_override_pattern_", "colour"])
def test_an_override_that_nothing_reads_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}"):
        CacheGeometry.from_hf(LLAMA, overrides={name: 4})


def test_an_override_reaches_the_model_inside() -> None:
    found = CacheGeometry.from_hf(MODELS["nested"], overrides={"num_key_value_heads": 8})
    assert found.layers[0].per_token[0].heads == 8


# ---- What does not matter does not matter

IRRELEVANT = {
    "vocab_size": 9, "layer_norm_eps": 1e-6, "num_experts_per_tok": 2, "moe_layer_freq": 2,
    "n_group": 4, "topk_group": 2, "rope_theta": 5.0, "rope_scaling": None, "use_cache": False,
    "attention_dropout": 0.1, "initializer_range": 0.02, "architectures": ["X"],
    "first_k_dense_replace": 1, "n_shared_experts": 1, "shared_expert_intermediate_size": 8,
    "torch_dtype": "bfloat16", "vision_config": {"num_hidden_layers": 3, "head_dim": 7},
    "quantization_config": {"kv_cache_scheme": None, "group_size": 128}, "bos_token_id": 1,
    "image_token_index": 7, "audio_config": {"d_model": 5}, "output_hidden_states": True,
    "attn_logit_softcapping": 50.0, "layerdrop": 0.1, "id2label": {"0": "a"}, "q_lora_rank": 8,
}  # fmt: skip


@EACH
@FEW
@given(data=st.data())
def test_order_and_irrelevant_fields_change_nothing(name: str, data: st.DataObject) -> None:
    extra = data.draw(st.sets(st.sampled_from(sorted(IRRELEVANT))))
    fields = {**MODELS[name], **{field: IRRELEVANT[field] for field in extra}}
    shuffled = dict(data.draw(st.permutations(list(fields.items()))))
    assert read(shuffled) == read(MODELS[name])


@pytest.mark.parametrize("outer", ["text_config", "language_config", "llm_config"])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("nested", "whisper")])
def test_nesting_changes_nothing(name: str, outer: str) -> None:
    around = {"model_type": "several", "vision_config": {"depth": 3}, "hidden_size": 7}
    assert read({**around, outer: MODELS[name]}) == read(MODELS[name])


# ---- Sizes scale


@EACH
@FEW
@given(tokens=st.integers(1, 3_000), batch=st.integers(1, 50))
def test_batch_scales_exactly(name: str, tokens: int, batch: int) -> None:
    one, many = (cache_size(read(MODELS[name]), tokens, batch=b) for b in (1, batch))
    assert many.need_bytes == batch * one.need_bytes
    assert many.reserved_bytes == batch * one.reserved_bytes


@EACH
@FEW
@given(tokens=st.integers(1, 40))
def test_length_scales_exactly(name: str, tokens: int) -> None:
    """Beyond all windows, every 128 tokens add the same: 128 times the slope."""
    geometry = read(MODELS[name])
    beyond = [cache_size(geometry, 8_192 + 128 * n) for n in (0, tokens)]
    grown = beyond[1].need_bytes - beyond[0].need_bytes
    assert grown == tokens * 128 * beyond[0].bytes_per_token_beyond_windows


# ---- One reading

FULL = {**LLAMA, "vocab_size": 64, "intermediate_size": 32}
LATENT = {
    **FULL, "kv_lora_rank": 64, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "n_routed_experts": None,
}  # fmt: skip
CHOICES: dict[str, list[Any]] = {
    "num_key_value_heads": [None, 1, 2, 4, 8],
    "head_dim": [None, 32, 128],
    "sliding_window": [None, 100, 8_192],
    "use_sliding_window": [True, False],
    "max_window_layers": [0, 2, 4],
    "layer_types": [None, ["full_attention"] * 4, ["sliding_attention", "full_attention"] * 2],
    "n_kv_heads": [2],
    "num_nextn_predict_layers": [0, 1],
    "foo_kv": [3],
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "deepseek_v2", "deepseek_v3")


@settings(max_examples=200, suppress_health_check=[HealthCheck.filter_too_much])
@given(family=st.sampled_from(FAMILIES), data=st.data())
def test_a_model_that_is_built_has_the_same_cache_in_both_readers(
    family: str, data: st.DataObject
) -> None:
    fields = {**(LATENT if family.startswith("deepseek") else FULL), "model_type": family}
    absent = data.draw(st.sets(st.sampled_from(["num_key_value_heads", "max_position_embeddings"])))
    fields = {name: value for name, value in fields.items() if name not in absent}
    for name in data.draw(st.sets(st.sampled_from(sorted(CHOICES)))):
        fields[name] = data.draw(st.sampled_from(CHOICES[name]))
    try:
        model = ModelConfig.from_hf(fields)
    except ValueError:
        assume(False)
    assert read(fields).layers == CacheGeometry.from_model(model).layers


@pytest.mark.parametrize(
    ("family", "heads", "width", "window"),
    [
        ("llama", 32, 128, None), ("mistral", 8, 128, 4_096), ("qwen2", 32, 128, None),
        ("qwen3", 32, 128, None),
    ],
)  # fmt: skip
def test_what_is_left_out_is_the_class_s_in_both_readers(
    family: str, heads: int, width: int, window: int | None
) -> None:
    """Mistral without optional fields has 8 KV heads and a window; Qwen3 heads of 128."""
    fields = {
        "model_type": family, "vocab_size": 64, "num_hidden_layers": 2,
        "hidden_size": 2_048 if family == "qwen3" else 4_096,
        "num_attention_heads": 32, "intermediate_size": 32,
        "max_position_embeddings": 32_768,
    }  # fmt: skip
    model = ModelConfig.from_hf(fields)
    assert (model.n_kv_heads, model.head_dim, model.window) == (heads, width, window)
    assert CacheGeometry.from_hf(fields).layers == CacheGeometry.from_model(model).layers


def test_null_kv_heads_are_as_many_as_query_heads_in_both() -> None:
    fields = {**FULL, "model_type": "mistral", "num_key_value_heads": None}
    assert ModelConfig.from_hf(fields).n_kv_heads == 8
    assert read(fields).layers[0].per_token[0].heads == 8
