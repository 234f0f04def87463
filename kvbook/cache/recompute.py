"""No cache, with a cache's interface: every call sees the tokens of that call and nothing else.

Knows: positions of one call. Does not know: any past.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbook.cache.step import common_start, look, new_positions
from kvbook.cache.view import KVView


class Recompute:
    """What a model without a cache reads: its own new keys, from position 0.

    ``windows`` has one entry per layer, as in a cache's groups.
    """

    def __init__(
        self,
        rows: int,
        device: torch.device,
        windows: Sequence[int | None] = (None,),
        sinks: int = 0,
    ) -> None:
        self.lengths = (0,) * rows
        self.device, self.windows, self.sinks = device, windows, sinks

    def reserve(self, counts: Sequence[int], T: int) -> Tensor:
        """As ``KVCache.reserve``, for rows that are always empty."""
        queries = new_positions(self.lengths, counts, T, self.device)
        start = common_start(self.lengths, counts, T)
        self._steps = {
            window: look(queries, queries, start, window, self.sinks)
            for window in set(self.windows)
        }
        return queries

    def update(self, layer: int, keys: Tensor, values: Tensor) -> KVView:
        """The new keys and values themselves, (B, Hkv, T, D), padding included but masked."""
        step = self._steps[self.windows[layer]]
        return KVView(keys, values, step.keys, step.mask, step.is_causal)
