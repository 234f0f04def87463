"""Numbers of four or eight bits, and the bytes that stand for them.

Knows: which numbers an element format has, how to round to them, how two 4-bit codes share a
byte. Does not know: scales, groups, tokens, keys.

Rounding is to the nearest number of the format, ties to the even code.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# OCP Microscaling Formats (MX) Specification v1.0: the numbers of E2M1, by code. The fourth bit
# is the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_HALFWAY = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between each and the next


class Element(Protocol):
    """Numbers up to ``largest``, and the codes that stand for them."""

    @property
    def largest(self) -> float: ...

    def encode(self, numbers: Tensor) -> Tensor:
        """Codes (…, bytes of a vector) of numbers (…, D), none of them beyond ``largest``."""

    def decode(self, codes: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Numbers (…, width), a new tensor of float32 or float64."""


@dataclass(frozen=True)
class Integer:
    """Whole numbers: −127 … 127 or 0 … 255 in 8 bits, −7 … 7 or 0 … 15 in 4.

    Signed codes leave the lowest number out, so that both signs reach equally far.
    """

    bits: int
    signed: bool

    @property
    def largest(self) -> float:
        return 2 ** (self.bits - self.signed) - 1

    def encode(self, numbers: Tensor) -> Tensor:
        codes = numbers.round().to(torch.int8 if self.signed else torch.uint8)
        return codes if self.bits == 8 else pack(codes.view(torch.uint8) & 15)

    def decode(self, codes: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        if self.bits == 4:
            codes = unpack(codes)[..., :width]
            if self.signed:  # the fourth bit of two's complement counts −8
                codes = (codes ^ 8).view(torch.int8) - 8
        return codes.to(dtype)


@dataclass(frozen=True)
class Float8E4M3:
    """PyTorch's ``float8_e4m3fn``: numbers up to 448, kept as plain bytes."""

    largest: float = 448.0

    def encode(self, numbers: Tensor) -> Tensor:
        return rounded_to_e4m3(numbers).to(float8_type()).view(torch.uint8)

    def decode(self, codes: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        return codes.view(float8_type()).to(dtype)


@dataclass(frozen=True)
class Float4E2M1:
    """The 15 numbers of ``E2M1`` with their signs, two to a byte. Larger ones become ±6."""

    largest: float = 6.0

    def encode(self, numbers: Tensor) -> Tensor:
        size = numbers.abs()
        codes = 8 * (numbers < 0).to(torch.uint8)
        for code, halfway in enumerate(E2M1_HALFWAY):  # a tie goes to the even one of its two codes
            codes += size >= halfway if code % 2 else size > halfway
        return pack(codes)

    def decode(self, codes: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        pairs = F.embedding(codes.int(), e2m1_pairs(dtype, codes.device))
        return pairs.flatten(-2)[..., :width]


def rounded_to_e4m3(numbers: Tensor) -> Tensor:
    """The nearest numbers of E4M3, ties to the even one.

    PyTorch takes float64 to eight bits by way of float32, which rounds twice: a number just above
    the middle of two would first become the middle, and then the lower one.

    >>> rounded_to_e4m3(torch.tensor([336.0, 336.000001], dtype=torch.float64)).tolist()
    [320.0, 352.0]
    """
    _, exponents = torch.frexp(numbers)  # numbers are at least half of 2 ** exponents
    # Three bits of mantissa: eight steps from one power of two to the next; the least is 2 ** -9.
    steps = torch.ldexp(torch.ones_like(numbers), (exponents - 4).clamp(min=-9))
    return (numbers / steps).round() * steps


def pack(codes: Tensor) -> Tensor:
    """Codes 0 … 15, (…, D), two to a byte: the even one in the low half. D may be odd.

    >>> pack(torch.tensor([1, 2, 15], dtype=torch.uint8)).tolist()
    [33, 15]
    """
    codes = F.pad(codes, (0, codes.shape[-1] % 2))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(codes: Tensor) -> Tensor:
    """The two codes of each byte: (…, n) gives (…, 2 n)."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


def float8_type() -> torch.dtype:
    """PyTorch's type of E4M3 numbers. Raises ``ValueError`` in a build without it."""
    found: torch.dtype | None = getattr(torch, "float8_e4m3fn", None)
    if found is None:
        raise ValueError(
            f"PyTorch {torch.__version__} has no float8_e4m3fn, which a float8_e4m3 cache needs; "
            "use int8, or a build of PyTorch that has the type"
        )
    return found


@lru_cache(maxsize=8)
def e2m1_pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The two numbers that each byte stands for, (256, 2)."""
    numbers = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=dtype, device=device)
    return numbers[unpack(torch.arange(256, dtype=torch.uint8, device=device)[:, None]).int()]
