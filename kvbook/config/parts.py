"""Parts of a model's shape: how rotary positions are stretched, and what a latent is made of.

Knows: the numbers and what they must satisfy. Does not know: how a config.json spells them.
"""

import math
from dataclasses import dataclass

from kvbook.config.counts import shown
from kvbook.config.spellings import LARGEST
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
        if not isinstance(self.kind, str) or self.kind not in SCALINGS:
            raise UnsupportedModelError(
                f"rope scaling {self.kind!r:.60} is not supported; allowed: default, "
                f"{', '.join(SCALINGS)}. A scaling that depends on the current length would also "
                "change keys that are already cached."
            )
        check_positive(self, "factor", "low", "high", "amplitude", "score_factor")
        check_sizes(self, "original_positions")
        if self.factor < 1:
            raise ValueError(f"the factor of a rope scaling must be at least 1, got {self.factor}")
        if self.low >= self.high:
            raise ValueError(
                "low must be below high (both in turns over the original positions), got "
                f"{self.low} and {self.high}"
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
        check_positive(self, "norm_eps")
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim must be even for rotary positions, got {self.rope_dim}")


def is_count(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def check_sizes(owner: object, *names: str, high: int = LARGEST) -> None:
    """Raise ``ValueError`` unless each of these is a whole number from 1 to ``high``."""
    for name in names:
        value = getattr(owner, name)
        if not is_count(value, 1):
            raise ValueError(f"{name} must be a positive integer, got {value!r:.60}")
        if value > high:
            raise ValueError(f"{name} must be at most {high:,}, got {shown(value)}")


def check_positive(owner: object, *names: str) -> None:
    """Raise ``ValueError`` unless each of these is a finite number above 0."""
    for name in names:
        value = getattr(owner, name)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be a finite number above 0, got {value!r:.60}")


def check_flags(owner: object, *names: str) -> None:
    """Raise ``ValueError`` unless each of these is True or False."""
    for name in names:
        if not isinstance(getattr(owner, name), bool):
            raise ValueError(f"{name} must be True or False, got {getattr(owner, name)!r:.60}")


def check_part(owner: object, name: str, kind: type) -> None:
    """Raise ``ValueError`` unless this is an object of its kind, or ``None``."""
    value = getattr(owner, name)
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{name} must be a {kind.__name__} or None, got {value!r:.60}")
