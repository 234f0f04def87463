"""Reading the shape of a model: every spelling that counts, and refusals that say why."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvbook.config import LatentConfig, ModelConfig
from kvbook.errors import UnsupportedModelError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4_096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 4_096}
QWEN2 = {
    **LLAMA,
    "model_type": "qwen2",
    "sliding_window": 4_096,
    "max_window_layers": 0,
    "tie_word_embeddings": True,
}
QWEN3 = {
    **LLAMA,
    "model_type": "qwen3",
    "hidden_size": 1_024,
    "num_attention_heads": 16,
    "head_dim": 128,
}
# DeepSeek-V3 with the first five of its layers, all dense.
DEEPSEEK: dict[str, Any] = {
    **LLAMA,
    "model_type": "deepseek_v3",
    "hidden_size": 7_168,
    "num_hidden_layers": 5,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1_536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "first_k_dense_replace": 5,
}


def without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


# ---- Llama, Mistral and Qwen


def test_a_llama_config_field_by_field() -> None:
    assert ModelConfig.from_hf(LLAMA) == ModelConfig(
        vocab_size=128_256, d_model=4_096, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128,
        d_mlp=14_336, max_positions=131_072, norm_eps=1e-5, rope_theta=500_000.0,
        rope_scaling=None, tied_embeddings=False, qkv_bias=False, qk_norm=False, window=None,
    )  # fmt: skip


def test_a_file_reads_as_its_content(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert ModelConfig.from_hf(path) == ModelConfig.from_hf(str(path)) == ModelConfig.from_hf(LLAMA)


def test_a_mistral_window() -> None:
    assert ModelConfig.from_hf(MISTRAL).window == 4_096
    assert ModelConfig.from_hf({**MISTRAL, "sliding_window": None}).window is None


def test_a_llama_never_has_a_window() -> None:
    assert ModelConfig.from_hf({**LLAMA, "sliding_window": 4_096}).window is None


def test_a_qwen2_window_counts_only_when_it_is_used() -> None:
    assert ModelConfig.from_hf({**QWEN2, "use_sliding_window": False}).window is None
    assert ModelConfig.from_hf(QWEN2).window is None
    assert ModelConfig.from_hf({**QWEN2, "use_sliding_window": True}).window == 4_096


def test_a_qwen2_window_above_the_last_layer_is_none() -> None:
    fields = {**QWEN2, "use_sliding_window": True, "max_window_layers": 32}
    assert ModelConfig.from_hf(fields).window is None


def test_layers_of_both_kinds_have_a_window_each() -> None:
    mixed = {**QWEN2, "use_sliding_window": True, "max_window_layers": 30}
    assert ModelConfig.from_hf(mixed).window == (None,) * 30 + (4_096,) * 2
    for fields in (LLAMA, MISTRAL, {**QWEN2, "use_sliding_window": True}):
        named = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"] * 8
        config = ModelConfig.from_hf({**fields, "sliding_window": 9, "layer_types": named})
        assert config.window == config.windows == (None, 9, 9, None) * 8


def test_one_window_for_all_layers_is_one_number() -> None:
    """A window of 1 on every layer is spelled the same whether or not the file lists layers."""
    listed = {**QWEN3, "use_sliding_window": True, "sliding_window": 1}
    config = ModelConfig.from_hf({**listed, "layer_types": ["sliding_attention"] * 32})
    assert config.window == 1
    assert config.windows == (1,) * 32
    assert ModelConfig.from_hf(LLAMA).windows == (None,) * 32


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_list_of_layers_has_an_entry_for_each(length: int) -> None:
    for kind in ("full_attention", "sliding_attention"):
        with pytest.raises(ValueError, match=rf"lists {length} layers.*num_hidden_layers is 32"):
            ModelConfig.from_hf({**MISTRAL, "layer_types": [kind] * length})


def test_a_layer_of_a_third_kind_is_refused() -> None:
    named = ["chunked_attention", "full_attention"] * 16
    with pytest.raises(UnsupportedModelError, match=r"\['chunked_attention'\].*allowed"):
        ModelConfig.from_hf({**LLAMA, "layer_types": named})


@pytest.mark.parametrize(
    "fields",
    [
        {**MISTRAL, "sliding_window": None},
        {**QWEN2, "use_sliding_window": False},
        QWEN2,  # Qwen's windows are off unless the file turns them on
    ],
)
def test_a_layer_that_slides_without_a_window_is_a_contradiction(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"no window that is in use; set sliding_window"):
        ModelConfig.from_hf({**fields, "layer_types": ["sliding_attention"] * 32})


def test_named_layer_types_win() -> None:
    assert ModelConfig.from_hf({**MISTRAL, "layer_types": ["full_attention"] * 32}).window is None
    window = {**MISTRAL, "layer_types": ["sliding_attention"] * 32}
    assert ModelConfig.from_hf(window).window == 4_096


def test_qwen2_has_biases_and_qwen3_norms() -> None:
    parts = {
        fields["model_type"]: (config.qkv_bias, config.qk_norm)
        for fields in (LLAMA, MISTRAL, QWEN2, QWEN3)
        for config in [ModelConfig.from_hf(fields)]
    }
    assert parts == {
        "llama": (False, False), "mistral": (False, False), "qwen2": (True, False),
        "qwen3": (False, True),
    }  # fmt: skip


def test_an_explicit_head_width_wins_over_the_quotient() -> None:
    """LMCache/LMCache#688: 1,024 / 16 = 64, but the heads are 128 wide."""
    config = ModelConfig.from_hf(QWEN3)
    assert (config.head_dim, config.n_heads, config.d_model) == (128, 16, 1_024)


def test_without_kv_heads_there_is_one_for_each_query_head() -> None:
    assert ModelConfig.from_hf(without(LLAMA, "num_key_value_heads")).n_kv_heads == 32
    assert ModelConfig.from_hf(LLAMA).queries_per_kv_head == 4


def test_the_head_is_tied_when_the_config_says_so() -> None:
    assert ModelConfig.from_hf(QWEN2).tied_embeddings
    assert not ModelConfig.from_hf(without(LLAMA, "tie_word_embeddings")).tied_embeddings


# ---- Refusals


@pytest.mark.parametrize("kind", ["gpt2", "mixtral", "qwen3_moe", None])
def test_another_architecture_is_refused(kind: str | None) -> None:
    with pytest.raises(
        UnsupportedModelError,
        match=rf"{kind!r} is not supported.*llama, mistral, qwen2, qwen3, deepseek_v2, deepseek_v3",
    ):
        ModelConfig.from_hf({**LLAMA, "model_type": kind})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, r"'gelu' is not supported.*'silu'"),
        ({"attention_bias": True}, r"attention_bias=true is not supported"),
        ({"mlp_bias": True}, r"mlp_bias=true is not supported"),
    ],
)
def test_parts_that_are_not_built_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_hf({**LLAMA, **change})


@pytest.mark.parametrize(
    "name",
    [
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
        "intermediate_size", "max_position_embeddings",
    ],
)  # fmt: skip
def test_a_missing_size_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"no '{name}'"):
        ModelConfig.from_hf(without(LLAMA, name))
    with pytest.raises(ValueError, match=f"no '{name}'"):
        ModelConfig.from_hf({**LLAMA, name: None})


def test_a_head_width_that_is_no_integer_is_not_rounded() -> None:
    """LMCache/LMCache#2248: GLM-4.5 has width 5,120 and 96 heads."""
    fields = {**LLAMA, "hidden_size": 5_120, "num_attention_heads": 96}
    with pytest.raises(ValueError, match=r"5120 is not a multiple.*96; add head_dim"):
        ModelConfig.from_hf(fields)
    assert ModelConfig.from_hf({**fields, "head_dim": 128}).head_dim == 128


SIZES: dict[str, Any] = {
    "vocab_size": 10, "d_model": 8, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "head_dim": 2,
    "d_mlp": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_mlp",
     "max_positions"],
)  # fmt: skip
@pytest.mark.parametrize("value", [0, -1, 2.0, "8", True, None])
def test_every_size_is_a_positive_integer(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a positive integer, got {value!r}"):
        ModelConfig(**{**SIZES, name: value})


def test_query_heads_share_kv_heads_evenly() -> None:
    with pytest.raises(ValueError, match=r"4 query heads over 3 KV heads.*divisor of 4"):
        ModelConfig(**{**SIZES, "n_kv_heads": 3})


def test_a_rotated_head_is_even() -> None:
    with pytest.raises(ValueError, match=r"even.*got 3"):
        ModelConfig(**{**SIZES, "head_dim": 3})


@pytest.mark.parametrize("window", [0, -1, True, False, 4.0, "4"])
def test_a_window_holds_at_least_the_token_itself(window: Any) -> None:
    message = rf"integer of at least 1.*got {window!r}"
    with pytest.raises(ValueError, match=message):
        ModelConfig(**SIZES, window=window)
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**SIZES, "n_layers": 2}, window=(3, window))
    assert ModelConfig(**SIZES, window=1).window == 1


def test_windows_by_layer() -> None:
    sizes = {**SIZES, "n_layers": 3}
    assert ModelConfig(**sizes).windows == (None, None, None)
    assert ModelConfig(**sizes, window=5).windows == (5, 5, 5)
    assert ModelConfig(**sizes, window=(5, None, 2)).windows == (5, None, 2)


@pytest.mark.parametrize("window", [(), (5,), (5, None, 5, None)])
def test_windows_by_layer_are_as_many_as_layers(window: tuple[int | None, ...]) -> None:
    with pytest.raises(ValueError, match=rf"lists {len(window)} layers.*model has 3; give one"):
        ModelConfig(**{**SIZES, "n_layers": 3}, window=window)


@pytest.mark.parametrize("sinks", [-1, True, 1.0, None])
def test_sinks_are_counted(sinks: Any) -> None:
    with pytest.raises(ValueError, match=rf"integer of at least 0, got {sinks!r}"):
        ModelConfig(**SIZES, window=4, sinks=sinks)
    assert ModelConfig(**SIZES, window=4, sinks=2).sinks == 2


def test_sinks_need_a_window() -> None:
    sizes = {**SIZES, "n_layers": 2}
    for window in (None, (None, None)):
        with pytest.raises(ValueError, match=r"sinks is 2, but no layer has a window"):
            ModelConfig(**sizes, window=window, sinks=2)
    assert ModelConfig(**sizes, window=(None, 4), sinks=2).windows == (None, 4)


def test_no_kv_heads_is_an_error_and_not_a_default() -> None:
    with pytest.raises(ValueError, match=r"n_kv_heads must be a positive integer, got 0"):
        ModelConfig.from_hf({**LLAMA, "num_key_value_heads": 0})


# ---- Latent heads


def test_a_deepseek_config_field_by_field() -> None:
    config = ModelConfig.from_hf(DEEPSEEK)
    assert config.latent == LatentConfig(
        q_rank=1_536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128, norm_eps=1e-6
    )
    assert (config.n_heads, config.n_kv_heads, config.head_dim) == (128, 128, 192)
    assert (config.rope_dim, config.tied_embeddings, config.norm_eps) == (64, False, 1e-5)
    plain = ModelConfig.from_hf({**DEEPSEEK, "q_lora_rank": None, "model_type": "deepseek_v2"})
    assert plain.latent == LatentConfig(None, 512, 128, 64, 128)


def test_what_a_cache_stores() -> None:
    latent, llama = ModelConfig.from_hf(DEEPSEEK), ModelConfig.from_hf(LLAMA)
    assert (latent.cached_heads, latent.cached_key_dim, latent.cached_value_dim) == (1, 576, 0)
    assert (llama.cached_heads, llama.cached_key_dim, llama.cached_value_dim) == (8, 128, 128)
    assert llama.rope_dim == 128


@pytest.mark.parametrize(
    "name", ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]
)
def test_a_missing_width_of_a_latent_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"no '{name}'"):
        ModelConfig.from_hf(without(DEEPSEEK, name))


@pytest.mark.parametrize(
    ("change", "layers"),
    [
        ({"first_k_dense_replace": 3}, "3 to 4"),
        ({"first_k_dense_replace": 4}, "4 to 4"),
        ({"first_k_dense_replace": 0}, "0 to 4"),
        ({"first_k_dense_replace": None}, "0 to 4"),
    ],
)
def test_mixtures_of_experts_are_refused(change: dict[str, Any], layers: str) -> None:
    message = rf"layers {layers} are mixtures of 256 experts.*not supported; allowed: dense"
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_hf({**DEEPSEEK, **change})


@pytest.mark.parametrize("change", [{"first_k_dense_replace": 9}, {"n_routed_experts": None}])
def test_dense_layers_are_enough(change: dict[str, Any]) -> None:
    assert ModelConfig.from_hf({**DEEPSEEK, **change}).n_layers == 5


def test_latent_layers_have_no_window() -> None:
    named = {"layer_types": ["sliding_attention"] * 5, "sliding_window": 9}
    with pytest.raises(UnsupportedModelError, match="deepseek_v3 has no windowed layers"):
        ModelConfig.from_hf({**DEEPSEEK, **named, "use_sliding_window": True})
    assert ModelConfig.from_hf({**DEEPSEEK, "sliding_window": 9}).window is None


def test_what_deepseek_s_classes_leave_open_is_theirs() -> None:
    """Absent is the class's: 256 experts after three dense layers, queries of rank 1,536."""
    with pytest.raises(UnsupportedModelError, match="layers 3 to 4 are mixtures of 256 experts"):
        ModelConfig.from_hf(without(DEEPSEEK, "n_routed_experts", "first_k_dense_replace"))
    config = ModelConfig.from_hf(without(DEEPSEEK, "q_lora_rank"))
    assert config.latent is not None
    assert config.latent.q_rank == 1_536


@pytest.mark.parametrize(
    ("fields", "switch", "message"),
    [
        (LLAMA, True, "has no kv_lora_rank"),
        ({**LLAMA, "kv_lora_rank": 512}, True, "use_mla True is not supported for llama"),
        (DEEPSEEK, False, "use_mla is false, but kv_lora_rank is 512"),
        ({**DEEPSEEK, **dict.fromkeys(
            ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 0)},
         False, "use_mla False is not supported for deepseek_v3"),
        (DEEPSEEK, "no", "use_mla must be true or false, got 'no'"),
    ],
)  # fmt: skip
def test_a_switch_of_latents_says_what_the_sizes_say(
    fields: dict[str, Any], switch: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({**fields, "use_mla": switch})


def test_a_switch_that_agrees_changes_nothing() -> None:
    assert ModelConfig.from_hf({**DEEPSEEK, "use_mla": True}) == ModelConfig.from_hf(DEEPSEEK)
    assert ModelConfig.from_hf({**LLAMA, "use_mla": False}) == ModelConfig.from_hf(LLAMA)


def test_settings_of_attention_in_an_object_are_not_passed_over() -> None:
    with pytest.raises(UnsupportedModelError, match=r"attn_config\.kv_n_heads = 2 is not known"):
        ModelConfig.from_hf({**LLAMA, "attn_config": {"kv_n_heads": 2}})


@pytest.mark.parametrize("name", ["n_kv_heads", "num_query_groups", "kv_reuse", "layer_share"])
def test_a_field_that_nothing_reads_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"{name} = 4 is not known here"):
        ModelConfig.from_hf({**LLAMA, name: 4})


LATENT: dict[str, Any] = {
    "q_rank": 3, "kv_rank": 5, "nope_dim": 2, "rope_dim": 4, "value_dim": 3,
}  # fmt: skip


@pytest.mark.parametrize("name", LATENT)
@pytest.mark.parametrize("value", [0, -1, 2.0, True])
def test_every_width_of_a_latent_is_a_positive_integer(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a positive integer, got {value!r}"):
        LatentConfig(**{**LATENT, name: value})


def test_what_a_latent_rotates_is_even() -> None:
    with pytest.raises(ValueError, match=r"rope_dim must be even.*got 3"):
        LatentConfig(**{**LATENT, "rope_dim": 3})
    odd = {**LATENT, "nope_dim": 1}  # the whole head need not be
    fields = {**SIZES, "n_kv_heads": 4, "head_dim": 5, "latent": LatentConfig(**odd)}
    assert ModelConfig(**fields).head_dim == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 8}, r"nope_dim \+ rope_dim = 6, got 8"),
        ({"n_kv_heads": 2}, r"n_kv_heads must be 4 \(n_heads\), got 2"),
        ({"qkv_bias": True}, "leave both False"),
        ({"qk_norm": True}, "leave both False"),
    ],
)
def test_what_does_not_go_with_a_latent(change: dict[str, Any], message: str) -> None:
    fields = {**SIZES, "n_kv_heads": 4, "head_dim": 6, "latent": LatentConfig(**LATENT)}
    assert ModelConfig(**fields).cached_key_dim == 9
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**fields, **change})


@pytest.mark.parametrize("name", ["norm_eps", "rope_theta"])
@pytest.mark.parametrize("value", [0.0, -1e-5, float("nan"), float("inf"), "1e-5", True, None])
def test_factors_are_finite_and_above_0(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a finite number above 0, got {value!r}"):
        ModelConfig(**{**SIZES, name: value})


@pytest.mark.parametrize("name", ["tied_embeddings", "qkv_bias", "qk_norm"])
@pytest.mark.parametrize("value", [1, "no", None])
def test_flags_are_true_or_false(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be True or False, got {value!r}"):
        ModelConfig(**{**SIZES, name: value})


@pytest.mark.parametrize(
    ("name", "kind"), [("rope_scaling", "RopeScaling"), ("latent", "LatentConfig")]
)
def test_parts_are_objects_of_their_kind(name: str, kind: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be a {kind} or None, got \{{'a': 1\}}"):
        ModelConfig(**{**SIZES, name: {"a": 1}})


def test_tied_embeddings_are_not_guessed_from_words() -> None:
    with pytest.raises(ValueError, match="tie_word_embeddings must be true or false, got 'false'"):
        ModelConfig.from_hf({**LLAMA, "tie_word_embeddings": "false"})
