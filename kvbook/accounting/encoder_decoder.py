"""Encoder-decoders: which of their sizes are the decoder's, and what its layers keep.

Knows: the decoder's own names, cross-attention. Does not know: how long the source is.
"""

from collections.abc import Mapping
from typing import Any

from kvbook.accounting.layers import Layer, cross_layer, full_layer
from kvbook.config.spellings import (
    HEAD_WIDTH,
    HEADS,
    KV_HEADS,
    LAYERS,
    WIDTH,
    Fields,
    count,
    divide,
    optional_count,
)

OWN_LAYERS = ("decoder_layers", "num_decoder_layers")
OWN_HEADS = ("decoder_attention_heads", "num_decoder_attention_heads")


def decoder_part(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, with the decoder's layers and heads under the names that any model has.

    Where a decoder has sizes of its own, those under the usual names are the encoder's.
    """
    fields = dict(values)
    for own, usual in ((OWN_LAYERS, LAYERS), (OWN_HEADS, (*HEADS, *KV_HEADS))):
        stated = [fields.pop(name) for name in own if fields.get(name) is not None]
        if not stated:
            continue
        if any(value != stated[0] for value in stated):
            raise ValueError(f"{' and '.join(own)} contradict each other; keep one of the two")
        fields = {name: value for name, value in fields.items() if name not in usual}
        fields[usual[0]] = stated[0]
    return fields


def decoder_layers(fields: Fields, source: int) -> tuple[Layer, ...]:
    """Each layer of the decoder has a cache of the answer and one of the source."""
    layers, heads = count(fields, *LAYERS), count(fields, *HEADS)
    width = optional_count(fields, *HEAD_WIDTH) or divide(fields, WIDTH, HEADS, "head_dim")
    fields.idle(*KV_HEADS)
    return (full_layer(heads, width, width), cross_layer(source, heads, width, width)) * layers
