"""Which layer attends to everything, which to a window, and which keeps a constant state.

Knows: the ways in which configs say so, most explicit first. Does not know: sizes.
"""

from collections.abc import Mapping
from typing import Any

from kvbook.accounting.prediction_layers import NAMES as PREDICTION
from kvbook.accounting.window_patterns import windowed
from kvbook.config.counts import check_count
from kvbook.config.family_defaults import family
from kvbook.config.spellings import (
    LAYERS,
    MOST_LAYERS,
    PATTERN,
    Fields,
    check_length,
    count,
    find,
    optional_count,
)
from kvbook.config.spellings import WINDOW as WINDOW_NAMES
from kvbook.errors import UnsupportedModelError

Kinds = list[str]

FULL, WINDOW, CHUNK, RECURRENT, NONE = "full", "window", "chunk", "recurrent", "none"
# A layer with both attention and a state; one with an indexer; one with a compressed history.
BOTH, INDEXED, CSA, HCA = "both", "indexed", "csa", "hca"

NAMES = {
    "full_attention": FULL, "attention": FULL, "global_attention": FULL, "global": FULL,
    "indexed_attention": INDEXED, "deepseek_sparse_attention": INDEXED,
    "minimax_m3_sparse": INDEXED,
    "sliding_attention": WINDOW, "local_attention": WINDOW, "local": WINDOW,
    "chunked_attention": CHUNK,
    "linear_attention": RECURRENT, "mamba": RECURRENT, "mamba2": RECURRENT,
    "recurrent": RECURRENT, "conv": RECURRENT,
    "mlp": NONE, "moe": NONE,
    "compressed_sparse_attention": CSA, "heavily_compressed_attention": HCA,
}  # fmt: skip
LETTERS = {"*": FULL, "M": RECURRENT, "-": NONE, "E": NONE}  # hybrid_override_pattern
FLAGS = {1: FULL, 0: RECURRENT}  # attn_type_list
WINDOW_FLAGS = {1: WINDOW, 0: FULL}  # hybrid_layer_pattern
RATIOS = {0: WINDOW, 4: CSA, 128: HCA}  # compress_ratios
# "hybrid" means attention beside a state in these families, and something else in others.
HYBRID_IS_BOTH = ("falcon_h1", "zamba", "zamba2")
NAMED = ("layer_types", "layers_block_type", "attention_layers")

# Rules that a name for each layer replaces.
RULE_FIELDS = (
    *PATTERN, "max_window_layers", "full_attention_interval", "layer_group_size",
    "attn_layer_period", "attn_layer_offset", "block_types", "attention_types", "attention_layers",
    "no_rope_layers", "no_rope_layer_interval", "local_layer_ids", "hybrid_layer_ids",
    "prefix_dense_sliding_window_pattern", "full_attn_idxs", "attn_layer_indices",
)  # fmt: skip

# Only models with recurrent layers have these.
RECURRENT_MARKS = (
    "mamba_d_state", "mamba_d_ssm", "mamba_num_heads", "ssm_state_size", "ssm_cfg", "lru_width",
    "linear_num_value_heads", "linear_num_heads", "linear_attn_config", "linear_attn_alpha_factor",
    "conv_L_cache", "state_size",
)  # fmt: skip
# Families without a field for their rule: one letter per layer, repeated.
RULES = {
    "olmo_hybrid": "rrrf", "minimax": "fr", "lara_mini": "rwrfw", "mamba": "r", "falcon_mamba": "r",
    "mamba2": "r", "falcon_h1": "b", "axk2": "i", "deepseek_v32": "i", "glm_moe_dsa": "i",
    "hy_v4": "i", "lfm3": "wrfr", "flint": "wfww",
}  # fmt: skip
# Layers that are not as their family's rule says.
EXCEPT = {"lfm3": {0: "r"}, "flint": {0: "f", 1: "f", -1: "f"}}
OF_LETTER = {"f": FULL, "w": WINDOW, "r": RECURRENT, "b": BOTH, "i": INDEXED, "c": CHUNK}


def layer_count(fields: Fields) -> int:
    """How many layers there are: the explicit field, or the length of a list with all of them."""
    for name in (*NAMED[:2], "hybrid_override_pattern"):
        stated = fields.get(name)
        if find(fields, LAYERS)[1] is None and isinstance(stated, list | tuple | str):
            return check_count(f"the length of {name}", len(stated), 1, MOST_LAYERS)
    return count(fields, *LAYERS, high=MOST_LAYERS)


def layer_kinds(fields: Fields, layers: int) -> Kinds:
    """The kind of each layer. Raises ``ValueError`` where the config leaves it open."""
    for reader in READERS:
        kinds = reader(fields, layers)
        if kinds is not None:
            # One that is more explicit wins over rules, which are not asked then.
            fields.idle(*RULE_FIELDS)
            if WINDOW not in kinds:
                fields.idle(*WINDOW_NAMES, "use_sliding_window")
            return kinds
    for name in RECURRENT_MARKS:
        if fields.get(name) is not None:
            raise ValueError(
                f"the config has {name}, so some layers are recurrent, but no field says which; "
                "add layer_types with a name for each layer"
            )
    return windowed(fields, layers)


# ---- Explicit: one entry per layer


def named(fields: Fields, layers: int) -> Kinds | None:
    """``layer_types`` and its kin: a name per layer."""
    name, entries = find(fields, NAMED)
    extra = optional_count(fields, *PREDICTION, low=0) or 0
    if extra and isinstance(entries, list | tuple) and len(entries) == layers + extra:
        fields = Fields({**fields, name: list(entries)[:layers]})  # Step 3.5 goes on with those
    words = dict(NAMES)
    if family(fields) in HYBRID_IS_BOTH:
        words["hybrid"] = BOTH
    return translated(fields, name, words, layers)


def lettered(fields: Fields, layers: int) -> Kinds | None:
    """``hybrid_override_pattern``: a letter per layer (Nemotron-H)."""
    return translated(fields, "hybrid_override_pattern", LETTERS, layers)


def flagged(fields: Fields, layers: int) -> Kinds | None:
    """``attn_type_list``: 1 for softmax attention, 0 for linear (MiniMax)."""
    return translated(fields, "attn_type_list", FLAGS, layers)


def flagged_windows(fields: Fields, layers: int) -> Kinds | None:
    """``hybrid_layer_pattern``: 1 for a windowed layer, 0 for a full one (MiMo-V2)."""
    return translated(fields, "hybrid_layer_pattern", WINDOW_FLAGS, layers)


def compressed(fields: Fields, layers: int) -> Kinds | None:
    """``compress_ratios``: tokens per entry, 0 for a window alone (DeepSeek-V4).

    The list goes on after the model's layers, for those that predict further tokens.
    """
    ratios = fields.get("compress_ratios")
    if isinstance(ratios, list | tuple) and len(ratios) > layers:
        rest = Fields({"compress_ratios": list(ratios)[:layers]})
        return translated(rest, "compress_ratios", RATIOS, layers)
    if ratios is None and family(fields) == "deepseek_v4":
        return [HCA] * min(layers, 2) + [CSA if i % 2 else HCA for i in range(layers - 2)]
    return translated(fields, "compress_ratios", RATIOS, layers)


def translated(fields: Fields, name: str, words: Mapping[Any, str], layers: int) -> Kinds | None:
    """The per-layer list under ``name``, in our words; ``None`` if there is none."""
    entries = fields.get(name)
    if entries is None:
        return None
    check_length(name, entries, layers)
    for entry in entries:
        if isinstance(entry, bool) or not isinstance(entry, str | int) or entry not in words:
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
    nested = fields.object("linear_attn_config")
    if nested is None:
        return None
    kinds = full_at("full_attn_layers", nested.get("full_attn_layers"), 1, layers)
    rest = full_at("kda_layers", nested.get("kda_layers"), 1, layers)
    if kinds and rest and any(a == b for a, b in zip(kinds, rest, strict=True)):
        raise ValueError(
            "full_attn_layers and kda_layers together must name each layer once, counted from 1"
        )
    return kinds


def full_at(name: str, numbers: object, first: int, layers: int) -> Kinds | None:
    """Full at the given layers, of which the lowest has the number ``first``."""
    if numbers is None:
        return None
    if not isinstance(numbers, list | tuple):
        raise ValueError(f"{name} must be a list of layers, got {numbers!r:.40}")
    full = {check_count(f"a layer in {name}", i, first, first + layers - 1) for i in numbers}
    return [FULL if i + first in full else RECURRENT for i in range(layers)]


def repeated(fields: Fields, layers: int) -> Kinds | None:
    """``block_types``: a few names, repeated; attention is local (RecurrentGemma)."""
    entries = fields.get("block_types")
    if entries is None:
        return None
    words = {"recurrent": RECURRENT, "attention": WINDOW}
    cycle = translated(fields, "block_types", words, len(entries) or 1) or []
    return [cycle[i % len(cycle)] for i in range(layers)]


def grouped(fields: Fields, layers: int) -> Kinds | None:
    """``attention_types``: pairs of a list of names and how often it is repeated (GPT-Neo)."""
    pairs = fields.get("attention_types")
    if pairs is None:
        return None
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError(f"attention_types must be pairs of names and a count, got {pairs!r:.60}")
    names = [name for names, times in pairs for name in list(names) * times]
    return translated(Fields({"attention_types": names}), "attention_types", NAMES, layers)


# ---- By a rule


def periodic(fields: Fields, layers: int) -> Kinds | None:
    """Every period-th layer attends, from an offset on; the others are Mamba (Jamba)."""
    period = optional_count(fields, "attn_layer_period")
    if period is None or family(fields) in HYBRID_IS_BOTH:
        return None
    offset = check_count("attn_layer_offset", fields.get("attn_layer_offset"), 0, period - 1)
    return [FULL if i % period == offset else RECURRENT for i in range(layers)]


def alternating_with_recurrent(fields: Fields, layers: int) -> Kinds | None:
    """The last of every interval attends, the others are linear (Qwen3-Next, Ling 2.5)."""
    interval = optional_count(fields, "full_attention_interval", "layer_group_size")
    if interval is None:
        return None
    return [RECURRENT if (i + 1) % interval else FULL for i in range(layers)]


def chunked(fields: Fields, layers: int) -> Kinds | None:
    """Layers with rotary positions attend in chunks, the others to everything (Llama 4)."""
    if family(fields) != "llama4_text" or fields.get("attention_chunk_size") is None:
        return None
    marks = fields.get("no_rope_layers") or [
        int((i + 1) % count_or(fields, "no_rope_layer_interval", 4) != 0) for i in range(layers)
    ]
    return translated(Fields({"no_rope_layers": marks}), "no_rope_layers", {1: CHUNK, 0: FULL},
                      layers)


def count_or(fields: Fields, name: str, default: int) -> int:
    return optional_count(fields, name) or default


def by_family(fields: Fields, layers: int) -> Kinds | None:
    """A rule of the family's class, repeated over the layers, with its exceptions."""
    rule = RULES.get(family(fields))
    if rule is None:
        return None
    kinds = [OF_LETTER[rule[i % len(rule)]] for i in range(layers)]
    for i, letter in EXCEPT.get(family(fields), {}).items():
        if i < layers:
            kinds[i] = OF_LETTER[letter]
    return kinds


READERS = (
    named, lettered, flagged, flagged_windows, compressed, listed, listed_from_one, repeated,
    grouped, periodic, alternating_with_recurrent, chunked, by_family,
)  # fmt: skip
