"""From the fields of a config.json to what each layer keeps.

Knows: which readers make up a model, in which order. Does not know: bytes, files.
"""

from kvbook.accounting.encoder_decoder import decoder_layers
from kvbook.accounting.layer_kinds import (
    BOTH,
    CHUNK,
    CSA,
    FULL,
    HCA,
    NONE,
    RECURRENT,
    WINDOW,
    layer_count,
    layer_kinds,
)
from kvbook.accounting.layer_sizes import ATTENDS, Size, block_sizes, layer_sizes
from kvbook.accounting.layers import (
    Layer,
    chunk_layer,
    cross_layer,
    empty_layer,
    full_layer,
    latent_layer,
    recurrent_layer,
    window_layer,
)
from kvbook.accounting.recurrent_state import STATE_FIELDS, State, recurrent_state
from kvbook.accounting.shared_caches import (
    recurrent_section,
    repeated,
    shared,
    source_length,
    stacked,
)
from kvbook.accounting.sparse_attention import compressed_layers, with_index_keys
from kvbook.config.counts import check_count
from kvbook.config.family_defaults import family
from kvbook.config.latent_switch import latents_switched
from kvbook.config.spellings import (
    HEAD_WIDTH,
    HEADS,
    KV_HEADS,
    Fields,
    count,
    flag,
)
from kvbook.config.spellings import WINDOW as WINDOW_NAMES
from kvbook.errors import UnsupportedModelError

Caches = tuple[Layer, ...]  # of one layer of the model: most have one

NOT_COUNTED = {
    "rwkv": "a state of its own kind", "xlstm": "a state of its own kind",
    "reformer": "hashed attention", "zaya": "convolutions of keys",
    "cpmant": "prompt tokens of its own in each cache",
    "inkling_text": "convolutions of keys", "inkling2_text": "convolutions of keys",
    "inkling2_loop_text": "convolutions of keys in layers that are run again",
}  # fmt: skip


def layers_of(fields: Fields, source_tokens: int | None = None) -> tuple[Layer, ...]:
    """The caches of the model's layers, in order; a layer may have none, one or two.

    Raises ``ValueError`` for a field that is missing, contradicts another or is not a positive
    whole number, and ``UnsupportedModelError`` (a ``ValueError``) for a kind of cache that is
    not counted here.
    """
    if family(fields) in NOT_COUNTED:
        raise UnsupportedModelError(
            f"model_type {fields['model_type']!r} means {NOT_COUNTED[family(fields)]}, which is "
            "not counted here"
        )
    if flag(fields, "is_encoder_decoder"):
        return decoder_layers(fields, source_length(fields, source_tokens))
    if fields.get("block_configs"):
        return block_layers(fields)
    fields.idle("max_source_positions")
    kinds = layer_kinds(fields, stacked(fields, layer_count(fields)))
    if {CSA, HCA} & set(kinds):
        layers = compressed_layers(fields, kinds)
    elif uses_latents(fields):
        layers = with_index_keys(fields, kinds, latent_layers(fields, kinds))
    else:
        layers = with_index_keys(fields, kinds, head_layers(fields, kinds))
    layers = with_cross_layers(fields, layers, source_tokens)
    layers = repeated(fields, recurrent_section(fields, shared(fields, layers)))
    return tuple(cache for caches in layers for cache in caches)


def uses_latents(fields: Fields) -> bool:
    """Whether the model has multi-head latent attention."""
    switched = latents_switched(fields)
    return fields.get("kv_lora_rank") is not None if switched is None else switched


def head_layers(fields: Fields, kinds: list[str]) -> list[Caches]:
    """Layers with keys and values per KV head (MHA, GQA, MQA), and recurrent ones."""
    attending = any(kind in ATTENDS for kind in kinds)
    if not attending:
        fields.idle(*KV_HEADS, *HEADS, *HEAD_WIDTH, *WINDOW_NAMES)
    sizes = layer_sizes(fields, kinds) if attending else [Size(1, 1, 1)] * len(kinds)
    state = state_of(fields, kinds)
    keys_as_values = flag(fields, "attention_k_eq_v")
    made: dict[tuple[str, Size], Caches] = {}  # layers of one size are one record
    for kind, size in set(zip(kinds, sizes, strict=True)):
        caches = head_layer(kind, size, state)
        if keys_as_values and kind == FULL:
            caches = (caches[0].with_keys_as_values(),)
        made[kind, size] = caches
    return [made[each] for each in zip(kinds, sizes, strict=True)]


def state_of(fields: Fields, kinds: list[str]) -> State | None:
    """The state of the recurrent layers, if there are any; else its fields say nothing."""
    if {RECURRENT, BOTH} & set(kinds):
        return recurrent_state(fields)
    fields.idle(*STATE_FIELDS)
    return None


def head_layer(kind: str, size: Size, state: State | None) -> Caches:
    """What one layer of that kind and size keeps."""
    if kind == NONE:
        return (empty_layer(),)
    if kind == RECURRENT:
        return (recurrent_layer(state),)
    vectors = (size.heads, size.key_width, size.value_width)
    if size.window is not None and kind in (WINDOW, CHUNK):
        make = window_layer if kind == WINDOW else chunk_layer
        return (make(size.window, *vectors),)
    if kind == BOTH:
        return (full_layer(*vectors), recurrent_layer(state))
    return (full_layer(*vectors),)


def latent_layers(fields: Fields, kinds: list[str]) -> list[Caches]:
    """Layers with one latent vector per token (MLA), and recurrent ones."""
    if set(kinds) & {WINDOW, CHUNK, BOTH}:
        raise UnsupportedModelError(
            "kv_lora_rank with windowed layers, or with a state beside it, is not counted here; a "
            "latent layer keeps all tokens and nothing else"
        )
    latent = latent_layer(
        rank=count(fields, "kv_lora_rank"),
        rope_width=count(fields, "qk_rope_head_dim"),
        heads=count(fields, *HEADS),
        nope_width=count(fields, "qk_nope_head_dim"),
        value_width=count(fields, "v_head_dim"),
    )
    state = state_of(fields, kinds)
    # Keys and values of every head come from the latent.
    fields.idle(*KV_HEADS, *HEAD_WIDTH)
    made: dict[str, Caches] = {RECURRENT: (recurrent_layer(state),), NONE: (empty_layer(),)}
    return [made.get(kind, (latent,)) for kind in kinds]


def with_cross_layers(
    fields: Fields, layers: list[Caches], source_tokens: int | None
) -> list[Caches]:
    """``cross_attention_layers`` read an image, and no text (Llama 3.2 Vision)."""
    numbers = fields.get("cross_attention_layers")
    if not numbers:
        return layers
    if not isinstance(numbers, list | tuple):
        raise ValueError(f"cross_attention_layers must be a list of layers, got {numbers!r:.40}")
    source, last = source_length(fields, source_tokens), len(layers) - 1
    for i in {check_count("a layer in cross_attention_layers", i, 0, last) for i in numbers}:
        if len(layers[i]) != 1 or layers[i][0].kind != FULL or len(layers[i][0].per_token) != 2:
            raise UnsupportedModelError(
                f"cross_attention_layers names layer {i}, which keeps something else too "
                f"({', '.join(cache.kind for cache in layers[i])}); counted here are layers that "
                "keep keys and values of everything"
            )
        keys, values = layers[i][0].per_token
        layers[i] = (cross_layer(source, keys.heads, keys.width, values.width),)
    return layers


def block_layers(fields: Fields) -> tuple[Layer, ...]:
    """``block_configs``: sizes per layer in objects of their own."""
    blocks = fields["block_configs"]
    if not isinstance(blocks, list | tuple) or not all(isinstance(each, dict) for each in blocks):
        raise ValueError(f"block_configs must be a list of objects, got {blocks!r:.40}")
    if layer_count(fields) != len(blocks):
        raise ValueError(
            f"block_configs has {len(blocks)} items, but num_hidden_layers is "
            f"{layer_count(fields)}; one of the two is wrong"
        )
    fields.idle(*KV_HEADS)
    return tuple(
        empty_layer() if size is None
        else head_layer(WINDOW if size.window else FULL, size, None)[0]
        for size in block_sizes(fields, blocks)
    )  # fmt: skip
