"""Attention over one tile of keys at a time, with a running softmax.

Knows: scores, tiles. Does not know: where a tile comes from.

The softmax needs the largest score before it can weigh a value. Seen one tile at a time, the
largest so far is kept, and what was summed is scaled down when a larger one comes. (Milakov and
Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022, arXiv 2205.14135.)
"""

import torch
from torch import Tensor

from kvbook.cache import View
from kvbook.model.attention import Attend


def attend_by_tiles(size: int) -> Attend:
    """An ``attend`` that looks at ``size`` keys at a time and never at all of them.

    Equal to ``attend`` up to rounding; a query that sees no key gives zeros.
    """
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"a tile has a positive number of keys, got {size!r}")

    def attend(queries: Tensor, view: View, scale: float) -> Tensor:
        B, H, T, D = queries.shape
        if not view.positions.shape[1]:  # nothing to read, so no tile either
            return queries.new_zeros(B, H, T, view.read()[1].shape[-1])
        start = queries.new_tensor(-torch.inf)
        largest, total, summed = start, start.exp(), start.exp()  # nothing so far
        for tile in view.tiles(size):
            Hkv = tile.keys.shape[1]
            group = H // Hkv
            rows = queries.reshape(B, Hkv, group * T, D)
            scores = scale * rows @ tile.keys.transpose(2, 3)  # (B, Hkv, group · T, size)
            if tile.mask is not None:
                scores = scores.masked_fill(~tile.mask.repeat(1, 1, group, 1), -torch.inf)
            seen = scores.amax(-1, keepdim=True).maximum(largest)
            shift = seen.masked_fill(seen == -torch.inf, 0)  # a row that has seen no key so far
            weights, fade = (scores - shift).exp(), (largest - shift).exp()
            total = fade * total + weights.sum(-1, keepdim=True)
            summed = fade * summed + weights @ tile.values
            largest = seen
        out = summed / total.masked_fill(total == 0, 1)
        return out.view(B, H, T, -1)

    return attend
