"""The longest text that a model was made for.

Knows: where configs say it, and which scalings of rotary positions lengthen it. Does not know:
how positions are rotated.
"""

from collections.abc import Mapping
from typing import Any

from kvbook.config.spellings import POSITIONS, Fields, optional_count

# Read where the usual names are missing.
OTHERS = ("max_sequence_length", "max_seq_len", "seq_length", "context_length", "n_ctx")
# Scalings whose factor stretches the original length; others are made for the stated length.
FROM_ORIGINAL = ("yarn", "deepseek_yarn")


def usable_positions(fields: Fields) -> int | None:
    """Positions that the model can use: those stated, or those that its scaling reaches.

    YaRN files state either the original length or the lengthened one; the larger is usable.
    """
    stated = optional_count(fields, *POSITIONS)
    if stated is None:
        stated = next((optional_count(fields, name) for name in OTHERS if fields.get(name)), None)
    original = optional_count(fields, "initial_context_length")  # gpt-oss's own files
    if stated is None and original is not None:
        return round(original * number(fields.get("rope_scaling_factor"), 1.0))
    rope = scaling_of(fields)
    kind = rope.get("rope_type", rope.get("type"))
    if stated is None or kind not in FROM_ORIGINAL:
        return stated
    factor = number(rope.get("factor"), 1.0)
    original = rope.get("original_max_position_embeddings") or stated
    return max(stated, round(number(original, stated) * factor))


def scaling_of(fields: Fields) -> Mapping[str, Any]:
    """The object with the scaling, of the layers that see everything where kinds differ."""
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.get(name)
        if isinstance(rope, Mapping):
            inner = rope.get("full_attention")
            return inner if isinstance(inner, Mapping) else rope
    return {}


def number(value: object, default: float) -> float:
    """``value`` where it is a number, else ``default``."""
    good = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if good and isinstance(value, int | float) else default
