"""Rotary positions in every spelling, old and new: read as transformers reads them, or refused."""

import warnings
from typing import Any

import pytest
from transformers import AutoConfig

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
QWEN3 = {
    **LLAMA,
    "model_type": "qwen3",
    "hidden_size": 1_024,
    "num_attention_heads": 16,
    "head_dim": 128,
}


def without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


# ---- Spellings


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


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "proportional"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_rotations_that_change_with_the_length_are_refused(kind: str, key: str, name: str) -> None:
    """They would also change keys that are already cached."""
    with pytest.raises(UnsupportedModelError, match=rf"'{kind}'.*default, linear, llama3, yarn"):
        ModelConfig.from_hf({**LLAMA, name: {key: kind, "factor": 2.0}})


@pytest.mark.parametrize("name", ["factor", "low_freq_factor", "original_max_position_embeddings"])
def test_a_missing_part_of_the_scaling_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        ModelConfig.from_hf({**LLAMA, "rope_scaling": without(LLAMA3, name)})


def test_a_head_that_is_rotated_in_part_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor 0\.5 .*1\.0"):
        ModelConfig.from_hf({**LLAMA, "partial_rotary_factor": 0.5})


def test_an_unknown_scaling_is_refused_where_it_is_made() -> None:
    with pytest.raises(ValueError, match=r"'dynamic'.*linear, llama3"):
        RopeScaling("dynamic", 2.0)


def test_the_two_bounds_of_a_blend_are_in_order() -> None:
    for low, high in ((4.0, 4.0), (5.0, 4.0)):
        with pytest.raises(ValueError, match=rf"below high.*got {low} and {high}"):
            RopeScaling("yarn", 2.0, low, high)


@pytest.mark.parametrize("name", ["factor", "low", "high", "amplitude", "score_factor"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), "2", True, None])
def test_the_numbers_of_a_rope_scaling_are_finite_and_above_0(name: str, value: Any) -> None:
    """So that no score is removed or turned around."""
    with pytest.raises(ValueError, match=f"{name} must be a finite number above 0, got"):
        RopeScaling(**{"kind": "yarn", "factor": 2.0, name: value})


ALONE = [
    {},
    {"rope_theta": 5.0},
    {"rope_theta": None, "rope_scaling": None},
    {"rope_parameters": None},
    {"rope_parameters": {"rope_theta": 7.0}},
    {"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}},
    {"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}, "rope_theta": 7.0},
    {"rope_scaling": {"rope_theta": 7.0, "rope_type": "linear", "factor": 2.0}},
    {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5.0},
    {"rope_scaling": {"type": "default"}, "rope_theta": 5.0},
]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("rope", ALONE)
def test_the_base_is_the_one_that_transformers_takes(family: str, rope: dict[str, Any]) -> None:
    fields = {**without(LLAMA, "rope_theta"), "model_type": family, **rope}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = AutoConfig.for_model(**{**fields, **{k: dict(v) for k, v in rope.items() if v
                                                      and isinstance(v, dict)}})  # fmt: skip
    expected = theirs.rope_parameters["rope_theta"]
    ours = ModelConfig.from_hf(fields)
    assert ours.rope_theta == (10_000.0 if expected is None else expected)
    kind = theirs.rope_parameters["rope_type"]
    assert ("default" if ours.rope_scaling is None else ours.rope_scaling.kind) == kind


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 7.0}}, r"5\.0 and, inside rope_par"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0},
             "rope_parameters": {"rope_type": "default"}},
            r"rope_parameters and rope_scaling differ",
        ),
        ({"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2.0}}, r"differ"),
        ({"rope_parameters": {"rope_theta": 5.0, "base_of_local": 7.0}}, r"has base_of_local = 7"),
        ({"rope_local_base_freq": 10_000.0}, r"rope_local_base_freq = 10000\.0 is not read"),
        ({"rotary_base": 7.0}, r"rotary_base = 7\.0 is not read"),
        ({"rope_interleaved": True}, r"rope_interleaved = True is not supported"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_or_that_nothing_reads(
    rope: dict[str, Any], message: str
) -> None:
    fields = {**without(LLAMA, "rope_theta"), **rope}
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_hf(fields)


KINDS = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def test_a_base_per_kind_of_layer_is_refused_unless_all_are_alike() -> None:
    """Gemma 3 rotates windowed layers with 10,000 and full ones with 1,000,000."""
    for name in ("rope_parameters", "rope_scaling"):
        fields = {**without(LLAMA, "rope_theta"), name: KINDS}
        with pytest.raises(UnsupportedModelError, match=rf"{name} has settings per kind of layer"):
            ModelConfig.from_hf(fields)
        one = dict.fromkeys(KINDS, KINDS["full_attention"])
        assert ModelConfig.from_hf({**fields, name: one}).rope_theta == 1e6
        mixed = {"full_attention": KINDS["full_attention"], "rope_theta": 1e6}
        with pytest.raises(UnsupportedModelError, match=r"per kind of layer"):
            ModelConfig.from_hf({**fields, name: mixed})


@pytest.mark.parametrize("value", [0, -1.0, "1e4", True])
def test_a_base_is_a_positive_number(value: object) -> None:
    with pytest.raises(ValueError, match=r"rope_theta must be a positive number, got"):
        ModelConfig.from_hf({**LLAMA, "rope_theta": value})


@pytest.mark.parametrize(
    ("name", "part", "whole"),
    [
        ("partial_rotary_factor", 0.25, 1.0), ("rotary_pct", 0.25, 1.0), ("rope_pct", 0.25, 1.0),
        ("rope_percent", 0.5, 1.0), ("rotary_emb_fraction", 0.5, 1.0), ("rotary_dim", 64, 128),
        ("rotary_emb_dim", 32, 128), ("rotary_ndims", 32, 128),
    ],
)  # fmt: skip
def test_part_of_a_head_under_any_name(name: str, part: float, whole: float) -> None:
    """transformers ignores most of these names in a Llama, and rotates whole heads."""
    with pytest.raises(UnsupportedModelError, match=rf"{name} {part} is not supported"):
        ModelConfig.from_hf({**LLAMA, name: part})
    assert ModelConfig.from_hf({**LLAMA, name: whole}) == ModelConfig.from_hf(LLAMA)
    assert ModelConfig.from_hf({**LLAMA, name: None}) == ModelConfig.from_hf(LLAMA)


def test_part_of_a_head_inside_the_object() -> None:
    rope = {"rope_theta": 5e5, "partial_rotary_factor": 0.5}
    with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor 0\.5 is not supported"):
        ModelConfig.from_hf({**LLAMA, "rope_parameters": rope})


# ---- YaRN

# DeepSeek-V3's settings; those of V2 have 0.707 twice.
YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4_096,
}


def scaling(fields: dict[str, Any], rope: dict[str, Any]) -> RopeScaling:
    found = ModelConfig.from_hf({**fields, "rope_scaling": rope}).rope_scaling
    assert found is not None
    return found


def test_yarn_field_by_field() -> None:
    """0.1 · ln 40 + 1 = 1.3688879; its square, 1.8738542, is DeepSeek's factor on the scale."""
    found = scaling(DEEPSEEK, YARN)
    assert (found.kind, found.factor, found.low, found.high) == ("yarn", 40, 1, 32)
    assert found.original_positions == 4_096
    assert found.amplitude == 1.0
    assert found.score_factor == pytest.approx(1.8738542, abs=1e-7)


def test_bounds_that_yarn_does_not_name_are_32_turns_and_1() -> None:
    found = scaling(LLAMA, without(YARN, "beta_fast", "beta_slow"))
    assert (found.low, found.high) == (1.0, 32.0)


@pytest.mark.parametrize(
    ("change", "amplitude", "score_factor"),
    [
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0, 1.5896261),  # 1.2608038²
        ({"mscale": 1.0, "mscale_all_dim": 0.707}, 1.0857264, 1.5896261),
        ({"mscale": 1.0, "mscale_all_dim": 0}, 1.3688879, 1.0),
        ({"mscale": None, "mscale_all_dim": None}, 1.3688879, 1.0),
        ({"attention_factor": 0.5}, 0.5, 1.8738542),
        ({"factor": 1}, 1.0, 1.0),
    ],
)
def test_what_yarn_does_to_keys_and_to_scores(
    change: dict[str, Any], amplitude: float, score_factor: float
) -> None:
    found = scaling(DEEPSEEK, {**YARN, **change})
    assert found.amplitude == pytest.approx(amplitude, abs=1e-7)
    assert found.score_factor == pytest.approx(score_factor, abs=1e-7)


def test_only_deepseek_s_models_scale_their_scores() -> None:
    assert scaling(LLAMA, YARN).score_factor == 1.0


def test_yarn_that_does_not_round_its_bounds_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="truncate=false"):
        scaling(LLAMA, {**YARN, "truncate": False})


def test_the_scale_of_attention() -> None:
    assert ModelConfig.from_hf(QWEN3).scale == pytest.approx(0.0883883, abs=1e-7)  # 1 / sqrt(128)
    with_yarn = ModelConfig.from_hf({**DEEPSEEK, "rope_scaling": YARN})
    assert with_yarn.scale == pytest.approx(0.1352338, abs=1e-7)  # 1.8738542 / sqrt(192)
