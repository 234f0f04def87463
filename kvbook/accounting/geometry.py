"""The shape of a model's cache: one record per layer.

Knows: all layers of one model. Does not know: bytes, element formats, how many tokens there are.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm
from pathlib import Path
from typing import Any

from kvbook.accounting.encoder_decoder import decoder_part
from kvbook.accounting.from_config import layers_of
from kvbook.accounting.layers import (
    Layer,
    check_layer_kind,
    full_layer,
    latent_layer,
    window_layer,
)
from kvbook.accounting.prediction_layers import counted, prediction_layers
from kvbook.accounting.units import check_count, check_kind, check_text, check_tuple
from kvbook.config import ModelConfig
from kvbook.config.config_file import read_config
from kvbook.config.family_defaults import with_defaults
from kvbook.config.positions import usable_positions
from kvbook.config.spellings import Fields
from kvbook.config.unread_fields import refuse_unknown_overrides, refuse_unread


@dataclass(frozen=True)
class CacheGeometry:
    """What each layer of a model keeps of the text: one record per cache.

    A layer with two caches (a window and a compressed history, an answer and a source) has two
    records, a layer that runs twice has them twice, and one that reads another's cache has a
    record that holds nothing. ``max_positions`` is the longest text that the model was made for,
    where known. ``extra_layers`` counts prediction layers beside the model that may keep a cache
    of their own and are not among ``layers`` (DeepSeek's multi-token prediction).
    ``assumptions`` says what the reading took from somewhere else than the config.

    >>> llama = CacheGeometry("Llama-3-8B", (full_layer(8, 128, 128),) * 32)
    >>> len(llama.layers), llama.layers[0].per_token[0].heads
    (32, 8)
    """

    name: str
    layers: tuple[Layer, ...]
    max_positions: int | None = None
    extra_layers: int = 0
    assumptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_text("name", self.name)
        check_tuple("layers", self.layers, Layer)
        if not self.layers:
            raise ValueError(f"layers must name at least one layer, got {self.layers}")
        if self.max_positions is not None:
            check_count("max_positions", self.max_positions)
        check_count("extra_layers", self.extra_layers, 0)
        check_tuple("assumptions", self.assumptions, str)

    @classmethod
    def from_hf(
        cls,
        source: str | Path | Mapping[str, Any],
        name: str = "",
        *,
        overrides: Mapping[str, Any] | None = None,
        mtp: int = 0,
        source_tokens: int | None = None,
    ) -> "CacheGeometry":
        """Read a Hugging Face ``config.json``: its path, its folder, or its content.

        ``overrides`` takes the place of fields, for those who know better; ``None`` says that a
        field means nothing. ``mtp`` of the extra prediction layers are counted. ``source_tokens``
        is the length of the source that cross-attention reads.

        Raises ``ValueError`` for a file that cannot be read and for a field that is missing,
        contradicts another or is not a positive whole number; ``UnsupportedModelError`` (a
        ``ValueError``) for a kind of cache that is not counted here, and for a field that nothing
        reads and whose name may speak of the cache.
        """
        check_text("name", name)
        if source_tokens is not None:
            check_count("source_tokens", source_tokens)
        file = read_config(source, overrides)
        fields = Fields(decoder_part(with_defaults(file.fields, file.nested)))
        fields.idle(*(set(fields) - set(file.fields)))  # a default not asked for is no field
        layers = layers_of(fields, source_tokens)
        extra = prediction_layers(fields)
        positions = usable_positions(fields)
        refuse_unread(fields)
        refuse_unknown_overrides(fields, overrides or {})
        more = counted(layers, extra, mtp)
        return cls(
            name=name or str(fields.get("_name_or_path") or fields.get("model_type") or "config"),
            layers=layers + more,
            max_positions=positions,
            extra_layers=extra - len(more),
            assumptions=file.stated + assumed(layers, mtp, source_tokens),
        )

    @classmethod
    def from_model(cls, config: ModelConfig, name: str = "model") -> "CacheGeometry":
        """The cache of a model that kvbook builds.

        A windowed layer keeps its window and, beside it, the ``sinks`` that stay visible.
        """
        check_kind("config", config, ModelConfig, "ModelConfig.from_hf(…) or a model's .config")
        held = [None if window is None else window + config.sinks for window in config.windows]
        return cls(name, tuple(_layer(config, window) for window in held), config.max_positions)

    @cached_property
    def groups(self) -> tuple[tuple[Layer, int], ...]:
        """The different layers and how many there are of each."""
        return tuple(Counter(self.layers).items())

    @cached_property
    def period(self) -> int:
        """Tokens after which every layer has whole entries again: 1 without compression."""
        return lcm(*(layer.every for layer, _ in self.groups))

    @property
    def stored_once(self) -> "CacheGeometry | None":
        """The cache with keys that serve as values stored once; ``None`` if there are none."""
        if not any(layer.stored_once for layer, _ in self.groups):
            return None
        once = [
            replace(layer, per_token=layer.stored_once, stored_once=()) if layer.stored_once
            else layer
            for layer in self.layers
        ]  # fmt: skip
        return replace(self, layers=tuple(once))

    def count(self, kind: str) -> int:
        """Caches of one kind, of those in ``KINDS``."""
        check_layer_kind(kind)
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


def assumed(layers: tuple[Layer, ...], mtp: int, source_tokens: int | None) -> tuple[str, ...]:
    """What a geometry takes for granted, in words."""
    words = []
    if mtp:
        words.append(f"{mtp} prediction layers are counted, each like the last layer that attends")
    if any(layer.source_tokens for layer in layers):
        held = max(layer.source_tokens or 0 for layer in layers)
        given = "" if source_tokens is None else ", as stated by the caller"
        words.append(f"cross-attention reads a source of {held:,} tokens{given}")
    if any(layer.stored_once for layer in layers):
        words.append("keys that serve as values are stored twice, as most engines do")
    if any(layer.kind == "chunk" for layer in layers):
        words.append("a layer that attends in chunks keeps room for one chunk")
    if any(layer.kind == "compressed" for layer in layers):
        words.append("a compressed history has one entry per full group of tokens")
    return tuple(words)
