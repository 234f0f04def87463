"""What is kept of a group of numbers, so that the elements only have to say how much of it.

Knows: the largest and the lowest number of a group, powers of two. Does not know: how many bits
an element has, which numbers form a group, tokens, keys.

Groups are (…, tokens, heads, n, channels); the numbers that share a scale differ in their token
and their channel only. Kept numbers have the same shape with 1 in these two places.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

OVER = (-4, -1)  # tokens and channels of a group


class Scaled(NamedTuple):
    """Groups divided by what is kept of them."""

    numbers: Tensor  # up to the largest of the element format, float32 or float64
    scales: Tensor
    offsets: Tensor  # (…, 0) where nothing is subtracted


class Scale(Protocol):
    """A rule: what is kept of a group, and in which type."""

    def divide(self, groups: Tensor, largest: float, dtype: torch.dtype) -> Scaled:
        """Groups of a cache of type ``dtype`` as numbers up to ``largest``."""

    def multiply(self, numbers: Tensor, largest: float, scales: Tensor, offsets: Tensor) -> Tensor:
        """The groups again. ``numbers`` is used up."""


@dataclass(frozen=True)
class Peak:
    """The largest absolute value, in the type of the cache: a number is a part of it."""

    def divide(self, groups: Tensor, largest: float, dtype: torch.dtype) -> Scaled:
        peak = groups.abs().amax(OVER, keepdim=True)
        return Scaled(ratio(groups, peak) * largest, peak.to(dtype), nothing(groups).to(dtype))

    def multiply(self, numbers: Tensor, largest: float, scales: Tensor, offsets: Tensor) -> Tensor:
        return numbers.div_(largest).mul_(scales.to(numbers.dtype))


@dataclass(frozen=True)
class Range:
    """The highest and the lowest value, in the type of the cache: a number lies on the way."""

    def divide(self, groups: Tensor, largest: float, dtype: torch.dtype) -> Scaled:
        lowest, highest = groups.amin(OVER, keepdim=True), groups.amax(OVER, keepdim=True)
        numbers = ratio(groups - lowest, highest - lowest) * largest
        return Scaled(numbers, highest.to(dtype), lowest.to(dtype))

    def multiply(self, numbers: Tensor, largest: float, scales: Tensor, offsets: Tensor) -> Tensor:
        low, high = offsets.to(numbers.dtype), scales.to(numbers.dtype)
        return torch.lerp(low, high, numbers.div_(largest))


@dataclass(frozen=True)
class PowerOfTwo:
    """One byte, E8M0: the exponent plus 127 of a scale that leaves the peak from 4 to below 8.

    For elements up to 6, the largest of E2M1 (OCP Microscaling Formats Specification v1.0).
    """

    def divide(self, groups: Tensor, largest: float, dtype: torch.dtype) -> Scaled:
        codes = power_of_two_code(groups.abs().amax(OVER, keepdim=True))
        numbers = groups / power_of_two(codes, groups.dtype)
        return Scaled(numbers, codes, nothing(groups).to(torch.uint8))

    def multiply(self, numbers: Tensor, largest: float, scales: Tensor, offsets: Tensor) -> Tensor:
        return numbers.mul_(power_of_two(scales, numbers.dtype))


def nothing(groups: Tensor) -> Tensor:
    """Offsets where there are none: the shape of kept numbers, but 0 channels."""
    return groups[..., :1, :, :, :0]


def ratio(part: Tensor, whole: Tensor) -> Tensor:
    """``part / whole``, from −1 to 1; 0 where the whole is 0."""
    return torch.where(whole > 0, part / whole, 0.0)


def power_of_two_code(peak: Tensor) -> Tensor:
    """E8M0 codes, uint8, of the scale that leaves the peak from 4 to just below 8 (OCP MX).

    The scale is the largest power of two up to the peak, divided by 4, the largest in E2M1; not a
    number where that is beyond 2^127, which only float64 reaches.
    """
    exponent = torch.frexp(peak).exponent - 1  # of the largest power of two up to the peak
    codes = (exponent - 2 + 127).clamp(min=0)
    return codes.masked_fill((codes > 254) | ~peak.isfinite(), 255).to(torch.uint8)


def power_of_two(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The scales that E8M0 codes stand for: 2^(code − 127), not-a-number for 255."""
    return e8m0(dtype, codes.device)[codes.int()]


@lru_cache(maxsize=8)
def e8m0(dtype: torch.dtype, device: torch.device) -> Tensor:
    """All 256 scales, by code."""
    scales = [2.0 ** (code - 127) for code in range(255)]
    return torch.tensor([*scales, float("nan")], dtype=dtype, device=device)
