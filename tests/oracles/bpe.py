"""Byte-level BPE written out plainly, as the oracle for the tokenizer: slow and short."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import regex

# GPT-2's split of text into words; before it, SmolLM sets every digit apart.
WORDS = regex.compile(r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
DIGITS = regex.compile(r"(\p{N})")


def letters_for_bytes() -> dict[int, str]:
    """Printable bytes stand for themselves, the others for U+0100, U+0101, ... in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    return table | {byte: chr(0x100 + place) for place, byte in enumerate(others)}


LETTERS = letters_for_bytes()


def encode(
    text: str, vocabulary: Mapping[str, int], merges: Sequence[str], control: Sequence[str]
) -> list[int]:
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    names = "|".join(regex.escape(name) for name in sorted(control, key=len, reverse=True))
    ids: list[int] = []
    for piece in regex.split(f"({names})", text):
        if piece in control:
            ids.append(vocabulary[piece])
            continue
        for word in words(piece):
            spelled = [LETTERS[byte] for byte in word.encode()]
            ids += [vocabulary[part] for part in merged(spelled, ranks)]
    return ids


def words(text: str) -> Iterator[str]:
    for stretch in DIGITS.split(text):
        yield from WORDS.findall(stretch)


def merged(parts: list[str], ranks: Mapping[tuple[str, ...], int]) -> list[str]:
    """Join the pair that was learned first, again and again, until no learned pair is left."""
    while True:
        pairs = [
            (ranks[pair], at)
            for at, pair in enumerate(pairwise(parts))
            if pair in ranks
        ]
        if not pairs:
            return parts
        _, at = min(pairs)
        parts = [*parts[:at], parts[at] + parts[at + 1], *parts[at + 2 :]]
