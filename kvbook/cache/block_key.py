"""What identifies the content of a full block: an encoding that is never the same for two inputs.

Knows: bytes. Does not know: blocks, owners, what is cached.

The keys and values of a token depend on all tokens up to it and on everything else that shaped
them: the weights, an adapter, an image in place of placeholder tokens. So a block's key is a digest
of the key of the block before it and of the block's own text. What holds for a whole sequence
stands in the text of its first block, and reaches every later key through the chain.

Every part is written as kind, length, payload. Therefore a list of parts can be read back in one
way only: ("ab", "c") is not ("a", "bc"), ``None`` is not "", and 1 is not "1".
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence

Part = str | bytes | int | None
Span = tuple[int, int, Part]  # positions start … stop-1 show the content named by the tag


def sha256(message: bytes) -> bytes:
    """The digest of block keys: no two messages with the same one are known."""
    return hashlib.sha256(message).digest()


def token_array(tokens: Iterable[int]) -> "array[int]":
    """Token ids as 64-bit integers. ``ValueError`` if they are anything else.

    Negative ids are allowed: some tokenizers use them for placeholders.
    """
    try:
        if isinstance(tokens, bytes | bytearray):  # array() would read raw memory from it
            raise TypeError("bytes are no list of integers")
        return array("q", tokens)
    except (TypeError, OverflowError) as error:
        raise ValueError(
            f"tokens must be a list of integers of at most 64 bits, got {tokens!r:.60} ({error}); "
            "encode the text with a tokenizer first"
        ) from error


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
        f"a part of a block key must be a string, bytes, an integer or None, got {part!r}; "
        "name what it stands for, or take a digest of it"
    )


def tags_by_block(content: Sequence[Span], tokens: int, block_size: int) -> dict[int, bytes]:
    """For each block that shows part of some content: which, and at what positions.

    Raises ``ValueError`` for spans outside the ``tokens`` positions, and for overlapping ones.
    """
    for span in content:
        if len(span) != 3 or type(span[0]) is not int or type(span[1]) is not int:
            raise ValueError(f"content must be given as (start, stop, tag), got {span!r}")
    found: dict[int, bytes] = {}
    end = 0
    for start, stop, tag in sorted(content, key=lambda span: span[0]):
        if not end <= start < stop <= tokens:
            raise ValueError(
                f"content {tag!r} covers positions {start} to {stop - 1} of {tokens}; spans must "
                "not be empty, not overlap, and end within the prompt"
            )
        end = stop
        text = encode(start) + encode(stop) + encode(tag)
        for block in range(start // block_size, (stop - 1) // block_size + 1):
            found[block] = found.get(block, b"") + text
    return found
