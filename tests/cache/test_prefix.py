"""The prefix cache: what can be found, what never may be, and what is let go first."""

import hashlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
from oracles.prefixes import computed, keys, new, numbers, running, served

from kvbook.cache.block_key import Identity
from kvbook.cache.blocks import BlockPool
from kvbook.cache.prefix import CachedSequence, PrefixCache
from kvbook.errors import CacheFullError, OutOfBlocksError, SequenceEndedError


def counts(prefix: PrefixCache) -> tuple[int, int, int]:
    return prefix.pool.free, prefix.pool.evictable, prefix.pool.in_use


# ---- What is found


def test_only_full_blocks_are_found() -> None:
    prefix = new()
    assert served(prefix, numbers(7)) == 0
    assert prefix.cached_blocks == 1
    assert [served(prefix, numbers(n)) for n in (4, 5, 7, 8)] == [0, 4, 4, 4]


def test_the_blocks_of_a_common_beginning_are_the_same_blocks() -> None:
    prefix = new()
    first = computed(prefix, [*numbers(8), 51, 52])
    second = computed(prefix, [*numbers(8), 61, 62])
    assert (first.blocks, second.blocks) == ([0, 1, 2], [0, 1, 3])
    assert (second.cached_tokens, second.new_tokens) == (8, 0)
    assert [prefix.pool.owners(block) for block in range(4)] == [2, 2, 1, 1]


def test_nothing_is_found_before_it_is_written() -> None:
    prefix = new()
    first = prefix.begin(numbers(9))
    assert prefix.begin(numbers(9)).cached_tokens == 0
    prefix.commit(first, 7)  # a chunk of the prompt
    assert prefix.begin(numbers(9)).cached_tokens == 4
    prefix.commit(first, 9)
    assert prefix.begin(numbers(9)).cached_tokens == 8


@pytest.mark.parametrize(
    ("prompt", "found"), [(1, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8), (13, 12)]
)
def test_the_last_token_of_a_prompt_is_computed_in_any_case(prompt: int, found: int) -> None:
    """vllm-project/vllm#11186, #17999: with all of it cached, nothing was left to compute."""
    prefix = new()
    computed(prefix, numbers(13))
    sequence = prefix.begin(numbers(prompt))
    assert sequence.cached_tokens == found
    assert sequence.new_tokens == prompt - found > 0


@pytest.mark.parametrize("page", [1, 2, 3, 4, 5])
def test_what_is_found_ends_with_a_block(page: int) -> None:
    """sgl-project/sglang#5221: a match that ended inside a page split the page."""
    prefix = new(blocks=20, block_size=page)
    computed(prefix, numbers(12))
    expected = {1: 6, 2: 6, 3: 6, 4: 4, 5: 5}
    assert prefix.begin([*numbers(6), 99]).cached_tokens == expected[page]


@pytest.mark.parametrize("changed", range(12))
def test_a_changed_token_ends_the_match_at_its_block(changed: int) -> None:
    prefix = new()
    computed(prefix, [*numbers(12), 99])
    tokens = [*numbers(12), 99]
    tokens[changed] = 77
    assert prefix.begin(tokens).cached_tokens == changed // 4 * 4


def test_the_same_tokens_at_other_positions_are_not_the_same() -> None:
    prefix = new()
    computed(prefix, [*numbers(4), *numbers(4), 9])
    assert prefix.begin([*numbers(4), 9]).cached_tokens == 4  # the first block
    assert prefix.begin([0, 0, 0, 0, *numbers(4), 9]).cached_tokens == 0
    assert prefix.begin([*numbers(4), *numbers(4), *numbers(4), 9]).cached_tokens == 8


def test_generated_tokens_are_found_as_well() -> None:
    """A next turn repeats the answer."""
    prefix = new()
    sequence = computed(prefix, numbers(3))
    for token in (4, 5, 6, 7, 8):
        prefix.append(sequence, [token])
        assert sequence.new_tokens == 1
        prefix.commit(sequence, len(sequence.tokens))
    assert len(sequence.blocks) == 2
    prefix.end(sequence)
    assert prefix.begin(numbers(11)).cached_tokens == 8


def test_a_block_is_added_only_when_a_token_needs_it() -> None:
    prefix = new()
    sequence = prefix.begin(numbers(3))
    lengths = []
    for token in range(6):
        prefix.append(sequence, [token])
        lengths.append(len(sequence.blocks))
    assert lengths == [1, 2, 2, 2, 2, 3]
    prefix.append(sequence, numbers(9))
    assert len(sequence.blocks) == 5
    prefix.append(sequence, [])
    assert len(sequence.blocks) == 5


# ---- Collisions


def test_the_digest_is_sha_256() -> None:
    """Of a block of one token, written out."""
    words = [b"s", 3, b"toy", b"i", 1, b"\1", b"n", 0, b"n", 0, b"t", 8]
    message = b"".join(x if isinstance(x, bytes) else x.to_bytes(8, "big") for x in words)
    message += (5).to_bytes(8, sys.byteorder)
    assert keys([5], block_size=1) == [hashlib.sha256(message).digest()]


def test_another_prompt_with_the_same_key_is_not_used() -> None:
    prefix = new(digest=running(lambda message: b"always"))
    assert served(prefix, numbers(5)) == 0
    assert served(prefix, numbers(5, start=50)) == 0
    assert prefix.stats.collisions == 1
    assert served(prefix, numbers(5)) == 4  # the first one is still there
    assert prefix.stats.collisions == 1


@pytest.mark.parametrize(
    "changed", [{"adapter": "A"}, {"salt": "A"}, {"content": [(0, 2, "A")]}], ids=str
)
def test_extras_are_compared_and_not_only_tokens(changed: dict[str, Any]) -> None:
    prefix = new(digest=running(lambda message: b"always"))
    computed(prefix, numbers(5))
    assert prefix.begin(numbers(5), Identity(**changed)).cached_tokens == 0
    assert prefix.stats.collisions == 1


def test_the_block_before_is_compared_too() -> None:
    """The key of a block without what came before it: equal tokens are then found anywhere."""
    prefix = new(digest=running(lambda message: message[-32:]))  # its four tokens
    computed(prefix, [*numbers(4), 7, 7, 7, 7, 0])
    assert prefix.begin([*numbers(4), 7, 7, 7, 7, 0]).cached_tokens == 8
    computed(prefix, [*numbers(4, start=50), 7, 7, 7, 7, 0])
    assert prefix.stats.collisions == 1
    assert prefix.begin([*numbers(4, start=50), 7, 7, 7, 7, 0]).cached_tokens == 4


def test_a_collision_among_full_blocks_leaves_the_rest_private() -> None:
    """Nothing behind it could be found, so nothing behind it is kept."""
    prefix = new(digest=running(lambda message: b"always"))
    sequence = computed(prefix, numbers(13))  # its second block has the key of its first
    assert (prefix.cached_blocks, prefix.stats.collisions) == (1, 1)
    prefix.append(sequence, numbers(4))
    prefix.commit(sequence, 17)
    assert (prefix.cached_blocks, prefix.stats.collisions) == (1, 1)
    prefix.end(sequence)
    assert counts(prefix) == (11, 1, 0)


def test_without_the_comparison_a_weak_digest_gives_away_another_prompt() -> None:
    """The counterexample: this is what the comparison is for."""

    class Trusting(PrefixCache):
        def confirms(self, *_: object) -> bool:
            return True

    prefix = Trusting(BlockPool(4, 4), "toy", digest=running(lambda message: b"always"))
    computed(prefix, numbers(5))
    assert prefix.begin(numbers(5, start=50)).blocks[0] == 0


# ---- The same block computed twice


def test_of_two_equal_blocks_one_is_enough() -> None:
    prefix = new()
    first, second = prefix.begin(numbers(9)), prefix.begin(numbers(9))
    assert (first.blocks, second.blocks) == ([0, 1, 2], [3, 4, 5])
    assert prefix.commit(first, 9) == []
    assert prefix.commit(second, 9) == [0, 1]
    assert second.blocks == [0, 1, 5]
    assert counts(prefix) == (8, 0, 4)
    prefix.end(first)
    assert [prefix.pool.owners(block) for block in (0, 1, 5)] == [1, 1, 1]


def test_what_follows_a_doubled_block_can_be_found() -> None:
    """A prompt sent again computes its last block again; its answer is new and must be cached."""
    prefix = new()
    served(prefix, numbers(8))
    again = computed(prefix, numbers(8))
    prefix.append(again, numbers(4, start=9))
    prefix.commit(again, 12)
    prefix.end(again)
    assert prefix.cached_blocks == 3
    assert prefix.begin(numbers(13)).cached_tokens == 12


# ---- Eviction


def test_a_chain_loses_its_last_block_first() -> None:
    """llm-d/llm-d-inference-sim#704: without its head, a chain cannot be found at all."""
    prefix = new(blocks=3)
    served(prefix, numbers(12))
    served(prefix, [99])  # needs one block
    assert prefix.begin(numbers(12)).cached_tokens == 8


def test_a_common_beginning_outlives_what_hangs_on_it() -> None:
    """sgl-project/mini-sglang#124: the part that was matched kept an old time stamp."""
    prefix = new(blocks=4)
    served(prefix, [1, 2, 3, 4, *numbers(4, start=11)])  # AB CD: two blocks
    served(prefix, numbers(4, start=21))  # E: one block
    served(prefix, [1, 2, 3, 4, 5])  # AB is used again, 5 takes the fourth block
    assert prefix.cached_blocks == 3
    served(prefix, numbers(3 * 4 - 1, start=31))  # needs three blocks, and one is free
    assert prefix.begin([1, 2, 3, 4, 5]).cached_tokens == 4
    assert prefix.cached_blocks == 1 + 2  # AB, and two of the last prompt


def test_two_tails_on_one_head_go_before_the_head() -> None:
    prefix = new(blocks=4)
    first = computed(prefix, [*numbers(8), *numbers(4, start=20)])
    second = computed(prefix, [*numbers(8), *numbers(4, start=30)])
    prefix.end(first)  # the tail of the first is evictable, the head is still in use
    prefix.end(second)
    found = []
    for blocks in (1, 2, 3):
        probe = prefix.begin([99] * 4 * blocks)
        prefix.end(probe)
        found.append(prefix.cached_blocks)
    assert found == [3, 2, 1]
    assert prefix.begin([*numbers(8), 0]).cached_tokens == 4


def test_what_was_found_is_not_evicted_to_make_room_for_the_rest() -> None:
    prefix = new(blocks=4)
    served(prefix, numbers(8))  # the older two blocks, next to be evicted
    served(prefix, numbers(8, start=50))
    sequence = prefix.begin(numbers(9))
    assert (sequence.cached_tokens, len(set(sequence.blocks))) == (8, 3)
    assert prefix.cached_blocks == 3  # the tail of the other prompt made room


def test_a_plan_cannot_go_stale() -> None:
    """vllm-project/vllm#17305: tokens counted as cached were evicted before they were used."""
    prefix = new(blocks=3)
    served(prefix, numbers(9))
    sequence = prefix.begin(numbers(9))
    assert sequence.cached_tokens + sequence.new_tokens == 9
    with pytest.raises(OutOfBlocksError):
        prefix.begin([99] * 4)  # the pool has nothing left that it could take away
    assert sequence.blocks[:2] == [0, 1]
    prefix.end(sequence)
    served(prefix, [99] * 12)
    later = prefix.begin(numbers(9))
    assert (later.cached_tokens, later.new_tokens) == (0, 9)


def test_a_block_that_was_taken_from_the_pool_directly_is_not_found() -> None:
    """vllm-project/vllm#4761: it stayed in the index after it was reused."""
    prefix = new(blocks=2)
    served(prefix, numbers(5))
    prefix.pool.allocate(2)
    assert prefix.cached_blocks == 0
    with pytest.raises(OutOfBlocksError):
        prefix.begin(numbers(5))


@pytest.mark.parametrize("blocks", [1, 2])
def test_the_smallest_pools(blocks: int) -> None:
    prefix = new(blocks=blocks)
    assert served(prefix, numbers(4 * blocks)) == 0
    assert served(prefix, numbers(4 * blocks)) == 4 * (blocks - 1)
    assert counts(prefix) == (0, blocks, 0)
    assert served(prefix, numbers(4 * blocks, start=50)) == 0
    assert prefix.cached_blocks == blocks


# ---- Preemption


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9])
@pytest.mark.parametrize("pressure", [False, True])
def test_a_preempted_sequence_goes_on_as_if_nothing_had_been(length: int, pressure: bool) -> None:
    """GeeeekExplorer/nano-vllm#217: the length was stale at the edge of a block."""
    prefix = new(blocks=6)
    sequence = computed(prefix, [1, 2])
    for token in numbers(length - 2, start=3):
        prefix.append(sequence, [token])
        prefix.commit(sequence, len(sequence.tokens))
    prefix.append(sequence, [100])  # sampled, not yet through the model
    prefix.end(sequence)
    if pressure:
        served(prefix, [99] * 24)
    resumed = prefix.begin(sequence.tokens, resumed=True)
    assert resumed.tokens.tolist() == [*numbers(length), 100]
    assert resumed.cached_tokens == (0 if pressure else length // 4 * 4)
    assert resumed.cached_tokens + resumed.new_tokens == length + 1
    for token in (101, 102, 103, 104):
        prefix.commit(resumed, len(resumed.tokens))
        prefix.append(resumed, [token])
    prefix.commit(resumed, len(resumed.tokens))
    whole = [*numbers(length), 100, 101, 102, 103, 104]
    assert resumed.tokens.tolist() == whole
    assert resumed.keys == keys(whole)
    assert len(resumed.blocks) == -(-len(whole) // 4)


def test_the_hit_rate_counts_prompts_and_not_their_repetition_after_preemption() -> None:
    prefix = new()
    assert prefix.stats.hit_rate == 0.0
    served(prefix, numbers(10))
    served(prefix, numbers(10))
    served(prefix, numbers(10), resumed=True)
    stats = prefix.stats
    assert (stats.prompts, stats.prompt_tokens, stats.cached_tokens) == (2, 20, 8)
    assert stats.hit_rate == 0.4


# ---- Bad input

Call = Callable[[Any, Any, Any], object]  # of the cache and two of its sequences

# Of six blocks, three are held by ``s``: ten tokens, nine of them written. Two are evictable: what
# is left of ``e``, which has ended.
BAD: dict[str, tuple[Call, type[ValueError], str]] = {
    "no tokens": (lambda p, s, e: p.begin([]), ValueError, "at least one token, got none"),
    "a text": (lambda p, s, e: p.begin("abc"), ValueError, "got 'abc'.*encode the text"),
    "bytes": (lambda p, s, e: p.begin(b"12345678"), ValueError, "list of integers"),
    "floats": (lambda p, s, e: p.begin([1.0]), ValueError, r"got \[1.0\]"),
    "a huge token": (lambda p, s, e: p.begin([2**63]), ValueError, "at most 64 bits"),
    "one token": (lambda p, s, e: p.append(s, 5), ValueError, "list of integers.*got 5"),
    "a bad token to append": (lambda p, s, e: p.append(s, [1, None]), ValueError, "None"),
    "a prompt beyond the pool": (
        lambda p, s, e: p.begin(numbers(25)), OutOfBlocksError,
        "25 tokens need 5 more blocks, but 3 of 6 are available; end another sequence",
    ),
    "a prompt that needs what it shares": (
        lambda p, s, e: p.begin([*numbers(8, start=50), *numbers(5)]), OutOfBlocksError,
        "13 tokens need 2 more blocks, but 1 of 6",
    ),
    "growing beyond the pool": (
        lambda p, s, e: p.append(s, [0] * 15), OutOfBlocksError,
        "25 tokens need 4 more blocks, but 3 of 6",
    ),
    "an adapter that is a number with a point": (
        lambda p, s, e: p.begin([1], Identity(adapter=1.5)),
        ValueError, "got 1.5; name what it stands for",
    ),
    "a salt that is a truth": (
        lambda p, s, e: p.begin([1], Identity(salt=True)),
        ValueError, "got True",
    ),
    "content beyond the prompt": (
        lambda p, s, e: p.begin([1, 2], Identity(content=[(1, 3, "x")])), ValueError,
        "'x' covers positions 1 to 2 of 2",
    ),
    "content before the prompt": (
        lambda p, s, e: p.begin([1, 2], Identity(content=[(-1, 1, "x")])),
        ValueError, "positions -1 to 0",
    ),
    "empty content": (
        lambda p, s, e: p.begin([1, 2], Identity(content=[(1, 1, "x")])),
        ValueError, "not be empty",
    ),
    "content on content": (
        lambda p, s, e: p.begin([1, 2, 3], Identity(content=[(1, 3, "y"), (0, 2, "x")])),
        ValueError,
        "'y' covers positions 1 to 2; .*not overlap",
    ),
    "content without a tag": (
        lambda p, s, e: p.begin([1, 2], Identity(content=[(0, 1)])),
        ValueError, r"got \(0, 1\)",
    ),
    "content at half a position": (
        lambda p, s, e: p.begin([1, 2], Identity(content=[(0, 1.5, "x")])),
        ValueError, r"\(0, 1.5, 'x'\)",
    ),
    "content of no type": (
        lambda p, s, e: p.begin([1, 2], Identity(content=[(0, 1, 2.5)])),
        ValueError, "got 2.5",
    ),
    "more written than there is": (
        lambda p, s, e: p.commit(s, 11), ValueError, "9 of 10 tokens are written.*got 11; append",
    ),
    "less written than before": (lambda p, s, e: p.commit(s, 8), ValueError, "got 8"),
    "half a token written": (lambda p, s, e: p.commit(s, 9.5), ValueError, "got 9.5"),
    "ending twice": (lambda p, s, e: p.end(e), SequenceEndedError, "has ended.*begin\\(\\) a new"),
    "growing what has ended": (lambda p, s, e: p.append(e, [1]), SequenceEndedError, "has ended"),
    "writing what has ended": (lambda p, s, e: p.commit(e, 9), SequenceEndedError, "has ended"),
    "a sequence of another cache": (
        lambda p, s, e: p.end(new().begin([1])), SequenceEndedError, "belongs to another cache",
    ),
}  # fmt: skip


def everything(prefix: PrefixCache, sequence: CachedSequence) -> object:
    pool = prefix.pool
    owners = [pool.owners(block) for block in range(pool.blocks)]
    own = (sequence.tokens.tolist(), list(sequence.blocks), sequence.written, sequence.keys)
    return counts(prefix), owners, prefix.cached_blocks, own, repr(prefix.stats)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_call_says_why_and_changes_nothing(name: str) -> None:
    call, error, message = BAD[name]
    prefix = new(blocks=6)
    ended = computed(prefix, numbers(8, start=50))
    sequence = computed(prefix, numbers(9))
    prefix.append(sequence, [10])
    prefix.end(ended)
    before = everything(prefix, sequence)
    with pytest.raises(error, match=message):
        call(prefix, sequence, ended)
    assert everything(prefix, sequence) == before
    assert prefix.pool.allocate(3) == [5, 1, 0]  # free, then evictable, in the order they had


def test_one_token_and_one_block_are_not_spoken_of_as_many() -> None:
    prefix = new(blocks=1)
    prefix.begin([1])
    with pytest.raises(OutOfBlocksError, match=r"^1 token needs 1 more block, but 0 of 1 are"):
        prefix.begin([2])


@pytest.mark.parametrize("fingerprint", [1.5, True, ("a", "b"), []])
def test_a_fingerprint_is_a_name(fingerprint: object) -> None:
    with pytest.raises(ValueError, match="string, bytes, an integer or None"):
        new(fingerprint=fingerprint)


def test_an_ended_sequence_is_named() -> None:
    assert issubclass(SequenceEndedError, ValueError)
    assert issubclass(OutOfBlocksError, CacheFullError)
