"""What a config means when it leaves a field out, and which fields must not be passed over.

Knows: class defaults of model families, fields that change the cache in ways not counted here.
Does not know: how the fields are used.
"""

from typing import Any

from kvbook.accounting.fields import Fields
from kvbook.errors import UnsupportedModelError

GEMMA3: dict[str, Any] = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
    "sliding_window_pattern": 6,
}  # fmt: skip

# A config.json may leave out what equals the default of its family's class in transformers:
# Gemma 3 12B, for one, has no head_dim, and 3840 / 16 is not its width. A field that is there,
# even as null, wins over this table. A test compares it with the classes.
DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8},
    "qwen2": {"use_sliding_window": False, "max_window_layers": 28},
    "qwen2_moe": {"use_sliding_window": False, "max_window_layers": 28},
    "qwen3": {"use_sliding_window": False, "max_window_layers": 28, "head_dim": 128},
    "qwen3_moe": {"use_sliding_window": False, "num_key_value_heads": 4},
    "qwen3_next": {"num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4},
    "gemma2": {
        "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
        "sliding_window_pattern": 2,
    },
    "gemma3": GEMMA3,
    "gemma3_text": GEMMA3,
    "gpt_oss": {
        "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
        "sliding_window_pattern": 2,
    },
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "falcon": {"multi_query": True},
    "jamba": {"num_key_value_heads": 8, "attn_layer_period": 8, "attn_layer_offset": 4},
}  # fmt: skip

# Families whose code has no window, whatever the config says.
NEVER_WINDOWED = ("llama",)

# Fields that change what is cached, in ways that this package does not count.
NOT_COUNTED = {
    "is_encoder_decoder": "a cache of cross-attention",
    "cross_attention_layers": "a cache of cross-attention",
    "attention_chunk_size": "attention in chunks",
    "num_kv_shared_layers": "layers that share keys and values",
    "attention_k_eq_v": "keys that serve as values",
    "per_layer_config": "sizes per layer in an object of their own",
    "global_head_dim": "head widths that differ between kinds of layers",
    "num_global_key_value_heads": "KV heads that differ between kinds of layers",
    "swa_num_key_value_heads": "KV heads that differ between kinds of layers",
    "swa_head_dim": "head widths that differ between kinds of layers",
    "block_configs": "sizes per layer in objects of their own",
    "block_types": "a repeated pattern of block types",
    "attention_types": "a repeated pattern of attention types",
    "attention_layers": "a list of global and local layers",
    "attn_config": "attention settings in an object of their own",
    "compress_ratios": "keys and values that are compressed over time",
    "index_topk_pattern": "indexer keys in some layers only",
    "index_topk_freq": "indexer keys in some layers only",
}


def with_defaults(fields: Fields) -> dict[str, Any]:
    """The fields, with those of the family's defaults that the config leaves out."""
    return {**DEFAULTS.get(str(fields.get("model_type")), {}), **fields}


def refuse_not_counted(fields: Fields) -> None:
    """Raise ``UnsupportedModelError`` for a field that would make the answer wrong."""
    for name, meaning in NOT_COUNTED.items():
        if fields.get(name):
            raise UnsupportedModelError(
                f"{name} = {fields[name]!r:.40} means {meaning}, which is not counted here; remove "
                "the field to count the model without it"
            )
