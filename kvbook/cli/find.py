"""From what a user names to the geometry of a model.

Knows: gallery names, config files, folders, GGUF files, overrides. Does not know: what their fields
mean.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbook.accounting.gallery import gallery_model, load_gallery
from kvbook.accounting.geometry import CacheGeometry
from kvbook.accounting.gguf_fields import geometry_of_gguf
from kvbook.accounting.units import check_text, quoted


def find_geometry(model: str, overrides: Sequence[str] = ()) -> CacheGeometry:
    """A gallery name, or else a config.json, a GGUF file, or the folder that holds one of them."""
    if not isinstance(model, str) or not model.strip():
        raise ValueError(f"a model is a name or a path, got {quoted(model)}")
    if not isinstance(overrides, list | tuple):
        raise ValueError(f"overrides must be a list of NAME=VALUE, got {quoted(overrides)}")
    path = Path(model)
    changes = dict(parse_override(text) for text in overrides)
    if model.strip().lower() in load_gallery() or not is_path(path):
        entry = gallery_model(model)
        return CacheGeometry.from_hf(entry.config, entry.name, overrides=changes)
    gguf = gguf_file(path)
    if gguf is None:
        return CacheGeometry.from_hf(path, name=path.name, overrides=changes)
    if changes:
        raise ValueError(
            f"{gguf.name} is a GGUF file, whose fields have names of their own, got --override "
            f"{quoted(overrides[0])}; give a config.json to override fields"
        )
    return geometry_of_gguf(read_gguf(gguf), gguf.name)


def is_path(path: Path) -> bool:
    return path.exists() or path.suffix in (".json", ".gguf")


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that is meant, or ``None`` where there is none or a config.json is there."""
    if path.suffix == ".gguf":
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise ValueError(
            f"{path} holds {len(found)} GGUF files, {found[0].name} the first; name one of them"
        )
    return found[0] if found else None


def read_gguf(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file. Raises ``ValueError`` for a file that cannot be read."""
    try:  # here, so that nothing else needs torch
        from kvbook.model.gguf_file import GGUFFile
    except ModuleNotFoundError as error:
        raise ValueError(
            f"reading a GGUF file needs {error.name}, which is not installed; install it with: "
            f"python -m pip install {error.name}"
        ) from error
    try:
        path.open("rb").close()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        return GGUFFile(path).metadata
    except ValueError as error:
        raise ValueError(f"cannot read {path} as GGUF: {error}") from error


def parse_override(text: str) -> tuple[str, Any]:
    """``name=value``; the value is JSON, or else a string."""
    check_text("an override", text)
    name, sign, value = text.partition("=")
    if not sign or not name.strip():
        raise ValueError(
            f"an override is NAME=VALUE, got {quoted(text)}; as in num_key_value_heads=8"
        )
    try:
        return name.strip(), json.loads(value)
    except ValueError:
        return name.strip(), value
