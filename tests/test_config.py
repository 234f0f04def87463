"""Reading the shape of a model: every spelling that counts, and refusals that say why."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvbook.config import ModelConfig, RopeScaling
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
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8_192,
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


def without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


# ---- The four architectures


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


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_scaling": LLAMA3, "rope_theta": 500_000.0},
        {"rope_scaling": {**without(LLAMA3, "rope_type"), "type": "llama3"}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 500_000.0}, "rope_theta": None},
    ],
    ids=["rope_scaling", "the older key 'type'", "rope_parameters"],
)
def test_llama3_scaling_in_every_spelling(spelling: dict[str, Any]) -> None:
    config = ModelConfig.from_hf({**LLAMA, **spelling})
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8_192)
    assert config.rope_theta == 500_000.0


def test_linear_scaling() -> None:
    config = ModelConfig.from_hf({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert config.rope_scaling == RopeScaling("linear", 2.0)


@pytest.mark.parametrize("rope", [None, {"rope_type": "default"}, {"rope_theta": 500_000.0}])
def test_no_scaling(rope: dict[str, Any] | None) -> None:
    for name in ("rope_scaling", "rope_parameters"):
        config = ModelConfig.from_hf({**LLAMA, name: rope})
        assert config.rope_scaling is None
        assert config.rope_theta == 500_000.0


def test_theta_inside_rope_parameters_counts() -> None:
    fields = {**without(LLAMA, "rope_theta"), "rope_parameters": {"rope_theta": 7.0}}
    assert ModelConfig.from_hf(fields).rope_theta == 7.0
    assert ModelConfig.from_hf(without(LLAMA, "rope_theta")).rope_theta == 10_000.0


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


def test_layers_of_both_kinds_are_refused() -> None:
    mixed = {**QWEN2, "use_sliding_window": True, "max_window_layers": 16}
    with pytest.raises(UnsupportedModelError, match=r"full_attention.*sliding_attention.*allowed"):
        ModelConfig.from_hf(mixed)
    named = {**MISTRAL, "layer_types": ["full_attention", "sliding_attention"] * 16}
    with pytest.raises(UnsupportedModelError, match=r"full_attention.*sliding_attention.*allowed"):
        ModelConfig.from_hf(named)


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
    assert ModelConfig.from_hf(LLAMA).group == 4


def test_the_head_is_tied_when_the_config_says_so() -> None:
    assert ModelConfig.from_hf(QWEN2).tied_embeddings
    assert not ModelConfig.from_hf(without(LLAMA, "tie_word_embeddings")).tied_embeddings


# ---- Refusals


@pytest.mark.parametrize("kind", ["gpt2", "mixtral", "qwen3_moe", None])
def test_another_architecture_is_refused(kind: str | None) -> None:
    with pytest.raises(
        UnsupportedModelError, match=rf"{kind!r} is not supported.*llama, mistral, qwen2, qwen3"
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


@pytest.mark.parametrize("kind", ["dynamic", "yarn", "longrope"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_rotations_that_change_with_the_length_are_refused(kind: str, key: str, name: str) -> None:
    """They would also change keys that are already cached."""
    with pytest.raises(UnsupportedModelError, match=rf"'{kind}'.*default, linear, llama3"):
        ModelConfig.from_hf({**LLAMA, name: {key: kind, "factor": 2.0}})


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


@pytest.mark.parametrize("name", ["factor", "low_freq_factor", "original_max_position_embeddings"])
def test_a_missing_part_of_the_scaling_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        ModelConfig.from_hf({**LLAMA, "rope_scaling": without(LLAMA3, name)})


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


def test_a_window_holds_at_least_the_token_itself() -> None:
    with pytest.raises(ValueError, match=r"at least 1.*got 0"):
        ModelConfig(**SIZES, window=0)
    assert ModelConfig(**SIZES, window=1).window == 1


def test_an_unknown_scaling_is_refused_where_it_is_made() -> None:
    with pytest.raises(ValueError, match=r"'dynamic'.*linear, llama3"):
        RopeScaling("dynamic", 2.0)


def test_a_head_that_is_rotated_in_part_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor 0\.5 .*1\.0"):
        ModelConfig.from_hf({**LLAMA, "partial_rotary_factor": 0.5})


def test_no_kv_heads_is_an_error_and_not_a_default() -> None:
    with pytest.raises(ValueError, match=r"n_kv_heads must be a positive integer, got 0"):
        ModelConfig.from_hf({**LLAMA, "num_key_value_heads": 0})
