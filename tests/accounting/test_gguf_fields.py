"""Cache geometry from the metadata of GGUF files."""

from typing import Any

import pytest

from kvbook.accounting.geometry import CacheGeometry
from kvbook.accounting.gguf_fields import geometry_of_gguf
from kvbook.accounting.need import cache_size
from kvbook.errors import UnsupportedModelError


def read(arch: str, **fields: Any) -> CacheGeometry:
    """Metadata as a file has it: `__` for the dot in a name."""
    keys = {f"{arch}.{name.replace('__', '.')}": value for name, value in fields.items()}
    return geometry_of_gguf({"general.architecture": arch, "general.name": "x", **keys}, "x.gguf")


LLAMA: dict[str, Any] = {
    "block_count": 32, "context_length": 8_192, "embedding_length": 4_096,
    "feed_forward_length": 14_336, "attention__head_count": 32, "attention__head_count_kv": 8,
    "rope__dimension_count": 128, "rope__freq_base": 500_000.0,
    "attention__layer_norm_rms_epsilon": 1e-5, "vocab_size": 128_256,
}  # fmt: skip


def per_token(geometry: CacheGeometry) -> int:
    return cache_size(geometry, 1).bytes_per_token


def test_llama_3_8b() -> None:
    geometry = read("llama", **LLAMA)
    assert per_token(geometry) == 131_072
    assert (geometry.name, geometry.max_positions, geometry.extra_layers) == ("x.gguf", 8_192, 0)


def test_without_kv_heads_every_query_head_has_its_own() -> None:
    fields = {name: value for name, value in LLAMA.items() if "head_count_kv" not in name}
    assert per_token(read("llama", **fields)) == 4 * 131_072


def test_stated_widths_win_over_the_derived_one() -> None:
    """qwen3-30b-a3b: heads are 128 wide, not 2,048 / 32."""
    geometry = read(
        "qwen3moe", block_count=48, embedding_length=2_048, attention__head_count=32,
        attention__head_count_kv=4, attention__key_length=128, attention__value_length=128,
    )  # fmt: skip
    assert per_token(geometry) == 98_304


def test_a_list_has_an_entry_per_layer_and_none_is_a_layer_without_tokens() -> None:
    """LFM2: attention in some layers, short convolutions in the others."""
    geometry = read(
        "lfm2", block_count=4, embedding_length=64, attention__head_count=4,
        attention__head_count_kv=[0, 2, 0, 2], shortconv__l_cache=3,
    )  # fmt: skip
    assert [layer.kind for layer in geometry.layers] == ["recurrent", "full", "recurrent", "full"]
    assert per_token(geometry) == 2 * 2 * 16 * 2 * 2
    assert cache_size(geometry, 1).constant_state_bytes is None


def test_a_layer_without_heads_and_states_keeps_nothing() -> None:
    geometry = read(
        "llama", block_count=2, embedding_length=64, attention__head_count=4,
        attention__head_count_kv=[0, 2],
    )  # fmt: skip
    assert [layer.kind for layer in geometry.layers] == ["none", "full"]


def test_latents_and_prediction_layers() -> None:
    """DeepSeek-V3 with its prediction layer among 62 blocks: 61 of 1,152 bytes."""
    geometry = read(
        "deepseek2", block_count=62, embedding_length=7_168, attention__head_count=128,
        attention__head_count_kv=1, attention__kv_lora_rank=512, attention__q_lora_rank=1_536,
        rope__dimension_count=64, attention__key_length=576, attention__value_length=512,
        attention__key_length_mla=192, attention__value_length_mla=128, nextn_predict_layers=1,
    )  # fmt: skip
    size = cache_size(geometry, 1)
    assert size.bytes_per_token == 61 * 1_152
    assert size.expanded_bytes_per_token == 61 * 128 * (192 + 128) * 2
    assert geometry.extra_layers == 1


@pytest.mark.parametrize(("arch", "layers", "full"), [("gemma3", 26, 4), ("gpt-oss", 24, 12)])
def test_periods_that_the_file_leaves_to_the_program(arch: str, layers: int, full: int) -> None:
    geometry = read(
        arch, block_count=layers, embedding_length=64, attention__head_count=4,
        attention__sliding_window=512,
    )  # fmt: skip
    assert geometry.count("full") == full
    assert geometry.layers[-1].window == (512 if arch == "gemma3" else None)


def test_a_pattern_in_the_file_and_widths_of_windowed_layers() -> None:
    geometry = read(
        "gemma4", block_count=3, embedding_length=64, attention__head_count=4,
        attention__head_count_kv=[2, 2, 1], attention__key_length=32, attention__value_length=32,
        attention__key_length_swa=16, attention__value_length_swa=16,
        attention__sliding_window=100, attention__sliding_window_pattern=[True, True, False],
    )  # fmt: skip
    assert [layer.window for layer in geometry.layers] == [100, 100, None]
    assert per_token(geometry) == (2 * 2 * 2 * 16 + 2 * 32) * 2


def test_layers_that_read_what_others_keep() -> None:
    geometry = read("llama", **LLAMA, attention__shared_kv_layers=12)
    assert per_token(geometry) == 20 * 4_096
    assert geometry.count("none") == 12


def test_one_layer_of_so_many_attends() -> None:
    geometry = read("qwen35", **LLAMA, full_attention_interval=4, ssm__state_size=128)
    assert (geometry.count("full"), geometry.count("recurrent")) == (8, 24)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_count": None}, r"no llama.block_count"),
        ({"block_count": 0}, r"llama.block_count must be from 1 .*got 0"),
        ({"attention__head_count": 3}, "embedding_length 4096 is not a multiple of 3 heads"),
        ({"attention__head_count_kv": [8]}, "head_count_kv has 1 items, but block_count is 32"),
        ({"attention__head_count_kv": "8"}, "head_count_kv must be a whole number .*got '8'"),
        ({"attention__sliding_window": 128}, "nothing in the file says which layers it is for"),
        ({"attention__kv_sharing": 2}, r"llama.attention.kv_sharing = 2 may change what is cached"),
        ({"attention__head_cont_kv": 2}, r"did you mean attention.head_count_kv"),
        ({"cache_groups": 2}, r"llama.cache_groups = 2 may change"),
        ({"nextn_predict_layers": 32}, "nextn_predict_layers is 32, but block_count 32"),
        ({"attention__shared_kv_layers": 32}, "shared_kv_layers is 32, of 32 layers"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read("llama", **{**LLAMA, **change})


def test_a_pattern_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="sliding_window_pattern has 2 items, but block_count"):
        read("gemma4", **LLAMA, attention__sliding_window=8,
             attention__sliding_window_pattern=[True, False])  # fmt: skip


@pytest.mark.parametrize("metadata", [None, 5, [], "x"])
def test_metadata_is_a_mapping(metadata: Any) -> None:
    with pytest.raises(ValueError, match="metadata must be a mapping"):
        geometry_of_gguf(metadata)


@pytest.mark.parametrize("arch", [None, "", 5])
def test_an_architecture_is_named(arch: Any) -> None:
    with pytest.raises(ValueError, match=r"general.architecture must name a model's kind"):
        geometry_of_gguf({"general.architecture": arch})


def test_an_unread_window_is_not_passed_over_in_silence() -> None:
    with pytest.raises(UnsupportedModelError, match="chunk_window"):
        read("llama", **LLAMA, attention__chunk_window=8_192)
