"""The shape of a model, as numbers.

Knows: what a decoder-only transformer of the Llama or DeepSeek family needs to be built. Does not
know: how a config.json spells it, tensors, weights, caches.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbook.config.parts import (
    LatentConfig,
    RopeScaling,
    check_flags,
    check_part,
    check_positive,
    check_sizes,
    is_count,
)
from kvbook.config.read_model import ARCHITECTURES, LATENT, model_fields
from kvbook.config.spellings import MOST_LAYERS

__all__ = ["ARCHITECTURES", "LATENT", "LLAMA_3_8B", "ModelConfig"]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of one model. The letters in brackets are the book's notation.

    Example: SmolLM2-135M has 30 layers, 9 query heads over 3 KV heads of width 64.

    >>> ModelConfig(vocab_size=49152, d_model=576, n_layers=30, n_heads=9, n_kv_heads=3,
    ...             head_dim=64, d_mlp=1536).queries_per_kv_head
    3
    """

    vocab_size: int  # V
    d_model: int  # C
    n_layers: int  # L
    n_heads: int  # H
    n_kv_heads: int  # Hkv
    head_dim: int  # D
    d_mlp: int  # F
    max_positions: int = 2048
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    window: int | tuple[int | None, ...] | None = None  # W, for all layers or for each of them
    sinks: int = 0  # the first so many positions stay visible whatever the window
    latent: LatentConfig | None = None

    def __post_init__(self) -> None:
        check_sizes(self, "vocab_size", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_mlp",
                    "max_positions")
        check_sizes(self, "n_layers", high=MOST_LAYERS)
        check_positive(self, "norm_eps", "rope_theta")
        check_flags(self, "tied_embeddings", "qkv_bias", "qk_norm")
        check_part(self, "rope_scaling", RopeScaling)
        check_part(self, "latent", LatentConfig)
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads must be a multiple of n_kv_heads, got {self.n_heads} query heads over "
                f"{self.n_kv_heads} KV heads; allowed here: any divisor of {self.n_heads}"
            )
        if self.latent is None and self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if self.latent is not None:
            self._check_latent(self.latent)
        self._check_windows()

    def _check_latent(self, latent: LatentConfig) -> None:
        width = latent.nope_dim + latent.rope_dim
        if self.head_dim != width:
            raise ValueError(
                f"with a latent, head_dim must be nope_dim + rope_dim = {width}, got "
                f"{self.head_dim}"
            )
        if self.n_kv_heads != self.n_heads:
            raise ValueError(
                f"with a latent, every head has its own keys: n_kv_heads must be {self.n_heads} "
                f"(n_heads), got {self.n_kv_heads}"
            )
        if self.qkv_bias or self.qk_norm:
            raise ValueError(
                "qkv_bias and qk_norm have no place beside a latent; leave both False"
            )

    def _check_windows(self) -> None:
        if isinstance(self.window, tuple) and len(self.window) != self.n_layers:
            raise ValueError(
                f"window lists {len(self.window)} layers, but the model has {self.n_layers}; give "
                "one value for each layer, or one for all"
            )
        for window in self.windows:
            if window is not None and not is_count(window, 1):
                raise ValueError(
                    "a window must be an integer of at least 1 (the token itself), or None for "
                    f"no window, got {window!r}"
                )
        if not is_count(self.sinks, 0):
            raise ValueError(f"sinks must be an integer of at least 0, got {self.sinks!r}")
        if self.sinks and all(window is None for window in self.windows):
            raise ValueError(
                f"sinks is {self.sinks}, but no layer has a window, so every position stays "
                "visible already; set a window, or leave sinks at 0"
            )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's window: keys visible to a query, itself included; None means all."""
        return self.window if isinstance(self.window, tuple) else (self.window,) * self.n_layers

    @property
    def cached_heads(self) -> int:
        """Heads that a cache stores per token: one for all when it stores a latent."""
        return self.n_kv_heads if self.latent is None else 1

    @property
    def cached_key_dim(self) -> int:
        """Width of a stored key; a latent and its rotated key count as one."""
        return self.head_dim if self.latent is None else self.latent.kv_rank + self.latent.rope_dim

    @property
    def cached_value_dim(self) -> int:
        """Width of a stored value: 0 for a latent, whose first kv_rank elements serve as one."""
        return self.head_dim if self.latent is None else 0

    @property
    def rope_dim(self) -> int:
        """Elements of a head that are rotated."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def scale(self) -> float:
        """What attention multiplies scores by: 1 / √D, D being the width that a head compares.

        With a latent that width is nope_dim + rope_dim, whichever form computes the scores.
        """
        factor = 1.0 if self.rope_scaling is None else self.rope_scaling.score_factor
        return self.head_dim**-0.5 * factor

    @property
    def queries_per_kv_head(self) -> int:
        """Query heads that share one KV head: H / Hkv."""
        return self.n_heads // self.n_kv_heads

    @property
    def parameters(self) -> int:
        """Weights of the model: matrices, biases, norms, the embedding, and the head if untied."""
        C, H, Hkv, D = self.d_model, self.n_heads, self.n_kv_heads, self.head_dim
        if self.latent is None:
            inner = (H + 2 * Hkv) * D
            attention = C * inner + H * D * C + self.qkv_bias * inner + self.qk_norm * 2 * D
        else:
            attention = self._latent_parameters(self.latent)
        layer = attention + 3 * C * self.d_mlp + 2 * C
        return self.n_layers * layer + (2 - self.tied_embeddings) * self.vocab_size * C + C

    def _latent_parameters(self, latent: LatentConfig) -> int:
        """Projections to the latents and back, and a norm of each latent."""
        C, H, R = self.d_model, self.n_heads, latent.kv_rank
        queries = (latent.q_rank or C) * H * self.head_dim
        if latent.q_rank is not None:
            queries += C * latent.q_rank + latent.q_rank
        down = C * (R + latent.rope_dim) + R
        up = R * H * (latent.nope_dim + latent.value_dim)
        return queries + down + up + H * latent.value_dim * C

    @classmethod
    def from_hf(cls, source: str | Path | Mapping[str, Any]) -> "ModelConfig":
        """Read a Hugging Face ``config.json`` (a path, or its content as a mapping).

        Raises ``UnsupportedModelError`` for an architecture, an activation, a bias or a rotary
        setting that kvbook does not implement and for a field that nothing reads and whose name
        speaks of attention or positions, and ``ValueError`` for a field that is missing or
        contradicts another.
        """
        return cls(**model_fields(source))


# A well-known shape to put numbers to: Llama-3-8B (its config.json; Meta, 2024).
LLAMA_3_8B = ModelConfig(
    vocab_size=128_256, d_model=4096, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128,
    d_mlp=14_336, max_positions=8192, rope_theta=500_000.0, tied_embeddings=False,
)  # fmt: skip
