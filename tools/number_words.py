"""Numbers that are written in words: "four layers", "twelve", "twice".

Knows English number words. Does not know notebooks. As with digits, a word with a unit or a factor
is a claim; any other, and any in a heading, is bare. "One" counts nothing ("one of them") and is
left out, like "zero".
"""

import re
from collections.abc import Iterator

from tools import numerals, prose
from tools.numerals import Numeral

ONES = ("two", "three", "four", "five", "six", "seven", "eight", "nine")
TEENS = (
    *("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen"),
    *("eighteen", "nineteen"),
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
VALUES = {word: value for value, word in enumerate((*ONES, *TEENS), 2)}
VALUES |= {word: 10 * value for value, word in enumerate(TENS, 2)}
VALUES |= {"hundred": 100, "thousand": 1_000, "million": 1_000_000}
LOOSE = {"half": "0.5", "twice": "2", "double": "2", "doubles": "2", "thrice": "3"}

_PARTS = r"(?:half|halves|thirds?|quarters?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?"
_PARTS += r"|sixteenths?|hundredths?|thousandths?)"
_ANY = "|".join(sorted((*VALUES, *LOOSE), key=len, reverse=True))
_WORD = re.compile(rf"\b({_ANY})(?:-(one|{'|'.join(ONES)}))?\b", re.IGNORECASE)
_FRACTION = re.compile(
    rf"\b(?:(?:one|{'|'.join(ONES)})[ -]{_PARTS}|an? {_PARTS} of)\b", re.IGNORECASE
)


def of_block(block: prose.Block) -> list[Numeral]:
    """The number words of a block's text, in reading order; code and formulas have none."""
    return list(_scan(text_of(block), block.level > 0))


def fractions(block: prose.Block) -> list[str]:
    """Fractions in words, such as "four fifths", which no line of code can be found for."""
    return [match[0] for match in _FRACTION.finditer(text_of(block))]


def text_of(block: prose.Block) -> str:
    return "".join(span.text if span.kind == "text" else " ~ " for span in block.spans)


def _scan(text: str, heading: bool) -> Iterator[Numeral]:
    for match in _WORD.finditer(text):
        word = match[1].lower()
        unit = "" if word in LOOSE else numerals.unit_after(text[match.end() :])
        value = LOOSE.get(word) or str(VALUES[word] + _ones(match[2]))
        seen = match[0].lower() + (f" {unit}" if unit else "")
        yield Numeral(value, unit, seen, "claim" if unit and not heading else "bare")


def _ones(word: str | None) -> int:
    return (VALUES.get(word.lower()) or 1) if word else 0
