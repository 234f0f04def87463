"""From the fields of a config.json to what each layer keeps.

Knows: heads, widths and latents, with explicit fields before derived ones. Does not know: bytes,
files.
"""

from kvbook.accounting.families import refuse_not_counted, with_defaults
from kvbook.accounting.fields import (
    HEAD_WIDTH,
    HEADS,
    KV_HEADS,
    WIDTH,
    Fields,
    check_length,
    count,
    counts,
    divide,
    find,
    flag,
    optional_count,
)
from kvbook.accounting.layer_kinds import layer_count, layer_kinds, needed_window
from kvbook.accounting.layers import (
    Layer,
    empty_layer,
    full_layer,
    latent_layer,
    recurrent_layer,
    window_layer,
)
from kvbook.accounting.recurrent_state import recurrent_state
from kvbook.errors import UnsupportedModelError


def layers_of(fields: Fields) -> tuple[Layer, ...]:
    """One ``Layer`` for each layer of the model.

    Raises ``ValueError`` for a field that is missing, contradicts another or is not a positive
    whole number, and ``UnsupportedModelError`` (a ``ValueError``) for a kind of cache that is
    not counted here.
    """
    refuse_not_counted(fields)
    fields = with_defaults(fields)
    kinds = layer_kinds(fields, layer_count(fields))
    attention = latent_layers if fields.get("kv_lora_rank") is not None else head_layers
    return with_index_keys(fields, attention(fields, kinds))


def head_layers(fields: Fields, kinds: list[str]) -> list[Layer]:
    """Layers with keys and values per KV head (MHA, GQA, MQA), and recurrent ones."""
    key_widths = key_width_per_layer(fields, len(kinds))
    values = optional_count(fields, "v_head_dim")
    value_widths = key_widths if values is None else [values] * len(kinds)
    sizes = list(
        zip(kinds, kv_heads_per_layer(fields, len(kinds)), key_widths, value_widths, strict=True)
    )
    window = needed_window(fields) if "window" in kinds else None
    made: dict[tuple[str, int, int, int], Layer] = {}  # layers of one size are one record
    for kind, heads, key_width, value_width in set(sizes):
        if kind == "window" and window is not None:
            layer = window_layer(window, heads, key_width, value_width)
        elif kind in ("full", "window"):
            layer = full_layer(heads, key_width, value_width)
        else:
            layer = layer_without_tokens(kind, fields)
        made[kind, heads, key_width, value_width] = layer
    return [made[size] for size in sizes]


def latent_layers(fields: Fields, kinds: list[str]) -> list[Layer]:
    """Layers with one latent vector per token (MLA), and recurrent ones."""
    if "window" in kinds:
        raise UnsupportedModelError(
            "kv_lora_rank with windowed layers is not counted here; a latent layer keeps all tokens"
        )
    made = {kind: layer_without_tokens(kind, fields) for kind in set(kinds) - {"full"}}
    made["full"] = latent_layer(
        rank=count(fields, "kv_lora_rank"),
        rope_width=count(fields, "qk_rope_head_dim"),
        heads=count(fields, *HEADS),
        nope_width=count(fields, "qk_nope_head_dim"),
        value_width=count(fields, "v_head_dim"),
    )
    return [made[kind] for kind in kinds]


def layer_without_tokens(kind: str, fields: Fields) -> Layer:
    """A layer that keeps a constant state, or nothing."""
    return recurrent_layer(recurrent_state(fields)) if kind == "recurrent" else empty_layer()


def with_index_keys(fields: Fields, layers: list[Layer]) -> tuple[Layer, ...]:
    """Sparse attention chooses tokens by keys of its own (DeepSeek-V3.2): one more vector each.

    With ``indexer_types``, only the layers marked "full" have an indexer.
    """
    width = optional_count(fields, "index_head_dim")
    if width is None:
        return tuple(layers)
    marks = fields.get("indexer_types") or ["full"] * len(layers)
    check_length("indexer_types", marks, len(layers))
    return tuple(
        layer.with_index_keys(width) if layer.per_token and mark == "full" else layer
        for layer, mark in zip(layers, marks, strict=True)
    )


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
    if find(fields, HEAD_WIDTH)[1] is not None:
        return counts(fields, HEAD_WIDTH, layers, default=None)
    return [divide(fields, WIDTH, HEADS, "head_dim")] * layers
