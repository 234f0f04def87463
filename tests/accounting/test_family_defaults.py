"""The table of family defaults beside the classes of the pinned transformers.

A config that leaves a field out must mean the same to both: each value of the table is the class's
own, and each class's choice of layers is ours.
"""

import warnings
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvbook.accounting.geometry import CacheGeometry
from kvbook.accounting.layer_kinds import layer_kinds
from kvbook.config.family_defaults import DEFAULTS, PARTS, PLAIN, SIZES, with_defaults
from kvbook.config.spellings import PATTERN, Fields
from tests.oracles.tiny_models import class_defaults

# Not fields of the classes: rules and arguments that their constructors take and do not keep.
ARGUMENTS = {*PATTERN, "full_attention_interval", "global_head_dim", "cross_attention_layers"}
WORDS = {
    "full_attention": "full", "sliding_attention": "window", "linear_attention": "recurrent",
    "chunked_attention": "chunk", "indexed_attention": "indexed", "conv": "recurrent",
    "mamba": "recurrent", "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca",
}  # fmt: skip


def class_fields(family: str) -> dict[str, Any]:
    return {name: f.default for name, f in CONFIG_MAPPING[family].__dataclass_fields__.items()}


@pytest.mark.parametrize("family", sorted(DEFAULTS))
def test_a_default_is_the_class_s_own(family: str) -> None:
    of_class = class_fields(family)
    for name, value in DEFAULTS[family].items():
        if name in ARGUMENTS:
            continue
        if name in ("is_encoder_decoder", "block_types"):
            assert class_defaults(family)[name] == value
        else:
            assert of_class[name] == value, name


@pytest.mark.parametrize("family", sorted(SIZES))
def test_a_size_is_the_class_s_own(family: str) -> None:
    of_class = class_fields(family)
    assert {name: of_class[name] for name in SIZES[family]} == SIZES[family]


@pytest.mark.parametrize("outer", sorted(PARTS))
def test_the_language_model_inside_is_of_the_family_that_the_class_takes(outer: str) -> None:
    if outer != "gemma3n":  # its class needs a package that is not installed
        assert class_defaults(outer)["text_config"]["model_type"] == PARTS[outer]


def test_a_family_is_plain_or_has_defaults() -> None:
    assert not set(PLAIN) & {name for name, fields in DEFAULTS.items() if fields}
    assert set(PLAIN) <= set(CONFIG_MAPPING)


# Their rules differ from what is read here, so that they are refused, or need fields of their own.
REFUSED = ("recurrent_gemma", "dots3_note_text", "qwen4_exp_text", "zamba2")
NEEDS_NAMES = ("bamba", "granitemoehybrid", "lfm2", "lfm2_moe", "nemotron_h", "zamba",
               "gemma4_unified_text", "kimi_linear", "zaya", "inkling_text", "inkling2_text",
               "inkling2_loop_text", "hy_v3", "falcon_h1", "mllama_text_model",
               "gpt_neo")  # fmt: skip


@pytest.mark.parametrize("layers", [12, 13])
@pytest.mark.parametrize("family", sorted({*DEFAULTS, *PLAIN} - {*REFUSED, *NEEDS_NAMES}))
def test_a_class_that_names_its_layers_means_the_same(family: str, layers: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = AutoConfig.for_model(family, num_hidden_layers=layers, num_kv_shared_layers=0)
        except (ValueError, NotImplementedError):
            pytest.skip("the class ties its layers to another field")
    named = getattr(config, "layer_types", None)
    if named is None or len(named) != layers:
        pytest.skip("the class does not name its layers")
    fields = Fields(with_defaults({"model_type": family, "num_hidden_layers": layers}))
    assert layer_kinds(fields, layers) == [WORDS[name] for name in named]


def test_a_nested_model_may_leave_out_its_sizes_and_one_that_stands_alone_may_not() -> None:
    """LLaVA 1.5 says of its language model only that it is a Llama: 32 layers of 32 heads."""
    nested = CacheGeometry.from_hf({"model_type": "llava", "text_config": {"model_type": "llama"}})
    assert len(nested.layers) == 32
    assert [(kept.heads, kept.width) for kept in nested.layers[0].per_token] == [(32, 128)] * 2
    with pytest.raises(ValueError, match="the config has no num_hidden_layers"):
        CacheGeometry.from_hf({"model_type": "llama"})


def test_a_size_under_another_name_takes_the_place_of_a_default() -> None:
    fields = {
        "model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 512,
        "num_attention_heads": 8, "n_kv_heads": 2,
    }  # fmt: skip
    assert CacheGeometry.from_hf(fields).layers[0].per_token[0].heads == 2


@pytest.mark.parametrize(
    ("family", "change", "heads", "window"),
    [
        ("mistral", {}, 8, 4_096),
        ("mistral", {"num_key_value_heads": None}, 32, 4_096),
        ("mistral", {"sliding_window": None}, 8, None),
        ("mixtral", {}, 8, None),
        ("llama", {}, 32, None),
    ],
)
def test_null_is_not_absent(
    family: str, change: dict[str, Any], heads: int, window: int | None
) -> None:
    fields = {
        "model_type": family, "num_hidden_layers": 2, "hidden_size": 4_096,
        "num_attention_heads": 32, **change,
    }  # fmt: skip
    layer = CacheGeometry.from_hf(fields).layers[0]
    assert (layer.per_token[0].heads, layer.window) == (heads, window)
