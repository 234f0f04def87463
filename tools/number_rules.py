"""Rules for the numbers of a chapter beyond those that the lock enforces.

Knows claims and where they may come from. Does not know the lock (tools.numbers).
"""

from tools import number_words, numbers, prose, units
from tools.chapter import Chapter


def units_agree(chapter: Chapter) -> list[str]:
    """A number with a measured unit (%, B, KiB, s, times) is printed with that unit somewhere."""
    found = []
    evidence = numbers.evidence_of(chapter.notebook)
    claims = numbers.numerals_of(chapter.notebook) + numbers.spoken_of(chapter.notebook)
    for _, cell, read in claims:
        for numeral in read:
            if numeral.kind != "claim" or numeral.unit not in units.MEASURED:
                continue
            places = evidence.get(numeral.value, [])
            if places and not any(numbers.same_unit(place, numeral) for place in places):
                found.append(f"cell {cell}: {numeral.text!r} is printed nowhere with its unit")
    return found


def no_spelled_fractions(chapter: Chapter) -> list[str]:
    """A fraction in words cannot be bound: write it in digits, as the code prints it."""
    return [
        f"cell {cell.id}: {fraction!r} in words; write what the code prints, such as 80 %"
        for cell in chapter.markdown
        for block in prose.blocks(cell.source)
        for fraction in number_words.fractions(block)
    ]
