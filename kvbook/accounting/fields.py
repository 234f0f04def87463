"""Reading a config.json without guessing.

Knows: how to open the file, find a field under its several names, and say what is wrong with it.
Does not know: what a field means for the cache.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbook.accounting.units import check_count, shown

Fields = Mapping[str, Any]

# One size, several spellings: the field of most families first, then GPT-2's, Falcon's and others.
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
WIDTH = ("hidden_size", "n_embd", "n_embed", "d_model")
HEADS = ("num_attention_heads", "n_head", "n_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
HEAD_WIDTH = ("head_dim", "kv_channels")
POSITIONS = ("max_position_embeddings", "n_positions", "model_max_length")

# Models of several modalities nest the language model.
NESTED = ("text_config", "language_config", "llm_config")

# Far above any model, and low enough that a typing error cannot fill the memory.
MOST_LAYERS = 10_000
LARGEST = 10**9


def read_config(source: str | Path | Fields) -> dict[str, Any]:
    """The fields of the language model from a path, a folder or a mapping.

    Raises ``ValueError`` if the file cannot be read or is not one JSON object.
    """
    fields = source if isinstance(source, Mapping) else read_json(Path(source))
    for name in NESTED:
        inner = fields.get(name)
        if inner is None:
            continue
        if not isinstance(inner, Mapping):
            raise ValueError(f"{name} must be an object with the model's sizes, got {inner!r:.60}")
        return {"model_type": fields.get("model_type"), **inner}
    return dict(fields)


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object from a file, or from config.json in a folder."""
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=without_repeats)
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror or error}") from error
    except RepeatedFieldError as error:
        raise ValueError(f"{file}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}; give a Hugging Face config.json") from error
    if not isinstance(found, dict):
        raise ValueError(
            f"{file} holds {type(found).__name__}, not an object; give a Hugging Face config.json"
        )
    return found


class RepeatedFieldError(ValueError):
    """A JSON object that has the same field twice with different values."""


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON keeps the last of repeated fields in silence; here a contradiction is an error."""
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields and fields[name] != value:
            raise RepeatedFieldError(
                f"{name!r} stands there twice, as {fields[name]!r:.40} and as {value!r:.40}; "
                "keep one"
            )
        fields[name] = value
    return fields


def find(fields: Fields, names: Sequence[str]) -> tuple[str, Any]:
    """The first of ``names`` that has a value, and the value; ``(names[0], None)`` if none has.

    Raises ``ValueError`` if two of them have different values.
    """
    found = [(name, fields[name]) for name in names if fields.get(name) is not None]
    for name, value in found[1:]:
        if value != found[0][1]:
            raise ValueError(
                f"{found[0][0]} {found[0][1]!r:.40} and {name} {value!r:.40} contradict each "
                "other; keep one of the two fields"
            )
    return found[0] if found else (names[0], None)


def optional_count(fields: Fields, *names: str, low: int = 1, high: int = LARGEST) -> int | None:
    """A whole number from ``low`` under one of ``names``, or ``None`` where none has a value."""
    name, value = find(fields, names)
    return None if value is None else check_count(name, value, low, high)


def count(fields: Fields, *names: str, high: int = LARGEST) -> int:
    """A positive whole number under one of ``names``; ``ValueError`` where none has a value."""
    value = optional_count(fields, *names, high=high)
    if value is None:
        also = f" (or {', '.join(names[1:])})" if names[1:] else ""
        raise ValueError(
            f"the config has no {names[0]}{also}; add it, nothing else says what it is"
        )
    return value


def counts(fields: Fields, names: Sequence[str], layers: int, default: int | None) -> list[int]:
    """One number per layer: from a list of that length, from one number, or the default."""
    name, value = find(fields, names)
    if not isinstance(value, list | tuple):
        one = default if value is None else check_count(name, value, 1, LARGEST)
        return [count(fields, *names) if one is None else one] * layers
    check_length(name, value, layers)
    return [check_count(f"{name}[{i}]", item, 1, LARGEST) for i, item in enumerate(value)]


def divide(fields: Fields, above: Sequence[str], below: Sequence[str], result: str) -> int:
    """A field that is missing, as a quotient of two that are there. It must be whole."""
    a, b = count(fields, *above), count(fields, *below)
    if a % b:
        raise ValueError(
            f"the config has no {result}, and {find(fields, above)[0]} {shown(a)} is not a "
            f"multiple of {find(fields, below)[0]} {shown(b)}; add {result}"
        )
    return a // b


def flag(fields: Fields, name: str) -> bool:
    """A field that is true or false; missing or null is false."""
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r:.40}")
    return bool(value)


def check_length(name: str, value: object, layers: int) -> None:
    """Raise ``ValueError`` unless ``value`` is a list, or a string, with an entry per layer."""
    if not isinstance(value, list | tuple | str):
        raise ValueError(f"{name} must have an entry for each layer, got {value!r:.40}")
    if len(value) != layers:
        raise ValueError(
            f"{name} has {len(value)} items, but num_hidden_layers is {layers}; one of the two is "
            "wrong"
        )
