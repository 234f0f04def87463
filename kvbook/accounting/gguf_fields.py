"""From the metadata of a GGUF file to the layers of its model.

Knows: the names under which llama.cpp's files keep heads, widths, windows and latents. Does not
know: how a file is read, bytes.

Names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and ``gguf.constants`` of the
package ``gguf``. Files of some architectures have a window and do not say which layers it is for;
llama.cpp keeps that in its code (``set_swa_pattern``, src/llama-model.cpp, 2026), and so does
``PERIODS``.
"""

import re
from collections.abc import Mapping
from typing import Any

from kvbook.accounting.geometry import CacheGeometry
from kvbook.accounting.layers import (
    Layer,
    empty_layer,
    full_layer,
    latent_layer,
    recurrent_layer,
    window_layer,
)
from kvbook.accounting.nearest import hint
from kvbook.accounting.units import check_count, check_text, quoted
from kvbook.errors import UnsupportedModelError

# One layer of so many has no window: the last of each period.
PERIODS = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2, "cohere2": 4}

READ = {
    "block_count", "context_length", "embedding_length", "nextn_predict_layers",
    "full_attention_interval", "rope.dimension_count", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.key_length_mla", "attention.value_length_mla", "attention.kv_lora_rank",
    "attention.sliding_window", "attention.sliding_window_pattern", "attention.shared_kv_layers",
    "attention.key_length_swa", "attention.value_length_swa", "attention.indexer.key_length",
}  # fmt: skip
# Known not to change what is cached.
PASSED_OVER = re.compile(
    r"attention\.(layer_norm.*|causal|scale|q_lora_rank|.*clamp.*|.*softcapping|"
    r"temperature.*|output_scale|indexer\.(head_count|top_k)|value_residual.*|gate_lora_rank|"
    r"decay_lora_rank|iclr_lora_rank|group_norm.*|max_alibi_bias|clamp_kqv)|rope\..*|ssm\..*|shortconv\..*"
)
TELLING = re.compile(
    r"kv|head|group|window|layer|pattern|interval|loop|share|reuse|source|compress|index|latent|"
    r"state|cache|attention"
)


def geometry_of_gguf(metadata: Mapping[str, Any], name: str = "model") -> CacheGeometry:
    """The cache geometry of the model in a GGUF file, from its key-value metadata.

    Raises ``ValueError`` for a field that is missing or impossible, and ``UnsupportedModelError``
    for one that may change what is cached and is not known here.
    """
    if not isinstance(metadata, Mapping):
        raise ValueError(f"metadata must be a mapping of keys to values, got {quoted(metadata)}")
    check_text("name", name)
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str) or not arch:
        raise ValueError(f"general.architecture must name a model's kind, got {quoted(arch)}")
    fields = {
        key.removeprefix(f"{arch}."): value
        for key, value in metadata.items()
        if key.startswith(f"{arch}.")
    }
    refuse_unknown(arch, fields)
    stated = count(fields, "block_count", arch)
    extra = optional(fields, "nextn_predict_layers", arch, 0) or 0
    if extra >= stated:
        raise ValueError(
            f"{arch}.nextn_predict_layers is {extra}, but block_count {stated} counts them too"
        )
    layers = [layer(fields, arch, i, stated) for i in range(stated - extra)]
    shared = optional(fields, "attention.shared_kv_layers", arch, 0) or 0
    if shared >= len(layers):
        raise ValueError(f"{arch}.attention.shared_kv_layers is {shared}, of {len(layers)} layers")
    layers[len(layers) - shared :] = [empty_layer()] * shared  # they read what earlier ones keep
    return CacheGeometry(name, tuple(layers), optional(fields, "context_length", arch), extra)


def refuse_unknown(arch: str, fields: Mapping[str, Any]) -> None:
    for key, value in fields.items():
        if key in READ or PASSED_OVER.fullmatch(key) or not TELLING.search(key) or not value:
            continue
        if key.startswith(("expert", "feed_forward", "leading_dense", "tokenizer", "vocab")):
            continue
        raise UnsupportedModelError(
            f"{arch}.{key} = {quoted(value)} may change what is cached, and is not read here; "
            f"{hint(key, READ, 'give the config.json of the model instead')}"
        )


def layer(fields: Mapping[str, Any], arch: str, i: int, layers: int) -> Layer:
    """What layer ``i`` keeps."""
    interval = optional(fields, "full_attention_interval", arch)
    if interval is not None and (i + 1) % interval:
        return recurrent_layer(None)
    queries = entry(fields, "attention.head_count", arch, i, layers, 0)
    heads = entry(fields, "attention.head_count_kv", arch, i, layers, 0, queries)
    if heads == 0:
        return (
            recurrent_layer(None)
            if any(key.startswith("ssm.") for key in fields) or ("shortconv.l_cache" in fields)
            else empty_layer()
        )
    if fields.get("attention.kv_lora_rank"):
        return latent(fields, arch, queries)
    window = window_of(fields, arch, i, layers)
    suffix = "" if window is None else "_swa"
    key, value = (length(fields, side, suffix, arch, queries) for side in ("key", "value"))
    if window is None:
        return full_layer(heads, key, value)
    return window_layer(window, heads, key, value)


def length(fields: Mapping[str, Any], side: str, suffix: str, arch: str, queries: int) -> int:
    """The width of keys or values: the stated one, or model width over query heads."""
    names = [f"attention.{side}_length{suffix}", f"attention.{side}_length"]
    for name in names:
        if (stated := optional(fields, name, arch)) is not None:
            return stated
    whole = count(fields, "embedding_length", arch)
    if queries == 0 or whole % queries:
        raise ValueError(
            f"{arch} has no {names[-1]}, and embedding_length {whole} is not a multiple of "
            f"{queries} heads"
        )
    return whole // queries


def latent(fields: Mapping[str, Any], arch: str, queries: int) -> Layer:
    rope = count(fields, "rope.dimension_count", arch)
    key = optional(fields, "attention.key_length_mla", arch) or count(
        fields, "attention.key_length", arch)  # fmt: skip
    value = optional(fields, "attention.value_length_mla", arch) or count(
        fields, "attention.value_length", arch)  # fmt: skip
    if key <= rope:
        raise ValueError(f"{arch}: keys of {key} elements cannot hold {rope} rotated ones")
    made = latent_layer(count(fields, "attention.kv_lora_rank", arch), rope, queries, key - rope,
                        value)  # fmt: skip
    index = optional(fields, "attention.indexer.key_length", arch)
    return made if index is None else made.with_index_keys(index)


def window_of(fields: Mapping[str, Any], arch: str, i: int, layers: int) -> int | None:
    """W of layer ``i``, or ``None`` where it reads everything."""
    window = optional(fields, "attention.sliding_window", arch, 0)
    if not window:
        return None
    pattern = fields.get("attention.sliding_window_pattern", PERIODS.get(arch))
    if isinstance(pattern, list):
        if len(pattern) != layers:
            raise ValueError(
                f"{arch}.attention.sliding_window_pattern has {len(pattern)} items, but "
                f"block_count is {layers}"
            )
        return window if pattern[i] else None
    if pattern is None:
        raise UnsupportedModelError(
            f"{arch}.attention.sliding_window is {window}, and nothing in the file says which "
            "layers it is for; give the config.json of the model instead"
        )
    period = check_count(f"{arch}.attention.sliding_window_pattern", pattern)
    return window if (i + 1) % period else None


def entry(
    fields: Mapping[str, Any], key: str, arch: str, i: int, layers: int, low: int,
    default: int | None = None,
) -> int:  # fmt: skip
    """A number that holds for all layers, or the i-th of a list with one for each."""
    value = fields.get(key, default)
    if isinstance(value, list):
        if len(value) != layers:
            raise ValueError(
                f"{arch}.{key} has {len(value)} items, but block_count is {layers}; one is wrong"
            )
        value = value[i]
    return check_count(f"{arch}.{key}", value, low, 10**9)


def optional(fields: Mapping[str, Any], key: str, arch: str, low: int = 1) -> int | None:
    value = fields.get(key)
    return None if value is None else check_count(f"{arch}.{key}", value, low, 10**9)


def count(fields: Mapping[str, Any], key: str, arch: str) -> int:
    value = optional(fields, key, arch)
    if value is None:
        raise ValueError(f"the file has no {arch}.{key}; nothing else says what it is")
    return value
