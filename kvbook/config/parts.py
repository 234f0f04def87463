"""Parts of a model's shape: how rotary positions are stretched, and what a latent is made of.

Knows: the numbers and what they must satisfy. Does not know: how a config.json spells them.
"""

from dataclasses import dataclass

from kvbook.errors import UnsupportedModelError

# rope_type in config.json -> fields of RopeScaling and what the config calls them.
SCALINGS = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low": "low_freq_factor",
        "high": "high_freq_factor",
        "original_positions": "original_max_position_embeddings",
    },
    "yarn": {
        "factor": "factor",
        "low": "beta_slow",
        "high": "beta_fast",
        "original_positions": "original_max_position_embeddings",
    },
}


@dataclass(frozen=True)
class RopeScaling:
    """Changes to the rotary frequencies that do not depend on the length of the text.

    ``linear`` divides every frequency by ``factor``. ``llama3`` divides only the slow ones:
    wavelengths above ``original_positions / low`` by ``factor``, those below
    ``original_positions / high`` not at all, and the ones between by a blend. ``yarn`` does the
    same with a blend that is even over the pairs of a head. (Peng et al. 2023, arXiv 2309.00071.)

    Keys and queries grow by ``amplitude`` when they are rotated; attention's scale is multiplied
    by ``score_factor``. Both offset the flatter scores of a longer text.
    """

    kind: str
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original_positions: int = 8192
    amplitude: float = 1.0
    score_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in SCALINGS:
            raise UnsupportedModelError(
                f"rope scaling {self.kind!r} is not supported; allowed: default, "
                f"{', '.join(SCALINGS)}. A scaling that depends on the current length would also "
                "change keys that are already cached."
            )
        if not self.factor >= 1:
            raise ValueError(f"the factor of a rope scaling must be at least 1, got {self.factor}")
        if not 0 < self.low < self.high:
            raise ValueError(
                "low must be above 0 and below high (both in turns over the original positions), "
                f"got {self.low} and {self.high}"
            )
        if not (self.amplitude > 0 and self.score_factor > 0):
            raise ValueError(
                "amplitude and score_factor of a rope scaling must be positive, got "
                f"{self.amplitude} and {self.score_factor}"
            )


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of multi-head latent attention. (DeepSeek-V2, arXiv 2405.04434, section 2.1.)

    A token is cached as one vector for all heads: a latent of ``kv_rank`` elements and a rotated
    key of ``rope_dim``. A head's key is ``nope_dim`` elements made from the latent, followed by
    that rotated key; its value is ``value_dim`` elements made from the latent.

    ``q_rank`` is the width between the two query projections, ``None`` for a single one. The
    norms of the two latents have an epsilon of their own: 1e-6 in the released models.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_sizes(self, "kv_rank", "nope_dim", "rope_dim", "value_dim")
        if self.q_rank is not None:
            check_sizes(self, "q_rank")
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim must be even for rotary positions, got {self.rope_dim}")


def is_count(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def check_sizes(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not is_count(value, 1):
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
