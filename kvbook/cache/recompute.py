"""No cache, with a cache's interface: every call sees the tokens of that call and nothing else.

Knows: positions of one call. Does not know: any past.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbook.cache.step import Step, last_positions, ragged_step, uniform_step
from kvbook.cache.view import KVView


class Recompute:
    """What a model without a cache reads: its own new keys, from position 0."""

    def __init__(self, rows: int, device: torch.device, window: int | None = None) -> None:
        self.lengths = (0,) * rows
        self.device, self.window = device, window

    def reserve(self, counts: Sequence[int], T: int) -> Step:
        """As ``KVCache.reserve``, for rows that are always empty."""
        if all(count == T for count in counts):
            line = torch.arange(T, device=self.device)
            self._step = uniform_step(0, T, line, self.window)
        else:
            positions = last_positions(counts, counts, T, self.device)
            self._step = ragged_step(positions, positions, self.window)
        return self._step

    def update(self, layer: int, keys: Tensor, values: Tensor) -> KVView:
        """The new keys and values themselves, (B, Hkv, T, D), padding included but masked."""
        return KVView(keys, values, self._step.keys, self._step.mask, self._step.is_causal)
