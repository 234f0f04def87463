"""Layers that share a cache, run more than once, or keep a cache of something else.

Knows: sharing in pairs or at the end, passes over the same layers, sublayers, cross-attention.
Does not know: heads, widths, bytes.
"""

from dataclasses import replace

from kvbook.accounting.layers import Layer, shared_layer
from kvbook.config.counts import check_count
from kvbook.config.family_defaults import family
from kvbook.config.spellings import Fields, check_length, count, flag, optional_count
from kvbook.errors import UnsupportedModelError

Caches = tuple[Layer, ...]  # of one layer of the model

# Passes over all layers with a cache for each: looped models, Ouro's universal transformer.
PASSES = ("loop_num", "num_loops", "total_ut_steps")
# Families whose layers hold two attention sublayers each.
TWO_SUBLAYERS = ("longcat_flash", "longcat_flash_ngram", "longcat_causal_lm")


def shared(fields: Fields, layers: list[Caches]) -> list[Caches]:
    """The layers, of which some read an earlier one's cache and keep none."""
    layers = by_source(fields, shared_in_groups(fields, layers))
    last = optional_count(fields, "num_kv_shared_layers", low=0) or 0
    if last >= len(layers):
        raise ValueError(
            f"num_kv_shared_layers must leave a layer that keeps a cache, got {last} of "
            f"{len(layers)} layers"
        )
    return layers[: len(layers) - last] + [(shared_layer(),)] * last


def by_source(fields: Fields, layers: list[Caches]) -> list[Caches]:
    """``kv_source_layers``: for each layer the one whose cache it reads, itself or an earlier."""
    sources = fields.get("kv_source_layers")
    if sources is None:
        return layers
    check_length("kv_source_layers", sources, len(layers))
    for i, source in enumerate(sources):
        check_count(f"kv_source_layers[{i}]", source, 0, i)
        if sources[source] != source:
            raise ValueError(
                f"kv_source_layers[{i}] is {source}, which itself reads layer {sources[source]}; "
                "name the layer that keeps the cache"
            )
    return [
        caches if sources[i] == i else (shared_layer(),) for i, caches in enumerate(layers)
    ]


def shared_in_groups(fields: Fields, layers: list[Caches]) -> list[Caches]:
    """Cross-layer attention: of every ``cla_share_factor`` layers the first keeps a cache."""
    if not flag(fields, "use_cla"):
        if fields.has("use_cla") or not fields.has("cla_share_factor"):
            fields.idle("cla_share_factor")
        return layers
    factor = count(fields, "cla_share_factor")
    return [layer if i % factor == 0 else (shared_layer(),) for i, layer in enumerate(layers)]


def repeated(fields: Fields, layers: list[Caches]) -> list[Caches]:
    """The caches of every pass over the layers, and of both sublayers of a layer.

    With ``loop_window_size``, passes after the first keep a window of that size.
    """
    if family(fields) in TWO_SUBLAYERS and not fields.has("num_hidden_layers"):
        layers = [layer for layer in layers for _ in range(2)]
    passes = optional_count(fields, *PASSES) or 1
    window = optional_count(fields, "loop_window_size")
    if passes == 1:
        return layers
    if any(cache.kind != "full" for caches in layers for cache in caches):
        raise UnsupportedModelError(
            f"{passes} passes over layers that are not all full attention are not counted here"
        )
    again = layers if window is None else [
        tuple(replace(cache, kind="window", window=window) for cache in caches)
        for caches in layers
    ]  # fmt: skip
    return layers + again * (passes - 1)


def stacked(fields: Fields, layers: int) -> int:
    """Layers with a cache where the config states those of one stack (HRM)."""
    if family(fields) != "hrm_text":
        return layers
    if fields.get("num_layers_per_stack") is not None:  # then all of them are stated
        fields.idle("H_cycles", "L_cycles")
        return layers
    cycles = optional_count(fields, "H_cycles") or 2
    return layers * cycles * ((optional_count(fields, "L_cycles") or 3) + 1)


def recurrent_section(fields: Fields, layers: list[Caches]) -> list[Caches]:
    """Dory: a section in the middle runs several times, with a cache per pass or one for all."""
    if family(fields) != "dory":
        return layers
    first = optional_count(fields, "n_input_layers", low=0)
    last = optional_count(fields, "n_output_layers", low=0)
    first, last = 8 if first is None else first, 8 if last is None else last
    middle = optional_count(fields, "n_recurrent_layers", low=0)
    left = len(layers) - first - last
    middle = left if middle is None else middle
    if middle != left:
        raise ValueError(
            f"n_input_layers {first}, n_recurrent_layers {middle} and n_output_layers {last} must "
            f"add up to {len(layers)} layers"
        )
    loops = optional_count(fields, "n_recurrent_loops") or 2
    mode = fields.get("recurrent_kv_cache_mode") or "per_loop"
    if mode not in ("per_loop", "last_loop"):
        raise ValueError(
            f"recurrent_kv_cache_mode must be per_loop or last_loop, got {mode!r:.40}"
        )
    end = first + middle
    return layers + layers[first:end] * (loops - 1 if mode == "per_loop" else 0)


def source_length(fields: Fields, source_tokens: int | None) -> int:
    """Tokens of the source that cross-attention reads: stated, or the length that is fixed."""
    fixed = optional_count(fields, "max_source_positions")  # Whisper pads every source to it
    if source_tokens is not None:
        return check_count("source_tokens", source_tokens)
    if fixed is None:
        raise UnsupportedModelError(
            "this model has cross-attention, whose cache depends on the length of the source and "
            "not of the answer; give source_tokens, the number of tokens that the encoder reads"
        )
    return fixed
