"""Config files that are no configs, and values that are no sizes: each refused with its name."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvbook.accounting.geometry import CacheGeometry
from kvbook.accounting.need import cache_size

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


def per_token(fields: dict[str, Any]) -> int:
    return cache_size(CacheGeometry.from_hf(fields), 1).bytes_per_token


# ---- Files


def test_a_path_a_folder_and_the_content_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    read = [CacheGeometry.from_hf(source) for source in (LLAMA, file, str(file), tmp_path)]
    assert read == [read[0]] * 4
    assert read[0].name == "llama"


@pytest.mark.parametrize("name", ["text_config", "language_config", "llm_config"])
def test_a_nested_language_model(name: str) -> None:
    """What stands beside it belongs to other parts, whether it repeats a name or not."""
    outer = {"model_type": "several", "hidden_size": 1, "head_dim": 1, name: LLAMA}
    assert per_token(outer) == 131_072


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("{'a': 1}", "is not JSON"),
        ("[1, 2]", "holds list, not an object"),
        ("null", "holds NoneType, not an object"),
        ("[" * 100_000, "is not JSON"),
        ('{"num_hidden_layers": ' + "9" * 5_000 + "}", "is not JSON"),
        ('{"n_layer": 2, "n_layer": 3}', "'n_layer' stands there twice, as 2 and as 3"),
    ],
    ids=["empty", "not JSON", "a list", "null", "too deep", "too long", "repeated"],
)
def test_a_file_that_is_no_config(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"config\.json.*{message}"):
        CacheGeometry.from_hf(file)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\xff\xfe\x00\x81" * 10)
    with pytest.raises(ValueError, match=r"safetensors is not JSON.*give a Hugging Face config"):
        CacheGeometry.from_hf(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ValueError, match=r"cannot read .*: No such file"):
            CacheGeometry.from_hf(path)


# ---- Not a positive whole number


SIZES = [
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "v_head_dim",
]  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1, 2.0, 2.5, "8", True, {"a": 1}, 10**12, 10**4_000])
def test_sizes_are_positive_whole_numbers(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be .*from 1 to [\d,]+, got"):
        CacheGeometry.from_hf({**LLAMA, name: value})


@pytest.mark.parametrize("value", [0, -1, 2.5, "8", 10**12])
def test_so_are_windows_and_latents(value: object) -> None:
    with pytest.raises(ValueError, match="sliding_window must be"):
        CacheGeometry.from_hf({**GEMMA3, "sliding_window": value})
    with pytest.raises(ValueError, match="kv_lora_rank must be"):
        CacheGeometry.from_hf({**MLA, "kv_lora_rank": value})


def test_so_is_each_item_of_a_list() -> None:
    with pytest.raises(ValueError, match=r"num_key_value_heads\[2\] must be .* got 'x'"):
        CacheGeometry.from_hf({**LLAMA, "num_key_value_heads": [8, 8, "x", *[8] * 29]})


def test_ten_thousand_layers_are_enough() -> None:
    with pytest.raises(ValueError, match=r"num_hidden_layers must be from 1 to 10,000, got 10,001"):
        CacheGeometry.from_hf({**LLAMA, "num_hidden_layers": 10_001})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": 3}, r"layer_types must have an entry for each layer, got 3"),
        ({"full_attn_idxs": 3}, r"full_attn_idxs must be a list of layers, got 3"),
        ({"full_attn_idxs": ["x"]}, r"a layer in full_attn_idxs must be .* got 'x'"),
        ({"use_sliding_window": "no"}, r"use_sliding_window must be true or false, got 'no'"),
        ({"multi_query": 1}, r"multi_query must be true or false, got 1"),
        ({"text_config": 3}, r"text_config must be an object.*got 3"),
    ],
)
def test_wrong_types(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CacheGeometry.from_hf({**LLAMA, "model_type": "other", **fields})


# ---- Objects inside objects


MPT: dict[str, Any] = {"model_type": "mpt", "d_model": 64, "n_heads": 8, "n_layers": 2}


@pytest.mark.parametrize(
    "fields",
    [
        {"attn_config": {"kv_n_heads": 2}},
        {"kv_n_heads": None, "attn_config": {"kv_n_heads": 2}},
        {"kv_n_heads": 2, "attn_config": {"kv_n_heads": None}},
        {"kv_n_heads": 2, "attn_config": {"kv_n_heads": 2, "model_type": "its own"}},
        {"kv_n_heads": 2, "attn_config": None},
    ],
)
def test_a_null_on_one_side_of_an_object_says_nothing(fields: dict[str, Any]) -> None:
    """2 layers of 2 KV heads of 8: 2 · 2 · 2 · 8 · 2 B."""
    assert per_token({**MPT, **fields}) == 128


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_n_heads": 4, "attn_config": {"kv_n_heads": 2}},
         r"kv_n_heads 4 and attn_config\.kv_n_heads 2 contradict each other"),
        ({"attn_config": {"kv_n_heads": 2, "num_key_value_heads": 4}},
         "num_key_value_heads 4 and kv_n_heads 2 contradict"),
        ({"attn_config": "fast"}, "attn_config must be an object with settings, got 'fast'"),
        ({"attn_config": [2]}, r"attn_config must be an object with settings, got \[2\]"),
        ({"attn_config": {"attn_config": {"kv_n_heads": 2}}}, r"attn_config\.kv_n_heads = 2"),
        ({"attention_config": {"kv_n_heads": 2}}, r"attention_config\.kv_n_heads = 2 is not known"),
    ],
)  # fmt: skip
def test_settings_of_attention_in_an_object_are_read_or_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        per_token({**MPT, **fields})


def test_an_object_beside_a_nested_model_is_another_part_s() -> None:
    inner = {**MPT, "attn_config": {"kv_n_heads": 2}}
    outer = {"model_type": "several", "attn_config": {"kv_n_heads": 4}, "text_config": inner}
    assert per_token(outer) == 128
    assert per_token({**outer, "text_config": MPT}) == 4 * 128  # MPT's own: 8 KV heads


def test_two_nested_language_models_must_be_one() -> None:
    assert per_token({"text_config": LLAMA, "llm_config": LLAMA}) == 131_072
    other = {**LLAMA, "num_hidden_layers": 31}
    with pytest.raises(ValueError, match=r"text_config .* and llm_config .* contradict each other"):
        per_token({"text_config": LLAMA, "llm_config": other})


def test_the_nested_model_s_own_fields_win() -> None:
    inner = {**LLAMA, "num_kv_shared_layers": 0}
    outer = {"model_type": "several", "num_kv_shared_layers": 16, "text_config": inner}
    assert per_token(outer) == 131_072


def test_a_field_that_is_repeated_with_one_value_is_no_contradiction(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA).replace("{", '{"num_hidden_layers": 32, ', 1))
    assert cache_size(CacheGeometry.from_hf(file), 1).bytes_per_token == 131_072


# ---- The longest text


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 8_192),
        ({"rope_type": "dynamic", "factor": 4.0}, 8_192),
        ({"rope_type": "llama3", "factor": 4.0}, 8_192),
        ({"rope_type": "yarn", "factor": 4.0}, 32_768),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4_096}, 16_384),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1_024}, 8_192),
    ],
)
def test_a_scaling_lengthens_the_original_and_never_shortens_the_stated(
    scaling: dict[str, Any], positions: int
) -> None:
    geometry = CacheGeometry.from_hf({**LLAMA, "rope_scaling": scaling})
    assert geometry.max_positions == positions


# ---- A switch beside the sizes of latents


@pytest.mark.parametrize("name", ["kv_lora_rank", "qk_rope_head_dim", "v_head_dim"])
def test_latents_that_are_off_have_no_size(name: str) -> None:
    off = dict.fromkeys(("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 0)
    fields = {**LLAMA, "model_type": "deepseek_v2", "use_mla": False, **off}
    assert per_token(fields) == 131_072
    with pytest.raises(ValueError, match=f"use_mla is false, but {name} is 64; switch it on, or"):
        per_token({**fields, name: 64})


def test_latents_that_are_off_have_no_size_by_default_either() -> None:
    """DeepSeek-V2's class states a rank of 512; one that is switched off does not ask for it."""
    inner = {**LLAMA, "model_type": "deepseek_v2", "use_mla": False}
    assert per_token({"model_type": "several", "text_config": inner}) == 131_072


def test_latents_that_are_on_need_a_rank() -> None:
    assert per_token({**MLA, "use_mla": True}) == 61 * 576 * 2
    with pytest.raises(ValueError, match="the config has no kv_lora_rank"):
        per_token({**LLAMA, "use_mla": True})
    with pytest.raises(ValueError, match="use_mla must be true or false, got 0"):
        per_token({**MLA, "use_mla": 0})
