"""Full blocks that can be found again by the tokens that they hold.

Knows: tokens, keys and blocks of sequences. Does not know: tensors, which sequence should run
next, what a token means.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Optional

from kvbook.cache.block_key import (
    Part,
    Span,
    delimited,
    encode,
    header,
    sha256,
    tags_by_block,
    token_array,
)
from kvbook.cache.blocks import BlockPool
from kvbook.errors import OutOfBlocksError, SequenceEndedError


@dataclass(eq=False, slots=True)
class CachedBlock:
    """A full block that can be found by its key."""

    block: int
    key: bytes
    parent: Optional["CachedBlock"]  # the block before it in every sequence that holds this one
    text: bytes  # its tokens and whatever else the key stands for, beside the parent


@dataclass(eq=False, slots=True)
class CachedSequence:
    """One sequence: its tokens, its block table, and how many tokens were found in the cache."""

    tokens: "array[int]"
    blocks: list[int]  # the block table: position p lies in blocks[p // block_size]
    cached_tokens: int  # of the prompt, found when the sequence began
    written: int  # tokens whose keys and values are in the blocks
    chain: list[CachedBlock]  # the cached ones among its blocks: always the first few
    extras: bytes  # the part of the first block's text that is not in its tokens
    tags: dict[int, bytes] = field(default_factory=dict)  # block → content shown in it
    private: bool = False  # its next key belongs to other tokens: no more of it can be cached

    @property
    def new_tokens(self) -> int:
        """Tokens whose keys and values are still to be computed."""
        return len(self.tokens) - self.written

    @property
    def keys(self) -> list[bytes]:
        """Keys of its cached blocks."""
        return [cached.key for cached in self.chain]


@dataclass(slots=True)
class PrefixStats:
    """What was found. Prompts that begin again after a preemption are not counted."""

    prompts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    collisions: int = 0  # a key was found, but what it stands for was something else

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were found; 0 before the first prompt."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class PrefixCache:
    """Sequences over one pool, which share the blocks of a common beginning.

    ``fingerprint`` names the model and its weights: what they compute from the same tokens is
    not the same. ``digest`` makes a key from a message. Whatever it is, a block is used only if
    its text and its parent are those that were asked for, so a weak one costs hits, not truth.

    >>> prefix = PrefixCache(BlockPool(blocks=8, block_size=4), fingerprint="toy, seed 0")
    >>> first = prefix.begin([1, 2, 3, 4, 5, 6])
    >>> prefix.commit(first, 6)  # the keys and values of all 6 tokens are in its blocks now
    []
    >>> second = prefix.begin([1, 2, 3, 4, 9])
    >>> second.cached_tokens, second.new_tokens
    (4, 1)
    >>> first.blocks, second.blocks
    ([0, 1], [0, 2])
    """

    def __init__(
        self, pool: BlockPool, fingerprint: Part, digest: Callable[[bytes], bytes] = sha256
    ) -> None:
        self.pool, self.stats = pool, PrefixStats()
        self._extras, self._digest = encode(fingerprint) + encode(pool.block_size), digest
        self._block_bytes = pool.block_size * array("q").itemsize
        self._token_header = header(b"t", self._block_bytes)
        self._by_key: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self._live: set[CachedSequence] = set()

    @property
    def cached_blocks(self) -> int:
        """Blocks that can be found, in use or evictable."""
        return len(self._by_key)

    def begin(
        self,
        tokens: Iterable[int],
        *,
        adapter: Part = None,
        salt: Part = None,
        content: Sequence[Span] = (),
        resumed: bool = False,
    ) -> CachedSequence:
        """Start a sequence: share the blocks that hold its beginning, allocate the others.

        Finding and taking are one call, so no plan can go stale. Only full blocks are found, and
        never the whole prompt: its last token must be computed to predict the next. Takes
        O(tokens), however many blocks are cached.

        ``adapter`` names what was added to the model. ``salt`` separates tenants: nothing is
        found across salts. ``content`` names what placeholder tokens show, as
        (start, stop, tag). ``resumed`` marks a sequence that was preempted: it is not counted.

        Raises ``ValueError`` for an empty prompt, ``OutOfBlocksError`` if the pool has too few
        blocks; nothing has changed then.
        """
        text = token_array(tokens)
        if not text:
            raise ValueError("a sequence begins with at least one token, got none")
        size = self.pool.block_size
        extras = self._extras + encode(adapter) + encode(salt)
        tags = tags_by_block(content, len(text), size)
        sequence = CachedSequence(text, [], 0, 0, [], extras, tags)
        self._match(sequence)
        sequence.blocks = [cached.block for cached in sequence.chain]
        sequence.cached_tokens = sequence.written = size * len(sequence.chain)
        self._grow(sequence, len(text), sharing=sequence.blocks)
        self._live.add(sequence)
        self.stats.collisions += sequence.private
        if not resumed:
            self.stats.prompts += 1
            self.stats.prompt_tokens += len(text)
            self.stats.cached_tokens += sequence.cached_tokens
        return sequence

    def append(self, sequence: CachedSequence, tokens: Iterable[int]) -> None:
        """Add tokens at the end, and blocks where they are needed.

        Raises ``OutOfBlocksError`` if the pool has too few; nothing has changed then.
        """
        self._check_live(sequence)
        new = token_array(tokens)
        self._grow(sequence, len(sequence.tokens) + len(new), sharing=[])
        sequence.tokens.extend(new)

    def commit(self, sequence: CachedSequence, length: int) -> list[int]:
        """Note that the first ``length`` tokens are written; full blocks can be found from now on.

        If another sequence has filled a block with the same tokens before, that block takes the
        place of this one's, which is released: the two hold the same, one is enough, and later
        blocks stay connected to what can be found. Returns the places of the table where this
        happened, mostly none.
        """
        self._check_live(sequence)
        if type(length) is not int or not sequence.written <= length <= len(sequence.tokens):
            raise ValueError(
                f"{sequence.written} of {len(sequence.tokens)} tokens are written, so commit() "
                f"takes a length between the two, got {length!r}; append() tokens first"
            )
        sequence.written = length
        if sequence.private:
            return []
        chain, size = sequence.chain, self.pool.block_size
        kept: list[int] = []
        swapped: list[int] = []
        first, stop = len(chain), length // size
        full = sequence.tokens[first * size : stop * size].tobytes()
        for place in range(first, stop):
            own = sequence.blocks[place]
            key, parent, text = self._identity(sequence, full, first)
            cached = self._by_key.get(key)
            if cached is None:
                cached = CachedBlock(own, key, parent, text)
                self._by_key[key] = self._by_block[own] = cached
                kept.append(own)
            elif self.confirms(cached, parent, text):
                self.pool.share([cached.block])
                self.pool.release([own])
                sequence.blocks[place] = cached.block
                swapped.append(place)
            else:
                self.stats.collisions += 1
                sequence.private = True
                break
            chain.append(cached)
        self.pool.keep(kept, self._forget)
        return swapped

    def end(self, sequence: CachedSequence) -> None:
        """Release its blocks. Those that are full stay findable until the pool needs them."""
        self._check_live(sequence)
        self._live.remove(sequence)
        self.pool.release(sequence.blocks)

    def confirms(self, cached: CachedBlock, parent: CachedBlock | None, text: bytes) -> bool:
        """Whether a block found by its key holds what was asked for, and not a collision.

        The parent was confirmed before, and so on to the first block: the whole prefix is equal.
        """
        return cached.parent is parent and cached.text == text

    def _identity(
        self, sequence: CachedSequence, full: bytes, first: int
    ) -> tuple[bytes, CachedBlock | None, bytes]:
        """Key, parent and text of the first full block after the chain.

        ``full`` holds the tokens of full blocks, as bytes, from block ``first`` on.
        """
        place = len(sequence.chain)
        start = (place - first) * self._block_bytes
        text = self._token_header + full[start : start + self._block_bytes]
        text += sequence.tags.get(place, b"")
        if not place:
            text = sequence.extras + text
            return self._digest(text), None, text
        parent = sequence.chain[-1]
        return self._digest(delimited(b"b", parent.key) + text), parent, text

    def _match(self, sequence: CachedSequence) -> None:
        """Fill the chain with what is cached, without taking it."""
        full = sequence.tokens.tobytes()
        for _ in range((len(sequence.tokens) - 1) // self.pool.block_size):
            key, parent, text = self._identity(sequence, full, 0)
            cached = self._by_key.get(key)
            if cached is None:
                return
            if not self.confirms(cached, parent, text):
                sequence.private = True
                return
            sequence.chain.append(cached)

    def _grow(self, sequence: CachedSequence, length: int, sharing: list[int]) -> None:
        """Blocks for ``length`` tokens, the shared ones included; or raise and change nothing."""
        missing = -(-length // self.pool.block_size) - len(sequence.blocks)
        unowned = sum(not self.pool.owners(block) for block in sharing)
        room = self.pool.available - unowned  # sharing an evictable block takes it as well
        if missing > room:
            raise OutOfBlocksError(
                f"{length} tokens need {missing} more blocks, but {room} of {self.pool.blocks} "
                "are available; end another sequence first, or make a larger pool"
            )
        self.pool.share(sharing)
        if missing > 0:
            sequence.blocks += self.pool.allocate(missing)

    def _check_live(self, sequence: CachedSequence) -> None:
        if sequence not in self._live:
            raise SequenceEndedError(
                "the sequence has ended or belongs to another cache, and its blocks may hold "
                "something else by now; begin() a new one with its tokens"
            )

    def _forget(self, block: int) -> None:
        """The pool reuses a block."""
        del self._by_key[self._by_block.pop(block).key]
