"""Floating-point operations of a forward pass, part by part, exactly.

Knows: matrix products of models whose heads keep keys and values of their own; a multiplication
and an addition are two operations. Does not know: latent heads, norms, rotations, softmax,
activations (a few per mille), or time.

T new tokens follow `past` others. Without a cache everything is new: T = n, past = 0. With one, a
decode step is T = 1, past = n.
"""

from dataclasses import dataclass

from kvbook.accounting.units import check_count, quoted
from kvbook.config import ModelConfig
from kvbook.errors import UnsupportedModelError


@dataclass(frozen=True)
class Flops:
    """Operations by part. ``scores`` is Q Kᵀ, ``values`` the weighted sum of V."""

    projections: int = 0  # q, k, v and output
    scores: int = 0
    values: int = 0
    mlp: int = 0
    head: int = 0

    @property
    def attention(self) -> int:
        """The part that grows with the past: scores and values."""
        return self.scores + self.values

    @property
    def total(self) -> int:
        return self.projections + self.attention + self.mlp + self.head

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(
            self.projections + other.projections,
            self.scores + other.scores,
            self.values + other.values,
            self.mlp + other.mlp,
            self.head + other.head,
        )


def causal_pairs(T: int, past: int = 0, window: int | None = None) -> int:
    """Pairs of a query and a key that it sees: sum of min(i, W) for i = past + 1 … past + T.

    ``past`` is the number of tokens before the T new ones. The last query sees S = past + T keys.

    Four tokens make 1 + 2 + 3 + 4 pairs, neither 16 (all) nor 8 (half of all).

    >>> causal_pairs(4), causal_pairs(1, 4), causal_pairs(4, window=2)
    (10, 5, 7)
    """
    check_count("T", T)
    check_count("past", past, 0)
    if window is None:
        return T * past + T * (T + 1) // 2
    check_count("window", window)
    growing = min(max(window - past, 0), T)  # queries whose past still fits the window
    return growing * past + growing * (growing + 1) // 2 + (T - growing) * window


def attention_flops(pairs: int, heads: int, key_width: int, value_width: int) -> tuple[int, int]:
    """Operations of scores and of values for so many (query, key) pairs per head.

    The widths enter apart: materialized MLA has keys of 192 and values of 128, absorbed MLA
    576 and 512.
    """
    counts = {"pairs": pairs, "heads": heads, "key_width": key_width, "value_width": value_width}
    for name, number in counts.items():
        check_count(name, number)
    return 2 * pairs * heads * key_width, 2 * pairs * heads * value_width


def step_flops(
    config: ModelConfig, T: int, past: int = 0, batch: int = 1, logits: int | None = None
) -> Flops:
    """One forward pass of ``batch`` rows of T new tokens after ``past`` others.

    ``logits`` is the number of positions per row that the head is asked for, T unless given.
    Raises ``ValueError`` for a negative count, T or batch of 0, or more logits than tokens, and
    ``UnsupportedModelError`` for latent heads.
    """
    check_heads(config)
    check_count("batch", batch)
    pairs = batch * sum(causal_pairs(T, past, visible) for visible in visible_limits(config))
    asked = T if logits is None else check_count("logits", logits, 0, T)
    C, H, Hkv, D = config.d_model, config.n_heads, config.n_kv_heads, config.head_dim
    tokens, L = batch * T, config.n_layers
    scores, values = attention_flops(pairs, H, D, D)  # of all layers
    return Flops(
        projections=L * 2 * tokens * C * D * (2 * H + 2 * Hkv),
        scores=scores,
        values=values,
        mlp=L * 2 * tokens * 3 * C * config.d_mlp,
        head=2 * batch * asked * C * config.vocab_size,
    )


def visible_limits(config: ModelConfig) -> list[int | None]:
    """The most keys that a query of each layer sees: its window and, beside it, the sinks."""
    return [None if window is None else window + config.sinks for window in config.windows]


def check_heads(config: ModelConfig) -> None:
    """Raise ``UnsupportedModelError`` for heads that the formulas of a step do not describe."""
    if not isinstance(config, ModelConfig):
        raise ValueError(f"config must be a ModelConfig, got {quoted(config)}; use LLAMA_3_8B")
    if config.latent is not None:
        raise UnsupportedModelError(
            f"the formulas of a step count heads with keys and values of their own, got a model "
            f"with a latent of rank {config.latent.kv_rank}; allowed: latent None. For attention "
            "alone use attention_flops() with the widths of its keys and values, for the cache "
            "cache_size()"
        )
