"""Which units are the same, and which unit a number in a printed table has.

Knows units and Markdown tables. Does not know notebooks or prose.
"""

import re
from collections.abc import Iterator

from tools import numerals
from tools.numerals import RATIOS, SIZES, TIMES, UNITS, WORK, Numeral

MEASURED = SIZES | TIMES | RATIOS | WORK  # a claim with one of these needs it printed as well
SAME = {"byte": "B", "x": "×", "time": "×", "fold": "×", "percent": "%", "second": "s"}
SAME |= {"minute": "min", "hour": "h", "μs": "us", "µs": "us"}

_RULE = re.compile(r"\|(?:\s*:?-+:?\s*\|)+\s*$")
_WORDS = re.compile(r"[^\W\d_]+(?:/[^\W\d_]+)?|[%×]")


def canonical(unit: str) -> str:
    """One name per unit: "bytes", "byte" and "B" agree, "x", "×" and "times" too."""
    singular = unit if unit in ("s", "") else unit.removesuffix("s")
    if unit.endswith("/s"):
        singular = unit
    return SAME.get(singular, singular)


def of_lines(lines: list[str]) -> Iterator[tuple[int, str, Numeral, str]]:
    """Each number that is printed: its line from 1, the line, the number, its unit.

    In a Markdown table, a number without a unit has the one that the head of its column names.
    """
    columns: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.startswith("|"):
            columns = []
        if number < len(lines) and _RULE.match(lines[number]):
            columns = [_named(head) for head in line.split("|")]
        for column, part in enumerate(line.split("|") if columns else [line]):
            given = columns[column] if column < len(columns) else ""
            for found in numerals.of_line(part):
                yield number, line, found, found.unit or given


def _named(head: str) -> str:
    """The unit in the head of a column: a word of two letters, or anything in brackets."""
    bracketed = re.search(r"\(([^()]*)\)", head)
    words = _WORDS.findall(bracketed[1]) if bracketed else []
    words += [word for word in _WORDS.findall(head) if len(word) > 1 or word in "%×"]
    return next((word for word in words if word in UNITS), "")
