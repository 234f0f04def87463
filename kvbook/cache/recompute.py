"""No cache, with a cache's interface: every call sees the tokens of that call and nothing else.

Knows: positions of one call. Does not know: any past.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbook.cache.layer_kind import LayerKind
from kvbook.cache.mask import attention_mask
from kvbook.cache.step import Step
from kvbook.cache.view import KVView


class Recompute:
    """What a model without a cache reads: its own new keys, from position 0."""

    def __init__(
        self, rows: int, layer_kinds: Sequence[LayerKind], device: torch.device | str = "cpu"
    ) -> None:
        self.lengths, self.layer_kinds, self.device = (0,) * rows, layer_kinds, device

    def reserve(self, counts: Sequence[int], T: int) -> Tensor:
        """As ``KVCache.reserve``, for rows that are always empty."""
        step = Step(self.lengths, tuple(counts), T, self.device)
        self._masks = {
            kind: attention_mask(step, step.positions, kind, in_order=True)
            for kind in set(self.layer_kinds)
        }
        return step.positions

    def update(self, layer: int, keys: Tensor, values: Tensor) -> KVView:
        """The new keys and values themselves, (B, Hkv, T, D), padding included but masked."""
        seen = self._masks[self.layer_kinds[layer]]
        return KVView(keys, values, seen.positions, seen.mask, seen.is_causal)
