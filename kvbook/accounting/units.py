"""Bytes, counts and shares as people write them, and whole numbers checked.

Knows: GiB is 1024³ bytes and GB is 1000³ bytes, k is 1000 and Ki is 1024. Does not know: what
is counted.
"""

import re
import reprlib
from fractions import Fraction

from kvbook.config.counts import check_count as check_count
from kvbook.config.counts import shown as shown

# Longest first, so that "KiB" is not read as "B".
UNITS = {
    "TiB": 1024**4, "GiB": 1024**3, "MiB": 1024**2, "KiB": 1024,
    "TB": 1000**4, "GB": 1000**3, "MB": 1000**2, "kB": 1000, "B": 1,
}  # fmt: skip
BINARY = ("TiB", "GiB", "MiB", "KiB")
FACTORS = {"": 1, "k": 1000, "K": 1000, "M": 1000**2, "Ki": 1024, "Mi": 1024**2}
LONGEST = 60  # characters of a value that an error quotes


def parse_bytes(text: str) -> int:
    """A size with its unit, as whole bytes (rounded down).

    A number alone is refused: 80 could mean GB or GiB, which differ by 7 percent.

    >>> parse_bytes("80GiB"), parse_bytes("1.5 kB")
    (85899345920, 1500)
    """
    pattern = r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([A-Za-z]+)\s*"
    match = re.fullmatch(pattern, text, re.ASCII) if isinstance(text, str) else None
    if match is None or match[2] not in UNITS:
        raise ValueError(
            f"a size is a positive number and a unit, got {quoted(text)}; units: "
            f"{', '.join(UNITS)}, as in 80GiB (1024-based) or 80GB (1000-based)"
        )
    size = int(Fraction(match[1]) * UNITS[match[2]])
    if size == 0:
        raise ValueError(f"a size must be at least one byte, got {quoted(text)}")
    return size


def parse_count(text: str) -> int:
    """A whole number as it is written: 8192, 8,192, 8k (1000-based), 128Ki (1024-based), 1.5M.

    >>> [parse_count(text) for text in ("8192", "8,192", "8k", "128Ki", "1.5M")]
    [8192, 8192, 8000, 131072, 1500000]
    """
    pattern = r"\s*([+-]?)(\d{1,3}(?:[,_]\d{3})+|\d{1,30})(\.\d{1,30})?\s*([A-Za-z]*)\s*"
    match = re.fullmatch(pattern, text, re.ASCII) if isinstance(text, str) else None
    if match is not None and match[4] in FACTORS:
        digits = re.sub("[,_]", "", match[2]) + (match[3] or "")
        number = Fraction(match[1] + digits) * FACTORS[match[4]]
        if number.denominator == 1:
            return int(number)
    raise ValueError(
        f"must be a whole number, got {quoted(text)}; write 8192, 8,192, 8k (8,000) or 8Ki (8,192)"
    )


def parse_share(share: "str | float | Fraction") -> Fraction:
    """A part of a whole, above 0 and at most 1, exactly as it is written: 0.9, 92%.

    >>> parse_share("92%"), parse_share(0.9)
    (Fraction(23, 25), Fraction(9, 10))
    """
    part = share if isinstance(share, Fraction) else Fraction(0)
    if not isinstance(share, Fraction):
        text = share.strip() if isinstance(share, str) else quoted(share)
        match = re.fullmatch(r"(\d{1,30}(?:\.\d{1,30})?)(%?)", text, re.ASCII)
        part = Fraction(match[1]) / (100 if match[2] else 1) if match else Fraction(0)
    if not 0 < part <= 1:
        raise ValueError(
            f"a share is a number above 0 and at most 1, got {quoted(share)}; as in 0.9 or 90%"
        )
    return part


def format_bytes(size: int) -> str:
    """The size in the largest binary unit that it fills, with at most three decimals.

    >>> format_bytes(131072), format_bytes(1_585_446_912), format_bytes(900)
    ('128 KiB', '1.477 GiB', '900 B')
    """
    check_count("a size in bytes", size, 0)
    for unit in BINARY:
        if size >= UNITS[unit]:
            if size >= 10**30:
                return f"{shown(size)} of bytes"
            thousandths = round(Fraction(size * 1000, UNITS[unit]))
            return f"{thousandths // 1000:,}.{thousandths % 1000:03d}".rstrip("0").rstrip(".") + (
                f" {unit}"
            )
    return f"{size} B"


def check_flag(name: str, value: object) -> None:
    """Raise ``ValueError`` unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {quoted(value)}")


def check_text(name: str, value: object) -> None:
    """Raise ``ValueError`` unless ``value`` is a string."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, got {quoted(value)}")


def check_kind(name: str, value: object, kind: type, way_out: str) -> None:
    """Raise ``ValueError`` unless ``value`` is an object of this class."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be a {kind.__name__}, got {quoted(value)}; use {way_out}")


def check_tuple(name: str, value: object, kind: type) -> None:
    """Raise ``ValueError`` unless ``value`` is a tuple of objects of this class."""
    if not isinstance(value, tuple) or not all(isinstance(each, kind) for each in value):
        raise ValueError(f"{name} must be a tuple of {kind.__name__}, got {quoted(value)}")


def quoted(value: object) -> str:
    """Any value as an error message quotes it: in one line, and cut short where it is long."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return shown(value)
    try:
        text = reprlib.repr(value)
    except Exception:  # a value whose own repr fails must not hide the error that is reported
        return f"a {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def in_words(count: int, noun: str) -> str:
    """A count and its noun: 1 token, 2 tokens."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
