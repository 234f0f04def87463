"""The prefix cache through any order of operations, beside a model that knows nothing of keys.

Once with SHA-256, where the model says exactly what is found, and with three digests so weak that
different blocks share a key all the time: then less is found, but never anything wrong.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracles.prefixes import running
from oracles.schedules import SCHEDULES

from kvbook.cache.block_key import Identity
from kvbook.cache.blocks import BlockPool
from kvbook.cache.prefix import NO_BLOCK, CachedSequence, PrefixCache
from kvbook.errors import OutOfBlocksError, SequenceEndedError

Span = tuple[int, int, str]
Prefix = tuple[Any, Any, tuple[tuple[int, Span | None], ...]]


@dataclass
class Request:
    """What a client asks for, as it was given."""

    tokens: list[int]
    adapter: str | None
    salt: str | None
    image: Span | None

    def identity(self) -> Identity:
        return Identity(self.adapter, self.salt, [self.image] if self.image else [])

    def prefix(self, length: int) -> Prefix:
        """All that the keys and values of position ``length - 1`` depend on."""
        image = self.image
        items = [
            (token, image if image and image[0] <= p < image[1] else None)
            for p, token in enumerate(self.tokens[:length])
        ]
        return self.adapter, self.salt, tuple(items)


def request(text: str, length: int, adapter: Any, salt: Any, image: Span | None) -> Request:
    tokens = [int(letter) for letter in text[:length]]
    return Request(tokens, adapter, salt, image if image and image[1] <= length else None)


# Few texts with common beginnings, so that there is much to find.
REQUESTS = st.builds(
    request,
    st.sampled_from(["000000000", "000001111", "000011111", "110000000"]),
    st.sampled_from([9, 8, 7, 6, 5, 4, 3, 2, 1]),
    st.sampled_from([None, None, None, None, "a"]),
    st.sampled_from([None, None, None, None, ""]),
    st.sampled_from([None, None, None, None, (1, 3, "x"), (1, 3, "y")]),
)


def everything(cache: PrefixCache) -> object:
    pool = cache.pool
    owners = [pool.owners(block) for block in range(pool.blocks)]
    return owners, list(pool._free), list(pool._evictable), dict(cache._by_key), repr(cache.stats)


class CacheAndModel(RuleBasedStateMachine):
    """Prefixes, written out, in a dict; and a list of those that could be evicted.

    ``memory`` stands for the tensors: a slot holds all that the keys and values of its position
    depend on, the weights included, which change whenever the index is emptied. What a sequence
    reads must be its own prefix under the weights that it began with, whatever the digest.
    """

    digest = staticmethod(hashlib.sha256)
    exact = True  # the model knows what is found; with a weak digest, less is

    @initialize(blocks=st.sampled_from([9, 6, 4, 2, 1]), size=st.sampled_from([2, 1, 3]))
    def start(self, blocks: int, size: int) -> None:
        self.size = size
        self.cache = PrefixCache(BlockPool(blocks, size), "toy", self.digest)
        self.memory: dict[tuple[int, int], tuple[int, Prefix]] = {}
        self.live: list[tuple[CachedSequence, Request]] = []
        self.weights = 0
        self.began: dict[CachedSequence, int] = {}  # with which weights
        self.hidden: dict[CachedSequence, list[tuple[int, Prefix]]] = {}  # its once cached blocks
        self.owners: dict[tuple[int, Prefix], int] = {}  # of those blocks
        self.free = blocks
        self.cached: dict[Prefix, int] = {}  # a prefix that ends with a block → its owners
        self.evictable: list[Prefix] = []  # longest without an owner first
        self.stats = [0, 0, 0]

    # ---- The model

    def _found(self, request: Request) -> list[Prefix]:
        found = []
        for end in range(self.size, len(request.tokens), self.size):
            if request.prefix(end) not in self.cached:
                break
            found.append(request.prefix(end))
        return found

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def _allocated(self, n: int) -> None:
        evicted = max(0, n - self.free)
        for prefix in self.evictable[:evicted]:
            del self.cached[prefix]
        del self.evictable[:evicted]
        self.free -= n - evicted

    def _taken(self, prefix: Prefix) -> None:
        if prefix in self.evictable:
            self.evictable.remove(prefix)
        self.cached[prefix] += 1

    # ---- What happens

    @rule(request=REQUESTS, resumed=st.sampled_from([False, False, True]))
    def begin(self, request: Request, resumed: bool) -> None:
        found = self._found(request)
        missing = self._blocks_for(len(request.tokens)) - len(found)
        room = self.free + len(self.evictable) - len(set(found) & set(self.evictable))
        before = everything(self.cache)
        try:
            sequence = self.cache.begin(request.tokens, request.identity(), resumed=resumed)
        except OutOfBlocksError:
            assert missing > room or not self.exact
            assert everything(self.cache) == before
            return
        assert sequence.cached_tokens % self.size == 0
        assert sequence.cached_tokens + sequence.new_tokens == len(request.tokens)
        assert sequence.new_tokens > 0
        assert len(sequence.blocks) == self._blocks_for(len(request.tokens))
        if self.exact:
            assert missing <= room
            assert sequence.cached_tokens == len(found) * self.size
            for prefix in found:
                self._taken(prefix)
            self._allocated(missing)
        if not resumed:
            counted = [1, len(request.tokens), sequence.cached_tokens]
            self.stats = [a + b for a, b in zip(self.stats, counted, strict=True)]
        self.live.append((sequence, request))
        self.began[sequence] = self.weights

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.sampled_from([[0], [1], [0, 0], [1, 1, 1], []]))
    def append(self, data: st.DataObject, tokens: list[int]) -> None:
        sequence, request = data.draw(st.sampled_from(self.live))
        missing = self._blocks_for(len(request.tokens) + len(tokens)) - len(sequence.blocks)
        before = everything(self.cache)
        if missing > self.cache.pool.available:
            with pytest.raises(OutOfBlocksError):
                self.cache.append(sequence, tokens)
            assert everything(self.cache) == before
            return
        self.cache.append(sequence, tokens)
        request.tokens += tokens
        if self.exact:
            self._allocated(missing)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), behind=st.sampled_from([0, 0, 1, 3]))
    def compute(self, data: st.DataObject, behind: int) -> None:
        """A forward pass over the new tokens, all but the last few, and the note about it."""
        sequence, request = data.draw(st.sampled_from(self.live))
        self._compute(sequence, request, max(sequence.written, len(request.tokens) - behind))

    def _compute(self, sequence: CachedSequence, request: Request, length: int) -> None:
        done = sequence.written
        for p in range(done, length):
            block = sequence.blocks[p // self.size]
            assert self.cache.pool.writable(block), "a block that others read is written to"
            self.memory[block, p % self.size] = self.began[sequence], request.prefix(p + 1)
        before = list(sequence.blocks)
        swapped = self.cache.commit(sequence, length)
        assert swapped == [i for i, b in enumerate(before) if sequence.blocks[i] != b]
        if sequence in self.hidden:
            assert swapped == []
            return
        if not self.exact:
            return
        doubled = []
        for place in range(done // self.size, length // self.size):
            prefix = request.prefix((place + 1) * self.size)
            if prefix in self.cached:
                doubled.append(place)
                self._taken(prefix)
                self.free += 1
            else:
                self.cached[prefix] = 1
        assert swapped == doubled

    @precondition(lambda self: self.live)
    @rule(data=st.data(), drafts=st.sampled_from([1, 2, 3, 9, 0]))
    def retract(self, data: st.DataObject, drafts: int) -> None:
        """The last tokens are taken back, as far as they are not written."""
        sequence, request = data.draw(st.sampled_from(self.live))
        length = max(1, sequence.written, len(request.tokens) - drafts)
        before = everything(self.cache)
        image = request.image
        if image and image[0] < length < image[1]:
            with pytest.raises(ValueError, match="cannot be cut"):
                self.cache.retract(sequence, length)
            assert everything(self.cache) == before
            return
        blocks = len(sequence.blocks)
        self.cache.retract(sequence, length)
        del request.tokens[length:]
        request.image = image if image and image[1] <= length else None
        self.free += blocks - self._blocks_for(length)
        assert len(sequence.blocks) == self._blocks_for(length)

    @rule()
    def clear(self) -> None:
        """The weights change."""
        self.cache.clear()
        for sequence, request in self.live:
            if sequence not in self.hidden:
                ends = range(self.size, sequence.written + 1, self.size)
                self.hidden[sequence] = [(self.weights, request.prefix(end)) for end in ends]
        self.owners |= {(self.weights, prefix): n for prefix, n in self.cached.items() if n}
        self.free += len(self.evictable)
        self.cached, self.evictable = {}, []
        self.weights += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data(), again=st.booleans())
    def end(self, data: st.DataObject, again: bool) -> None:
        index = data.draw(st.integers(0, len(self.live) - 1))
        request = self._end(index)
        if again:  # preempted, and resumed at once
            self.begin(request, resumed=True)

    def _end(self, index: int) -> Request:
        sequence, request = self.live.pop(index)
        blocks, hidden = len(sequence.blocks), self.hidden.pop(sequence, None)
        self.cache.end(sequence)
        assert (sequence.blocks, sequence.keys) == ([], [])
        with pytest.raises(SequenceEndedError):
            self.cache.append(sequence, [1])
        if self.exact and hidden is not None:
            self.free += blocks - len(hidden)
            for block in hidden:
                self.owners[block] -= 1
                self.free += not self.owners[block]
        elif self.exact:
            full = sequence.written // self.size
            self.free += blocks - full
            for place in reversed(range(full)):
                prefix = request.prefix((place + 1) * self.size)
                self.cached[prefix] -= 1
                if not self.cached[prefix]:
                    self.evictable.append(prefix)
        return request

    @rule(request=REQUESTS)
    def serve(self, request: Request) -> None:
        """From begin to end at once."""
        live = len(self.live)
        self.begin(request, resumed=False)
        if len(self.live) > live:
            self._compute(*self.live[-1], len(request.tokens))
            self._end(live)

    # ---- What holds at all times

    @invariant()
    def every_sequence_reads_its_own_prefix(self) -> None:
        for sequence, request in self.live:
            assert sequence.tokens.tolist() == request.tokens
            for p in range(sequence.written):
                slot = sequence.blocks[p // self.size], p % self.size
                assert self.memory[slot] == (self.began[sequence], request.prefix(p + 1))

    @invariant()
    def the_pool_adds_up(self) -> None:
        pool = self.cache.pool
        owners = [0] * pool.blocks
        for sequence, _ in self.live:
            assert len(set(sequence.blocks)) == len(sequence.blocks)
            for block in sequence.blocks:
                owners[block] += 1
        assert [pool.owners(block) for block in range(pool.blocks)] == owners
        assert pool.free + pool.evictable + pool.in_use == pool.blocks
        assert pool.in_use == sum(n > 0 for n in owners)
        if self.exact:
            assert (pool.free, pool.evictable) == (self.free, len(self.evictable))
            assert self.cache.cached_blocks == len(self.cached)

    @invariant()
    def no_block_is_found_without_the_one_before_it(self) -> None:
        by_key, parent = self.cache._by_key, self.cache._parent
        found = set(by_key.values())
        assert len(found) == len(by_key)
        assert all(parent[block] in found | {NO_BLOCK} for block in found)
        assert found == set(self.cache.pool._kept)
        assert all(sequence.keys == [] for sequence in self.hidden)

    @invariant()
    def only_prompts_are_counted(self) -> None:
        stats = self.cache.stats
        assert [stats.prompts, stats.prompt_tokens, stats.cached_tokens] == self.stats
        assert not self.exact or stats.collisions == 0


def sha256(message: bytes) -> bytes:
    return hashlib.sha256(message).digest()


class WithOneByte(CacheAndModel):
    digest = staticmethod(running(lambda message: sha256(message)[:1]))
    exact = False


class WithFourKeys(CacheAndModel):
    digest = staticmethod(running(lambda message: bytes([sha256(message)[0] % 4])))
    exact = False


class WithOneKey(CacheAndModel):
    digest = staticmethod(running(lambda message: b""))
    exact = False


TestCacheAndModel = CacheAndModel.TestCase
TestWithOneByte = WithOneByte.TestCase
TestWithFourKeys = WithFourKeys.TestCase
TestWithOneKey = WithOneKey.TestCase
TestCacheAndModel.settings = SCHEDULES
TestWithOneByte.settings = SCHEDULES
TestWithFourKeys.settings = SCHEDULES
TestWithOneKey.settings = SCHEDULES
