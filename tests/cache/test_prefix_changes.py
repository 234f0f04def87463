"""A prefix cache whose tokens are taken back, whose index is emptied, and what it is told."""

import copy
import hashlib
import pickle
import re
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from oracles.prefixes import computed, keys, new, numbers, running, served

from kvbook.cache.block_key import Identity, encode, token_array
from kvbook.cache.blocks import BlockPool
from kvbook.cache.prefix import PrefixCache
from kvbook.errors import OutOfBlocksError, SequenceEndedError


def counts(prefix: PrefixCache) -> tuple[int, int, int]:
    return prefix.pool.free, prefix.pool.evictable, prefix.pool.in_use


# ---- A sequence and its blocks


def test_a_sequence_names_its_pool_its_blocks_and_its_identity() -> None:
    prefix = new()
    sequence = prefix.begin(numbers(5), Identity(salt="A"))
    assert sequence.pool is prefix.pool
    assert sequence.identity == Identity(salt="A")
    assert prefix.begin([1]).identity == Identity()


def test_a_sequence_that_has_ended_names_no_blocks() -> None:
    prefix = new()
    sequence = computed(prefix, numbers(9))
    table = sequence.blocks
    prefix.end(sequence)
    assert table == sequence.blocks == sequence.keys == []
    assert sequence.tokens.tolist() == numbers(9)  # to begin with again


# ---- Taking back


@pytest.mark.parametrize(
    ("length", "blocks"), [(6, 2), (7, 2), (8, 2), (9, 3), (12, 3), (13, 4), (14, 4)]
)
def test_tokens_that_are_not_written_can_be_taken_back(length: int, blocks: int) -> None:
    """Six tokens are written, eight drafted. The block of the sixth and seventh stays."""
    prefix = new()
    sequence = computed(prefix, numbers(6))
    prefix.append(sequence, numbers(8, start=50))
    table = list(sequence.blocks)
    prefix.retract(sequence, length)
    assert sequence.tokens.tolist() == [*numbers(6), *numbers(length - 6, start=50)]
    assert sequence.blocks == table[:blocks]
    assert counts(prefix) == (12 - blocks, 0, blocks)
    assert (sequence.written, sequence.new_tokens) == (6, length - 6)


def test_after_a_rejection_it_goes_on_as_if_nothing_had_been_drafted() -> None:
    prefix = new()
    sequence = computed(prefix, numbers(6))
    prefix.append(sequence, [91, 92, 93, 94])
    prefix.commit(sequence, 7)  # one draft was right
    prefix.retract(sequence, 7)
    prefix.append(sequence, [8, 9])
    prefix.commit(sequence, 9)
    assert sequence.keys == keys([*numbers(6), 91, 8, 9])
    assert prefix.begin([*numbers(6), 91, 8, 0]).cached_tokens == 8
    assert prefix.begin([*numbers(6), 91, 92, 0]).cached_tokens == 4  # never written


def test_what_is_written_cannot_be_taken_back() -> None:
    """Others may read it by now, or will."""
    prefix = new()
    sequence = computed(prefix, numbers(6))
    prefix.append(sequence, [7, 8])
    for length in (5, 0, -1, 9, True, 7.0, None, "7", np.int64(7), float("nan"), 10**30):
        before = (list(sequence.blocks), sequence.tokens.tolist(), counts(prefix))
        message = f"6 of 8 tokens .* retract.. takes .* got {re.escape(repr(length))}"
        with pytest.raises(ValueError, match=message):
            prefix.retract(sequence, length)  # type: ignore[arg-type]
        assert (list(sequence.blocks), sequence.tokens.tolist(), counts(prefix)) == before


def test_a_prompt_that_nothing_was_computed_of_can_be_taken_back_whole() -> None:
    prefix = new()
    sequence = prefix.begin(numbers(9))
    prefix.retract(sequence, 0)
    assert (sequence.blocks, counts(prefix)) == ([], (12, 0, 0))
    prefix.append(sequence, numbers(5, start=50))
    prefix.commit(sequence, 5)
    assert sequence.keys == keys(numbers(5, start=50))


def test_content_goes_with_its_tokens() -> None:
    """Placeholders that are taken back and ordinary tokens of the same ids are not the same."""
    prefix = new(block_size=3)
    picture = Identity(content=[(0, 2, "cat"), (5, 7, "dog")])
    sequence = prefix.begin([9] * 8, picture)
    prefix.commit(sequence, 4)
    prefix.retract(sequence, 5)
    assert sequence.identity == Identity(content=[(0, 2, "cat")])
    prefix.append(sequence, [9] * 4)
    prefix.commit(sequence, 9)
    assert sequence.keys == keys([9] * 9, block_size=3, content=[(0, 2, "cat")])
    assert prefix.begin([9] * 8, picture).cached_tokens == 3  # the block with the cat


def test_a_part_of_some_content_cannot_be_taken_back() -> None:
    """Nobody has named what half a picture shows."""
    prefix = new()
    sequence = prefix.begin([9] * 10, Identity(content=[(3, 7, "dog")]))
    prefix.commit(sequence, 2)
    before = (list(sequence.blocks), sequence.tokens.tolist(), counts(prefix), sequence.identity)
    for length in (4, 5, 6):
        message = f"'dog' covers positions 3 to 6 and cannot be cut at {length}; cut at 3 or 7"
        with pytest.raises(ValueError, match=message):
            prefix.retract(sequence, length)
    after = (list(sequence.blocks), sequence.tokens.tolist(), counts(prefix), sequence.identity)
    assert after == before
    prefix.retract(sequence, 7)
    assert sequence.identity == Identity(content=[(3, 7, "dog")])
    prefix.retract(sequence, 3)
    assert sequence.identity == Identity()


# ---- Emptying the index


def test_after_clearing_nothing_is_found() -> None:
    """InternLM/lmdeploy#4917: the weights changed, the prefix stayed."""
    prefix = new()
    served(prefix, numbers(9))
    prefix.clear()
    assert (prefix.cached_blocks, counts(prefix)) == (0, (12, 0, 0))
    assert [served(prefix, numbers(9)) for _ in range(2)] == [0, 8]


def test_what_is_under_way_is_finished_alone() -> None:
    """Its first blocks come from the old weights: nobody may find them, or what follows them."""
    prefix = new()
    first, second = computed(prefix, numbers(9)), computed(prefix, numbers(9))
    served(prefix, numbers(9, start=50))
    assert counts(prefix) == (6, 2, 4)
    prefix.clear()
    assert counts(prefix) == (8, 0, 4)
    assert (first.keys, second.keys) == ([], [])
    assert first.blocks[:2] == second.blocks[:2]
    prefix.append(first, numbers(4, start=10))
    assert prefix.commit(first, 13) == []
    assert prefix.cached_blocks == 0
    later = computed(prefix, numbers(13))
    assert later.cached_tokens == 0
    assert not set(later.blocks) & {*first.blocks, *second.blocks}
    prefix.end(first)
    assert counts(prefix) == (12 - 4 - 3, 0, 4 + 3)  # two of its blocks are still the second's
    prefix.end(second)
    prefix.end(later)
    assert counts(prefix) == (9, 3, 0)


def test_clearing_leaves_another_index_over_the_same_pool_alone() -> None:
    pool = BlockPool(12, 4)
    one, other = PrefixCache(pool, "one"), PrefixCache(pool, "other")
    served(one, numbers(5))
    served(other, numbers(5))
    one.clear()
    assert (one.cached_blocks, other.cached_blocks, pool.evictable) == (0, 1, 1)
    assert (served(one, numbers(5)), served(other, numbers(5))) == (0, 4)


def test_clearing_nothing_and_twice() -> None:
    prefix = new()
    prefix.clear()
    served(prefix, numbers(5))
    prefix.clear()
    prefix.clear()
    assert counts(prefix) == (12, 0, 0)


def test_a_digest_that_fails_midway_leaves_nothing_half_done() -> None:
    """What was noted before it failed is found, evicted and forgotten as ever."""
    calls = []

    def failing(message: bytes) -> bytes:
        calls.append(message)
        if len(calls) == 5:  # the empty one, one for looking, and then two blocks
            raise KeyboardInterrupt
        return message[-32:]

    prefix = new(blocks=4, digest=running(failing))
    sequence = prefix.begin(numbers(12))
    with pytest.raises(KeyboardInterrupt):
        prefix.commit(sequence, 12)
    assert prefix.cached_blocks == 2
    prefix.commit(sequence, 12)
    assert prefix.cached_blocks == 3
    prefix.end(sequence)
    assert counts(prefix) == (1, 3, 0)
    served(prefix, numbers(16, start=50))
    assert prefix.cached_blocks == 4


# ---- The running digest


def test_a_token_at_a_time_each_block_is_digested_once() -> None:
    """A long text costs as much per block as a short one: 9 + 32 bytes of each block of four."""
    taken: list[int] = []

    class Counting:
        def __init__(self) -> None:
            self.sha256 = hashlib.sha256()

        def update(self, text: bytes) -> None:
            taken.append(len(text))
            self.sha256.update(text)

        def digest(self) -> bytes:
            return self.sha256.digest()

    prefix = new(digest=Counting)
    sequence = computed(prefix, [1])
    taken.clear()
    for token in numbers(40, start=2):
        prefix.append(sequence, [token])
        prefix.commit(sequence, len(sequence.tokens))
    assert taken[1:] == [9 + 32] * 9
    assert sequence.keys == keys(numbers(41))


def test_a_draft_that_was_taken_back_is_in_no_key() -> None:
    prefix = new()
    sequence = computed(prefix, numbers(5))
    prefix.append(sequence, [91, 92, 93, 94])
    prefix.retract(sequence, 5)
    prefix.append(sequence, numbers(8, start=6))
    prefix.commit(sequence, 13)
    assert sequence.keys == keys(numbers(13))


def test_who_looks_at_keys_and_breaks_off_changes_none() -> None:
    prefix = new()
    sequence = prefix.begin(numbers(13))
    next(prefix.keyed(sequence, 0, 3))
    list(prefix.keyed(sequence, 0, 2))
    prefix.commit(sequence, 4)
    next(prefix.keyed(sequence, 1, 3))
    prefix.commit(sequence, 13)
    assert sequence.keys == keys(numbers(13))
    given = sequence.keys
    given.clear()  # a list of its own
    assert sequence.keys == keys(numbers(13))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_goes_on_alone(copied: Callable[[Any], Any]) -> None:
    prefix = new()
    sequence = computed(prefix, numbers(6))
    other, twin = copied((prefix, sequence))
    for cache, one in ((prefix, sequence), (other, twin)):
        cache.append(one, numbers(7, start=7))
        assert cache.commit(one, 13) == []
        assert one.keys == keys(numbers(13))
        assert cache.begin(numbers(13)).cached_tokens == 12


# ---- Tokens

EXACT: list[Any] = [
    [1, 2, 3], (1, 2, 3), range(1, 4), array("q", [1, 2, 3]), array("B", [1, 2, 3]),
    iter([1, 2, 3]), np.array([1, 2, 3]), np.array([1, 2, 3], dtype=np.uint8),
    np.arange(6).reshape(3, 2)[:, 1] // 2 + 1, [np.int64(1), 2, torch.tensor(3)],
    torch.tensor([1, 2, 3]), torch.tensor([1, 2, 3], dtype=torch.int32),
    torch.tensor([[1, 9], [2, 9], [3, 9]])[:, 0],
]  # fmt: skip


@pytest.mark.parametrize("tokens", EXACT, ids=lambda x: type(x).__name__)
def test_tokens_are_any_list_of_integers(tokens: Any) -> None:
    assert token_array(tokens) == array("q", [1, 2, 3])


WRONG: list[Any] = [
    None, True, 5, -1, float("nan"), "abc", b"12345678", bytearray(b"12345678"), bytearray(16),
    memoryview(b"12345678"), memoryview(array("q", [1, 2])), {1, 2}, frozenset([1]), {1: 2},
    [1.0], [None], ["1"], [[1, 2]], [2**63], [-(2**63) - 1], [10**30], [float("nan")],
    np.int64(5), np.array(5), np.array([1.0]), np.array([True]), np.array([[1, 2]]),
    np.array([[1], [2]]), np.array(["a"]), np.array([2**63], dtype=np.uint64), array("d", [1.0]),
    torch.tensor(5), torch.tensor([1.0]), torch.tensor([True]), torch.tensor([[1], [2]]),
    [torch.tensor(1.0)],
]  # fmt: skip


@pytest.mark.parametrize("tokens", WRONG, ids=lambda x: type(x).__name__)
def test_anything_else_is_refused_and_quoted(tokens: Any) -> None:
    prefix = new()
    sequence = computed(prefix, numbers(3))
    message = f"list of integers .*got {re.escape(repr(tokens)[:60])}"
    for call in (prefix.begin, lambda given: prefix.append(sequence, given)):
        with pytest.raises(ValueError, match=message):
            call(tokens)
    assert (sequence.tokens.tolist(), counts(prefix)) == (numbers(3), (11, 0, 1))


# ---- Identity


def test_an_identity_is_what_it_was_when_it_was_made() -> None:
    content = [(2, 3, "b"), (0, 1, "a")]
    identity = Identity("A", 5, content)
    content.append((4, 5, "c"))
    assert identity.content == ((0, 1, "a"), (2, 3, "b"))
    assert identity == Identity("A", 5, ((0, 1, "a"), (2, 3, "b")))
    assert hash(identity) == hash(Identity("A", 5, [[2, 3, "b"], [0, 1, "a"]]))  # type: ignore
    with pytest.raises(AttributeError):
        identity.salt = "B"  # type: ignore[misc]


PARTS: list[Any] = [True, 1.5, float("nan"), [1], ("a",), bytearray(b"a"), np.int64(5), object()]


@pytest.mark.parametrize("part", PARTS, ids=lambda x: f"{x!r:.20}")
def test_parts_are_names(part: Any) -> None:
    makers: list[Callable[[], object]] = [
        lambda: encode(part),
        lambda: Identity(adapter=part),
        lambda: Identity(salt=part),
        lambda: Identity(content=[(0, 1, part)]),
        lambda: new(fingerprint=part),
    ]
    for make in makers:
        with pytest.raises(ValueError, match=f"or None, got {re.escape(repr(part)[:60])}"):
            make()


CONTENT: list[Any] = [
    None, 5, True, "ab", b"ab", {(0, 1, "a")}, [5], ["abc"], [None], [(0, 1)], [(0, 1, "a", "b")],
    [(True, 2, "a")], [(0, True, "a")], [(0.0, 1, "a")], [(0, 1.0, "a")], [(np.int64(0), 1, "a")],
    [(None, 1, "a")], [(1, 1, "a")], [(2, 1, "a")], [(-1, 1, "a")], [(0, 2, "a"), (1, 3, "b")],
]  # fmt: skip


@pytest.mark.parametrize("content", CONTENT, ids=repr)
def test_content_is_a_list_of_spans(content: Any) -> None:
    with pytest.raises(ValueError, match=r"^content .*(got|covers)"):
        Identity(content=content)


@pytest.mark.parametrize("identity", ["A", None, 5, {"salt": "A"}, Identity, ("A",)], ids=repr)
def test_an_identity_is_an_object(identity: Any) -> None:
    prefix = new()
    with pytest.raises(ValueError, match="an Identity.*got " + re.escape(repr(identity)[:60])):
        prefix.begin([1], identity)
    with pytest.raises(ValueError, match="resumed must be True or False, got 1"):
        prefix.begin([1], resumed=1)  # type: ignore[arg-type]
    assert (prefix.stats.prompts, counts(prefix)) == (0, (12, 0, 0))


# ---- What else it is given


@pytest.mark.parametrize("sequence", [None, 5, [1], "a", array("q", [1]), {}], ids=repr)
def test_a_sequence_is_what_begin_returns(sequence: Any) -> None:
    prefix = new()
    for call in (
        lambda: prefix.append(sequence, [1]),
        lambda: prefix.commit(sequence, 1),
        lambda: prefix.retract(sequence, 1),
        lambda: prefix.end(sequence),
    ):
        message = r"what begin\(\) returns, got " + re.escape(repr(sequence))
        with pytest.raises(ValueError, match=message):
            call()


def test_a_sequence_that_has_ended_is_refused_everywhere() -> None:
    prefix = new()
    sequence = computed(prefix, numbers(5))
    prefix.end(sequence)
    with pytest.raises(SequenceEndedError):
        prefix.retract(sequence, 5)
    with pytest.raises(SequenceEndedError):
        new().retract(prefix.begin([1]), 0)


@pytest.mark.parametrize("length", [None, True, -1, 3.0, float("nan"), "3", np.int64(3), 10**30])
def test_what_is_committed_is_a_number_of_tokens(length: Any) -> None:
    prefix = new()
    sequence = prefix.begin(numbers(5))
    with pytest.raises(ValueError, match=f"commit.. takes .* got {re.escape(repr(length))}"):
        prefix.commit(sequence, length)
    assert sequence.written == 0


@pytest.mark.parametrize("pool", [None, 5, 12.0, "pool", BlockPool, [1]], ids=repr)
def test_a_pool_is_a_block_pool(pool: Any) -> None:
    with pytest.raises(ValueError, match="must be a BlockPool, got " + re.escape(repr(pool))):
        PrefixCache(pool, "toy")


NO_DIGESTS: list[Any] = [
    None, 5, "sha256", hash, hashlib.sha256(), hashlib.shake_128, lambda message: b"key",
    dict, running(lambda message: "text"),  # type: ignore[arg-type, return-value]
]  # fmt: skip


@pytest.mark.parametrize("digest", NO_DIGESTS, ids=lambda x: f"{x!r:.20}")
def test_a_digest_is_one_that_runs(digest: Any) -> None:
    with pytest.raises(ValueError, match=r"must start a running digest, as hashlib.sha256.*got "):
        new(digest=digest)


def test_a_prompt_longer_than_any_pool() -> None:
    prefix = new()
    with pytest.raises(OutOfBlocksError, match="1000000 tokens need 250000 more blocks"):
        prefix.begin(range(1_000_000))
    assert counts(prefix) == (12, 0, 0)
