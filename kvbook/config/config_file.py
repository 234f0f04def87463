"""Opening a config.json and finding the language model in it.

Knows: files, JSON, objects inside objects, what a caller overrides. Does not know: what a field
means.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbook.config.spellings import HEAD_WIDTH, HEADS, KV_HEADS, LAYERS, POSITIONS, WIDTH, find

# Models of several modalities nest the language model.
NESTED = ("text_config", "language_config", "llm_config")
# Attention settings in an object of their own (MPT, DBRX): read as if they stood outside.
UNFOLDED = ("attn_config",)
# Every part of a model has these, so those that stand beside a nested one are another part's.
OF_ANY_PART = frozenset({
    *LAYERS, *WIDTH, *HEADS, *KV_HEADS, *HEAD_WIDTH, *POSITIONS, *UNFOLDED,
})  # fmt: skip


@dataclass(frozen=True)
class ConfigFile:
    """The fields of the language model.

    ``nested``: they stood in an object inside, which leaves out what equals its class's default.
    ``stated``: what the caller has put in the place of fields, in words.
    """

    fields: dict[str, Any]
    nested: bool = False
    stated: tuple[str, ...] = ()


def read_config(
    source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> ConfigFile:
    """The language model's fields from a path, a folder or a mapping.

    A nested language model is read together with what stands around it; its own fields win.
    ``overrides`` win over both; ``None`` means that the field says nothing.

    Raises ``ValueError`` if the file cannot be read or is not one JSON object, and if two of its
    fields contradict each other.
    """
    if overrides is not None and not isinstance(overrides, Mapping):
        raise ValueError(f"overrides must be a table of fields, got {overrides!r:.60}")
    fields = content_of(source)
    name, inner = find(fields, NESTED)
    if inner is not None:
        if not isinstance(inner, Mapping):
            raise ValueError(f"{name} must be an object with the model's sizes, got {inner!r:.60}")
        outside = OF_ANY_PART | set(NESTED)
        around = {key: value for key, value in fields.items() if key not in outside}
        fields = {**around, **inner}
    fields = unfolded(fields)
    stated = tuple(
        f"{key} = {value!r:.40}, stated by the caller"
        + (f" in place of {fields[key]!r:.40}" if key in fields else "")
        for key, value in (overrides or {}).items()
    )
    return ConfigFile({**fields, **(overrides or {})}, inner is not None, stated)


def unfolded(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, with those of ``attn_config`` among them. A null says nothing on either side."""
    for outer in UNFOLDED:
        inner = fields.get(outer)
        if inner is None:
            continue
        if not isinstance(inner, Mapping):
            raise ValueError(f"{outer} must be an object with settings, got {inner!r:.60}")
        fields = {name: value for name, value in fields.items() if name != outer}
        for name, value in inner.items():
            stated = fields.get(name)
            if name == "model_type" and stated is not None:
                continue  # the object's own kind
            if None not in (stated, value) and stated != value:
                raise ValueError(
                    f"{name} {stated!r:.40} and {outer}.{name} {value!r:.40} contradict each "
                    "other; keep one of the two fields"
                )
            fields[name] = value if stated is None else stated
    return fields


def content_of(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config: themselves, or from a path or a folder."""
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, str | Path) or not str(source):
        raise ValueError(f"source must be a path or the content of a config, got {source!r:.60}")
    return read_json(Path(source))


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
