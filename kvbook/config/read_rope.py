"""Rotary positions in every spelling: one base and one scaling, or a refusal that names the field.

Knows: where configs have put the settings, old and new, and what they mean together. Does not
know: how vectors are rotated.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from kvbook.config.parts import SCALINGS, RopeScaling
from kvbook.config.spellings import Fields
from kvbook.errors import UnsupportedModelError

BASE = 10_000.0  # of every supported family
OBJECTS = ("rope_parameters", "rope_scaling")
KINDS = ("full_attention", "sliding_attention")
# The share of a head that is rotated, and its width.
SHARES = (
    "partial_rotary_factor", "rotary_pct", "rope_pct", "rope_percent", "rotary_percent",
    "rotary_emb_fraction", "rope_ratio",
)  # fmt: skip
WIDTHS = ("rotary_dim", "rotary_ndims", "rotary_emb_dim", "rope_dim", "n_rot")
# Fields of the objects that are read, or that say nothing more.
READ = (
    "rope_theta", "rope_type", "type", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
    "attention_factor", "truncate", "partial_rotary_factor", "finetuned",
)  # fmt: skip
# Other names that begin as rotary settings do, with the value that changes nothing.
HARMLESS = {"rope_interleaved": False, "rope_traditional": False}


def rope_theta(fields: Fields) -> float:
    """The base of the rotary frequencies: in the object, or beside it, the same in both."""
    refuse_partial(fields)
    refuse_unread_rope(fields)
    inside, outside = rope_object(fields).get("rope_theta"), fields.get("rope_theta")
    if inside is not None and outside is not None and inside != outside:
        raise UnsupportedModelError(
            f"rope_theta is {outside!r:.40} and, inside {named_object(fields)}, {inside!r:.40}; "
            "readers differ in which of the two they take; keep one"
        )
    theta = inside if inside is not None else outside
    return BASE if theta is None else positive("rope_theta", theta)


def rope_object(fields: Fields) -> dict[str, Any]:
    """The one object with rotary settings: newer configs call it rope_parameters.

    Per kind of layer it may be nested; then every kind must say the same.
    """
    found = {name: flat(name, fields[name]) for name in OBJECTS if fields.get(name)}
    if len(found) == 2 and found["rope_parameters"] != found["rope_scaling"]:
        raise UnsupportedModelError(
            "rope_parameters and rope_scaling differ, and readers differ in which of the two they "
            "take; keep one"
        )
    rope = next(iter(found.values()), {})
    for name in rope:
        if name not in READ and rope[name] is not None:
            raise UnsupportedModelError(
                f"{named_object(fields)} has {name} = {rope[name]!r:.40}, which is not supported; "
                f"known: {', '.join(READ)}"
            )
    return rope


def flat(name: str, rope: object) -> dict[str, Any]:
    """An object of settings, of which those per kind of layer are all alike."""
    if not isinstance(rope, Mapping):
        raise ValueError(f"{name} must be an object, got {rope!r:.40}")
    nested = {kind: each for kind, each in rope.items() if isinstance(each, Mapping)}
    if not nested:
        return dict(rope)
    first = next(iter(nested.values()))
    if set(nested) - set(KINDS) or len(nested) < len(rope) or any(
        dict(each) != dict(first) for each in nested.values()
    ):
        raise UnsupportedModelError(
            f"{name} has settings per kind of layer ({', '.join(rope)}) that are not all alike; "
            "kvbook's model has one base and one scaling for all layers"
        )
    return dict(first)


def named_object(fields: Fields) -> str:
    return next((name for name in OBJECTS if fields.get(name)), OBJECTS[0])


def rope_scaling(fields: Fields, scores: bool) -> RopeScaling | None:
    """The scaling, or ``None``. ``scores``: the architecture also scales its scores by it."""
    rope = rope_object(fields)
    kinds = {rope[name] for name in ("rope_type", "type") if rope.get(name) is not None}
    if len(kinds) > 1:
        raise UnsupportedModelError(
            f"rope_type {rope['rope_type']!r:.40} and type {rope['type']!r:.40} differ; keep one"
        )
    kind = next(iter(kinds), "default")
    if kind == "default":
        return None
    if kind == "yarn":
        rope = {**rope, "beta_slow": rope.get("beta_slow") or 1.0,
                "beta_fast": rope.get("beta_fast") or 32.0}
    numbers = {ours: need(rope, theirs) for ours, theirs in SCALINGS.get(kind, {}).items()}
    if kind == "yarn":
        numbers["amplitude"] = yarn_amplitude(rope)
    if kind in SCALINGS and scores:
        numbers["score_factor"] = score_factor(rope)
    return RopeScaling(kind, **numbers)


def need(rope: Mapping[str, Any], name: str) -> Any:
    if rope.get(name) is None:
        raise ValueError(f"the config has no {name!r}; it is needed to build the model")
    return rope[name]


def yarn_amplitude(rope: Mapping[str, Any]) -> float:
    """The factor on cosines and sines: named, a ratio of two temperatures, or the paper's."""
    if not rope.get("truncate", True):
        raise UnsupportedModelError(
            "yarn with truncate=false is not supported; allowed: true, or no such field"
        )
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    factor, over, under = rope["factor"], rope.get("mscale"), rope.get("mscale_all_dim")
    if over and under:
        return temperature(factor, over) / temperature(factor, under)
    return temperature(factor, 1.0)


def score_factor(rope: Mapping[str, Any]) -> float:
    """The factor on attention's scale, which DeepSeek's models take from ``mscale_all_dim``."""
    weight = rope.get("mscale_all_dim")
    return temperature(rope["factor"], weight) ** 2 if weight else 1.0


def temperature(factor: float, weight: float) -> float:
    """1 + 0.1 · weight · ln(factor). (YaRN, arXiv 2309.00071, section 3.4.)"""
    return 1.0 + 0.1 * weight * math.log(factor) if factor > 1 else 1.0


def refuse_partial(fields: Fields) -> None:
    """Heads are rotated whole: a share must be 1, a width the head's."""
    rope = rope_object(fields)
    for where, name, value in settings(fields, rope, SHARES):
        if value != 1:
            raise UnsupportedModelError(
                f"{where}{name} {value} is not supported; kvbook rotates whole heads (1.0)"
            )
    for where, name, value in settings(fields, rope, WIDTHS):
        if value != whole_head(fields):
            raise UnsupportedModelError(
                f"{where}{name} {value} is not supported; kvbook rotates whole heads"
            )


def settings(
    fields: Fields, rope: Mapping[str, Any], names: tuple[str, ...]
) -> Iterator[tuple[str, str, Any]]:
    """Where, under which name, and what: each of the names that says something."""
    for where, source in (("", fields), ("rope_parameters.", rope)):
        for name in names:
            if source.get(name) is not None:
                yield where, name, source[name]


def whole_head(fields: Fields) -> int | None:
    width, heads = fields.get("hidden_size"), fields.get("num_attention_heads")
    if fields.get("head_dim") is not None:
        return fields["head_dim"]
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads else None


def refuse_unread_rope(fields: Fields) -> None:
    """Another field about rotary positions would change keys that nobody has accounted for."""
    for name, harmless in HARMLESS.items():
        if fields.get(name) not in (None, harmless):
            raise UnsupportedModelError(
                f"{name} = {fields[name]!r:.40} is not supported; allowed: {harmless}, or no such "
                "field"
            )
    known = {*OBJECTS, *SHARES, *WIDTHS, *HARMLESS, "rope_theta", "qk_rope_head_dim"}
    known.add("rope_interleave")  # the order of a head's elements, which the weights are read by
    for name in fields:
        speaks = "rope" in name or "rotary" in name
        if speaks and name not in known and fields[name] not in (None, False):
            raise UnsupportedModelError(
                f"{name} = {fields[name]!r:.40} is not read here, and its name speaks of rotary "
                "positions; remove the field if it changes nothing"
            )


def positive(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{name} must be a positive number, got {value!r:.40}")
    return float(value)
