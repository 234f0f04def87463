"""Vectors as small codes with a scale per tile.

Knows: which elements share a scale, what a scale is, how a code becomes a number again. Does not
know: layers, rows, slots, or where codes are kept.

A tile is ``tokens`` consecutive tokens by ``channels`` neighboring channels of one head. Tiles of
(1, 32) suit values; keys have channels far from zero in every token, and tiles of (32, 1) give
each of them a scale of its own (Liu et al. 2024, KIVI). What is kept of a tile, in the type of
the cache itself:

- symmetric: the peak, its largest absolute value. A number is code / largest code · peak.
- asymmetric: the lowest and the highest value. A number lies code / largest code of the way.
- float4_e2m1: one byte, a power of two (the MXFP4 form of the OCP Microscaling Formats
  Specification v1.0: E8M0, the exponent plus 127, and 255 for not a number).

So nothing is rounded but the elements. The ends of a range, ±peak and a constant tile come back
exactly, and every kept number is finite where the input is. A power of two cannot do that: in
float4_e2m1 a constant comes back exactly if it is 1, 1.5 or 0 times a power of two (in MXFP4
itself 6 = 1.5 · 4), and anything above six times the scale becomes six times the scale.

Error of one element, beside rounding to the type of the cache:

- int8, int4: at most half a step, the step being peak / largest code, or range / largest code;
- float8_e4m3: at most 1/16 of the element, or of peak / 28,672 where that is more;
- float4_e2m1: at most 1/4 of the element, or of the scale where that is more.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvbook.cache.elements import Element, Float4E2M1, Float8E4M3, Integer

SYMMETRIC: dict[str, Element] = {
    "int8": Integer(8, signed=True),
    "int4": Integer(4, signed=True),
    "float8_e4m3": Float8E4M3(),
    "float4_e2m1": Float4E2M1(),
}
ASYMMETRIC: dict[str, Element] = {
    "int8": Integer(8, signed=False),
    "int4": Integer(4, signed=False),
}


class Encoded(NamedTuple):
    """Vectors in a store's form: t tokens, n = D / channels tiles side by side."""

    codes: Tensor  # (…, t, heads, bytes of a vector)
    scales: Tensor  # (…, t / tokens, heads, n): peaks, highest values, or exponents
    offsets: Tensor  # the same shape: lowest values; (…, 0) where symmetric


@dataclass(frozen=True)
class Codec:
    """An element format and a tile.

    ``tile`` is (tokens, channels): the elements that share a scale. Variants of the ready-made
    codecs come from ``grouped``, ``per_channel`` and ``dataclasses.replace``. Raises
    ``ValueError`` for an unknown element, a tile of nothing, or an asymmetric float.

    >>> x = torch.tensor([[[0.0, 5.0, 6.3, 15.0]]])  # one token, one head
    >>> codec = INT4.grouped(4)
    >>> codec.encode(x).codes.tolist()  # two to a byte: 0 and 5, 6 and 15
    [[[80, 246]]]
    >>> codec.round_trip(x).tolist()
    [[[0.0, 5.0, 6.0, 15.0]]]
    """

    element: str
    tile: tuple[int, int] = (1, 32)
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.element not in SYMMETRIC:
            raise ValueError(f"unknown element {self.element!r}; use one of {', '.join(SYMMETRIC)}")
        if not self.symmetric and self.element not in ASYMMETRIC:
            raise ValueError(
                f"{self.element} has a sign of its own, so it has no asymmetric form; use "
                f"symmetric=True, or one of {', '.join(ASYMMETRIC)}"
            )
        whole = isinstance(self.tile, tuple) and len(self.tile) == 2
        if not whole or not all(type(n) is int and n >= 1 for n in self.tile):
            raise ValueError(
                f"a tile is two positive integers, (tokens, channels), got {self.tile!r}; "
                "as in (1, 32) or (32, 1)"
            )

    def grouped(self, channels: int) -> "Codec":
        """One scale per token and ``channels`` neighboring channels."""
        return replace(self, tile=(1, channels))

    def per_channel(self, tokens: int) -> "Codec":
        """One scale per channel and ``tokens`` consecutive tokens."""
        return replace(self, tile=(tokens, 1))

    def encode(self, x: Tensor) -> Encoded:
        """Codes and scales of ``x`` (…, t, heads, D); scales and offsets have its type.

        Not-a-number or infinity makes its whole tile read back as not a number or infinity. So
        does an asymmetric range, highest minus lowest, beyond the largest float32 (float64 for
        float64). Raises ``ValueError`` if whole tiles do not fill x.
        """
        tiles = self._tiles(x).to(working_type(x.dtype))
        over = (-4, -1)  # tokens and channels of a tile
        lowest = tiles[..., :1, :, :, :0]  # nothing, of the right shape otherwise
        if not self.symmetric:
            lowest, scales = tiles.amin(over, keepdim=True), tiles.amax(over, keepdim=True)
            numbers = share(tiles - lowest, scales - lowest) * self._element.largest
        elif self.element == "float4_e2m1":
            scales = power_of_two_code(tiles.abs().amax(over, keepdim=True))
            numbers = tiles / power_of_two(scales, tiles.dtype)
        else:
            scales = tiles.abs().amax(over, keepdim=True)
            numbers = share(tiles, scales) * self._element.largest
        codes = self._element.encode(numbers.reshape(x.shape))
        kept = torch.uint8 if self.element == "float4_e2m1" else x.dtype
        # (…, t / tokens, 1, heads, n, 1) without the two ones.
        return Encoded(codes, *(one.to(kept).flatten(-2).squeeze(-3) for one in (scales, lowest)))

    def decode(self, encoded: Encoded, dtype: torch.dtype) -> Tensor:
        """Vectors (…, t, heads, D) of type ``dtype``.

        Scales may also come one per token, (…, t, heads, n), when tokens were picked one by one.
        """
        codes, scales, offsets = encoded
        work, channels = working_type(dtype), self.tile[1]
        groups, per_row = scales.shape[-3], scales.shape[-1]
        width = per_row * channels
        numbers = self._element.decode(codes, width, work)
        tokens = codes.shape[-3] // max(groups, 1)
        tiles = numbers.unflatten(-1, (per_row, channels)).unflatten(-4, (groups, tokens))
        scales, offsets = (x.unsqueeze(-3).unsqueeze(-1) for x in (scales, offsets))
        if not self.symmetric:
            tiles = torch.lerp(offsets.to(work), scales.to(work), tiles.div_(self._element.largest))
        elif self.element == "float4_e2m1":
            tiles = tiles.mul_(power_of_two(scales, work))
        else:
            tiles = tiles.div_(self._element.largest).mul_(scales.to(work))
        return tiles.reshape(*codes.shape[:-1], width).to(dtype)

    def round_trip(self, x: Tensor) -> Tensor:
        """What is left of ``x`` after encoding and decoding, in its type."""
        return self.decode(self.encode(x), x.dtype)

    @property
    def _element(self) -> Element:
        return (SYMMETRIC if self.symmetric else ASYMMETRIC)[self.element]

    def _tiles(self, x: Tensor) -> Tensor:
        """``x`` as (…, t / tokens, tokens, heads, D / channels, channels)."""
        (tokens, channels), t, width = self.tile, x.shape[-3], x.shape[-1]
        if width % channels:
            divisors = [n for n in range(1, width + 1) if width % n == 0]
            raise ValueError(
                f"groups of {channels} channels do not divide a width of {width}; use grouped(n) "
                f"with n from {divisors}"
            )
        if t % tokens:
            raise ValueError(
                f"tiles of {tokens} tokens do not divide {t} tokens; encode whole tiles"
            )
        return x.unflatten(-1, (width // channels, channels)).unflatten(-4, (t // tokens, tokens))


def working_type(dtype: torch.dtype) -> torch.dtype:
    """Where the arithmetic is done: float64 for float64, float32 for everything shorter."""
    return torch.promote_types(dtype, torch.float32)


def share(part: Tensor, whole: Tensor) -> Tensor:
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


INT8 = Codec("int8")
INT4 = Codec("int4", symmetric=False)
FLOAT8 = Codec("float8_e4m3")
FLOAT4 = Codec("float4_e2m1")
