"""Vectors as small codes with a scale per group.

Knows: which elements share a scale, which rule makes it. Does not know: layers, rows, slots, or
where codes are kept.

A group is ``tokens`` consecutive tokens by ``channels`` neighboring channels of one head. Groups of
(1, 32) suit values; keys have channels far from zero in every token, and groups of (32, 1) give
each of them a scale of its own (Liu et al. 2024, KIVI). What is kept of a group, in the type of
the cache itself:

- symmetric: the peak, its largest absolute value. A number is code / largest code · peak.
- asymmetric: the lowest and the highest value. A number lies code / largest code of the way.
- float4_e2m1: one byte, a power of two (the MXFP4 form of the OCP Microscaling Formats
  Specification v1.0: E8M0, the exponent plus 127, and 255 for not a number).

So nothing is rounded but the elements. The ends of a range, ±peak and a constant group come back
exactly, and every kept number is finite where the input is. A power of two cannot do that: in
float4_e2m1 a constant comes back exactly if it is 1, 1.5 or 0 times a power of two (in MXFP4
itself 6 = 1.5 · 4), and anything above six times the scale becomes six times the scale.

Error of one element, beside rounding to the type of the cache:

- int8, int4: at most half a step, the step being peak / largest code, or range / largest code;
- float8_e4m3: at most 1/16 of the element, or of peak / 28,672 where that is more;
- float4_e2m1: at most 1/4 of the element, or of the scale where that is more.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvbook.cache.elements import Element, Float4E2M1, Float8E4M3, Integer
from kvbook.cache.scales import Peak, PowerOfTwo, Range, Scale

# By the name of the element and whether it is symmetric.
FORMATS: dict[tuple[str, bool], tuple[Element, Scale]] = {
    ("int8", True): (Integer(8, signed=True), Peak()),
    ("int8", False): (Integer(8, signed=False), Range()),
    ("int4", True): (Integer(4, signed=True), Peak()),
    ("int4", False): (Integer(4, signed=False), Range()),
    ("float8_e4m3", True): (Float8E4M3(), Peak()),
    ("float4_e2m1", True): (Float4E2M1(), PowerOfTwo()),
}


class Encoded(NamedTuple):
    """Vectors in a store's form: t tokens, n = D / channels groups side by side."""

    codes: Tensor  # (…, t, heads, bytes of a vector)
    scales: Tensor  # (…, t / tokens, heads, n): peaks, highest values, or exponents
    offsets: Tensor  # the same shape: lowest values; (…, 0) where symmetric


@dataclass(frozen=True)
class Codec:
    """An element format and the groups that share a scale.

    ``group`` is (tokens, channels): the elements that share a scale. Variants of the ready-made
    codecs come from ``grouped``, ``per_channel`` and ``dataclasses.replace``. Raises
    ``ValueError`` for an unknown element, a group of nothing, or an asymmetric float.

    >>> x = torch.tensor([[[0.0, 5.0, 6.3, 15.0]]])  # one token, one head
    >>> codec = INT4.grouped(4)
    >>> codec.encode(x).codes.tolist()  # two to a byte: 0 and 5, 6 and 15
    [[[80, 246]]]
    >>> codec.round_trip(x).tolist()
    [[[0.0, 5.0, 6.0, 15.0]]]
    """

    element: str
    group: tuple[int, int] = (1, 32)
    symmetric: bool = True

    def __post_init__(self) -> None:
        known = dict.fromkeys(element for element, _ in FORMATS)
        if not isinstance(self.element, str) or self.element not in known:
            raise ValueError(f"unknown element {self.element!r:.60}; use one of {', '.join(known)}")
        if type(self.symmetric) is not bool:
            raise ValueError(f"symmetric must be True or False, got {self.symmetric!r:.60}")
        if (self.element, self.symmetric) not in FORMATS:
            both = [element for element in known if (element, False) in FORMATS]
            raise ValueError(
                f"{self.element} has a sign of its own, so it has no asymmetric form; use "
                f"symmetric=True, or one of {', '.join(both)}"
            )
        pair = isinstance(self.group, tuple) and len(self.group) == 2
        if not pair or not all(type(n) is int and n >= 1 for n in self.group):
            raise ValueError(
                f"a group is two positive integers, (tokens, channels), got {self.group!r:.60}; "
                "as in (1, 32) or (32, 1)"
            )

    def grouped(self, channels: int) -> "Codec":
        """One scale per token and ``channels`` neighboring channels."""
        return replace(self, group=(1, channels))

    def per_channel(self, tokens: int) -> "Codec":
        """One scale per channel and ``tokens`` consecutive tokens."""
        return replace(self, group=(tokens, 1))

    def encode(self, x: Tensor) -> Encoded:
        """Codes and scales of ``x`` (…, t, heads, D); scales and offsets have its type.

        Not-a-number or infinity makes its whole group read back as not a number or infinity. So
        does an asymmetric range, highest minus lowest, beyond the largest float32 (float64 for
        float64). Raises ``ValueError`` if whole groups do not fill x.
        """
        element, scale = FORMATS[self.element, self.symmetric]
        groups = self._groups(x).to(working_type(x.dtype))
        numbers, scales, offsets = scale.divide(groups, element.largest, x.dtype)
        codes = element.encode(numbers.reshape(x.shape))
        # (…, t / tokens, 1, heads, n, 1) without the two ones.
        return Encoded(codes, *(one.flatten(-2).squeeze(-3) for one in (scales, offsets)))

    def decode(self, encoded: Encoded, dtype: torch.dtype) -> Tensor:
        """Vectors (…, t, heads, D) of type ``dtype``.

        Scales may also come one per token, (…, t, heads, n), when tokens were picked one by one.
        """
        element, scale = FORMATS[self.element, self.symmetric]
        codes, scales, offsets = encoded
        lines, per_row, channels = scales.shape[-3], scales.shape[-1], self.group[1]
        width = per_row * channels
        numbers = element.decode(codes, width, working_type(dtype))
        tokens = codes.shape[-3] // max(lines, 1)
        groups = numbers.unflatten(-1, (per_row, channels)).unflatten(-4, (lines, tokens))
        scales, offsets = (x.unsqueeze(-3).unsqueeze(-1) for x in (scales, offsets))
        groups = scale.multiply(groups, element.largest, scales, offsets)
        return groups.reshape(*codes.shape[:-1], width).to(dtype)

    def round_trip(self, x: Tensor) -> Tensor:
        """What is left of ``x`` after encoding and decoding, in its type."""
        return self.decode(self.encode(x), x.dtype)

    def _groups(self, x: Tensor) -> Tensor:
        """``x`` as (…, t / tokens, tokens, heads, D / channels, channels)."""
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 3:
            given = f"{x.dtype} of {tuple(x.shape)}" if isinstance(x, Tensor) else f"{x!r:.60}"
            raise ValueError(f"a codec takes floats of shape (…, tokens, heads, D), got {given}")
        (tokens, channels), t, width = self.group, x.shape[-3], x.shape[-1]
        if width % channels:
            divisors = [n for n in range(1, width + 1) if width % n == 0]
            raise ValueError(
                f"groups of {channels} channels do not divide a width of {width}; use grouped(n) "
                f"with n from {divisors}"
            )
        if t % tokens:
            raise ValueError(
                f"groups of {tokens} tokens do not divide {t} tokens; encode whole groups"
            )
        return x.unflatten(-1, (width // channels, channels)).unflatten(-4, (t // tokens, tokens))


def working_type(dtype: torch.dtype) -> torch.dtype:
    """Where the arithmetic is done: float64 for float64, float32 for everything shorter."""
    return torch.promote_types(dtype, torch.float32)


INT8 = Codec("int8")
INT4 = Codec("int4", symmetric=False)
FLOAT8 = Codec("float8_e4m3")
FLOAT4 = Codec("float4_e2m1")
