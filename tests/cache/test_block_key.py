"""What makes a block key: all that keys and values depend on, in one unambiguous form."""

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.prefixes import computed, keys, new, numbers, running, served

from kvbook.cache.block_key import Identity, encode

# ---- Everything counts


def test_the_same_input_gives_the_same_keys() -> None:
    assert keys() == keys(list(range(1, 14)))
    assert [len(key) for key in keys()] == [32, 32, 32]


@pytest.mark.parametrize("what", ["adapter", "salt", "fingerprint"])
def test_each_extra_changes_every_key_of_the_chain(what: str) -> None:
    """vllm-project/vllm#3263, #8240: a key without the adapter, in one manager or the next."""
    values = ["A", "B", b"A", 65, "", b"", 0, -1, *([None] if what != "fingerprint" else [])]
    variants = [keys(**{what: value}) for value in values]  # type: ignore[arg-type]
    for place in range(3):
        assert len({variant[place] for variant in variants}) == len(values)


def test_the_extras_do_not_stand_for_one_another() -> None:
    places: list[dict[str, Any]] = [
        {"adapter": "A"}, {"salt": "A"}, {"fingerprint": "A"}, {"content": [(0, 1, "A")]}
    ]  # fmt: skip
    variants = [keys(**place) for place in places]
    assert len({tuple(variant) for variant in variants}) == 4


@pytest.mark.parametrize("what", ["adapter", "salt"])
def test_nothing_is_found_under_another_extra(what: str) -> None:
    prefix = new()
    assert [served(prefix, numbers(9), **{what: value}) for value in (None, "A", "B")] == [0, 0, 0]
    assert [served(prefix, numbers(9), **{what: value}) for value in (None, "A", "B")] == [8, 8, 8]


def test_equal_placeholders_of_another_image_are_another_block() -> None:
    """ROCm/ATOM#1358: all image tokens have one id, so a second image found the first."""
    tokens = [1, 2, 9, 9, 9, 9, 9, 8, 7, 6, 5, 4, 3]
    cat, dog = (keys(tokens, content=[(2, 7, image)]) for image in ("cat", "dog"))
    assert [a == b for a, b in zip(cat, dog, strict=True)] == [False, False, False]

    prefix = new()
    assert served(prefix, tokens, content=[(2, 7, "cat")]) == 0
    assert served(prefix, tokens, content=[(2, 7, "dog")]) == 0
    assert served(prefix, tokens) == 0
    assert served(prefix, tokens, content=[(2, 7, "cat")]) == 12


def test_an_image_changes_no_block_before_it() -> None:
    tokens = [1, 2, 3, 4, 9, 9, 9, 8, 7, 6, 5, 4, 3]
    cat, dog = (keys(tokens, content=[(4, 7, image)]) for image in ("cat", "dog"))
    assert [a == b for a, b in zip(cat, dog, strict=True)] == [True, False, False]


def test_the_same_images_in_another_order_are_another_prompt() -> None:
    tokens = [9] * 13
    one = keys(tokens, content=[(0, 2, "cat"), (4, 6, "dog")])
    other = keys(tokens, content=[(0, 2, "dog"), (4, 6, "cat")])
    moved = keys(tokens, content=[(1, 3, "cat"), (4, 6, "dog")])
    assert not set(one) & set(other)
    assert not set(one) & set(moved)
    assert one == keys(tokens, content=[(4, 6, "dog"), (0, 2, "cat")])  # listed the other way round


def test_content_of_a_block_is_where_it_is_shown() -> None:
    """Positions 2 to 8 in blocks of four are in blocks 0, 1 and 2; 9 to 11 in block 2."""
    tags = Identity(content=[(9, 12, "b"), (2, 9, "a")]).by_block(13, 4)
    a = encode(2) + encode(9) + encode("a")
    b = encode(9) + encode(12) + encode("b")
    assert tags == {0: a, 1: a, 2: a + b}


# ---- Nothing is ambiguous


def read_back(encoded: bytes) -> list[Any]:
    """The one list of parts that an encoding stands for."""
    parts: list[Any] = []
    while encoded:
        kind, length, rest = encoded[:1], int.from_bytes(encoded[1:9], "big"), encoded[9:]
        payload, encoded = rest[:length], rest[length:]
        assert len(payload) == length
        if kind == b"n":
            assert not payload
            parts.append(None)
        else:
            parts.append({
                b"s": lambda b: b.decode("utf-8", "surrogatepass"),
                b"b": lambda b: b,
                b"i": lambda b: int.from_bytes(b, "big", signed=True),
            }[kind](payload))  # fmt: skip
    return parts


LETTERS = st.sampled_from(["n", "s", "b", "i", "t", "1", "\0", "é", "\ud83d", "\ude00", "😀"])
PARTS = st.one_of(
    st.none(),
    st.lists(LETTERS, max_size=3).map("".join),
    st.binary(max_size=3),
    st.integers(),
    st.integers(-300, 300),
    st.integers(-(2**900), 2**900),
)


@given(st.lists(PARTS, max_size=4))
def test_a_list_of_parts_can_be_read_back_so_no_two_share_an_encoding(parts: list[Any]) -> None:
    again = read_back(b"".join(map(encode, parts)))
    assert [(type(part), part) for part in again] == [(type(part), part) for part in parts]


PAIRS: list[tuple[list[Any], list[Any]]] = [
    (["ab", "c"], ["a", "bc"]),
    (["ab"], ["a", "b"]),
    ([None], [""]),
    ([None], [b""]),
    ([""], [b""]),
    ([""], []),
    (["1"], [1]),
    ([b"1"], ["1"]),
    ([1], [-1]),
    ([-1], [255]),
    ([127], [-129]),
    ([128], [-128]),
    ([256], [1, 0]),
    ([0], [None]),
    ([2**64], [0]),
    ([2**800], [2**808]),
    (["\ud83d\ude00"], ["😀"]),
    (["a\x00"], ["a"]),
    (["n" + "\x00" * 8], [None]),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_inputs_that_are_easily_confused_are_not(a: list[Any], b: list[Any]) -> None:
    assert b"".join(map(encode, a)) != b"".join(map(encode, b))


def test_an_encoding_is_kind_length_payload() -> None:
    """Written out: a change of format is a decision, not an accident."""
    assert encode("é") == b"s\0\0\0\0\0\0\0\2\xc3\xa9"
    assert encode(b"ab") == b"b\0\0\0\0\0\0\0\2ab"
    assert encode(None) == b"n\0\0\0\0\0\0\0\0"
    assert encode(-2) == b"i\0\0\0\0\0\0\0\1\xfe"
    assert encode(300) == b"i\0\0\0\0\0\0\0\2\x01\x2c"


def test_a_key_is_the_digest_of_all_that_the_block_stands_for() -> None:
    """Block of two: fingerprint, block size, adapter, salt, tokens, content; then more tokens."""
    messages: list[bytes] = []

    def spy(message: bytes) -> bytes:
        messages.append(message)
        return b"K%d" % len(messages)

    prefix = new(block_size=2, fingerprint="f", digest=running(spy))
    sequence = prefix.begin([1, -2, 3, 4], Identity("a", b"s", [(1, 2, 7)]))
    messages.clear()  # those of looking for it
    prefix.commit(sequence, 4)

    def length(n: int) -> bytes:
        return n.to_bytes(8, "big")

    def words(*tokens: int) -> bytes:
        ids = [token.to_bytes(8, sys.byteorder, signed=True) for token in tokens]
        return b"t" + length(16) + b"".join(ids)

    first = (
        b"s" + length(1) + b"f" + b"i" + length(1) + b"\2" + b"s" + length(1) + b"a"
        + b"b" + length(1) + b"s" + words(1, -2)
        + b"i" + length(1) + b"\1" + b"i" + length(1) + b"\2" + b"i" + length(1) + b"\7"
    )  # fmt: skip
    assert messages == [first, first + words(3, 4)]
    assert sequence.keys == [b"K1", b"K2"]


def test_twelve_and_three_are_not_one_and_twenty_three() -> None:
    prefix = new(block_size=2)
    computed(prefix, [12, 3, 0])
    assert prefix.begin([1, 23, 0]).cached_tokens == 0
    assert prefix.begin([12, 3, 0]).cached_tokens == 2


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=3, max_size=3),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=3, max_size=3),
)
def test_different_tokens_have_different_keys(a: list[int], b: list[int]) -> None:
    assert (keys(a, block_size=3) == keys(b, block_size=3)) == (a == b)
