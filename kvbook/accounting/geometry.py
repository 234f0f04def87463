"""The shape of a model's cache: one record per layer.

Knows: all layers of one model. Does not know: bytes, element formats, how many tokens there are.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kvbook.accounting.fields import POSITIONS, optional_count, read_config
from kvbook.accounting.from_config import layers_of
from kvbook.accounting.layers import Layer, full_layer, latent_layer, window_layer
from kvbook.accounting.units import check_count
from kvbook.config import ModelConfig


@dataclass(frozen=True)
class CacheGeometry:
    """What each layer of a model keeps of the text.

    ``max_positions`` is the longest text that the model was made for, where known;
    ``extra_layers`` counts prediction layers beside the model that may keep a cache of their
    own (DeepSeek's multi-token prediction); they are not among ``layers``.

    >>> llama = CacheGeometry("Llama-3-8B", (full_layer(8, 128, 128),) * 32)
    >>> len(llama.layers), llama.layers[0].per_token[0].heads
    (32, 8)
    """

    name: str
    layers: tuple[Layer, ...]
    max_positions: int | None = None
    extra_layers: int = 0

    def __post_init__(self) -> None:
        check_count("the number of layers", len(self.layers))

    @classmethod
    def from_hf(cls, source: str | Path | Mapping[str, Any], name: str = "") -> "CacheGeometry":
        """Read a Hugging Face ``config.json``: its path, its folder, or its content.

        Raises ``ValueError`` for a file that cannot be read and for a field that is missing,
        contradicts another or is not a positive whole number; ``UnsupportedModelError`` (a
        ``ValueError``) for a kind of cache that is not counted here.
        """
        fields = read_config(source)
        extra = optional_count(fields, "num_nextn_predict_layers", "num_mtp_layers", low=0)
        return cls(
            name=name or str(fields.get("_name_or_path") or fields.get("model_type") or "config"),
            layers=layers_of(fields),
            max_positions=optional_count(fields, *POSITIONS),
            extra_layers=extra or 0,
        )

    @classmethod
    def from_model(cls, config: ModelConfig, name: str = "model") -> "CacheGeometry":
        """The cache of a model that kvbook builds.

        A windowed layer keeps its window and, beside it, the ``sinks`` that stay visible.
        """
        held = [None if window is None else window + config.sinks for window in config.windows]
        return cls(name, tuple(_layer(config, window) for window in held), config.max_positions)

    @cached_property
    def groups(self) -> tuple[tuple[Layer, int], ...]:
        """The different layers and how many there are of each."""
        return tuple(Counter(self.layers).items())

    def count(self, kind: str) -> int:
        """Layers of one kind: full, window, latent, recurrent or none."""
        return sum(layer.kind == kind for layer in self.layers)


def _layer(config: ModelConfig, window: int | None) -> Layer:
    """One layer of a kvbook model that keeps the last ``window`` tokens, or all of them."""
    latent = config.latent
    if latent is not None:
        layer = latent_layer(latent.kv_rank, latent.rope_dim, config.n_heads, latent.nope_dim,
                             latent.value_dim)
        return replace(layer, window=window)
    heads, width = config.n_kv_heads, config.head_dim
    if window is None:
        return full_layer(heads, width, width)
    return window_layer(window, heads, width, width)
