"""Rotary positions: a key carries its position as a rotation.

Knows: positions, frequencies, head width. Does not know: heads, caches, layers.

Each pair (i, i + D/2) of a head is turned by the angle position × frequency[i]. A dot product of
a rotated query and a rotated key then depends on the difference of their positions only, which
is why keys can be stored rotated. (Su et al. 2021, arXiv 2104.09864; halves rather than
neighbors are paired, as in the released Llama weights on Hugging Face.)
"""

import math

import torch
from torch import Tensor

from kvbook.config import ModelConfig, RopeScaling


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Radians per position for each of the D/2 pairs, float64: theta ** (-2i / D).

    >>> frequencies(4, 10_000.0).tolist()
    [1.0, 0.01]
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    plain = theta**-exponent
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    # llama3: how many turns a pair makes over the original context decides how much it slows.
    turns = scaling.original_positions * plain / (2 * math.pi)
    keep = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / scaling.factor


class Rope:
    """The table of cosines and sines of one model.

    Angles are computed once per dtype and device, in float64, and rounded once: in bfloat16 the
    positions 256 and 257 would be the same number, their float64 angles are not.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.positions = config.max_positions
        self.frequencies = frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self._tables: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines for int64 ``positions`` (b, T): two tensors (b, T, 1, D).

        Padding (position -1) gets those of position 0: nothing reads a padded key.
        """
        where = positions.clamp(min=0)
        cos, sin = self._table(dtype, positions.device)
        return cos[where][:, :, None, :], sin[where][:, :, None, :]

    def _table(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        key = (dtype, device)
        if key not in self._tables:
            line = torch.arange(self.positions, dtype=torch.float64)
            angles = torch.outer(line, self.frequencies)  # (positions, D/2)
            cos, sin = angles.cos(), angles.sin()
            # The sign of the rotation is folded into the sine: (-sin, sin) for the two halves.
            self._tables[key] = (
                torch.cat([cos, cos], -1).to(device, dtype),
                torch.cat([-sin, sin], -1).to(device, dtype),
            )
        return self._tables[key]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn every head of ``x`` (B, T, heads, D) by the angles of its position.

    First half: a·cos - b·sin; second half: b·cos + a·sin.
    """
    swapped = x.roll(x.shape[-1] // 2, -1)  # (a, b) becomes (b, a)
    return (x * cos).addcmul_(swapped, sin)
