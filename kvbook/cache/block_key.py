"""What identifies the content of a full block: an encoding that is never the same for two inputs.

Knows: bytes. Does not know: blocks, owners, what is cached.

The keys and values of a token depend on all tokens up to it and on everything else that shaped
them: the weights, an adapter, an image in place of placeholder tokens. So a block's key is the
digest of everything up to its end: the texts of the sequence's blocks, one after the other. What
holds for a whole sequence stands in the text of its first block. A running digest takes in each
text once, so a key costs the same wherever its block stands.

Every part is written as kind, length, payload. Therefore a list of parts can be read back in one
way only: ("ab", "c") is not ("a", "bc"), ``None`` is not "", and 1 is not "1".
"""

import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Protocol

Part = str | bytes | int | None
Span = tuple[int, int, Part]  # positions start … stop-1 show the content named by the tag


class Digest(Protocol):
    """A running digest, as the objects of hashlib are."""

    def update(self, text: bytes, /) -> object:
        """Go on with these bytes."""

    def digest(self) -> bytes:
        """The digest of all bytes so far; the next ``update`` goes on from there."""


def token_array(tokens: Iterable[int]) -> "array[int]":
    """Token ids as 64-bit integers. ``ValueError`` if they are anything else.

    Takes lists, ranges, arrays and tensors of one dimension. Negative ids are allowed: some
    tokenizers use them for placeholders.
    """
    try:
        if isinstance(tokens, str | bytes | bytearray | memoryview):
            raise TypeError("texts and bytes are no lists of integers")
        if isinstance(tokens, Set | Mapping):
            raise TypeError("a set or a dictionary is no list")
        listed = tokens.tolist() if hasattr(tokens, "tolist") else tokens
        if listed is not tokens and isinstance(listed, list) and bool in map(type, listed):
            raise TypeError("true and false are no integers")
        words = tuple(listed)
        return array("q", struct.pack(f"{len(words)}q", *words))  # quicker than array("q", words)
    except (TypeError, OverflowError, NotImplementedError, RuntimeError, struct.error) as error:
        raise ValueError(
            f"tokens must be a list of integers of at most 64 bits, got {tokens!r:.60} ({error}); "
            "encode the text with a tokenizer first"
        ) from error


@lru_cache(maxsize=256)
def header(kind: bytes, length: int) -> bytes:
    """What comes before a payload: one byte of kind, eight bytes of length."""
    return kind + length.to_bytes(8, "big")


def delimited(kind: bytes, payload: bytes) -> bytes:
    return header(kind, len(payload)) + payload


def encode(part: Part) -> bytes:
    """One part, readable in one way only. ``ValueError`` for a type that is not listed in Part.

    >>> encode(258).hex(" ", 1)
    '69 00 00 00 00 00 00 00 02 01 02'
    """
    if part is None:
        return delimited(b"n", b"")
    if isinstance(part, str):
        return delimited(b"s", part.encode("utf-8", "surrogatepass"))
    if isinstance(part, bytes):
        return delimited(b"b", part)
    if isinstance(part, int) and not isinstance(part, bool):
        size = part.bit_length() // 8 + 1  # one bit more than the number, for the sign
        return delimited(b"i", part.to_bytes(size, "big", signed=True))
    raise ValueError(
        f"a part of a block key must be a string, bytes, an integer or None, got {part!r:.60}; "
        "name what it stands for, or take a digest of it"
    )


@dataclass(frozen=True)
class Identity:
    """What shapes the keys and values of a sequence, beside its tokens and the model.

    ``adapter`` names what was added to the model. ``salt`` separates tenants: nothing is found
    across salts. ``content`` names what placeholder tokens show, as (start, stop, tag). The first
    two hold for the whole sequence, content for the blocks that show it and those behind them.

    Raises ``ValueError`` for what is not a ``Part``, and for spans that are empty or overlap.
    """

    adapter: Part = None
    salt: Part = None
    content: Sequence[Span] = ()

    def __post_init__(self) -> None:
        encode(self.adapter), encode(self.salt)
        if not isinstance(self.content, list | tuple):
            raise ValueError(
                f"content must be a list of (start, stop, tag), got {self.content!r:.60}"
            )
        end = 0
        for start, stop, tag in self._spans():
            if not end <= start < stop:
                raise ValueError(
                    f"content {tag!r:.60} covers positions {start} to {stop - 1}; spans must not "
                    "be empty, not overlap, and not begin before the prompt"
                )
            end = stop
        object.__setattr__(self, "content", tuple(self._spans()))  # what comes later is not seen

    @cached_property
    def for_all_blocks(self) -> bytes:
        """The part of the first block's text, and so of every key."""
        return encode(self.adapter) + encode(self.salt)

    def by_block(self, tokens: int, block_size: int) -> dict[int, bytes]:
        """For each block that shows part of some content: which, and at what positions.

        Raises ``ValueError`` for content beyond the ``tokens`` positions.
        """
        found: dict[int, bytes] = {}
        for start, stop, tag in self.content:
            if stop > tokens:
                raise ValueError(
                    f"content {tag!r:.60} covers positions {start} to {stop - 1} of {tokens}; it "
                    "must end within the prompt"
                )
            text = encode(start) + encode(stop) + encode(tag)
            for block in range(start // block_size, (stop - 1) // block_size + 1):
                found[block] = found.get(block, b"") + text
        return found

    def until(self, length: int) -> "Identity":
        """Without the content behind the first ``length`` positions.

        Raises ``ValueError`` for content of which a part is left: nobody has named that part.
        """
        for start, stop, tag in self.content:
            if start < length < stop:
                raise ValueError(
                    f"content {tag!r:.60} covers positions {start} to {stop - 1} and cannot be cut "
                    f"at {length}; cut at {start} or {stop}"
                )
        return replace(self, content=tuple(span for span in self.content if span[1] <= length))

    def _spans(self) -> list[Span]:
        """The content by position."""
        for span in self.content:
            whole = isinstance(span, list | tuple) and len(span) == 3
            if not whole or not type(span[0]) is type(span[1]) is int:
                raise ValueError(f"content must be given as (start, stop, tag), got {span!r:.60}")
            encode(span[2])
        return sorted(((start, stop, tag) for start, stop, tag in self.content), key=lambda s: s[0])
