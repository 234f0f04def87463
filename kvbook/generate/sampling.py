"""From logits to the next token.

Knows: logits of one position per row. Does not know: models, caches, text.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampler:
    """How the next token is chosen.

    ``temperature`` 0 takes the most likely token. Above 0 the logits are divided by it, the
    ``top_k`` most likely tokens are kept, of these the smallest set whose probability reaches
    ``top_p`` (the most likely token is always in it), and one is drawn with ``generator``.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 (greedy) or above, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, or None for all, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")

    def __call__(self, logits: Tensor) -> Tensor:
        """Next tokens (B,), int64, from logits (B, V)."""
        if self.temperature == 0.0:
            return logits.argmax(-1)
        weights = self.probabilities(logits)
        return torch.multinomial(weights, 1, generator=self.generator)[:, 0]

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution that is drawn from, (B, V), rows summing to 1. Needs temperature > 0.

        Computed in float64, returned in float32.

        >>> Sampler(temperature=1.0, top_k=2).probabilities(torch.tensor([[0.0, 0.0, -9.0]]))
        tensor([[0.5000, 0.5000, 0.0000]])
        """
        if self.temperature == 0.0:
            raise ValueError("greedy choice (temperature 0) has no distribution; set temperature")
        ordered, tokens = logits.double().sort(dim=-1, descending=True, stable=True)
        # The largest becomes 0 before the division: at a tiny temperature the rest overflow to
        # minus infinity, which is their limit, and nothing overflows upwards.
        ordered = (ordered - ordered[:, :1]) / self.temperature
        if self.top_k is not None:
            ordered[:, self.top_k :] = float("-inf")
        weights = ordered.softmax(-1)
        if self.top_p < 1.0:  # at 1 every token stays, whatever the running sum rounds to
            before = weights.cumsum(-1) - weights  # probability of all more likely tokens
            weights = weights.masked_fill(before >= self.top_p, 0.0)
            weights = weights / weights.sum(-1, keepdim=True)
        return torch.zeros_like(weights).scatter(-1, tokens, weights).float()


greedy = Sampler()
