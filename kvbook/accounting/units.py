"""Bytes, counts and percentages as people write them.

Knows: GiB is 1024³ bytes and GB is 1000³ bytes. Does not know: what the bytes are for.
"""

import re
from fractions import Fraction

from kvbook.config.counts import check_count as check_count
from kvbook.config.counts import shown as shown

# Longest first, so that "KiB" is not read as "B".
UNITS = {
    "TiB": 1024**4, "GiB": 1024**3, "MiB": 1024**2, "KiB": 1024,
    "TB": 1000**4, "GB": 1000**3, "MB": 1000**2, "kB": 1000, "B": 1,
}  # fmt: skip
BINARY = ("TiB", "GiB", "MiB", "KiB")


def parse_bytes(text: str) -> int:
    """A size with its unit, as whole bytes (rounded down).

    A number alone is refused: 80 could mean GB or GiB, which differ by 7 percent.

    >>> parse_bytes("80GiB"), parse_bytes("1.5 kB")
    (85899345920, 1500)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if match is None or match[2] not in UNITS:
        raise ValueError(
            f"a size is a positive number and a unit, got {text!r}; units: {', '.join(UNITS)}, "
            "as in 80GiB (1024-based) or 80GB (1000-based)"
        )
    size = int(Fraction(match[1]) * UNITS[match[2]])
    if size == 0:
        raise ValueError(f"a size must be at least one byte, got {text!r}")
    return size


def format_bytes(size: int) -> str:
    """The size in the largest binary unit that it fills, with at most three decimals.

    >>> format_bytes(131072), format_bytes(1_585_446_912), format_bytes(900)
    ('128 KiB', '1.477 GiB', '900 B')
    """
    for unit in BINARY:
        if size >= UNITS[unit]:
            return f"{size / UNITS[unit]:,.3f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{size} B"
