"""What is left for a cache on one device, line by line, as engines reckon.

Knows: memory that a driver reports, the share an engine may use, weights, a reserve. Does not
know: what the cache is made of, how much activations really take.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from kvbook.accounting.units import (
    check_count,
    check_text,
    format_bytes,
    parse_bytes,
    parse_share,
    quoted,
)

AT_BITS = re.compile(
    r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([MBT])\s*@\s*(\d{1,3}(?:\.\d{1,10})?)\s*(?:bits?)?\s*",
    re.ASCII,
)
ONLY_B = re.compile(r"\s*[\d.]+\s*B\s*$")  # 8B: bytes, or parameters without their bits?


@dataclass(frozen=True)
class Weights:
    """``total_bytes`` of weights, shared by the devices of one group; ``words`` say what they are.

    >>> Weights.parse("70.6B@4.5").total_bytes
    39712500000
    """

    total_bytes: int
    words: str

    def __post_init__(self) -> None:
        check_count("total_bytes", self.total_bytes)
        check_text("words", self.words)

    @classmethod
    def parse(cls, text: str) -> "Weights":
        """``8.03B@16``: parameters (M, B or T, powers of 1000) at bits per weight; or ``16.1GB``.

        Raises ``ValueError`` for anything else. Bits per weight may be broken: 4.5 for 4-bit
        weights with a 16-bit scale per 32 of them.
        """
        if (
            isinstance(text, str)
            and re.fullmatch(r".*(i?B|kB)\s*", text)
            and not ONLY_B.match(text)
        ):
            return cls(parse_bytes(text), "as given")
        match = AT_BITS.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(
                f"weights are parameters at bits per weight, or a size, got {quoted(text)}; as in "
                "8.03B@16, 70.6B@4.5 or 16.1GB"
            )
        parameters = Fraction(match[1]) * {"M": 10**6, "B": 10**9, "T": 10**12}[match[2]]
        bits = Fraction(match[3])
        if not parameters or not 0 < bits <= 64:
            raise ValueError(
                f"weights need parameters above 0 and bits from above 0 to 64, got {quoted(text)}"
            )
        words = f"{match[1]}{match[2]} parameters at {match[3]} bits"
        return cls(ceil(parameters * bits / 8), words)


@dataclass(frozen=True)
class CardBudget:
    """The lines of a reckoning, and what they leave for the cache of one device."""

    lines: tuple[tuple[str, int], ...]
    cache_bytes: int


def card_budget(
    memory: int,
    utilization: str | float | Fraction = 1,
    weights: Weights | None = None,
    reserve: int = 0,
    devices: int = 1,
) -> CardBudget:
    """What is left of ``memory`` bytes, of which the engine may use a share, for the cache.

    ``weights`` are shared by ``devices``; ``reserve`` is for activations, graphs and workspaces.
    Engines measure that; here it is a number that you give. Raises ``ValueError`` where nothing is
    left, and for impossible values.

    >>> left = card_budget(80 * 10**9, "0.9", Weights.parse("8.03B@16"), reserve=2 * 10**9)
    >>> left.cache_bytes
    53940000000
    """
    check_count("memory", memory)
    check_count("reserve", reserve, 0)
    check_count("devices", devices)
    if weights is not None and not isinstance(weights, Weights):
        raise ValueError(f"weights must be Weights, got {quoted(weights)}; use Weights.parse(…)")
    share = parse_share(utilization)
    usable = int(memory * share)
    lines = [("memory", memory)]
    if share != 1:
        lines.append((f"of which the engine uses {percent(share)}", usable))
    left = usable
    if weights is not None:
        here = -(-weights.total_bytes // devices)
        words = f"weights, {weights.words}"
        lines.append((words if devices == 1 else f"{words}, 1 / {devices:,} of them", -here))
        left -= here
    if reserve:
        lines.append(("activations and workspaces, as given", -reserve))
        left -= reserve
    if left < 1:
        taken = " ".join(f"{name}: {format_bytes(abs(size))};" for name, size in lines)
        raise ValueError(
            f"nothing is left for a cache: {taken} {format_bytes(-left)} too much; use more "
            "memory, more devices, fewer bits per weight or a smaller reserve"
        )
    lines.append(("left for the cache", left))
    return CardBudget(tuple(lines), left)


def percent(share: Fraction) -> str:
    """A share in percent, exactly where it has few digits."""
    return f"{float(100 * share):.6g} %"
