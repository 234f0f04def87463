"""A gallery of real models: their cache geometry and its bytes, with the source of each.

Knows: where the file lies, how to find a model by name. Does not know: how sizes are computed;
the bytes in the file were worked out apart, and tests compare the two.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from kvbook.accounting.geometry import CacheGeometry
from kvbook.accounting.nearest import hint
from kvbook.accounting.units import quoted

FILE = Path(__file__).with_name("gallery.json")


@dataclass(frozen=True)
class GalleryModel:
    """One model. ``config`` has the fields of its config.json that shape the cache.

    ``bytes`` are for 16 bits per element and one sequence: per token over all layers, per token
    beyond all windows, the windows when full, totals at three lengths, and per token with
    latents expanded (``None`` without latents). ``unverified`` names what its source lacks.
    """

    name: str
    title: str
    attention: str
    config: Mapping[str, Any]
    bytes: Mapping[str, int | None]
    native_dtype: str
    source: str
    unverified: str
    note: str

    @cached_property
    def geometry(self) -> CacheGeometry:
        return CacheGeometry.from_hf(self.config, self.name)


@cache
def load_gallery() -> Mapping[str, GalleryModel]:
    """All models by name."""
    models = [GalleryModel(**entry) for entry in json.loads(FILE.read_text(encoding="utf-8"))]
    return {model.name: model for model in models}


def gallery_model(name: str) -> GalleryModel:
    """The model of that name or title, in any case; ``ValueError`` with near names otherwise."""
    if not isinstance(name, str):
        raise ValueError(f"a model's name is a string, got {quoted(name)}; as in 'llama-3-8b'")
    wanted = name.strip().lower()
    for model in load_gallery().values():
        if wanted in (model.name, model.title.lower()):
            return model
    near = hint(wanted.rpartition("/")[2], load_gallery(), "see all names with: kvbook models")
    raise ValueError(f"no model named {quoted(name)} in the gallery; {near}")
