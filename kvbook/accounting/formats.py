"""Element formats: how many bits a number takes, and what its scale adds.

Knows: bits per element, groups, scales and zero points. Does not know: tensors, layers, tokens.

One group is a run of elements of one head's vector, of one token or of several consecutive
tokens. A vector takes whole bytes.
"""

import re
from dataclasses import dataclass, replace

from kvbook.accounting.units import check_count


@dataclass(frozen=True)
class Format:
    """``bits`` per element; with a ``group``, one scale (and zero point) per so many elements.

    ``group_tokens`` consecutive tokens share the scales of each group: 1 is a scale per token, and
    a group of 1 element over 32 tokens is a scale per channel.

    Example: 4 bits in groups of 32 with a 16-bit scale and a 16-bit zero point take 5 bits per
    element in all, so "4-bit" is 3.2 times below 16 bits, not 4.

    >>> int4 = Format("int4", 4, group=32, scale_bits=16, zero_bits=16)
    >>> int4.data_bytes(128), int4.scale_bytes(128), int4.zero_bytes(128)
    (64, 8, 8)
    """

    name: str
    bits: int
    group: int | None = None
    scale_bits: int = 0
    zero_bits: int = 0
    group_tokens: int = 1

    def __post_init__(self) -> None:
        check_count("bits", self.bits, 1, 64)
        check_count("scale_bits", self.scale_bits, 0, 64)
        check_count("zero_bits", self.zero_bits, 0, 64)
        check_count("group_tokens", self.group_tokens)
        if self.group is not None:
            check_count("group", self.group)
        if (self.group is None) != (self.scale_bits + self.zero_bits == 0):
            raise ValueError(
                f"scales belong to groups, got group {self.group} with {self.scale_bits}-bit "
                f"scales and {self.zero_bits}-bit zero points; give both or neither"
            )
        if self.group is None and self.group_tokens > 1:
            raise ValueError(
                f"{self.group_tokens} tokens cannot share scales that do not exist; give a group "
                "and scale_bits too"
            )

    def with_group(self, group: int) -> "Format":
        """The same format with another group size. A format without scales has no groups."""
        if self.group is None:
            raise ValueError(
                f"{self.name} has no scales, so no group size; formats with groups: "
                f"{', '.join(name for name, known in FORMATS.items() if known.group)}"
            )
        return replace(self, group=group)

    def data_bytes(self, width: int) -> int:
        """Bytes of the elements of one vector."""
        return bytes_of(width * self.bits)

    def scale_bytes(self, width: int, tokens: int = 1) -> int:
        """Bytes of the scales of ``tokens`` consecutive vectors: whole groups of tokens only."""
        return self._token_groups(tokens) * bytes_of(self._groups(width) * self.scale_bits)

    def zero_bytes(self, width: int, tokens: int = 1) -> int:
        """Bytes of the zero points of ``tokens`` consecutive vectors, as ``scale_bytes``."""
        return self._token_groups(tokens) * bytes_of(self._groups(width) * self.zero_bits)

    def vector_bytes(self, width: int) -> int:
        """Everything that one vector of ``width`` elements takes."""
        return self.data_bytes(width) + self.scale_bytes(width) + self.zero_bytes(width)

    def describe(self) -> str:
        """The format in words."""
        words = f"{self.name}: {self.bits} bits per element"
        if self.group is None:
            return words
        zero = f" and a {self.zero_bits}-bit zero point" if self.zero_bits else ""
        elements = "element" if self.group == 1 else f"{self.group} elements"
        tokens = "one token" if self.group_tokens == 1 else f"{self.group_tokens} tokens together"
        return (
            f"{words}, and a {self.scale_bits}-bit scale{zero} for each {elements} of one head's "
            f"vector of {tokens}"
        )

    def _groups(self, width: int) -> int:
        if self.group is None:
            return 0
        if width % self.group:
            raise ValueError(
                f"a group of {self.group} does not divide a vector of {width} elements; "
                f"use a divisor of {width}"
            )
        return width // self.group

    def _token_groups(self, tokens: int) -> int:
        if tokens % self.group_tokens:
            raise ValueError(
                f"{self.name} shares each scale among {self.group_tokens} tokens, so {tokens} "
                f"cannot be counted alone; give a multiple of {self.group_tokens}, or count whole "
                "slots with storage_bytes()"
            )
        return tokens // self.group_tokens


def bytes_of(bits: int) -> int:
    """Whole bytes that hold so many bits."""
    return -(-bits // 8)


# Scaled formats as they are in wide use. int8: a scale per 32 elements, as in llama.cpp's q8_0.
# int4: scale and zero point per 32, asymmetric. float4_e2m1: the OCP Microscaling format MXFP4,
# one 8-bit exponent per 32. float8 stands for a static scale per tensor, which no token pays for.
FORMATS = {
    known.name: known
    for known in (
        Format("float64", 64),
        Format("float32", 32),
        Format("float16", 16),
        Format("bfloat16", 16),
        Format("float8_e4m3", 8),
        Format("float8_e5m2", 8),
        Format("int8", 8, group=32, scale_bits=16),
        Format("int4", 4, group=32, scale_bits=16, zero_bits=16),
        Format("mxfp4", 4, group=32, scale_bits=8),
    )
}
ALIASES = {
    "fp64": "float64", "fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16",
    "fp8": "float8_e4m3", "fp8_e4m3": "float8_e4m3", "float8_e4m3fn": "float8_e4m3",
    "fp8_e5m2": "float8_e5m2",
}  # fmt: skip


def parse_format(dtype: "str | Format") -> Format:
    """A format from its name (``"bf16"``, ``"int4"``) or its bits (``"4bit"``: no scales).

    A number alone is refused, because 8 could mean bits or bytes.
    """
    if isinstance(dtype, Format):
        return dtype
    text = str(dtype).strip().lower()
    name = ALIASES.get(text, text)
    if name in FORMATS:
        return FORMATS[name]
    if match := re.fullmatch(r"(\d{1,3})[- ]?bits?", text):
        return Format(f"{int(match[1])}bit", int(match[1]))
    known = f"allowed: {', '.join([*FORMATS, *ALIASES])}, or bits such as 4bit"
    if re.fullmatch(r"[\d.]+", text):
        raise ValueError(f"dtype {dtype!r} is a bare number: bits or bytes? {known}")
    raise ValueError(f"unknown dtype {dtype!r}; {known}")
