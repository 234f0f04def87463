"""Which layer attends to everything, which to a window, and which keeps a constant state.

Knows: the ways in which configs say so, most explicit first. Does not know: sizes.
"""

from collections.abc import Mapping
from typing import Any

from kvbook.accounting.families import NEVER_WINDOWED
from kvbook.accounting.fields import (
    LAYERS,
    MOST_LAYERS,
    POSITIONS,
    Fields,
    check_length,
    count,
    find,
    flag,
    optional_count,
)
from kvbook.accounting.units import check_count
from kvbook.errors import UnsupportedModelError

Kinds = list[str]

FULL, WINDOW, RECURRENT, NONE = "full", "window", "recurrent", "none"

NAMES = {
    "full_attention": FULL, "attention": FULL, "global_attention": FULL,
    "indexed_attention": FULL, "deepseek_sparse_attention": FULL,
    "sliding_attention": WINDOW, "local_attention": WINDOW,
    "linear_attention": RECURRENT, "mamba": RECURRENT, "mamba2": RECURRENT,
    "recurrent": RECURRENT, "conv": RECURRENT,
    "mlp": NONE, "moe": NONE,
}  # fmt: skip
LETTERS = {"*": FULL, "M": RECURRENT, "-": NONE, "E": NONE}  # hybrid_override_pattern
FLAGS = {1: FULL, 0: RECURRENT}  # attn_type_list

# Only models with recurrent layers have these.
RECURRENT_MARKS = (
    "mamba_d_state", "mamba_d_ssm", "mamba_num_heads", "ssm_state_size", "ssm_cfg", "lru_width",
    "linear_num_value_heads", "linear_num_heads", "linear_attn_config", "linear_attn_alpha_factor",
    "conv_L_cache",
)  # fmt: skip


def layer_count(fields: Fields) -> int:
    """How many layers there are: the explicit field, or the length of a list with all of them."""
    for name in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        stated = fields.get(name)
        if find(fields, LAYERS)[1] is None and isinstance(stated, list | tuple | str):
            return check_count(f"the length of {name}", len(stated), 1, MOST_LAYERS)
    return count(fields, *LAYERS, high=MOST_LAYERS)


def layer_kinds(fields: Fields, layers: int) -> Kinds:
    """The kind of each layer. Raises ``ValueError`` where the config leaves it open."""
    for reader in READERS:
        kinds = reader(fields, layers)
        if kinds is not None:
            return kinds
    for name in RECURRENT_MARKS:
        if fields.get(name) is not None:
            raise ValueError(
                f"the config has {name}, so some layers are recurrent, but no field says which; "
                "add layer_types with a name for each layer"
            )
    return windowed(fields, layers)


def window_of(fields: Fields) -> int | None:
    """W where a config without names for its layers has windows, else ``None``."""
    if fields.get("model_type") in NEVER_WINDOWED:
        return None
    if "use_sliding_window" in fields and not flag(fields, "use_sliding_window"):
        return None
    return binding(fields, optional_count(fields, "sliding_window"))


def needed_window(fields: Fields) -> int | None:
    """W of layers that are windowed; ``None`` where it never binds."""
    if fields.get("use_sliding_window") is False:
        raise ValueError(
            "use_sliding_window is false, but some layers are named sliding; change one of the two"
        )
    return binding(fields, count(fields, "sliding_window"))


def binding(fields: Fields, window: int | None) -> int | None:
    """The window, unless the model has no positions beyond it."""
    positions = optional_count(fields, *POSITIONS)
    if window is None or (positions is not None and window >= positions):
        return None
    return window


# ---- Explicit: one entry per layer


def named(fields: Fields, layers: int) -> Kinds | None:
    """``layer_types`` or ``layers_block_type``: a name per layer."""
    name, _ = find(fields, ("layer_types", "layers_block_type"))
    return translated(fields, name, NAMES, layers)


def lettered(fields: Fields, layers: int) -> Kinds | None:
    """``hybrid_override_pattern``: a letter per layer (Nemotron-H)."""
    return translated(fields, "hybrid_override_pattern", LETTERS, layers)


def flagged(fields: Fields, layers: int) -> Kinds | None:
    """``attn_type_list``: 1 for softmax attention, 0 for linear (MiniMax)."""
    return translated(fields, "attn_type_list", FLAGS, layers)


def translated(fields: Fields, name: str, words: Mapping[Any, str], layers: int) -> Kinds | None:
    """The per-layer list under ``name``, in our words; ``None`` if there is none."""
    entries = fields.get(name)
    if entries is None:
        return None
    check_length(name, entries, layers)
    for entry in entries:
        if not isinstance(entry, str | int) or entry not in words:
            raise UnsupportedModelError(
                f"{name} has {entry!r:.40}, which is not counted here; known: "
                f"{', '.join(str(word) for word in words)}"
            )
    return [words[entry] for entry in entries]


def listed(fields: Fields, layers: int) -> Kinds | None:
    """The numbers of the full layers; the others are recurrent (LFM2, Bamba)."""
    name, numbers = find(fields, ("full_attn_idxs", "attn_layer_indices"))
    return full_at(name, numbers, 0, layers)


def listed_from_one(fields: Fields, layers: int) -> Kinds | None:
    """The same, nested and counted from 1 (Kimi-Linear)."""
    nested = fields.get("linear_attn_config")
    if not isinstance(nested, Mapping):
        return None
    return full_at("full_attn_layers", nested.get("full_attn_layers"), 1, layers)


def full_at(name: str, numbers: object, first: int, layers: int) -> Kinds | None:
    """Full at the given layers, of which the lowest has the number ``first``."""
    if numbers is None:
        return None
    if not isinstance(numbers, list | tuple):
        raise ValueError(f"{name} must be a list of layers, got {numbers!r:.40}")
    full = {check_count(f"a layer in {name}", i, first, first + layers - 1) for i in numbers}
    return [FULL if i + first in full else RECURRENT for i in range(layers)]


# ---- By a rule


def periodic(fields: Fields, layers: int) -> Kinds | None:
    """Every period-th layer attends, from an offset on; the others are Mamba (Jamba)."""
    period = optional_count(fields, "attn_layer_period")
    if period is None:
        return None
    offset = check_count("attn_layer_offset", fields.get("attn_layer_offset"), 0, period - 1)
    return [FULL if i % period == offset else RECURRENT for i in range(layers)]


def alternating_with_recurrent(fields: Fields, layers: int) -> Kinds | None:
    """The last of every interval attends, the others are linear (Qwen3-Next)."""
    interval = optional_count(fields, "full_attention_interval")
    if interval is None:
        return None
    return [RECURRENT if (i + 1) % interval else FULL for i in range(layers)]


def windowed(fields: Fields, layers: int) -> Kinds:
    """Windows by pattern (Gemma, gpt-oss), from a layer on (Qwen), everywhere or nowhere."""
    if window_of(fields) is None:
        return [FULL] * layers
    pattern = optional_count(fields, "sliding_window_pattern", "_sliding_window_pattern")
    if pattern is not None:
        # Six means five windowed layers and then a full one; a rest at the end is windowed.
        return [WINDOW if (i + 1) % pattern else FULL for i in range(layers)]
    if fields.get("max_window_layers") is not None:
        first = check_count("max_window_layers", fields["max_window_layers"], 0)
        return [WINDOW if i >= first else FULL for i in range(layers)]
    return [WINDOW] * layers


READERS = (
    named, lettered, flagged, listed, listed_from_one, periodic, alternating_with_recurrent,
)  # fmt: skip
