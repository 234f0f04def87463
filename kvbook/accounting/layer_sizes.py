"""KV heads, widths and windows of each layer, where kinds of layers or single layers differ.

Knows: explicit fields before derived ones, one kind's fields before all layers'. Does not know:
which layer is of which kind, latents, bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbook.accounting.layer_kinds import BOTH, CHUNK, FULL, INDEXED, NAMES, WINDOW
from kvbook.accounting.window_patterns import cycled
from kvbook.config.counts import check_count
from kvbook.config.family_defaults import family
from kvbook.config.spellings import (
    HEAD_WIDTH,
    HEADS,
    KV_HEADS,
    VALUE_WIDTH,
    WIDTH,
    Fields,
    count,
    counts,
    divide,
    find,
    flag,
    optional_count,
)
from kvbook.config.spellings import WINDOW as WINDOW_NAMES

ATTENDS = (FULL, WINDOW, CHUNK, BOTH, INDEXED)


@dataclass(frozen=True)
class Size:
    """Heads and widths of one layer; ``window`` is of windowed and chunked layers."""

    heads: int
    key_width: int
    value_width: int
    window: int | None = None


# Fields of one kind of layers: KV heads, width of keys, width of values.
OF_KIND = {
    WINDOW: (("swa_num_key_value_heads",), ("swa_head_dim",), ("swa_v_head_dim",)),
    FULL: (("num_global_key_value_heads",), ("global_head_dim",), ()),
}  # type: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]]


def layer_sizes(fields: Fields, kinds: Sequence[str]) -> list[Size]:
    """Heads, widths and window of each layer (of those without attention too, where unused)."""
    heads = kv_heads_per_layer(fields, len(kinds))
    keys = key_width_per_layer(fields, len(kinds))
    latents_off = fields.get("use_mla") is False  # then their widths may be zero
    stated = None if latents_off else optional_count(fields, *VALUE_WIDTH)
    values = keys if stated is None else [stated] * len(kinds)
    windows = window_per_layer(fields, kinds)
    general = list(zip(kinds, heads, keys, values, windows, strict=True))
    made = {each: of_kind(fields, each[0], Size(*each[1:])) for each in set(general)}
    sizes = [made[each] for each in general]
    if not fields.has("per_layer_config"):
        return sizes
    return [of_layer(fields, i, size) for i, size in enumerate(sizes)]


def of_kind(fields: Fields, kind: str, size: Size) -> Size:
    """The size, with the fields that only its kind of layer has in the place of the general."""
    heads_names, key_names, value_names = OF_KIND.get(kind, ((), (), ()))
    heads = optional_count(fields, *heads_names) if heads_names else None
    if kind == FULL and heads is not None and fields.has("attention_k_eq_v"):
        heads = heads if flag(fields, "attention_k_eq_v") else None  # Gemma 4 ties the two
    if kind == WINDOW and heads is None and family(fields) == "mimo_v2_flash":
        heads = 2 * size.heads
    keys = optional_count(fields, *key_names) if key_names else None
    values = optional_count(fields, *value_names) if value_names else None
    if values is None and keys is not None and size.key_width == size.value_width:
        values = keys
    size = Size(
        heads or size.heads, keys or size.key_width, values or size.value_width, size.window
    )
    other = fields.object("attention_other_setting")  # Step-3.5: the layers of one other kind
    if other is None or NAMES.get(other.get("attention_type", "")) != kind:
        return size
    other.idle(*HEADS, *("true_head_dim", "head_dim"))
    width = optional_count(other, *HEAD_WIDTH) or size.key_width
    return Size(optional_count(other, *KV_HEADS) or size.heads, width, width, size.window)


def of_layer(fields: Fields, layer: int, size: Size) -> Size:
    """The size, with what ``per_layer_config`` says of this layer alone."""
    own = own_fields(fields, layer)
    if own is None:
        return size
    own.idle(*HEADS)
    width = optional_count(own, *HEAD_WIDTH)
    values = optional_count(own, *VALUE_WIDTH) or width
    return Size(
        optional_count(own, *KV_HEADS) or size.heads,
        width or size.key_width,
        values or size.value_width,
        optional_count(own, *WINDOW_NAMES) or size.window,
    )


def own_fields(fields: Fields, layer: int) -> Fields | None:
    """The object that ``per_layer_config`` has for a layer: under its number, as text or not."""
    objects = fields.object("per_layer_config")
    if objects is None:
        return None
    for name in objects:
        if str(name).isdecimal() and int(name) == layer:
            return objects.object(name)
    return None


def window_per_layer(fields: Fields, kinds: Sequence[str]) -> list[int | None]:
    """W of each windowed layer, the size of a chunk of each chunked one, else ``None``."""
    windows: list[int | None] = [None] * len(kinds)
    if CHUNK in kinds:
        chunk = count(fields, "attention_chunk_size")
        windows = [chunk if kind == CHUNK else None for kind in kinds]
    if WINDOW in kinds:
        window = needed_window(fields, len(kinds))
        windows = [window[i] if kind == WINDOW else windows[i] for i, kind in enumerate(kinds)]
    return windows


def needed_window(fields: Fields, layers: int) -> list[int | None]:
    """W of layers that are windowed: one number, or a list that is repeated over the layers."""
    if fields.get("use_sliding_window") is False:
        raise ValueError(
            "use_sliding_window is false, but some layers are named sliding; change one of the two"
        )
    if family(fields) == "mimo_v2_flash" and fields.has("sliding_window_size"):
        # The model sees so many tokens before the current one.
        fields.idle("sliding_window")
        return [count(fields, "sliding_window_size") + 1] * layers
    if family(fields) == "modernbert-decoder" and fields.has("local_attention"):
        fields.idle("sliding_window")
        return [count(fields, "local_attention") // 2] * layers
    name, stated = find(fields, WINDOW_NAMES)
    if isinstance(stated, list | tuple):
        windows = cycled(name, stated, layers)
        return [None if w is None else check_count(f"an item of {name}", w) for w in windows]
    return [count(fields, *WINDOW_NAMES)] * layers


def kv_heads_per_layer(fields: Fields, layers: int) -> list[int]:
    """KV heads: the explicit field, one for multi-query models, else as many as query heads."""
    heads = count(fields, *HEADS)
    if flag(fields, "multi_query") and not flag(fields, "new_decoder_architecture"):
        # Falcon 7B: its class writes num_kv_heads = num_attention_heads beside multi_query.
        name, stated = find(fields, KV_HEADS)
        if stated not in (None, 1, heads):
            raise ValueError(
                f"multi_query is true, which means 1 KV head, but {name} is {stated!r:.40}; keep "
                "one of the two fields"
            )
        return [1] * layers
    if fields.get("multi_query_attention") is False:  # ChatGLM: the number of groups is unused
        fields.idle(*KV_HEADS)
        return [heads] * layers
    found = counts(fields, KV_HEADS, layers, default=heads)
    for kv_heads in set(found):
        if heads % kv_heads:
            raise ValueError(
                f"{find(fields, HEADS)[0]} {heads} is not a multiple of "
                f"{find(fields, KV_HEADS)[0]} {kv_heads}; each KV head serves equally many queries"
            )
    return found


def key_width_per_layer(fields: Fields, layers: int) -> list[int]:
    """Head width: the explicit field, else model width over query heads, which must be whole."""
    if family(fields) == "zamba2" and fields.has("attention_head_dim"):
        fields.idle("kv_channels")  # that of the model's width, of which heads see twice
        return [count(fields, "attention_head_dim")] * layers
    if find(fields, HEAD_WIDTH)[1] is not None:
        return counts(fields, HEAD_WIDTH, layers, default=None)
    return [divide(fields, WIDTH, HEADS, "head_dim")] * layers


def block_sizes(fields: Fields, blocks: Sequence[Mapping[str, Any]]) -> list[Size | None]:
    """``block_configs``: each layer's attention in an object of its own (DeciLM, Nemotron-NAS)."""
    heads = count(fields, *HEADS)
    width = key_width_per_layer(fields, 1)[0]
    sizes: list[Size | None] = []
    for i, block in enumerate(blocks):
        own = Fields(block.get("attention") or {})
        if own.get("no_op") or own.get("replace_with_linear"):
            sizes.append(None)
            continue
        group = optional_count(own, "n_heads_in_group")
        kv_heads = optional_count(own, *KV_HEADS) or (heads // group if group else None)
        if kv_heads is None or (group and heads % group):
            raise ValueError(
                f"block_configs[{i}].attention needs num_key_value_heads, or n_heads_in_group that "
                f"divides {heads} heads, got {dict(own)!r:.80}"
            )
        sizes.append(Size(kv_heads, width, width, optional_count(own, "window_length")))
    return sizes
