"""Which layers are windowed where a config states a window but does not name its layers.

Knows: patterns, and what the families do without one. Does not know: how heads differ.
"""

from collections.abc import Sequence
from typing import Any

from kvbook.config.counts import check_count
from kvbook.config.family_defaults import DEFAULTS, FULL_UNLESS_NAMED, family, known
from kvbook.config.spellings import (
    PATTERN,
    WINDOW,
    Fields,
    check_length,
    find,
    flag,
    optional_count,
)
from kvbook.errors import UnsupportedModelError

# Families with full layers beside the pattern's: the first, or the last.
FIRST_IS_FULL, LAST_IS_FULL = ("mimo_v2_flash",), ("beam", "gemma4_text", "gemma4_unified_text")
# Families whose pattern begins with the full layer.
FULL_FIRST = {"cwm": 4, "granite_swa": 4, "granitemoe_swa": 4, "modernbert-decoder": 3}
# Families that choose windowed layers in ways that are not read here.
NOT_READ = ("qwen2_moe", "smollm3", "dots3_note_text")


def windowed(fields: Fields, layers: int) -> list[str]:
    """Windows by pattern (Gemma, gpt-oss), from a layer on (Qwen), everywhere or nowhere."""
    listed = find(fields, WINDOW)[1]
    if isinstance(listed, list | tuple):  # a window per layer, none for a full one; repeated
        marks = cycled(find(fields, WINDOW)[0], listed, layers)
        return ["full" if mark is None else "window" for mark in marks]
    if window_of(fields) is None:
        fields.idle(*WINDOW, "use_sliding_window", "max_window_layers")
        if any(name in fields for name in WINDOW) and family(fields) not in FULL_UNLESS_NAMED:
            fields.idle(*PATTERN)  # a window that is null or off; else the pattern is of something
        return ["full"] * layers
    kind = family(fields)
    if kind in NOT_READ:
        raise UnsupportedModelError(
            f"{kind} has a window, and which of its layers have it is not read here; add "
            "layer_types with a name for each layer"
        )
    fields.idle(*PATTERN, "max_window_layers")
    pattern = pattern_of(fields, layers)
    if pattern is not None:
        full = [pattern[i % len(pattern)] == "G" for i in range(layers)]
    elif fields.get("max_window_layers") is not None and reads_max_window_layers(kind):
        first = check_count("max_window_layers", fields["max_window_layers"], 0)
        full = [i < first for i in range(layers)]
    else:
        full = [False] * layers
        require_a_known_family(fields)
    if kind in FIRST_IS_FULL:
        full[0] = True
    if kind in LAST_IS_FULL:
        full[-1] = True
    return ["full" if each else "window" for each in full]


def reads_max_window_layers(kind: str) -> bool:
    """Whether the family's class reads it; a Mistral, say, has windows in all layers anyway."""
    return not known(kind) or "max_window_layers" in DEFAULTS.get(kind, {})


def cycled(name: str, entries: Sequence[Any], layers: int) -> list[Any]:
    """The entries, repeated over the layers; they must fit a whole number of times."""
    if not entries or layers % len(entries):
        check_length(name, entries, layers)
    return [entries[i % len(entries)] for i in range(layers)]


def window_of(fields: Fields) -> int | None:
    """W where a config without names for its layers has windows, else ``None``."""
    if family(fields) in FULL_UNLESS_NAMED:
        return None
    if "use_sliding_window" in fields and not flag(fields, "use_sliding_window"):
        return None
    if family(fields) == "modernbert-decoder":
        return optional_count(fields, "local_attention")
    return optional_count(fields, *WINDOW)


def pattern_of(fields: Fields, layers: int) -> str | None:
    """L for a layer with a window and G for a full one, to be repeated.

    Six means five windowed layers and then a full one; a rest at the end is windowed.
    """
    name, value = find(fields, PATTERN)
    kind = family(fields)
    if kind in FULL_FIRST:
        return "G" + "L" * ((value or FULL_FIRST[kind]) - 1)
    if value is None:
        return None
    if isinstance(value, str):
        if not value or set(value) - {"L", "G"}:
            raise UnsupportedModelError(
                f"{name} must be a number, or letters L (windowed) and G (full), got {value!r:.40}"
            )
        return value
    every = check_count(name, value)
    if name == "global_attn_every_n_layers" and layers % every and not known(kind):
        raise UnsupportedModelError(
            f"{name} = {every} does not divide {layers} layers, and whether the first or the last "
            "of each run is full depends on the family; add layer_types"
        )
    return "L" * (every - 1) + "G"


def require_a_known_family(fields: Fields) -> None:
    """A window alone does not say which layers have it, unless the family is known."""
    name, window = find(fields, WINDOW)
    if known(family(fields)):
        return
    raise UnsupportedModelError(
        f"{name} = {window!r:.40} says that there are windowed layers, but not which, and the "
        f"family {fields.get('model_type')!r:.40} is not known here; add layer_types with a name "
        "for each layer, or model_type"
    )
