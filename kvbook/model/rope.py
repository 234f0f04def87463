"""Rotary positions: a key carries its position as a rotation.

Knows: positions, frequencies, the width that is rotated. Does not know: heads, caches, layers.

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
    keep = KEEP[scaling.kind](plain, theta, scaling)
    return keep * plain + (1 - keep) * plain / scaling.factor


def _keep_none(plain: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    return torch.zeros_like(plain)


def _keep_by_turns(plain: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """How many turns a pair makes over the original context decides how much it slows."""
    turns = scaling.original_positions * plain / (2 * math.pi)
    return ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)


def _keep_by_pair(plain: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """From the pair that makes ``high`` turns to the one that makes ``low``, in even steps.

    The two ends are rounded outward to whole pairs; the outer bounds are those of the released
    code, which clips to the elements of a head rather than to its pairs.
    """
    width = 2 * len(plain)

    def pair(turns: float) -> float:
        positions_per_turn = scaling.original_positions / turns
        return width * math.log(positions_per_turn / (2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair(scaling.high)), 0)
    last = min(math.ceil(pair(scaling.low)), width - 1)
    steps = max(last - first, 0.001)  # all at once where the two ends meet
    return 1 - ((torch.arange(len(plain), dtype=plain.dtype) - first) / steps).clamp(0, 1)


# The kind of a scaling -> the share of its plain frequency that each pair keeps, 0 to 1.
KEEP = {"linear": _keep_none, "llama3": _keep_by_turns, "yarn": _keep_by_pair}


FIRST_ROWS = 4096  # of a new table: small beside any model, and enough for most texts


class Rope:
    """The table of cosines and sines of one model.

    Angles are computed once per dtype and device, in float64, and rounded once: in bfloat16 the
    positions 256 and 257 would be the same number, their float64 angles are not. The table reaches
    as far as texts have reached, and doubles when one goes beyond: a model of ten million positions
    would need gigabytes for all of them.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.positions = config.max_positions
        self.frequencies = frequencies(config.rope_dim, config.rope_theta, config.rope_scaling)
        self.amplitude = 1.0 if config.rope_scaling is None else config.rope_scaling.amplitude
        self._tables: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def at(
        self, positions: Tensor, dtype: torch.dtype, end: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines for int64 ``positions`` (b, T): two tensors (b, T, 1, D).

        All positions lie before ``end``; who does not know, leaves it out, and gets the whole
        table. (To ask the tensor would mean to wait for the device.)

        Padding (position -1) gets those of position 0: nothing reads a padded key.
        """
        where = positions.clamp(min=0)
        cos, sin = self._table(dtype, positions.device, self.positions if end is None else end)
        return cos[where][:, :, None, :], sin[where][:, :, None, :]

    def _table(
        self, dtype: torch.dtype, device: torch.device, end: int
    ) -> tuple[Tensor, Tensor]:
        """Rows for at least the first ``end`` positions: two tensors (rows, D)."""
        key = (dtype, device)
        if key not in self._tables or len(self._tables[key][0]) < end:
            power_of_two = 1 << (end - 1).bit_length()
            rows = min(max(power_of_two, FIRST_ROWS), self.positions)
            line = torch.arange(rows, dtype=torch.float64)
            angles = torch.outer(line, self.frequencies)  # (rows, D/2)
            cos, sin = angles.cos() * self.amplitude, angles.sin() * self.amplitude
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
